"""The event log: one file of JSON lines per process, merged on reading.

Guarantees: a record is one `write` to a file opened for appending, so lines of a file never mix,
and a process that dies in the middle tears at most its last line, which readers skip. Nothing is
synced: the log survives the death of any process, not that of the machine. Records of one host
are ordered by CLOCK_MONOTONIC, which all its processes share; the order of records of different
hosts means nothing beyond wall-clock accuracy.
What may be written stands in elastic/event_table.py.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.event_table import CONTEXT, EVENTS, EventSpec, UnknownEvent, check

__all__ = [
    "CONTEXT",
    "EVENTS",
    "EventLog",
    "EventSpec",
    "EventTail",
    "UnknownEvent",
    "read_events",
    "read_file",
]

Record = dict[str, Any]
_CONTEXT_SET: Final = frozenset(CONTEXT)


class EventLog:
    """Every accepted event is one whole line in this process's own file.

    Args:
        path: the file; its directory is made when missing.
        process: what this process is: "agent", "worker", "save", "caller", "forkserver".
        context: values for the fields that stand in every record (`run`, `node`, `worker_id`,
            `generation`, `rank`, `step`); others are refused.

    `bind` changes the context from then on. `emit` may be called from several threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        process: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        **context: Any,
    ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._context: Record = {"process": process}
        self.bind(**context)
        self._file = _LineFile(self.path)
        self._logger = structlog.wrap_logger(
            self._file, processors=[_render], wrapper_class=_EventLogger
        )

    def bind(self, **context: Any) -> None:
        """Set context fields for every later record."""
        unknown = set(context) - _CONTEXT_SET
        if unknown:
            raise UnknownEvent(f"{', '.join(sorted(unknown))}: not a field of every record")
        # A new dict, not an update: another thread may be in the middle of reading the old one.
        self._context = {**self._context, **context}

    def emit(self, name: str, /, **fields: Any) -> None:
        """Write one record. Raises UnknownEvent: a name or field that the table does not allow."""
        context = self._context
        record: Record = {"event": name}
        for field in CONTEXT[1:-2]:
            record[field] = context.get(field)
        record["t_mono_s"] = round(self._clock.now_s(), 6)
        record["t_wall"] = self._clock.wall()
        record.update(fields)
        if self._file.lost_count:
            record["lost_before"] = self._file.lost_count
        check(name, record)
        self._logger.write(**record)

    def close(self) -> None:
        """Close the file; a later emit raises."""
        self._file.close()


class EventTail:
    """Reads what was added to a run's event files since the last call, each record once.

    Follows files that appear later. A last line without its end is left for the next call.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._events_dir = Path(run_dir) / "events"
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Record]:
        """Return the new records, merged by their time."""
        records: list[Record] = []
        for path in _event_files(self._events_dir):
            offset = self._offsets.get(path, 0)
            if path.stat().st_size <= offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._offsets[path] = offset + end
            records.extend(_parse(data[:end]))
        return _merged(records)


def read_events(run_dir: str | os.PathLike[str]) -> list[Record]:
    """Return all records of a run, merged by their time; torn last lines are left out."""
    records: list[Record] = []
    for path in _event_files(Path(run_dir) / "events"):
        records.extend(read_file(path))
    return _merged(records)


def read_file(path: str | os.PathLike[str]) -> list[Record]:
    """Return the whole records of one file in the order in which they were written."""
    return list(_parse(Path(path).read_bytes()))


def _event_files(events_dir: Path) -> list[Path]:
    return sorted(events_dir.glob("*.jsonl")) if events_dir.is_dir() else []


def _parse(data: bytes) -> Iterator[Record]:
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:  # torn: its writer died, or the disk was full
            continue
        if isinstance(record, dict) and "event" in record:
            yield record


def _merged(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: float(record.get("t_mono_s") or 0.0))


def _render(_logger: Any, _method: str, record: Any) -> str:
    """Last structlog processor: the record as one line of strict JSON, its name first."""
    record = {"event": record.pop("event"), **record}
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:
        # A loss that became infinite is news, not an error; JSON has no word for it.
        return json.dumps(_finite(record), separators=(",", ":"), default=_plain)


def _plain(value: object) -> object:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy or torch scalar
        return value.item()
    if isinstance(value, (tuple, set, frozenset)):
        return list(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    return repr(value)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class _EventLogger(structlog.BoundLoggerBase):
    """structlog's front end with one method: an event is its name and its fields."""

    def write(self, event: str, **fields: Any) -> None:
        """Hand one record to the processors."""
        self._proxy_to_logger("msg", event, **fields)


class _LineFile:
    """structlog's output end: one write call per line, to a file opened for appending.

    A line that cannot be written (disk full) is dropped and counted: a run does not end because
    of its log, and the next record that gets through tells how many are missing before it.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self.lost_count = 0

    def msg(self, line: str) -> None:
        """Write the line and its end at once."""
        data = (line + "\n").encode()
        try:
            if os.write(self._fd, data) == len(data):
                self.lost_count = 0
                return
            os.write(self._fd, b"\n")  # close the torn line, so that the next one can be read
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
        self.lost_count += 1

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
