"""State besides weights and moments: it moves with the steps, survives kills, resumes and joins."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from tests.local_world import LocalWorld
from tests.programs import hidden

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

CONFIG = {"virtual_ranks": 8, "segments": 8, "guard_every": 3}


def run(
    workers: int, script: Callable[[LocalWorld], None] | None = None, **kwargs: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with TemporaryDirectory() as directory:
        world = LocalWorld(Path(directory), hidden.train, kwargs=kwargs, nproc=workers, **CONFIG)
        try:
            world.start(workers)
            if script is not None:
                script(world)
            return world.finish(), world.events()
        finally:
            world.close()


def failure(workers: int, **kwargs: Any) -> list[dict[str, Any]]:
    """Run until all workers have failed; returns what each of them said."""
    with TemporaryDirectory() as directory:
        world = LocalWorld(Path(directory), hidden.train, kwargs=kwargs, nproc=workers, **CONFIG)
        try:
            world.start(workers)
            world.until(lambda: not world.alive)
            return [w.said("failed")[-1] for w in world.workers if w.said("failed")]
        finally:
            world.close()


@cache
def alone(**kwargs: Any) -> tuple[dict[str, Any], dict[int, dict[str, float]]]:
    value, events = run(1, **kwargs)
    return value, logs(events)


def logs(events: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return step -> logged values; workers that differ fail the test."""
    found: dict[int, dict[str, float]] = {}
    for event in events:
        if event["event"] == "step.committed":
            assert found.setdefault(event["step"], event["log"]) == event["log"]
    return found


def kill_and_join(world: LocalWorld) -> None:
    world.wait_step(4)
    victim = world.members()[1]
    world.kill(victim)
    world.form([w for w in world.members() if w.status is None])
    world.wait_step(6)
    (joiner,) = world.spawn(first=False)
    world.until(lambda: bool(joiner.said("ready")))
    world.form([*[w for w in world.members() if w.status is None], joiner])


@pytest.mark.parametrize("options", [{}, {"late_average": True}], ids=["early", "late"])
def test_averages_and_counters_survive_a_kill_and_a_join(options: dict[str, Any]) -> None:
    value, events = run(3, kill_and_join, steps=14, pause_s=0.02, **options)
    expected, said = alone(steps=14)
    assert value == expected
    assert logs(events) == said, "each virtual rank has its own counter wherever it runs"
    assert value["averaged"] == 14


def test_a_joiner_without_a_micro_batch_gets_what_is_prepared_in_the_loop_body() -> None:
    def join_in_the_tail(world: LocalWorld) -> None:
        (joiner,) = world.spawn(first=False)
        world.until(lambda: bool(joiner.said("ready")))
        world.wait_step(6)  # the seventh is short: 11 samples are left for 8 micro-batches
        world.form([*[w for w in world.members() if w.status is None], joiner])

    value, _ = run(2, join_in_the_tail, steps=10, pause_s=0.15, late_average=True)
    assert value == alone(steps=10)[0]


def test_a_gradient_scaler_is_updated_once_per_agreed_step() -> None:
    options = {"steps": 14, "scaler": True, "explode_at": 6}
    value, events = run(3, kill_and_join, pause_s=0.02, **options)
    assert value == alone(**options)[0]
    # grown at steps 3, shrunk at 6, grown at 10: 2^10 * 2 / 2 * 2
    assert value["scale"]["scale"] == 2.0**11
    skipped = {e["step"] for e in events if e["event"] == "step.skipped"}
    assert skipped == {7}, "step numbers of events are counts: the step with index 6 is the 7th"


def test_a_power_of_two_scale_changes_no_bit() -> None:
    assert alone(steps=8, scaler=True)[0]["digest"] == alone(steps=8)[0]["digest"]


def test_global_state_that_differs_between_workers_is_named() -> None:
    failures = failure(2, steps=8, seen_scope="global")
    assert len(failures) == 2
    for said in failures:
        assert "the global state 'seen' differs between workers" in said["message"]
        assert "scope='virtual_rank'" in said["message"]
        assert said["kind"] == "user"


def test_a_gradient_that_never_gets_finite_ends_the_run() -> None:
    with TemporaryDirectory() as directory:
        config = {**CONFIG, "max_nonfinite_steps": 3}
        world = LocalWorld(
            Path(directory), hidden.train, kwargs={"steps": 20, "poison_from": 4}, nproc=2, **config
        )
        try:
            world.start(2)
            world.until(lambda: not world.alive)
            said = [w.said("failed")[-1]["message"] for w in world.workers]
        finally:
            world.close()
    assert said == [said[0]] * 2
    assert "not finite in 3 steps one after the other, up to step 6" in said[0]
