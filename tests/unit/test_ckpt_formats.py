"""The formats: what is written is read back, what is damaged is refused, sizes are bounded."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

from ckpt.commit import assemble, make_entry
from ckpt.crc import BLOCK_BYTES, combine, crc32c, extend
from ckpt.errors import Corrupt
from ckpt.manifest import (
    Manifest,
    PackRef,
    checkpoint_dir,
    decode,
    encode,
    parse_generation_dir,
    parse_step_dir,
)
from ckpt.pack import (
    HEADER_BYTES,
    TRAILER_BYTES,
    Layout,
    PackHeader,
    Trailer,
    decode_footer,
    decode_header,
    decode_index,
    decode_trailer,
    encode_footer,
    encode_header,
    encode_index,
    encode_trailer,
    plain_json,
)
from ckpt.slices import ITEM_BYTES, TensorInfo, TensorSlice, check_disjoint

SLICES = [
    TensorSlice("w", "bfloat16", (7, 3), 2, 5),
    TensorSlice("step", "int64", (), 0, 1),
    TensorSlice("none", "float32", (0, 4), 0, 0),
    TensorSlice("flat", "float32", (3, 0), 0, 3),
    TensorSlice("big", "float32", (300_000,), 0, 300_000),
    TensorSlice("ü.name", "bool", (5,), 0, 5),
]


def footer_of(slices=SLICES, **other):
    layout = Layout(slices)
    blocks = sum(-(-s.nbytes // BLOCK_BYTES) for s in slices)
    settings = {
        "step": 7,
        "generation": 3,
        "segments": [1, 2],
        "num_segments": 4,
        "lineage": [[1, 0], [3, 5]],
        "extra_json": plain_json({"lr": 0.1, "list": [1, None, "x"]}),
        **other,
    }
    return layout, encode_footer(layout, list(range(blocks)), **settings)


def test_crc32c_is_the_castagnoli_one():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytearray(b"123456789")) == crc32c(memoryview(b"123456789"))
    assert crc32c(b"") == 0


@pytest.mark.parametrize("second", [0, 1, 17, 4096, BLOCK_BYTES])
def test_crcs_of_parts_combine(second):
    rng = random.Random(second)
    a, b = rng.randbytes(1000), rng.randbytes(second)
    assert combine(crc32c(a), crc32c(b), len(b)) == crc32c(a + b) == extend(crc32c(a), b)


def test_item_sizes_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size, name


def test_unknown_type_and_rows_out_of_range_are_refused():
    with pytest.raises(ValueError, match="object"):
        TensorInfo("object", (1,))
    with pytest.raises(ValueError, match="3 rows"):
        TensorSlice("w", "int8", (3,), 1, 4)


def test_rows_given_twice_and_two_shapes_are_refused():
    with pytest.raises(ValueError, match="row 2 is given twice"):
        check_disjoint([TensorSlice("w", "int8", (5,), 0, 3), TensorSlice("w", "int8", (5,), 2, 5)])
    with pytest.raises(ValueError, match="both"):
        check_disjoint([TensorSlice("w", "int8", (5,), 0, 3), TensorSlice("w", "int8", (6,), 3, 5)])


def test_footer_round_trip():
    layout, data = footer_of()
    footer = decode_footer(data, "x", crc32c(data))
    assert footer.slices == tuple(SLICES)
    assert footer.offsets == layout.offsets
    assert footer.extra == {"lr": 0.1, "list": [1, None, "x"]}
    assert footer.lineage == ((1, 0), (3, 5))
    assert (footer.step, footer.generation, footer.segments) == (7, 3, (1, 2))
    assert footer.crcs.tolist() == list(range(len(footer.crcs)))
    assert len(data) <= layout.footer_bytes_bound + 100


def test_layout_aligns_and_never_overlaps():
    layout = Layout(SLICES)
    at = HEADER_BYTES
    for piece, offset in zip(layout.slices, layout.offsets, strict=True):
        assert offset >= at
        assert offset % (4096 if piece.nbytes >= 65536 else 64) == 0
        at = offset + piece.nbytes
    assert layout.end >= at
    assert layout.end % 64 == 0


def test_a_damaged_footer_is_refused_at_every_byte():
    _, data = footer_of(SLICES[:2])
    crc = crc32c(data)
    for i in range(len(data)):
        bad = bytearray(data)
        bad[i] ^= 1
        with pytest.raises(Corrupt):
            decode_footer(bytes(bad), "x", crc)


def test_header_and_trailer_round_trip_and_refuse_damage():
    header = PackHeader(job="j", step=1, generation=2, worker_id="n.0-ab")
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data, "x") == header
    trailer = Trailer(footer_offset=8192, footer_bytes=77, footer_crc=123)
    tail = encode_trailer(trailer)
    assert len(tail) == TRAILER_BYTES
    assert decode_trailer(tail, "x") == trailer
    for good, read in ((data, decode_header), (tail, decode_trailer)):
        for i in range(0, len(good), 13):
            bad = bytearray(good)
            bad[i] ^= 0x10
            with pytest.raises(Corrupt):
                read(bytes(bad), "x")
    with pytest.raises(Corrupt):
        decode_trailer(tail[:-1], "x")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": [1, {1, 2}]}}, r"extra\.a\.b\[1\] is a set"),
        ({"a": b"x"}, r"extra\.a is a bytes"),
        ({"a": {3: 1}}, r"extra\.a has the key 3"),
        ({"a": [float("nan")]}, r"extra\.a\[0\] is nan"),
    ],
)
def test_values_that_are_not_plain_are_refused_with_their_path(value, path):
    with pytest.raises(ValueError, match=path):
        plain_json(value)


def test_index_round_trip():
    assert decode_index(encode_index(SLICES)) == tuple(SLICES)
    with pytest.raises(Corrupt):
        decode_index("nonsense")


def manifest(**other):
    settings = {
        "job": "j",
        "step": 12,
        "generation": 3,
        "lineage": ((1, 0), (3, 9)),
        "num_segments": 2,
        "tensors": {"w": TensorInfo("float32", (4, 2)), "s": TensorInfo("int64", ())},
        "packs": (
            PackRef(
                object="packs/n.0-a.pack",
                worker_id="n.0-a",
                node="n",
                size=9000,
                crc=1,
                footer_offset=8000,
                footer_bytes=100,
                footer_crc=2,
                segments=(0, 1),
                rows=((0, 0, 4), (1, 0, 1)),
            ),
        ),
        "extra": {"lr": 1e-3, "text": "ü"},
        **other,
    }
    return Manifest(**settings)


def test_manifest_round_trip():
    for each in (manifest(), manifest(tensors=None)):
        data = encode(each)
        assert decode(data, "x") == each
        json.loads(data)


def test_a_damaged_manifest_is_refused_at_every_byte():
    data = encode(manifest())
    for i in range(len(data)):
        for bad in (data[:i], data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]):
            with pytest.raises(Corrupt):
                decode(bad, "x")


@pytest.mark.parametrize(
    "name", ["../x.pack", "packs/../../x.pack", "/etc/x.pack", "packs/.x.pack"]
)
def test_a_manifest_cannot_name_an_object_elsewhere(name):
    pack = manifest().packs[0]
    evil = PackRef(**{f: getattr(pack, f) for f in pack.__slots__} | {"object": name})
    with pytest.raises(Corrupt, match="no name of a pack"):
        decode(encode(manifest(packs=(evil,))), "x")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-000000009", 9),
        ("step-1234567890", 1234567890),
        ("step-9", None),
        ("step-0000000009", None),  # a second name for the same step
        ("step-000000010-hf", None),
        ("step_000000010", None),
        ("latest", None),
        ("step-00000001٣", None),
    ],
)
def test_step_names_are_numbers_and_strangers_are_left_alone(name, step):
    assert parse_step_dir(name) == step


def test_directory_names_parse_back():
    step, generation = checkpoint_dir(1200, 17).split("/")
    assert (parse_step_dir(step), parse_generation_dir(generation)) == (1200, 17)
    assert parse_generation_dir("g17") is None


def entry(worker, slices, num_workers):
    return make_entry(
        job="job-with-a-name",
        node=f"n-{worker // 8:04x}",
        worker_id=f"n-{worker // 8:04x}.{worker % 8}-{worker:06x}",
        step=1200,
        generation=17,
        object=f"packs/n-{worker // 8:04x}.{worker % 8}-{worker:06x}.pack",
        size=10**9 + worker,
        crc=0xFFFFFFFF - worker,
        footer_offset=10**9,
        footer_bytes=20_000,
        footer_crc=0xEEEEEEEE - worker,
        segments=[worker],
        num_segments=num_workers,
        lineage=((1, 0), (17, 1100)),
        extra_crc=5,
        slices=slices,
    )


@pytest.mark.parametrize("cut_each", [False, True], ids=["segments", "every tensor cut"])
def test_two_thousand_tensors_on_a_thousand_workers(cut_each):
    """Manifest below 1 MB, entries below 64 kB, commit within a second (two on a slow day)."""
    workers, tensors = 1000, 2000
    names = [f"model.layers.{i // 25}.block.part_{i % 25}.weight" for i in range(tensors)]
    if cut_each:
        shape = (workers * 4, 64)
        first = [TensorSlice(n, "float32", shape, 0, 4) for n in names]
        assert len(entry(0, first, workers)["index"]) < 40_000
        parts = [first[:1]] * workers
    else:
        shape = (1000, 64)
        parts = [
            [TensorSlice(n, "float32", shape, 0, 1000) for n in names[2 * w : 2 * w + 2]]
            for w in range(workers)
        ]
    entries = [entry(w, parts[w], workers) for w in range(workers)]
    if cut_each:  # then the footers tell
        entries = [e | {"index": None} for e in entries]
    assert max(len(json.dumps(e)) for e in entries) < 64_000
    began_s = time.process_time()
    found = assemble(entries, step=1200, generation=17, extra={"lr": 0.1})
    data = encode(found)
    spent_s = time.process_time() - began_s
    assert len(data) < 1_000_000
    assert spent_s < 2.0
    assert decode(data, "x") == found


def test_tensor_bytes_are_counted_without_numpy_types():
    info = TensorInfo("complex64", (3, 2))
    assert (info.rows, info.row_bytes, info.nbytes) == (3, 16, 48)
    assert TensorInfo("float32", ()).nbytes == 4
    assert TensorInfo("float32", (0, 5)).nbytes == 0
    assert not isinstance(info.nbytes, np.integer)
