"""`bench.py balance`: what fewer micro-batches for a slow worker gain over an even split.

Two workers train the model of bench_model.py, each on a core of its own. A busy process shares the
second one's core, so that it computes at half speed. Runs with `balance` off and on take turns; of
each the median undisturbed step counts, with balance on after the last change of shares.

    throughput_ratio_p50   even split's step / balanced step, median over the pairs of runs
    shares                 micro-batches of each worker after the last change, for each run
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.bench_model import DEPTH, WIDTH, num_parameters
from scripts.programs import Program, ProgramFailed, commit_of
from scripts.run_facts import committed
from scripts.runs import Run

WORKLOAD = Path(__file__).resolve().parent / "bench_workload.py"
BUSY = "while True: pass"
START_TIMEOUT_S = 180.0
STEPS_TIMEOUT_S = 600.0
SETTLE_STEPS = 16
"""Committed steps before any counts: the first of a run, and those in which shares are found."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    pairs: int = 3
    steps: int = 30
    virtual_ranks: int = 12
    batch: int = 64
    width: int = WIDTH
    depth: int = DEPTH


def run(options: Options, say: Say) -> dict[str, Any]:
    """Return the object of `bench.py balance --json`. Raises ProgramFailed if a run fails."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ProgramFailed("bench.py balance needs two cores, and this process may use one")
    even_ms: list[float] = []
    balanced_ms: list[float] = []
    shares: list[list[int]] = []
    for number in range(options.pairs):
        for balance, found in ((False, even_ms), (True, balanced_ms)):
            median_ms, counts = _one(options, cores, balance=balance)
            found.append(median_ms)
            if balance:
                shares.append(counts)
        ratio = even_ms[-1] / balanced_ms[-1]
        say(f"pair {number + 1} of {options.pairs}: {ratio:.2f} x")
    ratios = [even / ours for even, ours in zip(even_ms, balanced_ms, strict=True)]
    return {
        "pairs": options.pairs,
        "steps": options.steps,
        "params": num_parameters(options.width, options.depth),
        "virtual_ranks": options.virtual_ranks,
        "batch": options.batch,
        "workers": 2,
        "even_ms_p50": round(statistics.median(even_ms), 1),
        "balanced_ms_p50": round(statistics.median(balanced_ms), 1),
        "throughput_ratio_p50": round(statistics.median(ratios), 3),
        "throughput_ratios": [round(ratio, 3) for ratio in ratios],
        "shares": shares,
        "commit": commit_of(),
        "torch": metadata.version("torch"),
        "cpu_count": os.cpu_count(),
    }


def _one(options: Options, cores: list[int], *, balance: bool) -> tuple[float, list[int]]:
    """Train once; the median step in ms and the last shares told, empty if none were changed."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-")))
        stop_file = directory / "stop"
        command = [sys.executable, str(WORKLOAD), "--stop", str(stop_file)]
        command += ["--width", str(options.width), "--depth", str(options.depth)]
        command += ["--batch", str(options.batch)]
        settings = {
            "job": "bench",
            "nproc": 2,
            "virtual_ranks": options.virtual_ranks,
            "threads": 1,
            "balance": str(balance).lower(),
            "hang_timeout_s": 600,
            "console": "off",
        }
        training = stack.enter_context(
            Run("the benchmark's run", command, log_dir=directory, settings=settings)
        )
        training.until(lambda: training.step >= 1, within_s=START_TIMEOUT_S, what="the first step")
        for slot, core in enumerate(cores):
            pin(training.pid_in(slot), core)
        busy = stack.enter_context(
            Program("the busy process", [sys.executable, "-c", BUSY], log_path=directory / "busy")
        )
        pin(busy.pid, cores[1])
        first = training.step + SETTLE_STEPS
        last = first + options.steps
        training.until(lambda: training.step > last, within_s=STEPS_TIMEOUT_S, what=f"step {last}")
        stop_file.touch()
        training.until_done(within_s=60)
        return median_step_ms(training.events, first, last), last_shares(training.events)


def pin(pid: int, core: int) -> None:
    """Let all threads of a process run on one core only."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


def median_step_ms(events: list[dict[str, Any]], first: int, last: int) -> float:
    """Return the median time between the commits of steps `first` to `last`."""
    at_s = {step: record.at_s for step, record in committed(events).items()}
    times = [1e3 * (at_s[step] - at_s[step - 1]) for step in range(first + 1, last + 1)]
    return statistics.median(times)


def last_shares(events: list[dict[str, Any]]) -> list[int]:
    """Return the micro-batches of each worker as told last; empty if they stayed even."""
    told = [record["counts"] for record in events if record["event"] == "shares.changed"]
    return list(told[-1]) if told else []


def table(result: Mapping[str, Any]) -> Table:
    """Return the figures as a person reads them."""
    shown = Table(title="two workers, one of them at half speed")
    shown.add_column("")
    shown.add_column("", justify="right")
    shown.add_row("even split, ms per step", f"{result['even_ms_p50']:,.1f}")
    shown.add_row("balanced, ms per step", f"{result['balanced_ms_p50']:,.1f}")
    shown.add_row("throughput, balanced over even", f"{result['throughput_ratio_p50']:.2f} x")
    return shown
