"""Programs that take turns on one machine: each computes a block of steps while the others wait.

The turn is one small file, replaced whole: the name of who computes, and the number of the block.
Whoever has done the steps of its block waits until the file names it again. So steps of different
programs are interleaved, and none slows another one down.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

POLL_S = 0.002
BLOCK_STEPS = 6


class Turn:
    """One process's view of the turn.

    Args:
        directory: where the turn's file and the logs are.
        name: of the program that this process belongs to.
    """

    def __init__(self, directory: str, name: str, rank: int) -> None:
        self._path = Path(directory) / "turn"
        self._name = name
        self._block = -1
        self._left = 0
        self._began_s: float | None = None
        self._log = (Path(directory) / f"{name}-{rank}.jsonl").open("a", buffering=1)
        self._rank = rank

    def step(self) -> None:
        """Call where a step begins: logs the one before, and waits for the turn if it is over."""
        now_s = time.monotonic()
        if self._began_s is not None:
            self._say(block=self._block, duration_s=now_s - self._began_s, at_s=now_s)
        if self._left == 0:
            self._wait()
        self._left -= 1
        self._began_s = time.monotonic()

    def last(self, **facts: Any) -> None:
        """Call when the last step is over."""
        now_s = time.monotonic()
        if self._began_s is not None:
            self._say(block=self._block, duration_s=now_s - self._began_s, at_s=now_s)
        self._say(**facts)
        self._log.close()

    def _wait(self) -> None:
        while True:
            name, block = read(self._path)
            if name == self._name and block > self._block:
                self._block, self._left = block, BLOCK_STEPS
                return
            time.sleep(POLL_S)

    def _say(self, **facts: Any) -> None:
        self._log.write(json.dumps({"rank": self._rank, **facts}) + "\n")


def read(path: Path) -> tuple[str, int]:
    """Return whose turn it is, and the number of the block."""
    try:
        name, _, block = path.read_text().partition(" ")
    except FileNotFoundError:
        return "", -1
    return name, int(block)


def give(directory: Path, name: str, block: int) -> None:
    """Give the turn to a program."""
    new = directory / "turn.new"
    new.write_text(f"{name} {block}")
    os.replace(new, directory / "turn")


def records(directory: Path, name: str) -> list[dict[str, Any]]:
    """Return what all processes of a program have logged; a torn last line is left out."""
    found: list[dict[str, Any]] = []
    for path in sorted(directory.glob(f"{name}-*.jsonl")):
        found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return found
