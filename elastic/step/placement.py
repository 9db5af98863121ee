"""Who holds which segment, and who computes which virtual ranks.

Each segment has a primary and, in a world of more than one, a twin on another member (another host
where there is one). A new placement starts from who holds a complete copy now and moves as few
copies as balance within one needs: losing one of W members makes about 2S/W new copies, and a
joiner receives only its share. Roles cost nothing to swap, because both holders have everything.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    """Return the holders of each segment, primary first.

    Args:
        previous: segment -> members that hold a complete copy now, primary first; empty for a
            job without state. A segment that is missing from a mapping that is not empty has no
            copy: it is placed like a new one.
        members: the World's workers in rank order.
        hosts: member -> host.
        replicas: wanted copies of a segment; at most one per member.
    """
    copies = min(replicas, len(members))
    alive = set(members)
    known = {s: tuple(m for m in held if m in alive) for s, held in previous.items()}
    if not any(known.values()):
        return _fresh(members, hosts, num_segments, copies)
    return _Mover(known, members, hosts, num_segments, copies).run()


def _fresh(
    members: Sequence[str], hosts: Mapping[str, str], num_segments: int, copies: int
) -> tuple[tuple[str, ...], ...]:
    """Place contiguous blocks; the twins of a block are spread in contiguous sub-runs."""
    count = len(members)
    placement: list[tuple[str, ...]] = []
    for rank, block in enumerate(share_out(num_segments, members)):
        primary = members[rank]
        others = [members[(rank + k) % count] for k in range(1, count)]
        elsewhere = [m for m in others if hosts[m] != hosts[primary]]
        for position in range(len(block)):
            holders = [primary]
            pool = elsewhere or others
            for k in range(copies - 1):
                free = [m for m in (pool if k == 0 else others) if m not in holders]
                free = free or [m for m in others if m not in holders]
                holders.append(free[position * len(free) // len(block)])
            placement.append(tuple(holders))
    return _balance_copies_of_fresh(placement, members, hosts)


def _balance_copies_of_fresh(
    placement: Sequence[tuple[str, ...]], members: Sequence[str], hosts: Mapping[str, str]
) -> tuple[tuple[str, ...], ...]:
    """Even out the twins' counts that rounding and unequal hosts left uneven; nothing moves yet."""
    mover = (
        _Mover(dict(enumerate(placement)), members, hosts, len(placement), len(placement[0]))
        if placement
        else None
    )
    return mover.run() if mover is not None else ()


