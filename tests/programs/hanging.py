"""The small program, one worker of which stops getting anywhere once, in different ways."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

from tests.programs import small

FOR_EVER_S = 10_000


def asleep() -> None:
    """Python code that never comes back; other threads run."""
    time.sleep(FOR_EVER_S)  # sleep: the hang under test


def holds_the_interpreter() -> None:
    """A call into C that never gives the interpreter's lock back."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def another_thread_holds_the_interpreter() -> None:
    """The same in a thread beside; the main thread stands wherever it was."""
    threading.Thread(target=holds_the_interpreter, daemon=True).start()


def slow() -> None:
    """No hang: as long as a compilation."""
    time.sleep(3.0)  # sleep: a slow step


def train(ctx: Any, *, how: str, at: int, rank: int, once: str, **options: Any) -> dict[str, Any]:
    """Train as small.train; worker `rank` hangs in step `at`, if the file `once` is not there."""

    def hang(_module: Any, _inputs: Any) -> None:
        if ctx.step != at or ctx.rank != rank:
            return
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        {
            "asleep": asleep,
            "slow": slow,
            "holds the interpreter": holds_the_interpreter,
            "another thread holds it": another_thread_holds_the_interpreter,
        }[how]()

    return small.train(ctx, before_forward=hang, **options)
