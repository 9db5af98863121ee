"""A worker's progress, readable by its agent at any moment without asking the worker.

One page of shared memory (a memfd) per worker: the worker's main thread writes where it is, the
agent reads. A sequence number that is odd while a write is going on lets the reader refuse a torn
page (a worker can be stopped between any two stores). It tells *that* and *where* the worker
stands; it says nothing about why.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

_MAGIC = b"EVERPROG"
_PAGE_BYTES = 4096
_FIELDS = struct.Struct("<qqqqqd")  # step, committed, generation, phase, done, CLOCK_MONOTONIC
_SEQUENCE_AT = 8
_FIELDS_AT = 16
_READ_TRIES = 100


class WorkerPhase(IntEnum):
    """What a worker's main thread is doing."""

    STARTING = 0
    COMPUTE = 1
    EXCHANGE = 2
    AGREE = 3
    APPLY = 4
    GATHER = 5
    REFORM = 6
    EVALUATE = 7
    SAVE = 8
    BETWEEN = 9
    FINISHED = 10
    WAITING = 11
    RESTORE = 12
    COMPILE = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One reading of a progress page.

    Args:
        done: steps that this process has completed itself.
        at_s: CLOCK_MONOTONIC of the last write.
    """

    step: int
    committed: int
    generation: int
    phase: WorkerPhase
    done: int = 0
    at_s: float


class ProgressPage:
    """Write or read one worker's progress page.

    Args:
        fd: a memfd made by `create_fd`, shared between the worker and its agent.
    """

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _PAGE_BYTES)
        self._map = mmap.mmap(fd, _PAGE_BYTES)
        self._sequence = 0
        self.last = Progress(
            step=0, committed=0, generation=0, phase=WorkerPhase.STARTING, at_s=0.0
        )

    @staticmethod
    def create_fd(name: str) -> int:
        """Return a new memfd of one zeroed page."""
        fd = os.memfd_create(f"everstep-progress-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        return fd

    def write(
        self,
        *,
        phase: WorkerPhase,
        step: int | None = None,
        committed: int | None = None,
        generation: int | None = None,
        done: int | None = None,
    ) -> None:
        """Publish where this worker is; fields left out keep their value."""
        last = self.last
        now = Progress(
            step=last.step if step is None else step,
            committed=last.committed if committed is None else committed,
            generation=last.generation if generation is None else generation,
            phase=phase,
            done=last.done if done is None else done,
            at_s=time.monotonic(),
        )
        self._sequence += 2
        self._map[_SEQUENCE_AT:_FIELDS_AT] = struct.pack("<q", self._sequence - 1)
        _FIELDS.pack_into(
            self._map,
            _FIELDS_AT,
            now.step,
            now.committed,
            now.generation,
            int(now.phase),
            now.done,
            now.at_s,
        )
        self._map[_SEQUENCE_AT:_FIELDS_AT] = struct.pack("<q", self._sequence)
        self._map[:8] = _MAGIC
        self.last = now

    def beat(self) -> None:
        """Renew the page: the main thread still gets somewhere, or waits and is alive."""
        self.write(phase=self.last.phase)

    def read(self) -> Progress | None:
        """Return the last whole reading, or None while nothing was written yet."""
        for _ in range(_READ_TRIES):
            if self._map[:8] != _MAGIC:
                return None
            before = self._map[_SEQUENCE_AT:_FIELDS_AT]
            step, committed, generation, phase, done, at_s = _FIELDS.unpack_from(
                self._map, _FIELDS_AT
            )
            if self._map[_SEQUENCE_AT:_FIELDS_AT] == before and before[0] % 2 == 0:
                self.last = Progress(
                    step=step,
                    committed=committed,
                    generation=generation,
                    phase=WorkerPhase(phase),
                    done=done,
                    at_s=at_s,
                )
                return self.last
        return self.last  # the writer died or is stopped in the middle of a write

    def close(self) -> None:
        """Unmap the page; the memory goes when its last descriptor is closed."""
        self._map.close()
