"""Coords on a real etcd for integration tests: opened, read from, and closed again."""

from __future__ import annotations

import asyncio
import functools
from contextlib import asynccontextmanager

import pytest

from elastic.membership.coord_etcd import EtcdCoord
from elastic.membership.etcd_server import EtcdServer, find_etcd
from elastic.membership.messages import Member, Mode, WorkerRef, World
from tests.support import eventually_async

JOB = "faults"


@pytest.fixture(name="etcd")
def restartable_etcd(tmp_path):
    if not find_etcd().restartable:
        pytest.skip(f"needs an etcd that may be restarted, this is {find_etcd().version}")
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


def member(node="a", incarnation="1", **fields):
    fields = {"address": "127.0.0.1:1", "slots": 1, "workers": (), **fields}
    return Member(node=node, incarnation=incarnation, **fields)


def world(generation=1, reason="test"):
    workers = (WorkerRef(worker_id="a.0-abcdef", node="a", slot=0),)
    return World(generation=generation, workers=workers, stores=(), mode=Mode.NOW, reason=reason)


def on_loop(test):
    """Run an async test on a loop of its own, within 60 s."""

    @functools.wraps(test)
    def run(**fixtures):
        async def bounded():
            async with asyncio.timeout(60):
                await test(**fixtures)

        asyncio.run(bounded())

    return run


@asynccontextmanager
async def coords(*specs, ttl_s=2.0, start=True):
    """Yield a started coord "a", "b", ... for each list of endpoints, and their losses."""
    lost, opened = asyncio.Queue(), []
    try:
        for node, endpoints in zip("abcdef", specs, strict=False):
            coord = EtcdCoord(
                [endpoints] if isinstance(endpoints, str) else endpoints,
                JOB,
                lease_ttl_s=ttl_s,
                on_lost=lost.put_nowait,
            )
            opened.append(coord)
            if start:
                await coord.start(member(node))
        yield *opened, lost
    finally:
        for coord in opened:
            await coord.close()


class Reader:
    """Reads the snapshots of a coord as they come."""

    def __init__(self, coord):
        self.seen = []
        self._task = asyncio.create_task(self._read(coord))

    async def _read(self, coord):
        async for snapshot in coord.snapshots():
            self.seen.append(snapshot)

    async def until(self, holds, within_s=8.0):
        def look():
            if self._task.done():
                self._task.result()
            return self.seen and holds(self.seen[-1]) and self.seen[-1]

        return await eventually_async(look, within_s=within_s, what="a snapshot")
