"""What the membership machine remembers between two events, and one turn of it.

All of it is frozen and plain, so a state can be kept, compared and printed. A `Turn` is the
working copy of one `step`: facts are changed in it, commands collected. Other modules of this
package hold the rules; this one holds no rule. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from elastic.membership.choose_world import WorldRules, survivors_of
from elastic.membership.commands import (
    Command,
    KillWorker,
    Note,
    Outcome,
    Reading,
    WorkerFailed,
    WorkerFinished,
)
from elastic.membership.failures import Ledger
from elastic.membership.messages import Member, Snapshot, WorkerRef, WorkerStatus, World

if TYPE_CHECKING:
    from elastic.membership.machine import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the configuration says, as far as the machine needs it.

    Args:
        slots: workers that this node brings into a World; `spares` more are kept warm.
        hang_timeout_s: after which a stopped worker, or one without progress for which others
            wait, counts as dead; None = learned from the steps.
        slow_timeout_s: the same where slowness is legal: first steps, evaluations, saves.
        form_timeout_s: after which a worker that does not react to a World counts as dead.
        finish_timeout_s: what saves under way are granted at a normal end.
    """

    world: WorldRules = field(default_factory=WorldRules)
    slots: int = 1
    spares: int = 0
    respawn: bool = True
    max_failures: int = 100
    max_reshapes: int = 1000
    grace_s: float = 25.0
    finish_timeout_s: float = 120.0
    hang_timeout_s: float | None = None
    slow_timeout_s: float = 600.0
    form_timeout_s: float = 30.0
    below_min_timeout_s: float = 600.0
    lease_ttl_s: float = 5.0
    fail_on_save_error: bool = False


class Session(StrEnum):
    """How this agent stands with the coordination store."""

    OPENING = "opening"
    OPEN = "open"  # the own record stands; the job's configuration is not settled yet
    LIVE = "live"
    LOST = "lost"  # nothing may be proposed; training goes on


class Helper(StrEnum):
    """The life of the fork server."""

    DOWN = "down"
    STARTING = "starting"
    UP = "up"


