"""Follow a range of keys for ever: what is there, then every change, across restarts of etcd.

    list at revision r ──> watch from r+1 ──> changes ... ──(stream breaks)──> watch from last+1
        ^                                                          │
        └──── compacted, or the store went back to older data <────┘

- Where to go on is taken only from events that were handed over, never from headers: a header may
  be ahead of events that are still on their way.
- A revision that was compacted meanwhile comes as a "canceled" message on an open stream, not as
  an error; then the whole range is read again, which shows the outcome of all that was missed.
- A stream that says nothing for `quiet_s` is asked for its progress. No answer means that it is
  dead although it looks open, and it is opened anew on the next endpoint.
- A revision lower than one that we have seen means a follower that lags, or a store that was put
  back to an older state. A fresh (linearizable) listing tells which, and is right in both cases.

Does not interpret keys or values.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from elastic.membership.coord import CoordMisconfigured, CoordRetryable
from elastic.membership.etcd_channel import PAUSE_MAX_S, PAUSE_S, Connections, Stream
from elastic.membership.etcd_errors import no_permission, refuses_login
from elastic.membership.etcd_wire import EVENT_DELETE, RANGE, WATCH, message, range_request
from elastic.membership.job_keys import Changes, Entry, Listing

PAGE = 1000
LIST_PATIENCE_S = 5.0


class _StartOver(Exception):
    """The watch cannot go on from where it was; list again."""


class RangeWatch:
    """All keys in [start, end), now and from now on.

    Args:
        quiet_s: after that long without a message the stream is asked for its progress.
        answer_s: and given up after that long without an answer.
    """

    def __init__(
        self,
        connections: Connections,
        start: bytes,
        end: bytes,
        *,
        quiet_s: float,
        answer_s: float,
    ) -> None:
        self._connections = connections
        self._start = start
        self._end = end
        self._quiet_s = quiet_s
        self._answer_s = answer_s
        self._known = 0  # highest revision that was handed over
        self._refusals = 0

    async def follow(self) -> AsyncGenerator[Listing | Changes, None]:
        """Yield a listing, then changes in order; another listing whenever some were missed.

        Raises CoordMisconfigured when etcd refuses us; waits through everything else.
        """
        listed = False
        pause_s = PAUSE_S
        while True:
            try:
                if not listed:
                    listing = await list_range(self._connections, self._start, self._end)
                    yield listing
                    self._known, listed = listing.revision, True
                async with contextlib.aclosing(self._watch()) as stream:
                    async for changes in stream:
                        if changes.events:
                            yield changes
                            self._known = changes.revision
                        self._refusals, pause_s = 0, PAUSE_S
            except _StartOver:
                listed = False
            except CoordRetryable:
                pass
            except CoordMisconfigured as error:
                # The first refusal may be of an old token; the next stream opens with a new one.
                if error.kind != "no-permission" or self._refusals > 0:
                    raise
                self._refusals += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _watch(self) -> AsyncGenerator[Changes, None]:
        """Yield what one stream says, empty changes included; ends only by raising."""
        stream = await self._connections.open(WATCH)
        try:
            create = message(
                "WatchCreate", key=self._start, range_end=self._end, start_revision=self._known + 1
            )
            await stream.send(message("WatchRequest", create_request=create))
            while True:
                response = await self._receive(stream)
                if response.canceled:
                    raise self._canceled(stream, response)
                if response.created and response.header.revision < self._known:
                    self._connections.rotate(self._connections.endpoint)
                    raise _StartOver
                yield Changes(
                    revision=response.events[-1].kv.mod_revision if response.events else 0,
                    events=tuple(_event(event) for event in response.events),
                )
        finally:
            stream.close()

    async def _receive(self, stream: Stream) -> Any:
        """Return the next message; makes sure that a silent stream is a living one."""
        reading = asyncio.ensure_future(stream.receive())
        try:
            done, _ = await asyncio.wait({reading}, timeout=self._quiet_s)
            if not done:
                ask = message("WatchRequest", progress_request=message("WatchProgress"))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._answer_s):
                        await stream.send(ask)
                        await asyncio.wait({reading})
            if not reading.done():
                raise stream.silent(self._quiet_s + self._answer_s)
            return reading.result()
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()  # seen: the one being raised is the one that counts

    def _canceled(self, stream: Stream, response: Any) -> Exception:
        if response.compact_revision:
            return _StartOver()
        reason = str(response.cancel_reason) or "no reason given"
        if refuses_login(reason):
            return stream.failed(no_permission(reason, self._connections.endpoint))
        return stream.failed(CoordRetryable(f"etcd ended the watch: {reason}"))


async def list_range(
    connections: Connections, start: bytes, end: bytes, *, patience_s: float = LIST_PATIENCE_S
) -> Listing:
    """Return all keys in [start, end) as they were at one revision, read page by page.

    Raises CoordRetryable (also when the revision is compacted between two pages),
    CoordMisconfigured.
    """
    entries: dict[bytes, Entry] = {}
    revision = 0
    while True:
        request = range_request(start, range_end=end, limit=PAGE, revision=revision)
        response = await connections.call(RANGE, request, patience_s=patience_s)
        revision = revision or int(response.header.revision)
        for kv in response.kvs:
            entries[kv.key] = entry_of(kv)
        if not response.more:
            return Listing(revision=revision, entries=entries)
        start = response.kvs[-1].key + b"\0"


def entry_of(kv: Any) -> Entry:
    """Return the value and standing of a key as etcd sent it."""
    return Entry(value=kv.value, mod_revision=int(kv.mod_revision), lease=int(kv.lease))


def _event(event: Any) -> tuple[bytes, int, Entry | None]:
    kv = event.kv
    entry = None if event.type == EVENT_DELETE else entry_of(kv)
    return kv.key, int(kv.mod_revision), entry
