"""Calls and streams to one of several etcd endpoints, with errors that say what to do.

gRPC's own ways do not fit here, each for a measured reason:
- A hung server is noticed by `http2.ping_timeout_ms`; without it a connection to a stopped process
  is held for a minute, whatever the keepalive timeout says. Pings more often than every 5 s, and
  those that gRPC sends to measure the bandwidth, make etcd hang up ("too many pings").
- One channel that knows all endpoints sticks to a hung one, and with TLS has one server name for
  all; so each endpoint has its own channel, and this module turns to the next when one fails.
- Reconnecting backs off far beyond the length of an outage unless it is told not to.
- A stream without `hasleader` goes silent when the quorum is lost, instead of failing.

What the callers rely on: every call ends within its own time limit; a `CoordRetryable` means that a
change may or may not have happened; a refusal (`CoordMisconfigured`) means that it has not. A token
that was refused is thrown away, so whoever makes the call once more logs in first.

gRPC must not be forked: only the agent uses this, and it starts children by exec.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.membership.coord import CoordError, CoordMisconfigured, CoordRetryable
from elastic.membership.etcd_errors import translate
from elastic.membership.etcd_wire import LOGIN, Method, message

ATTEMPT_S = 2.0
"""Time for one attempt of one call; the next goes to the next endpoint."""
PAUSE_S = 0.05
PAUSE_MAX_S = 0.5

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 0),  # etcd counts a ping without a stream as abuse
    ("grpc.http2.bdp_probe", 0),  # so it does the pings that measure bandwidth, and hangs up
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # in truth the time that one connecting may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.enable_http_proxy", 0),  # a proxy for the web is not on the way to the cluster's store
]
_HAS_LEADER = ("hasleader", "true")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """How to speak TLS to etcd: PEM files, read once when the channels are made.

    Args:
        ca_file: who signed the servers' certificates; None = those the system trusts.
        cert_file, key_file: our own certificate, when etcd asks for one.
        server_name: the name in the servers' certificates, when it is not the endpoint's.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    def credentials(self) -> Any:
        """Return gRPC's credentials. Raises CoordMisconfigured when a file cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file),
            private_key=_read(self.key_file),
            certificate_chain=_read(self.cert_file),
        )


class Connections:
    """The endpoints of one etcd, one in use at a time, and who we are to it.

    Args:
        endpoints: "host:port", also as "http://host:port" or "https://host:port" (then with TLS).
        login: user and password, when etcd's authentication is on.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        login: tuple[str, str] | None = None,
        tls: TlsOptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not endpoints:
            raise CoordMisconfigured("no etcd endpoint was given", hint='give etcd=["host:port"]')
        if any(each.startswith("https://") for each in endpoints) and tls is None:
            tls = TlsOptions()
        self.endpoints = tuple(_address(each) for each in endpoints)
        self.secure = tls is not None
        self.last_answer_at_s = clock.now_s()
        self._tls = tls
        self._clock = clock
        self._login = login
        self._token: str | None = None  # None = log in first; "" = etcd wants none
        self._login_lock = asyncio.Lock()
        self._current = 0
        self._channels: dict[str, Any] = {}
        self._streams: set[Stream] = set()
        self._closed = False

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self.endpoints[self._current]

    def rotate(self, failed: str) -> None:
        """Turn to the next endpoint, unless somebody has already left the failed one.

        Streams to the failed one end too: a hung server is noticed first by whoever speaks most.
        """
        if failed == self.endpoint and len(self.endpoints) > 1:
            self._current = (self._current + 1) % len(self.endpoints)
            for stream in [each for each in self._streams if each.endpoint == failed]:
                stream.leave()

    async def call(self, method: Method, request: Any, *, patience_s: float) -> Any:
        """Make a call that may be made several times, until it is answered or patience ends.

        Raises CoordRetryable (the last failure), CoordMisconfigured, SessionLost.
        """
        end_s = self._clock.now_s() + patience_s
        pause_s = PAUSE_S
        while True:
            left_s = end_s - self._clock.now_s()
            try:
                return await self.attempt(method, request, min(ATTEMPT_S, max(left_s, PAUSE_S)))
            except CoordRetryable as error:
                left_s = end_s - self._clock.now_s()
                if error.kind != "unreachable" or left_s <= pause_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def attempt(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Make a call once; twice when the first was refused for its token, so never done twice.

        Raises CoordRetryable, CoordMisconfigured, SessionLost.
        """
        end_s = self._clock.now_s() + timeout_s
        endpoint, token = await self._who(timeout_s)
        try:
            return await self._once(method, request, endpoint, token, end_s)
        except CoordMisconfigured as error:
            if error.kind != "no-permission" or self._login is None:
                raise
        endpoint, token = await self._who(timeout_s)
        return await self._once(method, request, endpoint, token, end_s)

    async def open(self, method: Method, timeout_s: float = ATTEMPT_S) -> Stream:
        """Open a stream in both directions; its first failure may come with its first message."""
        endpoint, token = await self._who(timeout_s)
        multi = self._channel(endpoint).stream_stream(
            method.path,
            request_serializer=method.request,
            response_deserializer=method.response,
        )
        call = multi(metadata=(_HAS_LEADER, *_token_metadata(token)))
        stream = Stream(self, call, endpoint, token)
        self._streams.add(stream)
        return stream

    def forget(self, stream: Stream) -> None:
        """Drop a stream that has ended."""
        self._streams.discard(stream)

    def failed(self, error: CoordError, endpoint: str, token: str | None) -> CoordError:
        """Draw the consequences of a failure, whatever it was part of, and return it."""
        if error.kind == "no-permission" and token == self._token:
            self._token = None
        elif isinstance(error, CoordRetryable) and error.kind == "unreachable":
            self.rotate(endpoint)
        return error

    def answered(self) -> None:
        """Note that etcd has just said something."""
        self.last_answer_at_s = self._clock.now_s()

    async def close(self) -> None:
        """Close all channels; calls in progress fail."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.close()

    async def _once(
        self, method: Method, request: Any, endpoint: str, token: str | None, end_s: float
    ) -> Any:
        call = self._channel(endpoint).unary_unary(
            method.path,
            request_serializer=method.request,
            response_deserializer=method.response,
        )
        timeout_s = max(end_s - self._clock.now_s(), PAUSE_S)
        try:
            response = await call(request, timeout=timeout_s, metadata=_token_metadata(token))
        except grpc.aio.AioRpcError as error:
            translated = translate(error.code(), error.details() or "", endpoint)
            raise self.failed(translated, endpoint, token) from error
        except asyncio.CancelledError:
            if self._closed:  # closing a channel cancels its calls, which is not our task's end
                raise _closed() from None
            raise
        self.answered()
        return response

    async def _who(self, timeout_s: float) -> tuple[str, str | None]:
        """Return the endpoint to use now and a token for it, logging in when there is none."""
        if self._login is None:
            return self.endpoint, None
        async with self._login_lock:
            if self._token is None:
                name, password = self._login
                request = message("LoginRequest", name=name, password=password)
                end_s = self._clock.now_s() + timeout_s
                try:
                    answer = await self._once(LOGIN, request, self.endpoint, None, end_s)
                    self._token = str(answer.token)
                except CoordMisconfigured as error:
                    if error.kind != "auth-off":
                        raise
                    self._token = ""
            return self.endpoint, self._token

    def _channel(self, endpoint: str) -> Any:
        if self._closed:
            raise _closed()
        channel = self._channels.get(endpoint)
        if channel is None:
            options: list[tuple[str, Any]] = list(_OPTIONS)
            if self._tls is None:
                channel = grpc.aio.insecure_channel(endpoint, options=options)
            else:
                if self._tls.server_name:
                    options.append(("grpc.ssl_target_name_override", self._tls.server_name))
                credentials = self._tls.credentials()
                channel = grpc.aio.secure_channel(endpoint, credentials, options=options)
            self._channels[endpoint] = channel
        return channel


class Stream:
    """One open stream to one endpoint; raises only CoordErrors, and is of no use after one."""

    def __init__(
        self, connections: Connections, call: Any, endpoint: str, token: str | None
    ) -> None:
        self.endpoint = endpoint
        self._connections = connections
        self._call = call
        self._token = token
        self._left = False

    async def send(self, request: Any) -> None:
        """Hand one message to the stream."""
        await self._unless_over(self._call.write(request))

    async def receive(self) -> Any:
        """Wait for the next message, without limit; cancelling the wait ends the stream."""
        response = await self._unless_over(self._call.read())
        if response is grpc.aio.EOF:
            raise await self._ended()
        self._connections.answered()
        return response

    def failed(self, error: CoordError) -> CoordError:
        """Give this stream up for a reason that stood in a message, or for its silence."""
        self.close()
        return self._connections.failed(error, self.endpoint, self._token)

    def silent(self, timeout_s: float) -> CoordError:
        """Give this stream up because nothing came for that long."""
        return self.failed(
            CoordRetryable(
                f"etcd at {self.endpoint} said nothing on an open stream for {timeout_s:.1f} s"
            )
        )

    def leave(self) -> None:
        """End the stream under whoever is waiting for it, because its endpoint was given up."""
        self._left = True
        self._call.cancel()

    def close(self) -> None:
        """End the stream; does not wait."""
        self._call.cancel()
        self._connections.forget(self)

    async def _unless_over(self, operation: Awaitable[Any]) -> Any:
        try:
            return await operation
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._ended() from error
        except asyncio.CancelledError:
            if self._left:  # cancelling a call looks to its user like the end of his own task
                raise CoordRetryable(f"etcd at {self.endpoint} was given up") from None
            raise

    async def _ended(self) -> CoordError:
        self._connections.forget(self)
        code, details = await self._call.code(), await self._call.details()
        return self._connections.failed(
            translate(code, details or "", self.endpoint), self.endpoint, self._token
        )


def _address(endpoint: str) -> str:
    """Return host:port. Raises CoordMisconfigured."""
    address = endpoint.strip().removeprefix("http://").removeprefix("https://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address or (":" in host and host[0] != "["):
        raise CoordMisconfigured(
            f"{endpoint!r} is no etcd endpoint",
            hint='write it as "host:port", an IPv6 address as "[::1]:2379"',
        )
    return address


def _closed() -> CoordRetryable:
    return CoordRetryable("the connection to etcd has been closed", kind="closed")


def _token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CoordMisconfigured(
            f"the TLS file {path} cannot be read: {error.strerror}",
            hint="check the path and its permissions",
        ) from error
