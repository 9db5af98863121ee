"""The fixed summation tree of a step: which sums exist, whoever computes them.

The leaves are the micro-batches 0..L-1 of a global step. A node covers [lo:hi) and is split at the
largest power of two below its size, so blocks of a power of two are aligned. A worker with a
contiguous range of leaves forms the largest nodes inside its range and sends them; the primary of a
segment finishes the tree from all of them. Floating-point addition does not associate, so it is
this shape, and not the sum alone, that makes results independent of the placement.

Leaves from `present` on are empty (the tail of an epoch): a node without a present leaf does not
exist, and its sibling passes through unchanged. Nothing is multiplied by zero.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Node(NamedTuple):
    """The sum of leaves [lo:hi)."""

    lo: int
    hi: int


def split(node: Node) -> tuple[Node, Node]:
    """Return the two children of a node of more than one leaf."""
    size = node.hi - node.lo
    if size < 2:
        raise ValueError(f"{node} is a leaf")
    middle = node.lo + (1 << (size - 1).bit_length() - 1)
    return Node(node.lo, middle), Node(middle, node.hi)


@lru_cache(maxsize=4096)
def partials(start: int, stop: int, num_leaves: int, present: int) -> tuple[Node, ...]:
    """Return the largest nodes that leaves [start:stop) can form, in leaf order.

    Nodes without a present leaf are left out; there are at most 2 log2(num_leaves).
    """
    found: list[Node] = []
    pending = [Node(0, num_leaves)]
    while pending:
        node = pending.pop()
        if node.lo >= present or node.hi <= start or node.lo >= stop:
            continue
        if start <= node.lo and node.hi <= stop:
            found.append(node)
            continue
        left, right = split(node)
        pending += [right, left]
    return tuple(found)


@lru_cache(maxsize=4096)
def fold_after(leaf: int, start: int, stop: int, num_leaves: int, present: int) -> int:
    """Return how many merges of the two topmost sums follow the push of a leaf.

    A worker pushes its leaves in order on a stack; after the last one the stack holds exactly the
    sums of `partials`.
    """
    count = 0
    for top in partials(start, stop, num_leaves, present):
        if not top.lo <= leaf < top.hi:
            continue
        node = top
        while node.hi - node.lo > 1:
            left, right = split(node)
            if leaf < right.lo:
                node = left
                continue
            if leaf == min(node.hi, present) - 1:
                count += 1  # this leaf completes the node, and its left child came before
            node = right
    return count


def merges(
    nodes: Iterable[Node], num_leaves: int, present: int
) -> tuple[tuple[Node, Node, Node], ...]:
    """Return the additions (left, right, result) that finish the tree, in order.

    Args:
        nodes: the sums at hand: all workers' `partials`.

    Raises ValueError when a present leaf is in none of them.
    """
    have = set(nodes)
    steps: list[tuple[Node, Node, Node]] = []

    def value_of(node: Node) -> Node | None:
        if node.lo >= present:
            return None
        if node in have:
            return node
        if node.hi - node.lo == 1:
            raise ValueError(f"nobody has leaf {node.lo}")
        left, right = (value_of(child) for child in split(node))
        if left is None or right is None:
            return left or right
        steps.append((left, right, node))
        return node

    value_of(Node(0, num_leaves))
    return tuple(steps)
