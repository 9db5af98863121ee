"""Where a job's records are kept in etcd, how they are written, and what they add up to.

Keys under `/everstep/{job}/`: `config`, `members/{node}` (on the agent's lease), `result`, `stop`,
`world`, and `~saves/{step}.{generation}/{worker_id}`. The tilde sorts the entries of saves behind
everything else, so that one contiguous range holds all that snapshots are made of: one watch on it
sees each transaction whole, and a save of thousands of workers wakes no agent.

Values are compact JSON. `JobView` follows that range and gives snapshots of it.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic.membership.messages import Member, Snapshot, World


class Entry(NamedTuple):
    """One key's value and what the store knows about it."""

    value: bytes
    mod_revision: int
    lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All keys of a range at one revision."""

    revision: int
    entries: Mapping[bytes, Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What happened to the keys of a range up to a revision, in order; None = deleted."""

    revision: int
    events: tuple[tuple[bytes, int, Entry | None], ...]
    """(key, revision of the change, what it is now)"""


class JobKeys:
    """The keys of one job, as bytes."""

    def __init__(self, job: str) -> None:
        self.prefix = f"/everstep/{job}/".encode()
        self.config = self.prefix + b"config"
        self.members = self.prefix + b"members/"
        self.result = self.prefix + b"result"
        self.stop = self.prefix + b"stop"
        self.world = self.prefix + b"world"
        self.watched_end = self.prefix + b"~"

    def member(self, node: str) -> bytes:
        """Return the key of one node's record."""
        return self.members + node.encode()

    def saves(self, step: int, generation: int) -> bytes:
        """Return the prefix of the entries of one save."""
        return self.prefix + f"~saves/{step}.{generation}/".encode()


def dump(value: Mapping[str, Any]) -> bytes:
    """Return a value as it is kept: JSON in ASCII without spaces."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def parse(value: bytes) -> dict[str, Any]:
    """Undo `dump`. Raises ValueError."""
    plain = json.loads(value)
    if not isinstance(plain, dict):
        raise ValueError(f"a record is an object, not {type(plain).__name__}")  # noqa: TRY004
    return plain


class JobView:
    """The newest known state of a job's keys.

    `apply` returns whether a snapshot would differ from the last one in more than its revision. A
    member record that cannot be read counts as absent: nobody could work with that member. A World
    or result that cannot be read raises ValueError, because acting without it would be wrong.
    """

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._revision = 0
        self._world: World | None = None
        self._world_revision = 0
        self._members: dict[str, Member] = {}
        self._member_revisions: dict[str, int] = {}
        self._result: dict[str, Any] | None = None
        self._stop = False

    def apply(self, news: Listing | Changes) -> bool:
        """Take in a listing or changes."""
        if isinstance(news, Listing):
            return self._replace(news)
        changed = False
        for key, revision, entry in news.events:
            if revision > self._revision:  # else a listing has already told it
                changed |= self._set(key, entry)
        self._revision = max(self._revision, news.revision)
        return changed

    def snapshot(self) -> Snapshot:
        """Return the state as one frozen value."""
        return Snapshot(
            revision=self._revision,
            world=self._world,
            world_revision=self._world_revision,
            members=dict(sorted(self._members.items())),
            member_revisions=self._member_revisions,
            result=self._result,
            stop=self._stop,
        )

    def _replace(self, listing: Listing) -> bool:
        before, before_revision = self._marks(), self._revision
        self._world, self._world_revision, self._result, self._stop = None, 0, None, False
        self._members, self._member_revisions = {}, {}
        self._set_all(listing.entries.items())
        self._revision = listing.revision
        # Equal revisions of a key mean equal values, unless the store was put back to older data.
        return self._marks() != before or not 0 < before_revision <= listing.revision

    def _marks(self) -> tuple[object, ...]:
        """Return what differs whenever two states of one store differ."""
        return self._world_revision, self._member_revisions, self._result, self._stop

    def _set_all(self, entries: Iterable[tuple[bytes, Entry]]) -> None:
        for key, entry in entries:
            self._set(key, entry)

    def _set(self, key: bytes, entry: Entry | None) -> bool:
        keys = self._keys
        if key == keys.world:
            self._world = World.from_dict(parse(entry.value)) if entry else None
            self._world_revision = entry.mod_revision if entry else 0
        elif key.startswith(keys.members):
            self._set_member(key.removeprefix(keys.members).decode(errors="replace"), entry)
        elif key == keys.result:
            self._result = parse(entry.value) if entry else None
        elif key == keys.stop:
            self._stop = entry is not None
        else:
            return False
        return True

    def _set_member(self, node: str, entry: Entry | None) -> None:
        member = read_member(entry.value) if entry else None
        if entry and member and member.node == node:
            self._members[node] = member
            self._member_revisions[node] = entry.mod_revision
        else:
            self._members.pop(node, None)
            self._member_revisions.pop(node, None)


def read_member(value: bytes) -> Member | None:
    """Return the member that a record describes, or None when it cannot be read."""
    try:
        return Member.from_dict(parse(value))
    except ValueError:
        return None
