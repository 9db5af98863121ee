"""When a worker stages a checkpoint, and what it knows of those under way.

Whether step s is saved is a function of the agreement of s, so all workers stage or none does: at
every `save_every`-th step, on a wish of any worker or the operator, and only if every worker has
a free half in its arena. The agent's save service does all the rest.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from ckpt.arena import Arena
from elastic.agent.progress import WorkerPhase
from elastic.errors import UserError
from elastic.step.saving import pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic.step.agreement import Outcome
    from elastic.step.driver import Driver
    from elastic.step.extras import Extras

_HALF_SLACK_BYTES = 1 << 20


class SaveHandle:
    """A request for a checkpoint, answered when it is durable.

    `wait` inside a step is refused: the step has to end before anything is saved. Between steps all
    workers have to call it alike, as they call `ctx.evaluate`.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.ok: bool | None = None
        self.error: str | None = None
        self._poll: Callable[[], None] = lambda: None
        self._hurry: Callable[[SaveHandle], None] = lambda _handle: None

    @property
    def done(self) -> bool:
        """True once the checkpoint is committed or has failed."""
        return self.ok is not None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the checkpoint is committed; False when it failed or time ran out."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._hurry(self)
        while self.ok is None and time.monotonic() < deadline:
            self._poll()
        return bool(self.ok)


