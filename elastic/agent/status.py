"""What /status shows, put together from what the agent knows at that moment.

It asks no process: worker's steps come from their progress pages, the last logged values from the
end of the main worker's event file. Nothing is decided from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.membership import commands as c
from elastic.membership.state import Life, Local, State

_TAIL_BYTES = 1 << 16


def build(
    state: State,
    readings: Mapping[str, c.Reading],
    *,
    saves: Mapping[str, Any],
    last_log: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the status as plain values.

    Args:
        readings: progress of the local workers by id, as fresh as can be.
        facts: what never changes: job, pid, started_at.
    """
    world = state.world
    inside = () if world is None else world.workers
    rows = []
    for rank, worker in enumerate(inside):
        local = state.local(worker.worker_id)
        reading = readings.get(worker.worker_id)
        rows.append(
            {
                "worker_id": worker.worker_id,
                "node": worker.node,
                "rank": rank,
                "pid": None if local is None else local.pid,
                "state": _state_of(state, worker.node, local),
                "step": None if reading is None else reading.step,
                "committed": None if reading is None else reading.committed,
            }
        )
    outside = [
        {
            "worker_id": local.worker_id,
            "node": state.node,
            "rank": None,
            "pid": local.pid,
            "state": _state_of(state, state.node, local),
            "step": None,
            "committed": None,
        }
        for local in state.locals
        if local.worker_id not in {worker.worker_id for worker in inside}
    ]
    committed = max([state.committed, *(each.committed for each in readings.values())])
    return {
        **facts,
        "node": state.node,
        "phase": state.phase.value,
        "reason": state.reason,
        "generation": 0 if world is None else world.generation,
        "world": rows,
        "waiting": outside,
        "step": max([0, *(each.step for each in readings.values())]),
        "committed_step": committed,
        "failures": state.ledger.deaths,
        "reshapes": state.reshapes,
        "session": state.session.value,
        "members": sorted(state.members()),
        "saves": dict(saves),
        "last_log": dict(last_log),
    }


def _state_of(state: State, node: str, local: Local | None) -> str:
    """Return one word for how a worker is."""
    if local is None:
        return "remote" if node != state.node else "dead"
    if local.life is Life.DYING:
        return "dead"
    if local.stopped_at_s is not None:
        return "suspect"
    if local.finished is not None:
        return "finished"
    if local.life is Life.STARTING:
        return "starting"
    return "running" if local.told else "ready"


def last_log(path: Path) -> dict[str, Any]:
    """Return the values that the newest committed step in a worker's event file logged."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        if b'"step.committed"' not in line:
            continue
        try:
            record = json.loads(line)
        except ValueError:  # torn
            continue
        if record.get("event") == "step.committed":
            return dict(record.get("log") or {})
    return {}
