"""Where time comes from, so that everything that waits can be given another one.

`now_s` is CLOCK_MONOTONIC: one clock for all processes of a host, never comparable between hosts
(compare ages that each side measured itself). Wall time is for people alone.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, a wall stamp for people, and a way to wait."""

    def now_s(self) -> float:
        """Return monotonic seconds, the same for all processes of this host."""
        ...

    def wall(self) -> str:
        """Return the wall time as ISO 8601 in UTC; for people, never for decisions."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds of this clock."""
        ...


class SystemClock:
    """The host's own clock."""

    def now_s(self) -> float:
        """Return CLOCK_MONOTONIC."""
        return time.clock_gettime(time.CLOCK_MONOTONIC)

    def wall(self) -> str:
        """Return the wall time as ISO 8601 in UTC with microseconds."""
        return datetime.now(UTC).isoformat(timespec="microseconds")

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
