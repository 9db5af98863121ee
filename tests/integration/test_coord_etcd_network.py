"""The etcd client when the way to etcd loses replies, connections or endpoints."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from elastic.membership.coord import CoordRetryable
from elastic.membership.etcd_server import EtcdCluster
from tests.coord_bench import JOB, Reader, coords, member, on_loop, restartable_etcd, world
from tests.etcd_proxy import Proxy, Way, call, read, revision
from tests.support import eventually_async

__all__ = ["restartable_etcd"]
pytestmark = pytest.mark.integration


# ------------------------------------------------------------------------------- lost replies


async def lost_reply(proxy, etcd, change, key, holds):
    """Start `change`, let etcd do it and lose the reply; return what `change` makes of that."""
    proxy.go(Way.SWALLOW)
    changing = asyncio.create_task(change)

    def done():
        return holds(read(etcd.endpoint, key)[0])

    await eventually_async(lambda: asyncio.to_thread(done), within_s=3.0)
    return changing


@on_loop
async def test_a_proposal_whose_reply_was_lost_is_read_back(etcd):
    async with Proxy(etcd.endpoint) as proxy, coords(proxy.endpoint, ttl_s=10.0) as (a, _):
        key = f"/everstep/{JOB}/world"
        changing = await lost_reply(
            proxy,
            etcd,
            a.propose_world(world(1), after_revision=0, member=member("a", leaving=True)),
            key,
            lambda record: record is not None,
        )
        written_at = await asyncio.to_thread(revision, etcd.endpoint)
        proxy.cut()
        proxy.go(Way.PASS)
        assert await changing
        assert await asyncio.to_thread(revision, etcd.endpoint) == written_at  # once, not twice
        await a.put_member(member("a"))  # the chain of the own record is known as well


@on_loop
async def test_a_proposal_that_was_overtaken_while_its_reply_was_lost_has_not_won(etcd):
    async with (
        Proxy(etcd.endpoint) as proxy,
        coords(proxy.endpoint, etcd.endpoint, ttl_s=10.0) as (a, b, _),
    ):
        changing = await lost_reply(
            proxy,
            etcd,
            a.propose_world(world(1), after_revision=0),
            f"/everstep/{JOB}/world",
            lambda record: record is not None,
        )
        state = await Reader(b).until(lambda s: s.world)
        assert await b.propose_world(world(2), after_revision=state.world_revision)
        proxy.cut()
        proxy.go(Way.PASS)
        assert not await changing


@on_loop
async def test_a_record_whose_reply_was_lost_is_read_back(etcd):
    async with Proxy(etcd.endpoint) as proxy, coords(proxy.endpoint, ttl_s=10.0) as (a, _):
        changing = await lost_reply(
            proxy,
            etcd,
            a.put_member(member("a", slots=7)),
            f"/everstep/{JOB}/members/a",
            lambda record: record["slots"] == 7,
        )
        proxy.cut()
        proxy.go(Way.PASS)
        await changing
        await a.put_member(member("a", slots=8))
        record, _ = await asyncio.to_thread(read, etcd.endpoint, f"/everstep/{JOB}/members/a")
        assert record["slots"] == 8


@on_loop
async def test_a_change_whose_outcome_cannot_be_learned_says_so_and_is_taken_up_later(etcd):
    async with Proxy(etcd.endpoint) as proxy, coords(proxy.endpoint, ttl_s=30.0) as (a, lost):
        proxy.go(Way.SWALLOW)
        with pytest.raises(CoordRetryable):
            await a.put_member(member("a", slots=7))
        record, _ = await asyncio.to_thread(read, etcd.endpoint, f"/everstep/{JOB}/members/a")
        assert record["slots"] == 7
        proxy.go(Way.PASS)
        proxy.cut()
        assert await a.propose_world(world(1), after_revision=0)
        await a.put_member(member("a", slots=8))
        assert lost.qsize() == 0


@on_loop
async def test_a_late_answer_counts_from_when_its_heartbeat_was_sent(etcd):
    async with Proxy(etcd.endpoint) as proxy, coords(proxy.endpoint, ttl_s=3.0) as (a, lost):
        proxy.go(Way.SWALLOW)
        started_s = time.monotonic()  # the next heartbeat leaves within a second
        await asyncio.sleep(1.4)  # sleep: a span of time is what is tested
        proxy.go(Way.DEAFEN)  # now it is answered, and no other one will be
        async with asyncio.timeout(5):
            await lost.get()
        assert a.ttl_s - 0.2 < time.monotonic() - started_s < a.ttl_s + 1.2


# ---------------------------------------------------------------------------------- endpoints


@on_loop
async def test_connections_that_are_reset_all_the_time_cost_no_session(etcd):
    async with Proxy(etcd.endpoint) as proxy, coords(proxy.endpoint, ttl_s=3.0) as (a, lost):
        reader = Reader(a)
        for slots in range(2, 14):
            await asyncio.sleep(0.5)  # sleep: a span of time is what is tested
            proxy.cut()
            await a.put_member(member("a", slots=slots))
        await reader.until(lambda s: s.members["a"].slots == 13)
        assert a.alive
        assert lost.qsize() == 0
        assert proxy.accepted >= 12


@pytest.mark.parametrize("way", [Way.REFUSE, Way.HANG])
@on_loop
async def test_the_second_endpoint_is_used_when_the_first_fails(etcd, way):
    async with Proxy(etcd.endpoint) as first, Proxy(etcd.endpoint) as second:
        first.go(way)
        started_s = time.monotonic()
        async with coords([first.endpoint, second.endpoint], ttl_s=3.0) as (a, lost):
            assert time.monotonic() - started_s < 2.5
            reader = Reader(a)
            await reader.until(lambda s: "a" in s.members)
            first.go(Way.PASS)
            second.go(way)  # now the one in use
            if way is Way.REFUSE:
                second.cut()
            started_s = time.monotonic()
            await a.put_member(member("a", slots=2))
            assert time.monotonic() - started_s < 2.5
            await reader.until(lambda s: s.members["a"].slots == 2, within_s=0.5)
            await asyncio.sleep(a.ttl_s)  # sleep: a span of time is what is tested
            assert a.alive
            assert lost.qsize() == 0


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
@on_loop
async def test_three_nodes_may_lose_the_leader_that_we_talk_to(tmp_path, stop):
    with EtcdCluster(tmp_path) as cluster:
        status = call(cluster.endpoints[0], "maintenance/status")
        members = call(cluster.endpoints[0], "cluster/member/list")["members"]
        urls = next(each["clientURLs"] for each in members if each["ID"] == status["leader"])
        leader = next(node for node in cluster.nodes if urls[0].endswith(node.endpoint))
        ours = sorted(cluster.endpoints, key=lambda endpoint: endpoint != leader.endpoint)
        async with coords(ours, ours, ttl_s=5.0) as (a, b, lost):
            reader = Reader(b)
            await reader.until(lambda s: "a" in s.members)
            os.kill(leader.pid, stop)
            try:
                await a.put_member(member("a", slots=2))
                await reader.until(lambda s: s.members["a"].slots == 2)
                await asyncio.sleep(5.0)  # sleep: a span of time is what is tested
                assert (a.alive, b.alive, lost.qsize()) == (True, True, 0)
                await a.put_member(member("a", slots=3))
                await reader.until(lambda s: s.members["a"].slots == 3, within_s=2.0)
            finally:
                os.kill(leader.pid, signal.SIGCONT) if stop is signal.SIGSTOP else None
