"""Reading: any rows of a checkpoint, each range from the nearest copy that passes its checksum.

A checkpoint may stand in several roots, nearest first, and some of its packs only in some of them.
A range that is missing or damaged in one root is taken from the next, then from another pack that
holds the same rows; each such event is reported with object, range and what was used instead.
Nothing is ever returned that has not passed the CRC32C of its blocks, and the checksums themselves
are bound to the manifest.

Reads run in a few threads with one buffer each, so memory is bounded whatever is asked for. It
knows neither torch nor process groups: two processes that read the same checkpoint do not know each
other.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from ckpt.commit import uncovered_rows
from ckpt.crc import Bytes, as_bytes, crc32c
from ckpt.errors import CheckpointError, Corrupt, NotFound, Retryable
from ckpt.manifest import Manifest, PackRef, checkpoint_dir
from ckpt.pack import Footer, decode_footer
from ckpt.read_plan import (
    Fetch,
    Holder,
    Place,
    RowsMissing,
    Run,
    Wanted,
    coalesce,
    find_runs,
    holders_of,
)
from ckpt.slices import TensorInfo, TensorSlice
from ckpt.tier import Tier

__all__ = ["Checkpoint", "ReadProblem"]

THREADS = 4
"""Requests in flight; each holds a buffer of up to 8 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProblem:
    """One thing that was not as it should be, and what was used instead."""

    object: str
    start: int
    stop: int
    """Range of bytes; both 0 when the whole object is meant."""
    root: str
    problem: str
    used: str

    def __str__(self) -> str:
        span = f" bytes [{self.start}, {self.stop})" if self.stop else ""
        return f"{self.object}{span} at {self.root}: {self.problem}; used {self.used}"


