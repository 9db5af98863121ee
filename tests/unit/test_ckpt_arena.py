"""The arena: whole halves are seen, torn and stale ones never; memory is reused and may grow."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest

from ckpt.arena import Arena, ArenaReader, create_fd, half_bytes_for
from ckpt.errors import Corrupt
from ckpt.slices import TensorSlice
from ckpt.writer import PackSource
from tests.ckpt_support import Worker, cut, make_state, pieces, rows

STATE = make_state(
    {
        "w": ("float32", (1000, 300)),
        "b": ("bfloat16", (7,)),
        "s": ("int64", ()),
        "none": ("float32", (0, 3)),
        "flat": ("int8", (4, 0)),
    }
)


@pytest.fixture
def worker():
    worker = Worker("n.0-aa", cut(STATE, 1)[0], [0], 1)
    yield worker
    worker.close()


@pytest.fixture
def reader(worker):
    reader = ArenaReader(worker.fd)
    yield reader
    reader.close()


def pack_of(reader, half, part=1 << 20):
    sealed = reader.sealed(half)
    source = PackSource(reader, sealed, job="j", worker_id="n.0-aa")
    data = b"".join(bytes(p) for p in source.chunks(part))
    assert len(data) == source.size
    return data, source


def test_a_sealed_half_holds_what_was_staged(worker, reader):
    assert reader.sealed(0) is None
    half = worker.stage(STATE, 5, extra={"lr": 0.5})
    sealed = reader.sealed(half)
    assert (sealed.step, sealed.generation, sealed.extra) == (5, 1, {"lr": 0.5})
    for piece, offset in zip(sealed.footer.slices, sealed.footer.offsets, strict=True):
        assert offset % 64 == 0
        assert sealed.data[offset : offset + piece.nbytes].tobytes() == rows(STATE, piece)


def test_halves_take_turns_and_a_third_save_waits(worker, reader):
    assert [worker.stage(STATE, step) for step in (1, 2, 3)] == [0, 1, None]
    assert worker.arena.busy_halves() == (0, 1)
    worker.arena.release(0)
    assert worker.stage(STATE, 3) == 0
    assert (reader.sealed(0).step, reader.sealed(1).step) == (3, 2)


def test_the_same_pack_comes_out_in_parts_of_any_size(worker, reader):
    half = worker.stage(STATE, 5)
    whole, source = pack_of(reader, half, 1 << 30)
    for part in (4096, 100_003, 1 << 20):
        again, other = pack_of(reader, half, part)
        assert again == whole
        assert other.crc == source.crc


def test_a_copied_half_is_seen_only_when_it_is_sealed(worker, reader):
    buffers = [(s, bytearray(rows(STATE, s))) for s in worker.slices]
    copied = worker.arena.copy(
        step=5,
        generation=1,
        pieces=buffers,
        extra={},
        segments=[0],
        num_segments=1,
        lineage=[[1, 0]],
    )
    assert reader.sealed(copied.half) is None
    assert worker.arena.busy_halves() == (copied.half,)
    for _, buffer in buffers:
        buffer[:] = bytes(len(buffer))  # the training has gone on
    assert copied.seal() == copied.half
    data, _ = pack_of(reader, copied.half)
    assert rows(STATE, worker.slices[0]) in data


def test_padding_is_zero_whatever_the_half_held_before(worker, reader):
    half = worker.stage(STATE, 5)
    clean, _ = pack_of(reader, half)
    memory = np.frombuffer(worker.arena._memory, np.uint8)
    worker.arena.release(half)
    memory[4096 + 4096 :] = 0xFF
    assert worker.stage(STATE, 5) == half
    dirty, _ = pack_of(reader, half)
    assert dirty == clean


def test_a_worker_that_dies_while_it_copies_leaves_nothing_whole(worker, reader, monkeypatch):
    worker.stage(STATE, 5)
    worker.arena.release(0)
    assert reader.sealed(0).step == 5
    monkeypatch.setattr("ckpt.arena._copy", _die)
    with pytest.raises(KeyboardInterrupt):
        worker.stage(STATE, 6)
    assert reader.sealed(0) is None


def _die(*_):
    raise KeyboardInterrupt


def test_every_flipped_byte_of_header_and_footer_breaks_the_seal(worker, reader):
    half = worker.stage(STATE, 5)
    sealed = reader.sealed(half)
    memory = worker.arena._memory
    start = 4096
    for at in [*range(52), *range(sealed.footer_offset, sealed.footer_offset + 400)]:
        memory[start + at] ^= 1
        seen = reader.sealed(half)
        assert seen is None or not reader.still_sealed(sealed), at
        memory[start + at] ^= 1
    assert reader.still_sealed(sealed)


def test_a_half_overwritten_while_it_is_read_cannot_become_a_pack(worker, reader):
    half = worker.stage(STATE, 5)
    sealed = reader.sealed(half)
    source = PackSource(reader, sealed, job="j", worker_id="n.0-aa")
    parts = source.chunks(100_000)
    next(parts)
    worker.arena.release(half)  # a worker that was thought dead goes on
    assert (
        worker.stage(make_state({n: (i.dtype, i.shape) for n, (i, _) in STATE.items()}, 1), 6)
        == half
    )
    with pytest.raises(Corrupt, match="staged"):
        list(parts)
    assert source.crc is None


def test_a_half_staged_again_with_the_same_bytes_is_noticed_too(worker, reader):
    half = worker.stage(STATE, 5)
    source = PackSource(reader, reader.sealed(half), job="j", worker_id="n.0-aa")
    parts = source.chunks(100_000)
    next(parts)
    worker.arena.release(half)
    worker.stage(STATE, 6)
    with pytest.raises(Corrupt, match="overwritten"):
        list(parts)


def test_it_grows_when_nothing_reads_it_and_the_reader_follows():
    small = TensorSlice("w", "int8", (10,), 0, 10)
    large = TensorSlice("w", "int8", (9 << 20,), 0, 9 << 20)
    fd = create_fd()
    arena = Arena(fd, half_bytes_for([small]))
    reader = ArenaReader(fd)
    settings = {
        "generation": 1,
        "extra": {},
        "segments": [0],
        "num_segments": 1,
        "lineage": [[1, 0]],
    }
    half = arena.stage(step=1, pieces=[(small, b"x" * 10)], **settings)
    assert reader.sealed(half).step == 1
    big = [(large, np.zeros(9 << 20, np.uint8))]
    assert arena.stage(step=2, pieces=big, **settings) is None  # a half is being read
    arena.release(half)
    grown = arena.stage(step=2, pieces=big, **settings)
    assert grown is not None
    assert reader.sealed(grown).step == 2
    reader.close()
    os.close(fd)


def test_it_cannot_be_shrunk_under_a_reader(worker):
    with pytest.raises(OSError, match="permitted"):
        os.ftruncate(worker.fd, 4096)


def test_wrong_sizes_and_values_are_refused_before_anything_is_touched(worker, reader):
    half = worker.stage(STATE, 5)
    good = pieces(STATE, worker.slices)
    settings = {"generation": 1, "segments": [0], "num_segments": 1, "lineage": [[1, 0]]}
    short = [(good[0][0], good[0][1][:-1]), *good[1:]]
    with pytest.raises(ValueError, match="w: rows"):
        worker.arena.stage(step=6, pieces=short, extra={}, **settings)
    with pytest.raises(ValueError, match=r"extra\.x"):
        worker.arena.stage(step=6, pieces=good, extra={"x": object()}, **settings)
    assert worker.arena.busy_halves() == (half,)
    assert reader.sealed(half).step == 5


def test_staging_does_not_grow_the_process(worker):
    for step in range(10):
        worker.arena.release(worker.stage(STATE, step))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(200):
        worker.arena.release(worker.stage(STATE, step))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 2048  # a copy of the state is 1200 KiB: 200 of them would be 240,000