class _Mover:
    """Turns copies that exist into a balanced placement with few moves."""

    def __init__(
        self,
        known: Mapping[int, tuple[str, ...]],
        members: Sequence[str],
        hosts: Mapping[str, str],
        num_segments: int,
        copies: int,
    ) -> None:
        self._members = list(members)
        self._order = {m: i for i, m in enumerate(members)}
        self._hosts = hosts
        self._copies = copies
        self._holders: list[list[str]] = [list(known.get(s, ())) for s in range(num_segments)]
        self._kept: list[set[str]] = [set(held) for held in self._holders]
        self._load = dict.fromkeys(members, 0)
        for held in self._holders:
            for member in held:
                self._load[member] += 1

    def run(self) -> tuple[tuple[str, ...], ...]:
        self._drop_surplus()
        self._fill()
        self._even_out()
        self._spread_hosts()
        self._balance_primaries()
        return tuple(tuple(held) for held in self._holders)

    # -- copies -----------------------------------------------------------------------------

    def _drop_surplus(self) -> None:
        """Forget copies beyond the wanted number, on the most loaded member, twins first."""
        for held in self._holders:
            while len(held) > self._copies:
                worst = max(held[1:], key=lambda m: (self._load[m], self._order[m]))
                held.remove(worst)
                self._load[worst] -= 1

    def _fill(self) -> None:
        """Give every segment its missing copies, on the least loaded member, other hosts first."""
        for held in self._holders:
            while len(held) < self._copies:
                taken = {self._hosts[m] for m in held}
                best = min(
                    (m for m in self._members if m not in held),
                    key=lambda m: (
                        self._load[m] > self._floor(),
                        self._hosts[m] in taken,
                        self._load[m],
                        self._order[m],
                    ),
                )
                held.append(best)
                self._load[best] += 1

    def _floor(self) -> int:
        return self._copies * len(self._holders) // len(self._members)

    def _even_out(self) -> None:
        """Move copies from the most to the least loaded until loads differ by one at most."""
        while True:
            donors = sorted(self._members, key=lambda m: (-self._load[m], self._order[m]))
            taker = min(self._members, key=lambda m: (self._load[m], self._order[m]))
            donor = donors[0]
            if self._load[donor] - self._load[taker] <= 1:
                return
            segment = self._best_to_move(donor, taker)
            if segment is None:
                return
            self._move(segment, donor, taker)

    def _best_to_move(self, donor: str, taker: str) -> int | None:
        """Return the segment whose move costs least: one that is new there, then host spread."""
        best: tuple[tuple[int, int, int], int] | None = None
        for segment, held in enumerate(self._holders):
            if donor not in held or taker in held:
                continue
            others = {self._hosts[m] for m in held if m != donor}
            cost = (
                int(donor in self._kept[segment]) - int(taker in self._kept[segment]),
                int(self._hosts[taker] in others),
                segment,
            )
            if best is None or cost < best[0]:
                best = (cost, segment)
        return None if best is None else best[1]

    def _move(self, segment: int, donor: str, taker: str) -> None:
        held = self._holders[segment]
        held[held.index(donor)] = taker
        self._load[donor] -= 1
        self._load[taker] += 1

    def _spread_hosts(self) -> None:
        """Swap new copies so that a segment's holders are on different hosts where possible."""
        for segment, held in enumerate(self._holders):
            if len(held) < 2 or self._hosts[held[0]] != self._hosts[held[1]]:
                continue
            movable = next((m for m in reversed(held) if m not in self._kept[segment]), None)
            if movable is not None:
                self._swap_new_copy(segment, movable)

    def _swap_new_copy(self, segment: int, member: str) -> None:
        mine = self._holders[segment]
        fixed = {self._hosts[m] for m in mine if m != member}
        for other, theirs in enumerate(self._holders):
            for candidate in theirs:
                if (
                    candidate in self._kept[other]
                    or candidate in mine
                    or member in theirs
                    or self._hosts[candidate] in fixed
                    or self._hosts[member] in {self._hosts[m] for m in theirs if m != candidate}
                ):
                    continue
                mine[mine.index(member)] = candidate
                theirs[theirs.index(candidate)] = member
                return

    # -- roles ------------------------------------------------------------------------------

    def _balance_primaries(self) -> None:
        """Swap roles along chains until primaries differ by one at most; no byte moves."""
        for segment, held in enumerate(self._holders):
            kept = self._kept[segment]
            held.sort(key=lambda m: m not in kept)  # stable: a complete copy leads
        while True:
            count = dict.fromkeys(self._members, 0)
            for held in self._holders:
                count[held[0]] += 1
            start = max(self._members, key=lambda m: (count[m], -self._order[m]))
            chain = self._chain(start, count)
            if chain is None:
                return
            for segment, successor in chain:
                held = self._holders[segment]
                held.remove(successor)
                held.insert(0, successor)

    def _chain(self, start: str, count: Mapping[str, int]) -> list[tuple[int, str]] | None:
        """Return role swaps that take one primary from `start` to a member with two fewer."""
        came: dict[str, tuple[str, int]] = {}
        queue = deque([start])
        seen = {start}
        while queue:
            member = queue.popleft()
            if count[member] <= count[start] - 2:
                chain = []
                while member != start:
                    before, segment = came[member]
                    chain.append((segment, member))
                    member = before
                return chain
            for segment, held in enumerate(self._holders):
                if held[0] != member:
                    continue
                for successor in held[1:]:
                    if successor not in seen:
                        seen.add(successor)
                        came[successor] = (member, segment)
                        queue.append(successor)
        return None
