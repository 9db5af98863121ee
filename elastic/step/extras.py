"""The small global state: everything of a job that is not a row of a tensor in a segment.

It is equal on all workers by construction (each is a function of agreed results), travels whole to
a joiner, and is the plain part of a checkpoint.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from elastic.errors import Misconfigured
from elastic.step.optimizer import capture_hyper, install_hyper
from elastic.step.position import Position
from elastic.values import NotPlain, from_plain, to_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic.step.driver import Driver
    from elastic.step.process_group import Group

VERSION = 1


class Extras:
    """Capture and install a driver's global state.

    Objects registered after the state arrived still get theirs: `claim` hands it over.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._unclaimed: dict[str, Any] = {}
        self._unclaimed_schedulers: dict[int, Any] = {}
        self._hyper: list[Any] | None = None
        self.evaluations: list[dict[str, Any]] = []
        self.waits: list[dict[str, Any]] = []

    # -- out ----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain data; raises Misconfigured naming what is not plain."""
        driver = self._driver
        prepared = driver.prepared
        objects: dict[str, Any] = dict(self._unclaimed)
        try:
            for name, obj in prepared.objects.items():
                objects[name] = to_plain(obj.state_dict(), name)
            schedulers = [
                to_plain(_scheduler_state(s), f"{type(s).__name__}.state_dict()")
                for s in prepared.schedulers
            ]
        except NotPlain as error:
            raise Misconfigured(f"state cannot be saved: {error}") from error
        config = driver.config
        assert driver.layout is not None
        return {
            "version": VERSION,
            "step": driver.step,
            "position": driver.position.to_dict(),
            "log": dict(driver.step_log),
            "evaluations": list(self.evaluations),
            "schedulers": schedulers,
            "objects": objects,
            "virtual_rank_state": prepared.virtual.to_dict(),
            "hyper": capture_hyper(prepared.optimizers),
            "lineage": [list(item) for item in driver.lineage],
            "skipped": driver.skipped,
            "nonfinite_run": driver.nonfinite_run,
            "overlap": driver.overlap,
            "job": {
                "virtual_ranks": driver.num_leaves // config.accumulate,
                "accumulate": config.accumulate,
                "segments": config.segments,
                "seed": config.seed,
                "threads": config.threads,
            },
            "aliases": [[alias.name, alias.target] for alias in driver.layout.aliases],
            "layout": driver.layout.fingerprint(),
        }

    def capture(self) -> bytes:
        """Return the state as bytes for a joiner."""
        driver = self._driver
        saves = {
            "staged": driver.staged_step,
            "saved": driver.saved_step,
            "agreed_generation": driver.agreed_generation,
            "waits": self.waits,
        }
        return json.dumps({**self.to_dict(), "saves": saves}, sort_keys=True).encode()

    # -- in -----------------------------------------------------------------------------------

    def install(self, data: bytes) -> None:
        """Take over the state that `capture` returned elsewhere."""
        self.install_dict(json.loads(data))

    def install_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a peer or of a checkpoint."""
        driver = self._driver
        driver.position = Position.from_dict(state["position"])
        driver.lineage = [list(item) for item in state["lineage"]]
        driver.step_log = dict(state.get("log", {}))
        driver.skipped = state["skipped"]
        driver.nonfinite_run = state.get("nonfinite_run", 0)
        driver.overlap = driver.config.overlap and state.get("overlap", True)
        driver.prepared.virtual.install(state.get("virtual_rank_state", {}))
        self.evaluations = list(state["evaluations"])
        # What comes from a checkpoint is saved; a joiner knows what the others know.
        step = state["step"]
        saved = {"staged": step, "saved": step, "agreed_generation": 0, "waits": []}
        saves = state.get("saves", saved)
        driver.staged_step, driver.saved_step = saves["staged"], saves["saved"]
        # A joiner may stage the step it came in with: parts of one step belong together only if
        # all call it by the generation that agreed on it.
        driver.agreed_generation = saves["agreed_generation"]
        self.waits = list(saves["waits"])
        self._unclaimed = dict(state["objects"])
        self._unclaimed_schedulers = dict(enumerate(state["schedulers"]))
        self._hyper = state["hyper"]
        self.claim()

    def claim(self) -> None:
        """Hand restored state to objects that are registered by now."""
        prepared = self._driver.prepared
        if self._hyper is not None and len(self._hyper) == len(prepared.optimizers):
            hyper, self._hyper = self._hyper, None
            try:
                install_hyper(prepared.optimizers, hyper)
            except ValueError as error:
                raise Misconfigured(
                    "the saved optimizer has other parameter groups than the prepared one",
                    hint="build the optimizer as it was when the checkpoint was made",
                ) from error
        for index, scheduler in enumerate(prepared.schedulers):
            if index in self._unclaimed_schedulers:
                state = from_plain(self._unclaimed_schedulers.pop(index))
                scheduler.load_state_dict(state)
        for name, obj in prepared.objects.items():
            if name in self._unclaimed:
                obj.load_state_dict(from_plain(self._unclaimed.pop(name)))

    def unclaimed_objects(self) -> list[str]:
        """Return names of global objects whose state waits for them to be registered."""
        return sorted(self._unclaimed)

    def refresh(self, names: Sequence[str], group: Group) -> None:
        """Keep the state that waits for its object equal to that of workers that have the object.

        A worker without a micro-batch does not run the loop body, where an object may be prepared;
        by the time it does, the others have changed theirs. Called by all workers alike, after the
        user's functions of the step.
        """
        objects = self._driver.prepared.objects
        mine = {n: to_plain(objects[n].state_dict(), n) for n in names if n in objects}
        said = [json.loads(raw) for raw in group.gather_bytes(json.dumps(mine).encode())]
        for name in names:
            if name in self._unclaimed:
                has = (each[name] for each in said if name in each)
                self._unclaimed[name] = next(has, self._unclaimed[name])

    def unclaimed(self) -> list[str]:
        """Return names of restored state that nothing has asked for."""
        names = [f"scheduler {i}" for i in self._unclaimed_schedulers]
        names += [
            f"{name} (per virtual rank)" for name in self._driver.prepared.virtual.unclaimed()
        ]
        return sorted(self._unclaimed) + names


def _scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state without our recording wrapper, which is an instance attribute."""
    state: dict[str, Any] = dict(scheduler.state_dict())
    state.pop("step", None)
    return {k: v for k, v in state.items() if not callable(v)}
