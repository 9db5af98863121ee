"""A script as a user would write it, for tests that start it as a process of its own.

Options come as one JSON object: what elastic.run() is given, and under "train" what to train.
"""

from __future__ import annotations

import json
import os
import sys

import elastic
from tests.programs import hanging, hidden, small


class Kept:
    """A class of the script itself, part of the job's state."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def train(ctx: elastic.Context, options: dict[str, object]) -> dict[str, object]:
    kept = ctx.state("kept", Kept())

    def count() -> None:
        kept.calls += 1

    ctx.on_step(count)
    if ctx.is_main and options.pop("say", False):
        sys.stdout.write("hello from the main worker\n")
    program = {"small": small, "hidden": hidden, "hanging": hanging}[
        str(options.pop("program", "small"))
    ]
    value = program.train(ctx, **options)
    return {**value, "applied": kept.calls}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    wanted = given.pop("train", {})
    again = given.pop("again", None)
    result = elastic.run(train, args=(dict(wanted),), **given)
    told = {
        "value": result.value,
        "step": result.step,
        "generation": result.generation,
        "events": result.events_path,
        "pid": os.getpid(),
    }
    if again is not None:
        second = elastic.run(train, args=(dict(again.pop("train")),), **again)
        told = {"value": second.value, "step": second.step, "first": result.value}
    sys.stdout.write(json.dumps(told) + "\n")
