"""From what the demo saw to its report: the figures, the verdict, and the story of the page.

The verdict is a list of broken promises, each one sentence; an empty list is the only good end. A
promise is judged by what the event files, the checkpoints and the server's own counters say, never
by what the demo meant to do. Nothing here reads a file or a clock.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.compare_checkpoints import Comparison
from scripts.report_charts import Mark, WorldSpan
from scripts.report_page import Story
from scripts.run_facts import (
    Fault,
    Record,
    committed,
    full_strength_s,
    measure,
    step_ms,
    steps_lost,
    tokens_per_s,
    worlds,
)

LOSS_STEPS = 10
"""The loss of one step is noisy: first and last loss are means over so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the demo set out to do."""

    size: str
    batch_size: int
    workers: int
    virtual_ranks: int
    first_steps: int
    more_steps: int
    restored_workers: int
    save_every: int
    kill_after: int
    loss_below: float

    @property
    def all_steps(self) -> int:
        """Steps of the job, both parts together."""
        return self.first_steps + self.more_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What there was to see: events of each part, comparisons, the server's count."""

    first: Sequence[Record]
    second: Sequence[Record]
    undisturbed: Sequence[Record]
    faults: Sequence[Fault]
    comparisons: Sequence[tuple[str, Comparison]]
    bytes_from_s3: int


def tell(plan: Plan, seen: Seen, surroundings: Mapping[str, Any]) -> Story:
    """Return the report and what the page draws.

    Args:
        surroundings: `command`, `commit`, `torch`, `cpu_count`, `duration_s`.
    """
    steps = {**committed(seen.first), **committed(seen.second)}
    losses = [(s.step, float(s.log["loss"])) for s in steps.values() if "loss" in s.log]
    plain = [(s.step, float(s.log["loss"])) for s in committed(seen.undisturbed).values() if s.log]
    restored = [r for r in seen.second if r["event"] == "restore.finished"]
    report: dict[str, Any] = {
        "committed_steps": len(steps),
        "steps_lost": _lost(seen),
        "recoveries": [found for fault in seen.faults if (found := _recovery(seen.first, fault))],
        "faults": len(seen.faults),
        "bit_equal_to_undisturbed": _all_equal(seen.comparisons),
        "restored_step": max((int(r["step"]) for r in restored), default=None),
        "restored_world_size": _restored_size(seen.second, restored),
        "restored_bytes_from_s3": seen.bytes_from_s3,
        "restored_bytes_by_workers": sum(int(r["bytes_read"]) for r in restored),
        "tokens_per_s": _rounded(tokens_per_s(seen.first)),
        "loss_first": _rounded(_mean([v for _, v in losses[:LOSS_STEPS]]), 4),
        "loss_last": _rounded(_mean([v for _, v in losses[-LOSS_STEPS:]]), 4),
        "loss_below": plan.loss_below,
        "step_ms_by_world": _step_times(plan, seen),
        "workers": plan.workers,
        "virtual_ranks": plan.virtual_ranks,
        "comparisons": [_comparison(what, found) for what, found in seen.comparisons],
        **surroundings,
    }
    report["broken_promises"] = broken_promises(plan, report)
    report["summary"] = (
        f"{report['committed_steps']} steps, none lost: through a SIGKILL, and through a restore "
        f"from S3 alone with {report['restored_world_size']} workers, every bit is that of the "
        "undisturbed run"
    )
    return Story(
        report=report,
        loss=losses,
        undisturbed=plain,
        marks=_marks(plan, seen, report),
        worlds=_spans([seen.first, seen.second]),
    )


