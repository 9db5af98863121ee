"""`elastic.run()`: start a run from an ordinary Python program and hand back its result.

In the caller it resolves the configuration, refuses what cannot work before anything is started,
starts this host's agent, shows progress and returns what `train` returned. In a worker, which runs
the same script, the same call runs `train` (`_worker_hook`) and code after it is never reached.

The module itself can be called: `elastic.run(...)` works whether or not somebody has imported
`elastic.run` as a module before.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from elastic import caller, earlier, job_root, preflight, resume
from elastic.clock import SystemClock
from elastic.config import Origin, Resolved, process_environ, resolve, shown
from elastic.console import make_console, write_error
from elastic.errors import ElasticError, ExitCode, Misconfigured, RunFailed, exit_code_of
from elastic.events import EventLog
from elastic.joblock import JobLock
from elastic.result import RunResult
from elastic.script import ScriptSpec, check_not_importing, describe
from elastic.values import from_plain
from elastic.watch import Watch

VIRTUAL_RANKS_PER_WORKER = 2

_worker_hook: Callable[..., RunResult] | None = None
"""Set in a worker: what a call of `run` means there."""
_command_line: Mapping[str, Any] = {}
"""Options of `elastic run`, which win over everything else."""
_dry_run = False
_ledger = earlier.Ledger()


class DryRun(SystemExit):
    """`--dry-run` has printed what was resolved; nothing was started."""


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **config: Any,
) -> RunResult:
    """Run `fn(ctx, *args, **kwargs)` on workers that survive failures, and return its result.

    Args:
        fn: the training function, at the top level of a file.
        args, kwargs: passed on to it after the context.
        config: fields of ElasticConfig; EVERSTEP_* and the command line win over them.

    Returns the main worker's value with the number of committed steps.
    Raises Misconfigured: what was asked for cannot work; nothing was left running. RunFailed: the
    run ended without success; uncaught it ends the script with its exit code and one sentence.
    """
    if _worker_hook is not None:
        return _worker_hook(fn, args, kwargs, config)
    _install_excepthook()
    check_not_importing()
    index = _ledger.begin()
    outcome: RunResult | RunFailed | Misconfigured | None = None
    try:
        outcome = _run(fn, args, kwargs, config, index)
        return outcome
    except (RunFailed, Misconfigured) as error:
        outcome = error
        raise
    finally:
        if outcome is None:
            outcome = RunFailed(ExitCode.INFRASTRUCTURE, "the run was interrupted")
        _ledger.end(index, outcome)


def configure(options: Mapping[str, Any], *, dry_run: bool = False) -> None:
    """Set the command line's options for every `run` of this process (used by `elastic run`)."""
    module = sys.modules[__name__]
    module._command_line = dict(options)  # type: ignore[attr-defined]
    module._dry_run = dry_run  # type: ignore[attr-defined]


# -- one run ----------------------------------------------------------------------------------


def _run(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    index: int,
) -> RunResult:
    resolved = _complete(resolve(config, process_environ(), _command_line))
    if _dry_run:
        _print_resolved(resolved)
        raise DryRun(0)
    before = _ledger.before(index)
    script = describe(fn, args, kwargs)
    roots = [os.path.abspath(r) if "://" not in r else r for r in _roots(resolved)]
    _ledger.check_roots(roots)
    found = resume.look(resolved)
    if found is not None:
        resolved = resume.adopt(resolved, found)
    place = job_root.find(
        resolved.config,
        stem=Path(script.path).stem,
        saved_job=None if found is None else found.job,
    )
    preflight.check(resolved.config, preflight.look(resolved.config, run_root=place.runs))
    place.root.mkdir(parents=True, exist_ok=True)
    lock = JobLock.take(place.root, place.job)
    try:
        job_root.remember(place)
        run_dir = job_root.make_run_dir(place.runs)
        lock.describe(pid=os.getpid(), job=place.job, run_dir=str(run_dir))
        if place.is_new_name and (resolved.config.checkpoint or resolved.config.remote):
            write_error(f"job {place.job} (a later start in the same place goes on from it)")
        spec = {
            "config": resolved.config.to_dict(),
            "script": script.to_dict(),
            "job": place.job,
            "first_generation": 1 if found is None else found.generation + 1,
            "run_index": index,
            "earlier_results": before,
            "lock_root": str(place.root),
        }
        result = _supervise(spec, run_dir, resolved, script, lock)
    finally:
        lock.close()
    _ledger.complete(index, roots)
    return RunResult(
        value=from_plain(result.get("value")),
        step=int(result.get("step") or 0),
        generation=int(result.get("generation") or 0),
        events_path=str(run_dir / "events"),
        goodput=result.get("goodput"),
    )


