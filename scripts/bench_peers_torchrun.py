"""The torchrun peer of `bench.py recovery`: the same model, the same fault, the same clock rule.

torchrun answers a dead worker by stopping all of them and starting all of them anew. From the
kill's own time stamp to the moment when *every* rank of the restarted group has completed its first
step, as far as CLOCK_MONOTONIC of one host tells. Each step is saved to memory-backed files (no
disk is slow here), so it loses as few steps as a restart can.

Settings are those with which it works and is fastest on one host: the c10d rendezvous, because the
static one cannot restart a gloo group; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, because with the
shared store the new group meets addresses of the old one; one intra-op thread per worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench_model import BATCH
from scripts.programs import POLL_S, Program, ProgramFailed
from scripts.run_facts import percentile

WORKER = Path(__file__).resolve().parent / "peer_ddp_worker.py"
READY_STEPS = 5
READY_TIMEOUT_S = 120.0
RECOVERY_TIMEOUT_S = 90.0
MONITOR_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecovery:
    """One restart, on the rank that was last."""

    total_s: float
    began_s: float
    import_s: float
    group_s: float
    load_s: float
    steps_redone: int


def measure(*, runs: int, workers: int, width: int, depth: int, seed: int) -> dict[str, Any]:
    """Return the figures of the peer; `total_ms_p50` is None with a `why` if it did not recover."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={workers}",
        f"--max-restarts={2 * runs + 3}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--monitor-interval={MONITOR_INTERVAL_S}",
        str(WORKER),
    ]
    found: dict[str, Any] = {
        "version": _torch_version(),
        "settings": {
            "mode": "one agent, restart of all workers",
            "command": ["torchrun", *command[3:-1], WORKER.name],
            "environment": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
            "trainer": f"DistributedDataParallel over gloo, AdamW, {BATCH} samples a rank",
            "saves": "model and optimizer after every step, memory-backed",
        },
    }
    try:
        recoveries, step_ms = _measure(command, runs, workers, (width, depth), seed)
    except ProgramFailed as error:
        return {**found, "runs": 0, "total_ms_p50": None, "why": str(error)}
    totals = [1e3 * r.total_s for r in recoveries]
    return {
        **found,
        "runs": len(recoveries),
        "total_ms_p50": _rounded(statistics.median(totals)),
        "total_ms_p95": _rounded(percentile(totals, 0.95)),
        "step_ms": _rounded(step_ms),
        "steps_redone_p50": statistics.median(r.steps_redone for r in recoveries),
        "split": {
            name: _rounded(statistics.median(1e3 * getattr(r, f"{name}_s") for r in recoveries))
            for name in ("began", "import", "group", "load")
        },
    }


def _measure(
    command: list[str], runs: int, workers: int, shape: tuple[int, int], seed: int
) -> tuple[list[PeerRecovery], float]:
    rng = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="everstep-peer-") as directory,
        _memory_files(3) as (first, second, mark),
    ):
        log = Path(directory) / "steps.jsonl"
        environment = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": directory,
            "PEER_LOG": str(log),
            "PEER_SAVES": os.pathsep.join((first, second)),
            "PEER_MARK": mark,
            "PEER_WIDTH": str(shape[0]),
            "PEER_DEPTH": str(shape[1]),
        }
        output = Path(directory) / "torchrun.log"
        with Program("torchrun", command, log_path=output, environment=environment) as torchrun:
            recoveries: list[PeerRecovery] = []
            step_s: list[float] = []
            pids: set[int] = set()
            for _ in range(runs):
                ready = _until_ready(torchrun, log, workers, pids)
                step_s += [float(r["duration_s"]) for r in ready if r["event"] == "step"]
                pids |= {int(r["pid"]) for r in ready}
                time.sleep(rng.random() * statistics.median(step_s))
                victim = rng.choice([r for r in ready if r["event"] == "start"])
                killed_s = time.monotonic()
                os.kill(int(victim["pid"]), signal.SIGKILL)
                recoveries.append(_until_recovered(torchrun, log, workers, pids, killed_s))
            return recoveries, 1e3 * statistics.median(step_s)


def _until_ready(
    torchrun: Program, log: Path, workers: int, old_pids: set[int]
) -> list[Mapping[str, Any]]:
    """Return the records of the present group when each rank has done a few steps."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        present: list[Mapping[str, Any]] = [r for r in _read(log) if r["pid"] not in old_pids]
        done: dict[int, int] = {}
        for record in present:
            if record["event"] == "step":
                done[record["rank"]] = done.get(record["rank"], 0) + 1
        if len(done) == workers and min(done.values()) >= READY_STEPS:
            return present
        _pause(torchrun, deadline_s, "did not train")


def _until_recovered(
    torchrun: Program, log: Path, workers: int, old_pids: set[int], killed_s: float
) -> PeerRecovery:
    """Return the restart, once each rank of the new group has completed a step."""
    deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
    while True:
        records = _read(log)
        new = [r for r in records if r["pid"] not in old_pids]
        first_steps: dict[int, Mapping[str, Any]] = {}
        for record in new:
            if record["event"] == "step":
                first_steps.setdefault(record["rank"], record)
        if len(first_steps) == workers:
            break
        _pause(torchrun, deadline_s, "did not come back after SIGKILL of one worker")
    last = max(first_steps.values(), key=lambda r: float(r["t_mono_s"]))
    start = next(r for r in new if r["event"] == "start" and r["pid"] == last["pid"])
    before = [r["step"] for r in records if r["event"] == "step" and r["pid"] in old_pids]
    return PeerRecovery(
        total_s=float(last["t_mono_s"]) - killed_s,
        began_s=float(start["began_s"]) - killed_s,
        import_s=float(start["import_s"]),
        group_s=float(start["group_s"]),
        load_s=float(start["load_s"]),
        steps_redone=max(before) - int(start["step"]),
    )


def _pause(torchrun: Program, deadline_s: float, failure: str) -> None:
    code = torchrun.poll()
    if code is not None:
        raise ProgramFailed(f"torchrun ended with code {code} and {failure}:\n{torchrun.tail()}")
    if time.monotonic() > deadline_s:
        raise ProgramFailed(f"torchrun {failure} in time:\n{torchrun.tail()}")
    time.sleep(POLL_S)


def _read(log: Path) -> list[dict[str, Any]]:
    try:
        text = log.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


@contextlib.contextmanager
def _memory_files(count: int) -> Iterator[list[str]]:
    """Give paths of files in memory that are gone with this process, however it ends."""
    fds = [os.memfd_create("everstep-peer", os.MFD_CLOEXEC) for _ in range(count)]
    try:
        yield [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


def _torch_version() -> str:
    from importlib import metadata

    return metadata.version("torch")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
