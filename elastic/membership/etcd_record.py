"""An agent's own record: claimed once per session, then changed only while it is still ours.

All changes go through one lock and compare the revision of the one before, so a copy of an older
change that arrives late cannot undo a newer one. Anything found on our own lease was written by us.
"""

from __future__ import annotations

import asyncio
from typing import Any

from elastic.clock import Clock
from elastic.membership.coord import NodeTaken
from elastic.membership.etcd_channel import Connections
from elastic.membership.etcd_session import Session
from elastic.membership.etcd_txn import PATIENCE_S, Transactions
from elastic.membership.etcd_wire import (
    TIME_LEFT,
    lease_is,
    message,
    mod_is,
    put_request,
    range_request,
)
from elastic.membership.job_keys import Entry, dump, read_member
from elastic.membership.messages import Member

_PAUSE_S = 0.2
_RENEWALS_OF_A_LIVING_HOLDER = 2  # one may be etcd's own, after its restart


class OwnRecord:
    """The record at `key` on the lease of `session`.

    `lock` is held by whoever changes the record or compares it.
    """

    def __init__(
        self, key: bytes, session: Session, connections: Connections, clock: Clock
    ) -> None:
        self.key = key
        self.session = session
        self.lock = asyncio.Lock()
        self._node = ""
        self._revision = 0
        self._connections = connections
        self._clock = clock
        self._transactions = Transactions(connections, clock)

    async def claim(self, member: Member) -> None:
        """Create the record, waiting out an earlier incarnation's.

        Raises NodeTaken when its holder turns out to be alive, SessionLost, CoordRetryable.
        """
        self._node = member.node
        put = self.put(member)
        replaces = 0
        rival: _Rival | None = None
        while True:
            outcome = await self._transactions.run(
                [mod_is(self.key, replaces)],
                [put],
                [range_request(self.key)],
                session=self.session,
            )
            if outcome.done:
                self._revision = outcome.revision
                return
            replaces = 0
            holder = outcome.found[0]
            if holder is None:
                continue
            if holder.lease == self.session.lease:
                self._revision = holder.mod_revision
                return
            if _is_same_incarnation(holder, member):
                replaces = holder.mod_revision  # ours, from a session that was lost
                continue
            if rival is None or rival.lease != holder.lease:
                rival = _Rival(holder.lease, self._connections, self._clock)
            if await rival.lives():
                raise NodeTaken(
                    f"another agent of this job runs under the node name {member.node}",
                    hint="stop it, or give this one another node name",
                    node=member.node,
                )
            await asyncio.sleep(_PAUSE_S)

    async def replace(self, member: Member) -> None:
        """Write the record anew. Raises SessionLost when it is not ours any more."""
        async with self.lock:
            put = self.put(member)
            while True:
                outcome = await self._transactions.run(
                    self.compares(), [put], [range_request(self.key)], session=self.session
                )
                if outcome.done:
                    self.wrote(outcome.revision)
                    return
                own = self.read_back(outcome.found[0])
                if outcome.repeated and own.value == put.value:
                    return

    def put(self, member: Member) -> Any:
        """Return the request that writes `member` as this record."""
        if member.node != self._node:
            raise ValueError(f"this record is of {self._node}, not of {member.node}")
        return put_request(self.key, dump(member.to_dict()), self.session.lease)

    def compares(self) -> list[Any]:
        """Return what holds as long as the record is ours and as we left it."""
        return [mod_is(self.key, self._revision), lease_is(self.key, self.session.lease)]

    def wrote(self, revision: int) -> None:
        """Note that a transaction has written the record."""
        self._revision = revision

    def read_back(self, found: Entry | None) -> Entry:
        """Take over the state in which the record was found. Raises SessionLost if not ours."""
        if found is None or found.lease != self.session.lease:
            self.session.lose("this agent's record is gone from etcd")
            raise self.session.error()
        self._revision = found.mod_revision
        return found


class _Rival:
    """Tells whether the holder of a lease is alive, by whether it goes on renewing it."""

    def __init__(self, lease: int, connections: Connections, clock: Clock) -> None:
        self.lease = lease
        self._connections = connections
        self._clock = clock
        self._since_s = clock.now_s()
        self._lowest_s: float | None = None
        self._renewals = 0

    async def lives(self) -> bool:
        """Look once more; true when the lease was renewed twice or outlives two of its times."""
        if self.lease == 0:
            return True  # on no lease: it will not go by itself
        request = message("TimeLeftRequest", ID=self.lease)
        answer = await self._connections.call(TIME_LEFT, request, patience_s=PATIENCE_S)
        if answer.TTL < 0:
            return False  # gone; 0 is the last second of one that is still there
        if self._lowest_s is not None and self._lowest_s < answer.TTL:
            self._renewals += 1
        self._lowest_s = answer.TTL
        waited_s = self._clock.now_s() - self._since_s
        too_long_s = 2 * (answer.grantedTTL + _PAUSE_S)
        return self._renewals >= _RENEWALS_OF_A_LIVING_HOLDER or waited_s > too_long_s


def _is_same_incarnation(holder: Entry, member: Member) -> bool:
    written = read_member(holder.value)
    return written is not None and written.incarnation == member.incarnation
