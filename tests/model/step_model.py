"""Every point at which workers can die: the step protocol as partial orders of events.

Within one generation nothing is chosen: what happens at each worker follows from the plan, and
only the order between workers is open. So a generation is a partial order of events, its reachable
states are its down-closed sets ("cuts"), and a state fits in one integer. All of them are listed;
no interleaving is left out. At every cut every allowed set of workers dies (or nobody, and the
World is formed again all the same), joiners may come, and what the survivors then have is the
start of the next generation, planned by the real `recover` and `place`. Starts are compared after
steps and generations are counted from the newest agreement, so there are finitely many and the
search ends by itself: deaths and joins are unlimited in number.

Events (owner first; the driver's words):

    take(w)          w has all inventories: takes the agreement it missed and applies it
    row(t) / rows(w) a plan's transfer of rows arrives / w has all rows and may compute
    copy(t), heal(w) a plan's transfer of state arrives / all of w's have (then `received`)
    compute(w)       w is in the exchange; its partial sums may arrive anywhere
    finish(b)        the primary finished the gradient of bucket b
    forward(b,w)     the twin has it
    enter(w)         the gate is open: w gives its part of the agreement
    agree(w)         the agreement is complete at w, which confirms, applies, drops (one act)
    gather(b,w)      the new rows of bucket b are at w, which does not hold it

Beside what a worker claims in its inventory, the model keeps what its memory truly contains, and
judges every plan by the truth. It imports no torch and nothing of the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from elastic.step.recovery import Agreement, Inventory, Plan

if TYPE_CHECKING:
    from collections.abc import Iterable

STEADY = 3  # number that the newest agreement and its step get in a start
GENERATION = 9  # number of the generation under way; older ones are 1, 2, ...


@dataclass(frozen=True)
class Rules:
    """The protocol; each field set otherwise is a protocol that must be found wrong."""

    gate_gradients: bool = True  # enter only with the finished gradients of all held segments
    gate_healing: bool = True  # enter only when all copies of the generation are complete
    result_travels: bool = True  # plans carry the newest agreement's result
    everyone_enters: bool = True  # an agreement needs every worker, not only primaries
    count_copies: str = "confirmed"  # as recover() does; "complete": as soon as it has all bytes;
    #                                  "started": as soon as it is planned
    drop_moved: str = "agreed"  # after the first agreement; "planned": at once


class Have(NamedTuple):
    """What one worker has; `true_*` is what its memory contains, the rest what it claims."""

    fresh: bool
    seq: int
    kind: str
    step: int
    generation: int
    rows: tuple[int, ...]
    true_rows: tuple[int, ...]
    held: frozenset[tuple[int, int]]  # (segment, step)
    received: frozenset[tuple[int, int]]
    received_generation: int
    gradients: frozenset[int]
    gradient_step: int
    true_state: frozenset[tuple[int, int]]


class Start(NamedTuple):
    """Members of a new World, and what is true of the world but known to none of them.

    durable: number of the newest agreement whose successor completed anywhere: its step is
        committed.
    sealed: the first agreement of the generation in which the members received copies that they
        do not know to be confirmed has completed, at workers that are dead now.
    """

    members: tuple[Have, ...]
    durable: int
    sealed: bool


GARBAGE = -9


def newcomer(num_segments: int) -> Have:
    """A worker that has just built its model."""
    none: frozenset[tuple[int, int]] = frozenset()
    rows = (GARBAGE,) * num_segments
    return Have(True, 0, "", 0, 0, rows, rows, none, none, 0, frozenset(), 0, none)


def inventory_of(rank: int, have: Have, rules: Rules, per_host: int = 1) -> Inventory:
    """What the worker says in the World that it is `rank` of."""
    agreement = None
    if have.seq:
        agreement = Agreement(
            seq=have.seq,
            kind=have.kind,
            step=have.step,
            generation=have.generation,
            result=b"",
        )
    return Inventory(
        worker_id=f"w{rank}",
        node=f"n{rank // per_host}",
        fresh=have.fresh,
        layout="",
        initial=f"{rank}" if have.fresh else "",
        agreement=agreement,
        row_steps=have.rows,
        held=dict(have.held | (have.received if rules.count_copies == "complete" else set())),
        received=dict(have.received),
        received_generation=have.received_generation,
        gradients=have.gradients,
        gradient_step=have.gradient_step,
    )


# -- one generation as a partial order ------------------------------------------------------------


class Event(NamedTuple):
    what: str
    owner: int
    segments: tuple[int, ...] = ()
    turn: int = 0  # which agreement of the generation


# What a worker's memory shows of itself. The rest shows through these: `heal` says that all copies
# arrived, `enter` that all gradients did (as the driver reports both, at once and not one by one).
VISIBLE = {"take", "row", "rows", "heal", "enter", "agree", "gather"}


@dataclass
class Generation:
    """One generation from its plan to the end of its `kinds` of agreements."""

    start: Start
    plan: Plan
    kinds: tuple[str, ...]
    rules: Rules
    rows_in_order: bool
    events: list[Event] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    number: dict[tuple[str, int, tuple[int, ...], int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.width = len(self.start.members)
        self.holders = [tuple(int(w[1:]) for w in ws) for ws in self.plan.placement]
        self.mine = [
            frozenset(s for s, hs in enumerate(self.holders) if w in hs) for w in range(self.width)
        ]
        self.buckets: list[tuple[int, ...]] = []
        for s, holders in enumerate(self.holders):
            if self.buckets and self.holders[self.buckets[-1][0]] == holders:
                self.buckets[-1] = (*self.buckets[-1], s)
            else:
                self.buckets.append((s,))
        self._healing()
        ready = {w: self._bit("rows", w) for w in range(self.width)}
        for turn, kind in enumerate(self.kinds, start=1):
            ready = self._step(turn, ready) if kind == "step" else self._close(turn, ready)
        shown = (
            VISIBLE if self.rules.gate_gradients else VISIBLE - {"enter"} | {"finish", "forward"}
        )
        self.own = [
            sum(1 << i for i, e in enumerate(self.events) if e.owner == w and e.what in shown)
            for w in range(self.width)
        ]
        turns = range(1, len(self.kinds) + 1)
        self.agreed = [self._all("agree", turn) for turn in turns]
        self.computed = [self._all("compute", turn) for turn in turns]
        self.computing = [
            sum(1 << i for i, e in enumerate(self.events) if e.owner == w and e.what == "compute")
            for w in range(self.width)
        ]
        self._known: dict[tuple[int, int], Have] = {}

    def _add(self, event: Event, needs: int) -> int:
        self.number[event] = len(self.events)
        self.events.append(event)
        self.needs.append(needs)
        return 1 << len(self.events) - 1

    def _bit(self, what: str, owner: int, segments: tuple[int, ...] = (), turn: int = 0) -> int:
        return 1 << self.number[(what, owner, segments, turn)]

    def _all(self, what: str, turn: int) -> int:
        return sum(1 << i for i, e in enumerate(self.events) if e.what == what and e.turn == turn)

    def completed(self, cut: int) -> int:
        """Return how many agreements of the generation completed anywhere."""
        return sum(1 for bits in self.agreed if cut & bits)

    def begun(self, cut: int) -> int:
        """Return the newest step that anybody computed."""
        return self.plan.step + sum(1 for bits in self.computed if cut & bits)

    def _healing(self) -> None:
        took = [self._add(Event("take", w), 0) for w in range(self.width)]
        rows = list(took)
        for t in self.plan.rows:
            source, target = int(t.source[1:]), int(t.target[1:])
            rows[target] |= self._add(Event("row", target, t.segments), took[source] | took[target])
        done = [self._add(Event("rows", w), rows[w]) for w in range(self.width)]
        self.healed = list(done)  # what the gate of the first agreement waits for
        arrived = [0] * self.width
        for t in self.plan.state:
            source, target = int(t.source[1:]), int(t.target[1:])
            bit = self._add(Event("copy", target, t.segments), done[source] | done[target])
            arrived[target] |= bit
            self.healed[source] |= bit  # a copy that is being sent is not written to
        for w in range(self.width):
            if arrived[w]:
                self.healed[w] |= self._add(Event("heal", w), arrived[w])

    def _step(self, turn: int, ready: dict[int, int]) -> dict[int, int]:
        everyone = range(self.width)
        computed = [self._add(Event("compute", w, (), turn), ready[w]) for w in everyone]
        gates = list(computed)
        for bucket in self.buckets:
            primary, *twins = self.holders[bucket[0]]
            finished = self._add(Event("finish", primary, bucket, turn), sum(computed))
            gates[primary] |= finished
            for twin in twins:
                needs = finished | computed[twin]
                gates[twin] |= self._add(Event("forward", twin, bucket, turn), needs)
        if not self.rules.gate_gradients:
            gates = list(computed)
        agreed = self._agree(turn, gates)
        ready = {w: agreed[w] for w in everyone}
        for bucket in self.buckets:
            holders = self.holders[bucket[0]]
            for w in everyone:
                if w not in holders:
                    needs = agreed[w] | agreed[holders[0]]
                    needs |= self._bit("finish", holders[0], bucket, turn)
                    needs |= ready[w] if self.rows_in_order else 0
                    ready[w] |= self._add(Event("gather", w, bucket, turn), needs)
        return ready

    def _close(self, turn: int, ready: dict[int, int]) -> dict[int, int]:
        agreed = self._agree(turn, [ready[w] for w in range(self.width)])
        return dict(enumerate(agreed))

    def _agree(self, turn: int, gates: list[int]) -> list[int]:
        if turn == 1 and self.rules.gate_healing:
            gates = [gate | self.healed[w] for w, gate in enumerate(gates)]
        entered = [self._add(Event("enter", w, (), turn), g) for w, g in enumerate(gates)]
        needed = sum(entered)
        if not self.rules.everyone_enters:
            needed = sum(entered[w] for w in {h[0] for h in self.holders})
        return [
            self._add(Event("agree", w, (), turn), needed | entered[w]) for w in range(self.width)
        ]

    def cuts(self) -> list[int]:
        """Every reachable state: each down-closed set of events, once.

        Events are numbered in an order that respects `needs`, so a cut of the first n+1 events is
        one of the first n, with or without event n.
        """
        found = [0]
        for number, needs in enumerate(self.needs):
            bit = 1 << number
            found += [cut | bit for cut in found if cut & needs == needs]
        return found

    # -- what a worker has at a cut ---------------------------------------------------------------

    def have(self, w: int, cut: int) -> Have:
        """What worker `w` has when exactly the events of the cut have happened."""
        local = cut & self.own[w]
        known = self._known.get((w, local))
        if known is None:
            known = self._known[(w, local)] = self._replay(w, local)
        return known

    def _replay(self, w: int, local: int) -> Have:
        state = _Worker(self, w)
        for number, event in enumerate(self.events):
            if local >> number & 1:
                getattr(state, event.what)(event)
        return state.frozen()


class _Worker:
    """One worker's memory while its events are replayed in order."""

    def __init__(self, generation: Generation, w: int) -> None:
        self.generation = generation
        self.mine = generation.mine[w]
        self.name = f"w{w}"
        self.have = generation.start.members[w]
        self.held = dict(self.have.held)
        self.received = dict(self.have.received)
        self.received_generation = self.have.received_generation
        self.gradients = set(self.have.gradients)
        self.gradient_step = self.have.gradient_step
        self.rows_claimed = list(self.have.rows)
        self.rows_true = list(self.have.true_rows)
        self.state = dict(self.have.true_state)

    def frozen(self) -> Have:
        return self.have._replace(
            rows=tuple(self.rows_claimed),
            true_rows=tuple(self.rows_true),
            held=frozenset(self.held.items()),
            received=frozenset(self.received.items()),
            received_generation=self.received_generation if self.received else 0,
            gradients=frozenset(self.gradients),
            gradient_step=self.gradient_step if self.gradients else 0,
            true_state=frozenset(
                (s, v) for s, v in self.state.items() if s in self.held or s in self.received
            ),
        )

    # -- healing

    def take(self, _event: Event) -> None:
        plan, rules = self.generation.plan, self.generation.rules
        newest = plan.agreement
        if plan.base == "initial":
            self.held = dict.fromkeys(self.mine, 0)
            self.state = dict.fromkeys(self.mine, 0)
            if not plan.rows or all(t.target != self.name for t in plan.rows):
                self.rows_true = [0] * len(self.rows_true)
        elif rules.result_travels:
            if rules.count_copies == "complete":
                self.held.update(self.received)
            if self.name in plan.behind:
                assert newest is not None
                self._complete(newest.seq, newest.kind, newest.step, newest.generation)
            elif self.have.fresh and newest is not None:
                self._now_at(newest.seq, newest.kind, newest.step, newest.generation)
        self.received = {}
        self.gradients = set()
        if rules.count_copies == "started":
            for s in self.mine - self.held.keys():
                self.held[s] = plan.step
        if rules.drop_moved == "planned":
            self.held = {s: v for s, v in self.held.items() if s in self.mine}

    def row(self, event: Event) -> None:
        for s in event.segments:
            self.rows_true[s] = self.generation.plan.step

    def rows(self, _event: Event) -> None:
        self.rows_claimed = [self.generation.plan.step] * len(self.rows_claimed)
        self.have = self.have._replace(fresh=False)

    def heal(self, _event: Event) -> None:
        self.received = {s: self.generation.plan.step for s in self.mine - self.held.keys()}
        self.received_generation = GENERATION
        self.state.update(self.received)

    # -- a step

    def enter(self, event: Event) -> None:
        if self.generation.kinds[event.turn - 1] == "step":
            self.gradients = set(self.mine)
            self.gradient_step = self.have.step + 1

    def finish(self, event: Event) -> None:
        self.gradients |= set(event.segments)
        self.gradient_step = self.have.step + 1

    forward = finish

    def agree(self, event: Event) -> None:
        kind = self.generation.kinds[event.turn - 1]
        step = self.have.step + (kind == "step")
        self._complete(self.have.seq + 1, kind, step, GENERATION)
        if event.turn == 1:
            self.held = {s: v for s, v in self.held.items() if s in self.mine}
            if not self.generation.rules.gate_healing:
                self.held.update(dict.fromkeys(self.mine - self.held.keys(), step))

    def gather(self, event: Event) -> None:
        for s in event.segments:
            self.rows_true[s] = self.rows_claimed[s] = self.have.step

    def _now_at(self, seq: int, kind: str, step: int, generation: int) -> None:
        self.have = self.have._replace(seq=seq, kind=kind, step=step, generation=generation)

    def _complete(self, seq: int, kind: str, step: int, generation: int) -> None:
        if generation == self.received_generation:
            self.held.update(self.received)
            self.received = {}
        self._now_at(seq, kind, step, generation)
        if kind != "step":
            return
        late: frozenset[int] = frozenset()  # agreed without its gradient
        if generation == GENERATION and not self.generation.rules.gate_gradients:
            late = self.mine - self.gradients
        self.held = {s: v for s, v in self.held.items() if s in self.gradients or s in late}
        self._apply(self.held.keys() - late, step)
        self.gradients = set()

    def _apply(self, segments: Iterable[int], step: int) -> None:
        for s in segments:
            if s in self.held:
                self.held[s] = self.rows_claimed[s] = self.rows_true[s] = step
                if self.state.get(s) == step - 1:
                    self.state[s] = step
                else:  # an update of the wrong version
                    self.state[s] = GARBAGE
