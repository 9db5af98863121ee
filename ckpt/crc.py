"""CRC32C of buffers of every kind, and of parts put together.

The C library reads only objects that it takes for immutable; NumPy arrays pass, so buffers go
through one. Pure: no I/O, no clock.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_BYTES", "as_bytes", "block_crcs", "combine", "crc32c", "extend"]

BLOCK_BYTES = 64 << 10
"""Size of the blocks that carry a CRC of their own; the last one of a slice is shorter.

Reading some rows costs at most one block more at each end, so small blocks keep partial reads
small; below this size the call costs as much as the CRC. The footer of each pack states its block
size, so this may change.
"""

Bytes = npt.NDArray[np.uint8]


def as_bytes(buffer: Any) -> Bytes:
    """Any contiguous buffer as a flat uint8 view of the same memory."""
    if isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.ndim == 1:
        return buffer
    view = memoryview(buffer)
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    return np.frombuffer(view, np.uint8)


def crc32c(buffer: Any) -> int:
    """CRC32C of a buffer."""
    return int(google_crc32c.value(as_bytes(buffer)))


def extend(crc: int, buffer: Any) -> int:
    """CRC32C of what `crc` stands for, followed by `buffer`."""
    return int(google_crc32c.extend(crc, as_bytes(buffer)))


def block_crcs(data: Bytes, block_bytes: int = BLOCK_BYTES) -> list[int]:
    """CRC32C of each block of `data`; none for no bytes."""
    return [
        int(google_crc32c.value(data[at : at + block_bytes]))
        for at in range(0, len(data), block_bytes)
    ]


def combine(crc: int, next_crc: int, next_bytes: int) -> int:
    """CRC32C of two adjacent runs from their own CRCs and the length of the second.

    The register after n zero bytes is linear in the register before them, so four tables of 256
    entries, made once for each length, replace reading the second run again.
    """
    if next_bytes == 0:
        return crc
    a, b, c, d = _shift_tables(next_bytes)
    shifted = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]
    return shifted ^ next_crc


@lru_cache(maxsize=8)
def _zero_run(nbytes: int) -> tuple[Bytes, int]:
    zeros = np.zeros(nbytes, np.uint8)
    return zeros, crc32c(zeros)


@lru_cache(maxsize=8)
def _shift_tables(nbytes: int) -> tuple[tuple[int, ...], ...]:
    zeros, offset = _zero_run(nbytes)
    basis = [extend(1 << bit, zeros) ^ offset for bit in range(32)]
    tables = []
    for byte in range(4):
        table = [0] * 256
        for value in range(1, 256):
            low = value & -value
            table[value] = table[value ^ low] ^ basis[8 * byte + low.bit_length() - 1]
        tables.append(tuple(table))
    return tuple(tables)
