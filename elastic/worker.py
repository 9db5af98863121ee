"""A worker process from its birth in the fork server to its end.

It runs the user's script as `__main__`, and its own `elastic.run()` call then runs the training
function with a Context. When the function has returned, the worker stays a member until the
result is written: others may still need what it knows. Code after `elastic.run()` runs only in
the caller.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch._dynamo  # the first optimizer imports it: seconds that a forked worker need not pay

import ckpt
from elastic.agent.progress import ProgressPage, WorkerPhase
from elastic.config import ElasticConfig
from elastic.context import Context
from elastic.earlier import replay
from elastic.errors import ElasticError, ExitCode, Fenced, Misconfigured, UserError
from elastic.events import EventLog
from elastic.loops import Engine
from elastic.render import FAILURE_MARK
from elastic.result import RunResult
from elastic.rng import seed_everything
from elastic.script import ScriptSpec, enter
from elastic.step.checkpoints import Checkpoints
from elastic.step.control import Control
from elastic.step.driver import Driver, StepRecord
from elastic.step.extras import Extras
from elastic.step.prepared import Prepared
from elastic.step.process_group import GroupBroken
from elastic.step.reform import Reenter, Reformer
from elastic.step.restoring import Restorer
from elastic.values import NotPlain, check_plain, to_plain
from elastic.whereabouts import publish_compiling, show_stacks_on_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_FAILED_EXIT_CODE = 1
_LINGER_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What the agent tells a worker at its start."""

    worker_id: str
    node: str
    slot: int
    job: str
    run_dir: str
    token: str
    config: ElasticConfig
    script: ScriptSpec
    run_index: int
    earlier_results: list[dict[str, Any]]
    first: bool
    events_path: str

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> WorkerSpec:
        """Read the agent's plain values."""
        return cls(
            worker_id=plain["worker_id"],
            node=plain["node"],
            slot=plain["slot"],
            job=plain["job"],
            run_dir=plain["run_dir"],
            token=plain["token"],
            config=ElasticConfig.from_dict(plain["config"]),
            script=ScriptSpec.from_dict(plain["script"]),
            run_index=plain.get("run_index", 0),
            earlier_results=list(plain.get("earlier_results") or []),
            first=bool(plain["first"]),
            events_path=plain["events_path"],
        )


def main(
    spec: Mapping[str, Any], control_sock: socket.socket, progress_fd: int, arena_fd: int
) -> NoReturn:
    """Run one worker; called in a freshly forked child of the fork server."""
    worker = Worker(WorkerSpec.from_dict(spec), control_sock, progress_fd, arena_fd)
    worker.run()


