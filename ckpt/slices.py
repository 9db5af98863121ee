"""Geometry: which rows of which tensor a run of bytes holds.

All state is cut along dimension 0 only. Rows of a C-ordered tensor are contiguous, so a slice is
always one run of bytes, and any other cut of the same tensor is made of sub-runs of it. That is the
whole of resharding. A 0-dim tensor counts as one row; a tensor may have no rows, or rows of no
bytes.

The names of data types are torch's without the prefix. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

__all__ = ["ITEM_BYTES", "TensorInfo", "TensorSlice", "check_disjoint", "item_bytes"]

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes of one element. Names are only ever added."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`. Raises ValueError for a name that is not in the table."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise ValueError(f"data type {dtype!r} cannot be stored") from None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a logical tensor is: its data type and its full shape."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        item_bytes(self.dtype)
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape {self.shape} has a negative size")

    @property
    def rows(self) -> int:
        """Size of dimension 0; 1 for a 0-dim tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return item_bytes(self.dtype) * prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows [start, stop) of the logical tensor `name`, whose full shape is `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor needs a name")
        object.__setattr__(self, "shape", tuple(self.shape))
        rows = TensorInfo(self.dtype, self.shape).rows
        if not 0 <= self.start <= self.stop <= rows:
            raise ValueError(
                f"{self.name}: rows [{self.start}, {self.stop}) are not within its {rows} rows"
            )

    @property
    def info(self) -> TensorInfo:
        """The logical tensor this is a part of."""
        return TensorInfo(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return (self.stop - self.start) * self.info.row_bytes


def check_disjoint(slices: Iterable[TensorSlice]) -> None:
    """Raise ValueError if a row occurs twice or a tensor is described in two ways."""
    rows: dict[str, list[tuple[int, int]]] = {}
    infos: dict[str, TensorInfo] = {}
    for each in slices:
        if infos.setdefault(each.name, each.info) != each.info:
            raise ValueError(f"{each.name} is given both as {infos[each.name]} and as {each.info}")
        if each.start < each.stop:
            rows.setdefault(each.name, []).append((each.start, each.stop))
    for name, ranges in rows.items():
        ranges.sort()
        for (_, stop), (start, _) in pairwise(ranges):
            if start < stop:
                raise ValueError(f"{name}: row {start} is given twice")
