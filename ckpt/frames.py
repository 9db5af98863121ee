"""Frames: the one message form on every local socket of a job.

A frame is a 4-byte little-endian length followed by one msgpack map. Every map has the key "t",
its type. File descriptors ride beside the first byte of their frame (SCM_RIGHTS), and such a map
has the key "nfds": the kernel delivers descriptors in order and never later than the byte they were
attached to, so a receiver keeps a queue of descriptors and takes "nfds" of them for each frame.
Received descriptors are close-on-exec.

Three users: `Decoder` for any byte stream (TCP as well), `send_frame`/`recv_frame` for blocking
AF_UNIX sockets, and `FrameChannel` for asyncio. What this module does not do: no acknowledgement,
no reconnecting, no authentication.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

__all__ = [
    "MAX_FDS",
    "MAX_FRAME_BYTES",
    "Decoder",
    "FrameChannel",
    "FrameError",
    "encode",
    "recv_frame",
    "send_frame",
]

MAX_FRAME_BYTES = 64 << 20
MAX_FDS = 32
"""Descriptors that one frame may carry; the kernel's own limit is 253."""
MAX_BUFFERED_BYTES = 256 << 20
"""What a FrameChannel holds back for a peer that does not read, before `send` refuses."""

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)

Message = dict[str, Any]


class FrameError(Exception):
    """The peer broke the form of frames; the connection is of no more use."""


def encode(msg: Message) -> bytes:
    """One message as the bytes of its frame."""
    if not isinstance(msg.get("t"), str):
        raise ValueError('a frame needs the key "t" with the name of its type')  # noqa: TRY004 - a wrong message
    body: bytes = msgpack.packb(msg, use_bin_type=True)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(
            f"a {msg['t']!r} frame of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}"
        )
    return _LENGTH.pack(len(body)) + body


def _decode_body(body: bytes | bytearray | memoryview) -> Message:
    try:
        msg = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except Exception as error:  # msgpack raises a family of unrelated types on bad input
        raise FrameError(f"a frame of {len(body)} bytes is no msgpack value: {error}") from error
    if not isinstance(msg, dict) or not isinstance(msg.get("t"), str):
        raise FrameError('a frame is not a map with the key "t"')
    return msg


def _body_length(head: bytes | bytearray | memoryview) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame announces {length} bytes, the limit is {MAX_FRAME_BYTES}")
    return length


class Decoder:
    """Turns a byte stream, cut anywhere, into its messages, in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """The messages completed by `data`. Raises FrameError on garbage or an oversized frame."""
        self._buffer += data
        messages: list[Message] = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _body_length(self._buffer[at : at + _LENGTH.size])
            if end > len(self._buffer):
                break
            messages.append(_decode_body(bytes(self._buffer[at + _LENGTH.size : end])))
            at = end
        if at:
            del self._buffer[:at]
        return messages

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)


def send_frame(sock: socket.socket, msg: Message, fds: Sequence[int] = ()) -> None:
    """Send one whole frame over a blocking AF_UNIX socket. The caller keeps its descriptors."""
    data = memoryview(encode(_with_fd_count(msg, fds)))
    if fds:
        data = data[_send_some(sock, data, fds) :]
    sock.sendall(data)


def recv_frame(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive exactly one frame from a blocking AF_UNIX socket; the caller owns the descriptors.

    Raises EOFError when the peer has closed, FrameError on garbage, TimeoutError by the socket's
    own timeout.
    """
    fds: deque[int] = deque()
    try:
        head = _recv_exactly(sock, _LENGTH.size, fds)
        msg = _decode_body(_recv_exactly(sock, _body_length(head), fds))
        return msg, _take_fds(msg, fds)
    finally:
        _close_all(fds)


