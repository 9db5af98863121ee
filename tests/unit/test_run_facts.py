"""What a fault cost is read from the events by one clock rule, without gaps."""

from __future__ import annotations

import pytest

from scripts.run_facts import (
    PARTS,
    full_strength_s,
    measure,
    percentile,
    periods,
    step_ms,
    steps_lost,
    tokens_per_s,
    worlds,
)
from tests.run_story import STEP_S, Run, killed_run


def test_a_recovery_lasts_until_the_last_survivor_is_through():
    run, fault = killed_run()
    found = measure(run.events, fault)
    assert found is not None
    assert found.total_ms == pytest.approx(150)
    assert (found.world_before, found.world_after, found.generation) == (4, 3, 2)
    assert found.heal_bytes == 300


def test_the_parts_follow_each_other_and_add_up():
    run, fault = killed_run()
    found = measure(run.events, fault)
    assert found is not None
    # the last survivor: through at 150, redo 120, heal and recovery 7, rebuild 8, so began at 15
    expected = {"detect": 7, "agree": 3, "unblock": 5, "rebuild": 8, "heal": 7, "redo": 120}
    assert {p: round(found.parts_ms[p], 3) for p in PARTS} == expected
    assert sum(found.parts_ms.values()) == pytest.approx(found.total_ms)
    assert found.overhead_ms == pytest.approx(30)
    assert found.reshape_ms == pytest.approx(23)


def test_nobody_knows_the_cost_before_all_survivors_are_through():
    run, fault = killed_run()
    ends = [
        i
        for i, record in enumerate(run.events)
        if record["event"] == "reshape.finished" and record["generation"] == 2
    ]
    assert measure(run.events[: ends[-1]], fault) is None
    assert measure(run.events[: ends[-1] + 1], fault) is not None


def test_a_world_that_was_overtaken_is_no_end_of_a_recovery():
    run, fault = killed_run(steps=12)  # the new worker's World is formed right after
    events = [
        r for r in run.events if not (r["event"] == "reshape.finished" and r["generation"] == 2)
    ]
    found = measure(events, fault)
    assert found is not None
    assert found.generation == 3
    assert found.world_after == 4


def test_a_worker_that_the_agent_saw_late_was_noticed_when_the_world_was_made():
    run, fault = killed_run()
    for record in run.events:
        if record["event"] == "worker.exited":
            record["t_mono_s"] = fault.at_s + 1.0
    found = measure(run.events, fault)
    assert found is not None
    assert found.parts_ms["detect"] == pytest.approx(10)
    assert sum(found.parts_ms.values()) == pytest.approx(150)


def test_full_strength_is_reached_when_the_new_worker_is_through():
    run, fault = killed_run()
    assert full_strength_s(run.events, fault) == pytest.approx(0.150 + 2 * STEP_S)
    without = [r for r in run.events if r["generation"] < 3]
    assert full_strength_s(without, fault) is None


def test_periods_leave_out_steps_across_a_reshape():
    run, _ = killed_run(steps=20, kill_after=10)
    assert {p.step for p in periods(run.events)} == {*range(2, 11), 12, *range(14, 21)}
    assert all(p.seconds == pytest.approx(STEP_S) for p in periods(run.events))


def test_step_time_and_rate_are_medians_of_undisturbed_steps():
    run, _ = killed_run()
    assert step_ms(run.events, size=4) == pytest.approx(1e3 * STEP_S)
    assert step_ms(run.events, size=2) is None
    assert tokens_per_s(run.events) == pytest.approx(8 * 10 / STEP_S)


def test_steps_that_stay_are_not_lost():
    run, _ = killed_run()
    assert steps_lost(run.events) == 0


def test_a_missing_step_is_a_lost_one():
    run, _ = killed_run()
    events = [r for r in run.events if r["step"] != 11]
    assert steps_lost(events) == 1


def test_a_step_that_is_told_in_two_ways_is_a_lost_one():
    run, _ = killed_run(loss=2.0)
    run.committed("n.2-a", 10, loss=2.1)
    assert steps_lost(run.events) == 1


def test_worlds_are_told_once_with_their_first_stamp():
    run = Run()
    run.form(["a", "b"])
    again = dict(run.events[-1], t_mono_s=run.at_s + 1)
    assert [(w.generation, w.at_s, w.workers) for w in worlds([again, *run.events])] == [
        (1, 100.0, ("a", "b"))
    ]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3], 0.95, 3),
        ([1, 2, 3], 0.5, 2),
        (list(range(1, 21)), 0.95, 19),
        (list(range(10)), 0.95, 9),
    ],
)
def test_percentile(values, share, expected):
    assert percentile(values, share) == expected
