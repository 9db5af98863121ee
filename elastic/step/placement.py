"""Who holds which segment, and who computes which virtual ranks.

A segment has `replicas` copies: a primary and, in a world of more than one, a twin. Wanted of a
placement, in this order of weight:

1. copies per member differ by one at most, and so do primaries (memory and work are shared);
2. as many segments as possible have their copies on different hosts (a host may die whole);
3. as few copies as possible are made: losing one of W members makes about 2S/W, a joiner gets its
   share and nothing else moves;
4. what one member holds has its other copies spread over all others (its loss is repaired by all).

Who already has a complete copy is all that matters of a segment, so segments with the same holders
form a group, and a placement is a minimum-cost flow of copies

    source -> group -> (group, host) -> member -> sink

whose costs are those four wishes, each outweighing all later ones together. It is solved exactly;
its size does not depend on the number of segments. Which holder is primary costs nothing to change
(both have everything), so roles are evened out afterwards along chains of swaps.

Nothing here knows bytes: segments are nearly equal by construction (segments.py).
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Group = tuple[int, ...]  # members (by rank) that have a complete copy now


def share_out(num_virtual_ranks: int, members: Sequence[str]) -> tuple[range, ...]:
    """Return each member's contiguous range of virtual ranks: sizes within one, longer first.

    Members beyond the number of virtual ranks get empty ranges.
    """
    each, longer = divmod(num_virtual_ranks, len(members))
    shares = []
    start = 0
    for index in range(len(members)):
        stop = start + each + (1 if index < longer else 0)
        shares.append(range(start, stop))
        start = stop
    return tuple(shares)


def place(
    previous: Mapping[int, tuple[str, ...]],
    members: Sequence[str],
    hosts: Mapping[str, str],
    num_segments: int,
    replicas: int = 2,
) -> tuple[tuple[str, ...], ...]:
    """Return the holders of each segment, primary first. Same arguments, same placement.

    Args:
        previous: segment -> members that hold a complete copy now, the preferred primary first;
            others than `members` are ignored. Empty for a job without state: then primaries are
            contiguous blocks. A segment without a copy is placed like a new one.
        members: the World's workers in rank order.
        hosts: member -> host.
        num_segments: all segments.
        replicas: wanted copies of a segment; at most one per member.

    Raises:
        ValueError: no members, a member listed twice, or fewer than one replica.
    """
    if not members or len(set(members)) != len(members):
        raise ValueError(f"members must be given, each once: {list(members)}")
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; it must be at least 1")
    copies = min(replicas, len(members))
    rank_of = {m: rank for rank, m in enumerate(members)}
    kept = [
        tuple(dict.fromkeys(rank_of[m] for m in previous.get(s, ()) if m in rank_of))
        for s in range(num_segments)
    ]
    if not any(kept):
        blocks = share_out(num_segments, members)
        kept = [(rank,) for rank, block in enumerate(blocks) for _ in block]
    groups: dict[Group, list[int]] = {}
    for segment, holders in enumerate(kept):
        groups.setdefault(tuple(sorted(holders)), []).append(segment)
    names = {host: i for i, host in enumerate(dict.fromkeys(hosts[m] for m in members))}
    host_of = [names[hosts[m]] for m in members]
    flow = _CopyFlow(groups, host_of, copies)
    placement: list[list[int]] = [[] for _ in range(num_segments)]
    for group, segments in groups.items():
        _deal(segments, flow.copies_of(group), host_of, placement)
    _choose_primaries(placement, kept, len(members))
    _even_out_primaries(placement, len(members))
    return tuple(tuple(members[m] for m in holders) for holders in placement)


# -- copies -----------------------------------------------------------------------------------


class _CopyFlow:
    """How many copies of each group every member gets; solved when built.

    Args:
        groups: holders -> their segments.
        host_of: host of each member.
        copies: copies of each segment.
    """

    def __init__(
        self, groups: Mapping[Group, Sequence[int]], host_of: Sequence[int], copies: int
    ) -> None:
        count = len(host_of)
        total = copies * sum(len(segments) for segments in groups.values())
        move = total + 1  # costs: a move outweighs any unevenness, and so on upwards
        together = move * (total + 1)
        short = together * (total + 1)
        network = _Network(2 + count)
        source, sink = 0, 1
        self._arcs: dict[Group, list[tuple[int, int]]] = {}  # group -> (member, arc)
        floors = [network.arc(2 + m, sink, total // count, -short) for m in range(count)]
        if total % count:
            for m in range(count):
                network.arc(2 + m, sink, 1, 0)
        for group, segments in groups.items():
            size = len(segments)
            node = network.node()
            entry = network.arc(source, node, copies * size, 0)
            doors: dict[int, tuple[int, int]] = {}  # host -> (its node, its free arc)
            for host in dict.fromkeys(host_of):
                door = network.node()
                doors[host] = (door, network.arc(node, door, size, 0))
                network.arc(node, door, size * (copies - 1), together)
            fair = self._fair_share(group, size, host_of, copies)
            arcs = self._arcs.setdefault(group, [])
            for m in range(count):
                door, free = doors[host_of[m]]
                if m in group:
                    arc = network.arc(door, 2 + m, size, 0)
                    # Copies that stay cost nothing, so taking them first is optimal so far.
                    network.push_along((entry, free, arc, floors[m]))
                    arcs.append((m, arc))
                else:
                    arcs.append((m, network.arc(door, 2 + m, min(fair, size), move)))
                    if fair < size:
                        arcs.append((m, network.arc(door, 2 + m, size - fair, move + 1)))
        network.saturate(source, sink)
        self._network = network

    @staticmethod
    def _fair_share(group: Group, size: int, host_of: Sequence[int], copies: int) -> int:
        """Return how many of a group's new copies one member gets before it is uneven."""
        taken = {host_of[m] for m in group}
        others = [m for m in range(len(host_of)) if m not in group]
        elsewhere = [m for m in others if host_of[m] not in taken]
        takers = len(elsewhere or others) or 1
        return -(-size * max(1, copies - len(group)) // takers)

    def copies_of(self, group: Group) -> dict[int, int]:
        """Return member -> number of the group's segments that it holds."""
        found: dict[int, int] = {}
        for member, arc in self._arcs[group]:
            flow = self._network.flow(arc)
            if flow:
                found[member] = found.get(member, 0) + flow
        return found


class _Network:
    """Minimum-cost flow by successive cheapest paths. Arcs come in pairs: arc ^ 1 is its return."""

    def __init__(self, nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._left: list[int] = []
        self._cost: list[int] = []

    def node(self) -> int:
        """Add a node."""
        self._out.append([])
        return len(self._out) - 1

    def arc(self, start: int, end: int, capacity: int, cost: int) -> int:
        """Add an arc; returns its number."""
        for a, b, room, price in ((start, end, capacity, cost), (end, start, 0, -cost)):
            self._out[a].append(len(self._to))
            self._to.append(b)
            self._left.append(room)
            self._cost.append(price)
        return len(self._to) - 2

    def flow(self, arc: int) -> int:
        """Return what flows through an arc."""
        return self._left[arc ^ 1]

    def push_along(self, path: Sequence[int]) -> None:
        """Send as much as a path takes."""
        amount = min(self._left[arc] for arc in path)
        for arc in path:
            self._left[arc] -= amount
            self._left[arc ^ 1] += amount

    def saturate(self, source: int, sink: int) -> None:
        """Send all that the source has, each time along a cheapest path."""
        while path := self._cheapest(source, sink):
            self.push_along(path)

    def _cheapest(self, source: int, sink: int) -> list[int]:
        far: list[int | None] = [None] * len(self._out)
        came = [-1] * len(self._out)
        waiting = [False] * len(self._out)
        far[source] = 0
        queue = deque([source])
        out, to, left, cost = self._out, self._to, self._left, self._cost
        while queue:
            node = queue.popleft()
            waiting[node] = False
            here = far[node]
            assert here is not None
            for arc in out[node]:
                if not left[arc]:
                    continue
                end = to[arc]
                there = here + cost[arc]
                known = far[end]
                if known is None or there < known:
                    far[end] = there
                    came[end] = arc
                    if not waiting[end]:
                        waiting[end] = True
                        queue.append(end)
        path: list[int] = []
        node = sink
        while node != source:
            arc = came[node]
            if arc < 0:
                return []
            path.append(arc)
            node = to[arc ^ 1]
        return path


def _deal(
    segments: Sequence[int],
    counts: Mapping[int, int],
    host_of: Sequence[int],
    placement: Sequence[list[int]],
) -> None:
    """Give a group's segments their holders, host by host, in runs that go round.

    A member has at most as many copies as there are segments, so its run meets no segment twice;
    the same holds for a host whenever its count allows it. Runs are contiguous, so neighbours
    tend to have the same holders.
    """
    place_in_turn = 0
    for member in sorted(counts, key=lambda m: (host_of[m], m)):
        for _ in range(counts[member]):
            placement[segments[place_in_turn % len(segments)]].append(member)
            place_in_turn += 1


# -- roles ------------------------------------------------------------------------------------


def _choose_primaries(
    placement: Sequence[list[int]], kept: Sequence[Sequence[int]], count: int
) -> None:
    """Put the first wished holder that has room for a role in front, else the one with fewest."""
    room, longer = divmod(len(placement), count)
    led = [0] * count
    for segment, holders in enumerate(placement):
        wish = kept[segment]
        holders.sort(key=lambda m: wish.index(m) if m in wish else len(wish) + m)
        most = room + 1 if longer else room
        first = next((m for m in holders if m in wish and led[m] < most), None)
        if first is None:
            first = min(holders, key=lambda m: (led[m], holders.index(m)))
        led[first] += 1
        longer -= led[first] == room + 1
        holders.remove(first)
        holders.insert(0, first)


def _even_out_primaries(placement: Sequence[list[int]], count: int) -> None:
    """Swap roles along chains until primaries differ by one at most; no byte moves.

    Such a choice exists because copies differ by one at most: if each member were primary of its
    copies in equal fractions, the sums would be within one, and a flow can be made whole.
    """
    while True:
        led: list[list[int]] = [[] for _ in range(count)]
        for segment, holders in enumerate(placement):
            led[holders[0]].append(segment)
        for start in sorted(range(count), key=lambda m: (-len(led[m]), m)):
            chain = _chain(start, led, placement)
            if chain:
                break
        else:
            return
        for segment, successor in chain:
            placement[segment].remove(successor)
            placement[segment].insert(0, successor)


def _chain(
    start: int, led: Sequence[Sequence[int]], placement: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Return (segment, new primary) that take one role from `start` to a member with two fewer."""
    came: dict[int, tuple[int, int]] = {start: (start, -1)}
    queue = deque([start])
    while queue:
        member = queue.popleft()
        if len(led[member]) <= len(led[start]) - 2:
            chain = []
            while member != start:
                before, segment = came[member]
                chain.append((segment, member))
                member = before
            return chain
        for segment in led[member]:
            for successor in placement[segment][1:]:
                if successor not in came:
                    came[successor] = (member, segment)
                    queue.append(successor)
    return []
