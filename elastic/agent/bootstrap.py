"""The bootstrap store: where the ranks of a new generation find each other's addresses.

A key-value store in each agent, reached over TCP with frames. It outlives workers, so that forming
a group costs no start of a server. The first frame must carry the job's token; whoever has none is
cut off and noted as a stranger. A connection has one request under way at a time:

    {"t": "set", "k", "v"}            -> {"t": "ok"}; the first value of a key stands
    {"t": "get", "k", "timeout_s"}    -> {"t": "value", "v"} as soon as the key is set, or "timeout"
    {"t": "drop", "prefix"}           -> {"t": "ok"}
    {"t": "ping"}                     -> {"t": "ok"}

Keys begin with "g<generation>/". What a generation has written is dropped when the generation
after the next one begins: nobody can be late by more than one. Values are small and held in
memory; nothing survives the agent. It does not know who is in which World.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
from collections.abc import Callable
from typing import Any

from ckpt.frames import Decoder, FrameError, encode

HELLO_TIMEOUT_S = 2.0
MAX_WAIT_S = 3600.0
MAX_KEYS = 1 << 20
MAX_VALUE_BYTES = 1 << 20
MAX_HELLO_BYTES = 1 << 12
_GENERATION = re.compile(r"g(\d+)/")

Message = dict[str, Any]
OnStranger = Callable[[str, str], None]


class Refused(Exception):
    """The connection is closed; the text says why."""


class BootstrapStore:
    """The keys, and the calls to make when a key is set."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Callable[[bytes], None]]] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes) -> None:
        """Keep a value, unless its generation is long over; tells those who wait for it."""
        generation = _generation_of(key)
        if generation is not None:
            self.advance(generation)
            if generation < self._generation - 1:
                return
        if len(value) > MAX_VALUE_BYTES or len(self._values) >= MAX_KEYS:
            raise Refused(f"too much for the bootstrap store: {len(value)} bytes under {key[:80]}")
        self._values.setdefault(key, value)
        for call in list(self._waiting.pop(key, ())):  # each takes itself off the list
            call(self._values[key])

    def get(self, key: str) -> bytes | None:
        """Return the value, None while it is not set."""
        return self._values.get(key)

    def wait(self, key: str, call: Callable[[bytes], None]) -> Callable[[], None]:
        """Call back once when the key is set; returns how to give up waiting."""
        calls = self._waiting.setdefault(key, [])
        calls.append(call)

        def give_up() -> None:
            if call in calls:
                calls.remove(call)
            if not calls and self._waiting.get(key) is calls:
                del self._waiting[key]

        return give_up

    def drop(self, prefix: str) -> None:
        """Forget all keys that begin so."""
        for key in [key for key in self._values if key.startswith(prefix)]:
            del self._values[key]

    def advance(self, generation: int) -> None:
        """Take note of a generation; forgets what the one before the last has written."""
        if generation <= self._generation:
            return
        self._generation = generation
        for key in list(self._values):
            of = _generation_of(key)
            if of is not None and of < generation - 1:
                del self._values[key]


class BootstrapServer:
    """Serves a BootstrapStore on one port.

    Args:
        host: address to listen on.
        token: what the first frame of a connection must carry.
        on_stranger: gets the address and the reason of each refused connection.
    """

    def __init__(self, host: str, token: str, on_stranger: OnStranger = lambda *_: None) -> None:
        self.store = BootstrapStore()
        self.token = token
        self.port = 0
        self._host = host
        self._on_stranger = on_stranger
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def start(self) -> None:
        """Listen on a free port; `port` names it."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), self._host, 0, family=family
        )
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.cut()


class _Connection(asyncio.Protocol):
    """One peer: a stranger until its first frame, then one request after the other."""

    def __init__(self, server: BootstrapServer) -> None:
        self._server = server
        self._decoder = Decoder()
        self._known = False
        self._timer: asyncio.TimerHandle | None = None
        self._give_up: Callable[[], None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for its hello."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server._connections.add(self)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            HELLO_TIMEOUT_S, self._refuse, f"it said no hello within {HELLO_TIMEOUT_S:g} s"
        )

    def data_received(self, data: bytes) -> None:
        """Take what has arrived."""
        try:
            for message in self._decoder.feed(data):
                if self._known:
                    self._request(message)
                else:
                    self._hello(message)
            if not self._known and self._decoder.pending_bytes > MAX_HELLO_BYTES:
                raise Refused("it speaks another protocol")
        except FrameError:
            self._refuse("it speaks another protocol")
        except Refused as error:
            self._refuse(str(error))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Forget the peer and what it waited for."""
        if not self._known and self._transport is not None and self._timer is not None:
            self._stranger("it left without a word")
        self._stop_waiting()
        self._server._connections.discard(self)

    def cut(self) -> None:
        """End the connection."""
        self._stop_waiting()
        self._known = True  # whatever follows is our doing
        if self._transport is not None:
            self._transport.abort()

    def _hello(self, message: Message) -> None:
        token = message.get("token")
        if message["t"] != "hello" or not isinstance(token, str):
            raise Refused("it did not say hello")
        if not hmac.compare_digest(token.encode(), self._server.token.encode()):
            raise Refused("it has another token")
        self._stop_waiting()
        self._known = True

    def _refuse(self, why: str) -> None:
        if not self._known:
            self._stranger(why)
        self.cut()

    def _stranger(self, why: str) -> None:
        assert self._transport is not None
        peer = self._transport.get_extra_info("peername")
        address = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)
        self._server._on_stranger(address, why)

    def _request(self, message: Message) -> None:
        store = self._server.store
        match message:
            case {"t": "set", "k": str(key), "v": bytes(value)}:
                store.set(key, value)
                self._send({"t": "ok"})
            case {"t": "get", "k": str(key), "timeout_s": float() | int() as timeout_s}:
                self._get(key, min(max(0.0, float(timeout_s)), MAX_WAIT_S))
            case {"t": "drop", "prefix": str(prefix)}:
                store.drop(prefix)
                self._send({"t": "ok"})
            case {"t": "ping"}:
                self._send({"t": "ok"})
            case _:
                raise Refused(f"there is no request {message['t']!r} of that form")

    def _get(self, key: str, timeout_s: float) -> None:
        value = self._server.store.get(key)
        if value is not None:
            self._send({"t": "value", "v": value})
            return
        if self._give_up is not None:
            raise Refused("it did not wait for the answer to its last request")
        self._give_up = self._server.store.wait(key, self._found)
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._too_late)

    def _found(self, value: bytes) -> None:
        self._stop_waiting()
        self._send({"t": "value", "v": value})

    def _too_late(self) -> None:
        self._stop_waiting()
        self._send({"t": "timeout"})

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._give_up is not None:
            self._give_up()
            self._give_up = None

    def _send(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))


def _generation_of(key: str) -> int | None:
    match = _GENERATION.match(key)
    return int(match[1]) if match else None
