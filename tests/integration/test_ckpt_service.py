"""The save service: what it promises the agent, with real processes, files and an object store."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import ckpt
from chaos.s3_server import S3Server
from ckpt.arena import ArenaReader, create_fd
from ckpt.errors import CheckpointError, Corrupt, Misconfigured
from ckpt.tier_object import S3Tier
from ckpt.uploader import PART_BYTES, PARTS_IN_FLIGHT
from ckpt.writer import PackSource
from tests.ckpt_support import Proxy, Watched, assert_holds, make_state, make_workers
from tests.support import eventually

pytestmark = pytest.mark.integration

BUCKET = "saves"
STATE = make_state({"w": ("float32", (3000, 100)), "b": ("bfloat16", (70,)), "s": ("int64", ())})
BIG = make_state({"w": ("float32", (90, 100_000))})


def on_loop(test):
    """Run an async test; its service is ended whatever happens."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket(BUCKET)
        yield server


class running:  # noqa: N801 - reads as a clause
    """A started service with workers attached; ended at the end of the block."""

    def __init__(self, tmp_path, workers=(), **other):
        self.watched = Watched(tmp_path, **other)
        self.workers = workers

    async def __aenter__(self):
        await self.watched.service.start()
        self.watched.attach(self.workers)
        return self.watched

    async def __aexit__(self, *_):
        self.watched.service.kill()
        await self.watched.service.close(0.0)
        assert not self.watched.service.running


def manifests(root):
    return sorted(str(p.relative_to(root)) for p in Path(root).rglob("manifest.json"))


@on_loop
async def test_a_save_is_committed_locally_then_remotely_and_restores_from_either(tmp_path, s3):
    workers = make_workers(STATE, 3)
    url = f"s3://{BUCKET}/both"
    options = s3.storage_options()
    async with running(tmp_path, workers, remote=url, options=options) as saves:
        entries = await saves.save(workers, STATE, 5, extra={"epoch": 1, "lr": 0.1})
        assert all(len(json.dumps(e)) < 64_000 for e in entries.values())
        for worker in workers:  # the local file is enough
            kinds = [e["t"] for e in saves.events if e.get("worker_id") == worker.worker_id]
            assert kinds[0] == "written"
        freed = await saves.wait("half_free", 3)
        uploaded = saves.of("uploaded")
        assert not uploaded or saves.events.index(freed[0]) < saves.events.index(uploaded[0])
        saves.service.commit(5, 1, list(entries), entries)
        (first,) = await saves.wait("committed", tiers=["local"])
        assert (first["tier"], first["final"]) == ("local", False)
        (last,) = await saves.wait("committed", tiers=["local", "remote"])
        assert (last["tier"], last["final"]) == ("remote", True)
        assert last["manifest"] == f"{url}/step-000000005/g0001/manifest.json"
        assert len(saves.of("uploaded")) == 3
        assert saves.of("failed") == []
        assert await saves.service.close(10.0)
    before = s3.bytes_sent(BUCKET)
    for roots in ([saves.local, url], [url]):
        with ckpt.open_latest(roots, options=options) as checkpoint:
            assert_holds(checkpoint, STATE)
            assert checkpoint.extra == {"epoch": 1, "lr": 0.1}
            assert checkpoint.report == []
    sent = s3.bytes_sent(BUCKET) - before
    assert sent <= 1.05 * sum(len(data) for _, data in STATE.values()) + 20_000


@on_loop
async def test_many_saves_take_turns_in_the_two_halves(tmp_path):
    workers = make_workers(STATE, 2)
    async with running(tmp_path, workers) as saves:
        for step in range(1, 9):
            entries = await saves.save(workers, STATE, step)
            saves.service.commit(step, 1, list(entries), entries)
            for worker in workers:
                for half in worker.arena.busy_halves():
                    if saves.of("half_free", worker_id=worker.worker_id):
                        worker.arena.release(half)
        await saves.wait("committed", 8)
        assert len(manifests(saves.local)) == 8
        assert [e["step"] for e in saves.of("committed")] == sorted(
            e["step"] for e in saves.of("committed")
        )


