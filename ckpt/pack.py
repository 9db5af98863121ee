"""The pack format: one worker's slices of one checkpoint in one object. docs/format.md is the spec.

    header   4096 bytes: magic, version, JSON of job, step, generation, worker; CRC32C
    slices   raw little-endian C-order rows; each starts on 4 KiB, on 64 bytes if below 64 KiB
    footer   count and table of the blocks' CRC32C, then JSON in columns
    trailer  64 bytes: where the footer is, its CRC32C, the size of the pack, own CRC32C

Everything but the CRCs is known before the first byte is copied, so slices may be written in any
order and ranges may be sent to an object store while others are still being produced. This module
turns values into bytes and back; it opens no file. Pure: no I/O, no clock.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.crc import BLOCK_BYTES, crc32c
from ckpt.errors import Corrupt
from ckpt.slices import TensorSlice, check_disjoint

__all__ = [
    "HEADER_BYTES",
    "TRAILER_BYTES",
    "VERSION",
    "Footer",
    "Layout",
    "PackHeader",
    "Trailer",
    "decode_footer",
    "decode_header",
    "decode_index",
    "decode_trailer",
    "encode_footer",
    "encode_header",
    "encode_index",
    "encode_trailer",
    "plain_json",
]

VERSION = 1
HEADER_BYTES = 4096
TRAILER_BYTES = 64
LARGE_BYTES = 64 << 10
"""From this size on a slice starts on a page of its own."""

_HEADER_MAGIC = b"EVERPACK"
_TRAILER_MAGIC = b"EVERFOOT"
_HEADER = struct.Struct("<8sII")
_TRAILER = struct.Struct("<8sIIQQIIQ12xI")
_U32 = struct.Struct("<I")

Lineage = tuple[tuple[int, int], ...]
Crcs = npt.NDArray[np.uint32]


class Layout:
    """Where each slice of a pack lies, from the slices alone.

    `slices` and `offsets` (from the start of the pack) are parallel; `end` is where the footer
    begins. Costs time in proportion to the number of slices: make it once and keep it.
    """

    __slots__ = ("_columns", "end", "offsets", "slices")

    def __init__(self, slices: Sequence[TensorSlice]) -> None:
        check_disjoint(slices)
        self.slices = tuple(slices)
        offsets = []
        at = HEADER_BYTES
        for each in self.slices:
            at = _round_up(at, 4096 if each.nbytes >= LARGE_BYTES else 64)
            offsets.append(at)
            at += each.nbytes
        self.offsets = tuple(offsets)
        self.end = _round_up(at, 64)
        self._columns = _encode_columns(self.slices, self.offsets)

    @property
    def footer_bytes_bound(self) -> int:
        """An upper bound of the footer's size without `extra`."""
        blocks = sum(-(-s.nbytes // BLOCK_BYTES) for s in self.slices)
        return 4 * (blocks + 1) + len(self._columns) + 4096

    def matches(self, slices: Sequence[TensorSlice]) -> bool:
        """True if these are exactly this layout's slices."""
        return len(slices) == len(self.slices) and all(
            a is b or a == b for a, b in zip(slices, self.slices, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a pack says about its own content."""

    step: int
    generation: int
    segments: tuple[int, ...]
    num_segments: int
    lineage: Lineage
    block_bytes: int
    slices: tuple[TensorSlice, ...]
    offsets: tuple[int, ...]
    first_blocks: tuple[int, ...]
    """For each slice the index of its first block in `crcs`."""
    crcs: Crcs
    extra: dict[str, Any]
    extra_crc: int


def encode_footer(  # noqa: PLR0913 - what a footer has
    layout: Layout,
    crcs: Sequence[int],
    *,
    step: int,
    generation: int,
    segments: Sequence[int],
    num_segments: int,
    lineage: Sequence[Sequence[int]],
    extra_json: bytes,
) -> bytes:
    """The footer's bytes. `crcs` are those of all slices' blocks, slice by slice."""
    head = {
        "version": VERSION,
        "step": step,
        "generation": generation,
        "segments": list(segments),
        "num_segments": num_segments,
        "lineage": [list(pair) for pair in lineage],
        "block_bytes": BLOCK_BYTES,
    }
    table = np.asarray(crcs, dtype="<u4").tobytes()
    text = b"".join(
        (_dump(head)[:-1], b",", layout._columns, b',"extra":', extra_json, b"}")  # noqa: SLF001
    )
    return _U32.pack(len(crcs)) + table + text


def decode_footer(data: bytes | memoryview, where: str, crc: int | None = None) -> Footer:
    """The value of a footer's bytes; `where` names the pack in errors. Raises Corrupt."""
    if crc is not None and crc32c(data) != crc:
        raise Corrupt(f"the footer of {where} has another checksum", kind="footer-checksum")
    try:
        (count,) = _U32.unpack_from(data)
        crcs = np.frombuffer(data, dtype="<u4", count=count, offset=4).astype(np.uint32)
        raw = json.loads(bytes(data[4 + 4 * count :]))
        if raw["version"] != VERSION:
            raise Corrupt(
                f"{where} has format version {raw['version']}, this program reads {VERSION}",
                kind="pack-version",
                hint="use a newer release",
            )
        slices = _decode_columns(raw)
        offsets = tuple(raw["offsets"])
        block_bytes = int(raw["block_bytes"])
        first_blocks = []
        blocks = 0
        for each in slices:
            first_blocks.append(blocks)
            blocks += -(-each.nbytes // block_bytes)
        if blocks != count or len(offsets) != len(slices):
            raise ValueError("columns of unequal length")
        return Footer(
            step=int(raw["step"]),
            generation=int(raw["generation"]),
            segments=tuple(raw["segments"]),
            num_segments=int(raw["num_segments"]),
            lineage=tuple((int(g), int(base)) for g, base in raw["lineage"]),
            block_bytes=block_bytes,
            slices=slices,
            offsets=offsets,
            first_blocks=tuple(first_blocks),
            crcs=crcs,
            extra=raw["extra"],
            extra_crc=crc32c(plain_json(raw["extra"])),
        )
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise Corrupt(f"the footer of {where} cannot be read: {error}", kind="footer") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PackHeader:
    """To whom a pack belongs, at its very start, so that a stray one can be told."""

    job: str
    step: int
    generation: int
    worker_id: str


def encode_header(header: PackHeader) -> bytes:
    """The first 4096 bytes of a pack."""
    text = _dump(
        {
            "job": header.job,
            "step": header.step,
            "generation": header.generation,
            "worker_id": header.worker_id,
        }
    )
    if _HEADER.size + len(text) + 4 > HEADER_BYTES:
        raise ValueError("the names of job and worker are too long for a pack's header")
    body = (_HEADER.pack(_HEADER_MAGIC, VERSION, len(text)) + text).ljust(HEADER_BYTES - 4, b"\0")
    return body + _U32.pack(crc32c(body))


def decode_header(data: bytes | memoryview, where: str) -> PackHeader:
    """The value of a pack's header. Raises Corrupt."""
    try:
        magic, version, length = _HEADER.unpack_from(data)
        if magic != _HEADER_MAGIC:
            raise ValueError("not a pack")
        if crc32c(data[: HEADER_BYTES - 4]) != _U32.unpack_from(data, HEADER_BYTES - 4)[0]:
            raise ValueError("wrong checksum")
        if version != VERSION:
            raise ValueError(f"format version {version}, this program reads {VERSION}")
        raw = json.loads(bytes(data[_HEADER.size : _HEADER.size + length]))
        return PackHeader(
            job=raw["job"],
            step=raw["step"],
            generation=raw["generation"],
            worker_id=raw["worker_id"],
        )
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise Corrupt(f"the header of {where} cannot be read: {error}", kind="header") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """The last 64 bytes of a pack: enough to find its footer without a manifest."""

    footer_offset: int
    footer_bytes: int
    footer_crc: int

    @property
    def pack_bytes(self) -> int:
        """Size of the whole pack."""
        return self.footer_offset + self.footer_bytes + TRAILER_BYTES


def encode_trailer(trailer: Trailer) -> bytes:
    """The last 64 bytes of a pack."""
    body = _TRAILER.pack(
        _TRAILER_MAGIC,
        VERSION,
        0,
        trailer.footer_offset,
        trailer.footer_bytes,
        trailer.footer_crc,
        0,
        trailer.pack_bytes,
        0,
    )[:-4]
    return body + _U32.pack(crc32c(body))


def decode_trailer(data: bytes | memoryview, where: str) -> Trailer:
    """The value of a trailer. Raises Corrupt."""
    if len(data) != TRAILER_BYTES:
        raise Corrupt(f"{where} ends before its trailer", kind="trailer")
    magic, _version, _, offset, nbytes, footer_crc, _, size, crc = _TRAILER.unpack(data)
    if magic != _TRAILER_MAGIC or crc32c(data[: TRAILER_BYTES - 4]) != crc:
        raise Corrupt(f"the trailer of {where} is damaged", kind="trailer")
    trailer = Trailer(footer_offset=offset, footer_bytes=nbytes, footer_crc=footer_crc)
    if trailer.pack_bytes != size:
        raise Corrupt(f"the trailer of {where} contradicts itself", kind="trailer")
    return trailer


def encode_index(slices: Sequence[TensorSlice]) -> str:
    """Which rows of which tensors a pack holds, as short text for an entry."""
    return base64.b85encode(zlib.compress(b"{" + _encode_columns(slices, None) + b"}", 6)).decode()


def decode_index(text: str) -> tuple[TensorSlice, ...]:
    """The slices of `encode_index`'s text. Raises Corrupt."""
    try:
        return _decode_columns(json.loads(zlib.decompress(base64.b85decode(text))))
    except (ValueError, KeyError, TypeError, IndexError, zlib.error) as error:
        raise Corrupt(f"the index of an entry cannot be read: {error}", kind="index") from error


def plain_json(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON of plain values; equal values give equal bytes.

    Raises ValueError that names the path of the first thing that is not plain: None, bool, int,
    finite float, str, and lists and string-keyed dicts of these.
    """
    _check_plain(value, "extra")
    return _dump(value, sort_keys=True)


def _check_plain(value: Any, path: str) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON cannot hold; store it as text")
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            _check_plain(each, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r}, not a text")  # noqa: TRY004
            _check_plain(each, f"{path}.{key}")
    else:
        raise ValueError(  # noqa: TRY004 - the value is wrong, not the call
            f"{path} is a {type(value).__name__}, only plain values can be stored"
        )


def _dump(value: Any, *, sort_keys: bool = False) -> bytes:
    text = json.dumps(
        value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    )
    return text.encode()


def _encode_columns(slices: Sequence[TensorSlice], offsets: Sequence[int] | None) -> bytes:
    """JSON columns without the braces: tensors, then slices that refer to them by index."""
    tensors: dict[str, int] = {}
    columns: dict[str, list[Any]] = {"names": [], "dtypes": [], "shapes": []}
    tensor_of = []
    for each in slices:
        index = tensors.setdefault(each.name, len(tensors))
        if index == len(columns["names"]):
            columns["names"].append(each.name)
            columns["dtypes"].append(each.dtype)
            columns["shapes"].append(list(each.shape))
        tensor_of.append(index)
    columns["tensors"] = tensor_of
    columns["starts"] = [each.start for each in slices]
    columns["stops"] = [each.stop for each in slices]
    if offsets is not None:
        columns["offsets"] = list(offsets)
    return _dump(columns)[1:-1]


def _decode_columns(raw: Mapping[str, Any]) -> tuple[TensorSlice, ...]:
    names, dtypes = raw["names"], raw["dtypes"]
    shapes = [tuple(shape) for shape in raw["shapes"]]
    return tuple(
        TensorSlice(names[i], dtypes[i], shapes[i], start, stop)
        for i, start, stop in zip(raw["tensors"], raw["starts"], raw["stops"], strict=True)
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
