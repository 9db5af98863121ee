"""Read plan: which ranges of which packs to read for the rows that are wanted.

Rows of a slice are one run of bytes, widened to whole blocks so that their CRC can be checked. Runs
that lie near each other in a pack are fetched in one request, if the bytes between them are few:
requests cost time, but bytes that nobody wants cost it too, so all gaps together stay below a small
share of what is wanted (the smallest gaps are bridged first). Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt.slices import TensorSlice

__all__ = ["Fetch", "Holder", "Place", "RowsMissing", "Run", "Wanted", "coalesce", "find_runs"]

MAX_FETCH_BYTES = 8 << 20
MAX_GAP_BYTES = 1 << 20
FREE_GAP_BYTES = 4096
"""Gaps that are always bridged: they are padding."""
GAP_SHARE = 0.02
"""All other gaps together, as a share of the bytes that are wanted."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows [start, stop) of a tensor, which go to target number `target`."""

    name: str
    start: int
    stop: int
    target: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A pack that has rows [start, stop) of some tensor as its slice number `slice`."""

    pack: int
    slice: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes [start, stop) of a slice, which belong at `at` of target number `target`."""

    pack: int
    slice: int
    start: int
    stop: int
    target: int
    at: int
    rows: Wanted
    """The same in rows, for looking elsewhere."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slice lies in its pack."""

    offset: int
    nbytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """One request: bytes [start, stop) of a pack, and the runs to be taken from them.

    Each run comes with the block-aligned bytes [first, last) of its slice that must be checked.
    """

    pack: int
    start: int
    stop: int
    runs: tuple[tuple[Run, int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return self.stop - self.start


class RowsMissing(LookupError):
    """No pack that may be used has these rows."""

    def __init__(self, name: str, start: int, stop: int) -> None:
        super().__init__(f"no pack has rows [{start}, {stop}) of {name}")
        self.name = name
        self.start = start
        self.stop = stop


def find_runs(
    wanted: Sequence[Wanted],
    holders: Mapping[str, Sequence[Holder]],
    row_bytes: Mapping[str, int],
    excluded: Collection[int] = (),
) -> list[Run]:
    """One run for each stretch of rows and pack; each wanted row is covered exactly once.

    Where several packs have a row the one that reaches furthest is taken, of equals the first.
    `excluded` packs are not used. Raises RowsMissing.
    """
    runs = []
    for each in wanted:
        size = row_bytes[each.name]
        usable = [h for h in holders.get(each.name, ()) if h.pack not in excluded]
        at = each.start
        while at < each.stop:
            best = max(
                (h for h in usable if h.start <= at < h.stop),
                key=lambda h: (h.stop, -h.pack),
                default=None,
            )
            if best is None:
                later = min((h.start for h in usable if h.start > at), default=each.stop)
                raise RowsMissing(each.name, at, min(later, each.stop))
            stop = min(best.stop, each.stop)
            if size:
                runs.append(
                    Run(
                        pack=best.pack,
                        slice=best.slice,
                        start=(at - best.start) * size,
                        stop=(stop - best.start) * size,
                        target=each.target,
                        at=(at - each.start) * size,
                        rows=Wanted(each.name, at, stop, each.target),
                    )
                )
            at = stop
    return runs


def coalesce(
    runs: Sequence[Run],
    places: Mapping[tuple[int, int], Place],
    *,
    max_gap_bytes: int = MAX_GAP_BYTES,
    max_fetch_bytes: int = MAX_FETCH_BYTES,
) -> list[Fetch]:
    """The requests for these runs. `places` by (pack, slice). A block may exceed the maximum."""
    spans = sorted(
        (
            span
            for run in runs
            for span in _spans(run, places[run.pack, run.slice], max_fetch_bytes)
        ),
        key=lambda span: (span.pack, span.start, span.stop),
    )
    bridged = _bridges(spans, max_gap_bytes)
    fetches: list[Fetch] = []
    for i, span in enumerate(spans):
        last = fetches[-1] if fetches else None
        if (
            last is not None
            and last.pack == span.pack
            and (span.start <= last.stop or i in bridged)
            and max(span.stop, last.stop) - last.start <= max_fetch_bytes
        ):
            stop = max(last.stop, span.stop)
            fetches[-1] = Fetch(span.pack, last.start, stop, last.runs + span.runs)
        else:
            fetches.append(span)
    return fetches


def _spans(run: Run, place: Place, max_bytes: int) -> list[Fetch]:
    """A run widened to blocks and cut into requests."""
    block = place.block_bytes
    step = max(max_bytes // block, 1) * block
    first = run.start // block * block
    last = min(-(-run.stop // block) * block, place.nbytes)
    spans = []
    for start in range(first, last, step):
        stop = min(start + step, last)
        spans.append(
            Fetch(run.pack, place.offset + start, place.offset + stop, ((run, start, stop),))
        )
    return spans


def _bridges(spans: Sequence[Fetch], max_gap_bytes: int) -> set[int]:
    """Numbers of the spans whose gap to the one before is worth reading."""
    gaps = []
    reached: dict[int, int] = {}
    for i, span in enumerate(spans):
        if span.pack in reached and (gap := span.start - reached[span.pack]) > 0:
            gaps.append((gap, i))
        reached[span.pack] = max(reached.get(span.pack, 0), span.stop)
    budget = GAP_SHARE * sum(span.nbytes for span in spans)
    bridged = set()
    for gap, i in sorted(gaps):
        if gap > FREE_GAP_BYTES:
            budget -= gap
            if gap > max_gap_bytes or budget < 0:
                break
        bridged.add(i)
    return bridged


def holders_of(packs: Sequence[Sequence[TensorSlice]]) -> dict[str, list[Holder]]:
    """For each tensor the slices that have rows of it."""
    holders: dict[str, list[Holder]] = {}
    for pack, slices in enumerate(packs):
        for number, each in enumerate(slices):
            holders.setdefault(each.name, []).append(Holder(pack, number, each.start, each.stop))
    return holders
