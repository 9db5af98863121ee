"""The coordination store in this process's memory: for one agent alone, simulations and tests.

Several `MemoryCoord`s that share a `MemoryStore` are several agents on one etcd. It keeps what
etcd keeps in the plainest way there is: each operation runs without an await in it, so it is a
transaction. Leases run by the store's clock and end when somebody looks (each coord looks several
times per lease). It is also the slow and obvious twin that the etcd implementation is compared
with, record by record.

Faults: `expire` ends a lease behind its owner's back; `away` makes the store unreachable for all,
`cut` for one coord. Nothing survives the process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.membership.coord import CoordRetryable, NodeTaken, OnLost, SessionLost, check_job
from elastic.membership.messages import Member, Snapshot, World

_LOOKS_PER_TTL = 6
_BEATS_PER_TTL = 3


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    ends_at_s: float
    renewals: int = 0


@dataclass(slots=True)
class _Record:
    member: Member
    lease: int
    revision: int


@dataclass(slots=True)
class _Job:
    version: int = 1  # of what snapshots show
    world: World | None = None
    world_revision: int = 0
    members: dict[str, _Record] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    stop: bool = False
    config: dict[str, Any] | None = None
    saves: dict[tuple[int, int], dict[str, dict[str, Any]]] = field(default_factory=dict)


class MemoryStore:
    """The records of all jobs, one revision counter, and the leases."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.revision = 1
        self.jobs: dict[str, _Job] = {}
        self.leases: dict[int, _Lease] = {}
        self.changed = asyncio.Event()
        self._away = False
        self._next_lease = 1

    @property
    def away(self) -> bool:
        """Whether nobody can reach the store; leases run on meanwhile."""
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away = away
        self.tell()

    def job(self, name: str) -> _Job:
        """Return a job's records, made when first asked for."""
        return self.jobs.setdefault(name, _Job())

    def next_revision(self) -> int:
        """Count one more change."""
        self.revision += 1
        return self.revision

    def tell(self) -> None:
        """Wake everybody who waits for a change."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def grant(self, ttl_s: float) -> int:
        """Make a lease."""
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self.leases[lease] = _Lease(ttl_s, self.clock.now_s() + ttl_s)
        return lease

    def renew(self, lease: int) -> bool:
        """Give a lease its whole time again; False when it is gone."""
        self.look()
        found = self.leases.get(lease)
        if found is None:
            return False
        found.ends_at_s = self.clock.now_s() + found.ttl_s
        found.renewals += 1
        return True

    def look(self) -> None:
        """End the leases whose time has passed."""
        now_s = self.clock.now_s()
        for lease in [key for key, each in self.leases.items() if each.ends_at_s <= now_s]:
            self.revoke(lease)

    def revoke(self, lease: int) -> None:
        """End a lease; the records on it go at one revision."""
        self.leases.pop(lease, None)
        held = [
            (job, node)
            for job in self.jobs.values()
            for node, record in job.members.items()
            if record.lease == lease
        ]
        if held:
            self.next_revision()
        for job, node in held:
            del job.members[node]
            job.version += 1
        self.tell()

    def expire(self, job: str, node: str) -> None:
        """End the lease of one member now, as if its time had passed."""
        self.revoke(self.job(job).members[node].lease)


class MemoryCoord:
    """`Coord` on a `MemoryStore` (see the protocol for what each operation promises)."""

    def __init__(
        self,
        store: MemoryStore,
        job: str,
        *,
        lease_ttl_s: float = 5.0,
        on_lost: OnLost | None = None,
    ) -> None:
        self.cut = False
        self._store = store
        self._clock = store.clock
        self._job_name = check_job(job)
        self._ttl_s = lease_ttl_s
        self._on_lost = on_lost
        self._node = ""
        self._lease: int | None = None
        self._deadline_s = 0.0
        self._last_answer_at_s = store.clock.now_s()
        self._keeping: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def ttl_s(self) -> float:
        """The lease time."""
        return self._ttl_s

    @property
    def alive(self) -> bool:
        """Whether the session certainly stands."""
        return self._lease is not None and self._clock.now_s() < self._deadline_s

    @property
    def last_answer_at_s(self) -> float:
        """Monotonic instant of the store's last answer."""
        return self._last_answer_at_s

    async def start(self, member: Member) -> None:
        """Open a session and create the own record; may be called again after a loss."""
        if self.alive:
            raise ValueError("this coord has a session already")
        self._stop_keeping()
        await self._wait_for_name(member)
        job = self._job()
        self._node = member.node
        self._lease = self._store.grant(self._ttl_s)
        self._deadline_s = self._clock.now_s() + self._ttl_s
        self._write_own(job, member)
        self._keeping = asyncio.create_task(self._keep(self._lease), name="memory-heartbeat")

    async def put_member(self, member: Member) -> None:
        """Replace the own record. Raises SessionLost when it is not ours any more."""
        job = self._job()
        self._require_own(job, member)
        self._write_own(job, member)

    async def propose_world(
        self, world: World, *, after_revision: int, member: Member | None = None
    ) -> bool:
        """Publish `world`, and the own record with it, if nobody has published since."""
        job = self._job()
        self._require_own(job, member)
        if job.world_revision != after_revision:
            return False
        job.world = World.from_dict(_copy(world.to_dict()))
        job.world_revision = self._store.next_revision()
        if member is not None:
            job.members[self._node] = self._own_record(member, job.world_revision)
        self._changed(job)
        return True

    async def put_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create the job's configuration unless there is one; return the one that holds."""
        job = self._job()
        if job.config is None:
            job.config = _copy(config)
            self._store.next_revision()
        held: dict[str, Any] = _copy(job.config)
        return held

    async def write_result(self, result: dict[str, Any], *, world_revision: int) -> bool:
        """Create the job's result if there is none and the World is still of that revision."""
        job = self._job()
        if job.result is not None or job.world_revision != world_revision:
            return False
        job.result = _copy(result)
        self._store.next_revision()
        self._changed(job)
        return True

    async def clear_ended(self, *, world_revision: int) -> bool:
        """Remove what an ended attempt left: result, stop flag, config; generations go on."""
        job = self._job()
        if (job.result is None and not job.stop) or job.world_revision != world_revision:
            return False
        job.result, job.stop, job.config = None, False, None
        self._store.next_revision()
        self._changed(job)
        return True

    async def request_stop(self) -> None:
        """Ask the job to end after an agreed step; asking twice is asking once."""
        job = self._job()
        if not job.stop:
            job.stop = True
            self._store.next_revision()
            self._changed(job)

    async def put_save(
        self, step: int, generation: int, worker_id: str, entry: dict[str, Any]
    ) -> None:
        """Record that a worker's part of a save is durable."""
        self._job().saves.setdefault((step, generation), {})[worker_id] = _copy(entry)
        self._store.next_revision()

    async def list_saves(self, step: int, generation: int) -> dict[str, dict[str, Any]]:
        """Return the entries of one save by worker."""
        entries: dict[str, dict[str, Any]] = _copy(self._job().saves.get((step, generation), {}))
        return entries

    async def delete_saves(self, step: int, generation: int) -> None:
        """Remove the entries of one save."""
        if self._job().saves.pop((step, generation), None) is not None:
            self._store.next_revision()

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the current state, then a newer one whenever something in it has changed."""
        seen = 0
        while not self._closed:
            changed = self._store.changed
            self._store.look()
            job = self._store.job(self._job_name)
            if self._reachable() and job.version != seen:
                seen = job.version
                yield self._snapshot(job)
            else:
                await changed.wait()

    async def close(self) -> None:
        """Give the lease back, so that the own record goes at once, and end everything."""
        if self._lease is not None and self._reachable():
            self._store.revoke(self._lease)
        await self.abandon()

    async def abandon(self) -> None:
        """End everything without a word, as a crash would; the lease runs out by itself."""
        self._closed = True
        self._lease = None
        self._stop_keeping()
        self._store.tell()

    async def _wait_for_name(self, member: Member) -> None:
        """Return when no other incarnation holds the node's name. Raises NodeTaken."""
        renewals: int | None = None
        while True:
            job = self._job()
            record = job.members.get(member.node)
            if record is None or record.member.incarnation == member.incarnation:
                return
            seen = self._store.leases[record.lease].renewals
            if renewals is not None and seen > renewals:
                raise NodeTaken(
                    f"another agent of this job runs under the node name {member.node}",
                    hint="stop it, or give this one another node name",
                    node=member.node,
                )
            renewals = seen
            await self._clock.sleep(self._ttl_s / _LOOKS_PER_TTL)

    def _reachable(self) -> bool:
        return not (self._store.away or self.cut or self._closed)

    def _job(self) -> _Job:
        """Return the job's records as of now. Raises CoordRetryable when cut off."""
        if not self._reachable():
            raise CoordRetryable("the store in memory is out of reach", after_s=self._ttl_s / 3)
        self._store.look()
        self._last_answer_at_s = self._clock.now_s()
        return self._store.job(self._job_name)

    def _require_own(self, job: _Job, member: Member | None) -> None:
        if member is not None and member.node != self._node:
            raise ValueError(f"this record is of {self._node or 'nobody'}, not of {member.node}")
        record = job.members.get(self._node)
        if self.alive and (record is None or record.lease != self._lease):
            self._lose("this agent's record is gone from the store")
        if not self.alive:
            raise SessionLost("this agent's session has ended", hint="it registers again")

    def _own_record(self, member: Member, revision: int) -> _Record:
        if self._lease is None:
            raise AssertionError("a lost session was not refused")
        return _Record(Member.from_dict(_copy(member.to_dict())), self._lease, revision)

    def _write_own(self, job: _Job, member: Member) -> None:
        job.members[member.node] = self._own_record(member, self._store.next_revision())
        self._changed(job)

    def _changed(self, job: _Job) -> None:
        job.version += 1
        self._store.tell()

    def _snapshot(self, job: _Job) -> Snapshot:
        members = sorted(job.members.items())
        return Snapshot(
            revision=self._store.revision,
            world=job.world,
            world_revision=job.world_revision,
            members={node: record.member for node, record in members},
            member_revisions={node: record.revision for node, record in members},
            result=None if job.result is None else _copy(job.result),
            stop=job.stop,
        )

    async def _keep(self, lease: int) -> None:
        """Send heartbeats and watch the own deadline until the session ends."""
        beat_at_s = self._clock.now_s()
        while self._lease == lease:
            now_s = self._clock.now_s()
            self._store.look()
            if now_s >= self._deadline_s:
                self._lose(f"the store has confirmed no heartbeat for {self._ttl_s:g} s")
            elif self._reachable() and now_s >= beat_at_s:
                if not self._store.renew(lease):
                    self._lose("the store does not know the lease any more")
                    return
                self._last_answer_at_s = now_s
                self._deadline_s = now_s + self._ttl_s
                beat_at_s = now_s + self._ttl_s / _BEATS_PER_TTL
            await self._clock.sleep(self._ttl_s / _LOOKS_PER_TTL)

    def _lose(self, reason: str) -> None:
        if self._lease is None:
            return
        self._lease = None
        if self._on_lost is not None:
            self._on_lost(reason)

    def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None


def _copy(value: Any) -> Any:
    """Return what a reader of the stored JSON would get."""
    return json.loads(json.dumps(value))
