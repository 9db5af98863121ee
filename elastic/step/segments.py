"""The fixed cut of all trainable state; the same for every worker and every world size.

Parameters in registration order form one long list of units: a unit is one dim-0 row, or a whole
parameter when its optimizer is not elementwise. The list is cut between units into runs of nearly
equal bytes. Cutting on rows makes every piece a dim-0 block of one parameter, so pieces can be
sliced, sent, stored and restored without knowing anything else about the tensor.

The cut depends on names, shapes and the wanted number alone. It never sees who holds what:
arithmetic that runs segment by segment gives the same bits in every world. Nothing here touches
tensors, and nothing here decides where segments live (see placement.py).
Pure: no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """What the cut needs to know of one parameter.

    Args:
        name: unique among the parameters of a job.
        rows: size of dim 0; 1 for a 0-dim tensor; 0 for an empty one.
        row_bytes: bytes of one row.
        splittable: False keeps the whole parameter in one segment.
    """

    name: str
    rows: int
    row_bytes: int
    splittable: bool = True

    def __post_init__(self) -> None:
        if self.rows < 0 or self.row_bytes < 0:
            raise ValueError(f"parameter {self.name}: rows and row_bytes must not be negative")


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Rows [start:stop) of parameter number `param`."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive pieces that are held, agreed on and moved as one."""

    index: int
    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Run:
    """The units of one parameter that has bytes."""

    param: int
    units: int
    unit_bytes: int
    unit_rows: int


def cut(params: Sequence[ParamSpec], num_segments: int) -> tuple[Segment, ...]:
    """Cut the state into `min(num_segments, units)` consecutive segments of nearly equal bytes.

    As long as no unit is larger than a segment's fair share, every segment is within one largest
    unit of it. A unit that is larger is a segment of its own or ends one, and what follows is
    shared out anew. Parameters without bytes are whole pieces of the segment they stand in.

    Args:
        params: in registration order.
        num_segments: wanted number, at least 1.

    Raises:
        ValueError: `num_segments` is below 1 or two parameters have one name.
    """
    if num_segments < 1:
        raise ValueError(f"num_segments is {num_segments}; it must be at least 1")
    if len({p.name for p in params}) != len(params):
        raise ValueError("two parameters have the same name")
    if not params:
        return ()
    runs = [_run(i, p) for i, p in enumerate(params) if p.rows * p.row_bytes > 0]
    if not runs:
        pieces = tuple(Piece(i, 0, p.rows) for i, p in enumerate(params))
        return (Segment(0, pieces, 0),)
    bounds = _bounds(runs, num_segments)
    return _segments(params, runs, bounds)


def _run(index: int, param: ParamSpec) -> _Run:
    if param.splittable:
        return _Run(index, param.rows, param.row_bytes, 1)
    return _Run(index, 1, param.rows * param.row_bytes, param.rows)


def _bounds(runs: Sequence[_Run], num_segments: int) -> list[int]:
    """Return the unit numbers at which segments begin and end, 0 and the number of units included.

    Each bound is the one nearest to its ideal byte position. Ideal positions are equally spaced
    from the last *anchor*; a bound that missed its ideal by more than half a share (a large unit
    lay there) becomes the next anchor. So small misses never add up, and a large unit does not
    starve its neighbours. Integers only: the same on every machine.
    """
    first_unit = [0, *accumulate(r.units for r in runs)]
    first_byte = [0, *accumulate(r.units * r.unit_bytes for r in runs)]
    units, total = first_unit[-1], first_byte[-1]
    count = min(num_segments, units)

    def byte_at(unit: int) -> int:
        k = min(bisect_right(first_unit, unit) - 1, len(runs) - 1)
        return first_byte[k] + (unit - first_unit[k]) * runs[k].unit_bytes

    bounds = [0]
    anchor, anchor_index = 0, 0
    for index in range(1, count):
        shares = count - anchor_index  # the rest after the anchor is cut into this many
        ideal = anchor * shares + (total - anchor) * (index - anchor_index)  # scaled by `shares`
        k = min(bisect_right(first_byte, ideal // shares) - 1, len(runs) - 1)
        run = runs[k]
        into = ideal - first_byte[k] * shares
        unit = first_unit[k] + (2 * into + run.unit_bytes * shares) // (2 * run.unit_bytes * shares)
        unit = max(bounds[-1] + 1, min(unit, units - (count - index)))
        bounds.append(unit)
        miss = abs(byte_at(unit) * shares - ideal)
        if 2 * miss > total - anchor:
            anchor, anchor_index = byte_at(unit), index
    return [*bounds, units]


def _segments(
    params: Sequence[ParamSpec], runs: Sequence[_Run], bounds: Sequence[int]
) -> tuple[Segment, ...]:
    run_of = {r.param: r for r in runs}
    pieces: list[list[Piece]] = [[] for _ in bounds[1:]]
    sizes = [0] * len(pieces)
    unit = 0  # number of the next unit in the whole list
    here = 0  # segment that the next unit belongs to
    for index, param in enumerate(params):
        run = run_of.get(index)
        if run is None:
            pieces[min(here, len(pieces) - 1)].append(Piece(index, 0, param.rows))
            continue
        end = unit + run.units
        begin = unit
        while unit < end:
            stop = min(end, bounds[here + 1])
            start_row = (unit - begin) * run.unit_rows
            stop_row = (stop - begin) * run.unit_rows
            pieces[here].append(Piece(index, start_row, stop_row))
            sizes[here] += (stop - unit) * run.unit_bytes
            unit = stop
            if unit == bounds[here + 1]:
                here += 1
    return tuple(
        Segment(i, tuple(p), n) for i, (p, n) in enumerate(zip(pieces, sizes, strict=True))
    )
