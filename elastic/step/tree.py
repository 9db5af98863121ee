"""The order in which the gradients of a step are added: a fixed binary tree over its leaves.

    leaves 0..7, five of them present:        a node [lo:hi) splits at the largest power of two
                 [0:8)                        below its size
             /          \\
          [0:4)        [4:8) = leaf 4         only leaf 4 lives on the right: it passes through
          /    \\                              unchanged, never added to a zero
      [0:2)   [2:4)

Floating-point addition is not associative, so the sum must have one shape whoever computes it. A
worker with leaves [start:stop) adds only where a whole node lies inside its range; the partial
sums it ends with are sent, and the receiver goes on along the same tree. Empty leaves (the tail of
an epoch) are skipped, which is not the same as adding zero (-0.0 + 0.0 is 0.0).

A node is named by the largest range that has the same present leaves. So a name says exactly which
leaves are in a sum, and workers that disagree about a name cannot be added by mistake.
Nothing here adds numbers; it only says which sums, in which order.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Node(NamedTuple):
    """The sum of all present leaves in [lo:hi)."""

    lo: int
    hi: int


def partials(start: int, stop: int, num_leaves: int, present: int) -> tuple[Node, ...]:
    """Return, from left to right, the fewest nodes that cover the present leaves in [start:stop).

    Args:
        start, stop: the worker's leaves; may be empty.
        num_leaves: leaves of a full step.
        present: leaves [0:present) are not empty in this step.
    """
    _check(num_leaves, present)
    if not 0 <= start <= stop <= num_leaves:
        raise ValueError(f"leaves [{start}:{stop}) are not within [0:{num_leaves})")
    found: list[Node] = []
    if start < min(stop, present):
        _cover(0, num_leaves, start, min(stop, present), present, found)
    return tuple(found)


def fold_after(leaf: int, start: int, stop: int, num_leaves: int, present: int) -> int:
    """Return how often a worker adds the top two sums of its stack after it pushed `leaf`.

    A worker pushes its leaves in order. After the last one its stack equals `partials`.
    """
    if not start <= leaf < min(stop, present):
        raise ValueError(f"leaf {leaf} is not a present one of [{start}:{stop}), {present} present")
    before = len(partials(start, leaf, num_leaves, present))
    after = len(partials(start, leaf + 1, num_leaves, present))
    return before + 1 - after


def merges(
    nodes: Iterable[Node], num_leaves: int, present: int
) -> tuple[tuple[Node, Node, Node], ...]:
    """Return the additions (left, right, result) that finish the tree from all partial sums.

    Each sum is used once; the last result is the root. Without present leaves, or when one node
    already is the root, there is nothing to add.

    Raises:
        ValueError: the nodes overlap, or do not cover exactly the present leaves.
    """
    _check(num_leaves, present)
    have = list(nodes)
    left_over = set(have)
    if len(left_over) != len(have):
        raise ValueError("a partial sum is named twice")
    order: list[tuple[Node, Node, Node]] = []
    if present:
        _finish(Node(0, num_leaves), present, left_over, order)
    if left_over:
        raise ValueError(f"partial sums {sorted(left_over)} do not belong to this tree")
    return tuple(order)


def _check(num_leaves: int, present: int) -> None:
    if num_leaves < 1 or not 0 <= present <= num_leaves:
        raise ValueError(f"{present} of {num_leaves} leaves cannot be present")


def _split(lo: int, hi: int) -> int:
    """Return where [lo:hi), two leaves or more, splits."""
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


def _children(node: Node, present: int) -> tuple[Node, Node]:
    """Return the two non-empty nodes whose sum is `node`; it has two present leaves or more."""
    lo, hi = node
    middle = _split(lo, hi)
    while middle >= present:  # the right half is empty: the left one passes through
        hi = middle
        middle = _split(lo, hi)
    return Node(lo, middle), Node(middle, hi)


def _cover(lo: int, hi: int, start: int, stop: int, present: int, found: list[Node]) -> None:
    last = min(hi, present)
    if stop <= lo or last <= start:
        return
    if start <= lo and last <= stop:
        found.append(Node(lo, hi))
        return
    for child in _children(Node(lo, hi), present):
        _cover(*child, start, stop, present, found)


def _finish(
    node: Node, present: int, left_over: set[Node], order: list[tuple[Node, Node, Node]]
) -> None:
    if node in left_over:
        left_over.remove(node)
        return
    if min(node.hi, present) - node.lo < 2:
        raise ValueError(f"no partial sum has leaf {node.lo}")
    left, right = _children(node, present)
    _finish(left, present, left_over, order)
    _finish(right, present, left_over, order)
    order.append((left, right, node))
