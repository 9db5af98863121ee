"""Which samples were read, as one number: a hash of a multiset of sample numbers.

Each number goes through the finisher of splitmix64, and the results are added modulo 2**64. So the
hash does not depend on the order or on who read what, hashes of parts add up to that of the whole,
and a sample that is missing, read twice, or exchanged for another one changes it (by chance it
stays the same once in 2**64). It is made for finding faults, not forgers.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from elastic.permutation import Permutation

_MASK64 = (1 << 64) - 1
_BLOCK = 1 << 20
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_A = np.uint64(0xBF58476D1CE4E5B9)
_B = np.uint64(0x94D049BB133111EB)


def digest_of(numbers: Any) -> int | None:
    """Return the hash of sample numbers; None when they are not integers and have no hash."""
    try:
        values = np.asarray(numbers)
    except ValueError:
        return None
    if values.size == 0:
        return 0
    if values.dtype.kind not in "iu":
        return None
    return _digest(values.astype(np.uint64, copy=False).ravel())


def digest_of_range(stop: int) -> int:
    """Return the hash of 0, 1, ... stop - 1."""
    return add(
        _digest(np.arange(start, min(start + _BLOCK, stop), dtype=np.uint64))
        for start in range(0, stop, _BLOCK)
    )


def digest_of_places(order: Permutation | range, start: int, stop: int) -> int:
    """Return the hash of what stands at the places start..stop of an order."""
    return add(
        _digest(_at(order, first, min(first + _BLOCK, stop)))
        for first in range(start, stop, _BLOCK)
    )


def add(digests: Iterable[int]) -> int:
    """Return the hash of the union of parts."""
    return sum(digests) & _MASK64


def _digest(values: NDArray[np.uint64]) -> int:
    with np.errstate(over="ignore"):
        mixed = values + _GAMMA
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _A
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _B
        mixed ^= mixed >> np.uint64(31)
        return int(mixed.sum(dtype=np.uint64))


def _at(order: Permutation | range, start: int, stop: int) -> NDArray[np.uint64]:
    if isinstance(order, range):
        return np.arange(start, stop, dtype=np.uint64)
    return order.block(start, stop)
