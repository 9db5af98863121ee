"""The start-up check: tell a wrong address, a wrong server and a missing permission apart.

While a run goes on, an etcd that does not answer is waited for. At the start somebody is looking,
so the check ends within its time and says in one sentence what to change. gRPC reports a closed
port, a web server and a TLS server to a plain client all in much the same words; so when nothing
has answered, each endpoint is asked once more in plain HTTP, which all of them answer differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import NamedTuple

from elastic.clock import Clock
from elastic.membership.coord import CoordError, CoordMisconfigured, CoordRetryable
from elastic.membership.etcd_channel import PAUSE_S, Connections
from elastic.membership.etcd_errors import wrong_version
from elastic.membership.etcd_wire import (
    RANGE,
    STATUS,
    TXN,
    message,
    mod_is,
    put_request,
    range_request,
    txn_request,
)

OLDEST = (3, 4)
_PROBE_S = 0.5
_MOST_READ_BYTES = 4096
_NEVER = 2**62
"""A revision that no key was written at."""


class Versions(NamedTuple):
    """What the check has learned."""

    version: str
    revision: int


async def check(connections: Connections, key: bytes, *, within_s: float, clock: Clock) -> Versions:
    """Return when etcd has answered, is new enough, and lets us read and write at `key`.

    Raises CoordMisconfigured: unreachable, no-quorum, wrong-version, no-permission; CoordRetryable:
    no-space.
    """
    end_s = clock.now_s() + within_s - _PROBE_S
    version = ""
    attempt_s = min(1.0, within_s / 3)
    while True:
        try:
            if not version:
                answer = await connections.attempt(STATUS, message("StatusRequest"), attempt_s)
                version = _accept(str(answer.version), connections.endpoint)
            return Versions(version, await _read_and_write(connections, key, attempt_s))
        except CoordRetryable as error:
            if error.kind == "no-space":
                raise  # a person has to make room, and the caller may wait for that
            if clock.now_s() >= end_s:
                raise await _explain(connections, error, answered=bool(version)) from error
        await asyncio.sleep(PAUSE_S)


async def _read_and_write(connections: Connections, key: bytes, timeout_s: float) -> int:
    """Return the store's revision; etcd checks permissions of a transaction before it compares."""
    read = await connections.attempt(RANGE, range_request(key, limit=1), timeout_s)
    never = txn_request([mod_is(key, _NEVER)], [put_request(key, b"")], [])
    await connections.attempt(TXN, never, timeout_s)
    return int(read.header.revision)


def _accept(version: str, endpoint: str) -> str:
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) < OLDEST or int(found[1]) != OLDEST[0]:
        raise wrong_version(endpoint, f"its version is {version or 'not stated'}")
    return version


async def _explain(
    connections: Connections, last: CoordError, *, answered: bool
) -> CoordMisconfigured:
    """Find out why no endpoint serves us."""
    if answered:
        return CoordMisconfigured(
            f"etcd at {', '.join(connections.endpoints)} runs but does not serve: {last.message}",
            kind="no-quorum",
            hint="see that most of its members run and reach each other",
        )
    findings = await asyncio.gather(
        *(_probe(each, secure=connections.secure) for each in connections.endpoints)
    )
    for finding in findings:
        if isinstance(finding, CoordMisconfigured):
            return finding
    places = "; ".join(f"{e}: {f}" for e, f in zip(connections.endpoints, findings, strict=True))
    return CoordMisconfigured(
        f"no etcd was reached ({places})",
        kind="unreachable",
        hint="check the endpoints, and that etcd runs and accepts connections from this host",
        endpoints=connections.endpoints,
    )


async def _probe(endpoint: str, *, secure: bool) -> str | CoordMisconfigured:
    """Return what stands at an endpoint, in words or as the error that it is."""
    host, _, port = endpoint.rpartition(":")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(f"GET /version HTTP/1.0\r\nHost: {endpoint}\r\n\r\n".encode())
            answer = await reader.read(_MOST_READ_BYTES)
            while answer and len(answer) < _MOST_READ_BYTES and (more := await reader.read(256)):
                answer += more
    except TimeoutError:
        return "accepts connections but does not answer" if writer else "does not answer"
    except ConnectionResetError:
        answer = b""
    except OSError as error:
        return (error.strerror or str(error)).lower()
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return _judge(answer, endpoint, secure=secure)


def _judge(answer: bytes, endpoint: str, *, secure: bool) -> str | CoordMisconfigured:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/"):
        if answer[:1] == b"\x15" or (not answer and not secure):
            return "closes plain connections; it may want TLS (https://)"
        return "does not let us in; check the TLS certificates" if secure else "speaks no HTTP"
    status = head.split(b"\r\n")[0].decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError):
        version = str(json.loads(body).get("etcdserver") or "")
        if version and not secure:
            _accept(version, endpoint)
            return "is etcd, but gRPC does not get through to it"
        if version:
            return "is etcd without TLS (http://)"
    if b"TLS" in body or b"HTTPS" in body:
        return "wants TLS (https://)"
    return wrong_version(endpoint, f"it answers {status!r} to /version")
