"""The read plan covers every wanted byte once, checks whole blocks, and bridges few gaps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.read_plan import (
    FREE_GAP_BYTES,
    GAP_SHARE,
    Holder,
    Place,
    RowsMissing,
    Wanted,
    coalesce,
    find_runs,
)

BLOCK = 64
ranges = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)


@given(
    held=st.lists(st.tuples(st.integers(0, 3), ranges), max_size=8),
    wanted=st.lists(ranges, min_size=1, max_size=4),
    row_bytes=st.integers(1, 9),
    excluded=st.sets(st.integers(0, 3), max_size=2),
)
def test_each_wanted_row_once_from_a_pack_that_has_it(held, wanted, row_bytes, excluded):
    holders = {"w": [Holder(p, i, a, b) for i, (p, (a, b)) in enumerate(held)]}
    asked = [Wanted("w", a, b, t) for t, (a, b) in enumerate(wanted)]
    usable = [h for h in holders["w"] if h.pack not in excluded]
    covered = {r for h in usable for r in range(h.start, h.stop)}
    if not {r for w in asked for r in range(w.start, w.stop)} <= covered:
        with pytest.raises(RowsMissing) as error:
            find_runs(asked, holders, {"w": row_bytes}, excluded)
        assert error.value.start not in covered
        return
    runs = find_runs(asked, holders, {"w": row_bytes}, excluded)
    seen = Counter()
    for run in runs:
        holder = holders["w"][run.slice]
        assert holder.pack == run.pack
        assert run.pack not in excluded
        assert 0 <= run.start < run.stop <= (holder.stop - holder.start) * row_bytes
        for i in range(run.stop - run.start):
            row_byte = holder.start * row_bytes + run.start + i
            assert row_byte - asked[run.target].start * row_bytes == run.at + i
            seen[run.target, run.at + i] += 1
    for t, each in enumerate(asked):
        for i in range((each.stop - each.start) * row_bytes):
            assert seen.pop((t, i)) == 1
    assert not seen


@st.composite
def layouts(draw):
    """Slices of some packs, one after the other with gaps, and runs within them."""
    places, runs = {}, []
    for pack in range(draw(st.integers(1, 3))):
        at = 4096
        for number in range(draw(st.integers(1, 6))):
            at += draw(st.sampled_from([0, 64, 5000, 70_000]))
            nbytes = draw(st.integers(1, 3000))
            places[pack, number] = Place(at, nbytes, BLOCK)
            at += nbytes
            start = draw(st.integers(0, nbytes - 1))
            stop = draw(st.integers(start + 1, nbytes))
            holder = {"w": [Holder(pack, number, 0, nbytes)]}
            runs += find_runs([Wanted("w", start, stop, len(runs))], holder, {"w": 1})
    return places, runs


@given(layouts=layouts(), max_fetch=st.sampled_from([64, 1000, 4096, 1 << 20]))
def test_every_block_of_every_run_is_fetched_and_gaps_stay_within_budget(layouts, max_fetch):
    places, runs = layouts
    fetches = coalesce(runs, places, max_fetch_bytes=max_fetch)
    blocks = set()
    for fetch in fetches:
        for run, first, last in fetch.runs:
            place = places[run.pack, run.slice]
            assert run.pack == fetch.pack
            assert first % BLOCK == 0
            assert last % BLOCK == 0 or last == place.nbytes
            assert fetch.start <= place.offset + first
            assert place.offset + last <= fetch.stop
            blocks |= {(run.target, b) for b in range(first // BLOCK, -(-last // BLOCK))}
        if len(fetch.runs) > 1:
            assert fetch.nbytes <= max_fetch
    for run in runs:
        for b in range(run.start // BLOCK, -(-run.stop // BLOCK)):
            assert (run.target, b) in blocks
    useful = sum(-(-run.stop // BLOCK) * BLOCK - run.start // BLOCK * BLOCK for run in runs)
    padding = FREE_GAP_BYTES * len(runs)
    assert sum(f.nbytes for f in fetches) <= (1 + GAP_SHARE) * useful + padding


def test_small_gaps_are_bridged_before_large_ones_and_far_ones_never():
    places = {
        (0, i): Place(at, 400_000, 1000) for i, at in enumerate([0, 405_000, 900_000, 9_000_000])
    }
    runs = [
        run
        for i in range(4)
        for run in find_runs(
            [Wanted("w", 0, 400_000, i)], {"w": [Holder(0, i, 0, 400_000)]}, {"w": 1}
        )
    ]
    spans = [(f.start, f.stop) for f in coalesce(runs, places)]
    assert spans == [(0, 805_000), (900_000, 1_300_000), (9_000_000, 9_400_000)]
