"""Commit: what combines, what does not, and which checkpoint is the newest."""

from __future__ import annotations

import itertools

import pytest

from ckpt.commit import Missing, assemble, make_entry, on_lineage, uncovered_rows
from ckpt.errors import Conflict
from ckpt.manifest import Manifest, encode
from ckpt.slices import TensorInfo, TensorSlice


def entry(worker="a", segments=(0,), step=10, generation=2, rows=None, **other):
    start, stop = rows if rows is not None else (segments[0], segments[-1] + 1)
    settings = {
        "job": "j",
        "node": "n",
        "worker_id": worker,
        "step": step,
        "generation": generation,
        "object": f"packs/{worker}.pack",
        "size": 5000,
        "crc": 1,
        "footer_offset": 4900,
        "footer_bytes": 36,
        "footer_crc": 3,
        "segments": segments,
        "num_segments": 3,
        "lineage": ((1, 0), (2, 5)),
        "extra_crc": 9,
        "slices": [TensorSlice("w", "int8", (3,), start, stop)],
        **other,
    }
    return make_entry(**settings)


WHOLE = [entry("a", [0]), entry("b", [1]), entry("c", [2])]


def test_complete_entries_make_a_manifest_whoever_brings_them():
    manifests = [
        assemble(order, step=10, generation=2, extra={"x": 1})
        for order in itertools.permutations(WHOLE)
    ]
    assert all(isinstance(m, Manifest) for m in manifests)
    assert len({encode(m) for m in manifests}) == 1
    assert [p.worker_id for p in manifests[0].packs] == ["a", "b", "c"]
    assert manifests[0].tensors == {"w": TensorInfo("int8", (3,))}


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_segment_that_nobody_has_is_named(left_out):
    rest = [e for i, e in enumerate(WHOLE) if i != left_out]
    found = assemble(rest, step=10, generation=2)
    assert found == Missing(step=10, generation=2, segments=(left_out,), num_segments=3)
    assert f"segments {left_out} (1 of 3)" in str(found)


@pytest.mark.parametrize("strange", [{"step": 11}, {"generation": 3}])
def test_another_step_or_generation_never_fills_a_gap(strange):
    found = assemble([*WHOLE[:2], entry("c", [2], **strange)], step=10, generation=2)
    assert isinstance(found, Missing)
    assert found.segments == (2,)


def test_no_entry_at_all_is_missing_too():
    found = assemble([], step=10, generation=2)
    assert isinstance(found, Missing)
    assert "no pack" in str(found)


@pytest.mark.parametrize(
    ("field", "value"),
    [("job", "other"), ("num_segments", 4), ("lineage", ((1, 0),)), ("extra_crc", 8)],
)
def test_entries_that_contradict_each_other_are_refused(field, value):
    with pytest.raises(Conflict, match=field):
        assemble([*WHOLE[:2], entry("c", [2], **{field: value})], step=10, generation=2)


def test_all_segments_but_not_all_rows_is_refused():
    with pytest.raises(Conflict, match=r"rows \[1, 2\) of w"):
        assemble(
            [entry("a", [0]), entry("b", [1], rows=(2, 2)), entry("c", [2])], step=10, generation=2
        )


def test_two_descriptions_of_one_tensor_are_refused():
    odd = entry("c", [2], slices=[TensorSlice("w", "uint8", (3,), 2, 3)])
    with pytest.raises(Conflict, match="w is"):
        assemble([*WHOLE[:2], odd], step=10, generation=2)


def test_twins_may_bring_the_same_rows_twice():
    found = assemble([*WHOLE, entry("d", [0, 1])], step=10, generation=2)
    assert isinstance(found, Manifest)
    assert len(found.packs) == 4


#                        generation began at:   1:0        2:40       4:20 (went back)
LINEAGE = ((1, 0), (2, 40), (4, 20))


@pytest.mark.parametrize(
    ("step", "generation", "on"),
    [
        (10, 1, True),
        (20, 1, True),  # the base itself
        (30, 1, False),  # 4 went back behind it
        (40, 1, False),
        (50, 2, False),
        (20, 2, True),
        (21, 4, True),
        (900, 4, True),
        (30, 3, False),  # a generation that the run did not come through
        (10, 5, False),
    ],
)
def test_what_lies_on_a_lineage(step, generation, on):
    assert on_lineage(step, generation, LINEAGE) is on


def test_uncovered_rows_are_found_between_overlaps():
    tensors = {
        "w": TensorInfo("int8", (10,)),
        "s": TensorInfo("int8", ()),
        "e": TensorInfo("int8", (0,)),
    }
    held = [TensorSlice("w", "int8", (10,), a, b) for a, b in [(6, 8), (0, 3), (1, 2), (2, 4)]]
    assert uncovered_rows(tensors, held) == [("w", 4, 6), ("w", 8, 10), ("s", 0, 1)]
