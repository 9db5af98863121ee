"""Plans for single situations; every situation there is comes in test_recovery_enumeration.py."""

from __future__ import annotations

import pytest

from elastic.step.recovery import Agreement, Inventory, ProtocolViolation, Transfer, recover

SEGMENTS = 4


def agreed(step, *, seq=None, kind="step", generation=1):
    return Agreement(
        seq=step if seq is None else seq,
        kind=kind,
        step=step,
        generation=generation,
        result=b"what all said",
    )


def worker(name, held="", *, at=5, gradients="", **fields):
    """A worker that agreed on step `at` and holds these segments there, all rows in place.

    `held` as a mapping gives each segment a step of its own.
    """
    holds = held if isinstance(held, dict) else {int(s): at for s in held}
    said = {
        "worker_id": name,
        "node": f"host-{name}",
        "fresh": False,
        "layout": "x",
        "initial": "",
        "agreement": agreed(at) if at else None,
        "row_steps": (at,) * SEGMENTS,
        "held": holds,
        "received": {},
        "received_generation": 0,
        "gradients": frozenset(int(s) for s in gradients),
        "gradient_step": at + 1 if gradients else 0,
    }
    return Inventory(**{**said, **fields})


def newcomer(name, initial="i"):
    return worker(name, at=0, fresh=True, initial=initial, agreement=None)


def plan_for(*inventories, base="initial", **fields):
    return recover(inventories, SEGMENTS, base_when_fresh=base, **fields)


def moves(transfers):
    return {(t.source, t.target, s) for t in transfers for s in t.segments}


# -- survivors ----------------------------------------------------------------------------------


def test_survivors_at_one_step_make_new_twins():
    plan = plan_for(worker("a", "012"), worker("b", "123"))  # 0 and 3 lost a holder
    assert (plan.base, plan.step, plan.behind, plan.lost) == ("survivors", 5, (), ())
    assert [set(holders) for holders in plan.placement] == [{"a", "b"}] * 4
    assert moves(plan.state) == {("a", "b", 0), ("b", "a", 3)}
    assert plan.rows == ()


def test_the_newest_agreement_wins_and_the_rest_roll_forward():
    behind = worker("b", "23", gradients="23")
    plan = plan_for(worker("a", "01", at=6), behind)
    assert plan.agreement == agreed(6)
    assert (plan.step, plan.behind) == (6, ("b",))
    assert moves(plan.state) == {("a", "b", 0), ("a", "b", 1), ("b", "a", 2), ("b", "a", 3)}
    assert moves(plan.rows) == {("a", "b", 0), ("a", "b", 1)}  # it writes 2 and 3 by applying


def test_if_nobody_living_agreed_the_step_is_redone():
    plan = plan_for(worker("a", "0123", gradients="0123"), worker("b", "0123", gradients="0123"))
    assert (plan.step, plan.behind, plan.rows, plan.state) == (5, (), (), ())


def test_rows_that_were_still_under_way_are_sent_by_holders():
    plan = plan_for(worker("a", "0123"), worker("b", "0123"), worker("c", row_steps=(5, 4, 5, 4)))
    assert {(target, s) for _, target, s in moves(plan.rows)} == {("c", 1), ("c", 3)}
    assert {source for source, _, _ in moves(plan.rows)} == {"a", "b"}  # spread


def test_a_joiner_gets_all_rows_and_its_share_of_state():
    plan = plan_for(worker("a", "0123"), worker("b", "0123"), newcomer("c"))
    assert {(target, s) for _, target, s in moves(plan.rows)} == {("c", s) for s in range(4)}
    assert {target for _, target, _ in moves(plan.state)} == {"c"}
    assert 2 <= len(moves(plan.state)) <= 3  # 8 copies on 3 workers
    assert plan.behind == ()


def test_a_joiner_that_did_not_get_all_is_still_new():
    half = worker("c", "01", fresh=True, row_steps=(5, 5, 0, 0))
    plan = plan_for(worker("a", "0123"), worker("b", "0123"), half)
    assert {s for _, target, s in moves(plan.rows) if target == "c"} == {0, 1, 2, 3}
    assert all(source != "c" for source, _, _ in moves(plan.state))


def test_closing_an_epoch_applies_nothing():
    closed = agreed(5, seq=6, kind="close")
    plan = plan_for(worker("a", "0123", agreement=closed), worker("b", "0123"))
    assert plan.agreement == closed
    assert (plan.step, plan.behind) == (5, ("b",))
    assert plan.rows == plan.state == ()


def test_before_the_first_agreement_the_state_says_the_step():
    restored = [worker(n, "0123", agreement=None) for n in "ab"]
    plan = plan_for(*restored)
    assert (plan.base, plan.agreement, plan.step) == ("survivors", None, 5)


# -- copies that were being made ----------------------------------------------------------------


