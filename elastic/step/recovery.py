"""What follows from what the members of a new World have: the plan that every one of them computes.

There is no undo, only roll-forward. Let A be the newest agreement that any survivor completed. A
survivor behind A takes its result and, if A closed a step, applies it to the segments it holds
from the finished gradients that the gate made it hold; then the rows it lacks are fetched. If no
survivor completed the agreement of a step, nobody living applied it, and it is computed again.

A copy that was made in a generation counts only once the first agreement of that generation has
completed somewhere: every worker entered that agreement with its copies complete, and an old
holder drops what moved away only after it. So a segment has a complete holder at every moment
unless all its holders died.

Placement is an output of `recover`, never evidence.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from elastic.step.placement import place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

Base = Literal["survivors", "initial", "checkpoint"]


class ProtocolViolation(AssertionError):
    """Inventories that the step protocol cannot produce: our bug, never a user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A completed agreement and its result.

    Args:
        seq: number of the agreement in the job's order.
        kind: "step", "close", "halt" or "evaluate".
        step: the step it closed; for other kinds the last step applied before it.
        generation: World in which it completed.
        result: the payloads of all workers; travels with every transfer of state.
    """

    seq: int
    kind: str
    step: int
    generation: int
    result: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What one worker has, made by its main thread.

    Args:
        fresh: it has no state of the job yet.
        layout: fingerprint of the state's layout.
        initial: checksum of its initial rows (fresh workers).
        agreement: newest agreement it completed.
        row_steps: per segment the step of the parameter rows in its model.
        held: segment -> step of the optimizer state of confirmed copies.
        received: the same for complete copies made in `received_generation`, not yet confirmed.
        gradients: segments whose finished gradient of `gradient_step` it has.
        unclaimed: global objects whose state it has, and that were not registered yet.
    """

    worker_id: str
    node: str
    fresh: bool
    layout: str = ""
    initial: str = ""
    agreement: Agreement | None = None
    row_steps: tuple[int, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)
    received: Mapping[int, int] = field(default_factory=dict)
    received_generation: int = 0
    gradients: frozenset[int] = frozenset()
    gradient_step: int = 0
    unclaimed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Parameter rows ("rows") or optimizer state ("state") of segments, from one to another."""

    source: str
    target: str
    segments: tuple[int, ...]
    what: Literal["rows", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the members come to one step, in this order: behind, rows, state.

    Args:
        base: where the state comes from.
        agreement: the newest agreement; None when there was none yet.
        step: step of the state when the plan is carried out (0 for "initial"; for "checkpoint"
            the checkpoint says).
        behind: workers that must take `agreement` and apply it if it closed a step.
        placement: per segment its holders, primary first.
        rows: transfers that must be complete before anybody computes.
        state: transfers that must be complete before the next agreement.
        lost: segments that nobody living holds; if there are any, nothing else counts.
    """

    base: Base
    agreement: Agreement | None
    step: int
    behind: tuple[str, ...]
    placement: tuple[tuple[str, ...], ...]
    rows: tuple[Transfer, ...]
    state: tuple[Transfer, ...]
    lost: tuple[int, ...]


def recover(
    inventories: Sequence[Inventory],
    num_segments: int,
    *,
    base_when_fresh: Literal["initial", "checkpoint"],
    replicas: int = 2,
) -> Plan:
    """Decide how the members of a World come to one step. Same inventories, same Plan.

    Args:
        inventories: of every member, in rank order.
        num_segments: all segments, the extra one included.
        base_when_fresh: what a job begins from when no member has state.

    Raises ProtocolViolation for inventories that cannot be.
    Source: docs/design.md, "When somebody dies".
    """
    if all(inventory.fresh for inventory in inventories):
        return _begin(inventories, num_segments, base_when_fresh, replicas)
    survivors = [inventory for inventory in inventories if not inventory.fresh]
    newest = _newest(survivors)
    step = _step_of(survivors, newest)
    behind = _behind(survivors, newest)
    holders = _holders(survivors, newest, step, behind)
    lost = tuple(s for s in range(num_segments) if not holders.get(s))
    if lost:
        return Plan(
            base="survivors",
            agreement=newest,
            step=step,
            behind=behind,
            placement=(),
            rows=(),
            state=(),
            lost=lost,
        )
    members = [inventory.worker_id for inventory in inventories]
    placement = place(holders, members, _hosts(inventories), num_segments, replicas)
    applied = {i.worker_id for i in survivors if _applies(i, newest, behind)}
    return Plan(
        base="survivors",
        agreement=newest,
        step=step,
        behind=behind,
        placement=placement,
        rows=_missing_rows(inventories, holders, step, applied),
        state=_missing_state(placement, holders),
        lost=(),
    )


# -- what the survivors have ------------------------------------------------------------------


def _newest(survivors: Sequence[Inventory]) -> Agreement | None:
    newest: Agreement | None = None
    for inventory in survivors:
        agreement = inventory.agreement
        if agreement is None:
            continue
        if newest is None or agreement.seq > newest.seq:
            newest = agreement
        elif agreement.seq == newest.seq and agreement != newest:
            raise ProtocolViolation(f"two results of agreement {agreement.seq}")
    return newest


def _seq(agreement: Agreement | None) -> int:
    return 0 if agreement is None else agreement.seq


def _step_of(survivors: Sequence[Inventory], newest: Agreement | None) -> int:
    if newest is not None:
        return newest.step
    steps = {step for inventory in survivors for step in inventory.held.values()}
    if len(steps) > 1:
        raise ProtocolViolation(f"state of steps {sorted(steps)} without an agreement")
    return steps.pop() if steps else 0


