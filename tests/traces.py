"""Reads what tests/programs/traced.py wrote, and compares a run with the undisturbed one."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Line = dict[str, Any]


@dataclass
class Traces:
    """All lines of one run.

    steps: worker -> its lines of applied steps, in its order.
    leaves: (step, leaf) -> the different things that were said of it.
    """

    steps: dict[str, list[Line]] = field(default_factory=dict)
    leaves: dict[tuple[int, int], list[Line]] = field(default_factory=lambda: defaultdict(list))

    def of_step(self, step: int) -> dict[str, Line]:
        """Return worker -> line of one step."""
        return {
            w: line for w, lines in self.steps.items() for line in lines if line["step"] == step
        }

    @property
    def last(self) -> int:
        """The last step that anybody applied."""
        return max(line["step"] for lines in self.steps.values() for line in lines)


def read_traces(directory: Path) -> Traces:
    """Return what the workers of a run wrote; the line that a kill tore is left out."""
    found = Traces()
    for path in sorted(directory.glob("*.jsonl")):
        lines = found.steps.setdefault(path.stem, [])
        for text in path.read_text().split("\n")[:-1]:
            line = json.loads(text)
            if "leaf" not in line:
                lines.append(line)
                continue
            said = found.leaves[line["step"], line["leaf"]]
            if line not in said:
                said.append(line)
    return found


def check_equal(
    run: Traces, undisturbed: Traces, survivors: Iterable[str], *, whole: bool = True
) -> None:
    """Assert that all workers had at every step what the undisturbed run had at it.

    Parameters, buffers, data cursor, hyperparameters, user state, and the optimizer state of every
    segment a worker holds; samples and random numbers of every micro-batch. No worker applies a
    step twice or leaves one out, and (`whole`) at the last step all segments are held.
    """
    (alone,) = undisturbed.steps.values()
    expected = {line["step"]: line for line in alone}
    for worker, lines in run.steps.items():
        steps = [line["step"] for line in lines]
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True, (
            worker,
            steps,
        )
        for line in lines:
            compare(line, expected[line["step"]], worker)
    assert run.last == undisturbed.last
    last = run.of_step(run.last)
    assert set(survivors) <= last.keys(), "a survivor has not applied the last step"
    held = {s for worker in survivors for s in last[worker]["optimizer"]}
    assert not whole or held == expected[run.last]["optimizer"].keys(), "optimizer state was lost"
    for key, said in undisturbed.leaves.items():
        assert run.leaves[key] == said, f"micro-batch {key}"
    assert run.leaves.keys() == undisturbed.leaves.keys()


def compare(line: Line, expected: Line, worker: str) -> None:
    """Assert that a worker's line is the expected one, as far as it holds segments."""
    what = f"{worker} after step {line['step']}"
    for segment, checksum in line["optimizer"].items():
        assert checksum == expected["optimizer"][segment], f"{what}: optimizer, segment {segment}"
    for key in expected.keys() - {"optimizer"}:
        assert line[key] == expected[key], f"{what}: {key}"
