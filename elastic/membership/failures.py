"""When a job gives up: deaths of workers counted, and the rules that end a run because of them.

A death is no reason to stop: the others go on. These are:

- a worker says that a person has to change something (exit code 2, at once);
- the same exception at the same step again, in a later World: it will come every time;
- every worker of the World raised at once: nobody is left to go on;
- several incidents in a row without a newer committed step. Deaths in one World are one incident;
  three that were exceptions are enough, ten when signals are among them (somebody may be testing);
- the budget of `max_failures`.

The cause that is named is the first failure, with its traceback; what others raised after it in
the same World is a consequence. Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic.errors import ExitCode
from elastic.membership.commands import FailureKind, Outcome, WorkerFailed

MAX_EXCEPTIONS = 3
"""Incidents by exception without a newer committed step that end a run."""
MAX_INCIDENTS = 10
"""Incidents of any kind without a newer committed step that end a run."""
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """One worker's unwanted end.

    Args:
        generation: the World in which it was computing, 0 before its first.
        attempt: how often its slot had been started, counted from 1.
        how: what happened, to follow the worker's id in a sentence.
        by_signal: a signal ended it.
        failure: what it said before, if anything.
    """

    worker_id: str
    generation: int
    attempt: int
    step: int
    how: str
    by_signal: bool
    failure: WorkerFailed | None = None

    @property
    def incident(self) -> tuple[str, int]:
        """What makes several deaths one: the same World, or the same attempt before any."""
        return ("world", self.generation) if self.generation else ("start", self.attempt)

    @property
    def cause(self) -> str:
        """One sentence for a person."""
        failure = self.failure
        if failure is None:
            return f"worker {self.worker_id} {self.how}"
        said = failure.message.strip().partition("\n")[0]
        what = f"{failure.error}: {said}" if said else failure.error
        match failure.kind:
            case FailureKind.MISCONFIGURED:
                return failure.message or failure.error
            case FailureKind.STORAGE:
                return f"worker {self.worker_id} could not restore: {said or failure.error}"
            case FailureKind.INTERNAL:
                return f"worker {self.worker_id} failed in the runtime at step {self.step}: {what}"
            case FailureKind.USER:
                return f"train failed on worker {self.worker_id} at step {self.step}: {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What has been counted so far on this node."""

    deaths: int = 0
    committed: int = 0
    incidents: tuple[tuple[str, int], ...] = ()
    """Since the last newly committed step."""
    exceptions: tuple[tuple[str, int], ...] = ()
    """Those of the incidents that began with an exception or a plain exit."""
    first: Death | None = None
    """The first death since the last newly committed step."""
    recent: tuple[Death, ...] = ()
    """Since a generation last formed."""
    seen: tuple[Death, ...] = field(default=())
    """Failures with a message, the newest last."""


def progressed(ledger: Ledger, committed: int) -> Ledger:
    """Take note of the newest committed step; a newer one wipes out the incidents before it."""
    if committed <= ledger.committed:
        return ledger
    return replace(ledger, committed=committed, incidents=(), exceptions=(), first=None)


def formed(ledger: Ledger) -> Ledger:
    """Take note that a generation formed: whoever dies now does not die together with others."""
    return replace(ledger, recent=()) if ledger.recent else ledger


def is_consequence(ledger: Ledger, death: Death) -> bool:
    """Return whether a failure followed another one's in the same World, by another error."""
    first = ledger.first
    return (
        first is not None
        and first.worker_id != death.worker_id
        and first.incident == death.incident
        and not _same(first, death)
    )


def count(ledger: Ledger, death: Death) -> Ledger:
    """Add one death."""
    incidents = tuple(dict.fromkeys((*ledger.incidents, death.incident)))
    exceptions = ledger.exceptions
    if not death.by_signal and death.incident not in ledger.incidents:
        exceptions = (*exceptions, death.incident)
    seen = ledger.seen
    if death.failure is not None and not any(_same(death, other) for other in seen):
        seen = (*seen, death)[-_REMEMBERED:]
    return replace(
        ledger,
        deaths=ledger.deaths + 1,
        incidents=incidents,
        exceptions=exceptions,
        first=ledger.first or death,
        recent=(*ledger.recent, death)[-_REMEMBERED:],
        seen=seen,
    )


def verdict(
    before: Ledger, death: Death, *, others_alive: bool, max_failures: int
) -> Outcome | None:
    """Return how the run has to end because of this death, or None if it goes on.

    Args:
        before: the ledger without this death.
        others_alive: some other worker that could go on, or start alike, is alive.
        max_failures: deaths that the job may have.
    """
    after = count(before, death)
    failure = death.failure
    if failure is not None and failure.kind is FailureKind.MISCONFIGURED:
        return _outcome(death, "")
    again = [other for other in before.seen if _same(other, death) and _later(death, other)]
    if again:
        return _outcome(again[0], " (and the same again when the step was redone)")
    recent = [other for other in after.recent if _together(other, death)]
    if not others_alive and all(other.failure is not None for other in recent):
        at_once = f" ({len(recent)} workers failed at once)" if len(recent) > 1 else ""
        return _outcome(recent[0], at_once)
    first = after.first or death
    if len(after.exceptions) >= MAX_EXCEPTIONS:
        return _outcome(first, f" ({len(after.exceptions)} failures without a newer step)")
    if len(after.incidents) >= MAX_INCIDENTS:
        return _outcome(first, f" ({len(after.incidents)} deaths without a newer step)")
    if after.deaths > max_failures:
        return _outcome(death, f" (failure {after.deaths}, and max_failures is {max_failures})")
    return None


def exit_code_for(death: Death) -> int:
    """Return the exit code of a run that ends because of this death."""
    kind = FailureKind.USER if death.failure is None else death.failure.kind
    match kind:
        case FailureKind.MISCONFIGURED:
            return ExitCode.MISCONFIGURED
        case FailureKind.STORAGE:
            return ExitCode.STORAGE
        case FailureKind.INTERNAL:
            return ExitCode.INFRASTRUCTURE
        case FailureKind.USER:
            return ExitCode.USER_CODE


def _outcome(death: Death, why: str) -> Outcome:
    return Outcome(
        exit_code=exit_code_for(death),
        cause=death.cause + why,
        traceback="" if death.failure is None else death.failure.traceback,
        worker=death.worker_id,
        step=death.step,
        generation=death.generation,
    )


def _same(one: Death, other: Death) -> bool:
    """Return whether two failures are the same exception at the same step."""
    a, b = one.failure, other.failure
    return (
        a is not None
        and b is not None
        and (a.error, a.message, a.step) == (b.error, b.message, b.step)
    )


def _later(death: Death, other: Death) -> bool:
    """Return whether `death` happened in a later try than `other`."""
    if death.generation == 0 and other.generation == 0:
        return death.attempt > other.attempt
    return death.generation > other.generation


def _together(other: Death, death: Death) -> bool:
    """Return whether `other` counts when it is asked if all failed at once."""
    if death.generation == 0:
        return other.generation == 0 and other.attempt == death.attempt
    return other.generation > 0
