"""The keyed permutation: a bijection, the same on every machine, at any size n."""

from __future__ import annotations

import itertools
from collections import Counter
from math import factorial

import pytest

from elastic.permutation import Permutation, permute


def test_the_numbers_never_change():
    # A job that resumes with a newer version must find its samples where it left them.
    assert [permute(i, 10, 1) for i in range(10)] == [7, 8, 3, 6, 0, 1, 2, 4, 9, 5]
    assert [permute(i, 10**18, 2**64 - 1) for i in (0, 10**18 - 1)] == [
        301683726389771014,
        592543862632231925,
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 255, 256, 257, 1024, 1025, 4097])
def test_every_value_is_met_once(length):
    order = Permutation(length, key=length)
    assert sorted(order[i] for i in range(length)) == list(range(length))
    assert len(order) == length


@pytest.mark.parametrize("length", [3, 4])
def test_every_order_is_equally_likely(length):
    orders = factorial(length)
    seen = Counter(
        tuple(permute(i, length, key) for i in range(length)) for key in range(100 * orders)
    )
    assert set(seen) == set(itertools.permutations(range(length)))
    surprise = sum((count - 100) ** 2 / 100 for count in seen.values())
    assert surprise < orders + 5 * (2 * orders) ** 0.5  # chi-squared, five deviations


def test_neighbours_are_torn_apart():
    order = Permutation(50_000, key=3)
    steps = Counter((order[i + 1] - order[i]) * 10 // 50_000 for i in range(5_000))
    assert max(steps.values()) < 0.2 * 5_000


def test_another_key_or_length_is_another_order():
    base = [permute(i, 1000, 7) for i in range(100)]
    assert base != [permute(i, 1000, 8) for i in range(100)]
    assert base != [permute(i, 1001, 7) for i in range(100)]


def test_a_place_outside_is_refused():
    order = Permutation(5, key=0)
    for place in (-1, 5):
        with pytest.raises(IndexError, match=r"outside range\(5\)"):
            order[place]
    with pytest.raises(IndexError):
        Permutation(0, key=0)[0]
    with pytest.raises(ValueError, match="outside"):
        Permutation(-1, key=0)
