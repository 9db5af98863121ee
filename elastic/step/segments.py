"""Cuts a job's trainable state into fixed segments, once and for all world sizes.

All parameters in registration order form one space addressed by rows (dim 0 of each parameter).
It is cut into nearly equal consecutive segments; every cut falls on a row, so that each piece of a
segment is a block `[start:stop)` of one parameter, contiguous in memory. The cut depends on names
and shapes alone: it is the same on every worker, in every World, and after every restore.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter as the cut sees it.

    Args:
        name: full name.
        rows: size of dim 0; 1 for a 0-dim tensor, 0 for an empty one.
        row_bytes: bytes of one row.
        splittable: False keeps all rows in one segment.
    """

    name: str
    rows: int
    row_bytes: int
    splittable: bool = True

    def __post_init__(self) -> None:
        if self.rows < 0 or self.row_bytes < 0:
            raise ValueError(f"{self.name}: negative size")


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Rows [start:stop) of parameter number `param`."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A fixed part of the state: consecutive pieces."""

    index: int
    pieces: tuple[Piece, ...]
    nbytes: int


def cut(params: Sequence[ParamSpec], num_segments: int) -> tuple[Segment, ...]:
    """Return consecutive segments, nearly equal by bytes; each row is in exactly one piece.

    There are `num_segments`, or fewer when there is less to cut: no segment is without a row. An
    empty parameter becomes an empty piece of the segment that is open where it stands. O(params +
    segments), whatever the number of rows.
    """
    if num_segments < 1:
        raise ValueError(f"num_segments is {num_segments}; it must be at least 1")
    total = sum(p.rows * p.row_bytes for p in params)
    units = sum((p.rows if p.splittable else min(p.rows, 1)) for p in params)
    wanted = min(num_segments, units)
    if wanted == 0:
        return _only_empty(params)
    cutter = _Cutter(wanted, total, units)
    for index, param in enumerate(params):
        cutter.add(index, param)
    return cutter.finish()


def _only_empty(params: Sequence[ParamSpec]) -> tuple[Segment, ...]:
    if not params:
        return ()
    pieces = tuple(Piece(i, 0, p.rows) for i, p in enumerate(params))
    return (Segment(index=0, pieces=pieces, nbytes=0),)


class _Cutter:
    """Fills one segment after the other; closes it at its share of the bytes."""

    def __init__(self, wanted: int, total: int, units: int) -> None:
        self._wanted = wanted
        self._total = total
        self._units_left = units
        self._done: list[Segment] = []
        self._pieces: list[Piece] = []
        self._bytes = 0
        self._bytes_before = 0

    def add(self, index: int, param: ParamSpec) -> None:
        if param.rows == 0:
            self._pieces.append(Piece(index, 0, 0))
            return
        start = 0
        while start < param.rows:
            take = self._rows_to_take(param, param.rows - start)
            self._take(index, start, take, param)
            start += take

    def _rows_to_take(self, param: ParamSpec, left: int) -> int:
        if not param.splittable:
            return left
        segments_left = self._wanted - len(self._done)
        if segments_left == 1:
            return left
        # Every later segment needs a unit of its own.
        most = self._units_left - (segments_left - 1)
        if param.row_bytes == 0:
            return max(1, min(left, most))
        goal = self._goal() - self._bytes_before - self._bytes
        rows = max(1, round(goal / param.row_bytes))
        return max(1, min(left, most, rows))

    def _goal(self) -> float:
        return self._total * (len(self._done) + 1) / self._wanted

    def _take(self, index: int, start: int, rows: int, param: ParamSpec) -> None:
        self._pieces.append(Piece(index, start, start + rows))
        self._bytes += rows * param.row_bytes
        self._units_left -= rows if param.splittable else 1
        segments_left = self._wanted - len(self._done)
        if segments_left == 1:
            return
        filled = self._bytes_before + self._bytes
        # Close when the next row would take the end further from the goal than it is now.
        reached = filled + param.row_bytes * (0.5 if param.splittable else 0.0) >= self._goal()
        if reached or self._units_left == segments_left - 1:
            self._close()

    def _close(self) -> None:
        self._done.append(
            Segment(index=len(self._done), pieces=tuple(self._pieces), nbytes=self._bytes)
        )
        self._bytes_before += self._bytes
        self._pieces = []
        self._bytes = 0

    def finish(self) -> tuple[Segment, ...]:
        """Close the last segment; empty parameters at the end stay in it."""
        if any(piece.stop > piece.start for piece in self._pieces):
            self._close()
        elif self._pieces:
            last = self._done.pop()
            self._done.append(
                Segment(
                    index=last.index,
                    pieces=(*last.pieces, *self._pieces),
                    nbytes=last.nbytes,
                )
            )
        return tuple(self._done)
