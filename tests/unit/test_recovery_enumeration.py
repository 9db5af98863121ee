"""Every crash point of the step protocol, planned by the real recover() and place().

The model is in tests/model/. The numbers are exact: a change of a rule, of a plan or of the order
of events moves them, and then somebody should know why.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.step_judge import (
    ALL_DEAD,
    FORGOTTEN,
    NOTHING_AGREED,
    UNCONFIRMED,
    Found,
    judged_plan,
)
from tests.model.step_model import Generation, Rules
from tests.model.step_search import (
    STEP_PROGRAMS,
    Limits,
    first_worlds,
    search,
    wander_in_processes,
    wander_many,
)

# The copies of a generation count for a survivor either when it knows that the agreement that ends
# healing completed, or as soon as all their bytes are there. Both are safe; see the losses below.
CONFIRMED = Rules()
COMPLETE = Rules(count_copies="complete")

WITHOUT_END = [  # any number of deaths, reforms and joins, one after the other
    (Limits(2, 2), CONFIRMED, (125, 6831, 20093)),
    (Limits(2, 3), CONFIRMED, (125, 6831, 20093)),
    (Limits(2, 2), COMPLETE, (129, 8913, 25779)),
    pytest.param(Limits(3, 2), CONFIRMED, (3097, 713756, 4664976), marks=pytest.mark.slow),
]
DEATH_AFTER_DEATH = [  # a first failure anywhere, then another one anywhere in what follows
    (Limits(3, 4, min_first=3, max_depth=2), CONFIRMED, (2802, 197891, 1225565)),
    pytest.param(
        Limits(4, 4, 1, STEP_PROGRAMS, max_joiners=0, min_first=4, max_depth=2),
        CONFIRMED,
        (10363, 594478, 2781071),
        marks=pytest.mark.slow,
    ),
    (Limits(3, 3, 1, min_first=3, max_depth=2), COMPLETE, (1597, 77505, 296008)),
    (  # and a third one while the second is healed, with joins in between
        Limits(3, 4, 1, STEP_PROGRAMS, min_first=3, max_depth=3),
        CONFIRMED,
        (5338, 1058401, 4050754),
    ),
    pytest.param(
        Limits(5, 2, 1, STEP_PROGRAMS, max_joiners=0, min_first=5, max_depth=2),
        CONFIRMED,
        (10217, 1858720, 10529326),
        marks=pytest.mark.slow,
    ),
]
FIRST_DEATHS = [  # one or two at once
    (Limits(4, 5, min_first=4, max_depth=1), CONFIRMED, (2260, 3141, 34551)),
    pytest.param(
        Limits(5, 6, 2, STEP_PROGRAMS, max_joiners=0, min_first=5, max_depth=1),
        CONFIRMED,
        (13499, 13947, 223152),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(
    ("limits", "rules", "counts"), [*WITHOUT_END, *DEATH_AFTER_DEATH, *FIRST_DEATHS]
)
def test_no_crash_point_breaks_a_promise(limits, rules, counts, notes):
    found = search(limits, rules)
    notes.append(f"worlds up to {limits.max_world}: {found.summary()}")
    assert found.violations == {}, found.examples
    assert found.most_redone == 1
    assert (found.starts, found.cuts, found.cases) == counts
    assert set(found.lost) <= {ALL_DEAD, NOTHING_AGREED, FORGOTTEN, UNCONFIRMED}
    if limits == Limits(3, 2):  # it met every situation that the rules speak of
        assert len(found.met) == 8
        assert min(found.met.values()) > 0


def test_whole_copies_that_do_not_count_yet_are_the_only_avoidable_losses():
    # Two deaths in a row: the second takes the last old holder before any survivor knows that the
    # first agreement completed, while the new holder has every byte of the right step.
    confirmed = search(Limits(2, 2), CONFIRMED)
    assert (confirmed.lost[FORGOTTEN], confirmed.lost[UNCONFIRMED]) == (8, 16)
    complete = search(Limits(2, 2), COMPLETE)
    assert (complete.lost[FORGOTTEN], complete.lost[UNCONFIRMED]) == (0, 0)
    assert set(complete.lost) == {ALL_DEAD, NOTHING_AGREED}


@pytest.mark.parametrize(
    ("rules", "limits"),
    [
        (Rules(gate_gradients=False), Limits(3, 2, 1, STEP_PROGRAMS, max_depth=1)),
        (Rules(gate_healing=False), Limits(3, 2, 1, STEP_PROGRAMS, max_depth=2)),
        (Rules(result_travels=False), Limits(3, 2, 1, STEP_PROGRAMS, max_depth=2)),
        (Rules(everyone_enters=False), Limits(3, 2, 1, STEP_PROGRAMS, max_depth=2)),
        (Rules(count_copies="started"), Limits(3, 2, 1, STEP_PROGRAMS, max_depth=2)),
        (Rules(drop_moved="planned"), Limits(3, 3, 1, STEP_PROGRAMS, max_depth=2)),
    ],
    ids=lambda value: "" if isinstance(value, Limits) else None,
)
def test_every_rule_is_needed(rules, limits):
    assert search(limits, CONFIRMED).violations == {}
    assert search(limits, rules).violations.total() > 0


def test_states_are_the_cuts_that_single_events_lead_to():
    # The list of states against a dumb twin: from nothing, one event at a time, in every order.
    limits = Limits(2, 2)
    for start in first_worlds(limits):
        plan = judged_plan(start, limits.num_segments, CONFIRMED, Found())
        generation = Generation(start, plan, ("step", "close"), CONFIRMED, False)
        seen = {0}
        queue = [0]
        for cut in queue:
            for number, needs in enumerate(generation.needs):
                after = cut | 1 << number
                if cut & needs == needs and after not in seen:
                    seen.add(after)
                    queue.append(after)
        cuts = generation.cuts()
        assert len(cuts) == len(seen)
        assert set(cuts) == seen


@pytest.mark.slow
def test_a_hundred_thousand_random_cases(notes):
    seed = 20
    found = wander_in_processes(34_000, seed, max_world=6, max_segments=8)
    notes.append(f"random histories with seed {seed}: {found.summary()}")
    assert found.violations == {}, f"history {found.failed_history}: {found.examples}"
    assert found.most_redone == 1
    assert found.cases >= 100_000
    assert len(found.met) == 8
    assert min(found.met.values()) > 0


def test_the_counts_do_not_depend_on_the_number_of_processes():
    whole = wander_many(60, 3, max_world=4, max_segments=4)
    assert wander_in_processes(60, 3, max_world=4, max_segments=4, share=25) == whole


def test_a_history_can_be_followed_again():
    first, again = (wander_many(50, 3, max_world=4, max_segments=4) for _ in range(2))
    other = wander_many(50, 4, max_world=4, max_segments=4)
    assert first == again
    assert replace(first, examples=[]) != replace(other, examples=[])
