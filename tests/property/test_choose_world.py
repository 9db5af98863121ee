"""What holds for every World that choose_world proposes, whatever the records say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.membership.choose_world import (
    Proposal,
    View,
    Waiting,
    WorldRules,
    choose_world,
    ready_of,
    survivors_of,
)
from elastic.membership.messages import MAX_STORES, Member, Mode, WorkerRef, WorkerStatus, World

NODES = ("a", "b", "c", "d")


def worker_id(node: str, slot: int, life: int) -> str:
    return f"{node}.{slot}-{life:06x}"


@st.composite
def members(draw):
    """Records of some nodes: each slot empty, or with a worker of its first or second life."""
    found = {}
    for node in draw(st.sets(st.sampled_from(NODES))):
        slots = draw(st.integers(1, 3))
        workers = []
        for slot in range(slots + draw(st.integers(0, 1))):  # one more: a spare
            life = draw(st.sampled_from([0, 1, 2]))
            if life:
                ready = draw(st.booleans())
                workers.append(
                    WorkerStatus(worker_id=worker_id(node, slot, life), slot=slot, ready=ready)
                )
        found[node] = Member(
            node=node,
            incarnation=f"i-{node}",
            address=f"{node}:1",
            slots=slots,
            workers=tuple(workers),
            leaving=draw(st.integers(0, 5)) == 0,
        )
    return found


@st.composite
def worlds(draw):
    """No World, or one of first lives."""
    places = draw(
        st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 2)), unique=True, max_size=8)
    )
    if not places:
        return None
    return World(
        generation=draw(st.integers(1, 9)),
        workers=tuple(
            WorkerRef(worker_id=worker_id(node, slot, 1), node=node, slot=slot)
            for node, slot in places
        ),
        stores=tuple(dict.fromkeys(f"{node}:1" for node, _ in places))[:MAX_STORES],
        mode=Mode.NOW,
        reason="before",
    )


@st.composite
def questions(draw):
    world = draw(worlds())
    low = draw(st.integers(1, 3))
    rules = WorldRules(
        min_nodes=low,
        max_nodes=draw(st.integers(low, 4)),
        max_workers=draw(st.none() | st.integers(8, 12)),
        min_wait_s=draw(st.sampled_from([0.0, 1.0])),
    )
    view = View(
        now_s=10.0,
        formed=draw(st.booleans()),
        closing=draw(st.booleans()),
        lost_nodes=draw(st.frozensets(st.sampled_from(NODES))),
        broken=draw(st.sampled_from(["", "reset by peer"])),
        gathered_at_s=draw(st.sampled_from([None, 0.0, 9.9])),
        joiners_at_s=draw(st.sampled_from([None, 0.0, 9.9])),
    )
    return world, draw(members()), view, rules


def ask(question):
    world, records, view, rules = question
    return choose_world(world, records, view=view, rules=rules)


@given(questions())
@settings(max_examples=150, deadline=None)
def test_only_living_workers_are_chosen_and_generations_follow_each_other(question):
    world, records, view, rules = question
    answer = ask(question)
    if not isinstance(answer, Proposal):
        assert answer.until_s is None or answer.until_s > view.now_s
        return
    new = answer.world
    assert new.generation == (1 if world is None else world.generation + 1)
    ready = {w.worker_id for member in records.values() for w in ready_of(member)}
    survivors = [] if world is None else survivors_of(world, records, view.lost_nodes)
    for worker in new.workers:
        assert worker in survivors or worker.worker_id in ready
        if worker.node in records:
            assert not records[worker.node].leaving
    assert set(new.stores) <= {m.address for node, m in records.items() if node in new.nodes}
    if rules.max_workers is not None:
        assert len(new.workers) <= rules.max_workers


@given(questions())
@settings(max_examples=150, deadline=None)
def test_survivors_keep_their_order_and_joiners_follow_them(question):
    world, records, view, rules = question
    answer = ask(question)
    survivors = [] if world is None else survivors_of(world, records, view.lost_nodes)
    if not isinstance(answer, Proposal) or not survivors:
        return
    new = list(answer.world.workers)
    assert new[: len(survivors)] == survivors
    joined = new[len(survivors) :]
    if answer.world.mode is Mode.BOUNDARY:
        assert survivors == list(world.workers)
        assert joined
        assert view.formed
        assert not view.closing
    elif joined:  # only to make up for nodes that are missing
        assert len({w.node for w in survivors}) < rules.min_nodes
    assert len({w.node for w in new}) <= max(rules.max_nodes, len(world.nodes))


@given(questions(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_the_order_in_which_records_are_known_changes_nothing(question, random):
    world, records, view, rules = question
    shuffled = list(records.items())
    random.shuffle(shuffled)
    assert ask(question) == ask((world, dict(shuffled), view, rules))


@given(questions())
@settings(max_examples=150, deadline=None)
def test_a_world_that_is_in_force_is_not_proposed_again(question):
    _world, records, view, rules = question
    answer = ask(question)
    if not isinstance(answer, Proposal):
        return
    formed = View(now_s=view.now_s, formed=False, lost_nodes=view.lost_nodes)
    after = choose_world(answer.world, records, view=formed, rules=rules)
    assert isinstance(after, Waiting), after


@given(questions())
@settings(max_examples=150, deadline=None)
def test_fewer_nodes_than_the_minimum_are_told(question):
    world, _records, view, rules = question
    answer = ask(question)
    if isinstance(answer, Proposal) and not (view.closing and world is not None):
        changed = world is None or {*answer.world.workers} != {*world.workers}
        if changed and answer.world.mode is Mode.NOW:
            assert len(answer.world.nodes) >= rules.min_nodes
    if isinstance(answer, Waiting) and answer.below_minimum:
        assert answer.why
