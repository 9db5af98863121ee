"""What tests of the etcd client put between it and etcd, and how they speak to etcd otherwise."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
from enum import Enum

from elastic.local_server import LOOPBACK


class Way(Enum):
    """What a proxy does with what it gets."""

    PASS = "pass"
    REFUSE = "refuse"  # connections are closed as soon as they are made
    HANG = "hang"  # connections stay open and nothing goes through
    SWALLOW = "swallow"  # requests go through, answers are held back, and lost when cut
    DEAFEN = "deafen"  # answers go through, requests are held back


class LoopbackServer:
    """A server on a loopback port of this event loop; leaves no connection open behind."""

    def __init__(self, *, tls=None):
        self.endpoint = ""
        self._tls = tls
        self._handlers = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0, ssl=self._tls)
        self.endpoint = f"{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for handler in list(self._handlers):
            handler.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers)

    async def _accept(self, reader, writer):
        self._handlers.add(asyncio.current_task())
        try:
            await self.serve(reader, writer)
        except asyncio.CancelledError:
            pass  # by __aexit__; asyncio's streams complain about a handler that ends so
        finally:
            await end(writer)
            self._handlers.discard(asyncio.current_task())


async def end(writer):
    """Reset a connection and return when it is gone."""
    writer.transport.abort()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()


class Answering(LoopbackServer):
    """Sends the same bytes to whatever it is asked."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    async def serve(self, reader, writer):
        await reader.read(1024)
        writer.write(self.answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


class Proxy(LoopbackServer):
    """A TCP proxy in front of one etcd."""

    def __init__(self, target, *, tls=None):
        super().__init__(tls=tls)
        self.host, port = target.split(":")
        self.port = int(port)
        self.way = Way.PASS
        self.accepted = 0
        self._writers = set()
        self._moved = asyncio.Event()

    def go(self, way):
        """Change the way; open connections stay."""
        self.way = way
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def cut(self):
        """Reset all connections; what was held back in them is lost."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader, writer):
        self.accepted += 1
        if self.way is Way.REFUSE:
            return
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection(self.host, self.port)
            both = {writer, up_writer}
            self._writers |= both
            try:
                await asyncio.gather(
                    self._pump(reader, up_writer, {Way.HANG, Way.DEAFEN}),
                    self._pump(up_reader, writer, {Way.HANG, Way.SWALLOW}),
                )
            finally:
                self._writers -= both
                await end(up_writer)

    async def _pump(self, reader, writer, held):
        try:
            while data := await reader.read(1 << 16):
                while self.way in held:
                    await self._moved.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.transport.abort()


def call(endpoint, path, *, token="", **body):
    """Ask etcd something by HTTP, without the client under test."""
    host, port = endpoint.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=5.0)
    headers = {"Authorization": token} if token else {}
    try:
        connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    assert "error" not in answer, answer
    return answer


def text(value):
    """Return a key or value as etcd's HTTP face wants it."""
    return base64.b64encode(value.encode()).decode()


def put(endpoint, key, value, **more):
    """Write a key by HTTP."""
    return call(endpoint, "kv/put", key=text(key), value=text(value), **more)


def read(endpoint, key):
    """Return (record, its lease) by HTTP, or (None, 0)."""
    for kv in call(endpoint, "kv/range", key=text(key)).get("kvs", ()):
        return json.loads(base64.b64decode(kv["value"])), int(kv.get("lease", 0))
    return None, 0


def revision(endpoint):
    """Return the revision of the store by HTTP."""
    return int(call(endpoint, "kv/range", key=text("x"))["header"]["revision"])
