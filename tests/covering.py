"""Few combinations that hold every pair of values: a covering array, made greedily.

The order of factors and values decides the result; nothing is random.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """Return all pairs of (factor, value) in one combination."""
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Return every pair of values of two different factors."""
    return {
        ((a, x), (b, y))
        for a, b in combinations(sorted(factors), 2)
        for x in factors[a]
        for y in factors[b]
    }


def covering(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return combinations in which every pair of values is found."""
    left = all_pairs(factors)
    rows: list[dict[str, Any]] = []
    names = sorted(factors, key=lambda name: -len(factors[name]))
    while left:
        first, second = min(left, key=repr)
        row = dict([first, second])
        for name in names:
            if name in row:
                continue
            gains = [len(pairs_of({**row, name: value}) & left) for value in factors[name]]
            row[name] = factors[name][gains.index(max(gains))]  # the first of the best
        left -= pairs_of(row)
        rows.append(row)
    return rows
