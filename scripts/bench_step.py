"""`bench.py step`: what a step costs, beside DDP, DDP with a ZeroRedundancyOptimizer, and torchft.

For each number of workers all programs train the same model on the same micro-batches, each worker
an equal share, one intra-op thread each. They take turns, a block of steps at a time
(scripts/bench_turns.py). A step lasts from the moment when a rank may begin it until it may begin
the next, on the slowest rank. Our reduction is the exact one, and each segment of optimizer state
has two holders.

    ours_ms, ddp_ms, zero_ms   medians over all steps but the first block and each block's first
    ratio_ddp, ratio_zero      ours / theirs
    peak_mb, ddp_peak_mb       largest resident set of a worker (ours counts what the fork server
                               has loaded and all workers share)
    moved_mb, ddp_moved_mb     bytes over the loopback device per step, all workers together
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts import bench_peers_torchft, bench_turns, step_figures
from scripts.bench_model import BATCH, DEPTH, WIDTH, num_parameters
from scripts.bench_turns import BLOCK_STEPS
from scripts.programs import Program, ProgramFailed, commit_of

HERE = Path(__file__).resolve().parent
NAMES = ("ours", "ddp", "zero")
TURN_TIMEOUT_S = 300.0
END_TIMEOUT_S = 90.0
POLL_S = 0.01

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    workers: tuple[int, ...] = (2, 3, 4)
    blocks: int = 7
    virtual_ranks: int = 12
    torchft: bool = True
    width: int = WIDTH
    depth: int = DEPTH

    @property
    def steps(self) -> int:
        """Steps of each program for one number of workers."""
        return self.blocks * BLOCK_STEPS


def run(options: Options, say: Say) -> dict[str, Any]:
    """Return the object of `bench.py step --json`. Raises ProgramFailed if a program fails."""
    for workers in options.workers:
        if options.virtual_ranks % workers:
            raise ProgramFailed(
                f"{options.virtual_ranks} virtual ranks cannot be shared out evenly to {workers} "
                "workers: give --virtual-ranks that all numbers of --workers divide"
            )
    why = bench_peers_torchft.install() if options.torchft else "not asked for: --no-torchft"
    names = NAMES if why else (*NAMES, "torchft")
    found: dict[str, Any] = {}
    for workers in options.workers:
        figures = _one(options, workers, names, say)
        found[str(workers)] = figures
        say(
            f"{workers} workers: ours {figures['ours_ms']:.0f} ms, DDP {figures['ddp_ms']:.0f} ms "
            f"({figures['ratio_ddp']:.2f} x), with ZeRO {figures['zero_ms']:.0f} ms "
            f"({figures['ratio_zero']:.2f} x)"
        )
    torchft: dict[str, Any] = {"version": bench_peers_torchft.VERSION, "ratio_ddp": None}
    if why:
        torchft["why"] = why
    else:
        each = {workers: figures["torchft_ratio_ddp"] for workers, figures in found.items()}
        torchft |= {"ratio_ddp": each, "settings": "a group per worker, gloo, a quorum per step"}
    return {
        "workers": found,
        "peers": {"torchft": torchft},
        "params": num_parameters(options.width, options.depth),
        "virtual_ranks": options.virtual_ranks,
        "batch": BATCH,
        "steps": (options.blocks - step_figures.WARM_UP_BLOCKS) * (BLOCK_STEPS - 1),
        "reduction": "exact",
        "commit": commit_of(),
        "torch": metadata.version("torch"),
        "cpu_count": os.cpu_count(),
    }


def _one(options: Options, workers: int, names: Sequence[str], say: Say) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-")))
        say(f"starting {workers} workers each of {', '.join(names)}")
        programs: dict[str, list[Program]] = {}
        for name in names:
            if name == "torchft":
                lighthouse, address = bench_peers_torchft.start_lighthouse(directory, workers)
                stack.enter_context(lighthouse)
                started = [
                    bench_peers_torchft.start_worker(
                        rank,
                        address,
                        directory,
                        _peer_environment(name, directory, options, workers),
                    )
                    for rank in range(workers)
                ]
            else:
                started = [_start(name, directory, options, workers)]
            programs[name] = [stack.enter_context(program) for program in started]
        moved: dict[str, list[float]] = {name: [] for name in names}
        for block in range(options.blocks):
            for name in names:
                before = loopback_bytes()
                bench_turns.give(directory, name, block)
                _until_done(programs, directory, name, block, workers, options)
                moved[name].append((loopback_bytes() - before) / BLOCK_STEPS / 1e6)
        for name in names:
            for program in programs[name]:
                code = program.wait(END_TIMEOUT_S)
                if code != 0:
                    raise ProgramFailed(f"{name} did not end well ({code}):\n{program.tail()}")
        records = {name: bench_turns.records(directory, name) for name in names}
    return figures_of(records, moved)


def figures_of(
    records: Mapping[str, Sequence[Mapping[str, Any]]], moved: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return the figures of one number of workers."""
    times = {name: step_figures.step_ms(found) for name, found in records.items()}
    ddp = step_figures.ratio(times["ours"], times["ddp"])
    zero = step_figures.ratio(times["ours"], times["zero"])
    more = {}
    if "torchft" in times:
        more["torchft_ratio_ddp"] = step_figures.ratio(times["torchft"], times["ddp"])["ratio"]
    return {
        **{f"{name}_ms": round(step_figures.median(found), 1) for name, found in times.items()},
        **more,
        "ratio_ddp": ddp["ratio"],
        "ratio_ddp_quartiles": ddp["quartiles"],
        "ratio_zero": zero["ratio"],
        "ratio_zero_quartiles": zero["quartiles"],
        "peak_mb": step_figures.peak_mb(records["ours"]),
        "ddp_peak_mb": step_figures.peak_mb(records["ddp"]),
        "zero_peak_mb": step_figures.peak_mb(records["zero"]),
        "moved_mb": round(sorted(moved["ours"])[len(moved["ours"]) // 2], 1),
        "ddp_moved_mb": round(sorted(moved["ddp"])[len(moved["ddp"]) // 2], 1),
    }


def _start(name: str, directory: Path, options: Options, workers: int) -> Program:
    log_path = directory / f"{name}.log"
    if name == "ours":
        script = str(HERE / "bench_step_workload.py")
        command = [sys.executable, script, str(directory), str(options.steps)]
        command += ["--width", str(options.width), "--depth", str(options.depth)]
        settings = {
            "job": "bench",
            "nproc": workers,
            "virtual_ranks": options.virtual_ranks,
            "threads": 1,
            "balance": "false",
            "hang_timeout_s": 3600,
            "slow_timeout_s": 3600,
            "console": "off",
            "log_dir": directory,
        }
        environment = {f"EVERSTEP_{key.upper()}": str(value) for key, value in settings.items()}
        return Program(name, command, log_path=log_path, environment=environment)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={workers}", str(HERE / "peer_step_worker.py")]
    environment = _peer_environment(name, directory, options, workers)
    return Program(name, command, log_path=log_path, environment=environment)


def _peer_environment(name: str, directory: Path, options: Options, workers: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "PEER_NAME": name,
        "PEER_SIZE": str(workers),
        "PEER_DIRECTORY": str(directory),
        "PEER_STEPS": str(options.steps),
        "PEER_VIRTUAL_RANKS": str(options.virtual_ranks),
        "PEER_WIDTH": str(options.width),
        "PEER_DEPTH": str(options.depth),
    }


def _until_done(  # noqa: PLR0913 - what to look at, and until when
    programs: Mapping[str, Sequence[Program]],
    directory: Path,
    name: str,
    block: int,
    workers: int,
    options: Options,
) -> None:
    """Wait until all ranks have completed a block; a step is logged when the next may begin."""
    last = block == options.blocks - 1
    deadline_s = time.monotonic() + TURN_TIMEOUT_S
    while True:
        for program in (each for started in programs.values() for each in started):
            program.check()
        done = [r for r in bench_turns.records(directory, name) if r.get("block") == block]
        if len(done) >= workers * BLOCK_STEPS:
            return
        if last and all(program.poll() == 0 for program in programs[name]):
            return
        if time.monotonic() > deadline_s:
            raise ProgramFailed(
                f"{name} did not complete {BLOCK_STEPS} steps within {TURN_TIMEOUT_S:.0f} s:\n"
                f"{programs[name][0].tail()}"
            )
        time.sleep(POLL_S)


def loopback_bytes() -> int:
    """Return how many bytes the loopback device has received since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def table(result: Mapping[str, Any]) -> Table:
    """Return the figures as a person reads them."""
    shown = Table(title=f"one step, {result['params'] / 1e6:.1f} M parameters")
    for heading in ("workers", "ours ms", "DDP ms", "ZeRO ms", "to DDP", "to ZeRO"):
        shown.add_column(heading, justify="right")
    for workers, each in result["workers"].items():
        shown.add_row(
            workers,
            f"{each['ours_ms']:,.1f}",
            f"{each['ddp_ms']:,.1f}",
            f"{each['zero_ms']:,.1f}",
            f"{each['ratio_ddp']:.2f} x",
            f"{each['ratio_zero']:.2f} x",
        )
    return shown