class Life(StrEnum):
    """The life of a worker process as far as Worlds are concerned."""

    STARTING = "starting"
    READY = "ready"
    DYING = "dying"  # counts as dead; the process may still be there


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """One worker process of this node.

    Args:
        attempt: how often its slot had been started, this time included.
        seen_at_s: when its page was last read.
        silent_s: for how long the page has not been renewed, in looks at it.
        place_s: for how long it has been in the same phase of the same step.
        told: newest generation that it was sent; `told_at_s` when; `joined` the first one.
        formed: newest generation of which it completed the first agreement.
        why: what is said of its death, to follow its id.
        doomed_at_s: since when it counts as dead.
        kill_at_s: when it is killed if it is not gone by then.
        wanted: its death is our doing and no failure.
        counted: its death is in the ledger.
    """

    worker_id: str
    slot: int
    attempt: int
    life: Life = Life.STARTING
    pid: int | None = None
    reading: Reading | None = None
    seen_at_s: float = 0.0
    silent_s: float = 0.0
    place_s: float = 0.0
    told: int = 0
    told_at_s: float = 0.0
    joined: int = 0
    formed: int = 0
    stop_told: bool = False
    finished: WorkerFinished | None = None
    failure: WorkerFailed | None = None
    stopped_at_s: float | None = None
    why: str = ""
    doomed_at_s: float | None = None
    kill_at_s: float | None = None
    kill_asked: bool = False
    wanted: bool = False
    counted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for a worker on this node.

    Args:
        attempts: how often a process was started in it.
        early_deaths: how many in a row died before they completed an agreement.
        start_at_s: not before; None = given up.
    """

    slot: int
    attempts: int = 0
    early_deaths: int = 0
    start_at_s: float | None = 0.0


class WriteKind(StrEnum):
    """What the one write under way is about."""

    ATTEMPT = "attempt"
    MEMBER = "member"
    WORLD = "world"
    RESULT = "result"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The one write under way."""

    kind: WriteKind
    after_revision: int = 0
    world: World | None = None
    member: Member | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A collective broke although nobody is known to have died."""

    since_s: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Somebody asked for an end; workers end after an agreed step."""

    cause: str
    signal: int
    deadline_at_s: float
    job: bool
    written: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The outcome is known; what is left is to tell everyone and to clean up.

    Args:
        orderly: the workers are told to finish, rather than killed.
        result_due: the job's result has yet to be written.
        result_until_s: after which it is not tried any more.
        told: the workers were told or killed, and saves are being settled.
        settled: no save is under way any more.
        lost: what could not be saved.
    """

    outcome: Outcome
    since_s: float
    orderly: bool
    result_due: bool
    result_until_s: float
    told: bool = False
    told_at_s: float = 0.0
    settled: bool = False
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that the next decision may look at."""

    node: str
    incarnation: str
    address: str
    rules: Rules
    phase: Phase
    # helpers
    session: Session = Session.OPENING
    entered: bool = False
    session_tries: int = 0
    session_at_s: float = 0.0
    fork_server: Helper = Helper.DOWN
    fork_tries: int = 0
    fork_at_s: float = 0.0
    # the records
    snapshot: Snapshot | None = None
    world: World | None = None
    world_revision: int | None = None
    """None: a World of ours was accepted, and the snapshot that shows it has not come yet."""
    missing_at_s: Mapping[str, float] = field(default_factory=dict)
    registering: Member | None = None
    written: Member | None = None
    write: Write | None = None
    write_tries: int = 0
    write_at_s: float = 0.0
    # the workers
    locals: tuple[Local, ...] = ()
    slots: tuple[Slot, ...] = ()
    started: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    # what was observed
    reshapes: int = 0
    deaths: Mapping[str, str] = field(default_factory=dict)
    gathered_at_s: float | None = None
    joiners_at_s: float | None = None
    broken: Broken | None = None
    stalled: int = 0
    """The generation in which all workers here have waited too long for others, else 0."""
    reforms: int = 0
    committed: int = 0
    agreed_at_s: float | None = None
    agreed_in: int = 0
    """The generation of the newest agreement that a worker here has completed."""
    step_time_s: float | None = None
    below_at_s: float | None = None
    undecided_at_s: float | None = None
    # the end
    stop: Stop | None = None
    leaving: bool = False
    ending: Ending | None = None
    reason: str = ""
    _members: list[dict[str, Member]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """What `members` has answered; a copy with changes begins without it."""

    def local(self, worker_id: str) -> Local | None:
        """Return a worker process of this node."""
        for each in self.locals:
            if each.worker_id == worker_id:
                return each
        return None

    @property
    def closing(self) -> bool:
        """Whether nobody is taken in or started any more."""
        return (
            self.stop is not None
            or self.leaving
            or self.ending is not None
            or any(each.finished is not None for each in self.locals)
            or any(member.finished for member in self.members().values())
        )

    def own_member(self, proposed: World | None = None) -> Member:
        """Return the record that this agent should have in the store.

        A worker is ready until it has been in a World. Then it lives in the Worlds that follow, or
        has been left out by one: in either case nobody may take it in as a new one.

        Args:
            proposed: the World that the record is written together with.
        """
        mine = self.in_world()
        taken = set() if proposed is None else {w.worker_id for w in proposed.workers}
        open_slots = sum(1 for slot in self.slots if slot.start_at_s is not None)
        return Member(
            node=self.node,
            incarnation=self.incarnation,
            address=self.address,
            slots=min(self.rules.slots, open_slots),
            workers=tuple(
                WorkerStatus(
                    worker_id=each.worker_id,
                    slot=each.slot,
                    ready=not each.told and each.worker_id not in taken,
                )
                for each in sorted(self.living(), key=lambda each: each.slot)
            ),
            leaving=self.leaving,
            finished=bool(mine) and all(each.finished is not None for each in mine),
            stalled=self.stalled,
        )

    def members(self) -> dict[str, Member]:
        """Return all nodes' records, the own one as it should be; not to be changed."""
        if not self._members:
            members = {} if self.snapshot is None else dict(self.snapshot.members)
            members[self.node] = self.own_member()
            self._members.append(members)
        return self._members[0]

    def living(self) -> list[Local]:
        """Return the workers of this node that are ready and not known to be dying."""
        return [each for each in self.locals if each.life is Life.READY]

    def in_world(self) -> list[Local]:
        """Return the living workers of this node that are in the World in force."""
        if self.world is None:
            return []
        inside = {worker.worker_id for worker in self.world.workers}
        return [each for each in self.living() if each.worker_id in inside]

    def survivors(self, lost_nodes: frozenset[str] = frozenset()) -> list[WorkerRef]:
        """Return the workers of the World in force that live, in rank order."""
        if self.world is None:
            return []
        return survivors_of(self.world, self.members(), lost_nodes)


class Turn:
    """The working copy of one `step`."""

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.commands: list[Command] = []
        self.wake_at_s: float | None = None

    def set(self, **changes: Any) -> None:
        """Change facts of the state."""
        self.state = replace(self.state, **changes)

    def put(self, local: Local, **changes: Any) -> Local:
        """Change facts of one worker; returns it as it is now."""
        changed = replace(local, **changes)
        self.set(
            locals=tuple(
                changed if each.worker_id == local.worker_id else each for each in self.state.locals
            )
        )
        return changed

    def doom(self, local: Local, why: str, *, wanted: bool = False) -> Local:
        """Count a worker as dead from now on; `why` follows its id in a sentence."""
        doomed = self.put(
            local,
            life=Life.DYING,
            why=why,
            doomed_at_s=self.now_s,
            wanted=local.wanted or wanted,
        )
        if not doomed.wanted:
            self.set(deaths={**self.state.deaths, local.worker_id: why})
        return doomed

    def kill(self, local: Local, why: str, *, wanted: bool = False, stack: bool = False) -> None:
        """Count a worker as dead and have it killed, once; `stack`: it shows where it is first."""
        doomed = local if local.life is Life.DYING else self.doom(local, why, wanted=wanted)
        if not doomed.kill_asked:
            self.put(doomed, kill_asked=True, wanted=doomed.wanted or wanted)
            self.do(KillWorker(worker_id=local.worker_id, reason=why, stack=stack))

    def put_slot(self, slot: Slot, **changes: Any) -> None:
        """Change facts of one slot."""
        changed = replace(slot, **changes)
        self.set(
            slots=tuple(changed if each.slot == slot.slot else each for each in self.state.slots)
        )

    def do(self, command: Command) -> None:
        """Ask for one act."""
        self.commands.append(command)

    def note(self, event: str, /, **fields: Any) -> None:
        """Ask for one line in the event log."""
        self.commands.append(Note(event=event, fields=fields))

    def wake(self, at_s: float) -> None:
        """Ask to be called at that time at the latest."""
        if self.wake_at_s is None or at_s < self.wake_at_s:
            self.wake_at_s = at_s
