"""The step protocol in real processes: equal bits whatever failed, joined or left on the way."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from elastic.agent.progress import WorkerPhase
from elastic.membership.messages import Mode
from tests.local_world import LocalWorld
from tests.programs import small

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

CONFIG = {"virtual_ranks": 8, "segments": 8}


def run(
    workers: int, script: Callable[[LocalWorld], None] | None = None, **kwargs: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the small program on a World of that size; `script` may disturb it."""
    with TemporaryDirectory() as directory:
        world = LocalWorld(Path(directory), small.train, kwargs=kwargs, nproc=workers, **CONFIG)
        try:
            world.start(workers)
            if script is not None:
                script(world)
            return world.finish(), world.events()
        finally:
            world.close()


@cache
def undisturbed(**kwargs: Any) -> dict[str, Any]:
    return run(1, **kwargs)[0]


def committed(events: list[dict[str, Any]]) -> dict[int, set[str]]:
    """Return step -> what was published about it (one entry if all workers agree)."""
    steps: dict[int, set[str]] = {}
    for event in events:
        if event["event"] == "step.committed":
            said = f"{event['epoch']} {event['log']} {event['samples']} {event['lr']}"
            steps.setdefault(event["step"], set()).add(said)
    return steps


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_world_size_gives_the_same_bits(workers: int) -> None:
    value, events = run(workers, epochs=2)
    assert value == undisturbed(epochs=2)
    steps = committed(events)
    assert sorted(steps) == list(range(1, value["step"] + 1))
    assert all(len(said) == 1 for said in steps.values()), "workers published different values"


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop", "adagrad", "adafactor"])
def test_optimizers_on_an_odd_model_through_a_kill(optimizer: str) -> None:
    kwargs = {"steps": 14, "model": "odd", "optimizer": optimizer}

    def script(world: LocalWorld) -> None:
        world.wait_step(4)
        world.kill(world.workers[1])
        world.form(world.alive)

    value, _ = run(3, script, pause_s=0.01, **kwargs)
    assert value == undisturbed(**kwargs)
    assert value["tied"]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_costs_no_committed_step(victim: int) -> None:
    def script(world: LocalWorld) -> None:
        world.wait_step(6)
        world.kill(world.workers[victim])
        world.form(world.alive)

    value, events = run(4, script, steps=24, pause_s=0.01)
    assert value == undisturbed(steps=24)
    assert max(e["generation"] or 0 for e in events) == 2
    steps = committed(events)
    assert sorted(steps) == list(range(1, 25))
    assert all(len(said) == 1 for said in steps.values())
    redone = [e["step"] for e in events if e["event"] == "step.redone"]
    assert len(set(redone)) <= 1, "at most one step is computed again"


def test_killed_and_joined_again_in_the_middle_of_an_epoch() -> None:
    def script(world: LocalWorld) -> None:
        world.wait_step(3)
        world.kill(world.workers[0])
        survivors = world.alive
        world.form(survivors)
        joiner = world.spawn(first=False)[0]
        world.until(lambda: bool(joiner.said("ready")))
        world.form([*survivors, joiner], Mode.BOUNDARY)
        world.until(lambda: bool(joiner.said("formed")))

    value, events = run(3, script, epochs=4, pause_s=0.03)
    assert value == undisturbed(epochs=4)
    joined = [e for e in events if e["event"] == "reshape.finished" and e["generation"] == 3]
    assert len(joined) == 3, "two survivors and the joiner completed an agreement together"


def test_a_second_death_during_recovery() -> None:
    def script(world: LocalWorld) -> None:
        world.wait_step(5)
        world.until(lambda: all(w.said("formed") for w in world.workers))
        world.kill(world.workers[3])
        world.form(world.alive)
        world.kill(world.workers[1])
        world.form(world.alive)

    value, _ = run(4, script, steps=24, pause_s=0.01)
    assert value == undisturbed(steps=24)


