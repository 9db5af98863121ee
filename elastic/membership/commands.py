"""What the membership machine hears and what it asks for: events in, commands out.

An event is a fact that the agent has observed; it is never an opinion. A command is one act of
the agent, with everything it needs in its fields. The agent answers most commands by a later
event, named in the command's docstring; until then the machine counts the act as under way.
Nothing here is done by this module. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from elastic.membership.messages import Member, Snapshot, World

if TYPE_CHECKING:
    from elastic.membership.state import State

# -- values ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A worker's progress page as the agent read it.

    Args:
        done: steps that this process has completed itself.
        at_s: when the worker wrote it.
    """

    worker_id: str
    step: int
    committed: int
    generation: int
    phase: str
    done: int = 0
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the run ended on this node, for whoever started it."""

    exit_code: int
    cause: str = ""
    value: Any = None
    step: int = 0
    generation: int = 0
    traceback: str = ""
    worker: str = ""


class Scope(StrEnum):
    """Whom a request to end means."""

    NODE = "node"  # this host goes away; the others go on if they can
    JOB = "job"


class FailureKind(StrEnum):
    """Who has to change something after a worker's own report of failure."""

    USER = "user"
    MISCONFIGURED = "misconfigured"
    STORAGE = "storage"
    INTERNAL = "internal"


# -- events: what the agent's helpers say ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerUp:
    """The fork server has imported torch and takes requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerDown:
    """The fork server ended or does not answer; starts under way in it are lost."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesSettled:
    """No checkpoint is under way any more, or its time is up. `error`: what was lost."""

    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint could not be written."""

    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperBroken:
    """Something without which this agent cannot go on is gone for good."""

    exit_code: int
    cause: str


# -- events: coordination -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """The own record stands on a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRefused:
    """The session cannot be opened until a person changes something."""

    cause: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLost:
    """The own lease or record is gone, or opening a session failed for the moment."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEntered:
    """The job's configuration holds; `differences` names what this node was told otherwise."""

    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSeen:
    """The store's state at one revision, newer than the one before."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDone:
    """The one write under way has an answer; `accepted` is False when somebody was faster."""

    accepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    """The one write under way has no answer; the next snapshot tells whether it happened."""

    reason: str


# -- events: workers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted:
    """The process exists."""

    worker_id: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStartFailed:
    """There is no such process and there will be none."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """The worker has built its model and may be put into a World."""

    worker_id: str
    layout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFormed:
    """The worker completed the first agreement of that generation."""

    worker_id: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBroke:
    """A collective failed in that generation and the worker waits for the next World: a hint."""

    worker_id: str
    generation: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """The worker reports an exception and is about to exit."""

    worker_id: str
    error: str
    message: str
    traceback: str
    step: int
    kind: FailureKind
    virtual_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFinished:
    """`train` returned in this worker; it waits to be told to leave."""

    worker_id: str
    value: Any
    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDying:
    """The process is certain to end: seen exiting, a zombie, or gone."""

    worker_id: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReaped:
    """The process is gone and its arena belongs to the agent alone. One of the two is set."""

    worker_id: str
    exit_code: int | None
    signal: int | None
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped:
    """The process is stopped (SIGSTOP): it may go on at any time, or never."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContinued:
    """The process is not stopped any more."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSeen:
    """The progress pages of all living workers, read at one moment."""

    readings: tuple[Reading, ...]


# -- events: people and time ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """Somebody wants an end. `signal` decides the exit code (128 + n); `at_once`: without grace."""

    scope: Scope
    cause: str
    signal: int
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAsked:
    """An operator wants a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Woke:
    """`wake_at_s` has come."""


WorkerEvent = (
    WorkerStarted
    | WorkerStartFailed
    | WorkerReady
    | WorkerFormed
    | GroupBroke
    | WorkerFailed
    | WorkerFinished
    | WorkerDying
    | WorkerReaped
    | WorkerStopped
    | WorkerContinued
)

Event = (
    ForkServerUp
    | ForkServerDown
    | SavesSettled
    | SaveFailed
    | HelperBroken
    | SessionOpened
    | SessionRefused
    | SessionLost
    | AttemptEntered
    | SnapshotSeen
    | WriteDone
    | WriteFailed
    | WorkerEvent
    | ProgressSeen
    | StopAsked
    | SaveAsked
    | Woke
)

# -- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartForkServer:
    """Start the fork server; answered by ForkServerUp or ForkServerDown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Register this member; answered by SessionOpened, SessionLost or SessionRefused."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterAttempt:
    """Clear what an ended attempt left if `clear`, then settle the job's configuration.

    Answered by AttemptEntered or WriteFailed.
    """

    clear: bool
    world_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteMember:
    """Replace the own record; answered by WriteDone or WriteFailed."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteWorld:
    """Propose the World and the own record in one transaction; answered like WriteMember."""

    world: World
    after_revision: int
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """Write how the job ended; answered like WriteMember. No value: it stays on this host."""

    result: dict[str, Any]
    world_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStop:
    """Ask every agent of the job to end it; answered like WriteMember."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a worker process; answered by WorkerStarted or WorkerStartFailed."""

    worker_id: str
    slot: int
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """SIGKILL the worker's process group; answered by WorkerReaped.

    `stack`: have it write down first where its threads are; that may take STACK_S.
    """

    worker_id: str
    reason: str
    stack: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TellWorld:
    """Send a World, which is in force, to local workers. `first`: the job had none before."""

    world: World
    worker_ids: tuple[str, ...]
    first: bool


class Word(StrEnum):
    """The messages to workers that have no content."""

    STOP = "stop"
    SAVE = "save"
    FINISH = "finish"
    EXIT = "exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send a word to local workers."""

    word: Word
    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleSaves:
    """Finish the checkpoints under way until then; answered by SavesSettled."""

    deadline_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Write an event of elastic/event_table.py to the log."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """End this agent. No worker of it is alive, save those that `outcome` names."""

    outcome: Outcome


Command = (
    StartForkServer
    | OpenSession
    | EnterAttempt
    | WriteMember
    | WriteWorld
    | WriteResult
    | WriteStop
    | StartWorker
    | KillWorker
    | TellWorld
    | Tell
    | SettleSaves
    | Note
    | Leave
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from one event.

    Args:
        state: to be given to the next `step`.
        commands: to be carried out in this order.
        wake_at_s: when to call `step` with Woke if nothing happens before; None = not needed.
        reason: what the machine waits for or has just done, one sentence for people.
    """

    state: State
    commands: tuple[Command, ...]
    wake_at_s: float | None
    reason: str