CHILD = """
import random, sys
from ckpt.arena import Arena, half_bytes_for
from ckpt.slices import TensorSlice
fd, rows = int(sys.argv[1]), int(sys.argv[2])
piece = TensorSlice("w", "uint8", (rows, 1000), 0, rows)
arena = Arena(fd, half_bytes_for([piece]))
for step in range(1, 10_000):
    half = arena.stage(
        step=step, generation=1, pieces=[(piece, bytes([step % 251]) * piece.nbytes)],
        extra={"step": step}, segments=[0], num_segments=1, lineage=[[1, 0]],
    )
    print(step, half, flush=True)
    if len(sys.argv) > 3:
        sys.stdin.read()
    arena.release(half)
"""


def stager(fd, rows, *more):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(fd), str(rows), *more],
        pass_fds=(fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@on_loop
async def test_what_a_worker_staged_is_saved_after_its_death(tmp_path):
    fd = create_fd()
    with stager(fd, 500, "wait") as child:
        step, half = map(int, child.stdout.readline().split())
        child.kill()
    async with running(tmp_path) as saves:
        saves.service.attach("n.0-aa", fd)
        saves.service.save("n.0-aa", half, step, 1)
        (event,) = await saves.wait("written")
        saves.service.commit(step, 1, ["n.0-aa"], [event["entry"]])
        await saves.wait("committed")
    with ckpt.open_latest([saves.local]) as checkpoint:
        assert checkpoint.read("w").tobytes() == bytes([step]) * 500_000
    os.close(fd)


def test_a_worker_killed_at_any_moment_of_staging_leaves_whole_halves_or_none():
    rng = random.Random(3)
    whole = torn = 0
    for _ in range(12):
        fd = create_fd()
        with stager(fd, 4000) as child:
            assert child.stdout.readline() == "1 0\n"
            time.sleep(  # sleep: the moment of the kill
                rng.random() * 0.03
            )  # sleep: the moment of the kill, not a wait for something
            child.kill()
        reader = ArenaReader(fd)
        assert reader.sealed(1) is None  # it had no need of the second half
        sealed = reader.sealed(0)
        if sealed is None:
            torn += 1
        else:
            source = PackSource(reader, sealed, job="j", worker_id="n.0-aa")
            for _ in source.chunks(1 << 20):
                pass
            offset, nbytes = sealed.footer.offsets[0], sealed.footer.slices[0].nbytes
            assert (sealed.data[offset : offset + nbytes] == sealed.step % 251).all()
            whole += 1
        reader.close()
        os.close(fd)
    assert whole + torn == 12
    assert whole > 0


@pytest.mark.parametrize("what", ["directory", "bucket", "credentials"])
@on_loop
async def test_a_place_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, s3, what):
    options = s3.storage_options()
    (tmp_path / "file").write_text("")
    settings = {
        "directory": ({"local": str(tmp_path / "file" / "x")}, "file/x"),
        "bucket": ({"remote": "s3://no-such-bucket/x"}, "no-such-bucket"),
        "credentials": ({"remote": f"s3://{BUCKET}/x"}, "AWS_SECRET_ACCESS_KEY"),
    }
    if what == "credentials":
        options["secret"] = "wrong"
    other, words = settings[what]
    watched = Watched(tmp_path, options=options, **other)
    with pytest.raises(Misconfigured, match=words) as error:
        await watched.service.start()
    assert "\n" not in str(error.value)
    assert not watched.service.running
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "save.log"]
    tier = S3Tier(f"s3://{BUCKET}/x", options=s3.storage_options())
    assert tier.list_dir("") == tier.open_uploads() == []
    tier.close()


