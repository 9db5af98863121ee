"""What every worker says in the agreement of a step, and what all of them conclude from it.

The agreement is one small collective that completes at a worker only if every worker of the
generation entered it. Its result is the list of all payloads in rank order; everything that may
differ between workers (clip coefficient, learning rate, whether the step counts, logged means,
saving, stopping, moving to the next generation) is a function of that list alone, so all workers
reach the same conclusion, and the result can be handed to a worker that missed it.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from elastic.digest import add

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic.step.recovery import Agreement


VOID = "void"
"""Kind of the agreement of a step that some worker calls void: nobody applies it, all redo it."""


class Read(NamedTuple):
    """Samples read from one loader.

    Args:
        loader: its place among the prepared ones.
        epoch, part: which step of which epoch.
        samples: how many.
        digest: hash of their numbers (elastic/digest.py), None when they have none.
    """

    loader: int
    epoch: int
    part: int
    samples: int
    digest: int | None

    def plain(self) -> list[Any]:
        """Return it as it stands in the event log."""
        return [*self[:4], None if self.digest is None else f"{self.digest:016x}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRecord:
    """What one micro-batch contributed besides its gradient.

    Args:
        samples: number of samples in it.
        log: values given to `ctx.log`, as floats.
        state: name -> new plain state, for state per virtual rank that the body changed.
        reads: what was read from each loader.
    """

    samples: int
    log: Mapping[str, float]
    state: Mapping[str, Any] = field(default_factory=dict)
    reads: Sequence[Read] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One worker's part of an agreement.

    Args:
        norms: segment -> squared 2-norm of its finished gradient, for segments it is primary of.
        touched: bit i set if a leaf of this worker touched trainable parameter i.
        leaves: leaf -> record, for the leaves it computed.
        hyper: parameter groups' values at `optimizer.step()`, from the worker of leaf 0.
        scheduler_calls: scheduler index -> recorded `step()` calls, from the worker of leaf 0.
        scaler_updates: gradient scalers whose `update()` was recorded, from the worker of leaf 0.
        clip: (max_norm) given to `ctx.clip_grad_norm_`, from the worker of leaf 0.
        pending_generation: the newest World this worker knows.
        stop, save, busy: wishes; `busy` = no half of the arena is free.
        save_last: wish to save the step before this agreement, as it is now.
        saved: what this worker knows of the save that all wait for: {"ok": bool, "step": int or
            None}; empty while it knows nothing.
        values: results of an evaluation, virtual rank -> name -> (sum, count).
        guard: what is equal on all workers that have it -> checksum.
        seconds: how long this worker computed its micro-batches.
        unclaimed: names of global objects whose state it has, and that were not registered yet.
    """

    norms: Mapping[int, float] = field(default_factory=dict)
    touched: int = 0
    leaves: Mapping[int, LeafRecord] = field(default_factory=dict)
    hyper: Sequence[Any] | None = None
    scheduler_calls: Mapping[int, int] | None = None
    scaler_updates: Sequence[int] | None = None
    clip: float | None = None
    pending_generation: int = 0
    stop: bool = False
    save: bool = False
    save_last: bool = False
    saved: Mapping[str, Any] = field(default_factory=dict)
    busy: bool = False
    values: Mapping[int, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    guard: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    unclaimed: Sequence[str] = ()

    def encode(self, agreement_seq: int, kind: str, step: int) -> bytes:
        """Return the bytes this worker sends; what says nothing is left out."""
        touched = self.touched.to_bytes((self.touched.bit_length() + 7) // 8, "little")
        said = {
            "norms": list(self.norms.items()),
            "touched": touched,
            "leaves": [
                [i, r.samples, dict(r.log), dict(r.state), list(r.reads)]
                for i, r in self.leaves.items()
            ],
            "hyper": self.hyper,
            "scheduler_calls": (
                None if self.scheduler_calls is None else list(self.scheduler_calls.items())
            ),
            "scaler_updates": None if self.scaler_updates is None else list(self.scaler_updates),
            "clip": self.clip,
            "generation": self.pending_generation,
            "stop": self.stop,
            "save": self.save,
            "save_last": self.save_last,
            "saved": dict(self.saved),
            "busy": self.busy,
            "values": [
                [v, [[k, s, c] for k, (s, c) in names.items()]] for v, names in self.values.items()
            ],
            "guard": dict(self.guard),
            "seconds": self.seconds,
            "unclaimed": list(self.unclaimed),
        }
        head = [agreement_seq, kind, step]
        packed: bytes = msgpack.packb(
            [head, {k: v for k, v in said.items() if v or isinstance(v, float)}]
        )
        return packed


class Disagreement(AssertionError):
    """Workers met in one collective with different steps: our bug, or a user's bare `break`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What all workers conclude from one agreement.

    Args:
        norm: 2-norm of the whole gradient, nan or inf when it is not finite.
        touched: bit i set if anybody touched trainable parameter i.
        samples: samples of the step.
        log: sample-weighted means of the logged values over those that gave the key.
        next_generation: newest World that *every* worker knows.
        values: evaluation results, name -> sum / count.
        saved: how the save that all wait for has ended, empty while nobody knows: durable if
            anybody knows that it is.
        reads: what the whole step has read from each loader.
        states: leaf -> name -> new plain state of a virtual rank.
        unequal: what should be equal on all workers and is not, "" if nothing.
        seconds: by rank, how long each worker computed.
        behind: global objects that are registered on some workers, and not yet on others.
    """

    norm: float
    touched: int
    samples: int
    log: Mapping[str, float]
    hyper: Sequence[Any] | None
    scheduler_calls: Mapping[int, int]
    scaler_updates: Sequence[int]
    clip: float | None
    next_generation: int
    stop: bool
    save: bool
    save_last: bool
    busy: bool
    values: Mapping[str, float]
    saved: Mapping[str, Any] = field(default_factory=dict)
    reads: Sequence[Read] = ()
    states: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    unequal: str = ""
    seconds: Sequence[float] = ()
    behind: Sequence[str] = ()

    @property
    def finite(self) -> bool:
        """False when the gradient holds a NaN or an infinity."""
        return math.isfinite(self.norm)

    @property
    def clip_coefficient(self) -> float | None:
        """The factor that clips the gradient, None when nothing is to be done.

        Source: torch.nn.utils.clip_grad_norm_ (max_norm / (norm + 1e-6), at most 1).
        """
        if self.clip is None or not self.finite:
            return None
        coefficient = self.clip / (self.norm + 1e-6)
        return coefficient if coefficient < 1.0 else None


def pack_result(payloads: Sequence[bytes]) -> bytes:
    """Return all payloads of an agreement as the bytes that travel with the state."""
    packed: bytes = msgpack.packb(list(payloads))
    return packed


def kind_of(payloads: Sequence[bytes], kind: str) -> str:
    """Return the kind of an agreement that this worker entered as `kind`.

    One worker that calls its step void makes it void for all.
    """
    if kind != "step":
        return kind
    heads = [msgpack.unpackb(raw, strict_map_key=False)[0] for raw in payloads]
    return VOID if any(head[1] == VOID for head in heads) else kind


def conclude(agreement: Agreement) -> Outcome:
    """Decide what an agreement means; the same on every worker.

    Raises Disagreement when the payloads are of different agreements.
    """
    said = [msgpack.unpackb(raw, strict_map_key=False) for raw in msgpack.unpackb(agreement.result)]
    heads = {tuple(head) for head, _ in said}
    allowed = {(agreement.seq, agreement.kind, agreement.step)}
    if agreement.kind == VOID:
        allowed.add((agreement.seq, "step", agreement.step))
    if not heads <= allowed:
        raise Disagreement(
            f"workers met in one agreement with different steps: {sorted(heads)}; does the loop "
            "leave early on some workers? use ctx.stop()"
        )
    rows: list[dict[str, Any]] = [row for _, row in said]
    norms: dict[int, float] = {}
    leaves: dict[int, LeafRecord] = {}
    values: dict[int, dict[str, tuple[float, float]]] = {}
    touched = 0
    for row in rows:
        norms.update((int(s), float(n)) for s, n in row.get("norms", ()))
        touched |= int.from_bytes(row.get("touched", b""), "little")
        for i, samples, log, state, reads in row.get("leaves", ()):
            leaves[int(i)] = LeafRecord(
                samples=samples, log=log, state=state, reads=[Read(*each) for each in reads]
            )
        for rank, names in row.get("values", ()):
            values[int(rank)] = {k: (s, c) for k, s, c in names}
    total = math.fsum(norms[s] for s in sorted(norms)) if _all_finite(norms) else math.inf
    if any(math.isnan(n) for n in norms.values()):
        total = math.nan
    return Outcome(
        norm=math.sqrt(total) if math.isfinite(total) else total,
        touched=touched,
        samples=sum(record.samples for record in leaves.values()),
        log=_weighted_means(leaves),
        hyper=_first(rows, "hyper"),
        scheduler_calls=dict(_first(rows, "scheduler_calls") or ()),
        scaler_updates=tuple(_first(rows, "scaler_updates") or ()),
        clip=_first(rows, "clip"),
        next_generation=min(row.get("generation", 0) for row in rows),
        stop=any(row.get("stop", False) for row in rows),
        save=any(row.get("save", False) for row in rows),
        save_last=any(row.get("save_last", False) for row in rows),
        busy=any(row.get("busy", False) for row in rows),
        values=_means(values),
        saved=_ended([row["saved"] for row in rows if "saved" in row]),
        reads=_all_reads(leaves),
        states={i: record.state for i, record in leaves.items() if record.state},
        unequal=_unequal([row.get("guard", {}) for row in rows]),
        seconds=tuple(row.get("seconds", 0.0) for row in rows),
        behind=behind([row.get("unclaimed", ()) for row in rows]),
    )


def _all_reads(leaves: Mapping[int, LeafRecord]) -> tuple[Read, ...]:
    found: dict[tuple[int, int, int], Read] = {}
    for record in leaves.values():
        for read in record.reads:
            before = found.get(read[:3], Read(*read[:3], 0, 0))
            known = before.digest is not None and read.digest is not None
            found[read[:3]] = Read(
                *read[:3],
                before.samples + read.samples,
                add((before.digest or 0, read.digest or 0)) if known else None,
            )
    return tuple(found[key] for key in sorted(found))


def behind(unclaimed: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the names that some workers have not claimed, while others have."""
    names = {name for said in unclaimed for name in said}
    return tuple(sorted(n for n in names if any(n not in said for said in unclaimed)))


def _first(rows: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Return what the one worker that speaks for all said, None if nobody did."""
    return next((row[key] for row in rows if row.get(key) is not None), None)


def _ended(said: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return how a save has ended: whoever knows that it is durable is right."""
    return next((each for each in said if each["ok"]), said[0] if said else {})


def _unequal(guards: Sequence[Mapping[str, int]]) -> str:
    """Name the first thing that two workers have with different checksums."""
    seen: dict[str, int] = {}
    for guard in guards:
        for name, crc in guard.items():
            if seen.setdefault(name, crc) != crc:
                return name
    return ""


def _all_finite(norms: Mapping[int, float]) -> bool:
    return all(math.isfinite(n) for n in norms.values())


def _weighted_means(leaves: Mapping[int, LeafRecord]) -> dict[str, float]:
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for index in sorted(leaves):
        record = leaves[index]
        for key, value in record.log.items():
            sums[key] = sums.get(key, 0.0) + value * record.samples
            weights[key] = weights.get(key, 0.0) + record.samples
    return {key: sums[key] / weights[key] for key in sums if weights[key]}


def _means(values: Mapping[int, Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for rank in sorted(values):
        for name, (total, count) in values[rank].items():
            sums[name] = sums.get(name, 0.0) + total
            counts[name] = counts.get(name, 0.0) + count
    return {name: sums[name] / counts[name] for name in sums if counts[name]}
