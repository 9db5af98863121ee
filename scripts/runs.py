"""A training run under `elastic.run` as somebody outside sees it: its process and its events.

The demo and the benchmark start runs as programs of their own, follow them from their event files
alone, and send signals to the workers that those files name. A run is over when its process, its
agent and every worker it ever started are gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from elastic.events import EventTail
from elastic.job_root import run_dirs
from scripts.programs import Program, ProgramFailed, wait_gone
from scripts.run_facts import Fault, World, worlds

T = TypeVar("T")
LOOK_S = 0.03
GONE_TIMEOUT_S = 20.0


class Run:
    """One run, from its start to its end; leaving the `with` block ends all of it.

    Args:
        name: what a person calls it.
        command: the program that calls `elastic.run`.
        log_dir: where its run directory will be; nobody else's runs may be there.
        settings: configuration, as EVERSTEP_* will carry it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_dir: Path,
        settings: Mapping[str, object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.events: list[dict[str, Any]] = []
        self._log_dir = log_dir
        self._tail: EventTail | None = None
        self._pids: dict[str, tuple[int, int]] = {}
        self._seen_worlds: list[World] = []
        self._step = 0
        log_dir.mkdir(parents=True, exist_ok=True)
        pairs = {f"EVERSTEP_{key.upper()}": str(value) for key, value in settings.items()}
        self.program = Program(
            name,
            command,
            log_path=log_dir / "output.log",
            environment={**(environment or {}), "EVERSTEP_LOG_DIR": str(log_dir), **pairs},
        )

    @property
    def run_dir(self) -> Path | None:
        """Its run directory, once there is one."""
        found = run_dirs(self._log_dir)
        return found[-1] if found else None

    @property
    def world(self) -> World | None:
        """The newest World."""
        return self._seen_worlds[-1] if self._seen_worlds else None

    @property
    def step(self) -> int:
        """The last committed step, 0 before the first."""
        return self._step

    def look(self) -> list[dict[str, Any]]:
        """Take in the events that are new and return them. Raises ProgramFailed if it failed."""
        if self._tail is None and self.run_dir is not None:
            self._tail = EventTail(self.run_dir)
        new = self._tail.read() if self._tail is not None else []
        self.events.extend(new)
        for record in new:
            if record["event"] == "worker.started":
                self._pids[record["worker_id"]] = (int(record["slot"]), int(record["pid"]))
            elif record["event"] == "step.committed":
                self._step = max(self._step, int(record["step"]))
        if any(record["event"] == "generation.formed" for record in new):
            self._seen_worlds = worlds(self.events)
        self.program.check()
        return new

    def until(
        self,
        condition: Callable[[], T | None],
        *,
        within_s: float,
        what: str,
        on_events: Callable[[list[dict[str, Any]]], None] = lambda _new: None,
    ) -> T:
        """Follow the run until the condition gives something true. Raises ProgramFailed."""
        deadline_s = time.monotonic() + within_s
        while True:
            ended = self.program.poll() is not None  # asked first: its last events count
            new = self.look()
            on_events(new)
            found = condition()
            if found:
                return found
            if ended:
                raise ProgramFailed(f"{self.name} ended before {what}:\n{self.program.tail()}")
            if time.monotonic() > deadline_s:
                raise ProgramFailed(
                    f"{self.name} did not come to this within {within_s:.0f} s: {what}; its last "
                    f"output:\n{self.program.tail()}"
                )
            time.sleep(LOOK_S)

    def until_done(
        self,
        *,
        within_s: float,
        on_events: Callable[[list[dict[str, Any]]], None] = lambda _new: None,
    ) -> None:
        """Follow the run to its end with exit code 0. Raises ProgramFailed."""
        done = self.program.poll
        self.until(
            lambda: True if done() == 0 else None,
            within_s=within_s,
            what="its end",
            on_events=on_events,
        )
        on_events(self.look())

    def worker_in(self, slot: int) -> str | None:
        """Return the worker of the present World that has this slot."""
        workers = self.world.workers if self.world is not None else ()
        return next((w for w in workers if self._pids.get(w, (-1, 0))[0] == slot), None)

    def pid_in(self, slot: int) -> int:
        """Return the process of the present World's worker in this slot."""
        worker_id = self.worker_in(slot)
        if worker_id is None:
            raise ProgramFailed(f"{self.name} has no worker in slot {slot}")
        return self._pids[worker_id][1]

    def signal(self, worker_id: str, number: signal.Signals) -> Fault:
        """Send a signal to a worker of this run, stamped just before."""
        pid = self._pids[worker_id][1]
        fault = Fault(worker_id=worker_id, pid=pid, signal=number.name, at_s=time.monotonic())
        os.kill(pid, number)
        return fault

    def is_whole(self, size: int) -> bool:
        """Return whether the newest World has this size and all its workers are through."""
        world = self.world
        if world is None or world.size != size:
            return False
        finished = {
            record["worker_id"]
            for record in self.events
            if record["event"] == "reshape.finished" and record["generation"] == world.generation
        }
        return set(world.workers) <= finished

    def close(self) -> None:
        """End everything that belongs to this run."""
        self.program.stop()
        with contextlib.suppress(ProgramFailed):
            self.look()
        agent = self._agent_pid()
        pids = [pid for _, pid in self._pids.values()] + ([agent] if agent else [])
        for pid in wait_gone(pids, GONE_TIMEOUT_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _agent_pid(self) -> int | None:
        for record in self.events:
            if record["event"] == "agent.started" and record.get("pid"):
                return int(record["pid"])
        run_dir = self.run_dir
        if run_dir is None:
            return None
        try:
            return int(json.loads((run_dir / "agent.json").read_text())["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