@on_loop
async def test_a_store_that_was_away_gets_its_checkpoint_when_it_is_back(tmp_path, s3):
    workers = make_workers(STATE, 2)
    url = f"s3://{BUCKET}/away"
    with Proxy(s3.endpoint_url) as proxy:
        options = s3.storage_options() | {"endpoint_url": proxy.url}
        async with running(tmp_path, workers, remote=url, options=options) as saves:
            proxy.away = True
            entries = await saves.save(workers, STATE, 5)
            saves.service.commit(5, 1, list(entries), entries)
            await saves.wait("committed", tiers=["local"])
            await asyncio.to_thread(eventually, lambda: proxy.refused > 3, what="a few attempts")
            assert saves.of("uploaded") == saves.of("failed") == []
            proxy.away = False
            await saves.wait("committed", tiers=["local", "remote"])
            assert saves.of("failed") == []
    with ckpt.open_latest([url], options=s3.storage_options()) as checkpoint:
        assert_holds(checkpoint, STATE)


@on_loop
async def test_a_broken_remote_does_not_touch_the_local_checkpoint(tmp_path):
    workers = make_workers(STATE, 2)
    remote = tmp_path / "remote"
    async with running(tmp_path, workers, remote=str(remote)) as saves:
        remote.rmdir()
        remote.write_text("in the way")
        entries = await saves.save(workers, STATE, 5)
        saves.service.commit(5, 1, list(entries), entries)
        (done,) = await saves.wait("committed")
        assert (done["tiers"], done["final"]) == (["local"], False)
        failed = await saves.wait("failed", 2, tier="remote")
        assert {e["worker_id"] for e in failed} == set(entries)
        assert not any(e["lost"] for e in failed)
        (lost,) = await saves.wait("failed", worker_id=None)
        assert (lost["kind"], lost["lost"]) == ("upload-failed", True)
        remote.unlink()
        for worker in workers:
            worker.arena.release(0)
        entries = await saves.save(workers, STATE, 6)
        saves.service.commit(6, 1, list(entries), entries)
        await saves.wait("committed", step=6, tiers=["local", "remote"])
    with ckpt.open_latest([str(remote)]) as checkpoint:
        assert_holds(checkpoint, STATE)


@on_loop
async def test_a_broken_local_disk_does_not_touch_the_remote_checkpoint(tmp_path):
    workers = make_workers(STATE, 2)
    remote = tmp_path / "remote"
    async with running(tmp_path, workers, remote=str(remote)) as saves:
        Path(saves.local).rmdir()
        Path(saves.local).write_text("in the way")
        for worker in workers:
            saves.service.save(worker.worker_id, worker.stage(STATE, 5), 5, 1)
        failed = await saves.wait("failed", 2, tier="local")
        assert not any(e["lost"] for e in failed)
        uploaded = await saves.wait("uploaded", 2)
        await saves.wait("half_free", 2)
        entries = [e["entry"] for e in uploaded]
        saves.service.commit(5, 1, [e["worker_id"] for e in entries], entries)
        (done,) = await saves.wait("committed")
        assert (done["tiers"], done["final"]) == (["remote"], True)
    with ckpt.open_latest([str(remote)]) as checkpoint:
        assert_holds(checkpoint, STATE)


@on_loop
async def test_without_a_local_place_the_half_stays_until_the_upload_has_ended(tmp_path, s3):
    workers = make_workers(STATE, 2)
    url = f"s3://{BUCKET}/only"
    options = s3.storage_options()
    async with running(tmp_path, workers, local=None, remote=url, options=options) as saves:
        for worker in workers:
            saves.service.save(worker.worker_id, worker.stage(STATE, 5), 5, 1)
        uploaded = await saves.wait("uploaded", 2)
        await saves.wait("half_free", 2)
        kinds = [e["t"] for e in saves.events]
        assert kinds.index("uploaded") < kinds.index("half_free")
        entries = [e["entry"] for e in uploaded]
        saves.service.commit(5, 1, [e["worker_id"] for e in entries], entries)
        await saves.wait("committed", tiers=["remote"])
    with ckpt.open_latest([url], options=options) as checkpoint:
        assert_holds(checkpoint, STATE)


