"""`bench.py recovery` at its smallest: one object with the pinned keys, peers beside us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt
from scripts.run_facts import PARTS

BENCH = [sys.executable, f"{ckpt.__path__[0].rpartition('/')[0]}/scripts/bench.py"]
PINNED = {
    "runs",
    "params",
    "workers",
    "step_ms",
    "kill_total_ms_p50",
    "kill_total_ms_p95",
    "kill_overhead_ms_p50",
    "kill_overhead_ms_p95",
    "stop_total_ms_p50",
    "stop_overhead_ms_p50",
    "split",
    "heal_bytes_ratio",
    "peers",
    "commit",
    "torch",
    "cpu_count",
}

pytestmark = pytest.mark.integration


def bench(*arguments, timeout_s=20):
    return subprocess.run(
        [*BENCH, *arguments], capture_output=True, text=True, check=False, timeout=timeout_s
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_benchmark_prints_one_object_and_leaves_nothing():
    before = set(Path("/dev/shm").iterdir())
    small = ["--workers", "3", "--width", "64", "--depth", "2"]
    counts = ["--runs", "2", "--stops", "1", "--peer-runs", "1"]
    done = bench("recovery", "--json", *small, *counts, timeout_s=220)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() >= PINNED
    assert (found["runs"], found["workers"], found["params"]) == (2, 3, 2 * (64 * 64 + 64))
    assert found["split"].keys() == set(PARTS)
    assert sum(found["split"].values()) == pytest.approx(found["total_ms_mean"], abs=0.5)
    assert 0 < found["kill_overhead_ms_p50"] < found["kill_total_ms_p50"]
    assert found["stop_total_ms_p50"] > found["stop_hang_timeout_ms"]
    peer = found["peers"]["torchrun"]
    assert peer["version"] == found["torch"]
    assert peer["total_ms_p50"] is not None, peer["why"]
    assert peer["times_ours"] > 1
    assert set(Path("/dev/shm").iterdir()) == before


@pytest.mark.slow
def test_the_balance_is_measured_with_a_worker_that_shares_its_core():
    small = ["--width", "256", "--depth", "4", "--batch", "256", "--pairs", "1", "--steps", "5"]
    done = bench("balance", "--json", *small, timeout_s=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    [shares] = found["shares"]
    assert sum(shares) == found["virtual_ranks"]
    assert shares[0] > shares[1]  # by which factor is for a quiet machine
    assert found["throughput_ratio_p50"] == pytest.approx(
        found["even_ms_p50"] / found["balanced_ms_p50"], abs=0.01
    )


@pytest.mark.slow
def test_steps_are_timed_in_turns_with_the_peers():
    small = ["--width", "64", "--depth", "2", "--workers", "2", "--blocks", "3", "--no-torchft"]
    done = bench("step", "--json", *small, timeout_s=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    figures = found["workers"]["2"]
    assert figures["ratio_ddp"] == pytest.approx(figures["ours_ms"] / figures["ddp_ms"], rel=0.1)
    assert min(figures["ours_ms"], figures["zero_ms"], figures["moved_mb"]) > 0
    assert min(figures["peak_mb"], figures["ddp_peak_mb"]) > 50
    assert found["peers"]["torchft"].keys() >= {"ratio_ddp", "version", "why"}


@pytest.mark.slow
def test_joins_are_timed_with_a_spare():
    small = ["--width", "64", "--depth", "2", "--workers", "2", "--runs", "2"]
    done = bench("join", "--json", *small, timeout_s=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["runs"] == 2
    assert found["full_strength_s_p50"] > 0
    assert found["pause_over_step_ms_p50"] is not None


def test_figures_that_are_not_there_yet_say_so():
    done = bench("goodput", "--json")
    assert done.returncode == 2
    there = "recovery, step, join, balance"
    assert done.stderr == f"bench: goodput is not there yet; there is: {there}\n"
    assert done.stdout == ""


def test_an_unknown_figure_is_refused():
    done = bench("no-such-figure")
    assert done.returncode == 2
    assert "no-such-figure" in done.stderr
