"""Transactions whose outcome is known even when replies are lost.

Each of our transactions compares the revision that it itself will change, and reads the keys when
the comparison fails. So sending it again cannot do it twice, and if the first sending had come
through, the second reads it back. A copy that is still on its way somewhere fails its comparison
when it arrives: a key's modification revision never repeats.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from elastic.clock import Clock
from elastic.membership.coord import CoordRetryable, SessionLost
from elastic.membership.etcd_channel import ATTEMPT_S, PAUSE_MAX_S, PAUSE_S, Connections
from elastic.membership.etcd_session import Session
from elastic.membership.etcd_watch import entry_of
from elastic.membership.etcd_wire import TXN, txn_request
from elastic.membership.job_keys import Entry

PATIENCE_S = 5.0
"""How long one operation goes on trying before it says that etcd does not answer."""


class Outcome(NamedTuple):
    """How a transaction ended: done, or the keys that it read instead.

    `repeated`: an earlier sending of it was lost and may be what made this one fail.
    """

    done: bool
    revision: int
    found: list[Entry | None]
    repeated: bool


class Transactions:
    """Sends transactions to etcd.

    Does not look at what it compares; the callers see to it that each comparison is one that the
    transaction itself makes false.
    """

    def __init__(self, connections: Connections, clock: Clock) -> None:
        self._connections = connections
        self._clock = clock

    async def run(
        self,
        compares: list[Any],
        changes: list[Any],
        reads: list[Any],
        *,
        session: Session | None = None,
    ) -> Outcome:
        """Send a transaction until it is known what came of it.

        Raises CoordRetryable when that could not be learned in time, SessionLost when `session`
        ended before the transaction was sent (again).
        """
        request = txn_request(compares, changes, reads)
        end_s = self._clock.now_s() + PATIENCE_S
        pause_s = PAUSE_S
        repeated = False
        while True:
            if session is not None:
                session.require()
            left_s = end_s - self._clock.now_s()
            timeout_s = min(ATTEMPT_S, max(left_s, PAUSE_S))
            try:
                answer = await self._connections.attempt(TXN, request, timeout_s)
            except CoordRetryable as error:
                if error.kind != "unreachable" or left_s <= pause_s:
                    raise
            except SessionLost as error:
                if session is not None:
                    session.lose(error.message)
                raise
            else:
                found = [] if answer.succeeded else [_first(each) for each in answer.responses]
                revision = int(answer.header.revision)
                return Outcome(bool(answer.succeeded), revision, found, repeated)
            repeated = True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _first(response: Any) -> Entry | None:
    kvs = response.response_range.kvs
    return entry_of(kvs[0]) if kvs else None
