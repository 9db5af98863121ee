"""`elastic.run()`: start a run from an ordinary Python program and hand back its result.

In the caller it resolves the configuration, refuses what cannot work before anything is started,
starts this host's agent, shows progress and returns what `train` returned. In a worker, which runs
the same script, the same call runs `train` (`_worker_hook`) and code after it is never reached.

The module itself can be called: `elastic.run(...)` works whether or not somebody has imported
`elastic.run` as a module before.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from elastic.clock import SYSTEM_CLOCK
from elastic.config import Origin, Resolved, process_environ, resolve, shown
from elastic.console import make_console, write_error
from elastic.errors import ElasticError, ExitCode, Misconfigured, RunFailed, exit_code_of
from elastic.events import EventLog, read_events
from elastic.goodput import measure
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
_as_json = False
_debug = False
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
        resolved_only = outcome is None and _dry_run  # its JSON is out already
        if outcome is None:
            outcome = RunFailed(ExitCode.INFRASTRUCTURE, "the run was interrupted")
        _ledger.end(index, outcome)
        if _as_json and not resolved_only:
            sys.stdout.write(json.dumps(_ledger.entries[index]) + "\n")
            sys.stdout.flush()


def configure(options: Mapping[str, Any], *, dry_run: bool = False, as_json: bool = False) -> None:
    """Set the command line's options for every `run` of this process (used by `elastic run`)."""
    module = sys.modules[__name__]
    module._command_line = dict(options)  # type: ignore[attr-defined]
    module._dry_run = dry_run  # type: ignore[attr-defined]
    module._as_json = as_json  # type: ignore[attr-defined]


def was_called() -> bool:
    """Whether `run` has been called in this process."""
    return bool(_ledger.entries)


# -- one run ----------------------------------------------------------------------------------


def _run(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    index: int,
) -> RunResult:
    resolved = _complete(resolve(config, process_environ(), _command_line))
    _remember_debug(wanted=resolved.config.debug)
    script = describe(fn, args, kwargs)
    repeats = script.kind != "function"  # workers pass the earlier calls again
    before = _ledger.before(index) if repeats else []
    roots = _roots(resolved)
    if repeats:
        _ledger.check_roots(roots)
    found = resume.look(resolved)
    if found is not None:
        resolved = resume.adopt(resolved, found)
    if _dry_run:
        _print_resolved(resolved, script)
        raise DryRun(0)
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
        if resolved.config.console != "off":
            write_error(_opening(place, run_dir, found))
        spec = {
            "config": resolved.config.to_dict(),
            "origins": {name: str(origin) for name, origin in resolved.origins.items()},
            "script": script.to_dict(),
            "job": place.job,
            "resume": None if found is None else found.to_dict(),
            "first_generation": 1 if found is None else found.generation + 1,
            "run_index": index if repeats else 0,
            "earlier_results": before,
            "caller_pid": os.getpid(),
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
        goodput=_goodput(result, run_dir),
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
    console = make_console(config.console, sys.stdout, sys.stderr)
    watch = Watch(run_dir, console, SYSTEM_CLOCK, tracebacks=config.debug)
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
    places = {
        name: os.path.abspath(value)
        for name in ("checkpoint", "remote", "log_dir")
        if (value := getattr(resolved.config, name)) is not None and "://" not in value
    }
    config = dataclasses.replace(resolved.config, **places)
    resolved = Resolved(config, resolved.origins)
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


def _print_resolved(resolved: Resolved, script: ScriptSpec) -> None:
    """Print what would be run, and each field with its value and where that came from."""
    values = resolved.config.to_dict()
    if _as_json:
        fields = {
            name: {"value": values[name], "origin": str(origin)}
            for name, origin in resolved.origins.items()
        }
        sys.stdout.write(json.dumps({"script": script.to_dict(), "config": fields}) + "\n")
        return
    sys.stdout.write(f"would run {script.shown} with\n")
    width = max(map(len, values))
    for name, origin in resolved.origins.items():
        text = shown(name, getattr(resolved.config, name))
        sys.stdout.write(f"  {name:<{width}}  {text:<24}  {origin}\n")


def _opening(place: job_root.JobRoot, run_dir: Path, found: resume.Found | None) -> str:
    """Return the first line that a person sees: which job, where, and from which step."""
    start = "" if found is None else f" goes on from step {found.step} and"
    return f"job {place.job}{start} writes to {run_dir}"


def _goodput(result: Mapping[str, Any], run_dir: Path) -> float | None:
    """Return the agent's figure, or the one that the events give."""
    given = result.get("goodput")
    return float(given) if given is not None else measure(read_events(run_dir)).share


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
        report(error, trace=trace)
        # The interpreter ends with 1 after an exception, unless its hook asks for another end.
        raise SystemExit(exit_code_of(error))

    hook._everstep = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def report(error: ElasticError, *, trace: TracebackType | None = None) -> None:
    """Write one sentence; with `debug` also the tracebacks of the worker and of this process."""
    write_error(str(error))
    if not _wants_debug():
        return
    worker_trace = getattr(error, "traceback", "")
    if worker_trace:
        sys.stderr.write(worker_trace)
    if trace is not None:
        sys.stderr.write("".join(traceback.format_exception(type(error), error, trace)))


def _remember_debug(*, wanted: bool) -> None:
    sys.modules[__name__]._debug = wanted  # type: ignore[attr-defined]


def _wants_debug() -> bool:
    """Whether the last run asked for it, or will: an error may come before it was resolved."""
    given = process_environ().get("EVERSTEP_DEBUG", "")
    return _debug or bool(_command_line.get("debug")) or given.lower() in ("1", "true", "yes", "on")


class _Callable(ModuleType):
    """This module, which can be called as the function it holds."""

    def __call__(self, *args: Any, **kwargs: Any) -> RunResult:
        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
__wrapped__ = run  # what inspect.signature(elastic.run) shows
