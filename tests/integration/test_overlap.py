"""Gradients leave during the last backward; what the loop body does to them afterwards counts."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.local_world import LocalWorld
from tests.programs import rude

pytestmark = pytest.mark.integration


def run(workers: int, *, overlap: bool, **kwargs: Any) -> tuple[dict[str, Any], list[int]]:
    """Return the value and the steps that were computed twice."""
    config = {"virtual_ranks": 6, "segments": 5, "guard_every": 100, "overlap": overlap}
    with TemporaryDirectory() as directory:
        world = LocalWorld(Path(directory), rude.train, kwargs=kwargs, nproc=workers, **config)
        try:
            world.start(workers)
            value = world.finish()
            redone = {e["step"] for e in world.events() if e["event"] == "step.redone"}
            return value, sorted(redone)
        finally:
            world.close()


@pytest.mark.parametrize("how", ["clamp", "data", "twice", "replace", "drop"])
def test_changed_gradients_are_noticed_and_the_step_is_computed_again(how: str) -> None:
    expected, none = run(1, overlap=False, how=how)
    assert none == []
    value, redone = run(3, overlap=True, how=how)
    assert value == expected
    assert redone == [1], "once; after that nothing is taken early"


def test_a_loop_that_begins_to_change_gradients_later_is_noticed_then() -> None:
    expected, _ = run(1, overlap=False, how="clamp", since=5)
    value, redone = run(3, overlap=True, how="clamp", since=5)
    assert value == expected
    assert redone == [6]


@pytest.mark.parametrize("workers", [1, 3])
def test_gradients_made_by_hand_are_as_good(workers: int) -> None:
    expected, _ = run(1, overlap=False, how="by hand")
    value, redone = run(workers, overlap=True, how="by hand")
    assert value == expected
    assert redone == []
