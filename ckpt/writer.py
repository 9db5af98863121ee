"""From a sealed half to the bytes of a pack, checked on the way.

The arena lays data out as the pack does, so most parts are views of shared memory and are copied by
nobody but the kernel. Every block is held against the CRC that the worker computed while it staged,
before it is handed on, and the seal is looked at again at the end: a half that somebody wrote into
meanwhile cannot become a pack.

Uploads read finished local files instead, against the checksum of the whole pack: the half is free
again as soon as the local file is durable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.arena import ArenaReader, Sealed
from ckpt.commit import make_entry
from ckpt.crc import Bytes, combine, crc32c, extend
from ckpt.errors import Corrupt
from ckpt.manifest import PACKS_DIR, checkpoint_dir
from ckpt.pack import (
    HEADER_BYTES,
    PackHeader,
    Trailer,
    encode_header,
    encode_trailer,
)

__all__ = ["FileSource", "PackSource", "pack_object", "pack_path"]

_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z", re.ASCII)


def pack_object(worker_id: str) -> str:
    """Where a worker's pack lies in its checkpoint. Raises ValueError for an unfit id."""
    if not _WORKER_ID.match(worker_id):
        raise ValueError(f"worker id {worker_id!r} cannot be part of a file name")
    return f"{PACKS_DIR}/{worker_id}.pack"


def pack_path(step: int, generation: int, worker_id: str) -> str:
    """Where a worker's pack lies under the root of a tier."""
    return f"{checkpoint_dir(step, generation)}/{pack_object(worker_id)}"


class PackSource:
    """The pack of one sealed half as a Source. `crc` is known once all chunks have been taken."""

    def __init__(self, reader: ArenaReader, sealed: Sealed, *, job: str, worker_id: str) -> None:
        self._reader = reader
        self._sealed = sealed
        self._worker_id = worker_id
        self._job = job
        header = PackHeader(
            job=job, step=sealed.step, generation=sealed.generation, worker_id=worker_id
        )
        self._trailer = Trailer(
            footer_offset=sealed.footer_offset,
            footer_bytes=len(sealed.footer_data),
            footer_crc=crc32c(sealed.footer_data),
        )
        self._header = np.frombuffer(encode_header(header), np.uint8)
        tail = sealed.footer_data + encode_trailer(self._trailer)
        self._tail = np.frombuffer(tail, np.uint8)
        self.size = self._trailer.pack_bytes
        self.crc: int | None = None

    def chunks(self, max_bytes: int) -> Iterator[Bytes]:
        """The pack in order. Raises Corrupt as soon as a block differs from what was staged."""
        verified = self._verified()
        crc, end = crc32c(self._header), HEADER_BYTES
        for start in range(0, self.size, max_bytes):
            stop = min(start + max_bytes, self.size)
            while end < min(stop, self._sealed.footer_offset):
                crc, end = next(verified)
            if stop == self.size:
                if not self._reader.still_sealed(self._sealed):
                    raise Corrupt(
                        f"the staged step {self._sealed.step} of {self._worker_id} was overwritten "
                        "while it was being saved",
                        kind="arena-torn",
                    )
                self.crc = extend(crc, self._tail)
            yield self._bytes(start, stop)

    def entry(self, node: str) -> dict[str, Any]:
        """What is published about the pack. Only after its bytes are safe."""
        if self.crc is None:
            raise RuntimeError("the pack has not been produced to its end")
        footer = self._sealed.footer
        return make_entry(
            job=self._job,
            node=node,
            worker_id=self._worker_id,
            step=self._sealed.step,
            generation=self._sealed.generation,
            object=pack_object(self._worker_id),
            size=self.size,
            crc=self.crc,
            footer_offset=self._trailer.footer_offset,
            footer_bytes=self._trailer.footer_bytes,
            footer_crc=self._trailer.footer_crc,
            segments=footer.segments,
            num_segments=footer.num_segments,
            lineage=footer.lineage,
            extra_crc=footer.extra_crc,
            slices=footer.slices,
        )

    def _bytes(self, start: int, stop: int) -> Bytes:
        """Bytes [start, stop) of the pack: a view where that is possible."""
        end = self._sealed.footer_offset
        parts = [
            self._header[start : min(stop, HEADER_BYTES)],
            self._sealed.data[max(start, HEADER_BYTES) : min(stop, end)],
            self._tail[max(start - end, 0) : max(stop - end, 0)],
        ]
        parts = [part for part in parts if len(part)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _verified(self) -> Iterator[tuple[int, int]]:
        """The CRC32C of the pack up to an offset, and the offset, block by block."""
        footer, data = self._sealed.footer, self._sealed.data
        crc, at = crc32c(self._header), HEADER_BYTES
        for number, offset in enumerate(footer.offsets):
            if at < offset:
                crc = extend(crc, data[at:offset])
            nbytes = footer.slices[number].nbytes
            for i, start in enumerate(range(0, nbytes, footer.block_bytes)):
                block = data[offset + start : offset + min(start + footer.block_bytes, nbytes)]
                block_crc = crc32c(block)
                if block_crc != footer.crcs[footer.first_blocks[number] + i]:
                    raise Corrupt(
                        f"{footer.slices[number].name} was changed after it was staged for step "
                        f"{self._sealed.step} by {self._worker_id}",
                        kind="arena-torn",
                    )
                whole = len(block) == footer.block_bytes
                crc = combine(crc, block_crc, len(block)) if whole else extend(crc, block)
                yield crc, offset + start + len(block)
            at = offset + nbytes
        yield extend(crc, data[at:]), len(data)


@dataclass(frozen=True, slots=True)
class FileSource:
    """A finished local pack as a Source, held against its size and checksum once more."""

    path: Path
    size: int
    crc: int

    def chunks(self, max_bytes: int) -> Iterator[Bytes]:
        """The file in order. Raises Corrupt if it is not the one that was written."""
        buffer = np.empty(min(max_bytes, self.size), np.uint8)
        crc = 0
        left = self.size
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while left:
                part = buffer[: min(left, max_bytes)]
                _fill(fd, part, self.path)
                crc = extend(crc, part)
                left -= len(part)
                if not left and (crc != self.crc or os.read(fd, 1)):
                    raise Corrupt(f"{self.path} has changed since it was written", kind="checksum")
                yield part
        finally:
            os.close(fd)


def _fill(fd: int, part: Bytes, path: Path) -> None:
    view = part.data
    while view:
        count = os.readv(fd, [view])
        if count == 0:
            raise Corrupt(f"{path} is shorter than when it was written", kind="truncated")
        view = view[count:]
