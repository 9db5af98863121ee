"""The save service's own process: arenas in, packs and manifests out.

One event loop takes orders and tells what happened; every blocking call runs in one of a few
threads: two write locally, four upload. Uploads begin in the order in which saves came, so that of
a store that is too slow the oldest checkpoint is complete first; what does not fit the queue is
refused loudly.

A half of an arena is free as soon as the local pack is durable, as the upload reads that file;
without a local place, or when it has failed, when the upload has ended. So memory stays bounded by
the arenas and the parts in flight, however slow a store is.

The end: `close` finishes what there is until its deadline. When the agent is gone (its end of the
socket closes; the kernel's parent-death signal for the case that we are stuck) nothing is finished:
the process leaves, and what lies half-done is swept by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from ckpt.errors import CheckpointError, Misconfigured
from ckpt.frames import FrameChannel
from ckpt.saves import Saves
from ckpt.tier import Tier, open_tier
from ckpt.tier_local import LocalTier
from ckpt.tier_object import S3Tier

__all__ = ["main"]

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
JOURNAL_DIR = ".uploads"
NICENESS = 5
"""Training comes first on a host that has no core to spare."""

log = logging.getLogger("ckpt.service")


def main() -> None:
    """Serve the agent at the other end of `--control-fd` until it is gone."""
    arguments = sys.argv[1:]
    if len(arguments) != 2 or arguments[0] != "--control-fd" or not arguments[1].isdigit():
        sys.stderr.write("the save service is started by an agent, not by hand\n")
        sys.exit(2)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    code = asyncio.run(_serve(socket.socket(fileno=int(arguments[1]))))
    logging.shutdown()
    os._exit(code)  # threads may hang in a store that does not answer; nobody waits for them


async def _serve(control: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    process = _Process(ended)
    channel = FrameChannel(control, process.take, functools.partial(_leave, ended))
    process.channel = channel
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, functools.partial(_leave, ended))
    code = await ended
    if code != 0:
        os._exit(code)  # nothing is finished half
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await channel.flush()
    channel.close()
    return code


def _leave(ended: asyncio.Future[int], code: int = 1) -> None:
    if not ended.done():
        ended.set_result(code)


class _Process:
    """Takes the agent's messages; everything about saves is in Saves."""

    channel: FrameChannel

    def __init__(self, ended: asyncio.Future[int]) -> None:
        self._ended = ended
        self._saves: Saves | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, msg: dict[str, Any], fds: list[int]) -> None:
        """One message of the agent."""
        try:
            self._dispatch(msg, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _dispatch(self, msg: dict[str, Any], fds: list[int]) -> None:
        if msg["t"] == "start":
            self._run(self._start(msg))
            return
        if self._saves is None:
            log.error("%s came before the service had started", msg["t"])
            return
        match msg["t"]:
            case "attach":
                self._saves.attach(msg["worker_id"], fds[0])
            case "detach":
                self._saves.detach(msg["worker_id"])
            case "save":
                self._saves.save(msg["worker_id"], msg["half"], msg["step"], msg["generation"])
            case "commit":
                self._saves.commit(
                    msg["step"],
                    msg["generation"],
                    [e for e in msg["entries"] if e["worker_id"] in set(msg["worker_ids"])],
                    remote=msg["remote"],
                )
            case "drop":
                self._saves.drop(msg["step"], msg["generation"])
            case "close":
                self._run(self._close(msg["deadline_s"]))
            case other:
                log.error("a message of unknown type %r was left aside", other)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the save service fails by a bug of its own", exc_info=task.exception())
            _leave(self._ended, 70)

    async def _start(self, msg: dict[str, Any]) -> None:
        local = remote = None
        made = False
        try:
            if msg["local"] is not None:
                local = LocalTier(msg["local"])
                made = not local.root.exists()
                await asyncio.to_thread(local.probe)
            if msg["remote"] is not None:
                remote = await asyncio.to_thread(_open_remote, msg, local)
            swept = await asyncio.to_thread(_sweep, local, remote) if msg["sweep"] else []
        except CheckpointError as error:
            log.exception("the save service cannot start")
            if local is not None and made:
                with contextlib.suppress(OSError):
                    local.root.rmdir()  # nothing is left of a start that was refused
            self.channel.send(
                {
                    "t": "failed",
                    "class": "misconfigured" if isinstance(error, Misconfigured) else "fatal",
                    "kind": error.kind,
                    "error": error.message,
                    "hint": error.hint,
                }
            )
            await self.channel.flush()
            _leave(self._ended, 2)
            return
        self._saves = Saves(
            job=msg["job"], node=msg["node"], local=local, remote=remote, emit=self._emit
        )
        self.channel.send({"t": "started", "swept": swept})
        log.info("started; local=%s remote=%s swept=%s", msg["local"], msg["remote"], swept)

    async def _close(self, deadline_s: float) -> None:
        assert self._saves is not None
        unfinished = await self._saves.close(deadline_s)
        self.channel.send({"t": "closed", "unfinished": unfinished})
        _leave(self._ended, 0)

    def _emit(self, event: dict[str, Any]) -> None:
        if event["t"] == "failed":
            log.error("%s", event)
        self.channel.send(event)


def _open_remote(msg: dict[str, Any], local: LocalTier | None) -> Tier:
    journal = None if local is None else Path(local.root) / JOURNAL_DIR
    remote = open_tier(msg["remote"], options=msg["options"], journal=journal)
    remote.probe()
    return remote


def _sweep(local: LocalTier | None, remote: Tier | None) -> list[str]:
    swept = [] if local is None else local.sweep()
    if isinstance(remote, S3Tier):
        try:
            swept += remote.sweep()
        except CheckpointError:
            # Leftovers cost money, but no checkpoint: the journal stays for the next start.
            log.exception("open uploads of dead processes could not be given back")
    return swept
