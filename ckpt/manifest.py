"""The manifest: the one small object whose presence makes a checkpoint exist.

It names every pack with its size and checksums, so that a copy of a checkpoint is judged by what it
holds and not by a marker that happens to lie beside it. It is JSON in columns, written last and
only once, and its own CRC32C is the last thing in it. Equal entries give equal bytes, whoever
writes it.

Which rows lie in which pack is listed too while that is short (`rows`); beyond, readers take it
from the packs' footers. Pure: no I/O, no clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.crc import crc32c
from ckpt.errors import Corrupt
from ckpt.pack import Lineage
from ckpt.slices import TensorInfo

__all__ = [
    "MANIFEST_NAME",
    "PACKS_DIR",
    "VERSION",
    "Manifest",
    "PackRef",
    "checkpoint_dir",
    "decode",
    "encode",
    "parse_generation_dir",
    "parse_step_dir",
]

VERSION = 1
MANIFEST_NAME = "manifest.json"
PACKS_DIR = "packs"

_FORMAT = "everstep-checkpoint"
_CRC_TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"}\n\Z')
_OBJECT = re.compile(rf"{PACKS_DIR}/[A-Za-z0-9][A-Za-z0-9._-]*\.pack\Z", re.ASCII)
_STEP_DIR = re.compile(r"step-(\d{9,})\Z", re.ASCII)
_GENERATION_DIR = re.compile(r"g(\d{4,})\Z", re.ASCII)


def checkpoint_dir(step: int, generation: int) -> str:
    """Where a checkpoint lies under the root of a tier."""
    return f"step-{step:09d}/g{generation:04d}"


def parse_step_dir(name: str) -> int | None:
    """The step of a directory's name; None for a stranger."""
    return _parse(_STEP_DIR, name, 9)


def parse_generation_dir(name: str) -> int | None:
    """The generation of a directory's name; None for a stranger."""
    return _parse(_GENERATION_DIR, name, 4)


def _parse(pattern: re.Pattern[str], name: str, width: int) -> int | None:
    found = pattern.match(name)
    if found is None:
        return None
    value = int(found[1])
    return value if f"{value:0{width}d}" == found[1] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRef:
    """One pack as the manifest knows it. `object` is relative to the checkpoint's directory."""

    object: str
    worker_id: str
    node: str
    size: int
    crc: int
    footer_offset: int
    footer_bytes: int
    footer_crc: int
    segments: tuple[int, ...]
    rows: tuple[tuple[int, int, int], ...] | None
    """(index into the manifest's tensors, start, stop) of each slice; None: ask the footer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed checkpoint. `tensors` is None when only the footers know them."""

    job: str
    step: int
    generation: int
    lineage: Lineage
    num_segments: int
    tensors: Mapping[str, TensorInfo] | None
    packs: tuple[PackRef, ...]
    extra: Mapping[str, Any]

    @property
    def dir(self) -> str:
        """Where this checkpoint lies under the root of a tier."""
        return checkpoint_dir(self.step, self.generation)

    @property
    def nbytes(self) -> int:
        """Bytes of all packs."""
        return sum(pack.size for pack in self.packs)


def encode(manifest: Manifest) -> bytes:
    """The manifest's bytes; equal manifests give equal bytes."""
    tensors = manifest.tensors
    packs = manifest.packs
    body = {
        "format": _FORMAT,
        "version": VERSION,
        "job": manifest.job,
        "step": manifest.step,
        "generation": manifest.generation,
        "lineage": [list(pair) for pair in manifest.lineage],
        "num_segments": manifest.num_segments,
        "tensors": None
        if tensors is None
        else {
            "names": list(tensors),
            "dtypes": [t.dtype for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
        },
        "packs": {
            "objects": [p.object for p in packs],
            "workers": [p.worker_id for p in packs],
            "nodes": [p.node for p in packs],
            "sizes": [p.size for p in packs],
            "crcs": [p.crc for p in packs],
            "footer_offsets": [p.footer_offset for p in packs],
            "footer_bytes": [p.footer_bytes for p in packs],
            "footer_crcs": [p.footer_crc for p in packs],
            "segments": [list(p.segments) for p in packs],
            "rows": [
                None if p.rows is None else [value for row in p.rows for value in row]
                for p in packs
            ],
        },
        "extra": manifest.extra,
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
    return text[:-1] + b',"crc32c":"%08x"}\n' % crc32c(text[:-1])


def decode(data: bytes, where: str) -> Manifest:
    """The value of a manifest's bytes; `where` names it in errors. Raises Corrupt."""
    tail = _CRC_TAIL.search(data)
    if tail is None or crc32c(data[: tail.start()]) != int(tail[1], 16):
        raise Corrupt(f"{where} is damaged: its checksum does not fit", kind="manifest-checksum")
    try:
        raw = json.loads(data)
        if raw["format"] != _FORMAT or raw["version"] != VERSION:
            raise Corrupt(
                f"{where} has format {raw['format']} version {raw['version']}, this program reads "
                f"{_FORMAT} version {VERSION}",
                kind="manifest-version",
                hint="use a newer release",
            )
        return Manifest(
            job=raw["job"],
            step=raw["step"],
            generation=raw["generation"],
            lineage=tuple((g, base) for g, base in raw["lineage"]),
            num_segments=raw["num_segments"],
            tensors=_decode_tensors(raw["tensors"]),
            packs=_decode_packs(raw["packs"]),
            extra=raw["extra"],
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Corrupt(f"{where} cannot be read: {error}", kind="manifest") from error


def _decode_tensors(raw: Mapping[str, Sequence[Any]] | None) -> dict[str, TensorInfo] | None:
    if raw is None:
        return None
    return {
        name: TensorInfo(dtype, tuple(shape))
        for name, dtype, shape in zip(raw["names"], raw["dtypes"], raw["shapes"], strict=True)
    }


def _decode_packs(raw: Mapping[str, Sequence[Any]]) -> tuple[PackRef, ...]:
    for name in raw["objects"]:
        if not _OBJECT.match(name):  # it may not lead out of the checkpoint's directory
            raise ValueError(f"{name!r} is no name of a pack")
    return tuple(
        PackRef(
            object=raw["objects"][i],
            worker_id=raw["workers"][i],
            node=raw["nodes"][i],
            size=raw["sizes"][i],
            crc=raw["crcs"][i],
            footer_offset=raw["footer_offsets"][i],
            footer_bytes=raw["footer_bytes"][i],
            footer_crc=raw["footer_crcs"][i],
            segments=tuple(raw["segments"][i]),
            rows=_decode_rows(raw["rows"][i]),
        )
        for i in range(len(raw["objects"]))
    )


def _decode_rows(flat: Sequence[int] | None) -> tuple[tuple[int, int, int], ...] | None:
    if flat is None:
        return None
    return tuple(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))
