"""A lease that we know the end of before etcd does.

etcd counts a lease's time from when it *receives* a heartbeat. We count from when we *sent* the
last one that was answered, on our own monotonic clock, so our deadline is always the earlier one.
That matters when etcd is stopped for longer than the lease and wakes: it drops the lease at once,
heartbeats that wait in its buffers or not. A killed and restarted etcd does the opposite and gives
every lease its whole time again; nothing here counts on either.

An answer without a positive time to live means that the lease is unknown: it is no error of the
call. Failing calls mean nothing until the deadline: the heartbeat goes on, on the next endpoint.

Does not open a new session by itself, and attaches no keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable

from elastic.clock import Clock
from elastic.membership.coord import CoordError, CoordMisconfigured, SessionLost
from elastic.membership.etcd_channel import PAUSE_S, Connections, Stream
from elastic.membership.etcd_wire import BEAT, GRANT, REVOKE, message

REVOKE_S = 1.0


class Session:
    """One lease and the tasks that keep it; made by `open_session`.

    Args:
        ttl_s: the time that etcd granted.
        sent_at_s: when the grant was asked for.
    """

    def __init__(
        self, connections: Connections, lease: int, ttl_s: float, *, sent_at_s: float, clock: Clock
    ) -> None:
        self.lease = lease
        self.ttl_s = ttl_s
        self.lost_because: str | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._connections = connections
        self._clock = clock
        self._deadline_s = sent_at_s + ttl_s
        self._last_error = "no heartbeat was answered"
        self._tasks = [
            asyncio.create_task(self._keep(), name="etcd-heartbeat"),
            asyncio.create_task(self._wait_for_deadline(), name="etcd-session-deadline"),
        ]

    @property
    def alive(self) -> bool:
        """Whether the lease certainly stands; false from the deadline on, before any callback."""
        return self.lost_because is None and self._clock.now_s() < self._deadline_s

    def require(self) -> None:
        """Raise SessionLost unless the lease certainly stands."""
        if not self.alive:
            raise self.error()

    def error(self) -> SessionLost:
        """Return the error that says why this session has ended."""
        return SessionLost(
            f"this agent's session with etcd has ended: {self.lost_because or 'time ran out'}",
            hint="it registers again",
        )

    def watch_loss(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` once when the session ends, at once if it has. Not after `abandon`."""
        self._on_lost = on_lost
        if self.lost_because is not None:
            on_lost(self.lost_because)

    def lose(self, reason: str) -> None:
        """Declare the session ended; only the first reason counts."""
        if self.lost_because is not None:
            return
        self.lost_because = reason
        self._cancel()
        if self._on_lost is not None:
            self._on_lost(reason)

    async def close(self) -> None:
        """Give the lease back, within a second if etcd can be reached."""
        await self.abandon()
        with contextlib.suppress(CoordError):
            request = message("RevokeRequest", ID=self.lease)
            await self._connections.call(REVOKE, request, patience_s=REVOKE_S)

    async def abandon(self) -> None:
        """End the heartbeat without a word; the lease runs out in etcd."""
        self._on_lost = None
        if self.lost_because is None:
            self.lost_because = "closed"
        self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cancel(self) -> None:
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def _wait_for_deadline(self) -> None:
        left_s = self._deadline_s - self._clock.now_s()
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = self._deadline_s - self._clock.now_s()  # heartbeats have moved it
        self.lose(f"etcd has confirmed no heartbeat for {self.ttl_s:g} s ({self._last_error})")

    async def _keep(self) -> None:
        while self.lost_because is None:
            stream: Stream | None = None
            try:
                stream = await self._connections.open(BEAT, self.ttl_s / 2)
                await self._beat_on(stream)
            except CoordError as error:
                self._last_error = error.message
            finally:
                if stream is not None:
                    stream.close()
            await asyncio.sleep(min(PAUSE_S * 4, self.ttl_s / 10))

    async def _beat_on(self, stream: Stream) -> None:
        """Beat on one stream until it fails or the lease is lost."""
        several = len(self._connections.endpoints) > 1  # then trying the next comes early
        answer_s = self.ttl_s / (4 if several else 2)
        request = message("BeatRequest", ID=self.lease)
        while True:
            sent_at_s = self._clock.now_s()
            try:
                async with asyncio.timeout(answer_s):
                    await stream.send(request)
                    answer = await stream.receive()
            except TimeoutError:
                raise stream.silent(answer_s) from None
            if answer.TTL <= 0:
                self.lose(f"etcd does not know lease {self.lease:x} any more")
                return
            self._deadline_s = max(self._deadline_s, sent_at_s + self.ttl_s)
            spent_s = self._clock.now_s() - sent_at_s
            await asyncio.sleep(max(0.0, self.ttl_s / 3 - spent_s))


async def open_session(
    connections: Connections, ttl_s: float, *, patience_s: float, clock: Clock
) -> Session:
    """Get a lease of at least `ttl_s` and start its heartbeat.

    Raises CoordRetryable, CoordMisconfigured. A grant whose reply was lost leaves a lease without
    keys behind, which runs out.
    """
    sent_at_s = clock.now_s()
    request = message("GrantRequest", TTL=math.ceil(ttl_s))
    grant = await connections.call(GRANT, request, patience_s=patience_s)
    if grant.error or grant.TTL <= 0:
        raise CoordMisconfigured(f"etcd granted no lease: {grant.error or grant.TTL}")
    return Session(connections, int(grant.ID), float(grant.TTL), sent_at_s=sent_at_s, clock=clock)
