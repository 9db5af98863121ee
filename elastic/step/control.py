"""A worker's line to its agent, and the thread that breaks a collective when the agent says so.

The thread only receives: it keeps the newest World, cuts the running group when that World means
"now", and leaves the process when the agent is gone. Everything else is left to the main thread,
which alone knows where the step stands (a report made by another thread could be wrong by one
step).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from ckpt.frames import recv_frame, send_frame
from elastic.membership.messages import Mode, World

if TYPE_CHECKING:
    from elastic.step.process_group import Group

AGENT_GONE_EXIT_CODE = 7


class Control:
    """Send to and hear from the agent.

    Args:
        sock: this worker's end of the control socket pair.
        worker_id: this worker's id; a World without it means the worker was voted out.
    """

    def __init__(self, sock: socket.socket, worker_id: str) -> None:
        self._sock = sock
        self._worker_id = worker_id
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._world: World | None = None
        self._world_at_s = 0.0
        self._group: Group | None = None
        self._stop = False
        self._save = False
        self._finish = False
        self._messages: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._listen, name="everstep-control", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def fileno(self) -> int:
        """Return the socket's descriptor (loader workers must close it)."""
        return self._sock.fileno()

    def send(self, **message: Any) -> None:
        """Send one message to the agent; its death is noticed by the listening thread."""
        with self._send_lock:
            try:
                send_frame(self._sock, message)
            except OSError:
                return

    # -- what the main thread asks --------------------------------------------------------

    def watch(self, group: Group | None) -> None:
        """Name the group to cut when a World with mode now arrives."""
        with self._changed:
            self._group = group
            world = self._world
        if group is not None and world is not None and self._supersedes(world, group):
            group.cut()

    def newest_world(self) -> World | None:
        """Return the newest World heard of."""
        with self._changed:
            return self._world

    def world_heard_at_s(self) -> float:
        """Return the CLOCK_MONOTONIC time at which the newest World arrived."""
        with self._changed:
            return self._world_at_s

    def wait_world(self, after_generation: int, timeout_s: float | None) -> World | None:
        """Wait for a World newer than `after_generation` that has this worker in it."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                world = self._world
                if world is not None and world.generation > after_generation:
                    return world
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    @property
    def stop_requested(self) -> bool:
        """True once the agent asked for an end after an agreed step."""
        return self._stop

    def take_save_request(self) -> bool:
        """Return True once for each operator's request."""
        with self._changed:
            wanted, self._save = self._save, False
        return wanted

    def take_messages(self) -> list[dict[str, Any]]:
        """Return the other messages that arrived since the last call."""
        with self._changed:
            messages, self._messages = self._messages, []
        return messages

    def wait_change(self, timeout_s: float) -> None:
        """Wait until something arrives."""
        with self._changed:
            self._changed.wait(timeout_s)

    @property
    def finish_requested(self) -> bool:
        """True once the result is written and this worker may leave."""
        return self._finish

    # -- the thread -----------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                message, _ = recv_frame(self._sock)
            except (OSError, EOFError):
                os._exit(AGENT_GONE_EXIT_CODE)  # the agent is gone: its worker must not go on
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "exit":
            os._exit(0)
        group: Group | None = None
        with self._changed:
            if kind == "world":
                world = World.from_dict(message["world"])
                if self._world is None or world.generation > self._world.generation:
                    self._world = world
                    self._world_at_s = time.monotonic()
                    group = self._group
            elif kind == "stop":
                self._stop = True
            elif kind == "save":
                self._save = True
            elif kind == "finish":
                self._finish = True
            else:
                self._messages.append(message)
            self._changed.notify_all()
            newest = self._world
        if group is not None and newest is not None and self._supersedes(newest, group):
            group.cut()

    @staticmethod
    def _supersedes(world: World, group: Group) -> bool:
        return world.generation > group.generation and world.mode is Mode.NOW