class Checkpoint:
    """A committed checkpoint, open for reading from several threads. Close it after use."""

    def __init__(self, manifest: Manifest, tiers: Sequence[Tier]) -> None:
        self.manifest = manifest
        self.report: list[ReadProblem] = []
        """What had to be read elsewhere than at the nearest place, and why."""
        self.bytes_read = 0
        """Bytes asked of the tiers, footers included, failed reads as well."""
        self._tiers = list(tiers)
        self._lock = threading.Lock()
        self._footers: dict[int, Footer] = {}
        self._absent: set[tuple[int, int]] = set()  # (pack, tier) known to be of no use
        self._index: tuple[dict[str, TensorInfo], dict[str, list[Holder]]] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._scratch = threading.local()

    @property
    def step(self) -> int:
        """The step whose state this is."""
        return self.manifest.step

    @property
    def generation(self) -> int:
        """The generation that agreed on the step."""
        return self.manifest.generation

    @property
    def extra(self) -> dict[str, Any]:
        """The plain values that were saved with the tensors."""
        return dict(self.manifest.extra)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name. Raises Corrupt if the packs lack rows of one."""
        return self._indexed()[0]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Bytes:
        """Rows [start, stop) of a tensor as raw bytes. Raises KeyError for an unknown name."""
        info = self.tensors[name]
        stop = info.rows if stop is None else stop
        target = np.empty(max(stop - start, 0) * info.row_bytes, np.uint8)
        self.read_into([(name, start, stop, target)])
        return target

    def read_into(self, requests: Sequence[tuple[str, int, int, Any]]) -> None:
        """Fill each (name, start, stop, writable buffer) with exactly those rows' bytes.

        Raises KeyError for an unknown name, ValueError for rows or buffers that do not fit, Corrupt
        if some range is damaged in every copy, Retryable if a copy could not be asked; buffers may
        then be partly filled.
        """
        tensors, holders = self._indexed()
        wanted, targets = [], []
        for number, (name, start, stop, buffer) in enumerate(requests):
            info = tensors[name]
            target = as_bytes(buffer)
            if not 0 <= start <= stop <= info.rows:
                raise ValueError(f"{name}: rows [{start}, {stop}) of {info.rows} do not exist")
            if len(target) != (stop - start) * info.row_bytes:
                raise ValueError(
                    f"{name}: rows [{start}, {stop}) are {(stop - start) * info.row_bytes} bytes, "
                    f"the buffer has {len(target)}"
                )
            if len(target):
                if not target.flags.writeable:
                    raise ValueError(f"{name}: the buffer is read-only")
                wanted.append(Wanted(name, start, stop, number))
            targets.append(target)
        row_bytes = {each.name: tensors[each.name].row_bytes for each in wanted}
        excluded: set[int] = set()
        first_error: CheckpointError | None = None
        while wanted:
            try:
                runs = find_runs(wanted, holders, row_bytes, excluded)
            except RowsMissing as error:
                if first_error is not None:
                    raise first_error from error
                raise Corrupt(
                    f"step {self.step} is incomplete: {error}", kind="rows-missing"
                ) from error
            failed = self._read_runs(runs, targets)
            wanted = [run.rows for run, _ in failed]
            excluded |= {run.pack for run, _ in failed}
            if failed and first_error is None:
                first_error = failed[0][1]

    def missing_packs(self) -> list[str]:
        """Objects of packs that no root has in full length. Sizes only; nothing is read."""

        def lost(number: int) -> bool:
            pack = self.manifest.packs[number]
            problems: list[tuple[int, CheckpointError]] = []
            for i, tier in enumerate(self._tiers):
                try:
                    size = tier.size(self._path(pack))
                    if size != pack.size:
                        raise Corrupt(f"it has {size} bytes of {pack.size}", kind="truncated")
                except CheckpointError as error:
                    self._absent.add((number, i))
                    problems.append((i, error))
                else:
                    self._report(pack, 0, 0, problems, tier.url)
                    return False
            for _, problem in problems:
                if not isinstance(problem, NotFound | Corrupt):
                    raise problem  # it may well be there
            return True

        packs = self.manifest.packs
        lost_ones = self._pool().map(lost, range(len(packs)))
        return [pack.object for pack, is_lost in zip(packs, lost_ones, strict=True) if is_lost]

    def close(self) -> None:
        """Let go of roots and threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        for tier in self._tiers:
            tier.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ckpt-read")
            return self._threads

    def _buffer(self, nbytes: int) -> Bytes:
        """Memory of this thread, used again for each fetch: fresh pages are slow."""
        buffer: Bytes | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._scratch.buffer = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def _path(self, pack: PackRef) -> str:
        return f"{checkpoint_dir(self.step, self.generation)}/{pack.object}"

    def _indexed(self) -> tuple[dict[str, TensorInfo], dict[str, list[Holder]]]:
        """Tensors and who holds their rows: from the manifest, else from all footers."""
        with self._lock:
            if self._index is not None:
                return self._index
        packs = self.manifest.packs
        tensors = self.manifest.tensors
        slices: list[tuple[TensorSlice, ...]]
        if tensors is not None and all(pack.rows is not None for pack in packs):
            named = list(tensors.items())
            slices = [
                tuple(
                    TensorSlice(named[t][0], named[t][1].dtype, named[t][1].shape, start, stop)
                    for t, start, stop in pack.rows or ()
                )
                for pack in packs
            ]
            known = dict(tensors)
        else:
            footers = list(self._pool().map(self._footer, range(len(packs))))
            slices = [footer.slices for footer in footers]
            known = {each.name: each.info for part in slices for each in part}
        gaps = uncovered_rows(known, (each for part in slices for each in part))
        if gaps:
            name, start, stop = gaps[0]
            raise Corrupt(
                f"step {self.step} is incomplete: no pack has rows [{start}, {stop}) of {name}",
                kind="rows-missing",
            )
        with self._lock:
            self._index = (dict(sorted(known.items())), holders_of(slices))
            return self._index

    def _footer(self, number: int) -> Footer:
        """The footer of a pack, from the nearest root where it fits the manifest."""
        with self._lock:
            if number in self._footers:
                return self._footers[number]
        pack = self.manifest.packs[number]
        data = np.empty(pack.footer_bytes, np.uint8)
        found: list[Footer] = []

        def check(tier: Tier) -> None:
            where = f"{tier.url}/{self._path(pack)}"
            footer = decode_footer(data.tobytes(), where, pack.footer_crc)
            if (footer.step, footer.generation) != (self.step, self.generation):
                raise Corrupt(f"{where} belongs to another step", kind="pack-swapped")
            found.append(footer)

        self._read_checked(number, pack.footer_offset, data, check)
        with self._lock:
            self._footers[number] = found[0]
        return found[0]

    def _read_runs(
        self, runs: Sequence[Run], targets: Sequence[Bytes]
    ) -> list[tuple[Run, CheckpointError]]:
        """Read what can be read; the runs that no root could give, with the reason."""
        failed: list[tuple[Run, CheckpointError]] = []
        pool = self._pool()
        numbers = sorted({run.pack for run in runs})
        tried = zip(numbers, pool.map(self._try_footer, numbers), strict=True)
        bad = {number: error for number, error in tried if error is not None}
        failed += [(run, bad[run.pack]) for run in runs if run.pack in bad]
        good = [run for run in runs if run.pack not in bad]
        places = {(run.pack, run.slice): self._place(run.pack, run.slice) for run in good}

        def fetch(each: Fetch) -> CheckpointError | None:
            try:
                self._fetch(each, targets)
            except CheckpointError as error:
                return error
            return None

        fetches = coalesce(good, places)
        for each, problem in zip(fetches, pool.map(fetch, fetches), strict=True):
            if problem is not None:
                failed += [(run, problem) for run, _, _ in each.runs]
        unique = {id(run): (run, error) for run, error in failed}
        return list(unique.values())

    def _try_footer(self, number: int) -> CheckpointError | None:
        try:
            self._footer(number)
        except CheckpointError as error:
            return error
        return None

    def _place(self, pack: int, number: int) -> Place:
        footer = self._footers[pack]
        return Place(footer.offsets[number], footer.slices[number].nbytes, footer.block_bytes)

    def _fetch(self, fetch: Fetch, targets: Sequence[Bytes]) -> None:
        footer = self._footers[fetch.pack]
        buffer = self._buffer(fetch.nbytes)

        def check(tier: Tier) -> None:
            where = f"{tier.url}/{self._path(self.manifest.packs[fetch.pack])}"
            for run, first, last in fetch.runs:
                base = footer.offsets[run.slice] - fetch.start
                data = buffer[base + first : base + last]
                _check_blocks(footer, where, run.slice, first, data)

        self._read_checked(fetch.pack, fetch.start, buffer, check)
        for run, first, last in fetch.runs:
            base = footer.offsets[run.slice] - fetch.start
            start, stop = max(run.start, first), min(run.stop, last)
            at = run.at + start - run.start
            targets[run.target][at : at + stop - start] = buffer[base + start : base + stop]

    def _read_checked(self, number: int, offset: int, buffer: Bytes, check: Any) -> None:
        """Fill `buffer` from the nearest root whose bytes pass `check`. Raises the worst error."""
        pack = self.manifest.packs[number]
        problems: list[tuple[int, CheckpointError]] = []
        for i, tier in enumerate(self._tiers):
            if (number, i) in self._absent:
                continue
            with self._lock:
                self.bytes_read += len(buffer)
            try:
                tier.read_into(self._path(pack), offset, buffer)
                check(tier)
            except CheckpointError as error:
                if isinstance(error, NotFound):
                    self._absent.add((number, i))
                problems.append((i, error))
                continue
            if problems:
                self._report(pack, offset, offset + len(buffer), problems, tier.url)
            return
        self._report(pack, offset, offset + len(buffer), problems, "another copy of the rows")
        errors = [error for _, error in problems]
        if not errors:
            raise NotFound(f"{self._path(pack)} is in no root", kind="not-found")
        raise next((e for e in errors if isinstance(e, Retryable)), errors[0])

    def _report(
        self,
        pack: PackRef,
        start: int,
        stop: int,
        problems: Sequence[tuple[int, CheckpointError]],
        used: str,
    ) -> None:
        with self._lock:
            self.report += [
                ReadProblem(
                    object=pack.object,
                    start=start,
                    stop=stop,
                    root=self._tiers[i].url,
                    problem=error.message,
                    used=used,
                )
                for i, error in problems
            ]


def _check_blocks(footer: Footer, where: str, number: int, first: int, data: Bytes) -> None:
    """Raise Corrupt if a block of a slice, from its byte `first` on, fails its CRC."""
    block = footer.block_bytes
    base = footer.first_blocks[number] + first // block
    for i in range(0, len(data), block):
        if crc32c(data[i : i + block]) != footer.crcs[base + i // block]:
            raise Corrupt(
                f"{footer.slices[number].name} is damaged: a block at byte {first + i} of its rows "
                f"[{footer.slices[number].start}, {footer.slices[number].stop}) in {where} "
                "fails its checksum",
                kind="block-checksum",
            )