def copied(name, **fields):
    """A worker that has whole copies of all segments, made in generation 2 at step 5."""
    copies = dict.fromkeys(range(SEGMENTS), 5)
    return worker(name, received=copies, received_generation=2, **fields)


def test_a_copy_counts_once_a_survivor_knows_the_first_agreement():
    a = worker("a", "0123", at=6, agreement=agreed(6, generation=2))
    b = copied("b", gradients="0123")
    plan = plan_for(a, b, newcomer("c"))
    assert plan.behind == ("b",)
    # b rolls its copies forward and is as good as a: all that moves is the newcomer's share.
    assert {target for _, target, _ in moves(plan.state)} == {"c"}
    assert {source for source, _, _ in moves(plan.state)} == {"a", "b"}


def test_a_copy_that_no_survivor_knows_to_be_confirmed_does_not_count():
    plan = plan_for(worker("a", "0123"), copied("b"))
    assert moves(plan.state) == {("a", "b", s) for s in range(SEGMENTS)}
    assert plan_for(copied("b"), newcomer("c")).lost == (0, 1, 2, 3)


def test_an_old_holder_keeps_a_copy_until_the_others_are_confirmed():
    # Segment 0 moved from a to b in generation 2, whose first agreement only b completed.
    a = worker("a", "0123", gradients="123")
    b = worker(
        "b",
        "0123",
        at=6,
        agreement=agreed(6, generation=2),
    )
    plan = plan_for(a, b)
    assert plan.behind == ("a",)
    assert moves(plan.state) == {("b", "a", 0)}  # a drops its own: it cannot roll it forward


# -- losses -------------------------------------------------------------------------------------


def test_a_segment_without_a_holder_is_lost():
    plan = plan_for(worker("a", "01"), worker("b", "12"))
    assert plan.lost == (3,)
    assert plan.placement == plan.rows == plan.state == ()


def test_newcomers_alone_cannot_save_what_was_lost():
    assert plan_for(worker("a", row_steps=(5,) * 4), newcomer("b")).lost == (0, 1, 2, 3)


# -- the beginning ------------------------------------------------------------------------------


def test_a_new_job_takes_the_first_workers_initial_values():
    plan = plan_for(newcomer("a"), newcomer("b"), newcomer("c", initial="other"))
    assert (plan.base, plan.step, plan.agreement) == ("initial", 0, None)
    assert plan.rows == (Transfer(source="a", target="c", segments=(0, 1, 2, 3), what="rows"),)
    assert plan.state == ()


def test_a_restored_job_spreads_what_primaries_read():
    plan = plan_for(newcomer("a"), newcomer("b"), newcomer("c"), base="checkpoint")
    assert plan.base == "checkpoint"
    primaries = {s: holders[0] for s, holders in enumerate(plan.placement)}
    assert moves(plan.rows) == {
        (p, target, s) for s, p in primaries.items() for target in "abc" if target != p
    }
    assert moves(plan.state) == {
        (holders[0], holders[1], s) for s, holders in enumerate(plan.placement)
    }


def test_one_replica_makes_no_twins():
    plan = plan_for(newcomer("a"), newcomer("b"), replicas=1)
    assert [len(holders) for holders in plan.placement] == [1, 1, 1, 1]


# -- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inventories", "words"),
    [
        ((worker("a", "0123", at=7), worker("b", "0123", at=5)), "b is 2 agreements behind"),
        (
            (worker("a", "01"), worker("b", "23", agreement=agreed(5, generation=2))),
            "two results of agreement 5",
        ),
        (
            (worker("a", "0123", at=6), worker("b", "0123", gradients="012")),
            "b entered the agreement of step 6 without the gradient of segment 3",
        ),
        (
            (worker("a", "0123", at=6), worker("b", "0", gradients="0", gradient_step=5)),
            "b entered the agreement of step 6 without the gradient of segment 0",
        ),
        ((worker("a", "0123"), worker("b", held={0: 4})), "b holds segment 0 at step 4"),
        ((worker("a", "0123"), worker("b", held={0: 6})), "b holds segment 0 at step 6"),
        (
            (worker("a", "0123"), worker("b", row_steps=(6, 5, 5, 5))),
            "b has rows of step 6, and nobody agreed beyond 5",
        ),
        (
            (worker("a", "01", at=0), worker("b", held={2: 3}, at=0)),
            r"state of steps \[0, 3\] without an agreement",
        ),
    ],
)
def test_inventories_that_the_gate_rules_out_are_our_bug(inventories, words):
    with pytest.raises(ProtocolViolation, match=words):
        plan_for(*inventories)


def test_every_worker_computes_the_same_plan():
    members = (worker("a", "012", at=6), worker("b", "123", gradients="123"), newcomer("c"))
    assert plan_for(*members) == plan_for(*members)
