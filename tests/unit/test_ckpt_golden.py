"""A checkpoint of version 1, written once, stays readable for ever: by us and by the spec alone."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest

import ckpt
from ckpt.discover import load_manifest
from ckpt.tier_local import LocalTier
from ckpt.verify import verify_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden"
ROOT = GOLDEN / "checkpoint-v1"
EXPECTED = json.loads((GOLDEN / "checkpoint-v1.json").read_text())


def check(name, data):
    expected = EXPECTED["tensors"][name]
    assert zlib.crc32(data) == expected["crc32"], name
    assert expected["hex"] in (None, data.hex()), name


def test_we_read_it_whole():
    with ckpt.open_latest([str(ROOT)]) as checkpoint:
        assert (checkpoint.step, checkpoint.generation) == (1200, 17)
        assert checkpoint.extra == EXPECTED["extra"]
        assert [list(pair) for pair in checkpoint.manifest.lineage] == EXPECTED["lineage"]
        assert set(checkpoint.tensors) == set(EXPECTED["tensors"])
        for name, info in checkpoint.tensors.items():
            assert (info.dtype, list(info.shape)) == (
                EXPECTED["tensors"][name]["dtype"],
                EXPECTED["tensors"][name]["shape"],
            )
            check(name, checkpoint.read(name).tobytes())
        assert checkpoint.report == []


def test_it_verifies():
    tier = LocalTier(ROOT)
    assert verify_checkpoint(tier, load_manifest(tier, 1200, 17)) == []


def test_docs_format_md_alone_is_enough_to_read_it():
    """Nothing of ours is used here but the page."""
    place = ROOT / "step-000001200" / "g0017"
    manifest = json.loads((place / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("everstep-checkpoint", 1)
    rows = {name: {} for name in manifest["tensors"]["names"]}
    for object_name, size in zip(
        manifest["packs"]["objects"], manifest["packs"]["sizes"], strict=True
    ):
        pack = (place / object_name).read_bytes()
        assert len(pack) == size
        assert pack[:8] == b"EVERPACK"
        (length,) = struct.unpack_from("<I", pack, 12)
        assert json.loads(pack[16 : 16 + length])["step"] == 1200
        assert pack[-64:-56] == b"EVERFOOT"
        offset, nbytes = struct.unpack_from("<QQ", pack, len(pack) - 64 + 16)
        (count,) = struct.unpack_from("<I", pack, offset)
        footer = json.loads(pack[offset + 4 + 4 * count : offset + nbytes])
        for tensor, start, stop, at in zip(
            footer["tensors"], footer["starts"], footer["stops"], footer["offsets"], strict=True
        ):
            name, shape = footer["names"][tensor], footer["shapes"][tensor]
            whole = len(pack_bytes(name, shape))
            total = shape[0] if shape else 1
            row = whole // total if total else 0
            rows[name][start] = pack[at : at + (stop - start) * row]
    for name, parts in rows.items():
        check(name, b"".join(parts[start] for start in sorted(parts)))


def pack_bytes(name, shape):
    """As many bytes as the tensor has, by the page's table of types."""
    sizes = {"64": 8, "32": 4, "16": 2, "128": 16}
    dtype = EXPECTED["tensors"][name]["dtype"]
    item = 1
    if not dtype.startswith(("bool", "float8", "int8", "uint8")):
        digits = "".join(c for c in dtype if c.isdigit())
        item = sizes[digits]
    count = 1
    for each in shape:
        count *= each
    return bytes(item * count)


@pytest.mark.parametrize("name", ["checkpoint-v1", "checkpoint-v1.json"])
def test_it_is_in_the_repository(name):
    assert (GOLDEN / name).exists()
