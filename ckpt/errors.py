"""The errors of ckpt, grouped by what a handler does about them.

    CheckpointError
    ├── Retryable       the same call may work later (network, server busy)
    ├── NotFound        there is nothing at that place
    ├── Corrupt         bytes are there, but not the ones that were written
    ├── Conflict        somebody else has written another thing at that place
    ├── Misconfigured   a person has to change something first
    └── Fatal           this device will not do it (disk full, read-only)

`kind` is a stable code that is only ever added to; the message is one sentence for a person and not
an API; `facts` are the values it speaks of. Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "Conflict",
    "Corrupt",
    "Fatal",
    "Misconfigured",
    "NotFound",
    "Retryable",
]


class CheckpointError(Exception):
    """Something about a checkpoint went wrong; the class says what to do, `kind` what it was."""

    def __init__(self, message: str, *, kind: str, hint: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.hint = hint
        """What a person can do now; may be empty."""
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class Retryable(CheckpointError):
    """The same call may work later."""


class NotFound(CheckpointError):
    """There is nothing at that place, and the device is sure of it."""


class Corrupt(CheckpointError):
    """The bytes at that place are not the ones that were written."""


class Conflict(CheckpointError):
    """Another thing already stands at a place that is written only once."""


class Misconfigured(CheckpointError):
    """A person has to change a setting, a right or a URL first."""


class Fatal(CheckpointError):
    """The device refuses for good, e.g. because it is full."""
