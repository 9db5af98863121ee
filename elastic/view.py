"""What a person wants to know of a run now, kept up to date from its events.

Every worker tells of the same step and the same reshape; here each counts once. The view is built
from events alone, so a recorded log shows what was seen live.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic import render
from elastic.errors import SIGNAL_BASE

Record = Mapping[str, Any]

RATE_STEPS = 20
NEWS_KEPT = 4
SHARES_EVERY_S = 60.0  # a busy machine changes them often; `elastic events` has them all
TOKENS_KEY = "tokens_per_sample"  # a logged value of this name turns samples/s into tokens/s


class WorkerState(StrEnum):
    """How a worker looks from outside."""

    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    SUSPECT = "suspect"
    DEAD = "dead"
    FINISHED = "finished"


@dataclass(slots=True)
class WorkerRow:
    """One slot of the World's row; a respawned worker takes over the slot's place."""

    worker_id: str
    state: WorkerState
    rank: int | None = None
    pid: int | None = None


@dataclass(slots=True)
class RunView:
    """The state of one run as its events tell it; `apply` returns the lines worth showing."""

    job: str = ""
    phase: str = "starting"
    generation: int | None = None
    reason: str = ""
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    step: int = 0
    total_steps: int | None = None
    epoch: int | None = None
    log: dict[str, Any] = field(default_factory=dict)
    lr: Any = None
    step_s: float | None = None
    samples_per_s: float | None = None
    saved: dict[str, int] = field(default_factory=dict)
    saved_at_s: float | None = None
    saving: int | None = None
    save_error: str | None = None
    failures: int = 0
    reshapes: int = 0
    now_s: float = 0.0
    news: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=NEWS_KEPT))
    main_worker_id: str | None = None
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_STEPS))
    _told: set[tuple[Any, ...]] = field(default_factory=set)
    _routine: dict[str, tuple[str, str]] = field(default_factory=dict)
    _shares_from_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, if the loop logs `tokens_per_sample`."""
        each = self.log.get(TOKENS_KEY)
        if self.samples_per_s is None or not isinstance(each, (int, float)):
            return None
        return self.samples_per_s * each

    @property
    def world_size(self) -> int:
        """Workers of the newest World that have a rank."""
        return sum(1 for row in self.workers.values() if row.rank is not None)

    @property
    def remaining_s(self) -> float | None:
        """Seconds that are left at the present rate."""
        if self.total_steps is None or self.step_s is None:
            return None
        return max(0, self.total_steps - self.step) * self.step_s

    def apply(self, record: Record) -> list[str]:
        """Take in one event; return the lines that a person should see because of it."""
        name = str(record.get("event", ""))
        self.now_s = max(self.now_s, float(record.get("t_mono_s") or 0.0))
        if self._is_repeat(name, record):
            return []
        change = _CHANGES.get(name)
        if change is not None:
            change(self, record)
        if name not in render.NOTEWORTHY or self._is_quiet(name, record):
            return []
        text = self._reshape_line(record) if name == "reshape.finished" else render.line(record)
        if name not in _IN_VIEW:
            self._tell(name, (str(record.get("t_wall") or "")[11:19], text))
        return [text]

    def _tell(self, name: str, entry: tuple[str, str]) -> None:
        """Add news; of what comes again and again the newest alone, so that the rest stays."""
        if name in _ROUTINE:
            before = self._routine.get(name)
            if before is not None and before in self.news:
                self.news.remove(before)
            self._routine[name] = entry
        self.news.append(entry)

    def _reshape_line(self, record: Record) -> str:
        """Return what a reshape comes to, in one line: why, how many go on, how long it took."""
        size, total_ms = self.world_size, render.reshape_ms(record)
        who = "1 worker goes" if size == 1 else f"{size} workers go"
        why = render.short(self.reason)
        return f"generation {self.generation}: {who} on after {total_ms:.0f} ms ({why})"

    def _is_repeat(self, name: str, record: Record) -> bool:
        key_fields = _ONCE_PER.get(name)
        if key_fields is None:
            return False
        key = (name, *(str(record.get(field)) for field in key_fields))
        if key in self._told:
            return True
        self._told.add(key)
        return False

    def _is_quiet(self, name: str, record: Record) -> bool:
        """Whether a noteworthy event is an ordinary one here: a first World, a clean end."""
        if name == "generation.formed":
            return self.reshapes > 0  # told when it goes on, with the time that it took
        if name == "reshape.finished":
            return self.reshapes == 0
        if name == "worker.exited":
            return record.get("exit_code") == 0 and not record.get("signal")
        if name == "shares.changed":
            if self.now_s < self._shares_from_s:
                return True
            self._shares_from_s = self.now_s + SHARES_EVERY_S
            return False
        if name == "member.joined":
            return self.generation is None
        return name == "checkpoint.committed" and record.get("tier") == "memory"

    # -- one method per event that changes the view ---------------------------------------------

    def _config(self, record: Record) -> None:
        self.job = str(record["config"].get("job") or record.get("run") or "")

    def _worker_started(self, record: Record) -> None:
        worker_id = str(record["worker_id"])
        self.workers[_place(worker_id)] = WorkerRow(
            worker_id, WorkerState.STARTING, None, record.get("pid")
        )

    def _worker_state(self, record: Record, state: WorkerState) -> None:
        row = self.workers.get(_place(str(record.get("worker_id"))))
        if row is not None and row.worker_id == record.get("worker_id"):
            row.state = state

    def _worker_ready(self, record: Record) -> None:
        self._worker_state(record, WorkerState.READY)

    def _worker_suspected(self, record: Record) -> None:
        self._worker_state(record, WorkerState.SUSPECT)

    def _worker_finished(self, record: Record) -> None:
        self._worker_state(record, WorkerState.FINISHED)

    def _worker_exited(self, record: Record) -> None:
        clean = record.get("exit_code") == 0 and not record.get("signal")
        self._worker_state(record, WorkerState.FINISHED if clean else WorkerState.DEAD)
        self.failures += not clean

    def _formed(self, record: Record) -> None:
        generation = record.get("generation")
        if not isinstance(generation, int) or generation <= (self.generation or -1):
            return
        self.reshapes += self.generation is not None
        self.generation = generation
        self.reason = str(record.get("reason") or "")
        ids = render.worker_ids(record["workers"])
        for row in self.workers.values():
            row.rank = None
        for rank, worker_id in enumerate(ids):
            row = self.workers.setdefault(
                _place(worker_id), WorkerRow(worker_id, WorkerState.RUNNING)
            )
            row.worker_id, row.rank, row.state = worker_id, rank, WorkerState.RUNNING
        self.main_worker_id = ids[0] if ids else self.main_worker_id
        self.phase = "running"
        self._recent.clear()

    def _reshaping(self, record: Record) -> None:
        self.phase = "reshaping"

    def _reshaped(self, record: Record) -> None:
        self.phase = "running"

    def _committed(self, record: Record) -> None:
        step = int(record["step"])
        if step <= self.step:
            return
        self.step = step
        self.epoch = record.get("epoch")
        self.log = dict(record.get("log") or {})
        self.lr = record.get("lr")
        at_s = float(record.get("t_mono_s") or 0.0)
        self._recent.append((at_s, int(record.get("samples") or 0)))
        if self.phase != "stopping":
            self.phase = "running"
        (first_s, _), (last_s, _) = self._recent[0], self._recent[-1]
        if last_s > first_s:
            samples = sum(count for _, count in list(self._recent)[1:])
            self.samples_per_s = samples / (last_s - first_s)
            self.step_s = (last_s - first_s) / (len(self._recent) - 1)
        else:
            self.step_s = float(record.get("duration_s") or 0.0) or None
            self.samples_per_s = self._recent[-1][1] / self.step_s if self.step_s else None

    def _restored(self, record: Record) -> None:
        self.step = max(self.step, int(record["step"]))

    def _staged(self, record: Record) -> None:
        self.saving = max(int(record.get("step") or 0), self.saving or 0)

    def _saved(self, record: Record) -> None:
        step = int(record.get("step") or 0)
        tier = str(record["tier"])
        self.saved[tier] = max(step, self.saved.get(tier, 0))
        self.saved_at_s = float(record.get("t_mono_s") or 0.0)
        self.save_error = None
        if self.saving is not None and step >= self.saving:
            self.saving = None

    def _save_failed(self, record: Record) -> None:
        self.save_error = render.line(record)
        self.saving = None

    def _planned(self, record: Record) -> None:
        self.total_steps = int(record["total_steps"])

    def _stopping(self, record: Record) -> None:
        self.phase = "stopping"

    def _ended(self, record: Record) -> None:
        code = int(record.get("exit_code") or 0)
        if code == 0:
            self.phase = "done"
        else:
            self.phase = "stopped" if code > SIGNAL_BASE else "failed"


