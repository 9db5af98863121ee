"""What a finished run hands back.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The outcome of a run that ended with exit code 0."""

    value: Any
    """What the train function returned on the main rank; None on other hosts."""

    step: int
    """Committed steps of the job, those before a resume included."""

    generation: int
    """Number of the last World."""

    events_path: str
    """Directory of this run's event files; `elastic events` reads it."""

    goodput: float | None
    """Share of all worker-seconds that went into committed steps, 0 to 1; None if unknown."""