def broken_promises(plan: Plan, report: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each promise that was not kept."""
    broken = []
    if report["committed_steps"] != plan.all_steps:
        broken.append(
            f"{report['committed_steps']} steps were committed instead of {plan.all_steps}"
        )
    if report["steps_lost"]:
        broken.append(f"{report['steps_lost']} committed steps were lost")
    if not report["faults"] or len(report["recoveries"]) != report["faults"]:
        broken.append(f"{report['faults']} faults, but {len(report['recoveries'])} recoveries")
    broken += [
        f"after the {r['cause']} the World never had {r['world_before']} workers again"
        for r in report["recoveries"]
        if r["full_strength_s"] is None
    ]
    if report["restored_step"] != plan.first_steps:
        broken.append(
            f"the second part began from step {report['restored_step']}, not from the last "
            f"committed one, {plan.first_steps}"
        )
    if report["restored_world_size"] != plan.restored_workers:
        broken.append(f"it was restored with {report['restored_world_size']} workers")
    least = min((c["bytes"] for c in report["comparisons"]), default=1)
    if report["restored_bytes_from_s3"] < least:
        broken.append(
            f"the S3 server has sent {report['restored_bytes_from_s3']} bytes, fewer than the "
            f"state has ({least}): something came from elsewhere"
        )
    if not report["bit_equal_to_undisturbed"]:
        what = [d for c in report["comparisons"] for d in c["differences"]][:1] or ["not compared"]
        broken.append(f"the state differs from the undisturbed run's ({what[0]})")
    if report["loss_last"] is None or not report["loss_last"] < plan.loss_below:
        broken.append(f"the loss ended at {report['loss_last']}, not below {plan.loss_below}")
    return broken


def _lost(seen: Seen) -> int:
    """Count steps that were committed and did not stay, within the parts and between them."""
    first, second = committed(seen.first), committed(seen.second)
    ends = max(first, default=0)
    begins = min(second, default=ends + 1)
    again = max(0, ends - begins + 1)  # the second part did them anew
    skipped = max(0, begins - ends - 1)
    return steps_lost(seen.first) + again + skipped + steps_lost(seen.second, first=begins)


def _recovery(events: Sequence[Record], fault: Fault) -> dict[str, Any] | None:
    found = measure(events, fault)
    if found is None:
        return None
    # A step is published when the next one is agreed, so the one that was being computed is not
    # the next to be published. Where nothing had to be computed again, it is what follows.
    again = [
        int(r["step"])
        for r in events
        if r["event"] == "step.redone" and r["generation"] == found.generation
    ]
    after = again or [s.step + 1 for s in committed(events).values() if s.at_s > fault.at_s]
    slots = {r["worker_id"]: int(r["slot"]) for r in events if r["event"] == "worker.started"}
    return {
        "cause": f"{fault.signal} of worker {slots.get(fault.worker_id, '?')}",
        "step": min(after, default=None),
        "world_before": found.world_before,
        "world_after": found.world_after,
        "detect_ms": _rounded(found.parts_ms["detect"]),
        "reshape_ms": _rounded(found.reshape_ms),
        "redone_step_ms": _rounded(found.parts_ms["redo"]),
        "total_ms": _rounded(found.total_ms),
        "full_strength_s": _rounded(full_strength_s(events, fault), 2),
        "split_ms": {name: _rounded(ms) for name, ms in found.parts_ms.items()},
        "heal_bytes": found.heal_bytes,
    }


def _all_equal(comparisons: Sequence[tuple[str, Comparison]]) -> bool:
    return bool(comparisons) and all(found.equal for _, found in comparisons)


def _comparison(what: str, found: Comparison) -> dict[str, Any]:
    return {
        "step": found.step,
        "what": what,
        "parameters": found.parameters,
        "optimizer": found.optimizer,
        "rng": found.rng,
        "cursor": found.cursor,
        "other": found.other,
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "digest": found.digest,
        "differences": list(found.differences),
    }


def _restored_size(events: Sequence[Record], restored: Sequence[Record]) -> int | None:
    """Return the size of the World in which the state was read."""
    generations = {int(r["generation"]) for r in restored}
    sizes = [w.size for w in worlds(events) if w.generation in generations]
    return sizes[-1] if sizes else None


def _step_times(plan: Plan, seen: Seen) -> dict[str, float | None]:
    sizes = {
        plan.workers: step_ms(seen.first, size=plan.workers),
        plan.workers - 1: step_ms(seen.first, size=plan.workers - 1),
        plan.restored_workers: step_ms(seen.second, size=plan.restored_workers),
    }
    return {str(size): _rounded(ms) for size, ms in sizes.items()}


def _marks(plan: Plan, seen: Seen, report: Mapping[str, Any]) -> list[Mark]:
    saved = {
        int(r["step"])
        for r in seen.first
        if r["event"] == "checkpoint.committed" and int(r["step"]) < plan.first_steps
    }
    marks = [Mark(step=step, kind="saved", label="saved") for step in saved]
    found = [r for r in report["recoveries"] if r["step"] is not None]
    marks += [Mark(step=r["step"], kind="fault", label=r["cause"]) for r in found]
    grown = {
        new.generation for old, new in itertools.pairwise(worlds(seen.first)) if new.size > old.size
    }
    whole = [
        int(r["step"])
        for r in seen.first
        if r["event"] == "step.committed" and r["generation"] in grown
    ]
    if whole:
        label = f"{plan.workers} workers again"
        marks.append(Mark(step=min(whole), kind="joined", label=label))
    if report["restored_step"] is not None:
        label = f"restored from S3 with {report['restored_world_size']} workers"
        marks.append(Mark(step=report["restored_step"], kind="restored", label=label))
    return sorted(marks, key=lambda mark: mark.step)


def _spans(parts: Sequence[Sequence[Record]]) -> list[WorldSpan]:
    spans: list[WorldSpan] = []
    zero_s: float | None = None
    for events in parts:
        known = worlds(events)
        if not known:
            continue
        zero_s = known[0].at_s if zero_s is None else zero_s
        ends = [w.at_s for w in known[1:]] + [
            max(
                float(r["t_mono_s"])
                for r in events
                if r["event"] in ("step.committed", "worker.finished", "generation.formed")
            )
        ]
        spans += [
            WorldSpan(
                from_s=world.at_s - zero_s,
                until_s=end_s - zero_s,
                size=world.size,
                generation=world.generation,
                note=world.reason,
            )
            for world, end_s in zip(known, ends, strict=True)
        ]
    return spans


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)
