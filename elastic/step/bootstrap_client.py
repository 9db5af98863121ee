"""The bootstrap store as a worker sees it: where the ranks of one generation find each other.

gloo needs a key-value store once per group, to publish each rank's address. It is served by the
agents of the World (two of them, so that no host is special) behind the job's token. Every key
carries the generation, so a late write of an older group can never be read by a newer one.

`interrupt` may be called from another thread: a blocked `get` then raises, so that a group whose
peer died while it was being built is given up at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import torch.distributed as dist

from ckpt.frames import recv_frame, send_frame
from elastic.errors import ElasticError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

_CONNECT_TIMEOUT_S = 5.0
_GET_TIMEOUT_S = 60.0


class StoreUnreachable(ElasticError):
    """No agent of the World serves the bootstrap store any more, or the wait was interrupted."""


class BootstrapStore(dist.Store):  # type: ignore[name-defined, misc]
    """A torch Store over the agents' bootstrap service.

    Args:
        addresses: `host:port` of the agents that serve it, tried in order.
        token: the job's token.

    Raises StoreUnreachable from any operation when no address answers or after `interrupt`.
    """

    def __init__(self, addresses: Sequence[str], token: str) -> None:
        super().__init__()
        self._addresses = tuple(addresses)
        self._token = token
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._interrupted = False

    def connect(self) -> None:
        """Connect to the first address that answers; harmless when already connected."""
        if self._sock is not None:
            return
        problem: OSError | None = None
        for address in self._addresses:
            host, _, port = address.rpartition(":")
            try:
                sock = socket.create_connection(
                    (host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S
                )
            except OSError as error:
                problem = error
                continue
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send_frame(sock, {"t": "hello", "token": self._token})
            with self._lock:
                if self._interrupted:
                    sock.close()
                    break
                self._sock = sock
            return
        raise StoreUnreachable(
            f"no agent answers as bootstrap store at {', '.join(self._addresses)}: {problem}"
        )

    def interrupt(self) -> None:
        """Make every blocked and later operation of this store raise; any thread may call it."""
        with self._lock:
            self._interrupted = True
            if self._sock is not None:
                with contextlib.suppress(OSError):  # the agent closed it first
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    def fileno(self) -> int:
        """Return the connection's descriptor, -1 when not connected."""
        return -1 if self._sock is None else self._sock.fileno()

    def _ask(self, request: dict[str, object]) -> dict[str, object]:
        self.connect()
        sock = self._sock
        if sock is None or self._interrupted:
            raise StoreUnreachable("the bootstrap store was interrupted")
        try:
            send_frame(sock, request)
            reply, _ = recv_frame(sock)
        except (OSError, EOFError) as error:
            raise StoreUnreachable(f"the bootstrap store went away: {error}") from error
        return reply

    # The names below are the ones torch's Store calls.

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value; it is never changed afterwards."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask({"t": "set", "k": key, "v": data})

    def get(self, key: str) -> bytes:
        """Wait until a key is set and return its value."""
        reply = self._ask({"t": "get", "k": key, "timeout_s": _GET_TIMEOUT_S})
        if reply["t"] != "value":
            raise StoreUnreachable(f"nobody published {key} within {_GET_TIMEOUT_S:.0f} s")
        value = reply["v"]
        assert isinstance(value, bytes)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Publish several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - torch's signature
        """Wait until all keys are set."""
        for key in keys:
            self.get(key)
