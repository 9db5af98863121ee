"""The agent: waits for input, asks the machine, carries out what comes back. It decides nothing.

It is the one process of a host that everything else hangs on: workers, fork server, save service
and an etcd of our own are its children and die with it, however it ends. When its caller's pipe
closes, it ends as by SIGTERM. It imports no torch and runs no user code.

The parts, each with its own device: coordination (the store), forks and workers (processes), saves
(checkpoints), bootstrap and http (sockets). What they hear becomes an event in one queue; this file
takes events from it one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, assert_never

from ckpt.service import SaveService
from elastic.agent import process, status
from elastic.agent.bootstrap import BootstrapServer
from elastic.agent.coordination import Coordination
from elastic.agent.forks import ForkServer
from elastic.agent.http import StatusServer
from elastic.agent.leaving import end_orphans, result_of
from elastic.agent.saves import Saves
from elastic.agent.saving import NoSaves, Saving
from elastic.agent.spec import AgentSpec, RunDir
from elastic.agent.store import Store
from elastic.agent.workers import Workers
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.config import process_environ
from elastic.errors import ExitCode
from elastic.events import EventLog
from elastic.membership import commands as c
from elastic.membership import machine

log = logging.getLogger("elastic.agent")

READ_PROGRESS_EVERY_S = 0.25
CLEAN_UP_S = 5.0
"""What each part of the clean-up may take after the machine has let go."""


class Agent:
    """One agent, from its first breath to its exit code."""

    def __init__(
        self, spec: AgentSpec, run_dir: RunDir, *, caller_fd: int = -1, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.spec = spec
        self.run_dir = run_dir
        self._clock = clock
        self._caller_fd = caller_fd
        self._started_at = clock.wall()
        self._token = self._job_token = secrets.token_hex(16)
        self._inbox: asyncio.Queue[c.Event] = asyncio.Queue()
        self._outcome: c.Outcome | None = None
        self._interrupts = 0
        self._endpoints: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._events = EventLog(
            run_dir.events(f"agent-{spec.node}"), "agent", run=run_dir.path.name, node=spec.node
        )
        config = spec.config
        self._bootstrap = BootstrapServer(config.bind, self._token, self.on_stranger)
        self._http = StatusServer(config.bind, self._token, self, config.metrics_port or 0)
        self._forks = ForkServer(
            environ=process_environ(),
            log_path=run_dir.logs / "forkserver.log",
            preload=spec.preload,
        )
        self._forks.on_up = lambda: self.on_event(c.ForkServerUp())
        self._forks.on_down = lambda reason: self.on_event(c.ForkServerDown(reason=reason))
        self._workers = Workers(
            self._forks,
            run_dir.logs,
            on_event=self.on_event,
            on_message=lambda worker_id, message: self._saves.message(worker_id, message),
            on_stack=lambda worker_id, stack: self.note(
                "worker.stack", worker_id=worker_id, stack=stack
            ),
            on_gone=lambda worker_id: self._saves.gone(worker_id),
        )
        self._store = Store(
            config, spec.job, run_dir, note=self.note, on_endpoints=self._tell_where
        )
        self._coordination = Coordination(
            self._store.connect,
            settings=config.to_dict(),
            token=self._token,
            on_event=self.on_event,
            on_token=self._take_token,
        )
        self._saves = self._make_saves()
        self._decision: c.Decision | None = None

    # -- life --------------------------------------------------------------------------------------

    async def run(self) -> c.Outcome:
        """Run until the machine lets go, clean up, and return how it ended."""
        process.adopt_orphans()
        self._listen_to_signals()
        self._listen_to_caller()
        try:
            await self._bootstrap.start()
            self._decision = self._begin()
            await self._http.start()
            self._tell_where()
            self._note_start()
            self._task(self._saves.start())
            outcome = await self._decide()
        except Exception as error:
            log.exception("the agent failed")
            outcome = c.Outcome(
                exit_code=ExitCode.INFRASTRUCTURE,
                cause=f"the agent failed: {type(error).__name__}: {error}",
            )
        return await self._clean_up(outcome)

    def _begin(self) -> c.Decision:
        return machine.begin(
            node=self.spec.node,
            incarnation=f"{self.spec.node}-{secrets.token_hex(4)}",
            address=self._advertised(self._bootstrap.port),
            rules=self.spec.rules,
            now_s=self._clock.now_s(),
        )

    async def _decide(self) -> c.Outcome:
        """Feed the machine until it lets go."""
        assert self._decision is not None
        self._carry_out(self._decision)
        self._task(self._read_progress())
        while self._outcome is None:
            event = await self._next_event(self._decision.wake_at_s)
            if isinstance(
                event, c.WorkerFailed | c.WorkerDying | c.WorkerReaped | c.WorkerStopped | c.Woke
            ):
                # What becomes of it may depend on where the workers are just now.
                self._step(c.ProgressSeen(readings=self._workers.readings()))
            self._step(event)
        return self._outcome

    def _step(self, event: c.Event) -> None:
        if self._decision is None or self._outcome is not None:
            return
        before = self._decision
        self._decision = machine.step(before.state, event, self._clock.now_s())
        state = self._decision.state
        self._events.bind(
            generation=0 if state.world is None else state.world.generation, step=state.committed
        )
        if self._decision.reason != before.reason:
            log.info("%s: %s", self._decision.state.phase, self._decision.reason)
        self._carry_out(self._decision)

    async def _next_event(self, wake_at_s: float | None) -> c.Event:
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        left_s = None if wake_at_s is None else max(0.0, wake_at_s - self._clock.now_s())
        try:
            async with asyncio.timeout(left_s):
                return await self._inbox.get()
        except TimeoutError:
            return c.Woke()

    def _carry_out(self, decision: c.Decision) -> None:
        for command in decision.commands:
            self._do(command)

    def _do(self, command: c.Command) -> None:  # noqa: C901 - one line per command
        match command:
            case c.StartForkServer():
                self._forks.start()
            case c.OpenSession():
                self._coordination.open(command.member)
            case (
                c.EnterAttempt()
                | c.WriteMember()
                | c.WriteWorld()
                | c.WriteResult()
                | c.WriteStop()
            ):
                self._coordination.write(command)
            case c.StartWorker():
                self._workers.start(command.worker_id, command.slot, self._worker_spec(command))
            case c.KillWorker():
                log.info("killing %s: it %s", command.worker_id, command.reason)
                if command.stack:
                    self._workers.kill_with_stack(command.worker_id)
                else:
                    self._workers.kill(command.worker_id)
            case c.TellWorld():
                self._bootstrap.store.advance(command.world.generation)
                message = {
                    "t": "world",
                    "world": command.world.to_dict(),
                    "first": command.first,
                }
                self._workers.tell(command.worker_ids, message)
            case c.Tell():
                self._workers.tell(command.worker_ids, {"t": command.word.value})
            case c.SettleSaves():
                self._saves.settle(command.deadline_at_s)
            case c.Note():
                self.note(command.event, **command.fields)
            case c.Leave():
                self._outcome = command.outcome
            case _:
                assert_never(command)

    # -- what the parts need -----------------------------------------------------------------------

    def on_event(self, event: c.Event) -> None:
        """Put a fact into the queue."""
        self._inbox.put_nowait(event)

    def on_stranger(self, address: str, reason: str) -> None:
        """Note a connection without the job's token."""
        self.note("stranger.refused", address=address, reason=reason)

    def note(self, event: str, /, **fields: Any) -> None:
        """Write an event to this agent's log."""
        self._events.emit(event, **fields)

    def arena_fd(self, worker_id: str) -> int | None:
        """Return a worker's arena while it is not reaped."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.arena_fd

    def tell(self, worker_ids: Iterable[str] | None, message: dict[str, Any]) -> None:
        """Send a message to these workers, or to all."""
        ids = [worker.worker_id for worker in self._workers] if worker_ids is None else worker_ids
        self._workers.tell(ids, message)

    def status(self) -> dict[str, Any]:
        """Return what /status shows."""
        assert self._decision is not None
        state = self._decision.state
        readings = {reading.worker_id: reading for reading in self._workers.readings()}
        main = "" if state.world is None else state.world.workers[0].worker_id
        return status.build(
            state,
            readings,
            saves=self._saves.status(),
            last_log=status.last_log(self.run_dir.events(f"worker-{main}")),
            facts={
                "job": self.spec.job,
                "pid": os.getpid(),
                "started_at": self._started_at,
                "run_dir": str(self.run_dir.path),
            },
        )

    # -- the store ---------------------------------------------------------------------------------

    def _take_token(self, token: str) -> None:
        """Use the job's token, which all its agents and workers share, from now on.

        The page keeps the token that stands in agent.json: whoever has read it can go on asking.
        """
        self._job_token = self._bootstrap.token = token

    def _tell_where(self, endpoints: list[str] | None = None) -> None:
        """Write agent.json anew."""
        if endpoints is not None:
            self._endpoints = endpoints
        self.run_dir.write_agent(
            {
                "pid": os.getpid(),
                "node": self.spec.node,
                "job": self.spec.job,
                "http": self._address(self._http.port),
                "address": self._address(self._http.port),
                "bootstrap": self._advertised(self._bootstrap.port),
                "token": self._token,
                "etcd": self._endpoints,
                "started_at": self._started_at,
            }
        )

    def _address(self, port: int) -> str:
        host = self.spec.config.bind
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _advertised(self, port: int) -> str:
        host = self.spec.config.advertise or self.spec.config.bind
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    # -- saves and workers -------------------------------------------------------------------------

    def _make_saves(self) -> Saving:
        config = self.spec.config
        if config.checkpoint is None and config.remote is None:
            return NoSaves(self)

        def service(on_event: Any, sweep: bool) -> SaveService:  # noqa: FBT001 - a callback
            return SaveService(
                job=self.spec.job,
                node=self.spec.node,
                local=config.checkpoint,
                remote=config.remote,
                on_event=on_event,
                log_path=self.run_dir.logs / "save.log",
                sweep=sweep,
            )

        several = config.max_nodes > 1
        return Saves(
            service,
            self,
            coord=(lambda: self._coordination.coord) if several else None,
            now_s=self._clock.now_s,
        )

    def _worker_spec(self, command: c.StartWorker) -> dict[str, Any]:
        spec = {
            "worker_id": command.worker_id,
            "node": self.spec.node,
            "slot": command.slot,
            "job": self.spec.job,
            "run_dir": str(self.run_dir.path),
            "token": self._job_token,
            "config": self.spec.config.to_dict(),
            "script": self.spec.script,
            "run_index": self.spec.run_index,
            "earlier_results": list(self.spec.earlier_results),
            "first": command.first,
            "events_path": str(self.run_dir.events(f"worker-{command.worker_id}")),
        }
        return spec if self.spec.entry is None else {**spec, "entry": self.spec.entry}

    async def _read_progress(self) -> None:
        while True:
            await asyncio.sleep(READ_PROGRESS_EVERY_S)
            if len(self._workers):
                self.on_event(c.ProgressSeen(readings=self._workers.readings()))

    # -- people ------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        """Take over the signals that mean an end; one that was ignored at the start stays so."""
        loop = asyncio.get_running_loop()
        ending = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        ending |= {signal.Signals[name] for name in self.spec.config.notice_signals}
        for number in ending | {signal.SIGUSR1, signal.SIGUSR2}:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number, number in ending)

    def _on_signal(self, number: signal.Signals, ends: bool) -> None:  # noqa: FBT001 - a callback
        self._interrupts += number is signal.SIGINT
        at_once = number is signal.SIGINT and self._interrupts > 1
        action = "end now" if at_once else "end after an agreed step" if ends else "nothing"
        self.note("signal.received", signal=number.name, action=action)
        if ends:
            cause = f"stopped by {number.name}"
            self.on_event(
                c.StopAsked(scope=c.Scope.NODE, cause=cause, signal=int(number), at_once=at_once)
            )

    def _listen_to_caller(self) -> None:
        if self._caller_fd >= 0:
            os.set_blocking(self._caller_fd, False)
            asyncio.get_running_loop().add_reader(self._caller_fd, self._on_caller)

    def _on_caller(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(self._caller_fd, 4096):
                return
            asyncio.get_running_loop().remove_reader(self._caller_fd)
            self.on_event(
                c.StopAsked(
                    scope=c.Scope.NODE,
                    cause="stopped because the process that had called elastic.run() is gone",
                    signal=int(signal.SIGTERM),
                )
            )

    def _note_start(self) -> None:
        config = self.spec.config
        self.note(
            "agent.started",
            pid=os.getpid(),
            address=self._address(self._http.port),
            job=self.spec.job,
            resume=config.resume,
        )

    # -- the end -----------------------------------------------------------------------------------

    async def _clean_up(self, outcome: c.Outcome) -> c.Outcome:
        """End everything that was started, within bounds; name what cannot be ended."""
        for task in list(self._tasks):
            task.cancel()
        self._forks.close()
        stuck = await self._workers.close(CLEAN_UP_S)
        await self._quietly(self._saves.close(CLEAN_UP_S), CLEAN_UP_S + 5.0)
        await self._quietly(self._coordination.close(2.0), CLEAN_UP_S)
        await self._quietly(self._http.close(), CLEAN_UP_S)
        await self._quietly(self._bootstrap.close(), CLEAN_UP_S)
        await self._quietly(self._store.close(), CLEAN_UP_S)
        stuck += await end_orphans(CLEAN_UP_S)
        if stuck:
            cause = f"processes {', '.join(map(str, sorted(set(stuck))))} could not be ended"
            log.error("%s", cause)
            if outcome.exit_code in (ExitCode.DONE, ExitCode.INFRASTRUCTURE):
                cause = f"{cause}; before that: {outcome.cause}" if outcome.cause else cause
                outcome = replace(outcome, exit_code=ExitCode.INFRASTRUCTURE, cause=cause)
        self.run_dir.write_result(await asyncio.to_thread(result_of, outcome, self.run_dir.path))
        self.note("agent.stopped", exit_code=outcome.exit_code, cause=outcome.cause)
        self._events.close()
        return outcome

    async def _quietly(self, work: Any, within_s: float) -> None:
        """Wait for one part's end, at most so long; its trouble must not keep the others alive."""
        try:
            async with asyncio.timeout(within_s):
                await work
        except Exception:
            log.exception("a part of the agent did not end in good order")

    def _task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            log.error("a task of the agent failed", exc_info=error)
            cause = f"a part of the agent failed: {type(error).__name__}: {error}"
            self.on_event(c.HelperBroken(exit_code=int(ExitCode.INFRASTRUCTURE), cause=cause))
