"""Any state, saved in any cut, reads back in any other, bit by bit, with few bytes too many."""

from __future__ import annotations

import itertools
import tempfile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.arena import ArenaReader
from ckpt.commit import assemble
from ckpt.crc import BLOCK_BYTES
from ckpt.discover import load_manifest
from ckpt.manifest import encode
from ckpt.slices import ITEM_BYTES, TensorSlice
from ckpt.tier_local import LocalTier
from tests.ckpt_support import (
    Worker,
    assert_holds,
    make_state,
    rows,
    write_checkpoint,
    write_pack,
)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(
    st.integers(1, 40), st.integers(1, 70_000)
).filter(lambda s: s[0] * s[1] < 300_000)
states = st.dictionaries(
    st.sampled_from(["a", "b.weight", "c", "d.e.f"]),
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes),
    min_size=1,
    max_size=4,
).map(make_state)


@st.composite
def cuts(draw, state, num_workers):
    """Each tensor's rows in any runs, each run at any worker; a tensor without rows anywhere."""
    parts = [[] for _ in range(num_workers)]
    for name, (info, _) in state.items():
        inner = draw(st.lists(st.integers(0, info.rows), max_size=5)) if info.rows else []
        borders = sorted({0, info.rows, *inner})
        for start, stop in itertools.pairwise(borders):
            worker = draw(st.integers(0, num_workers - 1))
            parts[worker].append(TensorSlice(name, info.dtype, info.shape, start, stop))
        if info.rows == 0:
            parts[0].append(TensorSlice(name, info.dtype, info.shape, 0, 0))
    return parts


@settings(max_examples=60, deadline=None)
@given(data=st.data(), state=states, num_workers=st.integers(1, 5))
def test_any_cut_reads_back_in_any_rows(data, state, num_workers):
    parts = data.draw(cuts(state, num_workers))
    with tempfile.TemporaryDirectory() as root:
        tier = LocalTier(root)
        entries = []
        for w, part in enumerate(parts):
            worker = Worker(f"n.{w}-aa", part, [w], num_workers)
            entries.append(write_pack(tier, worker, state, 3))
            worker.close()
        manifest = assemble(entries, step=3, generation=1, extra={"step": 3})
        tier.create(f"{manifest.dir}/manifest.json", encode(manifest))
        with ckpt.open_latest([root]) as checkpoint:
            assert_holds(checkpoint, state)
            requests, expected = [], []
            for name, (info, _) in state.items():
                start = data.draw(st.integers(0, info.rows))
                stop = data.draw(st.integers(start, info.rows))
                piece = TensorSlice(name, info.dtype, info.shape, start, stop)
                requests.append((name, start, stop, bytearray(piece.nbytes)))
                expected.append(rows(state, piece))
            checkpoint.read_into(requests)
            assert [bytes(r[3]) for r in requests] == expected
            assert checkpoint.report == []


@settings(max_examples=15, deadline=None)
@given(state=states, worlds=st.lists(st.integers(1, 6), min_size=2, max_size=3, unique=True))
def test_the_bytes_of_a_tensor_do_not_depend_on_the_world(state, worlds):
    seen = []
    with tempfile.TemporaryDirectory() as root:
        for step, world in enumerate(worlds):
            write_checkpoint(root, state, world, step=step)
            with ckpt.open_checkpoint(root, step) as checkpoint:
                seen.append({name: checkpoint.read(name).tobytes() for name in checkpoint.tensors})
    assert all(each == seen[0] for each in seen)


def test_reading_a_share_reads_little_more_than_the_share(tmp_path):
    """Every new worker's part of a state that was saved at another world size."""
    state = make_state({"w": ("float32", (6000, 1024)), "m": ("float32", (6000, 1024))})
    write_checkpoint(tmp_path, state, 4)
    for world in (1, 2, 3, 5):
        for w in range(world):
            with ckpt.open_latest([str(tmp_path)]) as checkpoint:
                wanted = [(n, 6000 * w // world, 6000 * (w + 1) // world, None) for n in ("w", "m")]
                requests = [(n, a, b, np.empty((b - a) * 4096, np.uint8)) for n, a, b, _ in wanted]
                checkpoint.read_into(requests)
                needed = sum(len(r[3]) for r in requests)
                blocks = 2 * 2 * 2 * BLOCK_BYTES  # two tensors, both ends, in up to two packs
                assert needed <= checkpoint.bytes_read <= min(1.05 * needed, needed + blocks)


def test_rows_come_from_footers_when_the_manifest_lists_none(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt.commit.MAX_ROWS", 1)
    monkeypatch.setattr("ckpt.commit.MAX_INDEX_CHARS", 1)
    state = make_state({"w": ("float32", (60, 10)), "s": ("int64", ())})
    manifest = write_checkpoint(tmp_path, state, 3)
    assert manifest.tensors is None
    assert load_manifest(LocalTier(tmp_path), 1, 1) == manifest
    with ckpt.open_latest([str(tmp_path)]) as checkpoint:
        assert_holds(checkpoint, state)


def test_a_pack_is_the_same_file_for_the_same_state(tmp_path):
    state = make_state({"w": ("float32", (60, 10)), "b": ("bool", (9,))})
    for name in ("one", "two"):
        write_checkpoint(tmp_path / name, state, 2)
    for path in sorted((tmp_path / "one").rglob("*")):
        if path.is_file():
            other = tmp_path / "two" / path.relative_to(tmp_path / "one")
            assert path.read_bytes() == other.read_bytes(), path


def test_reader_of_an_empty_arena_sees_nothing():
    worker = Worker("n.0-aa", [TensorSlice("w", "int8", (3,), 0, 3)], [0], 1)
    reader = ArenaReader(worker.fd)
    assert [reader.sealed(0), reader.sealed(1)] == [None, None]
    reader.close()
