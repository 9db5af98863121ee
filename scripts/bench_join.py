"""`bench.py join`: how a new worker comes into a running job.

One run trains the model of bench_model.py with one spare: a process that is warm and in no World.
Again and again a random worker gets SIGKILL; the spare takes its place at a step boundary, and a
new spare is started.

    pause_over_step_ms_p50   longest time between two commits around the join, less a step of the
                             World before it
    full_strength_s_p50      from the kill until a World of full size has committed a step
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.bench_model import BATCH, DEPTH, WIDTH, num_parameters
from scripts.programs import commit_of
from scripts.run_facts import Record, committed, percentile, step_ms, worlds
from scripts.runs import Run

WORKLOAD = Path(__file__).resolve().parent / "bench_workload.py"
START_TIMEOUT_S = 180.0
JOIN_TIMEOUT_S = 90.0
STEADY_STEPS = 4
AROUND = 3
"""Commits before and after a join that are looked at for its pause."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    runs: int = 10
    workers: int = 4
    width: int = WIDTH
    depth: int = DEPTH
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """One kill and what followed."""

    full_strength_s: float
    pause_ms: float


def run(options: Options, say: Say) -> dict[str, Any]:
    """Return the object of `bench.py join --json`. Raises ProgramFailed if the run fails."""
    events, killed_at_s = _train(options, say)
    joins = [join_after(events, at_s, size=options.workers) for at_s in killed_at_s]
    found = [join for join in joins if join is not None]
    step = step_ms(events, size=options.workers - 1) or step_ms(events, size=options.workers)
    assert step is not None
    pauses = [join.pause_ms - step for join in found]
    strengths = [join.full_strength_s for join in found]
    return {
        "runs": len(found),
        "params": num_parameters(options.width, options.depth),
        "workers": options.workers,
        "spares": 1,
        "batch": BATCH,
        "step_ms": round(step, 1),
        "pause_over_step_ms_p50": _rounded(percentile(pauses, 0.5), 1),
        "pause_over_step_ms_p95": _rounded(percentile(pauses, 0.95), 1),
        "full_strength_s_p50": _rounded(percentile(strengths, 0.5), 2),
        "full_strength_s_p95": _rounded(percentile(strengths, 0.95), 2),
        "seed": options.seed,
        "commit": commit_of(),
        "torch": metadata.version("torch"),
        "cpu_count": os.cpu_count(),
    }


def _train(options: Options, say: Say) -> tuple[Sequence[Record], list[float]]:
    rng = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-")))
        stop_file = directory / "stop"
        command = [sys.executable, str(WORKLOAD), "--stop", str(stop_file)]
        command += ["--width", str(options.width), "--depth", str(options.depth)]
        settings = {
            "job": "bench",
            "nproc": options.workers,
            "virtual_ranks": options.workers,
            "spares": 1,
            "threads": 1,
            "max_failures": 1000,
            "max_reshapes": 10000,
            "console": "off",
        }
        training = stack.enter_context(
            Run("the benchmark's run", command, log_dir=directory, settings=settings)
        )
        say(f"starting {options.workers} workers and a spare")
        _until_steady(training, options.workers, START_TIMEOUT_S)
        killed_at_s: list[float] = []
        for number in range(options.runs):
            _follow_for(training, rng.random())
            assert training.world is not None
            victim = rng.choice(training.world.workers)
            killed_at_s.append(training.signal(victim, signal.SIGKILL).at_s)
            _until_steady(training, options.workers, JOIN_TIMEOUT_S)
            join = join_after(training.events, killed_at_s[-1], size=options.workers)
            if join is not None:
                say(f"kill {number + 1}: whole again after {join.full_strength_s:.2f} s")
        stop_file.touch()
        training.until_done(within_s=60)
        return training.events, killed_at_s


def _follow_for(training: Run, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    training.until(lambda: time.monotonic() >= until_s, within_s=seconds + 60, what="the next kill")


def _until_steady(training: Run, workers: int, within_s: float) -> None:
    """Wait until the World is whole, a few steps are done in it, and a spare is ready."""
    training.until(
        lambda: training.is_whole(workers) and spare_is_ready(training.events),
        within_s=within_s,
        what=f"a whole World of {workers} workers, and a spare",
    )
    first = training.step
    training.until(
        lambda: training.step >= first + STEADY_STEPS, within_s=within_s, what="steady steps"
    )


def spare_is_ready(events: Sequence[Record]) -> bool:
    """Return whether a worker is ready that is in no World and has not ended."""
    ready = {r["worker_id"] for r in events if r["event"] == "worker.ready"}
    ended = {r["worker_id"] for r in events if r["event"] == "worker.exited"}
    found = worlds(events)
    inside = set(found[-1].workers) if found else set()
    return bool(ready - ended - inside)


def join_after(events: Sequence[Record], killed_at_s: float, *, size: int) -> Join | None:
    """Return what followed a kill; None while the World is not whole again."""
    whole = next((w for w in worlds(events) if w.at_s > killed_at_s and w.size == size), None)
    if whole is None:
        return None
    steps = list(committed(events).values())
    first = next((i for i, s in enumerate(steps) if s.generation >= whole.generation), None)
    if first is None:
        return None
    around = steps[max(0, first - AROUND) : first + AROUND]
    after = [s for s in around if s.at_s > killed_at_s]
    gaps = [1e3 * (b.at_s - a.at_s) for a, b in pairwise(after)]
    if not gaps:
        return None
    return Join(full_strength_s=steps[first].at_s - killed_at_s, pause_ms=max(gaps))


def table(result: Mapping[str, Any]) -> Table:
    """Return the figures as a person reads them."""
    shown = Table(title=f"a spare takes the place of a killed worker, {result['runs']} times")
    shown.add_column("")
    shown.add_column("", justify="right")
    shown.add_row("pause beyond a step, p50, ms", f"{result['pause_over_step_ms_p50']:,.1f}")
    shown.add_row("full strength after, p50, s", f"{result['full_strength_s_p50']:.2f}")
    shown.add_row("a step before the join, ms", f"{result['step_ms']:,.1f}")
    return shown


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
