"""Workers that run and get nowhere: found, named, shown, replaced; the result stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.events import read_events
from tests.integration.test_run import QUIET, committed, end, job, resumed, run_dir_of, start, whole
from tests.support import eventually

pytestmark = pytest.mark.integration
JOB = str(Path(__file__).resolve().parents[1] / "programs" / "job.py")


def run_with_hang(tmp_path: Path, how: str, **options: Any) -> tuple[dict, list[dict]]:
    train = {"program": "hanging", "how": how, "rank": 1, "once": str(tmp_path / "once"), **options}
    told = job(tmp_path, nproc=3, hang_timeout_s=1.5, threads=1, checkpoint="ckpt", train=train)
    return told, list(read_events(Path(told["events"]).parent))


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("asleep", "in asleep"),
        ("holds the interpreter", "in holds_the_interpreter"),
        ("another thread holds it", "in holds_the_interpreter"),
    ],
)
def test_a_worker_that_gets_nowhere_is_replaced(tmp_path: Path, how: str, place: str) -> None:
    told, events = run_with_hang(tmp_path, how, at=9, steps=16)
    assert resumed(told["value"]) == resumed(whole(steps=16))
    [suspected] = [e for e in events if e["event"] == "worker.suspected"]
    assert "no progress" in suspected["evidence"]
    first = next(e for e in events if e["event"] == "generation.formed")
    assert suspected["worker_id"] == first["workers"][1]  # the culprit, not who waited
    [stack] = [e for e in events if e["event"] == "worker.stack"]
    assert stack["worker_id"] == suspected["worker_id"]
    assert place in stack["stack"]
    exited = [e for e in events if e["event"] == "worker.exited" and e["evidence"]]
    assert any(e["worker_id"] == suspected["worker_id"] for e in exited)


def test_slow_first_steps_and_slow_evaluations_are_no_hangs(tmp_path: Path) -> None:
    options = {"epochs": 1, "evaluate_first": True, "evaluate_s": 0.3}
    _, events = run_with_hang(tmp_path, "slow", at=0, **options)
    assert [e for e in events if e["event"] == "worker.suspected"] == []
    assert [e["generation"] for e in events if e["event"] == "generation.formed"] == [1]


def test_a_long_limit_lets_a_worker_be(tmp_path: Path) -> None:
    once = str(tmp_path / "once")
    train = {"program": "hanging", "how": "asleep", "at": 5, "rank": 0, "once": once, "steps": 8}
    options = {**QUIET, "checkpoint": "ckpt", "hang_timeout_s": 60, "grace_s": 4, "train": train}
    process = start(tmp_path, JOB, json.dumps(options))
    run_dir = run_dir_of(tmp_path)
    eventually(lambda: Path(once).exists() or None, within_s=60, what="the hang")
    before = committed(run_dir)
    process.terminate()
    code, _, err = end(process)
    assert code == 143, err
    assert committed(run_dir) == before
