"""What a job's keys add up to: the view of a range that is listed, then followed."""

from __future__ import annotations

import pytest

from elastic.membership.job_keys import Changes, Entry, JobKeys, JobView, Listing, dump, parse
from elastic.membership.messages import Member, Mode, WorkerRef, World

KEYS = JobKeys("j")


def member(node="a", **fields):
    return Member(node=node, incarnation="1", address="h:1", slots=1, workers=(), **fields)


def world(generation=1):
    workers = (WorkerRef(worker_id="a.0-x", node="a", slot=0),)
    return World(generation=generation, workers=workers, stores=(), mode=Mode.NOW, reason="r")


def entry(record, revision):
    return Entry(dump(record.to_dict()), revision, 1)


def put(key, record, revision):
    return key, revision, entry(record, revision)


def changes(*events):
    return Changes(revision=events[-1][1], events=events)


@pytest.fixture
def view():
    view = JobView(KEYS)
    listed = {KEYS.member("a"): entry(member("a"), 3), KEYS.world: entry(world(1), 4)}
    assert view.apply(Listing(revision=5, entries=listed))
    return view


def test_only_what_snapshots_show_sorts_before_the_saves():
    shown = [KEYS.config, KEYS.member("zz~"), KEYS.result, KEYS.stop, KEYS.world]
    assert all(KEYS.prefix < key < KEYS.watched_end for key in shown)
    assert not KEYS.prefix <= KEYS.saves(1, 2) + b"w" < KEYS.watched_end
    assert KEYS.saves(1, 2).startswith(KEYS.prefix)


def test_a_listing_is_the_whole_state(view):
    snapshot = view.snapshot()
    assert (snapshot.revision, snapshot.world_revision, snapshot.world) == (5, 4, world(1))
    assert snapshot.members == {"a": member("a")}
    assert snapshot.member_revisions == {"a": 3}
    assert view.apply(Listing(revision=9, entries={}))
    assert (view.snapshot().members, view.snapshot().world, view.snapshot().world_revision) == (
        {},
        None,
        0,
    )


def test_an_empty_job_is_a_state_too():
    view = JobView(KEYS)
    assert view.apply(Listing(revision=1, entries={}))
    assert not view.apply(Listing(revision=2, entries={}))


def test_changes_are_taken_in_order(view):
    assert view.apply(
        changes(
            put(KEYS.member("b"), member("b"), 6),
            put(KEYS.world, world(2), 7),
            (KEYS.member("a"), 8, None),
            (KEYS.stop, 9, Entry(b"{}", 9, 0)),
            (KEYS.result, 10, Entry(b'{"ok":1}', 10, 0)),
        )
    )
    snapshot = view.snapshot()
    assert snapshot.members == {"b": member("b")}
    assert (snapshot.revision, snapshot.world, snapshot.world_revision) == (10, world(2), 7)
    assert (snapshot.stop, snapshot.result) == (True, {"ok": 1})


def test_what_a_listing_has_told_is_not_told_again(view):
    view.apply(Listing(revision=20, entries={KEYS.member("a"): entry(member("a"), 20)}))
    assert not view.apply(changes((KEYS.member("a"), 15, None)))
    assert view.snapshot().members == {"a": member("a")}
    assert view.snapshot().revision == 20


def test_a_change_that_no_snapshot_shows_is_none(view):
    assert not view.apply(changes((KEYS.config, 6, Entry(b"{}", 6, 0))))
    assert not view.apply(changes((KEYS.prefix + b"strange", 7, Entry(b"\xff", 7, 0))))


def test_the_same_state_listed_again_is_no_change(view):
    listed = {KEYS.member("a"): entry(member("a"), 3), KEYS.world: entry(world(1), 4)}
    assert not view.apply(Listing(revision=30, entries=listed))


def test_a_store_that_was_put_back_is_a_change(view):
    listed = {KEYS.member("a"): entry(member("a", leaving=True), 3), KEYS.world: entry(world(1), 4)}
    assert view.apply(Listing(revision=4, entries=listed))
    assert view.snapshot().members["a"].leaving
    assert view.snapshot().revision == 4
    assert view.apply(changes((KEYS.member("a"), 5, None)))


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"{}", b'{"node":"a"}'])
def test_a_member_that_cannot_be_read_counts_as_absent(view, value):
    assert view.apply(changes((KEYS.member("a"), 6, Entry(value, 6, 1))))
    assert view.snapshot().members == {}


def test_a_member_under_the_name_of_another_counts_as_absent(view):
    view.apply(changes(put(KEYS.member("b"), member("c"), 6)))
    assert set(view.snapshot().members) == {"a"}


@pytest.mark.parametrize("key", [KEYS.world, KEYS.result])
def test_a_world_or_result_that_cannot_be_read_is_an_error(view, key):
    with pytest.raises(ValueError):
        view.apply(changes((key, 6, Entry(b"[]", 6, 0))))


def test_values_are_compact_ascii_json():
    assert dump({"a": [1, "é"]}) == b'{"a":[1,"\\u00e9"]}'
    assert parse(dump({"a": [1, "é", "\ud800"]})) == {"a": [1, "é", "\ud800"]}
