"""What several tests need: waiting for something to become true, with a deadline.

A test never sleeps and hopes. It names the condition and the longest time it may take; a failure
then says what was waited for and what was seen last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PAUSE_S = 0.01


def eventually(look: Callable[[], T], *, within_s: float = 10.0, what: str = "") -> T:
    """Return the first true value of `look()`; fail when there is none within that time.

    A look that raises AssertionError counts as "not yet"; its message becomes part of the failure.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        seen, why = _look(look)
        if seen and not why:
            return seen
        if time.monotonic() > deadline_s:
            raise AssertionError(_failure(what, within_s, why or repr(seen)))
        time.sleep(PAUSE_S)


async def eventually_async(
    look: Callable[[], T | Awaitable[T]], *, within_s: float = 10.0, what: str = ""
) -> T:
    """Do as `eventually` does on an event loop; `look` may be a coroutine function."""
    deadline_s = time.monotonic() + within_s
    while True:
        seen, why = _look(look)
        if isinstance(seen, Awaitable):
            seen = await seen
        if seen and not why:
            return seen
        if time.monotonic() > deadline_s:
            raise AssertionError(_failure(what, within_s, why or repr(seen)))
        await asyncio.sleep(PAUSE_S)


def _look(look):
    try:
        return look(), ""
    except AssertionError as error:
        return None, str(error) or "an assertion without a message failed"


def _failure(what: str, within_s: float, seen: str) -> str:
    return f"{what or 'the condition'} did not come true within {within_s} s; last seen: {seen}"


def alive(pid: int) -> bool:
    """Return whether a process runs: one that has ended but is not reaped yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}