class FrameChannel:
    """Frames over one stream socket inside asyncio, both ways, without ever blocking the loop.

    `on_message(msg, fds)` gets every message in order and owns the descriptors. `on_close()` is
    called once when the peer has closed or broken the connection, after the last message; never for
    our own `close()`.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Message, list[int]], None],
        on_close: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_close = on_close
        self._decoder = Decoder()
        self._fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._out_bytes = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.error: str | None = None
        """Why the connection ended, when it was not a plain end of file."""
        self._can_pass_fds = sock.family == socket.AF_UNIX
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        """True when nothing can be sent any more."""
        return self._closed

    def send(self, msg: Message, fds: Sequence[int] = ()) -> bool:
        """Queue one message; False when the connection is gone. The caller keeps its `fds`."""
        if self._closed:
            return False
        data = memoryview(encode(_with_fd_count(msg, fds)))
        if self._out_bytes + len(data) > MAX_BUFFERED_BYTES:
            raise FrameError(
                f"the peer has not read {self._out_bytes} bytes; no more are buffered for it"
            )
        # Duplicates, because the caller may close its own before the socket has room.
        self._out.append((data, [os.dup(fd) for fd in fds]))
        self._out_bytes += len(data)
        self._drained.clear()
        if len(self._out) == 1:
            self._writable()
        return not self._closed

    async def flush(self) -> None:
        """Return when the kernel has taken all that was sent, or the connection is gone."""
        await self._drained.wait()

    def close(self) -> None:
        """Close at once; what the kernel has not taken yet is dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        _close_all(self._fds)
        for _, fds in self._out:
            _close_all(fds)
        self._out.clear()
        self._out_bytes = 0
        self._drained.set()

    def _readable(self) -> None:
        try:
            if self._can_pass_fds:
                data = _recv_some(self._sock, _READ_BYTES, self._fds)
            else:
                data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, FrameError) as error:
            self._end(str(error))
            return
        if not data:
            self._end(
                "the peer closed in the middle of a frame" if self._decoder.pending_bytes else None
            )
            return
        try:
            for msg in self._decoder.feed(data):
                fds = _take_fds(msg, self._fds)
                if self._closed:  # a handler closed us: nobody would own these
                    _close_all(fds)
                    return
                self._on_message(msg, fds)
        except FrameError as error:
            self._end(str(error))

    def _writable(self) -> None:
        while self._out:
            data, fds = self._out[0]
            try:
                sent = _send_some(self._sock, data, fds) if fds else self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError:
                # What the peer said before it left is still to be read; the end follows it.
                self._drop_output()
                return
            _close_all(fds)
            self._out_bytes -= sent
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], [])
        self._loop.remove_writer(self._sock.fileno())
        self._drained.set()

    def _drop_output(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        for _, fds in self._out:
            _close_all(fds)
        self._out.clear()
        self._out_bytes = 0
        self._drained.set()

    def _end(self, error: str | None) -> None:
        if self._closed:
            return
        self.error = error
        self.close()
        self._on_close()


def _with_fd_count(msg: Message, fds: Sequence[int]) -> Message:
    if len(fds) > MAX_FDS:
        raise ValueError(f"{len(fds)} descriptors in one frame, the limit is {MAX_FDS}")
    return {**msg, "nfds": len(fds)} if fds else msg


def _take_fds(msg: Message, queue: deque[int]) -> list[int]:
    count = msg.get("nfds", 0)
    if not isinstance(count, int) or not 0 <= count <= len(queue):
        raise FrameError(
            f"a {msg['t']!r} frame announces {count!r} descriptors, {len(queue)} arrived"
        )
    return [queue.popleft() for _ in range(count)]


def _send_some(sock: socket.socket, data: memoryview, fds: Sequence[int]) -> int:
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def _recv_some(sock: socket.socket, size: int, fds: deque[int]) -> bytes:
    data, ancillary, flags, _ = sock.recvmsg(size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
            fds.extend(received)
    if flags & socket.MSG_CTRUNC:
        raise FrameError(
            f"more than {MAX_FDS} descriptors in one frame, or no descriptor number is free"
        )
    return data


def _recv_exactly(sock: socket.socket, size: int, fds: deque[int]) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = _recv_some(sock, size - len(data), fds)
        if not part:
            raise EOFError("the peer has closed the connection")
        data += part
    return data


def _close_all(fds: deque[int] | list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