def _behind(survivors: Sequence[Inventory], newest: Agreement | None) -> tuple[str, ...]:
    top = _seq(newest)
    behind = []
    for inventory in survivors:
        gap = top - _seq(inventory.agreement)
        if gap > 1:
            raise ProtocolViolation(f"{inventory.worker_id} is {gap} agreements behind")
        if gap:
            behind.append(inventory.worker_id)
    return tuple(behind)


def _holders(
    survivors: Sequence[Inventory],
    newest: Agreement | None,
    step: int,
    behind: Sequence[str],
) -> dict[int, tuple[str, ...]]:
    """Return segment -> members that hold it at `step` once those behind have caught up."""
    completed_in = {i.agreement.generation for i in survivors if i.agreement is not None}
    found: dict[int, list[str]] = {}
    for inventory in survivors:
        copies = dict(inventory.held)
        if inventory.received_generation in completed_in:
            copies.update(inventory.received)
        applies = _applies(inventory, newest, behind)
        for segment, at in sorted(copies.items()):
            if at != (step - 1 if applies else step):
                raise ProtocolViolation(
                    f"{inventory.worker_id} holds segment {segment} at step {at} and is to have it "
                    f"at {step} {'after applying one' if applies else 'without applying any'}"
                )
            if not applies or _has_gradient(inventory, segment, newest, step):
                found.setdefault(segment, []).append(inventory.worker_id)
    return {segment: tuple(held) for segment, held in found.items()}


def _applies(inventory: Inventory, newest: Agreement | None, behind: Sequence[str]) -> bool:
    """Return True for a worker that rolls its copies forward by one step."""
    return newest is not None and newest.kind == "step" and inventory.worker_id in behind


def _has_gradient(inventory: Inventory, segment: int, newest: Agreement | None, step: int) -> bool:
    """Return True if a copy can be rolled forward; False if it moved away and is to be dropped.

    A copy moves away in the first agreement of a generation, whose holders are the new ones. In
    any later agreement, a held segment without its gradient means that the gate was broken.
    """
    assert newest is not None
    if segment in inventory.gradients and inventory.gradient_step == step:
        return True
    before = inventory.agreement
    if before is not None and before.generation == newest.generation:
        raise ProtocolViolation(
            f"{inventory.worker_id} entered the agreement of step {step} without the gradient of "
            f"segment {segment}, which it holds"
        )
    return False


def _hosts(inventories: Sequence[Inventory]) -> dict[str, str]:
    return {inventory.worker_id: inventory.node for inventory in inventories}


# -- transfers ---------------------------------------------------------------------------------


class _Lanes:
    """Collects (source, target) -> segments, sources spread by what they already send."""

    def __init__(self, what: Literal["rows", "state"]) -> None:
        self._what = what
        self._lanes: dict[tuple[str, str], list[int]] = {}
        self._sent: dict[str, int] = {}

    def add(self, segment: int, sources: Sequence[str], target: str) -> None:
        source = min(sources, key=lambda m: (self._sent.get(m, 0), sources.index(m)))
        self._sent[source] = self._sent.get(source, 0) + 1
        self._lanes.setdefault((source, target), []).append(segment)

    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(
            Transfer(source=source, target=target, segments=tuple(segments), what=self._what)
            for (source, target), segments in self._lanes.items()
        )


def _missing_rows(
    inventories: Sequence[Inventory],
    holders: Mapping[int, tuple[str, ...]],
    step: int,
    applied: AbstractSet[str],
) -> tuple[Transfer, ...]:
    lanes = _Lanes("rows")
    for inventory in inventories:
        for segment, sources in sorted(holders.items()):
            if inventory.worker_id in applied and inventory.worker_id in sources:
                continue  # applying writes the rows too
            at = None if inventory.fresh else inventory.row_steps[segment]
            if at is not None and at > step:
                raise ProtocolViolation(
                    f"{inventory.worker_id} has rows of step {at}, and nobody agreed beyond {step}"
                )
            if at != step:
                lanes.add(segment, sources, inventory.worker_id)
    return lanes.transfers()


def _missing_state(
    placement: Sequence[tuple[str, ...]], holders: Mapping[int, tuple[str, ...]]
) -> tuple[Transfer, ...]:
    lanes = _Lanes("state")
    for segment, wanted in enumerate(placement):
        for member in wanted:
            if member not in holders[segment]:
                lanes.add(segment, holders[segment], member)
    return lanes.transfers()


# -- the beginning -----------------------------------------------------------------------------


def _begin(
    inventories: Sequence[Inventory],
    num_segments: int,
    base: Literal["initial", "checkpoint"],
    replicas: int,
) -> Plan:
    members = [inventory.worker_id for inventory in inventories]
    placement = place({}, members, _hosts(inventories), num_segments, replicas)
    if base == "initial":
        first = inventories[0]
        rows = tuple(
            Transfer(
                source=first.worker_id,
                target=inventory.worker_id,
                segments=tuple(range(num_segments)),
                what="rows",
            )
            for inventory in inventories[1:]
            if inventory.initial != first.initial
        )
        state: tuple[Transfer, ...] = ()
    else:
        primaries = {segment: held[:1] for segment, held in enumerate(placement)}
        nothing = [Inventory(worker_id=i.worker_id, node=i.node, fresh=True) for i in inventories]
        rows = _missing_rows(nothing, primaries, 0, {i.worker_id for i in nothing})
        state = _missing_state(placement, primaries)
    return Plan(
        base=base,
        agreement=None,
        step=0,
        behind=(),
        placement=placement,
        rows=rows,
        state=state,
        lost=(),
    )
