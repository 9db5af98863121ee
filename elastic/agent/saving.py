"""What the agent and its saves want of each other, and the saves of a job that makes none.

`Saves` (elastic/agent/saves.py) is the other one that keeps this contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from elastic.membership import commands as c

Message = dict[str, Any]


class Surroundings(Protocol):
    """What saves need of the agent."""

    def arena_fd(self, worker_id: str) -> int | None:
        """Return a living worker's arena."""
        ...

    def tell(self, worker_ids: Iterable[str] | None, message: Message) -> None:
        """Send a message to these workers, or to all."""
        ...

    def note(self, event: str, /, **fields: Any) -> None:
        """Write an event to the log."""
        ...

    def on_event(self, event: c.Event) -> None:
        """Give an event to the machine."""
        ...


class Saving(Protocol):
    """What the agent asks of its saves."""

    def status(self) -> dict[str, Any]:
        """Return last_committed_step, in_flight, last_error."""
        ...

    async def start(self) -> None:
        """Start whatever is needed."""
        ...

    def message(self, worker_id: str, message: Message) -> None:
        """Take a worker's message about a save."""
        ...

    def gone(self, worker_id: str) -> None:
        """Take in that a worker is reaped."""
        ...

    def settle(self, deadline_at_s: float) -> None:
        """Finish what is under way until then; SavesSettled follows."""
        ...

    async def close(self, within_s: float) -> None:
        """End it."""
        ...


class NoSaves:
    """Saves of a job without a checkpoint directory and without a remote place."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def status(self) -> dict[str, Any]:
        """Nothing was ever saved."""
        return {"last_committed_step": None, "in_flight": [], "last_error": None}

    async def start(self) -> None:
        """Nothing to start."""

    def message(self, worker_id: str, message: Message) -> None:
        """Nothing is staged without a place to save to."""

    def gone(self, worker_id: str) -> None:
        """Nothing of it is kept."""

    def settle(self, deadline_at_s: float) -> None:  # noqa: ARG002 - the protocol's signature
        """Nothing is under way."""
        self._surroundings.on_event(c.SavesSettled())

    async def close(self, within_s: float) -> None:
        """Nothing to end."""
