"""Follows a run from its files: events into the view, the main worker's output to the console.

Nothing is asked of any process, so watching costs the run nothing and works as well on a run that
has ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from elastic.clock import Clock
from elastic.console import Console
from elastic.events import EventTail
from elastic.render import FAILURE_MARK
from elastic.view import RunView

_LINE_LIMIT = 64 * 1024
_READ_LIMIT = 1 << 20


class Watch:
    """Shows one run on a console; `look` is called again and again while it goes on."""

    def __init__(
        self, run_dir: Path, console: Console, clock: Clock, *, tracebacks: bool = False
    ) -> None:
        self.view = RunView()
        self._console = console
        self._clock = clock
        self._events = EventTail(run_dir)
        self._output = MainOutput(run_dir, tracebacks=tracebacks)

    def look(self) -> None:
        """Take in what is new and show it."""
        lines: list[str] = []
        for record in self._events.read():
            lines.extend(self.view.apply(record))
        printed = self._output.read(self.view.main_worker_id)
        if printed:
            self._console.output(printed)
        if lines:
            self._console.note(lines)
        self._console.update(self.view, self._clock.now_s())

    def close(self) -> None:
        """Show what came last, and leave the terminal as it was."""
        self.look()
        while printed := self._output.read(self.view.main_worker_id):
            self._console.output(printed)
        rest = self._output.rest()
        if rest:
            self._console.output(rest)
        self._console.close(self.view)


class MainOutput:
    """The output of whichever worker is the main one, in whole lines and without repeats.

    A worker that becomes main later is followed from that moment: what it printed before was said
    by the main worker of then. The traceback of a worker that failed is left in its log, unless
    `tracebacks` asks for it: the run ends, or goes on, with one sentence about it.
    """

    def __init__(self, run_dir: Path, *, tracebacks: bool = False) -> None:
        self._logs = run_dir / "logs"
        self._tracebacks = tracebacks
        self._failed = False
        self._worker_id: str | None = None
        self._offset = 0
        self._partial = b""

    def read(self, main_worker_id: str | None) -> str:
        """Return the new whole lines of the main worker's log."""
        if main_worker_id is None:
            return ""
        before = b""
        if main_worker_id != self._worker_id:
            before = self._shown(self._end_line(self._take()))
            self._failed = False
            first = self._worker_id is None
            self._worker_id = main_worker_id
            self._offset = 0 if first else self._size()
        return (before + self._shown(self._whole(self._take()))).decode(errors="replace")

    def rest(self) -> str:
        """Return a last line that was never ended."""
        return self._shown(self._end_line(b"")).decode(errors="replace")

    def _shown(self, lines: bytes) -> bytes:
        """Return what stands before the mark of a failure."""
        if self._tracebacks or self._failed:
            return b"" if self._failed else lines
        before, mark, _ = lines.partition(FAILURE_MARK.encode() + b"\n")
        self._failed = bool(mark)
        return before

    def _whole(self, data: bytes) -> bytes:
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > _LINE_LIMIT:
            end = len(data)
        self._partial = data[end:]
        return data[:end]

    def _end_line(self, data: bytes) -> bytes:
        data = self._partial + data
        self._partial = b""
        return data if not data or data.endswith(b"\n") else data + b"\n"

    def _path(self) -> Path:
        return self._logs / f"worker-{self._worker_id}.log"

    def _size(self) -> int:
        try:
            return self._path().stat().st_size
        except OSError:
            return 0

    def _take(self) -> bytes:
        if self._worker_id is None:
            return b""
        try:
            fd = os.open(self._path(), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # on another host, or not there yet
            return b""
        try:
            data = os.pread(fd, _READ_LIMIT, self._offset)
        finally:
            os.close(fd)
        self._offset += len(data)
        return data
