"""Weights and optimizer state are the same bits in every history of a job."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ckpt.frames import send_frame
from elastic.membership.messages import Mode
from tests.covering import all_pairs, covering, pairs_of
from tests.local_world import LocalWorld, WorkerProcess
from tests.programs import matrix
from tests.traces import Traces, check_equal, read_traces

pytestmark = pytest.mark.integration

STEPS = 26
JOB: dict[str, tuple[Any, ...]] = {  # what is fixed for a job
    "model": tuple(matrix.MODELS),
    "optimizer": tuple(matrix.OPTIMIZERS),
    "clip": (False, True),
    "schedule": (False, True),
    "autocast": (False, True),
    "scaler": (False, True),
    "recompute": (False, True),
    "accumulate": (1, 2),
}
WANDERING = "4-3-2-4-1-3"
HISTORIES = ("2", "3", "4", "5", WANDERING)
FACTORS = {**JOB, "history": HISTORIES}
ROWS = covering(FACTORS)


class Wanderer:
    """A World that shrinks and grows, one change after the other."""

    def __init__(self, world: LocalWorld) -> None:
        self.world = world
        self.spares = world.spawn(4, first=False)
        world.until(lambda: all(spare.said("ready") for spare in self.spares))

    def wander(self) -> None:
        """Go 4-3-2-4-1-3 by a kill, a drain, a join of two, two drains and a kill, and a join."""
        for change in (self.kill, self.drain, self.join, self.drain, self.drain, self.kill):
            change()
        self.join()

    def _settled(self) -> list[WorkerProcess]:
        """Wait until the World has its first agreement and has done a step or two more."""
        world = self.world
        assert world.world is not None
        generation = world.world.generation
        world.until(
            lambda: all(
                any(m["generation"] == generation for m in w.said("formed"))
                for w in world.members()
            )
        )
        members = world.members()
        world.wait_step(max(page.step for w in members if (page := w.page.read()) is not None))
        return members

    def kill(self) -> None:
        members = self._settled()
        victim = members[len(members) // 2]
        self.world.kill(victim)
        self.world.form([w for w in members if w is not victim])

    def drain(self) -> None:
        members = self._settled()
        leaver = members[0]
        world = self.world.form(members[1:], Mode.BOUNDARY)
        send_frame(leaver.sock, {"t": "world", "world": world.to_dict()})
        self.world.until(lambda: leaver.status is not None)
        assert leaver.status is not None
        assert leaver.status >> 8 == 3

    def join(self) -> None:
        members = self._settled()
        coming, self.spares = self.spares[:2], self.spares[2:]
        self.world.form([*members, *coming], Mode.BOUNDARY)


def run(history: str, **job: Any) -> tuple[dict[str, Any], Traces, list[str], set[int]]:
    """Return value, traces, who was there at the end, and the sizes of all Worlds."""
    accumulate, threads = job.pop("accumulate", 1), job.pop("threads", 1)
    workers = int(history.partition("-")[0])
    wanders = "-" in history
    with TemporaryDirectory() as name:
        kwargs = {**job, "steps": STEPS, "traces": f"{name}/traces"}
        world = LocalWorld(
            Path(name),
            matrix.train,
            kwargs={**kwargs, "pause_s": 0.01} if wanders else kwargs,
            nproc=workers,
            virtual_ranks=6,
            segments=10,
            accumulate=accumulate,
            threads=threads,
        )
        try:
            wanderer = Wanderer(world) if wanders else None
            first = world.spawn(workers)
            world.until(lambda: all(w.said("ready") or w.status is not None for w in first))
            world.form(first)
            if wanderer is not None:
                wanderer.wander()
            value = world.finish()
            members = [w.worker_id for w in world.members()]
            formed = [e for e in world.events() if e["event"] == "reshape.finished"]
            worlds: dict[int, set[str]] = {}
            for event in formed:
                worlds.setdefault(event["generation"], set()).add(event["worker_id"])
            return (
                value,
                read_traces(Path(name) / "traces"),
                members,
                {len(w) for w in worlds.values()},
            )
        finally:
            world.close()


@cache
def alone(**job: Any) -> tuple[dict[str, Any], Traces]:
    value, traces, _, _ = run("1", **job)
    return value, traces


def check(history: str, **job: Any) -> None:
    """Compare a history with one worker alone: value, and at every step all that a worker has."""
    value, traces, members, sizes = run(history, **job)
    expected, undisturbed = alone(**job)
    assert sizes == {int(size) for size in history.split("-")}
    assert value == expected
    check_equal(traces, undisturbed, members)


def named(row: dict[str, Any]) -> str:
    said = [f"{value}" for name, value in row.items() if name in ("model", "optimizer", "history")]
    said += [name for name in JOB if row[name] is True or (name, row[name]) == ("accumulate", 2)]
    return "-".join(said)


@pytest.mark.parametrize("row", [pytest.param(row, id=named(row)) for row in ROWS])
def test_every_pair_of_what_may_change_the_bits(row: dict[str, Any]) -> None:
    check(**row)


def test_the_rows_hold_every_pair() -> None:
    wanted = all_pairs(FACTORS)
    assert len(wanted) == 271
    assert wanted - set().union(*map(pairs_of, ROWS)) == set()
    assert len(ROWS) <= 32


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "optimizer"), list(product(JOB["model"], JOB["optimizer"])))
@pytest.mark.parametrize("options", range(2 ** (len(JOB) - 2)))
def test_every_history_of_every_job(model: str, optimizer: str, options: int) -> None:
    names = list(JOB)[2:]
    job = {name: JOB[name][options >> k & 1] for k, name in enumerate(names)}
    for history in HISTORIES:
        check(history, model=model, optimizer=optimizer, **job)
    alone.cache_clear()


def test_two_threads_are_another_job_with_equal_bits_in_all_its_worlds() -> None:
    job = {"model": "gpt", "optimizer": "adamw", "threads": 2}
    check(WANDERING, **job)
    assert alone(**job)[0]["threads"] == 2


COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)]  # minutes of C++


@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("history", ["3", WANDERING])
def test_a_compiled_model_in_every_world(history: str, compiler: str) -> None:
    check(history, model="odd", optimizer="adamw", compiler=compiler)
