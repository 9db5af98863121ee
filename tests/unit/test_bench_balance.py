"""What `bench.py balance` makes of a run's events."""

from __future__ import annotations

from scripts.bench_balance import last_shares, median_step_ms


def step(number: int, at_s: float) -> dict:
    return {
        "event": "step.committed",
        "step": number,
        "generation": 1,
        "t_mono_s": at_s,
        "samples": 8,
        "log": {},
    }


def test_the_median_is_of_the_steps_asked_for():
    at_s = [0.0, 5.0, 6.0, 7.5, 9.5, 30.0]
    events = [step(number, when) for number, when in enumerate(at_s, 1)]
    assert median_step_ms(events, 2, 5) == 1500.0
    assert median_step_ms(events, 1, 2) == 5000.0


def test_the_last_shares_count():
    told = [{"event": "shares.changed", "counts": counts} for counts in ([7, 5], [8, 4])]
    assert last_shares([step(1, 0.0), *told]) == [8, 4]
    assert last_shares([step(1, 0.0)]) == []