def _place(worker_id: str) -> str:
    """Return what stays when a worker is replaced: node and slot."""
    return worker_id.rpartition("-")[0] or worker_id


_ROUTINE = frozenset({"checkpoint.abandoned", "evaluate.finished", "shares.changed"})
_IN_VIEW = frozenset({"checkpoint.committed"})  # has a row of its own in the live view

# Which of several workers' records of one happening counts: the first for these fields.
_ONCE_PER: dict[str, tuple[str, ...]] = {
    "generation.formed": ("generation",),
    "reshape.started": ("generation",),
    "reshape.finished": ("generation",),
    "step.skipped": ("step",),
    "evaluate.finished": ("step", "values"),
    "checkpoint.committed": ("step", "tier"),
    "checkpoint.skipped": ("step",),
    "checkpoint.failed": ("step", "error"),
    "checkpoint.abandoned": ("step",),
    "restore.finished": ("generation", "step"),
    "worker.exited": ("worker_id",),
    "worker.failed": ("worker_id",),
    "signal.received": ("signal", "process", "t_wall"),
    "run.stopping": ("reason",),
}

_CHANGES = {
    "config.resolved": RunView._config,
    "worker.started": RunView._worker_started,
    "worker.ready": RunView._worker_ready,
    "worker.suspected": RunView._worker_suspected,
    "worker.finished": RunView._worker_finished,
    "worker.exited": RunView._worker_exited,
    "generation.formed": RunView._formed,
    "reshape.started": RunView._reshaping,
    "reshape.finished": RunView._reshaped,
    "step.committed": RunView._committed,
    "restore.finished": RunView._restored,
    "checkpoint.staged": RunView._staged,
    "checkpoint.committed": RunView._saved,
    "checkpoint.failed": RunView._save_failed,
    "run.planned": RunView._planned,
    "run.stopping": RunView._stopping,
    "run.finished": RunView._ended,
}
