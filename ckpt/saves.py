"""The save service's work: each save a task, each commit a task, nothing shared but a table.

A save goes through the stages sealed half → local pack → remote pack; either tier may fail without
the other. A commit writes a manifest where this service has a pack (local), and where every pack
that the manifest lists has been verified (remote). It never writes one that lists what nobody has
seen.

All methods belong to one event loop; blocking calls run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ckpt.arena import ArenaReader, Sealed
from ckpt.commit import Missing, assemble
from ckpt.crc import Bytes, crc32c
from ckpt.errors import CheckpointError, Conflict, Corrupt, Fatal, NotFound, Retryable
from ckpt.manifest import MANIFEST_NAME, PACKS_DIR, Manifest, PackRef, checkpoint_dir, encode
from ckpt.pack import TRAILER_BYTES, decode_footer, decode_trailer
from ckpt.tier import Created, Source, Tier
from ckpt.tier_local import LocalTier
from ckpt.writer import FileSource, PackSource, pack_path

__all__ = ["Saves", "verify_pack"]

T = TypeVar("T")

WRITERS = 2
UPLOADERS = 4
MAX_WAITING_UPLOADS = 8
"""For each worker; of a store that is slower than the saves the oldest are finished first."""
REMOTE_COMMIT_S = 600.0
"""How long a remote commit waits for the packs of other nodes."""
POLL_S = 0.25
MAX_POLL_S = 5.0

log = logging.getLogger("ckpt.service")


@dataclass(slots=True)
class _Save:
    step: int
    generation: int
    worker_id: str
    half: int
    local: asyncio.Future[bool]
    remote: asyncio.Future[bool]
    entry: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None
    half_busy: bool = True
    dropped: bool = False
    hold: int = -1

    @property
    def path(self) -> str:
        return pack_path(self.step, self.generation, self.worker_id)

    def release(self) -> None:
        """Let sweepers have the directory."""
        if self.hold >= 0:
            os.close(self.hold)
            self.hold = -1


@dataclass(slots=True)
class _Droppable:
    """A source that ends when its save is dropped."""

    source: Source
    save: _Save

    @property
    def size(self) -> int:
        return self.source.size

    def chunks(self, max_bytes: int) -> Iterator[Bytes]:
        for part in self.source.chunks(max_bytes):
            if self.save.dropped:
                raise Fatal(f"step {self.save.step} has been given up", kind="dropped")
            yield part


@dataclass(slots=True)
class Saves:
    """All saves of one node. `emit` gets the events that ckpt.service lists."""

    job: str
    node: str
    local: LocalTier | None
    remote: Tier | None
    emit: Callable[[dict[str, Any]], None]
    _arenas: dict[str, ArenaReader] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)
    _saves: dict[tuple[int, int, str], _Save] = field(default_factory=dict)
    _running: Counter[str] = field(default_factory=Counter)
    _uploads: Counter[str] = field(default_factory=Counter)
    _tasks: dict[asyncio.Task[None], str] = field(default_factory=dict)
    _writing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WRITERS))
    _uploading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UPLOADERS))
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WRITERS + UPLOADERS + 8)
    )

    def attach(self, worker_id: str, fd: int) -> None:
        """Know a worker's arena; the descriptor is duplicated."""
        pack_path(0, 0, worker_id)  # refuses an id that is no file name
        self._arenas[worker_id] = ArenaReader(fd)
        self._gone.discard(worker_id)

    def detach(self, worker_id: str) -> None:
        """Let the arena go as soon as no save reads it."""
        self._gone.add(worker_id)
        self._let_go(worker_id)

    def save(self, worker_id: str, half: int, step: int, generation: int) -> None:
        """Begin a save. A repeated order for one that is known is left aside."""
        key = (step, generation, worker_id)
        if key in self._saves:
            log.warning("step %d of %s is being saved already", step, worker_id)
            return
        loop = asyncio.get_running_loop()
        save = _Save(step, generation, worker_id, half, loop.create_future(), loop.create_future())
        self._saves[key] = save
        self._running[worker_id] += 1
        self._run(self._save(save), f"save of step {step} of {worker_id}")

    def commit(
        self,
        step: int,
        generation: int,
        entries: Sequence[Mapping[str, Any]],
        *,
        remote: bool,
    ) -> None:
        """Begin a commit."""
        work = self._commit(step, generation, entries, remote=remote)
        self._run(self._loud(work, step, generation), f"commit of step {step}")

    def drop(self, step: int, generation: int) -> None:
        """Begin to give a save up."""
        self._run(self._drop(step, generation), f"removal of step {step}")

    async def close(self, deadline_s: float) -> list[str]:
        """Wait for what is under way, at most so long; what it was that did not end."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=deadline_s)
        unfinished = list(self._tasks.values())
        if not unfinished and self.remote is not None:
            await self._thread(self.remote.close)
        return unfinished

    # -- a save -------------------------------------------------------------------------------

    async def _save(self, save: _Save) -> None:
        try:
            reader, sealed = self._sealed(save)
            save.extra = dict(sealed.extra)
            await self._write(save, reader, sealed)
            await self._upload(save, reader, sealed)
        except Exception as error:  # noqa: BLE001 - reported as a failed save
            self._fail(save, None, error, lost=True)
        finally:
            for outcome in (save.local, save.remote):
                if not outcome.done():
                    outcome.set_result(False)
            self._free_half(save)
            self._running[save.worker_id] -= 1
            self._let_go(save.worker_id)

    def _sealed(self, save: _Save) -> tuple[ArenaReader, Sealed]:
        reader = self._arenas.get(save.worker_id)
        if reader is None:
            raise NotFound(f"worker {save.worker_id} has no arena here", kind="arena-unknown")
        sealed = reader.sealed(save.half)
        if sealed is None or (sealed.step, sealed.generation) != (save.step, save.generation):
            raise Corrupt(
                f"half {save.half} of {save.worker_id}'s arena does not hold a whole step "
                f"{save.step} of generation {save.generation}",
                kind="arena-torn",
            )
        return reader, sealed

    async def _write(self, save: _Save, reader: ArenaReader, sealed: Sealed) -> None:
        if self.local is None:
            return
        source = PackSource(reader, sealed, job=self.job, worker_id=save.worker_id)
        directory = f"{checkpoint_dir(save.step, save.generation)}/{PACKS_DIR}"
        async with self._writing:
            began_s = asyncio.get_running_loop().time()
            try:
                save.hold = await self._thread(self.local.hold, directory)
                await self._thread(self.local.put, save.path, _Droppable(source, save))
            except Exception as error:  # noqa: BLE001 - reported as a failed write
                self._fail(save, "local", error, lost=self.remote is None)
                return
        save.entry = source.entry(self.node)
        save.local.set_result(True)
        self._tell("written", save, source.size, began_s)
        self._free_half(save)

    async def _upload(self, save: _Save, reader: ArenaReader, sealed: Sealed) -> None:
        if self.remote is None:
            return
        written = save.local.done()
        if self._uploads[save.worker_id] >= MAX_WAITING_UPLOADS:
            error = Fatal(
                f"{self._uploads[save.worker_id]} packs of {save.worker_id} wait for "
                f"{self.remote.url}, which is slower than the saves",
                kind="upload-queue-full",
                hint="save less often",
            )
            self._fail(save, "remote", error, lost=not written)
            return
        self._uploads[save.worker_id] += 1
        try:
            async with self._uploading:
                began_s = asyncio.get_running_loop().time()
                staged = PackSource(reader, sealed, job=self.job, worker_id=save.worker_id)
                source: Source = staged
                if written and self.local is not None and save.entry is not None:
                    path = self.local.root / save.path
                    source = FileSource(path, save.entry["size"], save.entry["crc"])
                await self._thread(self.remote.put, save.path, _Droppable(source, save))
        except Exception as error:  # noqa: BLE001 - reported as a failed upload
            self._fail(save, "remote", error, lost=not written)
            return
        finally:
            self._uploads[save.worker_id] -= 1
        if save.entry is None:
            save.entry = staged.entry(self.node)
        save.remote.set_result(True)
        self._tell("uploaded", save, source.size, began_s)

    # -- a commit -----------------------------------------------------------------------------

    async def _commit(
        self, step: int, generation: int, entries: Sequence[Mapping[str, Any]], *, remote: bool
    ) -> None:
        own = [s for (s_, g, _), s in self._saves.items() if (s_, g) == (step, generation)]
        written = [s for s in own if await s.local]
        extra = next((s.extra for s in own if s.extra is not None), None)
        found = assemble(entries, step=step, generation=generation, extra=extra)
        if isinstance(found, Missing):
            raise Fatal(f"nothing can be committed: {found}", kind="incomplete")
        to_remote = self.remote if remote else None
        reached: list[str] = []
        if self.local is not None and written:
            final = to_remote is None
            await self._publish(found, "local", self.local, reached, final=final)
        for save in own:
            save.release()
        if to_remote is not None:
            failed = [s.worker_id for s in own if not await s.remote]
            if failed:
                raise Fatal(
                    f"step {step} cannot be committed at {to_remote.url}: the packs of "
                    f"{', '.join(failed)} are not there",
                    kind="upload-failed",
                )
            await self._await_packs(found, to_remote)
            if extra is None:
                extra = await self._thread(_extra_of, to_remote, found)
                found = assemble(entries, step=step, generation=generation, extra=extra)
                assert isinstance(found, Manifest)
            await self._publish(found, "remote", to_remote, reached, final=True)
        elif not reached:
            self._tell_committed(found, None, "", reached, final=True)
        for save in own:
            self._saves.pop((save.step, save.generation, save.worker_id), None)

    async def _publish(
        self, manifest: Manifest, name: str, tier: Tier, reached: list[str], *, final: bool
    ) -> None:
        path = f"{manifest.dir}/{MANIFEST_NAME}"
        try:
            created = await self._thread(tier.create, path, encode(manifest))
            if created is Created.OTHER:
                raise Conflict(
                    f"{tier.url}/{path} has been written by somebody else with other packs",
                    kind="manifest-conflict",
                )
        except CheckpointError as error:
            if name == "remote" or final:
                raise
            self._tell_failed(manifest.step, manifest.generation, None, name, error, lost=False)
            return
        reached.append(name)
        self._tell_committed(manifest, name, f"{tier.url}/{path}", reached, final=final)

    async def _await_packs(self, manifest: Manifest, tier: Tier) -> None:
        """Return when every pack stands verified at `tier`; other nodes may still be uploading."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + REMOTE_COMMIT_S
        pause_s = POLL_S
        waiting = list(manifest.packs)
        while True:
            checks = [self._thread(_pack_problem, tier, manifest, pack) for pack in waiting]
            problems = await asyncio.gather(*checks)
            waiting = [p for p, error in zip(waiting, problems, strict=True) if error is not None]
            if not waiting:
                return
            if loop.time() + pause_s > end_s:
                raise next(error for error in problems if error is not None)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)

    # -- giving up ----------------------------------------------------------------------------

    async def _drop(self, step: int, generation: int) -> None:
        own = [s for (s_, g, _), s in self._saves.items() if (s_, g) == (step, generation)]
        for save in own:
            save.dropped = True
        for save in own:
            await save.local
            await save.remote
            for tier in (self.local, self.remote):
                if tier is not None:
                    with contextlib.suppress(CheckpointError):
                        await self._thread(_remove_uncommitted, tier, save)
            save.release()
            self._saves.pop((save.step, save.generation, save.worker_id), None)
        self.emit({"t": "dropped", "step": step, "generation": generation})

    # -- telling ------------------------------------------------------------------------------

    async def _loud(self, work: Coroutine[Any, Any, None], step: int, generation: int) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - reported as a failed commit
            self._tell_failed(step, generation, None, None, error, lost=True)

    def _tell(self, event: str, save: _Save, nbytes: int, began_s: float) -> None:
        self.emit(
            {
                "t": event,
                "step": save.step,
                "generation": save.generation,
                "worker_id": save.worker_id,
                "half": save.half,
                "bytes": nbytes,
                "duration_s": asyncio.get_running_loop().time() - began_s,
                "entry": save.entry,
            }
        )

    def _tell_committed(
        self, manifest: Manifest, tier: str | None, place: str, reached: list[str], *, final: bool
    ) -> None:
        self.emit(
            {
                "t": "committed",
                "step": manifest.step,
                "generation": manifest.generation,
                "tier": tier,
                "tiers": list(reached),
                "manifest": place,
                "final": final,
            }
        )

    def _fail(self, save: _Save, tier: str | None, error: Exception, *, lost: bool) -> None:
        if save.dropped:
            log.info("step %d of %s was given up: %s", save.step, save.worker_id, error)
        else:
            self._tell_failed(save.step, save.generation, save.worker_id, tier, error, lost=lost)
        if lost:
            self._forget(save)

    def _forget(self, save: _Save) -> None:
        """A save that is nowhere cannot be committed; it may be ordered again."""
        if not save.dropped:
            save.release()
            self._saves.pop((save.step, save.generation, save.worker_id), None)

    def _tell_failed(  # noqa: PLR0913 - one event's fields
        self,
        step: int,
        generation: int,
        worker_id: str | None,
        tier: str | None,
        error: Exception,
        *,
        lost: bool,
    ) -> None:
        known = isinstance(error, CheckpointError)
        if not known:
            log.error("the save service fails by a bug of its own", exc_info=error)
        self.emit(
            {
                "t": "failed",
                "step": step,
                "generation": generation,
                "worker_id": worker_id,
                "tier": tier,
                "lost": lost,
                "kind": error.kind if isinstance(error, CheckpointError) else "internal",
                "error": str(error) if known else f"{type(error).__name__}: {error}",
            }
        )

    def _free_half(self, save: _Save) -> None:
        if save.half_busy:
            save.half_busy = False
            self.emit({"t": "half_free", "worker_id": save.worker_id, "half": save.half})

    def _let_go(self, worker_id: str) -> None:
        if worker_id in self._gone and not self._running[worker_id]:
            self._gone.discard(worker_id)
            reader = self._arenas.pop(worker_id, None)
            if reader is not None:
                reader.close()

    async def _thread(self, call: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(call, *arguments))

    def _run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = what
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        what = self._tasks.pop(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a %s ended by a bug of its own", what, exc_info=task.exception())


def verify_pack(tier: Tier, manifest: Manifest, pack: PackRef) -> None:
    """Return if a pack of the right size with the right footer stands at `tier`.

    Raises NotFound or Corrupt if not. Reads the end only: the rest was checked while it was
    written.
    """
    path = f"{manifest.dir}/{pack.object}"
    where = f"{tier.url}/{path}"
    size = tier.size(path)
    if size != pack.size:
        raise Corrupt(f"{where} has {size} bytes instead of {pack.size}", kind="size")
    data = np.empty(pack.footer_bytes + TRAILER_BYTES, np.uint8)
    tier.read_into(path, pack.footer_offset, data)
    if crc32c(data[:-TRAILER_BYTES]) != pack.footer_crc:
        raise Corrupt(f"the footer of {where} has another checksum", kind="footer-checksum")
    decode_trailer(data[-TRAILER_BYTES:].tobytes(), where)


def _pack_problem(tier: Tier, manifest: Manifest, pack: PackRef) -> CheckpointError | None:
    """What may go away by waiting; anything else is raised."""
    try:
        verify_pack(tier, manifest, pack)
    except (NotFound, Retryable) as error:
        return error
    return None


def _extra_of(tier: Tier, manifest: Manifest) -> dict[str, Any]:
    pack = manifest.packs[0]
    path = f"{manifest.dir}/{pack.object}"
    data = np.empty(pack.footer_bytes, np.uint8)
    tier.read_into(path, pack.footer_offset, data)
    return decode_footer(data.tobytes(), f"{tier.url}/{path}", pack.footer_crc).extra


def _remove_uncommitted(tier: Tier, save: _Save) -> None:
    try:
        tier.size(f"{checkpoint_dir(save.step, save.generation)}/{MANIFEST_NAME}")
    except NotFound:
        tier.delete(save.path)
