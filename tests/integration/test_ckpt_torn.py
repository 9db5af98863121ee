"""The save service killed at any moment of a save: step k or k-1 is there, whole, no other."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import ckpt
from chaos.s3_server import S3Server
from ckpt.tier_object import S3Tier
from tests.ckpt_support import Watched, assert_holds, make_state, make_workers

pytestmark = pytest.mark.integration

KILLS = 30
SHAPES = {"w": ("float32", (2000, 600)), "m": ("float32", (2000, 600)), "s": ("int64", ())}
LARGE = {"w": ("uint8", (36, 1_000_000))}


async def save_and_kill(saves, workers, state, step, kill_after_s):
    """One save; SIGKILL so long after it began, or after its commit. (committed, how long)."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    pid = saves.service.pid
    killer = None
    if kill_after_s is not None:
        killer = loop.call_later(kill_after_s, os.kill, pid, signal.SIGKILL)
    for worker in workers:
        half = worker.stage(state, step)
        saves.service.save(worker.worker_id, half, step, 1)
    final = "remote" if saves.remote else "local"
    ordered = False
    while not saves.of("died"):
        assert saves.of("failed") == []
        entries = {e["worker_id"]: e["entry"] for e in saves.of("written", step=step)}
        if len(entries) == len(workers) and not ordered and saves.service.running:
            ordered = True
            saves.service.commit(step, 1, list(entries), entries)
        if saves.of("committed", tier=final) and kill_after_s is None:
            break
        await saves.changed(0.5)
    took_s = loop.time() - began_s
    if killer is not None:
        killer.cancel()
    else:
        os.kill(pid, signal.SIGKILL)
        await saves.wait("died")
    for worker in workers:
        for half in worker.arena.busy_halves():
            worker.arena.release(half)
    return bool(saves.of("committed", tier=final)), took_s


async def rounds(tmp_path, shapes, kills, **other):
    """Kill after kill into the same places; what each has left is looked at before the next."""
    workers = make_workers(make_state(shapes), 2)
    roots = [other["remote"]] if other.get("remote") else [str(tmp_path / "local-n")]
    options = other.get("options")
    last, whole_s, seen = 0, None, []
    states = {}
    for step in range(1, kills + 2):
        saves = Watched(tmp_path, **other)
        await saves.service.start()
        saves.attach(workers)
        states[step] = make_state(shapes, seed=step)
        unhurt = step == 1
        share = 1.2 * (step - 2) / max(kills - 1, 1)
        delay_s = None if unhurt or whole_s is None else share * whole_s
        committed, took_s = await save_and_kill(saves, workers, states[step], step, delay_s)
        await saves.service.close(0.0)
        whole_s = took_s if unhurt else whole_s
        with ckpt.open_latest(roots, options=options) as found:
            assert found.step in (last, step), (
                f"step {found.step} after {last}, while saving {step}"
            )
            assert found.step == step or not committed
            assert_holds(found, states[found.step])
            assert found.extra == {"step": found.step}
            assert found.report == []
            seen.append(found.step == step)
            last = found.step
    return seen


def test_killed_at_any_moment_of_a_local_save(tmp_path):
    seen = asyncio.run(rounds(tmp_path, SHAPES, KILLS))
    assert len(seen) == KILLS + 1
    assert seen[0]  # the one that was left alone until it was committed
    assert not seen[1]  # killed at once
    root = tmp_path / "local-n"
    swept = Watched(tmp_path)

    async def sweep():
        await swept.service.start()
        await swept.service.close(5.0)

    asyncio.run(sweep())
    for place in sorted(root.glob("step-*/g*")):
        assert (place / "manifest.json").exists(), place
        assert len(list(place.glob("packs/*"))) == 2
    assert len(list(root.glob("step-*/g*"))) == sum(seen)
    assert list(root.rglob("*.tmp")) == []


@pytest.mark.slow
def test_killed_in_the_middle_of_an_upload(tmp_path):
    with S3Server(tmp_path / "s3") as server:
        server.create_bucket("torn")
        options = server.storage_options()
        url = "s3://torn/job"
        asyncio.run(rounds(tmp_path, LARGE, 5, remote=url, options=options))
        swept = Watched(tmp_path, remote=url, options=options)

        async def sweep():
            await swept.service.start()
            await swept.service.close(5.0)

        asyncio.run(sweep())
        tier = S3Tier(url, options=options)
        assert tier.open_uploads() == []
        tier.close()
        assert not list(Path(tmp_path / "local-n").glob(".uploads/*"))
