"""Placements small enough to read."""

from __future__ import annotations

import pytest

from elastic.step.placement import place, share_out


def hosts(members, per_host=1):
    return {m: f"host{i // per_host}" for i, m in enumerate(members)}


def shown(placement):
    return " ".join("".join(holders) for holders in placement)


def previous(drawn):
    return {s: tuple(word) for s, word in enumerate(drawn.split())}


def test_a_new_job_has_blocks_and_spread_twins():
    # Primaries in blocks a, b, c; the twins of each block in contiguous runs over all others.
    placement = place({}, "abc", hosts("abc"), 12)
    assert shown(placement) == "ab ab ac ac ba ba bc bc ca ca cb cb"


def test_two_members_hold_everything_twice():
    assert shown(place({}, "ab", hosts("ab"), 4)) == "ab ab ba ba"


def test_one_member_has_no_twin():
    assert shown(place({}, "a", hosts("a"), 3)) == "a a a"


def test_a_death_makes_copies_of_what_it_held_and_moves_nothing_else():
    before = "ab ab bc bc cd cd da da"
    after = place(previous(before), "abc", hosts("abc"), 8)
    for was, now in zip(before.split(), after, strict=True):
        assert set(was) - {"d"} <= set(now)
    assert (
        sum(len(set(now) - set(was)) for was, now in zip(before.split(), after, strict=True)) == 4
    )


def test_a_twin_becomes_primary_for_free():
    after = place(previous("ab ab ba ba"), "b", hosts("b"), 4)
    assert shown(after) == "b b b b"


def test_a_joiner_gets_its_share_and_the_others_exchange_nothing():
    before = "ab ab ab ba ba ba"
    after = place(previous(before), "abc", hosts("abc"), 6)
    made = [m for was, now in zip(before.split(), after, strict=True) for m in set(now) - set(was)]
    assert made == ["c"] * 4  # 12 copies on 3 members


def test_roles_are_swapped_when_primaries_are_uneven():
    # Both hold everything, and the order in which they are named gives one of them all the work.
    assert [h[0] for h in place(previous("ab ab ab ab"), "ab", hosts("ab"), 4)] == list("aabb")


def test_the_twin_is_on_another_host():
    placement = place({}, "abcd", hosts("abcd", per_host=2), 8)  # ab | cd
    assert shown(placement) == "ac ad bc bd ca cb da db"


def test_a_new_host_is_used_to_part_copies_that_were_together():
    both_here = previous("ab ab ab ba ba ba")
    after = place(both_here, "abcd", hosts("abcd", per_host=2), 6)
    assert all(len({"ab".find(m) < 0 for m in holders}) == 2 for holders in after)


def test_holders_that_are_gone_or_too_many_do_not_count():
    after = place(previous("axb abc"), "abc", hosts("abc"), 2)
    assert set(after[0]) == {"a", "b"}
    assert len(after[1]) == 2


def test_a_segment_that_nobody_holds_is_placed_like_a_new_one():
    after = place({0: ("a", "b"), 2: ("b", "a")}, "ab", hosts("ab"), 3)
    assert [set(holders) for holders in after] == [{"a", "b"}] * 3


def test_more_members_than_copies_leaves_some_without():
    assert shown(place({}, "abcde", hosts("abcde"), 2)) == "ac bd"


@pytest.mark.parametrize(
    ("num_virtual_ranks", "width", "sizes"),
    [(8, 3, [3, 3, 2]), (8, 4, [2, 2, 2, 2]), (2, 3, [1, 1, 0]), (5, 1, [5])],
)
def test_virtual_ranks_are_shared_out_in_order(num_virtual_ranks, width, sizes):
    shares = share_out(num_virtual_ranks, [f"w{i}" for i in range(width)])
    assert [len(share) for share in shares] == sizes
    assert [v for share in shares for v in share] == list(range(num_virtual_ranks))


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(ValueError, match="members"):
        place({}, [], {}, 4)
    with pytest.raises(ValueError, match="each once"):
        place({}, "aa", hosts("a"), 4)
    with pytest.raises(ValueError, match="at least 1"):
        place({}, "a", hosts("a"), 4, replicas=0)
