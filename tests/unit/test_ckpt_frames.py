"""Frames survive any cut of the byte stream, and descriptors arrive with their own frame."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.frames import (
    MAX_FRAME_BYTES,
    Decoder,
    FrameChannel,
    FrameError,
    encode,
    recv_frame,
    send_frame,
)


@given(
    payloads=st.lists(st.binary(max_size=200), max_size=8),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
)
def test_decoder_finds_every_message_at_any_cut(payloads: list[bytes], cuts: list[int]) -> None:
    messages = [{"t": "x", "v": p, "n": {1: i}} for i, p in enumerate(payloads)]
    stream = b"".join(encode(m) for m in messages)
    borders = sorted({0, len(stream), *(c % (len(stream) + 1) for c in cuts)})
    decoder = Decoder()
    found: list[dict[str, Any]] = []
    for a, b in itertools.pairwise(borders):
        found += decoder.feed(stream[a:b])
    assert found == messages
    assert decoder.pending_bytes == 0


@pytest.mark.parametrize(
    "stream",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\x01\x00\x00\x00\xc1",  # 0xc1 is never used in msgpack
        b"\x01\x00\x00\x00\x01",  # a number, not a map
        b"\x01\x00\x00\x00\x80",  # a map without "t"
        b"\x02\x00\x00\x00\x80\x80",  # bytes after the value
    ],
)
def test_decoder_refuses_garbage(stream: bytes) -> None:
    with pytest.raises(FrameError):
        Decoder().feed(stream)


def test_encode_refuses_a_message_without_type() -> None:
    with pytest.raises(ValueError, match='"t"'):
        encode({"v": 1})


def test_descriptors_stay_with_their_frame() -> None:
    left, right = socket.socketpair()
    with left, right:
        pipes = [os.pipe() for _ in range(3)]
        send_frame(left, {"t": "plain"})
        send_frame(left, {"t": "two"}, [pipes[0][1], pipes[1][1]])
        send_frame(left, {"t": "one"}, [pipes[2][1]])
        assert recv_frame(right) == ({"t": "plain"}, [])
        two, two_fds = recv_frame(right)
        one, one_fds = recv_frame(right)
        assert (two["t"], len(two_fds), one["t"], len(one_fds)) == ("two", 2, "one", 1)
        for (reader, writer), fd in zip(pipes, two_fds + one_fds, strict=True):
            assert not os.get_inheritable(fd)
            os.write(fd, b"%d" % reader)
            assert os.read(reader, 9) == b"%d" % reader
            for each in (reader, writer, fd):
                os.close(each)
        left.close()
        with pytest.raises(EOFError):
            recv_frame(right)


def test_channel_carries_large_messages_and_descriptors_both_ways() -> None:
    async def scenario() -> None:
        left, right = socket.socketpair()
        got: list[tuple[dict[str, Any], list[int]]] = []
        closed = asyncio.Event()
        all_here = asyncio.Event()

        def take(msg: dict[str, Any], fds: list[int]) -> None:
            got.append((msg, fds))
            if len(got) == 3:
                all_here.set()

        a = FrameChannel(left, lambda msg, fds: None, lambda: None)
        b = FrameChannel(right, take, closed.set)
        reader, writer = os.pipe()
        big = os.urandom(3 << 20)
        assert a.send({"t": "big", "v": big})
        assert a.send({"t": "fd"}, [writer])
        os.close(writer)  # the channel has its own duplicate
        assert a.send({"t": "big", "v": big})
        await asyncio.wait_for(all_here.wait(), 10)
        assert [m["t"] for m, _ in got] == ["big", "fd", "big"]
        assert got[0][0]["v"] == big
        (fd,) = got[1][1]
        os.write(fd, b"here")
        assert os.read(reader, 9) == b"here"
        os.close(fd)
        assert os.read(reader, 9) == b""  # nobody else kept a copy
        os.close(reader)
        await a.flush()
        a.close()
        await asyncio.wait_for(closed.wait(), 10)
        assert b.error is None
        assert not b.send({"t": "late"})

    asyncio.run(scenario())


def test_channel_reports_a_peer_that_dies_in_mid_frame() -> None:
    async def scenario() -> str | None:
        left, right = socket.socketpair()
        closed = asyncio.Event()
        b = FrameChannel(right, lambda msg, fds: None, closed.set)
        left.sendall(encode({"t": "x", "v": 1})[:-1])
        left.close()
        await asyncio.wait_for(closed.wait(), 10)
        return b.error

    assert asyncio.run(scenario()) == "the peer closed in the middle of a frame"