class Checkpoints:
    """A worker's part of the job's checkpoints.

    Args:
        arena_fd: the memfd that the agent gave this worker for staging.
        enabled: False when the job has nowhere to save to.
    """

    def __init__(self, driver: Driver, extras: Extras, *, arena_fd: int, enabled: bool) -> None:
        self._driver = driver
        self._extras = extras
        self._arena_fd = arena_fd
        self._arena: Arena | None = None
        self.enabled = enabled
        self._busy: set[int] = set()
        self._unfinished: dict[tuple[int, int], list[SaveHandle]] = {}
        self._asked: list[SaveHandle] = []
        self._last_time_s = time.monotonic()
        self._retry = False
        self.last_staged = 0
        self.last_committed = 0
        self.agree_to_save: Callable[[], None] = lambda: None
        driver.on_save_last = self.save_last

    # -- wishes -------------------------------------------------------------------------------

    def ask(self) -> SaveHandle:
        """Ask for a checkpoint of the step under way; several asks in a step are one."""
        handle = SaveHandle()
        handle._poll = self._wait_message
        handle._hurry = self._hurry
        driver = self._driver
        if not self.enabled:
            handle.ok = False
            handle.error = "the job has no checkpoint directory (checkpoint=)"
        elif driver.leaf is not None:
            driver.want_save = True
            self._asked.append(handle)
        elif driver.step == 0:
            handle.ok = False
            handle.error = "there is nothing to save before the first step"
        elif self.last_staged == driver.step:
            self._attach(handle)
        else:
            driver.want_save_last = True
            self._asked.append(handle)
        return handle

    @staticmethod
    def past(step: int) -> SaveHandle:
        """Answer a joiner that passes a place of the program where the others have saved."""
        handle = SaveHandle()
        handle.step, handle.ok = step, True
        return handle

    def _attach(self, handle: SaveHandle) -> None:
        """Answer for a step that was staged before."""
        step, key = self.last_staged, (self.last_staged, self._driver.agreed_generation)
        if self.last_committed >= step:
            handle.step, handle.ok = step, True
        else:
            self._unfinished.setdefault(key, []).append(handle)

    def _hurry(self, handle: SaveHandle) -> None:
        """Let a wait between steps not wait for a step that may never come."""
        if self._driver.leaf is not None:
            raise UserError(
                "wait() of ctx.save() was called inside the step that is to be saved; call it "
                "after the loop, or between epochs"
            )
        while handle in self._asked:
            self.agree_to_save()
            if handle in self._asked:  # no half of the arena is free yet, on all workers alike
                self._wait_message()

    def wish(self) -> bool:
        """Return True when this worker wants the step under way to be saved (by time, by retry)."""
        every_s = self._driver.config.save_every_s
        due = (
            every_s is not None
            and self._driver.rank == 0
            and time.monotonic() - self._last_time_s >= every_s
        )
        return self.enabled and (due or self._retry)

    def busy(self) -> bool:
        """Return True when no half of the arena is free."""
        self.take_messages()
        return len(self._busy) >= 2

    # -- staging ------------------------------------------------------------------------------

    def after_step(self, outcome: Outcome, step: int) -> None:
        """Stage the step if its agreement says so; called with all rows in place."""
        if not self.enabled:
            return
        every = self._driver.config.save_every_steps
        due = outcome.save or (every is not None and step % every == 0)
        if due:
            self._save(outcome, step)

    def save_last(self, outcome: Outcome) -> None:
        """Stage the step before the one that is agreed on, as asked for between the two."""
        if self.enabled and self.last_staged != self._driver.step:
            self._save(outcome, self._driver.step)

    def _save(self, outcome: Outcome, step: int) -> None:
        if outcome.busy:
            self._driver.events.emit(
                "checkpoint.skipped",
                step=step,
                reason="the previous checkpoints are still being written",
            )
            self._retry = True
            return
        self.stage(step)

    def stage(self, step: int) -> None:
        """Copy this worker's part of the state into its arena."""
        driver = self._driver
        assert driver.layout is not None
        driver.phase(WorkerPhase.SAVE)
        began_s = time.monotonic()
        mine = [s for s, who in enumerate(driver.placement) if who[0] == driver.worker_id]
        pieces = pieces_of(mine, driver.layout, driver.optimizers)
        total = sum(-(-len(data) // 64) * 64 for _, data in pieces)
        if self._arena is None:
            self._arena = Arena(self._arena_fd, total + _HALF_SLACK_BYTES)
        half = self._arena.stage(
            step=step,
            generation=driver.agreed_generation,
            pieces=pieces,
            extra=self._extras.to_dict(),
            segments=mine,
            num_segments=driver.layout.num_segments,
            lineage=driver.lineage,
        )
        blocked_ms = 1e3 * (time.monotonic() - began_s)
        self._retry = half is None
        if half is None:
            driver.events.emit(
                "checkpoint.skipped", step=step, reason="no half of the arena is free"
            )
            return
        self._busy.add(half)
        self._last_time_s = time.monotonic()
        self.last_staged = step
        key = (step, driver.agreed_generation)
        self._unfinished.setdefault(key, []).extend(self._asked)
        self._asked = []
        driver.events.emit(
            "checkpoint.staged", step=step, bytes=total, blocked_ms=blocked_ms, half=half
        )
        driver.control.send(
            t="staged",
            step=step,
            generation=driver.agreed_generation,
            half=half,
            bytes=total,
            segments=mine,
            num_segments=driver.layout.num_segments,
            lineage=driver.lineage,
        )

    def reshaped(self) -> None:
        """After a reshape, ask again for a checkpoint that may have lost a part."""
        if self._unfinished:
            self._retry = True

    # -- messages -----------------------------------------------------------------------------

    def take_messages(self) -> None:
        """Take what the agent said about arena halves and finished checkpoints."""
        for message in self._driver.control.take_messages():
            if message["t"] == "half_free":
                self._busy.discard(message["half"])
                if self._arena is not None:
                    self._arena.release(message["half"])
            elif message["t"] == "save_done":
                self._done(message)

    def _done(self, message: dict[str, Any]) -> None:
        step, generation = message["step"], message["generation"]
        if message["ok"]:
            self.last_committed = max(self.last_committed, step)
        handles = self._unfinished.pop((step, generation), [])
        for handle in handles:
            handle.step = step
            handle.ok = bool(message["ok"])
            handle.error = message.get("error")
        if message["ok"]:  # what was staged before it will not be needed any more
            for key in [k for k in self._unfinished if k[0] < step]:
                self._asked.extend(self._unfinished.pop(key))

    def _wait_message(self) -> None:
        self._driver.control.wait_change(0.05)
        self._driver.progress.beat()
        self.take_messages()
