"""One suite for every Coord: what its protocol promises, in memory and on a real etcd."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from contextlib import aclosing

import pytest

from elastic.errors import Misconfigured
from elastic.membership.coord import CoordMisconfigured, NodeTaken, SessionLost
from elastic.membership.coord_etcd import EtcdCoord
from elastic.membership.coord_memory import MemoryCoord, MemoryStore
from elastic.membership.etcd_channel import Connections
from elastic.membership.etcd_server import EtcdServer
from elastic.membership.etcd_wire import RANGE, REVOKE, message, range_request
from elastic.membership.messages import Member, Mode, WorkerRef, WorkerStatus, World

TTL_S = 1.0
_jobs = itertools.count()


def member(node="a", incarnation="1", **fields):
    fields = {"address": "127.0.0.1:1", "slots": 1, "workers": (), **fields}
    return Member(node=node, incarnation=incarnation, **fields)


def world(generation=1, nodes="ab", reason="test"):
    workers = tuple(WorkerRef(worker_id=f"{n}.0-abcdef", node=n, slot=0) for n in nodes)
    return World(generation=generation, workers=workers, stores=(), mode=Mode.NOW, reason=reason)


class Bench:
    """Coords of one kind on one store; closes what a test has opened."""

    def __init__(self):
        self.job = f"job{next(_jobs)}"
        self.opened = []

    def coord(self, job=None, on_lost=None):
        coord = self.make(job or self.job, on_lost)
        self.opened.append(coord)
        return coord

    async def started(self, node="a", incarnation="1", **options):
        coord = self.coord(**options)
        await coord.start(member(node, incarnation))
        return coord

    async def close(self):
        for coord in self.opened:
            await coord.close()


class MemoryBench(Bench):
    def __init__(self):
        super().__init__()
        self.store = MemoryStore()

    def make(self, job, on_lost):
        return MemoryCoord(self.store, job, lease_ttl_s=TTL_S, on_lost=on_lost)

    async def expire(self, node):
        self.store.expire(self.job, node)

    async def revision(self):
        return self.store.revision


class EtcdBench(Bench):
    def __init__(self, endpoint):
        super().__init__()
        self.endpoint = endpoint

    def make(self, job, on_lost):
        return EtcdCoord([self.endpoint], job, lease_ttl_s=TTL_S, on_lost=on_lost)

    async def expire(self, node):
        record = await self._read(f"/everstep/{self.job}/members/{node}")
        await self._call(REVOKE, message("RevokeRequest", ID=record.kvs[0].lease))

    async def revision(self):
        return (await self._read("x")).header.revision

    async def _read(self, key):
        return await self._call(RANGE, range_request(key.encode()))

    async def _call(self, method, request):
        connections = Connections([self.endpoint])
        try:
            return await connections.call(method, request, patience_s=2.0)
        finally:
            await connections.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with EtcdServer(tmp_path_factory.mktemp("coord") / "etcd") as server:
        yield server


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.integration)])
def bench(request):
    if request.param == "memory":
        return MemoryBench()
    return EtcdBench(request.getfixturevalue("etcd").endpoint)


def scenario(test):
    """Run an async test on a loop of its own, within 30 s, and close its coords on that loop."""

    @functools.wraps(test)
    def run(bench):
        async def bounded():
            try:
                async with asyncio.timeout(30):
                    await test(bench)
            finally:
                await bench.close()

        asyncio.run(bounded())

    return run


async def now(coord):
    async with aclosing(coord.snapshots()) as snapshots:
        return await anext(snapshots)


async def until(coord, holds, within_s=5.0):
    """Return the first snapshot for which `holds`, and the seconds that it took to come."""
    started_s = time.monotonic()
    async with asyncio.timeout(within_s), aclosing(coord.snapshots()) as snapshots:
        async for snapshot in snapshots:
            if holds(snapshot):
                return snapshot, time.monotonic() - started_s
    raise AssertionError("the snapshots ended")


# ---------------------------------------------------------------------------------- Worlds


@scenario
async def test_of_two_proposers_exactly_one_wins(bench):
    a, b = await bench.started("a"), await bench.started("b")
    revision = 0
    for generation in range(1, 16):
        won = await asyncio.gather(
            a.propose_world(world(generation, reason="by a"), after_revision=revision),
            b.propose_world(world(generation, reason="by b"), after_revision=revision),
        )
        assert sorted(won) == [False, True]
        state = await now(a)
        if state.world_revision == revision:
            state, _ = await until(a, lambda s, old=revision: s.world_revision != old)
        assert state.world.generation == generation
        assert state.world.reason == ("by a" if won[0] else "by b")
        revision = state.world_revision


@scenario
async def test_of_two_equal_proposals_still_only_one_wins(bench):
    a, b = await bench.started("a"), await bench.started("b")
    won = await asyncio.gather(
        a.propose_world(world(), after_revision=0), b.propose_world(world(), after_revision=0)
    )
    assert sorted(won) == [False, True]


@scenario
async def test_a_world_comes_only_after_the_one_it_names(bench):
    a = await bench.started("a")
    assert await a.propose_world(world(1), after_revision=0)
    first, _ = await until(a, lambda s: s.world is not None)
    assert not await a.propose_world(world(2), after_revision=0)
    assert not await a.propose_world(world(2), after_revision=first.world_revision - 1)
    assert not await a.propose_world(world(2), after_revision=first.world_revision + 1)
    assert (await now(bench.coord())).world == world(1)
    assert await a.propose_world(world(2), after_revision=first.world_revision)


@scenario
async def test_a_world_and_its_proposers_record_change_at_one_revision(bench):
    a, b = await bench.started("a"), await bench.started("b")
    watching = asyncio.create_task(until(b, lambda s: s.world is not None))
    ready = member("a", workers=(WorkerStatus(worker_id="a.0-abcdef", slot=0, ready=True),))
    assert await a.propose_world(world(), after_revision=0, member=ready)
    state, _ = await watching
    assert state.members["a"] == ready
    assert state.member_revisions["a"] == state.world_revision == state.revision
    await a.put_member(member("a", leaving=True))  # the record's own chain goes on
    await until(b, lambda s: s.members["a"].leaving)


@scenario
async def test_a_lost_proposal_leaves_the_own_record_as_it_was(bench):
    a, b = await bench.started("a"), await bench.started("b")
    assert await b.propose_world(world(), after_revision=0)
    assert not await a.propose_world(
        world(1, "a"), after_revision=0, member=member("a", leaving=True)
    )
    state, _ = await until(a, lambda s: s.world is not None)
    assert not state.members["a"].leaving
    await a.put_member(member("a", finished=True))


@scenario
async def test_who_has_not_started_proposes_nothing(bench):
    with pytest.raises(SessionLost):
        await bench.coord().propose_world(world(), after_revision=0)


# --------------------------------------------------------------------------------- sessions


@scenario
async def test_a_lapsed_session_changes_nothing_and_may_start_again(bench):
    lost = []
    a = await bench.started("a", on_lost=lost.append)
    b = await bench.started("b")
    await bench.expire("a")
    with pytest.raises(SessionLost):
        await a.propose_world(world(), after_revision=0, member=member("a"))
    assert not a.alive
    with pytest.raises(SessionLost):
        await a.put_member(member("a"))
    assert len(lost) == 1
    state, _ = await until(b, lambda s: "a" not in s.members)
    assert state.world is None
    await a.start(member("a"))
    assert a.alive
    assert await a.propose_world(world(), after_revision=0)
    assert len(lost) == 1


@scenario
async def test_a_lease_that_ends_behind_our_back_is_noticed_within_two_beats(bench):
    lost = asyncio.Queue()
    a = await bench.started("a", on_lost=lost.put_nowait)
    started_s = time.monotonic()
    await bench.expire("a")
    async with asyncio.timeout(5):
        assert await lost.get()
    assert time.monotonic() - started_s < 2 * a.ttl_s / 3 + 0.3
    assert not a.alive


@scenario
async def test_a_session_outlives_its_time_to_live(bench):
    lost = []
    a = await bench.started("a", on_lost=lost.append)
    first = await now(a)
    await asyncio.sleep(2.5 * a.ttl_s)  # sleep: a span of time is what is tested
    assert a.alive
    assert not lost
    assert (await now(bench.coord())).member_revisions == first.member_revisions


@scenario
async def test_a_node_name_of_a_living_agent_is_refused(bench):
    a = await bench.started("a", "1")
    with pytest.raises(NodeTaken) as refused:
        await bench.started("a", "2")
    assert isinstance(refused.value, Misconfigured)
    assert a.alive
    assert (await now(a)).members["a"].incarnation == "1"
    await a.put_member(member("a", "1", leaving=True))


@scenario
async def test_a_dead_incarnation_is_waited_out(bench):
    dead = await bench.started("a", "1")
    await dead.abandon()
    started_s = time.monotonic()
    second = await bench.started("a", "2")
    assert 0.1 * TTL_S < time.monotonic() - started_s < TTL_S + 2.0
    assert (await now(second)).members["a"].incarnation == "2"


@scenario
async def test_the_same_incarnation_takes_its_record_over_at_once(bench):
    dead = await bench.started("a", "1")
    await dead.abandon()
    started_s = time.monotonic()
    again = await bench.started("a", "1")
    assert time.monotonic() - started_s < 0.5 * TTL_S
    await asyncio.sleep(2 * TTL_S)  # sleep: the old lease runs out, and takes nothing with it
    assert (await now(again)).members["a"] == member("a")
    assert again.alive


@scenario
async def test_a_member_goes_at_once_when_it_closes(bench):
    a, b = await bench.started("a"), await bench.started("b")
    assert set((await now(b)).members) == {"a", "b"}
    await a.close()
    _, took_s = await until(b, lambda s: set(s.members) == {"b"})
    assert took_s < TTL_S / 3


@scenario
async def test_a_member_goes_when_its_lease_runs_out(bench):
    lost = []
    a, b = await bench.started("a", on_lost=lost.append), await bench.started("b")
    await a.abandon()
    _, took_s = await until(b, lambda s: set(s.members) == {"b"})
    assert 0.2 * TTL_S < took_s < TTL_S + 1.5
    assert not lost  # it ended by itself


@scenario
async def test_a_coord_has_one_session_and_one_node(bench):
    a = await bench.started("a")
    with pytest.raises(ValueError, match="session already"):
        await a.start(member("a"))
    with pytest.raises(ValueError, match="not of b"):
        await a.put_member(member("b"))
    with pytest.raises(ValueError, match="not of b"):
        await a.propose_world(world(), after_revision=0, member=member("b"))
    assert (await now(a)).world is None


# -------------------------------------------------------------------------------- snapshots


@scenario
async def test_snapshots_come_in_order_and_skip_what_was_overtaken(bench):
    a, reader = await bench.started("a"), bench.coord()
    async with aclosing(reader.snapshots()) as snapshots:
        first = await anext(snapshots)
        assert first.members["a"].slots == 1
        for slots in range(2, 52):
            await a.put_member(member("a", slots=slots))
        seen = [first]
        async with asyncio.timeout(5):
            while seen[-1].members["a"].slots < 51:
                seen.append(await anext(snapshots))
        revisions = [snapshot.revision for snapshot in seen]
        assert revisions == sorted(set(revisions))
        assert len(seen) < 25  # fifty changes while nobody read
        more = asyncio.ensure_future(anext(snapshots))
        done, _ = await asyncio.wait({more}, timeout=0.3)
        assert not done  # no change, no snapshot
        more.cancel()
        await asyncio.wait({more})


@scenario
async def test_a_reader_that_keeps_up_sees_each_change(bench):
    a, reader = await bench.started("a"), bench.coord()
    async with aclosing(reader.snapshots()) as snapshots:
        await anext(snapshots)
        for slots in range(2, 22):
            await a.put_member(member("a", slots=slots))
            async with asyncio.timeout(2):
                assert (await anext(snapshots)).members["a"].slots == slots


@scenario
async def test_two_readers_of_one_coord_see_the_same(bench):
    a = await bench.started("a")
    both = asyncio.gather(
        until(a, lambda s: s.world is not None), until(a, lambda s: s.world is not None)
    )
    await asyncio.sleep(0)
    await a.propose_world(world(), after_revision=0)
    (first, _), (second, _) = await both
    assert first == second


@scenario
async def test_snapshots_end_when_the_coord_is_closed(bench):
    a = await bench.started("a")

    seen = asyncio.Queue()

    async def read():
        async for snapshot in a.snapshots():
            seen.put_nowait(snapshot)

    reading = asyncio.create_task(read())
    async with asyncio.timeout(2):
        await seen.get()
        assert not reading.done()
        await a.close()
        await reading


@scenario
async def test_a_coord_opened_later_sees_the_state(bench):
    a = await bench.started("a")
    await a.put_config({"seed": 1})
    await a.propose_world(world(), after_revision=0)
    await a.request_stop()
    before = await now(a)
    if not before.stop:
        before, _ = await until(a, lambda s: s.stop)
    assert await now(bench.coord()) == before
    assert before.world == world()


@scenario
async def test_jobs_do_not_see_each_other(bench):
    a = await bench.started("a")
    other = await bench.started("a", "2", job=bench.job + "1")  # its name begins with the other's
    await a.propose_world(world(), after_revision=0)
    await a.request_stop()
    await a.put_save(1, 1, "w", {})
    state = await now(other)
    assert (state.world, state.stop, set(state.members)) == (None, False, {"a"})
    assert state.members["a"].incarnation == "2"
    assert await other.list_saves(1, 1) == {}


@pytest.mark.parametrize("name", ["", " ", "a/b", "a b", "a\n"])
def test_a_job_needs_a_plain_name(bench, name):
    with pytest.raises(CoordMisconfigured, match="job name"):
        bench.make(name, None)


# --------------------------------------------------------------------- config, result, stop


@scenario
async def test_the_first_config_holds(bench):
    a, b = bench.coord(), bench.coord()
    held = await asyncio.gather(a.put_config({"by": "a"}), b.put_config({"by": "b"}))
    assert held[0] == held[1]
    assert held[0] in ({"by": "a"}, {"by": "b"})
    assert await bench.coord().put_config({"by": "c"}) == held[0]


@scenario
async def test_a_result_is_written_once_and_for_the_present_world(bench):
    a = await bench.started("a")
    await a.propose_world(world(1), after_revision=0)
    first, _ = await until(a, lambda s: s.world is not None)
    await a.propose_world(world(2), after_revision=first.world_revision)
    second, _ = await until(a, lambda s: s.world.generation == 2)
    assert not await a.write_result({"step": 1}, world_revision=first.world_revision)
    assert (await now(bench.coord())).result is None
    b = bench.coord()
    won = await asyncio.gather(
        a.write_result({"step": 2}, world_revision=second.world_revision),
        b.write_result({"step": 2}, world_revision=second.world_revision),
    )
    assert sorted(won) == [False, True]
    state, _ = await until(a, lambda s: s.result is not None)
    assert state.result == {"step": 2}
    assert not await a.write_result({"step": 3}, world_revision=second.world_revision)
    assert (await now(bench.coord())).result == {"step": 2}


@scenario
async def test_asking_twice_to_stop_is_asking_once(bench):
    a = await bench.started("a")
    assert not (await now(a)).stop
    await a.request_stop()
    await until(a, lambda s: s.stop)
    before = await bench.revision()
    await a.request_stop()
    assert await bench.revision() == before


@scenario
async def test_what_an_ended_attempt_left_is_removed_and_generations_go_on(bench):
    a = await bench.started("a")
    await a.put_config({"seed": 1})
    await a.propose_world(world(7), after_revision=0)
    state, _ = await until(a, lambda s: s.world is not None)
    assert not await a.clear_ended(world_revision=state.world_revision)  # nothing has ended
    assert await a.put_config({"seed": 2}) == {"seed": 1}
    await a.request_stop()
    await a.write_result({"ok": True}, world_revision=state.world_revision)
    await until(a, lambda s: s.result is not None)
    assert not await a.clear_ended(world_revision=state.world_revision + 1)
    b = bench.coord()
    won = await asyncio.gather(
        a.clear_ended(world_revision=state.world_revision),
        b.clear_ended(world_revision=state.world_revision),
    )
    assert sorted(won) == [False, True]
    after, _ = await until(bench.coord(), lambda s: s.result is None)
    assert (after.stop, after.world) == (False, world(7))
    assert await a.put_config({"seed": 2}) == {"seed": 2}


# ------------------------------------------------------------------------------------ saves


@scenario
async def test_saves_are_kept_by_step_and_generation(bench):
    a = bench.coord()
    await a.put_save(1, 2, "w0", {"size": 1})
    await a.put_save(1, 2, "w1", {"size": 2})
    await a.put_save(1, 2, "w1", {"size": 3})
    await a.put_save(1, 20, "w0", {"size": 4})
    await a.put_save(11, 2, "w0", {"size": 5})
    assert await bench.coord().list_saves(1, 2) == {"w0": {"size": 1}, "w1": {"size": 3}}
    await a.delete_saves(1, 2)
    await a.delete_saves(1, 2)
    assert await a.list_saves(1, 2) == {}
    assert await a.list_saves(1, 20) == {"w0": {"size": 4}}
    assert await a.list_saves(11, 2) == {"w0": {"size": 5}}


@scenario
async def test_saves_wake_nobody(bench):
    a = await bench.started("a")
    async with aclosing(bench.coord().snapshots()) as snapshots:
        await anext(snapshots)
        for worker in range(5):
            await a.put_save(1, 1, f"w{worker}", {"size": 1})
        await a.put_member(member("a", leaving=True))
        async with asyncio.timeout(2):
            assert (await anext(snapshots)).members["a"].leaving  # the next one is this


@scenario
async def test_the_last_answer_is_dated(bench):
    a = await bench.started("a")
    assert 0 <= time.monotonic() - a.last_answer_at_s < 1.0
    await asyncio.sleep(a.ttl_s)  # sleep: a span of time is what is tested
    assert time.monotonic() - a.last_answer_at_s < 0.7 * a.ttl_s
