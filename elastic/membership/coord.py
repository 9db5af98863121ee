"""The coordination store as agents see it: a few records, changed only by compare-and-swap.

Every record of a job has one key, and the store numbers every change with a revision that only
grows. What all implementations guarantee (tests/contract/test_coord.py holds them to it):

- A member's record lives on a lease. It goes when the agent closes, or when the store has not heard
  from the agent for the lease's time. The agent keeps its own deadline, counted from when it *sent*
  the last heartbeat that was answered, so it always knows of its end before the store does.
- Worlds are a chain: one is written only over the revision of the one before it, and only by an
  agent whose own record still stands. Of two proposers on one revision, at most one succeeds.
- A snapshot is the state of all keys at one revision; a reader sees them in order, may miss those
  that were overtaken, and never misses the last.
- A change whose reply was lost is resolved by reading back, never by trusting the error.

Not here: who should be in a World, and when (that is decided by pure code from snapshots).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from elastic.errors import ElasticError, Misconfigured, Retryable
from elastic.membership.messages import Member, Snapshot, World

OnLost = Callable[[str], None]
"""Called once, on the event loop, when the session has ended; gets the reason as a sentence."""


class CoordError(ElasticError):
    """Base of what a Coord raises; each is also of the kind that says what to do next."""

    default_kind = "coord"


class CoordRetryable(CoordError, Retryable):
    """The store could not be asked or did not answer; a change may or may not have happened.

    Kinds: "unreachable", "no-space" (an operator has to make room; nothing happened), "compacted",
    "closed".
    """

    default_kind = "unreachable"


class CoordMisconfigured(CoordError, Misconfigured):
    """A person has to change something.

    Kinds: "unreachable" (at the start only), "no-quorum" (likewise), "wrong-version",
    "no-permission", "too-large", "corrupt", "refused", "unreadable".
    """

    default_kind = "refused"


class SessionLost(CoordError):
    """The own lease or record is gone: decide nothing, and `start` again to be a member again."""

    default_kind = "session-lost"


class NodeTaken(CoordError, Misconfigured):
    """Another living agent of this job has that node name."""

    default_kind = "node-taken"


class Coord(Protocol):
    """One agent's access to the records of one job."""

    @property
    def ttl_s(self) -> float:
        """The lease time that the store granted, which may exceed what was asked for."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the session is certain to stand: no loss known, and its deadline not passed."""
        ...

    @property
    def last_answer_at_s(self) -> float:
        """Monotonic instant of the store's last answer of any kind."""
        ...

    async def start(self, member: Member) -> None:
        """Open a session and create the own record; may be called again after a loss.

        A record of an earlier incarnation of this node is waited out. Raises NodeTaken: its agent
        is alive; CoordMisconfigured: see its kinds.
        """
        ...

    async def put_member(self, member: Member) -> None:
        """Replace the own record. Raises SessionLost when it is not ours any more."""
        ...

    async def propose_world(
        self, world: World, *, after_revision: int, member: Member | None = None
    ) -> bool:
        """Publish `world`, and the own record with it, if nobody has published since.

        Args:
            after_revision: `world_revision` of the snapshot it was decided from; 0 = none yet.

        Returns False when somebody else won. Raises SessionLost when the own record is gone,
        CoordRetryable when the outcome could not be learned (the next snapshot will show it).
        """
        ...

    async def put_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create the job's configuration unless there is one; return the one that holds."""
        ...

    async def write_result(self, result: dict[str, Any], *, world_revision: int) -> bool:
        """Create the job's result if there is none and the World is still of that revision."""
        ...

    async def clear_ended(self, *, world_revision: int) -> bool:
        """Remove what an ended attempt left: result, stop flag, config; generations go on.

        Returns False when there was nothing to remove, or when the World or one of these changed
        meanwhile.
        """
        ...

    async def request_stop(self) -> None:
        """Ask the job to end after an agreed step; asking twice is asking once."""
        ...

    async def put_save(
        self, step: int, generation: int, worker_id: str, entry: dict[str, Any]
    ) -> None:
        """Record that a worker's part of a save is durable."""
        ...

    async def list_saves(self, step: int, generation: int) -> dict[str, dict[str, Any]]:
        """Return the entries of one save by worker, at one revision."""
        ...

    async def delete_saves(self, step: int, generation: int) -> None:
        """Remove the entries of one save."""
        ...

    def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the current state, then a newer one whenever something in it has changed.

        Ends only when the coord is closed. While the store is away it waits.
        """
        ...

    async def close(self) -> None:
        """Give the lease back, so that the own record goes at once, and end everything."""
        ...

    async def abandon(self) -> None:
        """End everything without a word, as a crash would; the lease runs out by itself."""
        ...


def check_job(job: str) -> str:
    """Return `job` if it can be part of a key. Raises CoordMisconfigured.

    Two jobs under one careless name would read each other's records, so there is no default.
    """
    if not job or job != job.strip() or "/" in job or any(c.isspace() for c in job):
        raise CoordMisconfigured(
            f"the job name {job!r} cannot be used",
            kind="refused",
            hint="give a name without spaces and slashes, one for each job",
            job=job,
        )
    return job
