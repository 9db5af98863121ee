"""The arena: memory that outlives the worker that staged into it.

One memfd per worker, made by the agent, held by the agent, the worker and the save service. Two
halves take turns, so that the next save can be staged while the last one is still being written.
Pages are allocated and mapped once and then reused for ever: copying into fresh pages costs many
times a copy into known ones.

    page 0     magic, version, bytes of a half
    half       one page of header, then the data exactly as a pack lays it out, then the footer
    header     a seal word, then what it seals: sequence, step, generation, footer's place and CRC

Torn halves are refused by construction. The worker breaks the seal before it touches a half and
sets it last, by one aligned 8-byte store that carries the CRC of the header; the header carries the
CRC of the footer, the footer those of all blocks. A worker that dies at any point in between leaves
a half without a valid seal, or with bytes that fail their CRC when the service reads them.

What this does not do: it does not decide when to save, and it does not know of jobs or worlds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.crc import Bytes, as_bytes, block_crcs, crc32c
from ckpt.errors import Corrupt, Fatal
from ckpt.pack import (
    HEADER_BYTES,
    Footer,
    Layout,
    Lineage,
    decode_footer,
    encode_footer,
    plain_json,
)
from ckpt.slices import TensorSlice

__all__ = ["HALVES", "Arena", "ArenaReader", "Copied", "Sealed", "create_fd", "half_bytes_for"]

HALVES = 2
_PAGE = 4096
_MAGIC = b"EVERAREN"
_VERSION = 1
_ARENA = struct.Struct("<8sIIQ")
_HALF = struct.Struct("<QqqQQI")  # sequence, step, generation, footer offset, footer bytes, its CRC
_SEAL_TAG = 0x4556_5345 << 32  # in the high half of the seal word; the header's CRC in the low one


def create_fd(name: str = "everstep-arena") -> int:
    """An empty arena. It may grow but never shrink, so that no reader's mapping can go away."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def half_bytes_for(slices: Sequence[TensorSlice], *, extra_bytes: int = 64 << 10) -> int:
    """What one half needs for these slices and an `extra` of so many bytes as JSON."""
    return _half_bytes(Layout(slices), extra_bytes)


