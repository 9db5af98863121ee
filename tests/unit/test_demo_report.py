"""The demo's verdict follows from what was seen: each forged input breaks the promise it should."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from scripts.compare_checkpoints import Comparison
from scripts.demo_report import Plan, Seen, tell
from scripts.run_facts import Fault
from tests.run_story import killed_run, resumed_run

GOLDEN = Path(__file__).parent.parent / "golden"
PLAN = Plan(
    size="tiny",
    batch_size=8,
    workers=4,
    virtual_ranks=8,
    first_steps=20,
    more_steps=5,
    restored_workers=2,
    save_every=10,
    kill_after=10,
    loss_below=2.5,
)
SURROUNDINGS = {
    "command": "demo",
    "commit": "abc",
    "torch": "2",
    "cpu_count": 2,
    "duration_s": 9.0,
}
EQUAL = Comparison(
    step=20,
    parameters=True,
    optimizer=True,
    rng=True,
    cursor=True,
    other=True,
    tensors=3,
    nbytes=1000,
    digest="d",
    differences=(),
)


def seen(**changes):
    first, fault = killed_run()
    story = {
        "first": first.events,
        "second": resumed_run().events,
        "undisturbed": killed_run(steps=25)[0].events,
        "faults": [fault],
        "comparisons": [("end", EQUAL)],
        "bytes_from_s3": 1200,
    }
    return Seen(**(story | changes))


def report_of(**changes):
    return tell(PLAN, seen(**changes), SURROUNDINGS).report


def broken(**changes):
    return report_of(**changes)["broken_promises"]


def test_a_good_run_breaks_no_promise():
    report = report_of()
    assert report["broken_promises"] == []
    assert report["bit_equal_to_undisturbed"] is True
    assert (report["committed_steps"], report["steps_lost"]) == (25, 0)
    assert report["restored_world_size"] == 2
    assert report["restored_step"] == 20
    assert (report["restored_bytes_from_s3"], report["restored_bytes_by_workers"]) == (1200, 1200)
    assert report["tokens_per_s"] == pytest.approx(800)
    assert (report["commit"], report["torch"]) == ("abc", "2")


def test_a_recovery_is_told_with_its_parts():
    (recovery,) = report_of()["recoveries"]
    assert recovery["cause"] == "SIGKILL of worker 1"
    assert recovery["step"] == 11
    assert (recovery["detect_ms"], recovery["reshape_ms"]) == (7.0, 23.0)
    assert (recovery["redone_step_ms"], recovery["total_ms"]) == (120.0, 150.0)
    assert recovery["full_strength_s"] == pytest.approx(0.35)


@pytest.mark.parametrize("part", ["parameters", "optimizer", "rng", "cursor", "other"])
def test_any_difference_from_the_undisturbed_run_turns_the_verdict(part):
    different = dataclasses.replace(EQUAL, **{part: False}, differences=("it differs",))
    comparisons = [("end", EQUAL), ("middle", different)]
    report = report_of(comparisons=comparisons)
    assert report["bit_equal_to_undisturbed"] is False
    assert report["broken_promises"] == [
        "the state differs from the undisturbed run's (it differs)"
    ]


def test_what_was_not_compared_is_not_equal():
    report = report_of(comparisons=[])
    assert report["bit_equal_to_undisturbed"] is False
    assert "not compared" in report["broken_promises"][0]


def test_a_step_that_is_missing_is_told():
    first, _ = killed_run()
    events = [r for r in first.events if r["step"] != 12]
    assert broken(first=events) == [
        "24 steps were committed instead of 25",
        "1 committed steps were lost",
    ]


def test_steps_that_the_second_part_does_again_were_lost():
    report = report_of(second=resumed_run(from_step=17, steps=8).events)
    assert report["steps_lost"] == 3
    assert report["broken_promises"] == [
        "3 committed steps were lost",
        "the second part began from step 17, not from the last committed one, 20",
    ]


def test_steps_between_the_parts_that_nobody_did_are_lost():
    assert report_of(second=resumed_run(from_step=22, steps=3).events)["steps_lost"] == 2


def test_a_fault_without_recovery_breaks_the_promise():
    first, fault = killed_run()
    events = [r for r in first.events if r["event"] != "reshape.finished" or r["generation"] < 2]
    assert broken(first=events) == ["1 faults, but 0 recoveries"]
    stranger = Fault(worker_id="n.9-z", pid=9, signal="SIGKILL", at_s=fault.at_s)
    assert broken(faults=[stranger]) == ["1 faults, but 0 recoveries"]
    assert broken(faults=[]) == ["0 faults, but 0 recoveries"]


def test_a_worker_that_does_not_come_back_breaks_the_promise():
    first, _ = killed_run()
    events = [dict(r, generation=min(r["generation"], 2)) for r in first.events]
    events = [r for r in events if r["event"] != "generation.formed" or len(r["workers"]) == 3]
    whole = [r for r in first.events if r["event"] == "generation.formed"][:1]
    sentence = "after the SIGKILL of worker 1 the World never had 4 workers again"
    assert sentence in broken(first=whole + events)


def test_bytes_that_did_not_come_from_the_server_break_the_promise():
    (sentence,) = broken(bytes_from_s3=999)
    assert "999 bytes" in sentence


def test_another_world_size_breaks_the_promise():
    sentence = "it was restored with 3 workers"
    assert broken(second=resumed_run(workers=3).events) == [sentence]


def test_a_loss_that_does_not_fall_breaks_the_promise():
    first, fault = killed_run(loss=2.7)
    second = resumed_run(loss=2.6).events
    report = report_of(first=first.events, faults=[fault], second=second)
    assert report["loss_last"] == pytest.approx(2.65)  # a mean over both parts
    assert report["broken_promises"] == ["the loss ended at 2.65, not below 2.5"]


def test_the_story_marks_what_happened_where_it_happened():
    story = tell(PLAN, seen(), SURROUNDINGS)
    assert [(m.step, m.kind) for m in story.marks] == [
        (11, "fault"),
        (13, "joined"),
        (20, "restored"),
    ]
    assert [step for step, _ in story.loss] == list(range(1, 26))


def test_worlds_follow_each_other_and_leave_a_gap_between_the_parts():
    first, second, third, last = tell(PLAN, seen(), SURROUNDINGS).worlds
    assert [w.size for w in (first, second, third, last)] == [4, 3, 4, 2]
    assert first.from_s == 0
    assert first.until_s == second.from_s
    assert second.until_s == third.from_s
    assert third.until_s < last.from_s < last.until_s


@pytest.fixture(scope="module")
def recorded():
    """A demo that really ran (`scripts/demo.py --tiny`), as its event files told it."""
    lines = gzip.decompress((GOLDEN / "demo" / "events.jsonl.gz").read_bytes()).splitlines()
    parts: dict[str, list] = {}
    for record in map(json.loads, lines):
        parts.setdefault(record.pop("part"), []).append(record)
    (fault,) = parts["fault"]
    return Seen(
        first=parts["with-a-kill"],
        second=parts["restored"],
        undisturbed=parts["undisturbed"],
        faults=[Fault(**fault)],
        comparisons=[("end", EQUAL)],
        bytes_from_s3=1_500_000,
    )


RECORDED_PLAN = dataclasses.replace(PLAN, first_steps=40, more_steps=10)


def test_a_recorded_run_is_read_as_it_was(recorded):
    report = tell(RECORDED_PLAN, recorded, SURROUNDINGS).report
    assert report["broken_promises"] == []
    assert (report["committed_steps"], report["steps_lost"]) == (50, 0)
    (recovery,) = report["recoveries"]
    assert (recovery["world_before"], recovery["world_after"]) == (4, 3)
    assert recovery["total_ms"] == pytest.approx(sum(recovery["split_ms"].values()), abs=0.3)
    assert all(ms >= 0 for ms in recovery["split_ms"].values())
    assert 0 < recovery["detect_ms"] < recovery["total_ms"]
    assert recovery["full_strength_s"] > recovery["total_ms"] / 1e3


def test_a_recorded_run_with_a_forged_step_is_found_out(recorded):
    forged = [dict(record) for record in recorded.first]
    told = next(r for r in forged if r["event"] == "step.committed" and r["step"] == 20)
    told["log"] = told["log"] | {"loss": told["log"]["loss"] + 1e-6}
    seen = dataclasses.replace(recorded, first=forged)
    assert tell(RECORDED_PLAN, seen, SURROUNDINGS).report["steps_lost"] == 1


def test_a_recorded_run_without_the_second_world_has_no_recovery(recorded):
    cut = [r for r in recorded.first if r["event"] != "reshape.finished" or r["generation"] != 2]
    cut = [r for r in cut if r["event"] != "generation.formed" or r["generation"] != 3]
    report = tell(RECORDED_PLAN, dataclasses.replace(recorded, first=cut), SURROUNDINGS).report
    assert report["recoveries"] == []
