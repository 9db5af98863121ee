"""Fewer micro-batches for slower workers: shares that follow measured compute time.

Every worker says in the agreement of a step how long it computed, so all of them know the same
times and come to the same shares. The result of the training does not depend on shares; only how
long the slowest worker takes does. Shares change rarely: measured over several full steps, only
for a clear gain, and not again soon.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WARM_UP_STEPS = 3
"""Full steps of a World that are not measured: first allocations, caches, compilation."""
MEASURED_STEPS = 5
"""Full steps measured before the shares may change for the first time in a World. After each
change twice as many: on a busy machine every measurement says something else."""
MEASURED_STEPS_MAX = 640
MIN_GAIN = 0.15
"""Part of the step's longest computation that a change must save."""
_FORGET = 0.3


def fair_counts(seconds: Sequence[float], total: int) -> list[int]:
    """Return how many of `total` equal pieces each worker gets; the longest time is minimal.

    Args:
        seconds: per worker, what one piece takes; positive.
        total: at least the number of workers; each gets one or more, so that it stays measured.

    Raises:
        ValueError: there are fewer pieces than workers.
    """
    if total < len(seconds):
        raise ValueError(f"{total} pieces for {len(seconds)} workers")
    counts = [1] * len(seconds)
    for _ in range(total - len(seconds)):
        best = min(range(len(seconds)), key=lambda w: ((counts[w] + 1) * seconds[w], w))
        counts[best] += 1
    return counts


class Balance:
    """Times of one World's workers, by rank, and when their shares should change."""

    def __init__(self, num_workers: int) -> None:
        self._skip = WARM_UP_STEPS
        self._seen = 0
        self._needed = MEASURED_STEPS
        self._seconds: list[float] = [0.0] * num_workers

    def observe(self, seconds: Sequence[float], counts: Sequence[int]) -> None:
        """Take one full step.

        Args:
            seconds: per rank, how long it computed.
            counts: per rank, how many pieces that were.
        """
        if self._skip:
            self._skip -= 1
            return
        for rank, (took, count) in enumerate(zip(seconds, counts, strict=True)):
            if count:
                each = took / count
                old = self._seconds[rank]
                self._seconds[rank] = each if old == 0.0 else old + _FORGET * (each - old)
        self._seen += 1

    def decide(self, counts: Sequence[int]) -> list[int] | None:
        """Return new counts by rank, or None to leave them; a change starts a new measurement."""
        if self._seen < self._needed or min(self._seconds) <= 0.0 or sum(counts) < len(counts):
            return None
        new = fair_counts(self._seconds, sum(counts))
        longest = max(c * s for c, s in zip(counts, self._seconds, strict=True))
        shorter = max(c * s for c, s in zip(new, self._seconds, strict=True))
        if shorter > longest * (1.0 - MIN_GAIN):
            return None
        self._seen = 0
        self._skip = 1
        self._needed = min(2 * self._needed, MEASURED_STEPS_MAX)
        return new