@on_loop
async def test_nothing_is_committed_while_a_segment_is_missing_or_of_another_generation(tmp_path):
    workers = make_workers(STATE, 2)
    async with running(tmp_path, workers) as saves:
        old = await saves.save(workers[:1], STATE, 5, generation=1)
        new = await saves.save(workers[1:], STATE, 5, generation=2)
        both = [*old.values(), *new.values()]
        for generation in (1, 2):
            saves.service.commit(5, generation, [w.worker_id for w in workers], both)
            (failed,) = await saves.wait("failed", generation=generation)
            assert failed["kind"] == "incomplete"
            assert "lacks segments" in failed["error"]
        assert manifests(saves.local) == []
    assert ckpt.open_latest([saves.local]) is None


@on_loop
async def test_extra_values_that_differ_between_workers_are_refused(tmp_path):
    workers = make_workers(STATE, 2)
    async with running(tmp_path, workers) as saves:
        entries = {}
        for i, worker in enumerate(workers):
            entries |= await saves.save([worker], STATE, 5, extra={"rank": i})
            saves.events.clear()
        saves.service.commit(5, 1, list(entries), entries)
        (failed,) = await saves.wait("failed")
        assert "differ in extra" in failed["error"]


@on_loop
async def test_dropping_a_save_removes_its_packs_but_no_committed_checkpoint(tmp_path):
    workers = make_workers(STATE, 2)
    remote = tmp_path / "remote"
    async with running(tmp_path, workers, remote=str(remote)) as saves:
        entries = await saves.save(workers, STATE, 5)
        saves.service.commit(5, 1, list(entries), entries)
        await saves.wait("committed", tiers=["local", "remote"])
        for worker in workers:
            worker.arena.release(0)
        await saves.save(workers, STATE, 6)
        saves.service.drop(6, 1)
        await saves.wait("dropped", step=6)
        saves.service.drop(5, 1)
        await saves.wait("dropped", step=5)
        for root in (Path(saves.local), remote):
            assert [p.name for p in root.iterdir()] == ["step-000000005"]
            with ckpt.open_latest([str(root)]) as checkpoint:
                assert_holds(checkpoint, STATE)


@on_loop
async def test_two_agents_with_their_own_disks_commit_one_checkpoint(tmp_path, s3):
    workers = [*make_workers(STATE, 4)]
    mine, theirs = workers[:2], workers[2:]
    url = f"s3://{BUCKET}/two"
    options = s3.storage_options()
    async with (
        running(tmp_path, mine, node="a", remote=url, options=options) as a,
        running(tmp_path, theirs, node="b", remote=url, options=options) as b,
    ):
        entries = await a.save(mine, STATE, 5)
        # a commits before b has uploaded anything: its remote commit waits for the packs of b
        later = {w.worker_id: w.stage(STATE, 5) for w in theirs}
        for worker in theirs:
            reader = ArenaReader(worker.fd)
            source = PackSource(
                reader,
                reader.sealed(later[worker.worker_id]),
                job="job",
                worker_id=worker.worker_id,
            )
            for _ in source.chunks(1 << 20):
                pass
            entries[worker.worker_id] = source.entry("b")
            reader.close()
        a.service.commit(5, 1, list(entries), entries)
        await a.wait("committed", tiers=["local"])
        await a.wait("uploaded", 2)
        assert a.of("committed", tier="remote") == []
        for worker in theirs:
            b.service.save(worker.worker_id, later[worker.worker_id], 5, 1)
        await b.wait("written", 2)
        b.service.commit(5, 1, list(entries), entries)
        await b.wait("committed", tiers=["local", "remote"])
        await a.wait("committed", tiers=["local", "remote"])
        assert a.of("failed") == b.of("failed") == []
    for roots in ([a.local, url], [a.local, b.local], [url]):
        with ckpt.open_latest(roots, options=options) as checkpoint:
            assert_holds(checkpoint, STATE)
    with pytest.raises(Corrupt, match="2 packs are missing"):
        ckpt.open_latest([a.local])


