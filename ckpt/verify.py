"""Verify: read every byte of a checkpoint at one tier and say what is wrong, and where.

A pack that has the size and the CRC32C that the manifest states is what was written, blocks,
padding and all. Only when it is not is it read a second time, block by block, to name the ranges
and the tensors that are lost; the rest of the pack is still good for readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckpt.crc import Bytes, crc32c, extend
from ckpt.errors import CheckpointError, Corrupt, NotFound
from ckpt.manifest import PACKS_DIR, Manifest, PackRef
from ckpt.pack import HEADER_BYTES, Footer, decode_footer, decode_header
from ckpt.tier import Tier

__all__ = ["Damage", "strays", "verify_checkpoint"]

READ_BYTES = 8 << 20
THREADS = 4

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is not as it was written."""

    object: str
    problem: str
    start: int = 0
    stop: int = 0
    """Range of bytes in the object; both 0 when all of it is meant."""
    tensor: str = ""
    """The tensor that has lost rows, if one has."""


def verify_checkpoint(
    tier: Tier, manifest: Manifest, progress: Progress = lambda _: None
) -> list[Damage]:
    """Everything that is wrong with the packs of a manifest; empty if nothing is.

    `progress` gets the numbers of bytes read, from several threads. Raises what the tier raises
    when it cannot be asked: that is not damage.
    """

    def check(pack: PackRef) -> list[Damage]:
        path = f"{manifest.dir}/{pack.object}"
        try:
            size = tier.size(path)
        except NotFound:
            return [Damage(object=pack.object, problem="is missing")]
        problem = ""
        if size != pack.size:
            problem = f"has {size} bytes instead of {pack.size}"
        elif _whole_crc(tier, path, pack.size, progress) != pack.crc:
            problem = "has another checksum than the manifest states"
        if not problem:
            return []
        found = list(_locate(tier, manifest, pack, size))
        return found or [Damage(object=pack.object, problem=problem)]

    with ThreadPoolExecutor(THREADS) as pool:
        return [damage for found in pool.map(check, manifest.packs) for damage in found]


def strays(tier: Tier, manifest: Manifest) -> list[str]:
    """Files among a checkpoint's packs that its manifest does not know; readers ignore them."""
    known = {pack.object for pack in manifest.packs}
    found = [f"{PACKS_DIR}/{name}" for name in tier.list_dir(f"{manifest.dir}/{PACKS_DIR}")]
    return [name for name in found if name not in known]


def _whole_crc(tier: Tier, path: str, size: int, progress: Progress) -> int:
    buffer = np.empty(min(size, READ_BYTES), np.uint8)
    crc = 0
    for start in range(0, size, READ_BYTES):
        part = buffer[: min(READ_BYTES, size - start)]
        tier.read_into(path, start, part)
        crc = extend(crc, part)
        progress(len(part))
    return crc


def _locate(tier: Tier, manifest: Manifest, pack: PackRef, size: int) -> Iterator[Damage]:
    path = f"{manifest.dir}/{pack.object}"
    where = f"{tier.url}/{path}"
    try:
        header = decode_header(_read(tier, path, 0, min(HEADER_BYTES, size)).tobytes(), where)
        if (header.step, header.generation, header.worker_id) != (
            manifest.step,
            manifest.generation,
            pack.worker_id,
        ):
            yield Damage(
                object=pack.object,
                problem=f"is the pack of step {header.step}, generation {header.generation}, "
                f"worker {header.worker_id}",
            )
    except Corrupt as error:
        yield Damage(object=pack.object, problem=error.message, stop=HEADER_BYTES)
    end = pack.footer_offset + pack.footer_bytes
    try:
        data = _read(tier, path, pack.footer_offset, pack.footer_bytes)
        footer = decode_footer(data.tobytes(), where, pack.footer_crc)
    except CheckpointError as error:
        yield Damage(object=pack.object, problem=error.message, start=pack.footer_offset, stop=end)
        return
    for number in range(len(footer.slices)):
        yield from _locate_in_slice(tier, path, pack, footer, number)


def _locate_in_slice(
    tier: Tier, path: str, pack: PackRef, footer: Footer, number: int
) -> Iterator[Damage]:
    piece = footer.slices[number]
    for i, start in enumerate(range(0, piece.nbytes, footer.block_bytes)):
        at = footer.offsets[number] + start
        nbytes = min(footer.block_bytes, piece.nbytes - start)
        try:
            good = (
                crc32c(_read(tier, path, at, nbytes))
                == footer.crcs[footer.first_blocks[number] + i]
            )
            problem = "a block fails its checksum"
        except Corrupt as error:
            good, problem = False, error.message
        if not good:
            yield Damage(
                object=pack.object, problem=problem, start=at, stop=at + nbytes, tensor=piece.name
            )


def _read(tier: Tier, path: str, offset: int, nbytes: int) -> Bytes:
    data = np.empty(nbytes, np.uint8)
    tier.read_into(path, offset, data)
    return data
