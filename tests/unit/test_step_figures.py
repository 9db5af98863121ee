"""What `bench.py step` and `bench.py join` make of what was logged."""

from __future__ import annotations

import pytest

from scripts.bench_join import join_after, spare_is_ready
from scripts.step_figures import median, peak_mb, ratio, step_ms


def steps(rank: int, block: int, *durations_s: float) -> list[dict]:
    return [{"rank": rank, "block": block, "duration_s": each} for each in durations_s]


def test_a_step_is_as_long_as_on_its_slowest_rank():
    records = [
        *steps(0, 0, 9.0, 9.0),
        *steps(1, 0, 9.0, 9.0),
        *steps(0, 1, 9.0, 1.0, 2.0),
        *steps(1, 1, 9.0, 3.0, 1.0),
    ]
    assert step_ms(records) == {1: [3000.0, 2000.0]}
    assert median(step_ms(records)) == 2500.0


def test_ratios_are_of_medians_with_the_quartiles_of_neighbouring_blocks():
    ours = {i: [10.0, 12.0, 11.0] for i in range(1, 9)}
    peer = {i: [10.0 * (1 + i / 10)] * 3 for i in range(1, 9)}
    found = ratio(ours, peer)
    assert found["ratio"] == pytest.approx(11 / 14.5, abs=1e-3)
    assert found["quartiles"] == [round(11 / 16, 3), round(11 / 13, 3)]


def test_the_peak_is_that_of_the_largest_worker():
    assert peak_mb([{"rank": 0, "peak_kb": 1024}, {"rank": 1, "peak_kb": 3072}]) == 3.0
    assert peak_mb([]) is None


def formed(generation: int, at_s: float, *workers: str) -> dict:
    return {
        "event": "generation.formed",
        "generation": generation,
        "t_mono_s": at_s,
        "workers": list(workers),
        "reason": "",
    }


def commit(step: int, generation: int, at_s: float) -> dict:
    return {
        "event": "step.committed",
        "step": step,
        "generation": generation,
        "t_mono_s": at_s,
        "samples": 8,
        "log": {},
    }


def test_a_join_is_over_when_a_world_of_full_size_has_committed():
    events = [
        formed(1, 0.0, "a", "b"),
        *(commit(i, 1, 0.1 * i) for i in range(1, 11)),
        formed(2, 1.05, "a"),
        commit(11, 2, 1.3),
        formed(3, 1.35, "a", "c"),
        commit(12, 2, 1.4),
        commit(13, 3, 1.75),
        commit(14, 3, 1.85),
    ]
    assert join_after(events[:13], 1.02, size=2) is None
    found = join_after(events, 1.02, size=2)
    assert found is not None
    assert found.full_strength_s == pytest.approx(0.73)
    assert found.pause_ms == pytest.approx(350.0)


def test_a_spare_is_ready_and_in_no_world():
    ready = [{"event": "worker.ready", "worker_id": each} for each in ("a", "b", "c")]
    world = formed(1, 0.0, "a", "b")
    assert spare_is_ready([*ready, world])
    assert not spare_is_ready([*ready[:2], world])
    assert not spare_is_ready([*ready, world, {"event": "worker.exited", "worker_id": "c"}])
