"""Placements against a dumb twin that tries everything, and through long histories of Worlds."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.step.placement import place, share_out


def counts(placement, members):
    copies = Counter(m for holders in placement for m in holders)
    primaries = Counter(holders[0] for holders in placement)
    return [copies[m] for m in members], [primaries[m] for m in members]


def check(placement, members, replicas):
    assert all(len(h) == len(set(h)) == min(replicas, len(members)) for h in placement)
    assert all(set(h) <= set(members) for h in placement)
    for count in counts(placement, members):
        assert max(count) - min(count) <= 1


def cost(placement, previous, hosts):
    """What a placement is to keep low, the weightiest first: copies together, copies made."""
    together = sum(len(h) - len({hosts[m] for m in h}) for h in placement)
    made = sum(m not in previous.get(s, ()) for s, h in enumerate(placement) for m in h)
    return together, made


def dumb_cost(previous, members, hosts, num_segments, replicas):
    """The lowest cost of all balanced placements, by trying them all."""
    choices = list(combinations(members, min(replicas, len(members))))
    best = None
    for placement in product(choices, repeat=num_segments):
        copies, _ = counts(placement, members)
        if max(copies) - min(copies) <= 1:
            this = cost(placement, previous, hosts)
            best = this if best is None else min(best, this)
    return best


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_placement_is_better(data):
    members = "abcd"[: data.draw(st.integers(1, 4))]
    hosts = {m: data.draw(st.sampled_from("XY")) for m in members}
    num_segments = data.draw(st.integers(1, 4))
    replicas = data.draw(st.integers(1, 3))
    holders = st.lists(st.sampled_from([*members, "gone"]), max_size=3, unique=True).map(tuple)
    previous = {s: data.draw(holders) for s in range(num_segments)}
    placement = place(previous, members, hosts, num_segments, replicas)
    check(placement, members, replicas)
    if any(set(h) & set(members) for h in previous.values()):
        best = dumb_cost(previous, members, hosts, num_segments, replicas)
        assert cost(placement, previous, hosts) == best


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_worlds_that_come_and_go_stay_balanced_and_move_little(data):
    num_segments = data.draw(st.integers(1, 40))
    members = [f"w{i}" for i in range(data.draw(st.integers(1, 6)))]
    born = len(members)
    hosts = dict.fromkeys(members, "one")
    placement = place({}, members, hosts, num_segments)
    check(placement, members, 2)
    primaries = [members.index(holders[0]) for holders in placement]
    assert primaries == sorted(primaries)  # contiguous blocks, so that buckets are few
    for _ in range(data.draw(st.integers(1, 5))):
        if len(members) > 1 and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(members))
            members = [m for m in members if m != gone]
            previous = dict(enumerate(placement))
            placement = place(previous, members, hosts, num_segments)
            check(placement, members, 2)
            # What it held has to be made again, and no more: nobody else gives anything away.
            lost = sum(gone in h for h in previous.values()) if len(members) > 1 else 0
            assert cost(placement, previous, hosts)[1] <= lost + len(members)
        else:
            members = [*members, f"w{born}"]
            hosts[f"w{born}"] = "one"
            born += 1
            previous = dict(enumerate(placement))
            placement = place(previous, members, hosts, num_segments)
            check(placement, members, 2)
            made = cost(placement, previous, hosts)[1]
            assert made <= -(-2 * num_segments // len(members)) + len(members)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_hosts_are_spread_as_far_as_balance_allows(data):
    widths = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    hosts = {f"{h}.{i}": h for h, width in enumerate(widths) for i in range(width)}
    members = data.draw(st.permutations(list(hosts)))
    num_segments = data.draw(st.integers(1, 40))
    placement = place({}, members, hosts, num_segments)
    check(placement, members, 2)
    together, _ = cost(placement, {}, hosts)
    # A host can part at most as many segments as it has copies; only one that has more than half
    # of all copies cannot part all of its own.
    per_host = Counter(hosts[m] for h in placement for m in h)
    largest = max(per_host.values())
    assert together == max(0, largest - num_segments)


@given(st.integers(1, 60), st.integers(1, 70))
def test_virtual_ranks_are_shared_within_one(num_virtual_ranks, width):
    shares = share_out(num_virtual_ranks, [str(i) for i in range(width)])
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert [v for share in shares for v in share] == list(range(num_virtual_ranks))


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 8), st.integers(8, 80), st.data())
def test_the_loss_of_one_is_repaired_by_all(width, num_segments, data):
    members = [f"w{i}" for i in range(width)]
    hosts = {m: m for m in members}
    placement = place({}, members, hosts, num_segments)
    gone = data.draw(st.sampled_from(members))
    partners = Counter(m for h in placement if gone in h for m in h if m != gone)
    held = sum(partners.values())
    # Contiguous runs round each block's share, so an even spread is met within the two roundings.
    assert max(partners.values()) <= -(-held // (width - 1)) + 2
