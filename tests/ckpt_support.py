"""Builders for the tests of ckpt: states, cuts, whole checkpoints, a watched save service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.arena import Arena, ArenaReader, create_fd, half_bytes_for
from ckpt.commit import assemble
from ckpt.manifest import MANIFEST_NAME, Manifest, encode
from ckpt.service import SaveService
from ckpt.slices import TensorInfo, TensorSlice
from ckpt.tier import Created
from ckpt.tier_local import LocalTier
from ckpt.writer import PackSource, pack_path

State = dict[str, tuple[TensorInfo, bytes]]


def make_state(shapes: dict[str, tuple[str, tuple[int, ...]]], seed: int = 0) -> State:
    """Random bytes for tensors given as name: (dtype, shape)."""
    rng = np.random.default_rng(seed)
    infos = {name: TensorInfo(dtype, shape) for name, (dtype, shape) in shapes.items()}
    return {name: (info, rng.bytes(info.nbytes)) for name, info in infos.items()}


def cut(state: State, num_workers: int) -> list[list[TensorSlice]]:
    """Rows dealt out in nearly equal parts; a tensor without rows belongs to the first worker."""
    parts: list[list[TensorSlice]] = [[] for _ in range(num_workers)]
    for name, (info, _) in state.items():
        for w in range(num_workers):
            start, stop = info.rows * w // num_workers, info.rows * (w + 1) // num_workers
            if start < stop or (info.rows == 0 and w == 0):
                parts[w].append(TensorSlice(name, info.dtype, info.shape, start, stop))
    return parts


def rows(state: State, piece: TensorSlice) -> bytes:
    info, data = state[piece.name]
    return data[piece.start * info.row_bytes : piece.stop * info.row_bytes]


def pieces(state: State, slices: list[TensorSlice]) -> list[tuple[TensorSlice, memoryview]]:
    return [(each, memoryview(rows(state, each))) for each in slices]


@dataclass
class Worker:
    """One worker's arena, as long as the test lives; the process is the test's own."""

    worker_id: str
    slices: list[TensorSlice]
    segments: list[int]
    num_segments: int
    fd: int = field(default_factory=create_fd)

    def __post_init__(self) -> None:
        self.arena = Arena(self.fd, half_bytes_for(self.slices))

    def stage(self, state: State, step: int, generation: int = 1, **other: Any) -> int | None:
        settings = {"extra": {"step": step}, "lineage": [[generation, 0]], **other}
        return self.arena.stage(
            step=step,
            generation=generation,
            pieces=pieces(state, self.slices),
            segments=self.segments,
            num_segments=self.num_segments,
            **settings,
        )

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def make_workers(state: State, num_workers: int, node: str = "n") -> list[Worker]:
    parts = cut(state, num_workers)
    return [Worker(f"{node}.{w}-aa", parts[w], [w], num_workers) for w in range(num_workers)]


def write_pack(tier: Any, worker: Worker, state: State, step: int, generation: int = 1, **other):
    """One worker's pack at a tier, written in this process; its entry."""
    half = worker.stage(state, step, generation, **other)
    assert half is not None
    reader = ArenaReader(worker.fd)
    sealed = reader.sealed(half)
    assert sealed is not None
    source = PackSource(reader, sealed, job="job", worker_id=worker.worker_id)
    tier.put(pack_path(step, generation, worker.worker_id), source)
    worker.arena.release(half)
    reader.close()
    return json.loads(json.dumps(source.entry("n")))  # as it comes back from a store


def write_checkpoint(
    tier: Any, state: State, num_workers: int = 2, step: int = 1, generation: int = 1, **other
) -> Manifest:
    """A committed checkpoint, without a service."""
    if isinstance(tier, str | os.PathLike):
        tier = LocalTier(tier)
    workers = make_workers(state, num_workers)
    entries = [write_pack(tier, w, state, step, generation, **other) for w in workers]
    manifest = assemble(
        entries, step=step, generation=generation, extra=other.get("extra", {"step": step})
    )
    assert isinstance(manifest, Manifest)
    created = tier.create(f"{manifest.dir}/{MANIFEST_NAME}", encode(manifest))
    assert created is Created.NEW
    return manifest


def assert_holds(checkpoint: Any, state: State) -> None:
    """Every tensor, whole, bit by bit."""
    assert dict(checkpoint.tensors) == {name: info for name, (info, _) in state.items()}
    for name, (_, data) in state.items():
        assert checkpoint.read(name).tobytes() == data, name


class Watched:
    """A save service whose events are kept and can be waited for."""

    def __init__(self, tmp_path: Any, *, node: str = "n", remote: str | None = None, **other):
        self.events: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        settings = {"local": str(tmp_path / f"local-{node}"), **other}
        self.local = settings["local"]
        self.remote = remote
        self.service = SaveService(
            job="job",
            node=node,
            remote=remote,
            on_event=self._take,
            log_path=tmp_path / "save.log",
            **settings,
        )

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(json.loads(json.dumps(event)))
        self._changed.set()

    def of(self, kind: str, /, **fields: Any) -> list[dict[str, Any]]:
        wanted = {"t": kind, **fields}
        return [e for e in self.events if all(e.get(k) == v for k, v in wanted.items())]

    async def wait(self, kind: str, count: int = 1, /, within_s: float = 60.0, **fields: Any):
        """The first `count` events of a kind; fails with all that came instead."""
        try:
            async with asyncio.timeout(within_s):
                while len(self.of(kind, **fields)) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            seen = [{k: v for k, v in e.items() if k != "entry"} for e in self.events]
            raise AssertionError(f"no {count} x {kind} {fields} came, but {seen}") from None
        return self.of(kind, **fields)[:count]

    async def changed(self, within_s: float) -> None:
        """Return at the next event, or after so long without one."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()

    async def save(self, workers: list[Worker], state: State, step: int, **other: Any) -> dict:
        """Stage and save at all workers; their entries when all packs are safe locally."""
        generation = other.get("generation", 1)
        for worker in workers:
            half = worker.stage(state, step, **other)
            assert half is not None
            self.service.save(worker.worker_id, half, step, generation)
        written = await self.wait("written", len(workers), step=step, generation=generation)
        return {e["worker_id"]: e["entry"] for e in written}

    def attach(self, workers: list[Worker]) -> None:
        for worker in workers:
            self.service.attach(worker.worker_id, worker.fd)


class Proxy:
    """Stands before a server, and fails as networks do.

    `cut` drops the answer to the next request that begins so: the deed is done, the news is lost.
    While `away`, every connection is closed at once.
    """

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._upstream = (host, int(port))
        self.cut: bytes | None = None
        self.dropped = 0
        self.away = False
        self.refused = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _serve(self, reader: Any, writer: Any) -> None:
        if self.away:
            self.refused += 1
            writer.close()
            return
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        dropping = False

        async def up() -> None:
            nonlocal dropping
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    if self.away:
                        self.refused += 1
                        break
                    if self.cut is not None and data.startswith(self.cut):
                        dropping, self.cut = True, None
                    upstream_writer.write(data)
                    await upstream_writer.drain()
            upstream_writer.close()

        async def down() -> None:
            with contextlib.suppress(ConnectionError):
                while data := await upstream_reader.read(1 << 16):
                    if dropping and not data.startswith(b"HTTP/1.1 100"):
                        self.dropped += 1
                        break
                    writer.write(data)
                    await writer.drain()
            writer.close()

        try:
            await asyncio.gather(up(), down(), return_exceptions=True)
        finally:
            writer.close()
            upstream_writer.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
