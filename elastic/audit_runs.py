"""Which runs are the history of one job, and what their events say to the auditor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic import job_root, status
from elastic.audit import NoRecords, Report, audit
from elastic.errors import Misconfigured
from elastic.events import read_events

if TYPE_CHECKING:
    from pathlib import Path

KINDS = frozenset({"agent.started", "data.order", "restore.finished", "step.committed"})


def audit_job(name: str) -> tuple[Report, list[Path]]:
    """Judge a job by all its runs up to the named one, or the newest; also which runs those are.

    Raises Misconfigured: there is no such run, or its events say nothing of samples.
    """
    newest = status.find_run(name)
    job = _job_of(_events(newest))
    chosen: list[tuple[Path, list[dict[str, Any]]]] = []
    siblings = job_root.run_dirs(newest.parent)
    if newest not in siblings:  # it was moved, or renamed
        siblings = [newest]
    for run_dir in reversed(siblings[: siblings.index(newest) + 1]):
        events = _events(run_dir)
        if run_dir != newest and _job_of(events) != job:
            continue
        chosen.append((run_dir, events))
        if _began_anew(events):
            break
    chosen.reverse()
    attempts = _attempts([events for _, events in chosen])
    try:
        report = audit(
            {**event, "attempt": attempt}
            for attempt, (_, events) in zip(attempts, chosen, strict=True)
            for event in events
        )
    except NoRecords as error:
        raise Misconfigured(
            f"{newest} cannot be audited: {error}",
            kind="no-records",
            hint="its events are shown by `elastic events`",
        ) from None
    return report, [run_dir for run_dir, _ in chosen]


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in read_events(run_dir) if record["event"] in KINDS]


def _job_of(events: list[dict[str, Any]]) -> str | None:
    return next((e.get("job") for e in events if e["event"] == "agent.started"), None)


def _attempts(runs: list[list[dict[str, Any]]]) -> list[int]:
    """Number the starts of the job; runs of several hosts that overlap in time are one."""
    found: list[int] = []
    until = ""
    for events in runs:
        times = [str(event.get("t_wall") or "") for event in events]
        overlaps = bool(found) and min(times, default="") < until
        found.append(found[-1] + (not overlaps) if found else 0)
        until = max([until, *times])
    return found


def _began_anew(events: list[dict[str, Any]]) -> bool:
    """Whether a run owes nothing to an earlier one."""
    steps = [e["step"] for e in events if e["event"] == "step.committed"]
    return min(steps, default=0) == 1 and not any(e["event"] == "restore.finished" for e in events)
