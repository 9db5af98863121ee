"""The summation tree drawn: who forms which sums, and how they are finished."""

from __future__ import annotations

import pytest

from elastic.step.tree import Node, fold_after, merges, partials


@pytest.mark.parametrize(
    ("leaves", "present", "start", "stop", "expected"),
    [
        (8, 8, 0, 8, [(0, 8)]),
        (8, 8, 0, 3, [(0, 2), (2, 3)]),  # 8 virtual ranks on 3 workers: 3 + 3 + 2
        (8, 8, 3, 6, [(3, 4), (4, 6)]),
        (8, 8, 6, 8, [(6, 8)]),
        (6, 6, 2, 6, [(2, 4), (4, 6)]),  # 6 splits into 4 + 2
        (5, 5, 1, 5, [(1, 2), (2, 4), (4, 5)]),
        (8, 5, 3, 6, [(3, 4), (4, 8)]),  # leaf 4 is all there is on the right
        (8, 3, 0, 3, [(0, 8)]),
        (8, 3, 4, 8, []),
        (8, 0, 0, 8, []),
        (1, 1, 0, 1, [(0, 1)]),
        (4, 4, 2, 2, []),
    ],
)
def test_the_sums_of_a_worker(leaves, present, start, stop, expected):
    assert list(partials(start, stop, leaves, present)) == expected


def test_the_stack_of_one_worker():
    # push:  0   1     2   3          4   5     6   7
    # add:       0+1       2+3, all       4+5       6+7, all, all
    assert [fold_after(leaf, 0, 8, 8, 8) for leaf in range(8)] == [0, 1, 0, 2, 0, 1, 0, 3]
    assert [fold_after(leaf, 0, 8, 8, 5) for leaf in range(5)] == [0, 1, 0, 2, 1]
    assert [fold_after(leaf, 3, 6, 8, 8) for leaf in range(3, 6)] == [0, 0, 1]


def test_a_primary_finishes_three_workers_sums():
    nodes = [n for start, stop in ((0, 3), (3, 6), (6, 8)) for n in partials(start, stop, 8, 8)]
    assert merges(nodes, 8, 8) == (
        ((2, 3), (3, 4), (2, 4)),
        ((0, 2), (2, 4), (0, 4)),
        ((4, 6), (6, 8), (4, 8)),
        ((0, 4), (4, 8), (0, 8)),
    )


def test_a_lone_sum_passes_through():
    assert merges([Node(0, 8)], 8, 1) == ()
    assert merges([], 8, 0) == ()
    assert merges([Node(0, 4), Node(4, 8)], 8, 5) == (((0, 4), (4, 8), (0, 8)),)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([(0, 2)], "no partial sum has leaf 2"),
        ([(0, 2), (0, 2), (2, 4)], "named twice"),
        ([(0, 2), (2, 4), (2, 3)], "do not belong"),
        ([(0, 2), (2, 4), (1, 3)], "do not belong"),
    ],
)
def test_sums_that_do_not_fit_together_are_refused(nodes, words):
    with pytest.raises(ValueError, match=words):
        merges([Node(*n) for n in nodes], 4, 4)


def test_leaves_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="not a present one"):
        fold_after(5, 0, 8, 8, 5)
    with pytest.raises(ValueError, match="not within"):
        partials(0, 9, 8, 8)
    with pytest.raises(ValueError, match="cannot be present"):
        partials(0, 8, 8, 9)
