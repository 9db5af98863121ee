"""The etcd client when a real etcd dies, stops, forgets or is full."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from contextlib import aclosing

import pytest

from elastic.membership.coord import CoordRetryable, SessionLost
from elastic.membership.coord_etcd import EtcdCoord
from elastic.membership.etcd_channel import Connections
from elastic.membership.etcd_watch import RangeWatch
from elastic.membership.job_keys import Listing
from tests.coord_bench import JOB, Reader, coords, member, on_loop, restartable_etcd, world
from tests.etcd_proxy import Proxy, Way, call, put, read, revision
from tests.support import eventually_async

__all__ = ["restartable_etcd"]
pytestmark = pytest.mark.integration


# ------------------------------------------------------------------------ etcd dies, etcd stops


@on_loop
async def test_a_killed_and_restarted_etcd_costs_no_event_and_no_session(etcd):
    async with coords(etcd.endpoint, etcd.endpoint, ttl_s=4.0) as (a, b, lost):
        reader = Reader(b)
        await a.propose_world(world(1), after_revision=0)
        state = await reader.until(lambda s: s.world)
        for generation in (2, 3):
            etcd.kill()
            await asyncio.sleep(0.5)  # sleep: calls and streams fail meanwhile
            await asyncio.to_thread(etcd.restart)
            assert await a.propose_world(world(generation), after_revision=state.world_revision)
            state = await reader.until(lambda s, g=generation: s.world.generation == g)
        await asyncio.sleep(4.0)  # sleep: by the deadline of before, the leases have been renewed
        assert (a.alive, b.alive, lost.qsize()) == (True, True, 0)
        assert set((await reader.until(lambda _: True)).members) == {"a", "b"}
        revisions = [snapshot.revision for snapshot in reader.seen]
        assert revisions == sorted(set(revisions))


@on_loop
async def test_a_watch_hands_over_each_event_once_across_restarts(etcd):
    connections = Connections([etcd.endpoint])
    watch = RangeWatch(connections, b"/x/", b"/x0", quiet_s=2.0, answer_s=1.0)
    got, listings = [], 0

    async def follow():
        nonlocal listings
        async with aclosing(watch.follow()) as news:
            async for each in news:
                if isinstance(each, Listing):
                    listings += 1
                else:
                    got.extend(
                        (key.decode(), entry.value.decode()) for key, _, entry in each.events
                    )

    following = asyncio.create_task(follow())
    await eventually_async(lambda: listings)
    wanted = []
    for round_ in range(3):
        for i in range(20):
            wanted.append((f"/x/{i % 7}", f"{round_}.{i}"))
            await asyncio.to_thread(put, etcd.endpoint, *wanted[-1])
        etcd.kill()
        await asyncio.to_thread(etcd.restart)
    await eventually_async(lambda: len(got) >= len(wanted), what="all events")
    following.cancel()
    await asyncio.wait({following})
    await connections.close()
    assert got == wanted
    assert listings == 1


@on_loop
async def test_a_stopped_etcd_ends_the_session_by_our_own_clock(etcd):
    async with coords(etcd.endpoint) as (a, lost):
        reader = Reader(a)
        await reader.until(lambda s: "a" in s.members)
        stopped_at_s = time.monotonic()
        os.kill(etcd.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(a.ttl_s + 1.0):
                reason = await lost.get()
            took_s = time.monotonic() - stopped_at_s
            assert a.ttl_s / 2 < took_s < a.ttl_s + 0.2
            assert "confirmed no heartbeat" in reason
            assert not a.alive
            with pytest.raises(SessionLost):
                await a.propose_world(world(), after_revision=0)
            await asyncio.sleep(1.0)  # sleep: a span of time is what is tested
        finally:
            os.kill(etcd.pid, signal.SIGCONT)
        await a.start(member("a"))
        assert await a.propose_world(world(), after_revision=0)
        await reader.until(lambda s: s.world)
        assert lost.qsize() == 0


@on_loop
async def test_an_etcd_that_stops_for_less_than_the_lease_costs_nothing(etcd):
    async with coords(etcd.endpoint, ttl_s=3.0) as (a, lost):
        for _ in range(2):
            os.kill(etcd.pid, signal.SIGSTOP)
            proposing = asyncio.create_task(a.put_member(member("a")))
            await asyncio.sleep(1.2)  # sleep: a span of time is what is tested
            os.kill(etcd.pid, signal.SIGCONT)
            await proposing
            await asyncio.sleep(1.0)  # sleep: a span of time is what is tested
        assert a.alive
        assert lost.qsize() == 0


@on_loop
async def test_an_agent_that_slept_knows_it_before_it_acts(etcd):
    async with coords(etcd.endpoint, etcd.endpoint, ttl_s=1.0) as (a, b, lost):
        await b.abandon()
        time.sleep(a.ttl_s + 0.3)  # sleep: the whole process, as on SIGSTOP  # noqa: ASYNC251
        assert not a.alive
        with pytest.raises(SessionLost):
            await a.propose_world(world(), after_revision=0)
        assert await asyncio.to_thread(read, etcd.endpoint, f"/everstep/{JOB}/world") == (None, 0)
        async with asyncio.timeout(1):
            await lost.get()


@on_loop
async def test_a_store_that_lost_everything_is_seen_and_started_in_anew(etcd):
    async with coords(etcd.endpoint) as (a, lost):
        reader = Reader(a)
        for generation in range(1, 4):
            before = await reader.until(
                lambda s, g=generation: not s.world or s.world.generation < g
            )
            await a.propose_world(world(generation), after_revision=before.world_revision)
            await reader.until(lambda s, g=generation: s.world and s.world.generation == g)
        etcd.kill()
        shutil.rmtree(etcd.data_dir)
        await asyncio.to_thread(etcd.restart)
        async with asyncio.timeout(5):
            await lost.get()
        await reader.until(lambda s: s.world is None and not s.members)
        await a.start(member("a", "2"))
        assert await a.propose_world(world(9), after_revision=0)
        state = await reader.until(lambda s: s.world is not None)
        assert state.world.generation == 9
        assert state.members["a"].incarnation == "2"


# ------------------------------------------------------------------------- leases and history


@on_loop
async def test_a_revoked_lease_is_noticed_and_the_agent_registers_again(etcd):
    async with coords(etcd.endpoint) as (a, lost):
        reader = Reader(a)
        await reader.until(lambda s: "a" in s.members)
        _, lease = await asyncio.to_thread(read, etcd.endpoint, f"/everstep/{JOB}/members/a")
        await asyncio.to_thread(call, etcd.endpoint, "lease/revoke", ID=str(lease))
        async with asyncio.timeout(2 * a.ttl_s / 3 + 0.3):
            assert "does not know lease" in await lost.get()
        await a.start(member("a"))
        await reader.until(lambda s: "a" in s.members)
        assert a.alive


@on_loop
async def test_history_that_was_compacted_meanwhile_is_read_anew(etcd):
    async with (
        Proxy(etcd.endpoint) as proxy,
        coords(etcd.endpoint, proxy.endpoint, ttl_s=20.0) as (a, b, lost),
    ):
        reader = Reader(b)
        await a.propose_world(world(1), after_revision=0)
        state = await reader.until(lambda s: s.world)
        proxy.go(Way.REFUSE)
        proxy.cut()
        await a.propose_world(world(2), after_revision=state.world_revision)
        for slots in range(1, 30):
            await a.put_member(member("a", slots=slots))
        newest = await asyncio.to_thread(revision, etcd.endpoint)
        await asyncio.to_thread(
            call, etcd.endpoint, "kv/compaction", revision=str(newest), physical=True
        )
        await a.put_member(member("a", slots=99))
        proxy.go(Way.PASS)
        state = await reader.until(lambda s: s.members["a"].slots == 99)
        assert state.world.generation == 2
        await a.put_member(member("a", slots=100))  # and the watch goes on from there
        await reader.until(lambda s: s.members["a"].slots == 100)
        assert b.alive
        assert lost.qsize() == 0


@on_loop
async def test_an_idle_job_writes_nothing_and_is_not_hung_up_on(etcd, capfd):
    async with coords(*[etcd.endpoint] * 3) as (*agents, lost):
        readers = [Reader(agent) for agent in agents]
        for reader in readers:
            await reader.until(lambda s: len(s.members) == 3)
        before = await asyncio.to_thread(revision, etcd.endpoint)
        seen = [len(reader.seen) for reader in readers]
        await asyncio.sleep(10)  # sleep: a span of time is what is tested
        assert await asyncio.to_thread(revision, etcd.endpoint) == before
        assert [len(reader.seen) for reader in readers] == seen
        assert lost.qsize() == 0
    assert "too_many_pings" not in capfd.readouterr().err


@on_loop
async def test_a_full_etcd_is_named_and_costs_no_session(etcd):
    async with coords(etcd.endpoint) as (a, lost):
        alarm = {"alarm": "NOSPACE", "memberID": "0"}
        await asyncio.to_thread(
            call, etcd.endpoint, "maintenance/alarm", action="ACTIVATE", **alarm
        )
        started_s = time.monotonic()
        with pytest.raises(CoordRetryable, match=r"database is full.*alarm disarm") as full:
            await a.put_member(member("a", leaving=True))
        assert full.value.kind == "no-space"
        assert time.monotonic() - started_s < 1.0
        other = EtcdCoord([etcd.endpoint], JOB)
        with pytest.raises(CoordRetryable, match="database is full"):
            await other.start(member("b"))
        await asyncio.sleep(1.2 * a.ttl_s)  # sleep: a span of time is what is tested
        assert a.alive
        await asyncio.to_thread(
            call, etcd.endpoint, "maintenance/alarm", action="DEACTIVATE", **alarm
        )
        await a.put_member(member("a", leaving=True))
        await other.start(member("b"))
        await other.close()
        assert lost.qsize() == 0