class Arena:
    """The worker's side. Taking an arena over frees both halves, so no save may be reading it.

    Grows to `half_bytes` at once and maps every page. Not safe for two threads that stage at once;
    `release` may be called from any thread.
    """

    def __init__(self, fd: int, half_bytes: int) -> None:
        self._fd = fd
        self._busy = [False] * HALVES
        self._sequence = 0
        self._layout: Layout | None = None
        self._half_bytes = 0
        self._grow(half_bytes)

    @property
    def half_bytes(self) -> int:
        """Room of one half for data and footer."""
        return self._half_bytes

    def stage(  # noqa: PLR0913 - what makes a save
        self,
        *,
        step: int,
        generation: int,
        pieces: Sequence[tuple[TensorSlice, Any]],
        extra: dict[str, Any],
        segments: Sequence[int],
        num_segments: int,
        lineage: Sequence[Sequence[int]],
    ) -> int | None:
        """Copy the pieces into a free half and seal it; the half's number, None if both are busy.

        Each piece is a slice and a contiguous buffer of exactly its bytes; the buffers may change
        as soon as this returns. Grows the arena when it is too small and nothing reads it. Raises
        ValueError for a buffer of another size or an `extra` that is not plain JSON.
        """
        copied = self.copy(
            step=step,
            generation=generation,
            pieces=pieces,
            extra=extra,
            segments=segments,
            num_segments=num_segments,
            lineage=lineage,
        )
        return None if copied is None else copied.seal()

    def copy(  # noqa: PLR0913 - what makes a save
        self,
        *,
        step: int,
        generation: int,
        pieces: Sequence[tuple[TensorSlice, Any]],
        extra: dict[str, Any],
        segments: Sequence[int],
        num_segments: int,
        lineage: Sequence[Sequence[int]],
    ) -> Copied | None:
        """The first part of `stage`: the half is taken and filled, the buffers are free again.

        What is left is computing checksums; `seal` may do it in another thread, in which the
        training does not wait for it.
        """
        extra_json = plain_json(extra)
        slices = [each for each, _ in pieces]
        layout = self._layout
        if layout is None or not layout.matches(slices):
            layout = self._layout = Layout(slices)
        variable = len(extra_json) + 24 * len(lineage) + 12 * len(segments)
        needed = _half_bytes(layout, variable)
        if needed > self._half_bytes:
            if any(self._busy):
                return None
            self._grow(needed + needed // 8)
        half = next((h for h in range(HALVES) if not self._busy[h]), None)
        if half is None:
            return None
        buffers = [as_bytes(buffer) for _, buffer in pieces]
        for each, buffer in zip(slices, buffers, strict=True):
            if len(buffer) != each.nbytes:
                raise ValueError(
                    f"{each.name}: rows [{each.start}, {each.stop}) are {each.nbytes} bytes, "
                    f"{len(buffer)} were given"
                )
        memory = self._half(half)
        memory[:8].view(np.uint64)[0] = 0  # no seal from here on
        _copy(memory, layout, buffers)
        self._busy[half] = True
        self._sequence += 1
        return Copied(
            half=half,
            sequence=self._sequence,
            step=step,
            generation=generation,
            memory=memory,
            layout=layout,
            segments=tuple(segments),
            num_segments=num_segments,
            lineage=tuple((int(g), int(base)) for g, base in lineage),
            extra_json=extra_json,
        )

    def release(self, half: int) -> None:
        """The save that was in this half has finished with it. Safe from any thread."""
        self._busy[half] = False

    def busy_halves(self) -> tuple[int, ...]:
        """The halves that saves still need."""
        return tuple(h for h in range(HALVES) if self._busy[h])

    def _half(self, half: int) -> Bytes:
        start = _PAGE + half * (HEADER_BYTES + self._half_bytes)
        return self._memory[start : start + HEADER_BYTES + self._half_bytes]

    def _grow(self, half_bytes: int) -> None:
        half_bytes = max(-(-half_bytes // _PAGE) * _PAGE, self._half_bytes, _PAGE)
        size = max(_PAGE + HALVES * (HEADER_BYTES + half_bytes), os.fstat(self._fd).st_size)
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            raise Fatal(
                f"no memory for an arena of {size >> 20} MiB: {error.strerror}",
                kind="arena-memory",
                hint="save less per worker, or use more workers",
            ) from error
        mapped = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = np.frombuffer(mapped, np.uint8)
        self._half_bytes = half_bytes
        for half in range(HALVES):
            self._half(half)[:HEADER_BYTES] = 0
        page = _ARENA.pack(_MAGIC, _VERSION, 0, half_bytes)
        self._memory[: len(page)] = np.frombuffer(page, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A filled half that nobody can see yet."""

    half: int
    sequence: int
    step: int
    generation: int
    memory: Bytes
    layout: Layout
    segments: tuple[int, ...]
    num_segments: int
    lineage: Lineage
    extra_json: bytes

    def seal(self) -> int:
        """Compute the checksums and make the half exist; its number."""
        memory, layout = self.memory, self.layout
        crcs: list[int] = []
        for each, offset in zip(layout.slices, layout.offsets, strict=True):
            crcs += block_crcs(memory[offset : offset + each.nbytes])
        footer = encode_footer(
            layout,
            crcs,
            step=self.step,
            generation=self.generation,
            segments=self.segments,
            num_segments=self.num_segments,
            lineage=self.lineage,
            extra_json=self.extra_json,
        )
        memory[layout.end : layout.end + len(footer)] = np.frombuffer(footer, np.uint8)
        head = _HALF.pack(
            self.sequence, self.step, self.generation, layout.end, len(footer), crc32c(footer)
        )
        memory[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
        memory[:8].view(np.uint64)[0] = _SEAL_TAG | crc32c(head)  # the store that makes it exist
        return self.half


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """One whole staged save, still in the arena."""

    half: int
    sequence: int
    step: int
    generation: int
    footer: Footer
    footer_data: bytes
    footer_offset: int
    data: Bytes
    """Bytes [0, footer_offset) of the pack to be; the first 4096 are not part of it."""

    @property
    def table(self) -> tuple[TensorSlice, ...]:
        """What was staged."""
        return self.footer.slices

    @property
    def extra(self) -> dict[str, Any]:
        """The plain values that were staged."""
        return self.footer.extra


class ArenaReader:
    """The save service's side: sees whole halves and nothing else."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        self._memory: Bytes = np.empty(0, np.uint8)

    def close(self) -> None:
        """Let go of the arena. Views that were handed out stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._memory = np.empty(0, np.uint8)

    def sealed(self, half: int) -> Sealed | None:
        """The save in this half, None if there is none or it is torn. Block CRCs are not read."""
        memory = self._half(half)
        if memory is None:
            return None
        seal = int(memory[:8].view(np.uint64)[0])
        head = memory[8 : 8 + _HALF.size].tobytes()
        if seal != _SEAL_TAG | crc32c(head):
            return None
        sequence, step, generation, offset, nbytes, footer_crc = _HALF.unpack(head)
        if offset + nbytes > len(memory):
            return None
        footer_data = memory[offset : offset + nbytes].tobytes()
        try:
            footer = decode_footer(footer_data, f"half {half} of an arena", footer_crc)
        except Corrupt:
            return None
        if (footer.step, footer.generation) != (step, generation):
            return None
        return Sealed(
            half=half,
            sequence=sequence,
            step=step,
            generation=generation,
            footer=footer,
            footer_data=footer_data,
            footer_offset=offset,
            data=memory[:offset],
        )

    def still_sealed(self, sealed: Sealed) -> bool:
        """True while the half has not been touched since `sealed` was taken."""
        memory = self._half(sealed.half)
        if memory is None:
            return False
        head = memory[8 : 8 + _HALF.size].tobytes()
        seal = int(memory[:8].view(np.uint64)[0])
        return seal == _SEAL_TAG | crc32c(head) and _HALF.unpack(head)[0] == sealed.sequence

    def _half(self, half: int) -> Bytes | None:
        size = os.fstat(self._fd).st_size
        if size < _PAGE:
            return None
        if size != len(self._memory):
            mapped = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            self._memory = np.frombuffer(mapped, np.uint8)
        magic, version, _, half_bytes = _ARENA.unpack_from(self._memory.data)
        start = _PAGE + half * (HEADER_BYTES + half_bytes)
        end = start + HEADER_BYTES + half_bytes
        if magic != _MAGIC or version != _VERSION or end > size:
            return None
        return self._memory[start:end]


def _half_bytes(layout: Layout, extra_bytes: int) -> int:
    return layout.end + layout.footer_bytes_bound + extra_bytes


def _copy(memory: Bytes, layout: Layout, buffers: Sequence[Bytes]) -> None:
    """Copy every buffer to its place and zero the gaps."""
    at = HEADER_BYTES
    for offset, buffer in zip(layout.offsets, buffers, strict=True):
        if at < offset:
            memory[at:offset] = 0
        at = offset + len(buffer)
        np.copyto(memory[offset:at], buffer)
    memory[at : layout.end] = 0
