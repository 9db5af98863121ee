"""What the events of a run say about its steps, its Worlds and what a fault cost.

Every figure of the demo and of the benchmark comes from here, so that both use one clock rule: a
recovery lasts from the fault's own time stamp to the moment when the *last* survivor has completed
the first agreement of the generation without the victim. All stamps are CLOCK_MONOTONIC of one
host. The parts of a recovery follow each other without gaps, so they add up to the whole:

    fault --detect--> agent knows --agree--> World in force --unblock--> survivors out of their
    collective --rebuild--> new group --heal--> all state in place --redo--> step agreed again

Survivors often leave their collective by themselves before the agent knows (a socket was reset);
`unblock` is then only what is left of it after the World is there.
A fact that the events do not hold is None. Nothing here reads a file or a clock.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]

PARTS = ("detect", "agree", "unblock", "rebuild", "heal", "redo")
RESHAPE_PARTS = ("agree", "unblock", "rebuild", "heal")
TOKENS_KEY = "tokens_per_sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A signal sent to one worker, stamped just before it was sent."""

    worker_id: str
    pid: int
    signal: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One generation as it came into force."""

    generation: int
    at_s: float
    workers: tuple[str, ...]
    reason: str

    @property
    def size(self) -> int:
        """Number of its workers."""
        return len(self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One committed step, as the first worker to publish it told it."""

    step: int
    at_s: float
    generation: int
    samples: int
    log: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What one fault cost, on the last survivor."""

    fault: Fault
    generation: int
    world_before: int
    world_after: int
    finished_at_s: float
    parts_ms: Mapping[str, float]
    heal_bytes: int

    @property
    def total_ms(self) -> float:
        """From the fault to the last survivor's first completed agreement."""
        return 1e3 * (self.finished_at_s - self.fault.at_s)

    @property
    def overhead_ms(self) -> float:
        """All but the step that had to be computed again."""
        return self.total_ms - self.parts_ms["redo"]

    @property
    def reshape_ms(self) -> float:
        """From the moment the agent knew to the moment all state was in place."""
        return sum(self.parts_ms[part] for part in RESHAPE_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Time from one agreement to the next within one generation: a whole step."""

    step: int
    generation: int
    seconds: float
    samples: int


def worlds(events: Iterable[Record]) -> list[World]:
    """Return every World in the order of its generation, each with its first stamp."""
    found: dict[int, World] = {}
    for record in events:
        if record["event"] != "generation.formed":
            continue
        generation = int(record["generation"])
        if generation not in found or record["t_mono_s"] < found[generation].at_s:
            found[generation] = World(
                generation=generation,
                at_s=float(record["t_mono_s"]),
                workers=tuple(_worker_ids(record["workers"])),
                reason=str(record["reason"]),
            )
    return [found[generation] for generation in sorted(found)]


def committed(events: Iterable[Record]) -> dict[int, Step]:
    """Return the committed steps by number; of several tellers the earliest counts."""
    found: dict[int, Step] = {}
    for record in events:
        if record["event"] != "step.committed":
            continue
        step = int(record["step"])
        if step not in found or record["t_mono_s"] < found[step].at_s:
            found[step] = Step(
                step=step,
                at_s=float(record["t_mono_s"]),
                generation=int(record["generation"]),
                samples=int(record["samples"]),
                log=dict(record["log"]),
            )
    return dict(sorted(found.items()))


def steps_lost(events: Sequence[Record], *, first: int = 1) -> int:
    """Count committed steps that did not stay: gaps in the count, and steps told in two ways.

    Args:
        first: the step with which these events should begin.
    """
    told: dict[int, set[str]] = {}
    for record in events:
        if record["event"] == "step.committed":
            said = json.dumps([record["log"], record["samples"], record["epoch"]], sort_keys=True)
            told.setdefault(int(record["step"]), set()).add(said)
    if not told:
        return 0
    gaps = sum(1 for step in range(first, max(told)) if step not in told)
    return gaps + sum(1 for versions in told.values() if len(versions) > 1)


def measure(events: Sequence[Record], fault: Fault) -> Recovery | None:
    """Return what a fault cost, or None while not every survivor is through."""
    known = worlds(events)
    before = [w for w in known if fault.worker_id in w.workers and w.at_s <= fault.at_s]
    if not before:
        return None
    old = before[-1]
    finished = {
        (record["worker_id"], record["generation"]): record
        for record in events
        if record["event"] == "reshape.finished" and record["t_mono_s"] >= fault.at_s
    }
    for world in known:
        if world.generation <= old.generation or fault.worker_id in world.workers:
            continue
        survivors = [w for w in world.workers if w in old.workers]
        ends = [finished.get((w, world.generation)) for w in survivors]
        whole = [end for end in ends if end is not None]
        # A World that another one overtook before all were through is no end of a recovery.
        if survivors and len(whole) == len(survivors):
            return _recovery(events, fault, old, world, whole)
    return None


def full_strength_s(events: Sequence[Record], fault: Fault) -> float | None:
    """Return the time from a fault until as many workers as before are through; None if never."""
    known = worlds(events)
    before = [w for w in known if fault.worker_id in w.workers and w.at_s <= fault.at_s]
    for world in known:
        if not before or world.generation <= before[-1].generation or world.size < before[-1].size:
            continue
        ends = {
            record["worker_id"]: float(record["t_mono_s"])
            for record in events
            if record["event"] == "reshape.finished" and record["generation"] == world.generation
        }
        if set(world.workers) <= set(ends):
            return max(ends.values()) - fault.at_s
    return None


def _recovery(
    events: Sequence[Record], fault: Fault, old: World, world: World, ends: Sequence[Record]
) -> Recovery:
    last = max(ends, key=lambda record: float(record["t_mono_s"]))
    end_s = float(last["t_mono_s"])
    healed_s = end_s - last["redo_ms"] / 1e3
    built_s = healed_s - (last["heal_ms"] + last["recover_ms"]) / 1e3
    began_s = built_s - last["rebuild_ms"] / 1e3
    # A process is written down as gone when it is reaped; it counts as dead from an earlier moment.
    seen_s = [
        float(record.get("noticed_at_s") or record["t_mono_s"])
        for record in events
        if record["event"] == "worker.exited" and record.get("worker_id") == fault.worker_id
    ]
    # A worker hears of a World before its agent has written the event: never beyond `began_s`.
    formed_s = min(world.at_s, began_s)
    detected_s = min([*seen_s, formed_s])
    stamps = (fault.at_s, detected_s, formed_s, began_s, built_s, healed_s, end_s)
    spans = [1e3 * (b - a) for a, b in itertools.pairwise(stamps)]
    return Recovery(
        fault=fault,
        generation=world.generation,
        world_before=old.size,
        world_after=world.size,
        finished_at_s=end_s,
        parts_ms=dict(zip(PARTS, spans, strict=True)),
        heal_bytes=sum(int(record["heal_bytes"]) for record in ends),
    )


def periods(events: Iterable[Record]) -> list[Period]:
    """Return the undisturbed steps: time between publications of neighbours in one generation.

    Told by each generation's first rank. A step is published when the next one is agreed, so the
    time between two publications is a whole step, its gather and the code of the loop included.
    """
    by_generation: dict[int, dict[int, Record]] = {}
    for record in events:
        if record["event"] == "step.committed" and record["rank"] == 0:
            by_generation.setdefault(int(record["generation"]), {})[int(record["step"])] = record
    found = []
    for generation, steps in sorted(by_generation.items()):
        for step in sorted(steps):
            following = steps.get(step + 1)
            if following is not None:
                seconds = float(following["t_mono_s"]) - float(steps[step]["t_mono_s"])
                found.append(
                    Period(
                        step=step + 1,
                        generation=generation,
                        seconds=seconds,
                        samples=int(following["samples"]),
                    )
                )
    return found


def step_ms(events: Sequence[Record], *, size: int) -> float | None:
    """Return the median undisturbed step of all Worlds of one size, their first steps left out."""
    sizes = {world.generation: world.size for world in worlds(events)}
    seen: set[int] = set()
    times = []
    for period in periods(events):
        first = period.generation not in seen
        seen.add(period.generation)
        if sizes.get(period.generation) == size and not first:
            times.append(1e3 * period.seconds)
    return statistics.median(times) if times else None


def tokens_per_s(events: Sequence[Record]) -> float | None:
    """Return the median rate over undisturbed steps; None if the loop logs no tokens."""
    each = next(
        (step.log[TOKENS_KEY] for step in committed(events).values() if TOKENS_KEY in step.log),
        None,
    )
    rates = [p.samples / p.seconds for p in periods(events) if p.seconds > 0]
    return None if each is None or not rates else float(each) * statistics.median(rates)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that `share` of all do not exceed (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _worker_ids(workers: Iterable[Any]) -> list[str]:
    return [str(w["worker_id"]) if isinstance(w, Mapping) else str(w) for w in workers]
