"""Builders for tests that judge a run by its events: whole runs as records, told step by step.

Every record is checked against the event table, so that a story cannot use words that no run uses.
"""

from __future__ import annotations

from typing import Any

from elastic.event_table import CONTEXT, check
from scripts.run_facts import Fault

STEP_S = 0.1


class Run:
    """Tells the events of a run; time is what the story says it is."""

    def __init__(self, *, at_s: float = 100.0, first_step: int = 1) -> None:
        self.events: list[dict[str, Any]] = []
        self.at_s = at_s
        self.step = first_step - 1
        self.generation = 0
        self.workers: list[str] = []

    def tell(self, event: str, *, worker: str | None = None, **fields: Any) -> None:
        record = dict.fromkeys(CONTEXT)
        rank = self.workers.index(worker) if worker in self.workers else None
        record |= {"event": event, "run": "r", "process": "worker" if worker else "agent"}
        record |= {"worker_id": worker, "rank": rank, "generation": self.generation}
        record |= {"t_mono_s": self.at_s, "t_wall": "2025-01-01T00:00:00+00:00", **fields}
        check(event, record)
        self.events.append(record)

    def start(self, worker: str, slot: int) -> None:
        self.tell("worker.started", worker=worker, slot=slot, pid=1000 + slot)

    def form(self, workers: list[str], reason: str = "because") -> None:
        self.generation += 1
        self.workers = workers
        refs = [{"worker_id": w, "node": "n", "slot": i} for i, w in enumerate(workers)]
        self.tell("generation.formed", workers=refs, mode="now", reason=reason)

    def through(self, worker: str, *, parts_ms: dict[str, float], **fields: Any) -> None:
        zero = dict.fromkeys(("unblock_ms", "rebuild_ms", "recover_ms", "heal_ms", "redo_ms"), 0.0)
        more = {"heal_bytes": 0, "joined": 0, "left": 0, **fields}
        self.tell("reshape.finished", worker=worker, **zero | parts_ms, **more)

    def all_through(self) -> None:
        for worker in self.workers:
            self.through(worker, parts_ms={})

    def train(self, steps: int, *, loss: float = 2.0, step_s: float = STEP_S) -> None:
        for _ in range(steps):
            self.at_s += step_s
            self.step += 1
            for worker in self.workers:
                self.committed(worker, self.step, loss=loss)

    def committed(self, worker: str, step: int, *, loss: float = 2.0) -> None:
        self.tell(
            "step.committed",
            worker=worker,
            step=step,
            epoch=0,
            log={"loss": loss, "tokens_per_sample": 10},
            duration_s=STEP_S,
            samples=8,
            lr=[0.1],
        )


def killed_run(*, steps: int = 20, kill_after: int = 10, loss: float = 2.0) -> tuple[Run, Fault]:
    """A run of four workers: one is killed, the others go on, a fifth takes its place."""
    run = Run()
    for slot in range(4):
        run.start(f"n.{slot}-a", slot)
    run.form([f"n.{slot}-a" for slot in range(4)])
    run.all_through()
    run.train(kill_after, loss=loss)
    fault = Fault(worker_id="n.1-a", pid=1001, signal="SIGKILL", at_s=run.at_s + 0.050)
    run.at_s = fault.at_s + 0.007
    run.tell("worker.exited", worker="n.1-a", pid=1001, exit_code=-9, signal=9, evidence="gone")
    run.at_s = fault.at_s + 0.010
    run.form(["n.0-a", "n.2-a", "n.3-a"], "n.1-a is gone")
    for worker, end_ms in (("n.0-a", 140), ("n.3-a", 150), ("n.2-a", 145)):
        run.at_s = fault.at_s + end_ms / 1e3
        late = end_ms - 140
        parts = {"rebuild_ms": 8.0, "recover_ms": 5.0, "heal_ms": 2.0, "redo_ms": 110.0 + late}
        run.through(worker, parts_ms=parts, heal_bytes=100, left=1)
        run.tell("step.redone", worker=worker, step=kill_after + 1)
    run.at_s = fault.at_s + 0.150
    run.train(2, loss=loss)
    run.start("n.1-b", 1)
    run.form(["n.0-a", "n.2-a", "n.3-a", "n.1-b"], "n.1-b is ready")
    run.all_through()
    run.train(steps - kill_after - 2, loss=loss)
    return run, fault


def resumed_run(*, from_step: int = 20, steps: int = 5, workers: int = 2, loss: float = 2.0) -> Run:
    """A run of new processes that goes on from a checkpoint."""
    run = Run(at_s=200.0, first_step=from_step + 1)
    names = [f"m.{slot}-a" for slot in range(workers)]
    for slot, name in enumerate(names):
        run.start(name, slot)
    run.form(names, "start")
    for name in names:
        run.tell(
            "restore.finished",
            worker=name,
            step=from_step,
            bytes_read=600,
            duration_s=0.1,
            report=[],
        )
    run.all_through()
    run.train(steps, loss=loss)
    return run
