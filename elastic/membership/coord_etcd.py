"""The coordination store on etcd v3.

What etcd guarantees, and we build on: a transaction is atomic and has one revision; a key's
modification revision never repeats; ranges and transactions are linearizable; a watch from a
revision delivers every later change in order or says that it cannot; a key on a lease goes when
the lease ends.

Parts: job_keys (what is kept where), etcd_channel (calls), etcd_txn (changes whose reply is lost),
etcd_session (the lease), etcd_record (the own record), etcd_watch (what others change), etcd_check
(the start). This module puts them together and decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.membership import etcd_wire as wire
from elastic.membership.coord import CoordMisconfigured, OnLost, SessionLost, check_job
from elastic.membership.etcd_channel import Connections, TlsOptions
from elastic.membership.etcd_check import Versions, check
from elastic.membership.etcd_record import OwnRecord
from elastic.membership.etcd_session import open_session
from elastic.membership.etcd_txn import PATIENCE_S, Outcome, Transactions
from elastic.membership.etcd_watch import RangeWatch, list_range
from elastic.membership.job_keys import JobKeys, JobView, dump, parse
from elastic.membership.messages import Member, Snapshot, World


class EtcdCoord:
    """`Coord` on etcd (see the protocol for what each operation promises).

    Args:
        endpoints: "host:port" or URLs; the first that answers is used, then the next.
        lease_ttl_s: asked for; etcd may grant more (`ttl_s`).
        username, password: when etcd's authentication is on.
        on_lost: called once per session when it has ended.
        connect_timeout_s: bound of the start-up check.

    To be made and used on one event loop.
    """

    def __init__(  # noqa: PLR0913 - keyword-only options of one connection, each with its default
        self,
        endpoints: Sequence[str],
        job: str,
        *,
        lease_ttl_s: float = 5.0,
        username: str | None = None,
        password: str | None = None,
        tls: TlsOptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
        on_lost: OnLost | None = None,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._keys = JobKeys(check_job(job))
        login = None if username is None else (username, password or "")
        self._connections = Connections(endpoints, login=login, tls=tls, clock=clock)
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._connect_timeout_s = connect_timeout_s
        self._on_lost = on_lost
        self._versions: Versions | None = None
        self._transactions = Transactions(self._connections, clock)
        self._record: OwnRecord | None = None
        self._connect_lock = asyncio.Lock()
        self._view = JobView(self._keys)
        self._view_version = 0
        self._view_changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def ttl_s(self) -> float:
        """The lease time that etcd granted."""
        return self._record.session.ttl_s if self._record else self._lease_ttl_s

    @property
    def alive(self) -> bool:
        """Whether the session certainly stands."""
        return self._record is not None and self._record.session.alive

    @property
    def last_answer_at_s(self) -> float:
        """Monotonic instant of etcd's last answer of any kind."""
        return self._connections.last_answer_at_s

    @property
    def server_version(self) -> str:
        """etcd's version; empty before `connect`."""
        return self._versions.version if self._versions else ""

    async def connect(self) -> None:
        """Check that this etcd can be used, once. Raises CoordMisconfigured (see its kinds)."""
        async with self._connect_lock:
            if self._versions is None:
                self._versions = await check(
                    self._connections,
                    self._keys.world,
                    within_s=self._connect_timeout_s,
                    clock=self._clock,
                )

    async def start(self, member: Member) -> None:
        """Open a session and create the own record; may be called again after a loss."""
        await self.connect()
        if self.alive:
            raise ValueError("this coord has a session already")
        if self._record is not None:
            await self._record.session.abandon()
        session = await open_session(
            self._connections, self._lease_ttl_s, patience_s=PATIENCE_S, clock=self._clock
        )
        key = self._keys.member(member.node)
        record = OwnRecord(key, session, self._connections, self._clock)
        try:
            await record.claim(member)
        except BaseException:
            await session.close()
            raise
        self._record = record
        if self._on_lost is not None:
            session.watch_loss(self._on_lost)

    async def put_member(self, member: Member) -> None:
        """Replace the own record. Raises SessionLost when it is not ours any more."""
        await self._require_record().replace(member)

    async def propose_world(
        self, world: World, *, after_revision: int, member: Member | None = None
    ) -> bool:
        """Publish `world`, and the own record with it, if nobody has published since.

        A rival's equal proposal counts as ours when the reply to ours was lost: the two cannot be
        told apart and mean the same.
        """
        record = self._require_record()
        key, value = self._keys.world, dump(world.to_dict())
        async with record.lock:
            own_put = None if member is None else record.put(member)
            while True:
                outcome = await self._transactions.run(
                    [wire.mod_is(key, after_revision), *record.compares()],
                    [wire.put_request(key, value), *([own_put] if own_put else [])],
                    [wire.range_request(key), wire.range_request(record.key)],
                    session=record.session,
                )
                if outcome.done:
                    if own_put:
                        record.wrote(outcome.revision)
                    return True
                held = outcome.found[0]
                own = record.read_back(outcome.found[1])
                if (held.mod_revision if held else 0) != after_revision:
                    landed = held is not None and held.value == value
                    return (
                        outcome.repeated and landed and (not own_put or own.value == own_put.value)
                    )
                # Only the own record had changed, by a call of ours that had given up waiting.

    async def put_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create the job's configuration unless there is one; return the one that holds."""
        key = self._keys.config
        outcome = await self._create(key, dump(config))
        held = outcome.found[0] if not outcome.done else None
        return parse(held.value) if held else parse(dump(config))

    async def write_result(self, result: dict[str, Any], *, world_revision: int) -> bool:
        """Create the job's result if there is none and the World is still of that revision."""
        value = dump(result)
        outcome = await self._create(
            self._keys.result, value, wire.mod_is(self._keys.world, world_revision)
        )
        held = None if outcome.done else outcome.found[0]
        return outcome.done or (outcome.repeated and held is not None and held.value == value)

    async def clear_ended(self, *, world_revision: int) -> bool:
        """Remove what an ended attempt left: result, stop flag, config; generations go on."""
        await self.connect()
        listing = await list_range(self._connections, self._keys.prefix, self._keys.watched_end)
        ended = (self._keys.result, self._keys.stop)
        if not any(key in listing.entries for key in ended):
            return False
        compares = [wire.mod_is(self._keys.world, world_revision)]
        for key in (*ended, self._keys.config):
            entry = listing.entries.get(key)
            compares.append(wire.mod_is(key, entry.mod_revision if entry else 0))
        deletes = [wire.message("DeleteRequest", key=key) for key in (*ended, self._keys.config)]
        reads = [wire.range_request(key) for key in ended]
        outcome = await self._transactions.run(compares, deletes, reads)
        return outcome.done or (outcome.repeated and not any(outcome.found))

    async def request_stop(self) -> None:
        """Ask the job to end after an agreed step; asking twice is asking once."""
        await self._create(self._keys.stop, b"{}")

    async def put_save(
        self, step: int, generation: int, worker_id: str, entry: dict[str, Any]
    ) -> None:
        """Record that a worker's part of a save is durable."""
        await self.connect()
        key = self._keys.saves(step, generation) + worker_id.encode()
        request = wire.put_request(key, dump(entry))
        await self._connections.call(wire.PUT, request, patience_s=PATIENCE_S)

    async def list_saves(self, step: int, generation: int) -> dict[str, dict[str, Any]]:
        """Return the entries of one save by worker, at one revision."""
        await self.connect()
        prefix = self._keys.saves(step, generation)
        listing = await list_range(self._connections, prefix, wire.prefix_end(prefix))
        return {
            key.removeprefix(prefix).decode(): parse(entry.value)
            for key, entry in listing.entries.items()
        }

    async def delete_saves(self, step: int, generation: int) -> None:
        """Remove the entries of one save."""
        await self.connect()
        prefix = self._keys.saves(step, generation)
        request = wire.message("DeleteRequest", key=prefix, range_end=wire.prefix_end(prefix))
        await self._connections.call(wire.DELETE, request, patience_s=PATIENCE_S)

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the current state, then a newer one whenever something in it has changed."""
        await self.connect()
        if self._following is None and not self._closed:
            self._following = asyncio.create_task(self._follow(), name="etcd-watch")
        seen = 0
        while not self._closed:
            changed = self._view_changed
            if self._view_version != seen:
                seen = self._view_version
                yield self._view.snapshot()
            elif self._following is not None and self._following.done():
                self._following.result()  # raises why it ended
                return
            else:
                await changed.wait()

    async def close(self) -> None:
        """Give the lease back, so that the own record goes at once, and end everything."""
        if self._record is not None:
            await self._record.session.close()
        await self.abandon()

    async def abandon(self) -> None:
        """End everything without a word, as a crash would; the lease runs out by itself."""
        self._closed = True
        if self._record is not None:
            await self._record.session.abandon()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        self._tell()
        await self._connections.close()

    def _require_record(self) -> OwnRecord:
        if self._record is None:
            raise SessionLost("this agent has not registered with etcd", hint="call start first")
        self._record.session.require()
        return self._record

    async def _create(self, key: bytes, value: bytes, *also: Any) -> Outcome:
        await self.connect()
        return await self._transactions.run(
            [wire.mod_is(key, 0), *also],
            [wire.put_request(key, value)],
            [wire.range_request(key)],
        )

    async def _follow(self) -> None:
        """Keep the view up to date; ends only with an error that a person has to see."""
        watch = RangeWatch(
            self._connections,
            self._keys.prefix,
            self._keys.watched_end,
            quiet_s=self._lease_ttl_s,
            answer_s=self._lease_ttl_s / 3,
        )
        try:
            async with contextlib.aclosing(watch.follow()) as news:
                async for each in news:
                    if self._view.apply(each):
                        self._view_version += 1
                        self._tell()
        except ValueError as error:
            raise CoordMisconfigured(
                f"a record of this job in etcd cannot be read: {error}",
                kind="unreadable",
                hint="use one version of this package for all agents of a job",
            ) from error
        finally:
            self._tell()

    def _tell(self) -> None:
        """Wake everybody who waits for a change."""
        changed, self._view_changed = self._view_changed, asyncio.Event()
        changed.set()
