"""The save service as its agent sees it: one process that writes, uploads and commits.

A worker may die the moment it has staged: the bytes lie in its arena, and this process goes on. It
is started with exec and not by fork, it holds no lock and no library of the agent's, and it dies
with the agent (see `ckpt.service_main`).

Everything that happens comes back through `on_event`, as plain maps:

    written    step generation worker_id half bytes duration_s entry    the local pack is durable
    uploaded   step generation worker_id half bytes duration_s entry    the remote pack is verified
    half_free  worker_id half                 the worker may stage into that half again committed
    step generation tier tiers manifest final    manifests stand in `tiers`; `tier` is new;
               `final` when no further tier will follow
    failed     step generation worker_id tier kind error    this part of the save will not happen;
               `tier` is null when the whole save or commit is lost
    dropped    step generation                what `drop` asked for is gone
    died       error                          the process has ended by itself; start another one

`entry` is what has to be published about a pack; it comes with whichever of `written` and
`uploaded` is first. With both a local and a remote place a save is committed twice, and a failure
of one does not touch the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.errors import CheckpointError, Fatal, Misconfigured, Retryable
from ckpt.frames import FrameChannel

__all__ = ["SaveService"]

START_TIMEOUT_S = 60.0
KILL_AFTER_S = 2.0
"""How long past its deadline the process may take to leave."""

OnEvent = Callable[[dict[str, Any]], None]


class SaveService:
    """Client of one save service. All methods belong to the event loop that called `start`.

    Args:
        local, remote: where packs go; a path, and any fsspec URL. At least one.
        on_event: gets every event, in order.
        log_path: where the process's own output goes; appended to.
        options: for the fsspec file system of `remote`.
        sweep: at start remove what dead services have left. Not for a replacement in a running
            job: packs that the dead one wrote may still be committed.
    """

    def __init__(  # noqa: PLR0913 - one process's settings
        self,
        *,
        job: str,
        node: str,
        local: str | None,
        remote: str | None,
        on_event: OnEvent,
        log_path: Path | None = None,
        options: Mapping[str, Any] | None = None,
        sweep: bool = True,
    ) -> None:
        if local is None and remote is None:
            raise ValueError("a save service needs a local or a remote place")
        self._settings = {
            "t": "start",
            "job": job,
            "node": node,
            "local": local,
            "remote": remote,
            "options": dict(options or {}),
            "sweep": sweep,
        }
        self._on_event = on_event
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: FrameChannel | None = None
        self._started: asyncio.Future[dict[str, Any]] | None = None
        self._ended = asyncio.Event()
        self._closing = False
        self._reaping: asyncio.Task[None] | None = None
        self.unfinished: list[str] = []
        """After `close`: saves and commits that its deadline has cut off."""

    @property
    def pid(self) -> int | None:
        """The process, None before `start` and after its end."""
        return None if self._process is None or self._ended.is_set() else self._process.pid

    @property
    def running(self) -> bool:
        """True between `start` and the end of the process."""
        return self.pid is not None

    async def start(self, *, timeout_s: float = START_TIMEOUT_S) -> list[str]:
        """Start the process and let it try its places; what it has swept.

        Raises Misconfigured with one sentence when a place cannot be used: a directory that is not
        writable, a bucket that does not exist, credentials that are refused.
        """
        ours, theirs = socket.socketpair()
        self._started = asyncio.get_running_loop().create_future()
        with theirs:
            self._process = self._spawn(theirs)
        self._channel = FrameChannel(ours, self._take, self._hung_up)
        self._channel.send(self._settings)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._started
        except TimeoutError:
            await self._end()
            raise Retryable(
                f"the save service was not ready within {timeout_s:.0f} s", kind="service-start"
            ) from None
        except BaseException:
            await self._end()
            raise
        if answer["t"] != "started":
            await self._end()
            raise _as_error(answer)
        return list(answer["swept"])

    def attach(self, worker_id: str, arena_fd: int) -> None:
        """Tell of a worker's arena; the descriptor stays the caller's."""
        self._send({"t": "attach", "worker_id": worker_id}, (arena_fd,))

    def detach(self, worker_id: str) -> None:
        """A worker is gone for good: its arena is let go when its saves have ended."""
        self._send({"t": "detach", "worker_id": worker_id})

    def save(self, worker_id: str, half: int, step: int, generation: int) -> None:
        """Write and upload what is sealed in a half. The worker may be dead, but must not stage."""
        self._send(
            {
                "t": "save",
                "worker_id": worker_id,
                "half": half,
                "step": step,
                "generation": generation,
            }
        )

    def commit(
        self,
        step: int,
        generation: int,
        worker_ids: Sequence[str],
        entries: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]],
        *,
        remote: bool = True,
    ) -> None:
        """Make the checkpoint visible: locally at once, remotely when all its packs are there.

        `entries` are those of all workers of all nodes; those of `worker_ids` are combined. Of many
        agents one needs to pass `remote=True`; more do no harm.
        """
        values = entries.values() if isinstance(entries, Mapping) else entries
        self._send(
            {
                "t": "commit",
                "step": step,
                "generation": generation,
                "worker_ids": list(worker_ids),
                "entries": [dict(entry) for entry in values],
                "remote": remote,
            }
        )

    def drop(self, step: int, generation: int) -> None:
        """Give a save up: stop what is under way and remove its packs, if it is not committed."""
        self._send({"t": "drop", "step": step, "generation": generation})

    async def close(self, deadline_s: float) -> bool:
        """Let it finish what it has, at most so long, and end it. True if nothing was cut off."""
        self._closing = True
        if not self.running:
            await self._end()
            return False
        self._send({"t": "close", "deadline_s": deadline_s})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s + KILL_AFTER_S):
                await self._ended.wait()
        if not self._ended.is_set():
            self.unfinished = ["the save service did not answer"]
        await self._end()
        return not self.unfinished

    def kill(self) -> None:
        """End the process at once; whole checkpoints stay, anything else does not count."""
        self._closing = True
        if self._process is not None and not self._ended.is_set():
            self._process.kill()

    def _spawn(self, control: socket.socket) -> subprocess.Popen[bytes]:
        fd = control.fileno()
        command = [sys.executable, "-P", "-m", "ckpt.service", "--control-fd", str(fd)]
        log: Any = subprocess.DEVNULL
        if self._log_path is not None:
            log = self._log_path.open("ab")
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(fd,),
                env=_environment(),
                start_new_session=True,
            )
        finally:
            if log is not subprocess.DEVNULL:
                log.close()

    def _send(self, msg: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self._channel is None or not self._channel.send(msg, fds):
            raise Retryable("the save service is not running", kind="service-died")

    def _take(self, msg: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if self._started is not None and not self._started.done():
            self._started.set_result(msg)
        elif msg["t"] == "closed":
            self.unfinished = list(msg["unfinished"])
        else:
            self._on_event(msg)

    def _hung_up(self) -> None:
        self._ended.set()
        error = self._channel.error if self._channel is not None else None
        why = f"the save service has died{f' ({error})' if error else ''}"
        if self._started is not None and not self._started.done():
            self._started.set_exception(
                Fatal(f"{why} while it started", kind="service-died", hint="see save.log")
            )
        elif not self._closing:
            self._on_event({"t": "died", "error": why})
            self._reaping = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        """The process is gone and reaped when this returns."""
        self._closing = True
        if self._channel is not None:
            self._channel.close()
        self._ended.set()
        process = self._process
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It leaves by itself when its socket ends; if it is stuck, it is not asked twice.
            await asyncio.to_thread(process.wait, KILL_AFTER_S)
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)


def _environment() -> dict[str, str]:
    """Ours, with this package found where it was found here; few threads and heaps."""
    environment = dict(os.environ)
    environment["OPENBLAS_NUM_THREADS"] = "1"
    environment["MALLOC_ARENA_MAX"] = "2"  # parts come and go in many threads
    home = Path(__file__).resolve().parent.parent
    if home.name not in ("site-packages", "dist-packages"):
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{home}{os.pathsep}{path}" if path else str(home)
    return environment


def _as_error(answer: Mapping[str, Any]) -> CheckpointError:
    kinds: dict[str, type[CheckpointError]] = {"misconfigured": Misconfigured}
    cls = kinds.get(answer.get("class", ""), Fatal)
    return cls(answer["error"], kind=answer["kind"], hint=answer.get("hint", ""))


if __name__ == "__main__":
    from ckpt.service_main import main

    main()
