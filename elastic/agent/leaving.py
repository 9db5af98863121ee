"""The last things an agent does: nothing is left running, and what became of the run is written.

Programs that a worker has started in sessions of their own escape the worker's group; they are
children of the agent by then, and end with it. No wait is without a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from elastic.agent import process
from elastic.events import read_events
from elastic.goodput import measure
from elastic.membership import commands as c

MAX_EVENTS_BYTES = 256 << 20
"""Event files larger than that in all are not summed up for the goodput at the end of a run."""
_PAUSE_S = 0.01


async def end_orphans(within_s: float) -> list[int]:
    """Kill and reap every child of this process that is left; return what stays."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while True:
        left = process.children()
        if not left or loop.time() > deadline_s:
            return sorted(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            process.reap_pid(pid)
        await asyncio.sleep(_PAUSE_S)


def result_of(outcome: c.Outcome, run_dir: Path) -> dict[str, Any]:
    """Return result.json: what the caller hands back or raises."""
    goodput = None
    size = sum(path.stat().st_size for path in (run_dir / "events").glob("*.jsonl"))
    if size <= MAX_EVENTS_BYTES:
        goodput = measure(read_events(run_dir)).share
    return {
        "exit_code": int(outcome.exit_code),
        "cause": outcome.cause,
        "value": outcome.value,
        "step": outcome.step,
        "generation": outcome.generation,
        "goodput": goodput,
        "traceback": outcome.traceback,
        "worker": outcome.worker,
    }
