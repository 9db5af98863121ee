"""The search over all starts: unlimited deaths, reforms and joins, until nothing new is found.

`search` lists every start that some first Worlds can lead to, breadth first. `wander` follows
random histories through the same generations, for worlds that are too large to list. Both judge
each plan and each generation (step_judge.py). As a program, for larger limits than tests have
time for:

    python -m tests.model.step_search --world 3 --segments 4
    python -m tests.model.step_search --world 6 --segments 8 --histories 100000 --seed 7
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from random import Random
from typing import TYPE_CHECKING

from tests.model.step_judge import Found, judge_generation, judged_plan
from tests.model.step_model import (
    GARBAGE,
    GENERATION,
    STEADY,
    Generation,
    Have,
    Rules,
    Start,
    newcomer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP_PROGRAMS = (("step", "step"),)
ALL_PROGRAMS = (("step", "step"), ("close", "step"))


@dataclass(frozen=True)
class Limits:
    """What is enumerated.

    max_world: members of a World; joiners come while there are fewer.
    num_segments: segments of the job.
    max_dead: workers that die at one cut.
    programs: the agreements of a generation.
    max_joiners: that come at once.
    rows_in_order: True as the driver waits for rows; False any order.
    max_depth: generations after the first; None is until nothing new is found.
    """

    max_world: int
    num_segments: int
    max_dead: int = 2
    programs: tuple[tuple[str, ...], ...] = ALL_PROGRAMS
    max_joiners: int = 1
    rows_in_order: bool = True
    max_depth: int | None = None
    min_first: int = 1


def first_worlds(limits: Limits) -> list[Start]:
    """Worlds of workers that have just started."""
    fresh = newcomer(limits.num_segments)
    return [
        Start((fresh,) * width, 0, sealed=False)
        for width in range(limits.min_first, limits.max_world + 1)
    ]


def search(limits: Limits, rules: Rules | None = None) -> Found:
    """List every start that is reachable, breadth first, and judge it."""
    rules = rules or Rules()
    found = Found()
    queue = deque((start, 0) for start in first_worlds(limits))
    seen = {start for start, _ in queue}
    while queue:
        start, depth = queue.popleft()
        found.starts += 1
        plan = judged_plan(start, limits.num_segments, rules, found)
        if plan is None or depth == limits.max_depth:
            continue
        for kinds in limits.programs:
            generation = Generation(start, plan, kinds, rules, limits.rows_in_order)
            judge_generation(generation, found)
            for outcome in outcomes(generation, limits, found):
                for following in with_joiners(outcome, limits):
                    if following not in seen:
                        seen.add(following)
                        queue.append((following, depth + 1))
    return found


def wander_many(
    histories: int | range,
    seed: int,
    *,
    max_world: int,
    max_segments: int,
    rules: Rules | None = None,
) -> Found:
    """Follow random histories; each has a generator of its own, so one can be followed alone."""
    found = Found()
    for number in range(histories) if isinstance(histories, int) else histories:
        random = Random(f"{seed}:{number}")
        wander(random, found, max_world, max_segments, rules or Rules())
        if found.violations:
            found.failed_history = f"{seed}:{number}"
            break
    return found


def wander_in_processes(
    histories: int, seed: int, *, max_world: int, max_segments: int, share: int = 1000
) -> Found:
    """Do as `wander_many` does, on all cores; the counts do not depend on their number."""
    follow = partial(wander_many, seed=seed, max_world=max_world, max_segments=max_segments)
    shares = [range(i, min(i + share, histories)) for i in range(0, histories, share)]
    found = Found()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for part in pool.map(follow, shares):
            found.add(part)
    return found


def wander(random: Random, found: Found, max_world: int, max_segments: int, rules: Rules) -> None:
    """Follow one random history: up to six generations, hosts with one or two workers.

    It ends early where a loss sends the job back to a checkpoint.
    """
    num_segments = random.randint(1, max_segments)
    per_host = random.randint(1, 2)
    fresh = newcomer(num_segments)
    start = Start((fresh,) * random.randint(2, max_world), 0, sealed=False)
    for _ in range(random.randint(2, 6)):
        found.starts += 1
        plan = judged_plan(start, num_segments, rules, found, per_host)
        if plan is None:
            return
        kinds = tuple(random.choices(("step", "close", "evaluate", "void"), (5, 1, 1, 1), k=2))
        generation = Generation(start, plan, kinds, rules, rows_in_order=False)
        judge_generation(generation, found)
        cut = random_cut(generation, random)
        if plan.base == "initial" and random.random() < 0.8:
            cut = (1 << len(generation.events)) - 1  # most histories begin in peace
        width = generation.width
        count = min(random.choices((0, 1, 2), (1, 5, 1))[0], width - 1)
        dead = random.sample(range(width), count)
        alive = [w for w in range(width) if w not in dead]
        past = cut & (sum(generation.agreed) | sum(generation.computing[w] for w in alive))
        counted = Normal(generation)
        following = counted.start(counted.key([generation.have(w, cut) for w in alive], past))
        found.most_redone = max(found.most_redone, counted.most_redone)
        found.cases += 1
        joiners = min(random.choices((0, 1, 2), (2, 3, 1))[0], max_world - len(alive))
        start = following._replace(members=following.members + (fresh,) * joiners)


def random_cut(generation: Generation, random: Random) -> int:
    """Return a reachable state; how far each worker gets is drawn first."""
    haste = [random.choice((1.0, 1.0, 0.98, 0.9)) for _ in range(generation.width)]
    last = random.randint(1, len(generation.events))
    cut = 0
    for number, needs in enumerate(generation.needs[:last]):
        owner = generation.events[number].owner
        if cut & needs == needs and random.random() < haste[owner]:
            cut |= 1 << number
    return cut


# -- from one generation to the next ----------------------------------------------------------


def outcomes(generation: Generation, limits: Limits, found: Found) -> Iterator[Start]:
    """Yield what survivors have, for every cut and every set of workers that die there."""
    cuts = generation.cuts()
    found.cuts += len(cuts)
    width = generation.width
    shown = sum(generation.own) | sum(generation.computed)
    seen = {cut & shown for cut in cuts}
    counted = Normal(generation)
    for count in range(min(limits.max_dead, width - 1) + 1):
        for dead in combinations(range(width), count):
            found.cases += len(cuts)
            alive = [w for w in range(width) if w not in dead]
            kept = sum(generation.own[w] for w in alive)
            # What anybody agreed, and what survivors computed.
            history = sum(generation.agreed) | sum(generation.computing[w] for w in alive)
            happened: dict[int, int] = {}  # what survivors have -> the most that may have happened
            for cut in seen:
                local = cut & kept
                happened[local] = happened.get(local, 0) | cut & history
            found.outcomes += len(happened)
            keys = set()
            for local, past in happened.items():
                haves = [generation.have(w, local) for w in alive]
                keys.add(counted.key(haves, past))
            yield from (counted.start(key) for key in sorted(keys))
    found.most_redone = max(found.most_redone, counted.most_redone)


class Normal:
    """Starts as they follow from one generation, counted from the newest agreement of each.

    Steps and agreements are shifted and generations numbered anew. Gradients of any step but the
    newest agreed one are left out: they belong to an agreement that nobody living completed, and a
    redone step has new ones. So are steps that are long past. What one worker becomes is kept per
    (worker's memory, newest agreement, generations in use), which makes the search possible.
    """

    def __init__(self, generation: Generation) -> None:
        self._before = generation.start
        self._agreed = generation.plan.agreement.seq if generation.plan.agreement else 0
        self._tidy: dict[tuple[int, int, int, frozenset[int]], int] = {}
        self._members: list[Have] = []
        self._number: dict[Have, int] = {}
        self._generation = generation
        self._past: dict[int, tuple[int, int]] = {}
        self.most_redone = 0

    def key(self, haves: list[Have], past: int) -> tuple[tuple[int, ...], int, bool]:
        """Return a short name of the start; `past` is what anybody computed and agreed."""
        if past not in self._past:
            self._past[past] = self._generation.completed(past), self._generation.begun(past)
        completed, begun = self._past[past]
        seq, step = -1, 0
        sealed = False
        used = set()
        for have in haves:
            if have.fresh:
                continue
            if have.seq > seq:
                seq, step = have.seq, have.step
            used.add(have.generation)
            if have.received:
                used.add(have.received_generation)
                fresh_copy = have.received_generation == GENERATION
                sealed |= completed > 0 if fresh_copy else self._before.sealed
        if seq >= 0 and begun - step > self.most_redone:
            self.most_redone = begun - step
        durable = self._before.durable + self._agreed
        if completed:
            durable = max(durable, self._agreed + completed - 1)
        generations = frozenset(used)
        members = []
        for have in haves:
            known = self._tidy.get((id(have), seq, step, generations))
            if known is None:
                known = self._tidy_number(have, seq, step, generations)
            members.append(known)
        return tuple(members), max(durable - max(seq, 0), -1), sealed

    def start(self, key: tuple[tuple[int, ...], int, bool]) -> Start:
        """Return the start of that name."""
        members, durable, sealed = key
        return Start(tuple(self._members[m] for m in members), durable, sealed)

    def _tidy_number(self, have: Have, seq: int, step: int, used: frozenset[int]) -> int:
        tidy = normal(have, seq, step, used)
        number = self._number.setdefault(tidy, len(self._members))
        if number == len(self._members):
            self._members.append(tidy)
        self._tidy[(id(have), seq, step, used)] = number
        return number


def normal(have: Have, newest_seq: int, newest_step: int, used: frozenset[int]) -> Have:
    """Return a worker's memory counted from the newest agreement."""
    if have.fresh:
        return newcomer(len(have.rows))
    shift_seq = shift_step = 0
    if newest_seq >= 2:
        shift_seq, shift_step = STEADY - newest_seq, STEADY - newest_step
    renamed = {g: i for i, g in enumerate(sorted(used - {0}), start=1)}
    renamed[0] = 0

    def shifted(step: int) -> int:
        return GARBAGE if step == GARBAGE else max(step, newest_step - 2) + shift_step

    def copies(them: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        return frozenset((s, shifted(v)) for s, v in them)

    useful = have.gradient_step == newest_step and have.seq < newest_seq
    return Have(
        fresh=False,
        seq=have.seq + shift_seq if have.seq else 0,
        kind=have.kind,
        step=have.step + shift_step,
        generation=renamed[have.generation],
        rows=tuple(map(shifted, have.rows)),
        true_rows=tuple(map(shifted, have.true_rows)),
        held=copies(have.held),
        received=copies(have.received),
        received_generation=renamed[have.received_generation],
        gradients=have.gradients if useful else frozenset(),
        gradient_step=have.gradient_step + shift_step if useful else 0,
        true_state=copies(have.true_state),
    )


def with_joiners(start: Start, limits: Limits) -> Iterator[Start]:
    """Yield the start as it is, and with newcomers."""
    yield start
    fresh = newcomer(limits.num_segments)
    for joiners in range(1, limits.max_joiners + 1):
        if len(start.members) + joiners <= limits.max_world:
            yield start._replace(members=start.members + (fresh,) * joiners)


# -- as a program -----------------------------------------------------------------------------


def main() -> int:
    """Run one search or many histories; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="search the step protocol for violations")
    parser.add_argument("--world", type=int, default=3, help="most members of a World")
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--dead", type=int, default=2, help="most workers that die at once")
    parser.add_argument("--depth", type=int, help="generations after the first; default: all")
    parser.add_argument("--histories", type=int, help="random histories instead of all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--copies", choices=["confirmed", "complete"], default="confirmed")
    given = parser.parse_args()
    rules = Rules(count_copies=given.copies)
    began_s = time.process_time()
    if given.histories:
        found = wander_many(
            given.histories,
            given.seed,
            max_world=given.world,
            max_segments=given.segments,
            rules=rules,
        )
    else:
        limits = Limits(given.world, given.segments, max_dead=given.dead, max_depth=given.depth)
        found = search(limits, rules)
    sys.stdout.write(f"{vars(given)}: {found.summary()} in {time.process_time() - began_s:.0f} s\n")
    for what, start in found.examples:
        sys.stdout.write(f"{what}: {start}\n")
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main())
