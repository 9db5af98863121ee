"""`bench.py recovery`: what it costs to lose one of several workers, beside a restart by torchrun.

One long run trains the model of bench_model.py. Again and again a random worker gets SIGKILL at a
moment uniform over a step; then the benchmark waits until the worker has been replaced, the World
is whole and a few steps have passed. The clock runs from the kill's own stamp to the moment when
the last survivor has completed an agreement in the generation without the victim. The parts of

    total = detect + agree + unblock + rebuild + heal + redo

follow each other without gaps (scripts/run_facts.py says how they are found):

    detect   kill -> the agent has written down that the worker is gone
    agree    -> the World without it is in force (a transaction in etcd)
    unblock  -> the last survivor has left its collective and begins to build
    rebuild  -> the new process group stands
    heal     -> inventories are exchanged, who was behind has caught up, copies are under way
    redo     -> the step is computed, exchanged and agreed again

`kill_overhead` is total - redo, for each kill by itself. The redone step is computed while a new
worker warms up on the same cores and state is copied behind it; against an undisturbed step of the
reduced World (`step_ms_reduced`) the cost is `kill_over_undisturbed_step_ms`.
A quantile of a part is not a part of the quantile: the split holds the mean of each part, whose sum
is the mean total, given beside it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts import bench_peers_torchrun
from scripts.bench_model import BATCH, DEPTH, WIDTH, num_parameters
from scripts.programs import commit_of
from scripts.run_facts import PARTS, Recovery, measure, percentile, step_ms
from scripts.runs import Run

WORKLOAD = Path(__file__).resolve().parent / "bench_workload.py"
START_TIMEOUT_S = 180.0
RECOVERY_TIMEOUT_S = 60.0
WHOLE_TIMEOUT_S = 90.0
STEADY_STEPS = 4
HANG_TIMEOUT_S = 2.0
ADAMW_BYTES_PER_PARAMETER = 8

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    runs: int = 10
    stops: int = 3
    workers: int = 4
    width: int = WIDTH
    depth: int = DEPTH
    seed: int = 1
    peers: bool = True
    peer_runs: int = 5
    keep: Path | None = None


def run(options: Options, say: Say) -> dict[str, Any]:
    """Return the object of `bench.py recovery --json`. Raises ProgramFailed if ours fails."""
    kills, stops, found = _ours(options, say)
    totals = [r.total_ms for r in kills]
    overheads = [r.overhead_ms for r in kills]
    reduced = found["step_ms_reduced"]
    result: dict[str, Any] = {
        "runs": len(kills),
        "params": num_parameters(options.width, options.depth),
        "workers": options.workers,
        "virtual_ranks": options.workers,
        "batch": BATCH,
        **found,
        "kill_total_ms_p50": _ms(percentile(totals, 0.5)),
        "kill_total_ms_p95": _ms(percentile(totals, 0.95)),
        "kill_overhead_ms_p50": _ms(percentile(overheads, 0.5)),
        "kill_overhead_ms_p95": _ms(percentile(overheads, 0.95)),
        "kill_over_undisturbed_step_ms_p50": (
            None if reduced is None else _ms(percentile([t - reduced for t in totals], 0.5))
        ),
        "kill_redo_ms_p50": _ms(percentile([r.parts_ms["redo"] for r in kills], 0.5)),
        **_stops(stops, options),
        "split": {p: _ms(statistics.fmean(r.parts_ms[p] for r in kills)) for p in PARTS},
        "split_is": "mean of each part over all kills; they add up to total_ms_mean",
        "total_ms_mean": _ms(statistics.fmean(totals)),
        "kills": [
            {"total_ms": _ms(r.total_ms), **{p: _ms(r.parts_ms[p]) for p in PARTS}} for r in kills
        ],
        **_heal_ratio(kills, options),
    }
    result["peers"] = _peers(options, say)
    peer = result["peers"]["torchrun"]
    if peer["total_ms_p50"] is not None:
        peer["times_ours"] = round(peer["total_ms_p50"] / result["kill_total_ms_p50"], 1)
    result["seed"] = options.seed
    result["commit"] = commit_of()
    result["torch"] = metadata.version("torch")
    result["cpu_count"] = os.cpu_count()
    return result


def _ours(
    options: Options, say: Say
) -> tuple[list[Recovery], list[Recovery], dict[str, float | None]]:
    rng = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        directory = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-"))
        )
        stop_file = directory / "stop"
        command = [sys.executable, str(WORKLOAD), "--stop", str(stop_file)]
        command += ["--width", str(options.width), "--depth", str(options.depth)]
        settings = {
            "job": "bench",
            "nproc": options.workers,
            "virtual_ranks": options.workers,
            "threads": 1,
            "max_failures": 1000,
            "max_reshapes": 10000,
            "hang_timeout_s": HANG_TIMEOUT_S,
            "console": "off",
        }
        training = Run("the benchmark's run", command, log_dir=directory, settings=settings)
        with training:
            say(f"starting {options.workers} workers")
            _until_steady(training, options.workers, START_TIMEOUT_S)
            kills = []
            for number in range(options.runs):
                recovery = _fault(training, options, rng, signal.SIGKILL)
                kills.append(recovery)
                say(
                    f"kill {number + 1} of {options.runs}: {recovery.total_ms:.0f} ms, "
                    f"{recovery.overhead_ms:.0f} ms without the redone step"
                )
            stops = []
            for number in range(options.stops):
                recovery = _fault(training, options, rng, signal.SIGSTOP)
                stops.append(recovery)
                say(f"stop {number + 1} of {options.stops}: {recovery.total_ms:.0f} ms")
            stop_file.touch()
            training.until_done(within_s=60)
            full = step_ms(training.events, size=options.workers)
            reduced = step_ms(training.events, size=options.workers - 1)
            return kills, stops, {"step_ms": _ms(full), "step_ms_reduced": _ms(reduced)}


def _fault(training: Run, options: Options, rng: random.Random, number: signal.Signals) -> Recovery:
    """Send the signal to a random worker at a random phase; return when all is whole again."""
    wait_s = rng.random() * (step_ms(training.events, size=options.workers) or 0.0) / 1e3
    _follow_for(training, wait_s)
    assert training.world is not None
    victim = rng.choice(training.world.workers)
    fault = training.signal(victim, number)
    recovery = training.until(
        lambda: measure(training.events, fault),
        within_s=RECOVERY_TIMEOUT_S,
        what=f"recovery from {number.name}",
    )
    _until_steady(training, options.workers, WHOLE_TIMEOUT_S)
    return recovery


def _until_steady(training: Run, size: int, within_s: float) -> None:
    """Wait until the World is whole and a few steps have been committed in it."""
    training.until(
        lambda: training.is_whole(size), within_s=within_s, what=f"a whole World of {size} workers"
    )
    first = training.step
    training.until(
        lambda: training.step >= first + STEADY_STEPS, within_s=within_s, what="steady steps"
    )


def _follow_for(training: Run, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    training.until(lambda: time.monotonic() >= until_s, within_s=seconds + 60, what="the next kill")


def _stops(stops: Sequence[Recovery], options: Options) -> dict[str, Any]:
    names = ("stop_total_ms_p50", "stop_overhead_ms_p50")
    if not stops:
        why = "no worker was stopped: --stops 0" if options.stops == 0 else "no stop recovered"
        return {**dict.fromkeys(names), "stop_why": why}
    overheads = [r.overhead_ms - 1e3 * HANG_TIMEOUT_S for r in stops]
    return {
        "stop_runs": len(stops),
        "stop_hang_timeout_ms": 1e3 * HANG_TIMEOUT_S,
        names[0]: _ms(percentile([r.total_ms for r in stops], 0.5)),
        names[1]: _ms(percentile(overheads, 0.5)),
    }


def _heal_ratio(kills: Sequence[Recovery], options: Options) -> dict[str, Any]:
    """Bytes moved to heal over the least that can do: one new copy of what the victim held.

    Each segment's state has two holders, so a worker holds 2/W of it. Rows of parameters are on
    every survivor and need not move.
    """
    state = ADAMW_BYTES_PER_PARAMETER * num_parameters(options.width, options.depth)
    least = state * min(2, options.workers) / options.workers
    moved = [r.heal_bytes for r in kills]
    return {
        "heal_bytes_ratio": round(statistics.median(moved) / least, 3),
        "heal_bytes_p50": int(statistics.median(moved)),
        "heal_bytes_minimum": int(least),
    }


def _peers(options: Options, say: Say) -> dict[str, Any]:
    if not options.peers:
        return {"torchrun": {"total_ms_p50": None, "why": "not asked for: --no-peers"}}
    say("the peer: torchrun, restart of all workers")
    found = bench_peers_torchrun.measure(
        runs=options.peer_runs,
        workers=options.workers,
        width=options.width,
        depth=options.depth,
        seed=options.seed,
    )
    return {"torchrun": found}


def table(result: Mapping[str, Any]) -> Table:
    """Return the figures as a person reads them."""
    shown = Table(title=f"SIGKILL of one of {result['workers']} workers, {result['runs']} times")
    shown.add_column("")
    shown.add_column("ms", justify="right")
    rows = [
        ("kill to next step, p50", result["kill_total_ms_p50"]),
        ("kill to next step, p95", result["kill_total_ms_p95"]),
        ("without the redone step, p50", result["kill_overhead_ms_p50"]),
        ("without the redone step, p95", result["kill_overhead_ms_p95"]),
        ("beyond an undisturbed step, p50", result["kill_over_undisturbed_step_ms_p50"]),
        *((f"  {part}, mean", result["split"][part]) for part in PARTS),
        (f"a step of {result['workers']} workers", result["step_ms"]),
        (f"a step of {result['workers'] - 1} workers", result["step_ms_reduced"]),
        ("SIGSTOP to next step, p50", result["stop_total_ms_p50"]),
        ("torchrun, kill to next step, p50", result["peers"]["torchrun"]["total_ms_p50"]),
    ]
    for name, value in rows:
        shown.add_row(name, "?" if value is None else f"{value:,.1f}")
    shown.add_row("bytes moved over the least", f"{result['heal_bytes_ratio']:.2f} x")
    return shown


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