@on_loop
async def test_orders_that_make_no_sense_are_answered_loudly(tmp_path):
    workers = make_workers(STATE, 1)
    async with running(tmp_path, workers) as saves:
        saves.service.save("n.9-zz", 0, 5, 1)
        assert (await saves.wait("failed"))[0]["kind"] == "arena-unknown"
        saves.service.save("n.0-aa", 1, 5, 1)
        assert (await saves.wait("failed", kind="arena-torn"))[0]["lost"]
        await saves.wait("half_free", half=1)
        half = workers[0].stage(STATE, 5)
        saves.service.save("n.0-aa", half, 6, 1)  # another step than was staged
        await saves.wait("failed", step=6, kind="arena-torn")
        saves.service.save("n.0-aa", half, 5, 1)
        await saves.wait("written", step=5)


@on_loop
async def test_a_service_that_is_killed_says_so_and_can_be_replaced(tmp_path):
    workers = make_workers(STATE, 2)
    async with running(tmp_path, workers) as saves:
        entries = await saves.save(workers, STATE, 5)
        os.kill(saves.service.pid, signal.SIGKILL)
        await saves.wait("died")
        with pytest.raises(CheckpointError, match="not running"):
            saves.service.save("n.0-aa", 0, 5, 1)
    async with running(tmp_path, workers, sweep=False) as again:
        for worker in workers:  # still in the arenas
            again.service.save(worker.worker_id, 0, 5, 1)
        await again.wait("written", 2)
        again.service.commit(5, 1, list(entries), entries)
        await again.wait("committed")
    with ckpt.open_latest([again.local]) as checkpoint:
        assert_holds(checkpoint, STATE)


@on_loop
async def test_closing_ends_at_its_deadline_and_says_what_was_cut_off(tmp_path, s3):
    workers = make_workers(STATE, 1)
    url = f"s3://{BUCKET}/late"
    with Proxy(s3.endpoint_url) as proxy:
        options = s3.storage_options() | {"endpoint_url": proxy.url}
        async with running(tmp_path, workers, remote=url, options=options) as saves:
            proxy.away = True
            await saves.save(workers, STATE, 5)
            began_s = time.monotonic()
            assert not await saves.service.close(0.5)
            assert time.monotonic() - began_s < 10
            assert saves.service.unfinished == ["save of step 5 of n.0-aa"]


AGENT = """
import asyncio, sys
from ckpt.service import SaveService
async def main():
    service = SaveService(job="j", node="n", local=sys.argv[1], remote=None, on_event=print)
    await service.start()
    print(service.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_agent(tmp_path, how):
    command = [sys.executable, "-c", AGENT, str(tmp_path / "local")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        process = psutil.Process(int(agent.stdout.readline()))
        agent.send_signal(how)
    eventually(lambda: not process.is_running(), what="the end of the service")


def test_a_stopped_one_dies_with_its_agent_too(tmp_path):
    command = [sys.executable, "-c", AGENT, str(tmp_path / "local")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        process = psutil.Process(int(agent.stdout.readline()))
        process.suspend()
        agent.kill()
    eventually(lambda: not process.is_running(), what="the end of the stopped service")


def test_it_is_not_started_by_hand():
    done = subprocess.run(
        [sys.executable, "-m", "ckpt.service"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "the save service is started by an agent, not by hand\n"


@on_loop
async def test_memory_stays_bounded_when_packs_are_large(tmp_path, s3):
    """A pack of 36 MB in parts: the service holds parts, not packs."""
    workers = make_workers(BIG, 1)
    url = f"s3://{BUCKET}/large"
    options = s3.storage_options()
    async with running(tmp_path, workers, remote=url, options=options) as saves:
        process = psutil.Process(saves.service.pid)
        memory = process.memory_info()
        before = memory.rss - memory.shared
        for step in range(1, 5):
            entries = await saves.save(workers, BIG, step)
            saves.service.commit(step, 1, list(entries), entries)
            await saves.wait("committed", step=step, tier="remote")
            for half in workers[0].arena.busy_halves():
                workers[0].arena.release(half)
        memory = process.memory_info()
        sent = 4 * len(BIG["w"][1])
        allowed = (PARTS_IN_FLIGHT + 2) * PART_BYTES
        assert memory.rss - memory.shared - before < allowed < sent
