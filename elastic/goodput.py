"""How much of the workers' time went into steps that count, from the events of a run.

Worker-seconds are counted from `worker.started` to the end of that worker (or of the log).
Productive are those of committed steps: their duration times the size of the World that agreed on
them. A step that is redone counts once, with the duration of the try that was committed. The
finer ledger (reshaping, stalled by a save, waiting for data or members) is not made here yet.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Worker-seconds of a run, in all and in committed steps."""

    worker_s: float
    productive_s: float

    @property
    def share(self) -> float | None:
        """Productive share, 0 to 1; None if no worker ever ran."""
        return min(1.0, self.productive_s / self.worker_s) if self.worker_s > 0 else None


def measure(events: Iterable[Mapping[str, Any]]) -> Goodput:
    """Sum up the events of one run, given in the order of their time."""
    started_s: dict[str, float] = {}
    ended_s: dict[str, float] = {}
    world_size: dict[int, int] = {}
    step_s: dict[int, float] = {}
    last_s = 0.0
    for event in events:
        at_s = float(event.get("t_mono_s") or 0.0)
        last_s = max(last_s, at_s)
        worker_id = event.get("worker_id")
        match event["event"]:
            case "worker.started" if worker_id:
                started_s.setdefault(worker_id, at_s)
            case "worker.exited" if worker_id:
                ended_s.setdefault(worker_id, at_s)
            case "generation.formed":
                world_size[event["generation"]] = len(event["workers"])
            case "step.committed":
                workers = world_size.get(event["generation"], 1)
                # Every worker tells of the step; the slowest one's time is the step's.
                spent_s = float(event["duration_s"]) * workers
                step_s[event["step"]] = max(spent_s, step_s.get(event["step"], 0.0))
            case _:
                pass
    worker_s = sum(ended_s.get(w, last_s) - at_s for w, at_s in started_s.items())
    return Goodput(worker_s=worker_s, productive_s=sum(step_s.values()))
