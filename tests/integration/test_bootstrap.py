"""The bootstrap store over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest

from ckpt.frames import Decoder, encode
from elastic.agent import bootstrap
from elastic.agent.bootstrap import BootstrapServer, BootstrapStore
from tests.support import eventually_async

pytestmark = pytest.mark.integration


class Client:
    """A peer of the bootstrap store."""

    def __init__(self, reader, writer) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = Decoder()
        self.messages: list[dict] = []

    @classmethod
    async def connect(cls, server: BootstrapServer, token: str | None = "secret") -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", server.port))
        if token is not None:
            client.send({"t": "hello", "token": token})
        return client

    def send(self, message: dict) -> None:
        self.writer.write(encode(message))

    async def ask(self, message: dict) -> dict:
        self.send(message)
        return await self.answer()

    async def answer(self) -> dict:
        async with asyncio.timeout(10):
            while not self.messages:
                data = await self.reader.read(4096)
                if not data:
                    raise EOFError
                self.messages += self.decoder.feed(data)
        return self.messages.pop(0)

    async def ended(self) -> bool:
        async with asyncio.timeout(10):
            try:
                return not await self.reader.read(1)
            except ConnectionError:
                return True
            finally:
                self.writer.close()
                with contextlib.suppress(ConnectionError):
                    await self.writer.wait_closed()

    def close(self) -> None:
        self.writer.close()


def served(test):
    """Run an async test with a server."""

    def run():
        async def inner():
            strangers: list[tuple[str, str]] = []
            server = BootstrapServer("127.0.0.1", "secret", lambda *who: strangers.append(who))
            await server.start()
            try:
                await test(server, strangers)
            finally:
                await server.close()

        asyncio.run(inner())

    run.__name__ = test.__name__
    return run


@served
async def test_a_value_is_given_as_soon_as_it_is_set(server, strangers):
    one, other = await Client.connect(server), await Client.connect(server)
    one.send({"t": "get", "k": "g1/a", "timeout_s": 30.0})
    assert await other.ask({"t": "set", "k": "g1/a", "v": b"first"}) == {"t": "ok"}
    assert await one.answer() == {"t": "value", "v": b"first"}
    await other.ask({"t": "set", "k": "g1/a", "v": b"second"})
    answer = await one.ask({"t": "get", "k": "g1/a", "timeout_s": 0.0})
    assert answer == {"t": "value", "v": b"first"}, "the first value stands"
    assert await one.ask({"t": "ping"}) == {"t": "ok"}
    one.close()
    other.close()
    assert strangers == []


@served
async def test_everybody_who_waits_for_a_key_gets_it(server, strangers):
    waiting = [await Client.connect(server) for _ in range(5)]
    for client in waiting:
        client.send({"t": "get", "k": "g1/a", "timeout_s": 30.0})
    await eventually_async(lambda: len(server.store._waiting.get("g1/a", ())) == 5)
    server.store.set("g1/a", b"v")
    for client in waiting:
        assert await client.answer() == {"t": "value", "v": b"v"}
    for client in waiting:
        client.close()
    assert strangers == []


@served
async def test_a_wait_has_an_end(server, strangers):
    client = await Client.connect(server)
    assert await client.ask({"t": "get", "k": "g1/x", "timeout_s": 0.05}) == {"t": "timeout"}
    client.close()
    assert strangers == []


@served
async def test_a_waiting_peer_that_leaves_is_forgotten(server, strangers):
    client = await Client.connect(server)
    client.send({"t": "get", "k": "g1/x", "timeout_s": 60.0})
    await eventually_async(lambda: server.store._waiting)
    client.close()
    await eventually_async(lambda: not server.store._waiting)
    assert strangers == []


@served
async def test_strangers_are_cut_off_and_noted(server, strangers):
    wrong = await Client.connect(server, "guess")
    assert await wrong.ended()
    rude = await Client.connect(server, None)
    rude.send({"t": "get", "k": "g1/a", "timeout_s": 0.0})
    assert await rude.ended()
    loud = await Client.connect(server, None)
    loud.writer.write(b"GET / HTTP/1.1\r\n\r\n" + struct.pack("<I", 1 << 31))
    assert await loud.ended()
    assert [why for _, why in strangers] == [
        "it has another token",
        "it did not say hello",
        "it speaks another protocol",
    ]
    assert all(address.startswith("127.0.0.1:") for address, _ in strangers)


@served
async def test_who_says_nothing_is_cut_off_in_time(server, strangers):
    before = bootstrap.HELLO_TIMEOUT_S
    bootstrap.HELLO_TIMEOUT_S = 0.1
    try:
        silent = await Client.connect(server, None)
        assert await silent.ended()
    finally:
        bootstrap.HELLO_TIMEOUT_S = before
    ((_, why),) = strangers
    assert "no hello" in why


@served
async def test_a_known_peer_that_talks_nonsense_is_cut_off(server, strangers):
    client = await Client.connect(server)
    client.send({"t": "set", "k": "g1/a"})
    assert await client.ended()
    assert strangers == []


def test_old_generations_are_dropped():
    store = BootstrapStore()
    store.set("g1/a", b"1")
    store.set("g2/a", b"2")
    store.set("other", b"kept")
    store.advance(3)
    assert store.get("g1/a") is None
    assert store.get("g2/a") == b"2"
    store.set("g1/late", b"x")
    assert store.get("g1/late") is None
    store.set("g9/a", b"9")
    assert store.get("g2/a") is None
    assert store.get("other") == b"kept"
    store.drop("g9/")
    assert len(store) == 1
