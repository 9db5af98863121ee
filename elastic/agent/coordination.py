"""The agent's dealings with the coordination store, as commands in and events out.

Writes are made one after the other in the order in which they were asked for, and each is answered
by exactly one event. The session is opened, lost and opened again; what others write arrives as
snapshots. Nothing is decided here: whether to write, and what a loss means, is the machine's.

The job's `config` record holds the settings that must be equal on all nodes and the job's token,
made by whichever agent was first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from elastic.errors import ElasticError, ExitCode, Misconfigured
from elastic.membership import commands as c
from elastic.membership.coord import Coord, OnLost, SessionLost
from elastic.membership.messages import Member

MakeCoord = Callable[[OnLost], Awaitable[Coord]]
WRITE_TIMEOUT_S = 10.0
"""A write that takes longer is answered as failed; the next snapshot tells what became of it."""

LOCAL_FIELDS = frozenset(
    {
        "nproc",
        "spares",
        "etcd",
        "node",
        "bind",
        "advertise",
        "checkpoint",
        "log_dir",
        "console",
        "metrics_port",
        "debug",
    }
)
"""Settings that may differ between the nodes of a job."""


class Coordination:
    """One agent's session.

    Args:
        make_coord: gives the store's client; called once, when the first session is opened.
        settings: this node's configuration as plain values.
        token: the job's, if this agent turns out to be the first.
        on_event: gets what happens, for the machine.
        on_token: gets the token that holds.
    """

    def __init__(
        self,
        make_coord: MakeCoord,
        *,
        settings: Mapping[str, Any],
        token: str,
        on_event: Callable[[c.Event], None],
        on_token: Callable[[str], None],
    ) -> None:
        self.coord: Coord | None = None
        self._make_coord = make_coord
        self._settings = shared(settings)
        self._token = token
        self._on_event = on_event
        self._on_token = on_token
        self._opening: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._writes: asyncio.Queue[c.Command] = asyncio.Queue()
        self._writing = asyncio.create_task(self._write_all(), name="coordination-writes")

    def open(self, member: Member) -> None:
        """Open a session; SessionOpened, SessionLost or SessionRefused follows."""
        self._opening = asyncio.create_task(self._open(member), name="coordination-open")

    def write(self, command: c.Command) -> None:
        """Queue one of EnterAttempt, WriteMember, WriteWorld, WriteResult and WriteStop."""
        self._writes.put_nowait(command)

    async def close(self, within_s: float) -> None:
        """Give the lease back if the store answers in time; end everything."""
        tasks = [t for t in (self._opening, self._following, self._writing) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if self.coord is None:
            return
        try:
            async with asyncio.timeout(within_s):
                await self.coord.close()
        except (TimeoutError, ElasticError):
            with contextlib.suppress(TimeoutError, ElasticError):
                async with asyncio.timeout(1.0):
                    await self.coord.abandon()

    async def _open(self, member: Member) -> None:
        try:
            if self.coord is None:
                self.coord = await self._make_coord(self._lost)
            await self.coord.start(member)
        except Misconfigured as error:
            self._on_event(
                c.SessionRefused(cause=str(error), exit_code=int(ExitCode.MISCONFIGURED))
            )
            return
        except ElasticError as error:
            self._on_event(c.SessionLost(reason=str(error)))
            return
        except Exception as error:  # noqa: BLE001 - a task's error would be seen by nobody
            self._on_event(_broken(error))
            return
        self._on_event(c.SessionOpened())
        if self._following is None:
            self._following = asyncio.create_task(self._follow(), name="coordination-watch")

    def _lost(self, reason: str) -> None:
        self._on_event(c.SessionLost(reason=reason))

    async def _follow(self) -> None:
        assert self.coord is not None
        try:
            async for snapshot in self.coord.snapshots():
                self._on_event(c.SnapshotSeen(snapshot=snapshot))
        except Misconfigured as error:
            self._on_event(c.HelperBroken(exit_code=int(ExitCode.MISCONFIGURED), cause=str(error)))
        except Exception as error:  # noqa: BLE001 - as above
            self._on_event(_broken(error))

    async def _write_all(self) -> None:
        while True:
            command = await self._writes.get()
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    event = await self._write(command)
            except SessionLost as error:
                self._on_event(c.SessionLost(reason=str(error)))
                event = c.WriteFailed(reason=str(error))
            except TimeoutError:
                event = c.WriteFailed(reason="the coordination store did not answer in time")
            except Misconfigured as error:
                cause = str(error)
                self._on_event(c.HelperBroken(exit_code=int(ExitCode.MISCONFIGURED), cause=cause))
                event = c.WriteFailed(reason=cause)
            except ElasticError as error:
                event = c.WriteFailed(reason=str(error))
            except Exception as error:  # noqa: BLE001 - the machine must have an answer
                self._on_event(_broken(error))
                event = c.WriteFailed(reason=str(error))
            self._on_event(event)

    async def _write(self, command: c.Command) -> c.Event:
        coord = self.coord
        assert coord is not None, "nothing is written before a session is open"
        match command:
            case c.EnterAttempt():
                return await self._enter(coord, command)
            case c.WriteMember():
                await coord.put_member(command.member)
                return c.WriteDone(accepted=True)
            case c.WriteWorld():
                accepted = await coord.propose_world(
                    command.world, after_revision=command.after_revision, member=command.member
                )
                return c.WriteDone(accepted=accepted)
            case c.WriteResult():
                accepted = await coord.write_result(
                    command.result, world_revision=command.world_revision
                )
                return c.WriteDone(accepted=accepted)
            case c.WriteStop():
                await coord.request_stop()
                return c.WriteDone(accepted=True)
            case _:
                raise TypeError(f"{type(command).__name__} is no write")

    async def _enter(self, coord: Coord, command: c.EnterAttempt) -> c.AttemptEntered:
        """Clear what an ended attempt has left, if asked; make or take the job's configuration."""
        if command.clear:
            await coord.clear_ended(world_revision=command.world_revision)
        ours = {"settings": self._settings, "token": self._token}
        held = await coord.put_config(ours)
        differences = compare(self._settings, held.get("settings", {}))
        if differences and command.clear:
            # Nobody else is there: it was left by an attempt that was killed as a whole.
            await coord.request_stop()
            await coord.clear_ended(world_revision=command.world_revision)
            held = await coord.put_config(ours)
            differences = compare(self._settings, held.get("settings", {}))
        token = held.get("token")
        if isinstance(token, str) and token:
            self._token = token
            self._on_token(token)
        return c.AttemptEntered(differences=differences)


def shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings that must be equal on all nodes."""
    return {name: value for name, value in settings.items() if name not in LOCAL_FIELDS}


def compare(ours: Mapping[str, Any], held: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one phrase for each setting that differs from what the job has."""
    return tuple(
        f"{name} is {ours.get(name)!r} here and {held.get(name)!r} in the job"
        for name in sorted(ours.keys() | held.keys())
        if ours.get(name) != held.get(name)
    )


def _broken(error: Exception) -> c.HelperBroken:
    return c.HelperBroken(
        exit_code=int(ExitCode.INFRASTRUCTURE),
        cause=f"the coordination of this agent failed: {type(error).__name__}: {error}",
    )
