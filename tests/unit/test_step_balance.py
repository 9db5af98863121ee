"""Shares by speed: fair, stable, and never without a measurement."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.step.balance import MEASURED_STEPS, WARM_UP_STEPS, Balance, fair_counts

SPEEDS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5)


@given(SPEEDS, st.integers(0, 7))
def test_no_other_counts_have_a_shorter_longest_time(seconds, more):
    total = len(seconds) + more
    counts = fair_counts(seconds, total)
    assert sum(counts) == total
    assert min(counts) >= 1

    def best(workers, left):
        if workers == len(seconds) - 1:
            return left * seconds[workers]
        return min(
            max(n * seconds[workers], best(workers + 1, left - n))
            for n in range(1, left - (len(seconds) - workers - 1) + 1)
        )

    longest = max(c * s for c, s in zip(counts, seconds, strict=True))
    assert longest == pytest.approx(best(0, total))


def test_too_few_pieces_are_refused():
    with pytest.raises(ValueError, match="1 pieces for 2 workers"):
        fair_counts([1.0, 1.0], 1)


def observe(balance, seconds, counts, steps):
    for _ in range(steps):
        balance.observe([c * s for c, s in zip(counts, seconds, strict=True)], counts)


def test_a_worker_at_half_speed_gets_fewer():
    balance, counts = Balance(4), [4, 4, 4, 4]
    speeds = [1.0, 1.0, 2.0, 1.0]
    observe(balance, speeds, counts, WARM_UP_STEPS + MEASURED_STEPS - 1)
    assert balance.decide(counts) is None, "too little is known"
    observe(balance, speeds, counts, 1)
    new = balance.decide(counts)
    assert new == [5, 5, 2, 4]
    gain = 4 * 2.0 / max(c * s for c, s in zip(new, speeds, strict=True))
    assert gain == 1.6
    assert balance.decide(new) is None
    observe(balance, speeds, new, 50)
    assert balance.decide(new) is None, "it stays"


def test_the_first_steps_and_small_differences_do_not_count():
    balance, counts = Balance(2), [4, 4]
    observe(balance, [1.0, 50.0], counts, WARM_UP_STEPS)
    observe(balance, [1.0, 1.1], counts, 50)
    assert balance.decide(counts) is None


def test_a_worker_that_is_fast_again_gets_its_share_back():
    balance, counts = Balance(2), [4, 4]
    observe(balance, [1.0, 3.0], counts, 20)
    counts = balance.decide(counts)
    assert counts == [6, 2]
    observe(balance, [1.0, 1.0], counts, 20)
    assert balance.decide(counts) == [4, 4]


def test_shares_that_change_again_and_again_change_ever_more_rarely():
    balance, counts = Balance(3), [2, 2, 2]
    changed = []
    for step in range(2000):
        slow = len(changed) % 2  # whatever the shares are, the next measurement contradicts them
        observe(balance, [3.0, 1.0, 1.0] if slow else [1.0, 1.0, 3.0], counts, 1)
        new = balance.decide(counts)
        if new is not None:
            counts = new
            changed.append(step)
    gaps = [b - a for a, b in pairwise(changed)]
    assert len(changed) <= 10
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 64 * gaps[0] / 2