def test_a_death_after_others_have_finished_loses_nothing() -> None:
    def script(world: LocalWorld) -> None:
        world.until(lambda: any(w.said("finished") for w in world.workers))
        world.kill(world.workers[2])
        world.form(world.alive)

    value, _ = run(3, script, steps=10, pause_s=0.01)
    assert value == undisturbed(steps=10)


def test_a_worker_that_was_voted_out_leaves_with_the_fenced_code() -> None:
    def script(world: LocalWorld) -> None:
        world.wait_step(4)
        out = world.workers[1]
        rest = [w for w in world.alive if w is not out]
        told = world.form(rest)
        from ckpt.frames import send_frame

        send_frame(out.sock, {"t": "world", "world": told.to_dict()})
        world.until(lambda: out.status is not None)
        assert out.status is not None
        assert out.status >> 8 == 3

    value, _ = run(3, script, steps=20, pause_s=0.01)
    assert value == undisturbed(steps=20)


def test_loader_processes_do_not_change_the_result() -> None:
    def script(world: LocalWorld) -> None:
        world.wait_step(3)
        world.kill(world.workers[1])
        world.form(world.alive)

    value, _ = run(3, script, epochs=2, loader_workers=1, pause_s=0.01)
    assert value == undisturbed(epochs=2)


def test_a_joiner_that_comes_in_right_after_an_evaluation_does_not_repeat_it() -> None:
    def script(world: LocalWorld) -> None:
        joiner = world.spawn(first=False)[0]
        world.until(lambda: bool(joiner.said("ready")))

        def evaluating() -> bool:
            pages = [w.page.read() for w in world.workers[:2]]
            return all(p is not None and p.phase is WorkerPhase.EVALUATE for p in pages)

        world.until(evaluating)
        world.form([*world.workers[:2], joiner], Mode.BOUNDARY)

    value, events = run(2, script, epochs=3, pause_s=0.01, evaluate_s=0.1)
    assert value == undisturbed(epochs=3)
    joined = [e for e in events if e["event"] == "reshape.finished" and e["generation"] == 2]
    assert len(joined) == 3
    assert {e["base"] for e in joined} == {"survivors"}


def test_stop_ends_all_workers_after_the_same_step() -> None:
    value, events = run(3, epochs=3, stop_at=9)
    assert value["step"] == 10
    assert value == undisturbed(epochs=3, stop_at=9)
    assert sorted(committed(events)) == list(range(1, 11)), "the last step is committed too"


def test_a_slow_worker_gets_fewer_micro_batches_and_the_bits_stay() -> None:
    value, events = run(3, steps=24, pause_s=0.01, slow_rank=1)
    assert value == undisturbed(steps=24)
    changes = [e for e in events if e["event"] == "shares.changed"]
    assert changes, "the slow worker was seen"
    assert changes[0]["before"] == [3, 3, 2]
    assert changes[-1]["counts"][1] == min(changes[-1]["counts"]) < 3
    assert sum(changes[-1]["counts"]) == 8


def test_a_nan_gradient_skips_the_step_on_all_workers() -> None:
    value, events = run(3, steps=12, poison_at=5)
    assert value == undisturbed(steps=12, poison_at=5)
    assert value != undisturbed(steps=12)
    skipped = [e for e in events if e["event"] == "step.skipped"]
    assert [e["step"] for e in skipped] == [6, 6, 6]


def test_a_joiner_is_answered_with_evaluations_that_were_made_before_it_came() -> None:
    def script(world: LocalWorld) -> None:
        world.wait_step(3)
        world.kill(world.workers[0])
        survivors = world.alive
        world.form(survivors)
        joiner = world.spawn(first=False)[0]
        world.until(lambda: bool(joiner.said("ready")))
        world.form([joiner, *survivors], Mode.BOUNDARY)

    value, _ = run(2, script, epochs=6, pause_s=0.05, evaluate_first=True)
    assert value == undisturbed(epochs=6, evaluate_first=True)
    assert len(value["curve"]) == 7
