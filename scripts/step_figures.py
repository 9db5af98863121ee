"""From the logged steps of programs that took turns to the figures of `bench.py step`.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

WARM_UP_BLOCKS = 1


def step_ms(records: Sequence[Record]) -> dict[int, list[float]]:
    """Return per block the duration of each step on its slowest rank, the first step left out.

    The first step of a block meets caches that another program has filled; the first block of a
    program is left out whole.
    """
    by_rank: dict[int, dict[int, list[float]]] = {}
    for record in records:
        if "duration_s" in record:
            blocks = by_rank.setdefault(int(record["rank"]), {})
            blocks.setdefault(int(record["block"]), []).append(1e3 * float(record["duration_s"]))
    found: dict[int, list[float]] = {}
    for block in sorted({block for blocks in by_rank.values() for block in blocks}):
        ranks = [blocks.get(block, []) for blocks in by_rank.values()]
        steps = [max(times) for times in zip(*ranks, strict=False)]
        if len(steps) > 1:
            found[block] = steps[1:]
    return dict(list(found.items())[WARM_UP_BLOCKS:])


def peak_mb(records: Sequence[Record]) -> float | None:
    """Return the largest resident set of any worker of a program."""
    peaks = [float(record["peak_kb"]) / 1024 for record in records if "peak_kb" in record]
    return round(max(peaks), 1) if peaks else None


def ratio(
    ours: Mapping[int, Sequence[float]], peer: Mapping[int, Sequence[float]]
) -> dict[str, Any]:
    """Return the ratio of the medians, and the quartiles of the ratios of neighbouring blocks."""
    pairs = zip(ours.values(), peer.values(), strict=False)
    each = sorted(statistics.median(a) / statistics.median(b) for a, b in pairs)
    quarter = len(each) // 4
    return {
        "ratio": round(median(ours) / median(peer), 3),
        "quartiles": [round(each[quarter], 3), round(each[-1 - quarter], 3)],
    }


def median(blocks: Mapping[int, Sequence[float]]) -> float:
    """Return the median over all steps of all blocks."""
    return statistics.median(value for steps in blocks.values() for value in steps)
