"""What every plan and every state of the step protocol is judged by.

A plan is judged by what members' memory truly contains, never by what they claim: it starts from
the newest agreement that any of them has, loses no committed step, moves only whole bytes of the
right step, and leaves every segment with two holders (one in a world of one) and every worker with
rows of one step. A state is judged where a worker goes on: it never computes with rows of two
steps and never holds what it does not have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic.step.recovery import Plan, ProtocolViolation, recover
from tests.model.step_model import Generation, Rules, Start, inventory_of

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTHING_AGREED = "nothing was agreed yet"
ALL_DEAD = "all holders are dead"
FORGOTTEN = "a copy was confirmed, but all who know are dead"
UNCONFIRMED = "a complete copy was not confirmed yet"


@dataclass
class Found:
    """Counts, and the first few violations in words."""

    starts: int = 0
    cuts: int = 0
    cases: int = 0  # (cut, set of dead) pairs
    outcomes: int = 0  # different survivors' memories among them
    lost: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, Start]] = field(default_factory=list)
    most_redone: int = 0  # steps that survivors computed again after one failure
    met: Counter[str] = field(default_factory=Counter)  # situations that plans had to deal with
    failed_history: str = ""

    def summary(self) -> str:
        """Return the counts in one line."""
        return (
            f"{self.starts} starts, {self.cuts} states, {self.cases} crash cases, "
            f"{self.outcomes} outcomes; lost: {dict(self.lost)}; wrong: {dict(self.violations)}"
        )

    def add(self, other: Found) -> None:
        """Take in what another search has found."""
        self.starts += other.starts
        self.cuts += other.cuts
        self.cases += other.cases
        self.outcomes += other.outcomes
        self.lost += other.lost
        self.violations += other.violations
        self.examples = (self.examples + other.examples)[:5]
        self.most_redone = max(self.most_redone, other.most_redone)
        self.met += other.met
        self.failed_history = self.failed_history or other.failed_history

    def wrong(self, what: str, start: Start) -> None:
        self.violations[what] += 1
        if len(self.examples) < 5:
            self.examples.append((what, start))


def judged_plan(
    start: Start, num_segments: int, rules: Rules, found: Found, per_host: int = 1
) -> Plan | None:
    """Return the plan of a start; None when it ends there: a loss, or something wrong."""
    inventories = [
        inventory_of(rank, have, rules, per_host) for rank, have in enumerate(start.members)
    ]
    try:
        plan = recover(inventories, num_segments, base_when_fresh="initial")
    except ProtocolViolation as error:
        found.wrong(f"impossible inventory: {str(error).split(' ')[1]} ...", start)
        return None
    if plan.lost:
        judge_loss(start, plan, found)
        return None
    if plan.base == "initial":
        if start.durable > 0:  # only newcomers are left of a job that had state
            found.lost[ALL_DEAD] += 1
            return None
        return plan
    _mark(start, plan, found)
    newest = max(have.seq for have in start.members if not have.fresh)
    if (plan.agreement.seq if plan.agreement else 0) != newest:
        found.wrong("the plan is not at the newest agreement", start)
        return None
    if start.durable > 0:  # counted from the newest agreement
        found.wrong("a committed step is lost", start)
        return None
    return plan


def _mark(start: Start, plan: Plan, found: Found) -> None:
    """Count situations, so that a test can see that the search met them."""
    survivors = [have for have in start.members if not have.fresh]
    found.met["somebody is behind"] += bool(plan.behind)
    found.met["all but one are behind"] += len(plan.behind) == len(survivors) - 1 > 0
    found.met["rows are missing"] += bool(plan.rows)
    found.met["copies are made"] += bool(plan.state)
    found.met["a joiner"] += len(survivors) < len(start.members)
    found.met["a copy not yet confirmed"] += any(have.received for have in survivors)
    found.met["an old holder beside two new ones"] += any(
        sum(s in dict(have.held) for have in survivors) > 2 for s in range(len(plan.placement))
    )
    found.met["the newest agreement closes an epoch"] += bool(
        plan.agreement and plan.agreement.kind != "step"
    )


def judge_loss(start: Start, plan: Plan, found: Found) -> None:
    """A loss is allowed only where no complete copy of some segment is left."""
    survivors = [have for have in start.members if not have.fresh]
    copies = {s for have in survivors for s, _ in have.true_state}
    if max((have.seq for have in survivors), default=0) == 0:
        found.lost[NOTHING_AGREED] += 1
    elif set(plan.lost) - copies:
        found.lost[ALL_DEAD] += 1
    elif start.sealed:
        found.lost[FORGOTTEN] += 1
    else:
        found.lost[UNCONFIRMED] += 1


def judge_generation(generation: Generation, found: Found) -> None:
    """Check the plan when it is carried out, and every state in which a worker goes on."""
    start = generation.start
    for what in _wrong_transfers(generation):
        found.wrong(what, start)
    for what in _wrong_after_plan(generation):
        found.wrong(what, start)
    for what in _wrong_at_rest(generation):
        found.wrong(what, start)
    for what in _wrong_moments(generation):
        found.wrong(what, start)


def _wrong_transfers(generation: Generation) -> Iterator[str]:
    plan = generation.plan
    for transfer in (*plan.rows, *plan.state):
        source = int(transfer.source[1:])
        have = generation.have(source, 1 << generation.number["take", source, (), 0])
        state = dict(have.true_state)
        for s in transfer.segments:
            if transfer.what == "state" and state.get(s) != plan.step:
                yield "a copy of incomplete or other bytes is sent"
            if transfer.what == "rows" and have.true_rows[s] != plan.step:
                yield "rows of another step are sent"


def _wrong_after_plan(generation: Generation) -> Iterator[str]:
    plan, width = generation.plan, generation.width
    healed = sum(1 << i for i, e in enumerate(generation.events) if e.turn == 0)
    haves = [generation.have(w, healed) for w in range(width)]
    for s, holders in enumerate(plan.placement):
        whole = {w for w in range(width) if (s, plan.step) in haves[w].true_state}
        if not {int(h[1:]) for h in holders} <= whole or len(holders) < min(2, width):
            yield "a segment has too few holders after the plan"
    seq = plan.agreement.seq if plan.agreement else 0
    for have in haves:
        if have.fresh or have.seq != seq or have.step != plan.step:
            yield "a worker is not at the plan's agreement"
        if set(have.true_rows) != {plan.step}:
            yield "rows of two steps are mixed after the plan"


def _wrong_at_rest(generation: Generation) -> Iterator[str]:
    everything = (1 << len(generation.events)) - 1
    steps = generation.plan.step + generation.kinds.count("step")
    for w in range(generation.width):
        have = generation.have(w, everything)
        held = {(s, steps) for s in generation.mine[w]}
        if have.held != held or not held <= have.true_state or set(have.true_rows) != {steps}:
            yield "a worker does not end a generation with all that it should have"


def _wrong_moments(generation: Generation) -> Iterator[str]:
    """Check each worker at the earliest moment at which it computes or agrees."""
    below: list[int] = []
    for number, event in enumerate(generation.events):
        before = rest = generation.needs[number]
        while rest:
            lowest = rest & -rest
            before |= below[lowest.bit_length() - 1]
            rest ^= lowest
        below.append(before)
        if event.what == "compute":
            have = generation.have(event.owner, before)
            if len(set(have.true_rows)) != 1 or set(have.rows) != set(have.true_rows):
                yield "a worker computes with rows of two steps"
        if event.what == "agree":
            have = generation.have(event.owner, before | 1 << number)
            if not have.held <= have.true_state:
                yield "a worker holds what it does not have"