def _supervise(
    spec: Mapping[str, Any],
    run_dir: Path,
    resolved: Resolved,
    script: ScriptSpec,
    lock: JobLock,
) -> dict[str, Any]:
    """Start the agent, show the run, and return what it left as its result."""
    config = resolved.config
    events = EventLog(run_dir / "events" / "caller.jsonl", "caller", run=run_dir.name)
    events.emit(
        "config.resolved",
        config={**config.to_dict(), "job": spec["job"], "script": script.shown},
        origins={name: str(origin) for name, origin in resolved.origins.items()},
    )
    watch = Watch(run_dir, make_console(config.console, sys.stdout, sys.stderr), SystemClock())
    agent: caller.AgentProcess | None = None
    try:
        with caller.Signals(config) as signals:
            agent = caller.AgentProcess.start(spec, run_dir, config=config, lock_fd=lock.fd)
            returncode = caller.wait(agent, signals, config=config, events=events, look=watch.look)
        return caller.read_result(returncode, run_dir, agent.pid)
    finally:
        with contextlib.ExitStack() as stack:
            stack.callback(events.close)
            stack.callback(watch.close)
            if agent is not None:
                stack.callback(agent.close)
                stack.callback(agent.end, within_s=caller.NOW_S)


def _complete(resolved: Resolved) -> Resolved:
    """Fill in what depends on this machine and on other fields."""
    config = resolved.config
    if config.nproc is None:
        gpus = preflight.count_gpus(process_environ()) if config.backend == "nccl" else 0
        resolved = resolved.replace(Origin.MACHINE, nproc=max(1, gpus))
        config = resolved.config
    if config.virtual_ranks is None:
        workers = (config.nproc or 1) * config.max_nodes
        resolved = resolved.replace(
            Origin.DEFAULT, virtual_ranks=VIRTUAL_RANKS_PER_WORKER * workers
        )
    return resolved


def _roots(resolved: Resolved) -> list[str]:
    return [root for root in (resolved.config.checkpoint, resolved.config.remote) if root]


def _print_resolved(resolved: Resolved) -> None:
    """Print each field, its value and where it came from, as JSON lines."""
    for name, origin in resolved.origins.items():
        value = getattr(resolved.config, name)
        line = {"field": name, "value": value, "origin": str(origin)}
        try:
            text = json.dumps(line)
        except TypeError:
            text = json.dumps({**line, "value": shown(value)})
        sys.stdout.write(text + "\n")


# -- errors that reach the top ------------------------------------------------------------------


def _install_excepthook() -> None:
    """Let an uncaught error of ours end the script with one sentence and its exit code."""
    if threading.current_thread() is not threading.main_thread():
        return
    if getattr(sys.excepthook, "_everstep", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, (RunFailed, Misconfigured)):
            previous(kind, error, trace)
            return
        report(error, debug=_wants_debug(), trace=trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code_of(error))  # the interpreter's own code for an exception is 1

    hook._everstep = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def report(error: ElasticError, *, debug: bool, trace: TracebackType | None = None) -> None:
    """Write one sentence; with `debug` also the tracebacks of the worker and of this process."""
    write_error(str(error))
    if not debug:
        return
    worker_trace = getattr(error, "traceback", "")
    if worker_trace:
        sys.stderr.write(worker_trace)
    if trace is not None:
        sys.stderr.write("".join(traceback.format_exception(type(error), error, trace)))


def _wants_debug() -> bool:
    environ = process_environ()
    given = environ.get("EVERSTEP_DEBUG", "")
    return bool(_command_line.get("debug")) or given.lower() in ("1", "true", "yes", "on")


class _Callable(ModuleType):
    """This module, which can be called as the function it holds."""

    def __call__(self, *args: Any, **kwargs: Any) -> RunResult:
        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