class Worker:
    """One worker process: builds the parts and connects them."""

    def __init__(
        self, spec: WorkerSpec, control_sock: socket.socket, progress_fd: int, arena_fd: int
    ) -> None:
        self.spec = spec
        self.control = Control(control_sock, spec.worker_id)
        self.progress = ProgressPage(progress_fd)
        self.progress.write(phase=WorkerPhase.STARTING)
        self._arena_fd = arena_fd
        self.events = EventLog(
            spec.events_path,
            "worker",
            run=Path(spec.run_dir).name,
            node=spec.node,
            worker_id=spec.worker_id,
        )
        self._run_calls = 0
        self._first = spec.first
        self.driver: Driver | None = None

    def run(self) -> NoReturn:
        """Run the user's program; never returns."""
        config = self.spec.config
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides how a run is stopped
        torch.set_num_threads(config.threads)
        with contextlib.suppress(RuntimeError):  # already set by an import of the script
            torch.set_num_interop_threads(1)
        seed_everything(config.seed, 0, 0)
        show_stacks_on_signal()
        publish_compiling(self.progress)
        self.control.start()
        importlib.import_module("elastic.run")._worker_hook = self._hook  # type: ignore[attr-defined]
        _refuse_local_clipping(self)
        code = _FAILED_EXIT_CODE
        try:
            enter(self.spec.script, self._call)
            raise Misconfigured(
                f"{self.spec.script.shown} ended in a worker without reaching elastic.run()",
                hint="call elastic.run(train, ...) at the top level of the script, on every path",
            )
        except _Done:
            code = 0
        except SystemExit as error:
            if self.control.finish_requested:
                code = 0
            else:
                self._failed(error)
        except BaseException as error:  # noqa: BLE001 - the last line of a process: it is reported
            code = self._failed(error)
        self._leave(code)

    # -- elastic.run() inside a worker ----------------------------------------------------------

    def _hook(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        config: Mapping[str, Any],  # noqa: ARG002 - resolved once, by the caller
    ) -> RunResult:
        call, self._run_calls = self._run_calls, self._run_calls + 1
        if call < self.spec.run_index:
            return replay(self.spec.earlier_results[call])
        if call > self.spec.run_index:
            raise Misconfigured(
                "elastic.run() was called inside elastic.run()", hint="call it once"
            )
        self._call(fn, args, kwargs)
        raise _Done

    def _call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> None:
        while True:
            seed_everything(self.spec.config.seed, 0, 0)  # equal models on every worker
            context, engine, checkpoints = self._build()
            try:
                value = fn(context, *args, **(kwargs or {}))
                self._finish(value, context, engine, checkpoints)
            except Reenter:
                context.close()
                self._first = False
                self.events.emit("reshape.started", cause="no living holder", phase="reenter")
                continue
            context.close()
            if self.spec.script.kind == "function":
                raise _Done
            return

    def _build(self) -> tuple[Context, Engine, Checkpoints]:
        spec, config = self.spec, self.spec.config
        old = self.driver
        prepared = Prepared()
        virtual_ranks = config.virtual_ranks
        assert virtual_ranks is not None, "the caller resolves virtual_ranks"
        driver = Driver(
            worker_id=spec.worker_id,
            node=spec.node,
            config=config,
            num_leaves=virtual_ranks * config.accumulate,
            device=_device(config, spec.slot),
            prepared=prepared,
            control=self.control,
            progress=self.progress,
            events=self.events,
        )
        if old is not None:  # re-entered: the World and its group still stand
            driver.world, driver.group = old.world, old.group
        self.driver = driver
        extras = Extras(driver)
        roots = [root for root in (config.checkpoint, config.remote) if root]
        restorer = Restorer(driver, extras, roots=roots, resume=config.resume, first=self._first)
        checkpoints = Checkpoints(driver, extras, arena_fd=self._arena_fd, enabled=bool(roots))
        reformer = Reformer(driver, extras, restorer, spec.token)
        engine = Engine(driver, reformer, checkpoints)
        context = Context(engine, extras, first=self._first)
        engine.sync = context.sync_for_steps
        driver.on_outcome = checkpoints.after_step
        driver.on_formed = reformer.finished
        driver.save_busy = checkpoints.busy
        driver.unclaimed = extras.unclaimed_objects
        driver.refresh = extras.refresh
        driver.on_committed = lambda record: self._committed(record, checkpoints)
        return context, engine, checkpoints

    def _committed(self, record: StepRecord, checkpoints: Checkpoints) -> None:
        """Tell the agent of committed steps that were staged, so that it may commit them."""
        self.control.send(t="committed", step=record.step, generation=record.generation)
        checkpoints.step_committed(record.step)

    # -- the end --------------------------------------------------------------------------------

    def _finish(
        self, value: Any, context: Context, engine: Engine, checkpoints: Checkpoints
    ) -> None:
        driver = engine.driver
        engine.check_not_in_step("the end of the training function")
        context.sync()
        if checkpoints.enabled and driver.step > 0:
            checkpoints.save_at_end()
        try:
            check_plain(value)  # on every worker: any of them may be asked for it
        except NotPlain as error:
            raise UserError(
                f"what {self.spec.script.shown} returned cannot be handed on: {error}"
            ) from error
        self.events.emit("worker.finished", step=driver.step, value=None)
        driver.phase(WorkerPhase.FINISHED)
        self._say_finished(driver, value)
        while not self.control.finish_requested:
            if driver.group is not None and driver.group.is_cut:
                engine.reform(GroupBroken("a newer World was announced"))
                self._settle(engine)
                driver.phase(WorkerPhase.FINISHED)
                self._say_finished(driver, value)
            checkpoints.take_messages()
            self.control.wait_change(_LINGER_POLL_S)
            self.progress.beat()

    def _say_finished(self, driver: Driver, value: Any) -> None:
        plain = to_plain(value) if driver.rank == 0 else None
        self.control.send(t="finished", value=plain, step=driver.step, generation=driver.generation)
        if not driver.formed:
            driver.formed = True
            self.control.send(t="formed", generation=driver.generation, step=driver.step)

    @staticmethod
    def _settle(engine: Engine) -> None:
        """Finish the copies of a reshape that no further agreement will end."""
        while True:
            try:
                engine.driver.finish_healing()
            except GroupBroken as reason:
                engine.reform(reason)
                continue
            return

    # -- failing --------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> int:
        if isinstance(error, Fenced):
            self.events.emit("generation.fenced", reason=str(error))
            return int(ExitCode.FENCED)
        kind = "user"
        if isinstance(error, Misconfigured):
            kind = "misconfigured"
        elif isinstance(error, ckpt.CheckpointError) and _asked_by_us(error):
            kind = "misconfigured" if isinstance(error, ckpt.Misconfigured) else "storage"
        elif not isinstance(error, UserError) and _raised_by_us(error):
            kind = "internal"
        step = 0 if self.driver is None else self.driver.step
        virtual_rank = None
        if self.driver is not None and self.driver.leaf is not None:
            virtual_rank = self.driver.leaf // self.spec.config.accumulate
        text = "".join(traceback.format_exception(error))
        message = str(error) or type(error).__name__
        if isinstance(error, SystemExit):
            message = f"the script called sys.exit({error.code}) inside the training function"
        if kind == "user":
            message = _with_place(message, error)
        sys.stdout.flush()
        print(f"{FAILURE_MARK}\n{text}", file=sys.stderr, flush=True)  # noqa: T201 - its own log
        self.events.emit(
            "worker.failed",
            error=type(error).__name__,
            message=message,
            traceback=text,
            virtual_rank=virtual_rank,
            kind=kind,
            step=step,
        )
        self.control.send(
            t="failed",
            error=type(error).__name__,
            message=message,
            traceback=text,
            step=step,
            virtual_rank=virtual_rank,
            kind=kind,
        )
        return _FAILED_EXIT_CODE

    def _leave(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        self.events.close()
        if code == 0:
            sys.exit(0)  # runs the script's own exit hooks
        os._exit(code)


class _Done(BaseException):
    """The training function has returned and the result is written: unwind the script."""


def _raised_by_us(error: BaseException) -> bool:
    """Return True when the innermost frame is in this package, so that the fault may be ours."""
    if isinstance(error, ElasticError):
        return True
    frame = error.__traceback__
    if frame is None:
        return False
    while frame.tb_next is not None:
        frame = frame.tb_next
    home = str(Path(__file__).resolve().parent)
    return frame.tb_frame.f_code.co_filename.startswith(home + os.sep)


def _with_place(message: str, error: BaseException) -> str:
    """Return a message with the last line of the user's own code that led to it."""
    others = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others.append(str(Path(__file__).resolve().parent))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *(f"{folder}{os.sep}" for folder in others)))
    ]
    if not frames:
        return message
    first, newline, rest = message.partition("\n")
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    return f"{first} ({place}){newline}{rest}"


def _asked_by_us(error: ckpt.CheckpointError) -> bool:
    """Return True when this package called ckpt, and not the training function by itself."""
    ours, theirs = (str(Path(p).resolve().parent) + os.sep for p in (__file__, ckpt.__file__))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    callers = [file for file in files if not file.startswith(theirs)]
    return bool(callers) and callers[-1].startswith(ours)


def _device(config: ElasticConfig, slot: int) -> torch.device:
    if config.backend == "nccl":
        return torch.device("cuda", slot)
    return torch.device("cpu")


def _refuse_local_clipping(worker: Worker) -> None:
    """Make torch's own clipping refuse prepared parameters inside a step."""
    real = torch.nn.utils.clip_grad_norm_

    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        driver = worker.driver
        if driver is not None and driver.leaf is not None:
            raise UserError(
                "torch.nn.utils.clip_grad_norm_ sees one micro-batch's gradient, not the step's; "
                "use ctx.clip_grad_norm_(max_norm)"
            )
        return real(parameters, *args, **kwargs)

    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_
