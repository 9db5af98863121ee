"""Records that agents share: what comes back is what was written, and it stays small."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.membership.messages import Member, Mode, Snapshot, WorkerRef, WorkerStatus, World

WORDS = st.text(
    st.characters(exclude_categories=("Z", "C"), exclude_characters="/"), min_size=1, max_size=8
)
SUFFIXES = WORDS | st.sampled_from(["=", "-", "=x", "abcdef"])


@st.composite
def worker_refs(draw):
    nodes = draw(st.lists(WORDS, min_size=1, max_size=4, unique=True))
    places = st.tuples(st.sampled_from(nodes), st.integers(0, 5))
    refs = []
    for node, slot in draw(st.lists(places, min_size=1, max_size=12, unique=True)):
        usual = f"{node}.{slot}-{draw(SUFFIXES)}"
        refs.append(WorkerRef(worker_id=draw(st.just(usual) | SUFFIXES), node=node, slot=slot))
    ids = [ref.worker_id for ref in refs]
    return tuple(ref for i, ref in enumerate(refs) if ref.worker_id not in ids[:i])


WORLDS = st.builds(
    World,
    generation=st.integers(1, 10**6),
    workers=worker_refs(),
    stores=st.lists(WORDS, max_size=2).map(tuple),
    mode=st.sampled_from(Mode),
    reason=st.text(max_size=20),
)


def member(node="a", **fields):
    defaults = {"incarnation": "1", "address": "h:1", "slots": 2, "workers": ()}
    return Member(node=node, **{**defaults, **fields})


def status(slot=0, worker_id=None, *, ready=True):
    return WorkerStatus(worker_id=worker_id or f"a.{slot}-x", slot=slot, ready=ready)


def ref(slot=0, node="a", worker_id=None):
    return WorkerRef(worker_id=worker_id or f"{node}.{slot}-x", node=node, slot=slot)


def world(*workers, **fields):
    defaults = {"generation": 1, "stores": (), "mode": Mode.NOW, "reason": "r"}
    return World(workers=workers or (ref(),), **{**defaults, **fields})


def through_json(value):
    return type(value).from_dict(json.loads(json.dumps(value.to_dict())))


@given(WORLDS)
def test_a_world_comes_back_whole(value):
    assert through_json(value) == value


@pytest.mark.parametrize(
    "value",
    [
        ref(3),
        status(1, ready=False),
        member(),
        member(workers=(status(0), status(5, "odd", ready=False)), leaving=True),
        member(finished=True),
        Snapshot(revision=3, world=None, world_revision=0),
        Snapshot(
            revision=9,
            world=world(ref(0), ref(1, "b")),
            world_revision=7,
            members={"a": member("a"), "b": member("b")},
            member_revisions={"a": 4, "b": 9},
            result={"value": [1, None, "x"]},
            stop=True,
        ),
    ],
)
def test_a_record_comes_back_whole(value):
    assert through_json(value) == value


def test_a_world_of_4000_agents_stays_below_500_kilobytes():
    workers = tuple(
        WorkerRef(
            worker_id=f"node-{i:05d}.{slot}-{i * 8 + slot:06x}", node=f"node-{i:05d}", slot=slot
        )
        for i in range(4000)
        for slot in range(8)
    )
    large = world(*workers)
    text = json.dumps(large.to_dict(), separators=(",", ":"))
    assert len(text) < 500_000
    assert World.from_dict(json.loads(text)) == large


def test_a_world_knows_ranks_and_nodes():
    value = world(ref(0, "b"), ref(1, "b"), ref(0, "a"), ref(2, "b"))
    assert value.nodes == ("b", "a")
    assert [value.rank_of(w.worker_id) for w in value.workers] == [0, 1, 2, 3]
    assert value.rank_of("gone") is None


def test_a_snapshot_does_not_change_with_what_it_was_made_from():
    members = {"a": member("a")}
    snapshot = Snapshot(
        revision=1, world=None, world_revision=0, members=members, member_revisions={"a": 1}
    )
    members["b"] = member("b")
    assert set(snapshot.members) == {"a"}
    with pytest.raises(TypeError):
        snapshot.members["b"] = member("b")


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: ref(-1), "counted from 0"),
        (lambda: ref(0, worker_id="two words"), "worker id"),
        (lambda: ref(0, node="a/b", worker_id="x"), "node name"),
        (lambda: member(""), "node name"),
        (lambda: member(incarnation=""), "incarnation"),
        (lambda: member(workers=(status(0), status(0, "other"))), "slot 0 stands twice"),
        (lambda: member(workers=(status(0, "w"), status(1, "w"))), "'w' stands twice"),
        (lambda: world(generation=0), "count from 1"),
        (lambda: world(stores=("a", "b", "c")), "more than 2 stores"),
        (lambda: world(ref(0), ref(0, worker_id="other")), "stands twice"),
        (lambda: World(generation=1, workers=(), stores=(), mode=Mode.NOW, reason=""), "no worker"),
        (
            lambda: Snapshot(revision=1, world=None, world_revision=0, members={"a": member()}),
            "needs its revision",
        ),
    ],
)
def test_what_cannot_be_is_not_built(build, complaint):
    with pytest.raises(ValueError, match=complaint):
        build()


GOOD = world(ref(0), ref(1)).to_dict()


@pytest.mark.parametrize(
    "plain",
    [
        {},
        [],
        None,
        {**GOOD, "mode": "later"},
        {**GOOD, "generation": "1"},
        {**GOOD, "generation": 0},
        {**GOOD, "ids": "x"},
        {**GOOD, "ids": "x y z"},
        {**GOOD, "ids": None},
        {**GOOD, "runs": [0, 0]},
        {**GOOD, "runs": [1, 0, 2]},
        {**GOOD, "runs": [-1, 0, 2]},
        {**GOOD, "runs": "abc"},
        {**GOOD, "nodes": None},
        {key: GOOD[key] for key in GOOD if key != "reason"},
    ],
)
def test_a_strange_world_is_refused_with_a_value_error(plain):
    with pytest.raises(ValueError):
        World.from_dict(plain)


def test_strange_members_and_workers_are_refused():
    for parse in (
        Member.from_dict,
        WorkerRef.from_dict,
        WorkerStatus.from_dict,
        Snapshot.from_dict,
    ):
        with pytest.raises(ValueError, match="record"):
            parse({"node": "a"})
    with pytest.raises(ValueError):
        Member.from_dict({**member().to_dict(), "workers": [["w", 0]]})


def test_what_a_newer_agent_adds_is_passed_over():
    assert World.from_dict({**GOOD, "later": 1}) == world(ref(0), ref(1))
    assert Member.from_dict({**member().to_dict(), "later": 1}) == member()
