"""The worker processes of this host: start, watch, tell, kill, reap.

Each worker has a control socket (frames), a page of progress and an arena, all made here, and a log
file. It is watched in two ways: every few milliseconds by a look at /proc/PID/stat, which shows a
dying process before the kernel has freed its memory, and by a pidfd, which is readable when it can
be reaped. Its process group is killed before it is reaped, while its number is certainly its own.
The end is told when everything that it had sent has been taken in: what it said last may be why.

Whatever happens becomes an event of elastic/membership/commands.py; nothing is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.arena import create_fd
from ckpt.frames import FrameChannel, FrameError
from elastic.agent import process
from elastic.agent.forks import ForkServer
from elastic.agent.progress import ProgressPage
from elastic.membership import commands as c

LOOK_EVERY_S = 0.004
TIDY_EVERY_S = 0.5
LAST_WORDS_S = 0.5
STACK_S = 0.2
MAX_STACK_BYTES = 64 << 10
_OUT_OF_MEMORY = "perhaps out of memory"

Message = dict[str, Any]
OnEvent = Callable[[c.Event], None]
OnMessage = Callable[[str, Message], None]


@dataclass(slots=True)
class Process:
    """One worker process and what this side holds of it."""

    worker_id: str
    slot: int
    channel: FrameChannel
    page: ProgressPage
    progress_fd: int
    arena_fd: int
    pid: int | None = None
    pidfd: int = -1
    stat_fd: int = -1
    kill_wanted: bool = False
    exiting: bool = False
    stopped: bool = False
    ended: tuple[int | None, int | None] | None = None
    hung_up: bool = False
    told_end: bool = False
    oom_before: int = 0
    log_bytes: int = 0


class Workers:
    """All worker processes of this agent.

    Args:
        forks: starts them.
        log_dir: for one log file each.
        on_event: gets what happens, for the machine.
        on_message: gets (worker id, message) of those messages that are about saves.
        on_stack: gets (worker id, stacks) of a worker that is about to be killed for a hang.
        on_gone: gets a worker id when its process is reaped and its descriptors are about to go.
    """

    def __init__(
        self,
        forks: ForkServer,
        log_dir: Path,
        *,
        on_event: OnEvent,
        on_message: OnMessage = lambda _worker_id, _message: None,
        on_stack: Callable[[str, str], None] = lambda _worker_id, _stack: None,
        on_gone: Callable[[str], None] = lambda _worker_id: None,
    ) -> None:
        self._forks = forks
        self._log_dir = log_dir
        self._on_event = on_event
        self._on_message = on_message
        self._on_stack = on_stack
        self._on_gone = on_gone
        self._all: dict[str, Process] = {}
        self._groups: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._next_look: asyncio.TimerHandle | None = None
        self._tidy: asyncio.TimerHandle | None = None
        self._closed = False
        self._none_left = asyncio.Event()
        self._none_left.set()
        forks.on_spawned = self._spawned
        forks.on_failed = self._start_failed
        self._look_at_all()
        self._tidy_up()

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def get(self, worker_id: str) -> Process | None:
        """Return one of the processes that are not reaped yet."""
        return self._all.get(worker_id)

    # -- commands ----------------------------------------------------------------------------------

    def start(self, worker_id: str, slot: int, spec: Mapping[str, Any]) -> None:
        """Start a worker; WorkerStarted or WorkerStartFailed follows."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        progress_fd = ProgressPage.create_fd(worker_id)
        arena_fd = create_fd()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log_fd = os.open(self._log_path(worker_id), flags, 0o600)
        channel = FrameChannel(
            ours,
            lambda message, fds: self._heard(worker_id, message, fds),
            lambda: self._hung_up(worker_id),
        )
        self._none_left.clear()
        self._all[worker_id] = Process(
            worker_id=worker_id,
            slot=slot,
            channel=channel,
            page=ProgressPage(progress_fd),
            progress_fd=progress_fd,
            arena_fd=arena_fd,
            oom_before=process.oom_kills(),
        )
        try:
            self._forks.spawn(spec, (theirs.fileno(), progress_fd, arena_fd, log_fd))
        finally:
            theirs.close()
            os.close(log_fd)

    def tell(self, worker_ids: Iterable[str], message: Message) -> None:
        """Send a message to some workers; one that has left does not get it."""
        for worker_id in worker_ids:
            worker = self._all.get(worker_id)
            if worker is not None:
                with contextlib.suppress(FrameError):
                    worker.channel.send(message)

    def kill(self, worker_id: str) -> None:
        """SIGKILL a worker and its group; WorkerReaped follows."""
        worker = self._all.get(worker_id)
        if worker is None:
            return
        worker.kill_wanted = True
        if worker.pid is not None and worker.ended is None:
            process.kill_group(worker.pid)

    def kill_with_stack(self, worker_id: str) -> None:
        """Have a worker write its stacks to its log, then kill it; on_stack gets what it wrote."""
        worker = self._all.get(worker_id)
        if worker is None or worker.pid is None or worker.ended is not None:
            self.kill(worker_id)
            return
        log = self._log_path(worker_id)
        with contextlib.suppress(OSError):
            worker.log_bytes = log.stat().st_size
            signal.pidfd_send_signal(worker.pidfd, process.STACK_SIGNAL)
        self._loop.call_later(STACK_S, self._kill_after_stack, worker_id, log)

    def _kill_after_stack(self, worker_id: str, log: Path) -> None:
        worker = self._all.get(worker_id)
        if worker is None:
            return
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(worker.log_bytes)
            stack = file.read(MAX_STACK_BYTES).decode(errors="replace").strip()
            if stack:
                self._on_stack(worker_id, stack)
        self.kill(worker_id)

    def readings(self) -> tuple[c.Reading, ...]:
        """Return what all workers' progress pages say now."""
        found = []
        for worker in self._all.values():
            seen = worker.page.read()
            if seen is not None:
                found.append(
                    c.Reading(
                        worker_id=worker.worker_id,
                        step=seen.step,
                        committed=seen.committed,
                        generation=seen.generation,
                        phase=seen.phase.name.lower(),
                        done=seen.done,
                        at_s=seen.at_s,
                    )
                )
        return tuple(found)

    async def close(self, within_s: float) -> list[int]:
        """Kill and reap all that is left, at most so long; returns the pids that stay."""
        for worker_id in list(self._all):
            self.kill(worker_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._none_left.wait()
        left = [worker.pid for worker in self._all.values() if worker.pid is not None]
        self._closed = True
        for timer in (self._next_look, self._tidy):
            if timer is not None:
                timer.cancel()
        for worker_id in list(self._all):
            self._forget(worker_id)
        return left

    # -- what the fork server says -----------------------------------------------------------------

    def _spawned(self, worker_id: str, pid: int) -> None:
        worker = self._all.get(worker_id)
        if worker is None:
            process.kill_group(pid)
            self._groups.add(pid)
            return
        worker.pid = pid
        worker.pidfd = os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            worker.stat_fd = process.open_stat(pid)
        self._loop.add_reader(worker.pidfd, self._ended, worker_id)
        self._on_event(c.WorkerStarted(worker_id=worker_id, pid=pid))
        if worker.kill_wanted:
            process.kill_group(pid)

    def _start_failed(self, worker_id: str, reason: str) -> None:
        if worker_id in self._all:
            self._forget(worker_id)
            self._on_event(c.WorkerStartFailed(worker_id=worker_id, reason=reason))

    # -- watching ----------------------------------------------------------------------------------

    def _look_at_all(self) -> None:
        if self._closed:
            return
        for worker in list(self._all.values()):
            if worker.stat_fd >= 0 and not worker.exiting:
                self._look_at(worker)
        self._next_look = self._loop.call_later(LOOK_EVERY_S, self._look_at_all)

    def _look_at(self, worker: Process) -> None:
        seen = process.look(worker.stat_fd)
        if seen.exiting:
            worker.exiting = True
            how = "is exiting" if seen.signal is None else f"was killed by signal {seen.signal}"
            self._on_event(c.WorkerDying(worker_id=worker.worker_id, evidence=how))
        elif seen.stopped != worker.stopped:
            worker.stopped = seen.stopped
            event = c.WorkerStopped if seen.stopped else c.WorkerContinued
            self._on_event(event(worker_id=worker.worker_id))

    def _ended(self, worker_id: str) -> None:
        """The process is a zombie: end its group, reap it, and tell when it has been heard out."""
        worker = self._all.get(worker_id)
        if worker is None or worker.ended is not None or worker.pid is None:
            return
        process.kill_group(worker.pid)  # while the zombie holds the number
        ended = process.reap(worker.pidfd)
        if ended is None:
            return  # not yet: the descriptor stays readable
        if not worker.exiting:
            worker.exiting = True
            how = "has ended" if ended[1] is None else f"was killed by signal {ended[1]}"
            self._on_event(c.WorkerDying(worker_id=worker_id, evidence=how))
        self._loop.remove_reader(worker.pidfd)
        self._groups.add(worker.pid)
        worker.ended = ended
        if worker.hung_up:
            self._tell_end(worker_id)
        else:
            self._loop.call_later(LAST_WORDS_S, self._tell_end, worker_id)

    def _hung_up(self, worker_id: str) -> None:
        worker = self._all.get(worker_id)
        if worker is None:
            return
        worker.hung_up = True
        if worker.ended is not None:
            self._tell_end(worker_id)

    def _tell_end(self, worker_id: str) -> None:
        worker = self._all.get(worker_id)
        if worker is None or worker.ended is None or worker.told_end:
            return
        worker.told_end = True
        code, number = worker.ended
        hint = ""
        if number == signal.SIGKILL and not worker.kill_wanted:
            oom = process.oom_kills() > worker.oom_before
            hint = "out of memory: the kernel says so" if oom else _OUT_OF_MEMORY
        elif code:
            hint = f"its log is {self._log_path(worker_id)}"
        if code is None and number is None:
            code = 0
        self._on_gone(worker_id)
        self._forget(worker_id)
        self._on_event(
            c.WorkerReaped(worker_id=worker_id, exit_code=code, signal=number, hint=hint)
        )

    def _log_path(self, worker_id: str) -> Path:
        return self._log_dir / f"worker-{worker_id}.log"

    def _forget(self, worker_id: str) -> None:
        worker = self._all.pop(worker_id)
        worker.channel.close()
        worker.page.close()
        if worker.pidfd >= 0:
            self._loop.remove_reader(worker.pidfd)
        for fd in (worker.pidfd, worker.stat_fd, worker.progress_fd, worker.arena_fd):
            if fd >= 0:
                os.close(fd)
        if not self._all:
            self._none_left.set()

    def _tidy_up(self) -> None:
        """Reap what workers have left behind: their own children are ours now."""
        if self._closed:
            return
        self._groups = {pgid for pgid in self._groups if process.reap_group(pgid)}
        self._tidy = self._loop.call_later(TIDY_EVERY_S, self._tidy_up)

    # -- messages ----------------------------------------------------------------------------------

    def _heard(self, worker_id: str, message: Message, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        try:
            event = event_of(worker_id, message)
        except (KeyError, TypeError, ValueError) as error:
            # A worker runs user code and may say anything; what is not ours is its failure.
            event = c.WorkerFailed(
                worker_id=worker_id,
                error=type(error).__name__,
                message=f"a message of type {message.get('t')!r} could not be read: {error}",
                traceback="",
                step=0,
                kind=c.FailureKind.INTERNAL,
            )
        if event is None:
            self._on_message(worker_id, message)
        else:
            self._on_event(event)


def event_of(worker_id: str, message: Message) -> c.Event | None:
    """Return what a worker's message means to the machine; None when it is about saves."""
    match message["t"]:
        case "ready":
            return c.WorkerReady(worker_id=worker_id, layout=str(message.get("layout", "")))
        case "formed":
            return c.WorkerFormed(
                worker_id=worker_id,
                generation=int(message["generation"]),
                step=int(message["step"]),
            )
        case "peer_error":
            return c.GroupBroke(
                worker_id=worker_id,
                generation=int(message["generation"]),
                error=str(message["error"]),
            )
        case "failed":
            virtual_rank = message.get("virtual_rank")
            return c.WorkerFailed(
                worker_id=worker_id,
                error=str(message["error"]),
                message=str(message["message"]),
                traceback=str(message["traceback"]),
                step=int(message["step"]),
                kind=c.FailureKind(message["kind"]),
                virtual_rank=None if virtual_rank is None else int(virtual_rank),
            )
        case "finished":
            return c.WorkerFinished(
                worker_id=worker_id,
                value=message.get("value"),
                step=int(message["step"]),
                generation=int(message["generation"]),
            )
        case _:
            return None
