"""A shuffle that is never stored: place i of a keyed permutation of range(n), for any i alone.

An epoch's order must be known to every worker, to a joiner in the middle of it, and for datasets
whose list of indices would not fit into memory. So it is computed: a balanced Feistel network (a
bijection for any round function) over the smallest 2k-bit range that holds n, and a value that
falls outside range(n) is sent through again until it falls inside ("cycle walking": following the
cycle of a bijection from inside range(n) always comes back inside, so the result is a bijection of
range(n)). The range is less than 4n, so fewer than four passes are needed on average.

The round function is the 64-bit finisher of a multiply-xorshift hash; the round keys are BLAKE2b
of (key, n). Eight rounds; ranges under 256 values are rounded up to 256, because a network with
halves of one or two bits cannot reach every order. Same numbers on every machine and version of
Python. It mixes well enough for training; it is no cipher.

Does not: sample with replacement or by weight, or keep an order "nearly" stable when n changes.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 8
_HALF_BITS_MIN = 4
_LENGTH_MAX = 1 << 63  # what len() can answer
_MASK64 = (1 << 64) - 1
_MULTIPLIER_A = 0xBF58476D1CE4E5B9
_MULTIPLIER_B = 0x94D049BB133111EB


class Permutation:
    """The bijection of range(length) that belongs to `key`; costs the same at any length.

    Args:
        length: how many places there are, 0 to 2**63.
        key: any integer of up to 64 bits; another key is another order.
    """

    __slots__ = ("_half_bits", "_half_mask", "_keys", "_shift", "length")

    def __init__(self, length: int, key: int) -> None:
        if not 0 <= length <= _LENGTH_MAX:
            raise ValueError(f"length={length} is outside 0..2**63")
        self.length = length
        self._half_bits = max(_HALF_BITS_MIN, ((length - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._shift = 64 - self._half_bits
        self._keys = _round_keys(length, key)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> int:
        """Return the value at `place`; raises IndexError outside range(length)."""
        if not 0 <= place < self.length:
            raise IndexError(f"place {place} is outside range({self.length})")
        value = self._pass(place)
        while value >= self.length:
            value = self._pass(value)
        return value

    def block(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Return the values at the places start..stop at once: uint64[stop - start]."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"places {start}..{stop} are outside range({self.length})")
        values = self._pass_all(np.arange(start, stop, dtype=np.uint64))
        while (outside := np.flatnonzero(values >= np.uint64(self.length))).size:
            values[outside] = self._pass_all(values[outside])
        return values

    def _pass_all(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits, mask = np.uint64(self._half_bits), np.uint64(self._half_mask)
        shift = np.uint64(self._shift)
        left, right = values >> bits, values & mask
        with np.errstate(over="ignore"):
            for key in self._keys:
                mixed = (right ^ np.uint64(key)) * np.uint64(_MULTIPLIER_A)
                mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(_MULTIPLIER_B)
                left, right = right, left ^ (mixed >> shift)
        return (left << bits) | right

    def _pass(self, value: int) -> int:
        """Send a value of the 2k-bit range through the network once."""
        bits, mask, shift = self._half_bits, self._half_mask, self._shift
        left, right = value >> bits, value & mask
        for key in self._keys:
            mixed = ((right ^ key) * _MULTIPLIER_A) & _MASK64
            mixed = ((mixed ^ (mixed >> 31)) * _MULTIPLIER_B) & _MASK64
            left, right = right, left ^ (mixed >> shift)
        return (left << bits) | right


def permute(i: int, n: int, key: int) -> int:
    """Return the value at place i of the permutation of range(n) that belongs to `key`."""
    return Permutation(n, key)[i]


def _round_keys(length: int, key: int) -> tuple[int, ...]:
    """Derive one 64-bit number per round."""
    source = struct.pack("<QQ", key & _MASK64, length)
    digest = hashlib.blake2b(source, digest_size=8 * _ROUNDS, person=b"sample order").digest()
    return struct.unpack(f"<{_ROUNDS}Q", digest)
