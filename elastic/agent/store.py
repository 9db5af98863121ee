"""The coordination store of a run: etcd servers that somebody named, or one of our own.

Our own etcd is started on loopback in the run directory, watched, started again when it dies, and
gone at the end with its data: it knows nothing that outlives the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable

from elastic.agent.spec import RunDir
from elastic.config import ElasticConfig
from elastic.errors import Misconfigured
from elastic.local_server import ServerNotReady
from elastic.membership.coord import Coord, OnLost
from elastic.membership.coord_etcd import EtcdCoord
from elastic.membership.etcd_server import EtcdServer

WATCH_EVERY_S = 0.25
MAX_STARTS = 5


class Store:
    """Gives a client of the job's store.

    Args:
        note: writes an event to the agent's log.
        on_endpoints: gets the servers' addresses as soon as they are known.
    """

    def __init__(
        self,
        config: ElasticConfig,
        job: str,
        run_dir: RunDir,
        *,
        note: Callable[..., None],
        on_endpoints: Callable[[list[str]], None],
    ) -> None:
        self._config = config
        self._job = job
        self._run_dir = run_dir
        self._note = note
        self._on_endpoints = on_endpoints
        self._server: EtcdServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._starts = 0

    async def connect(self, on_lost: OnLost) -> Coord:
        """Return a client that has reached the store; may be called again after a failure.

        Raises Misconfigured: a person has to change something. ServerNotReady: try again.
        """
        endpoints = list(self._config.etcd) or [await self._own()]
        self._on_endpoints(endpoints)
        coord = EtcdCoord(
            endpoints, self._job, lease_ttl_s=self._config.lease_ttl_s, on_lost=on_lost
        )
        try:
            await coord.connect()
        except BaseException:
            await coord.abandon()
            raise
        self._note("coord.connected", endpoints=endpoints, version=coord.server_version)
        return coord

    async def close(self) -> None:
        """End our own etcd, if there is one, and remove its data."""
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            await asyncio.to_thread(self._server.kill)
            shutil.rmtree(self._run_dir.etcd, ignore_errors=True)

    async def _own(self) -> str:
        if self._server is None:
            log_path = self._run_dir.logs / "etcd.log"
            self._server = EtcdServer(self._run_dir.etcd, log_path=log_path)
        if not self._server.running:
            await self._start(self._server)
        if self._watching is None:
            self._watching = asyncio.create_task(self._keep(self._server), name="own-etcd")
        return self._server.endpoint

    async def _start(self, server: EtcdServer) -> None:
        self._starts += 1
        try:
            await server.start_async()
        except ServerNotReady as error:
            if self._starts >= MAX_STARTS:
                raise Misconfigured(
                    f"an etcd of our own cannot be started: {error.message}", hint=error.hint
                ) from error
            raise

    async def _keep(self, server: EtcdServer) -> None:
        """Start our own etcd again when it dies: on its data if its version allows it.

        Otherwise on nothing: what it knew is known to this agent, the only one that uses it.
        """
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if server.running:
                continue
            self._note("coord.lost", reason="the etcd of this run has died; starting it again")
            if not server.binary.restartable:
                shutil.rmtree(self._run_dir.etcd, ignore_errors=True)
            with contextlib.suppress(ServerNotReady, Misconfigured):
                await self._start(server)
                self._starts = 0
