"""Where the data of a job stands, and what one step consists of.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The place of the next step.

    Args:
        epoch: pass over the data, from 0.
        index: steps of this epoch that are applied.
        closed: the epoch's closing agreement is complete; the code after the loop runs.
    """

    epoch: int = 0
    index: int = 0
    closed: bool = False

    def after_step(self) -> Position:
        """Return the position once one more step is applied."""
        return replace(self, index=self.index + 1, closed=False)

    def after_close(self) -> Position:
        """Return the position once the epoch's closing agreement is complete."""
        return replace(self, closed=True)

    def next_epoch(self) -> Position:
        """Return the start of the next epoch."""
        return Position(epoch=self.epoch + 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"epoch": self.epoch, "index": self.index, "closed": self.closed}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Self:
        """Undo `to_dict`."""
        return cls(epoch=plain["epoch"], index=plain["index"], closed=plain["closed"])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step to compute: how many samples each leaf has.

    Args:
        step: number of the step, from 1.
        epoch: pass over the data.
        index: place within the epoch, from 0.
        counts: samples per leaf; empty leaves are at the end.
        full: samples of a full micro-batch.
    """

    step: int
    epoch: int
    index: int
    counts: tuple[int, ...]
    full: int

    @property
    def present(self) -> int:
        """Number of leaves that are not empty."""
        return sum(1 for n in self.counts if n)

    @property
    def total_weight(self) -> float:
        """What the sum of weighted leaves is divided by."""
        return sum(self.weight(leaf) for leaf in range(len(self.counts)))

    def weight(self, leaf: int) -> float:
        """Weight of a leaf: 1 for a full micro-batch, its share of one for a short one."""
        return self.counts[leaf] / self.full if self.counts[leaf] != self.full else 1.0
