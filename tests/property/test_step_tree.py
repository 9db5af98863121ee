"""Whoever computes which leaves, the sum has the same bits: float32, compared byte by byte."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.step.placement import share_out
from elastic.step.tree import Node, fold_after, merges, partials

COLUMNS = 16
LEAVES = np.random.default_rng(5).standard_normal((17, COLUMNS)).astype(np.float32)
LEAVES *= np.float32(10.0) ** (np.arange(17, dtype=np.float32)[:, None] % 7)
LEAVES[:, 0] = -0.0  # adding a zero for an empty leaf would turn it into 0.0


def dumb_sum(lo, hi, present):
    """The tree as its definition says; None where no leaf is present."""
    if lo >= present:
        return None
    if hi - lo == 1:
        return LEAVES[lo]
    size = 1
    while size * 2 < hi - lo:
        size *= 2
    left, right = dumb_sum(lo, lo + size, present), dumb_sum(lo + size, hi, present)
    return left if right is None else left + right


def sum_of_workers(shares, num_leaves, present):
    """Fold as workers do, send, finish as a primary does."""
    have = {}
    for share in shares:
        stack = []
        for leaf in range(share.start, min(share.stop, present)):
            stack.append(LEAVES[leaf])
            for _ in range(fold_after(leaf, share.start, share.stop, num_leaves, present)):
                right = stack.pop()
                stack[-1] = stack[-1] + right
        names = partials(share.start, share.stop, num_leaves, present)
        have.update(zip(names, stack, strict=True))
    for left, right, result in merges(have, num_leaves, present):
        have[result] = have.pop(left) + have.pop(right)
    if present == 0:
        assert have == {}
        return None
    assert list(have) == [Node(0, num_leaves)]
    return have[Node(0, num_leaves)]


def same_bits(a, b):
    return (a is None and b is None) or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("num_leaves", range(1, 18))
def test_every_world_of_up_to_six(num_leaves):
    for present in range(num_leaves + 1):
        expected = dumb_sum(0, num_leaves, present)
        for width in range(1, 7):
            shares = share_out(num_leaves, [f"w{i}" for i in range(width)])
            assert same_bits(sum_of_workers(shares, num_leaves, present), expected)


@pytest.mark.parametrize("num_leaves", range(1, 12))
def test_every_way_to_cut_the_leaves_for_three(num_leaves):
    for present in range(num_leaves + 1):
        expected = dumb_sum(0, num_leaves, present)
        for a, b in combinations_with_replacement(range(num_leaves + 1), 2):
            shares = (range(a), range(a, b), range(b, num_leaves))
            assert same_bits(sum_of_workers(shares, num_leaves, present), expected)


def test_the_order_of_addition_does_matter_for_these_numbers():
    # Otherwise equality would prove nothing.
    straight = LEAVES[0]
    for leaf in range(1, 17):
        straight = straight + LEAVES[leaf]
    assert not same_bits(straight, dumb_sum(0, 17, 17))
    assert np.signbit(dumb_sum(0, 17, 9)[0])


@given(st.data())
def test_a_worker_sends_few_sums_and_they_are_the_largest(data):
    num_leaves = data.draw(st.integers(1, 300))
    present = data.draw(st.integers(0, num_leaves))
    start = data.draw(st.integers(0, num_leaves))
    stop = data.draw(st.integers(start, num_leaves))
    nodes = partials(start, stop, num_leaves, present)
    assert len(nodes) <= max(1, 2 * num_leaves.bit_length() - 2)
    covered = [leaf for n in nodes for leaf in range(n.lo, min(n.hi, present))]
    assert covered == list(range(start, min(stop, present)))
    # No two of them are the two children of one node: that one would have been sent instead.
    rest = [
        *partials(0, start, num_leaves, present),
        *nodes,
        *partials(stop, num_leaves, num_leaves, present),
    ]
    children = {(left, right) for left, right, _ in merges(rest, num_leaves, present)}
    assert not children & set(pairwise(nodes))
