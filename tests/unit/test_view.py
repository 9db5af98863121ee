"""The view of a run: what counts as its end, and what stays to be read of what happened."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.view import NEWS_KEPT, SHARES_EVERY_S, RunView


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, "t_mono_s": 1.0, "t_wall": "2026-01-01T10:00:00.000+00:00", **fields}


def evaluated(step: int) -> dict[str, Any]:
    return event("evaluate.finished", step=step, values={"acc": 0.01 * step}, duration_s=0.1)


@pytest.mark.parametrize(
    ("exit_code", "phase"), [(0, "done"), (5, "failed"), (7, "failed"), (130, "stopped")]
)
def test_a_run_that_was_stopped_has_not_failed(exit_code: int, phase: str) -> None:
    view = RunView()
    view.apply(event("run.finished", exit_code=exit_code, cause="", value=None))
    assert view.phase == phase


def test_evaluations_do_not_push_a_death_out_of_the_news() -> None:
    view = RunView()
    death = {"pid": 7, "signal": 9, "exit_code": None, "evidence": "", "worker_id": "n-1.1-0123ab"}
    view.apply(event("worker.exited", **death))
    for step in range(1, 3 * NEWS_KEPT):
        assert view.apply(evaluated(step))
    told = [text for _, text in view.news]
    assert len(told) == 2
    assert "SIGKILL" in told[0]
    assert "0.11" in told[1]


def test_shares_that_change_all_the_time_are_told_now_and_then() -> None:
    view = RunView()
    told = []
    for tenth in range(int(20 * SHARES_EVERY_S)):
        changed = event("shares.changed", counts=[2, 1], before=[1, 2])
        told += view.apply({**changed, "t_mono_s": 100 + tenth / 10})
    assert len(told) == 2
