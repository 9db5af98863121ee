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
from elastic.step.driver import with_generation
from elastic.step.saving import pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic.step.agreement import Outcome
    from elastic.step.driver import Driver
    from elastic.step.extras import Extras

_HALF_SLACK_BYTES = 1 << 20
_WAITS_KEPT = 1000


class SaveHandle:
    """A request for a checkpoint, answered when it is durable.

    `wait` inside a step is refused: the step has to end before anything is saved. Between steps all
    workers have to call it alike, as they call `ctx.evaluate`, and all get the same answer.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.ok: bool | None = None
        self.error: str | None = None
        self._wait: Callable[[SaveHandle, float], None] | None = None

    @property
    def done(self) -> bool:
        """True once the checkpoint is committed or has failed."""
        return self.ok is not None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the checkpoint is committed; False when it failed or time ran out.

        Time has run out for all workers when it has for one of them. When the World changes
        meanwhile, what was lost of the checkpoint is saved again.
        """
        if self._wait is not None:
            self._wait(self, math.inf if timeout_s is None else time.monotonic() + timeout_s)
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
        self._staged_as = 0
        self._staged_in = 0  # the World in which `staged_step` was staged by this worker
        self._waiting: SaveHandle | None = None
        self._deadline_s = math.inf
        self._waits_at: tuple[int, int] = (-2, 0)
        self.agree_to_save: Callable[[], None] = lambda: None
        self.place: Callable[[], int] = lambda: 0
        driver.on_save_last = self.save_last
        driver.on_saved = self._saved

    # -- wishes -------------------------------------------------------------------------------

    def ask(self) -> SaveHandle:
        """Ask for a checkpoint of the step under way; several asks in a step are one."""
        handle = SaveHandle()
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
        elif driver.staged_step == driver.step:
            self._attach(handle)
        else:
            driver.want_save_last = True
            self._asked.append(handle)
        if handle.ok is not False:
            handle._wait = self._wait
        return handle

    @staticmethod
    def past(step: int) -> SaveHandle:
        """Answer a joiner that passes a place of the program where the others have saved."""
        handle = SaveHandle()
        handle.step, handle.ok = step, True
        return handle

    def _attach(self, handle: SaveHandle) -> None:
        """Answer for a step that was staged before."""
        step = self._driver.staged_step
        if self._driver.saved_step >= step:
            handle.step, handle.ok = step, True
        else:
            self._unfinished.setdefault((step, self._staged_as), []).append(handle)

    # -- waiting ------------------------------------------------------------------------------

    def _wait(self, handle: SaveHandle, deadline_s: float) -> None:
        """Wait with all other workers until one of them knows how the save has ended.

        Each of them may hear of it at another moment, or die, or come in meanwhile: so it is
        agreed on, again and again. A joiner is answered with waits that were over before.
        """
        driver = self._driver
        if driver.leaf is not None:
            raise UserError(
                "wait() of ctx.save() was called inside the step that is to be saved; call it "
                "after the loop, or between epochs"
            )
        place = self.place()
        at, ordinal = self._waits_at
        self._waits_at = (place, ordinal + 1 if at == place else 0)
        self._waiting, self._deadline_s = handle, deadline_s
        while (record := self._record()) is None:
            self.take_messages()
            if not any(self.awaited()) or len(self._busy) >= 2:
                self._wait_message()
            self.agree_to_save()
        self._waiting = None
        handle.ok = record["ok"]
        handle.step = record["saved"] if record["ok"] else handle.step
        if not record["ok"] and handle.error is None:
            handle.error = "the save failed, or the time to wait for it was over, on some worker"

    def awaited(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the last step is to be staged (again), and how the save has ended."""
        handle, driver = self._waiting, self._driver
        if handle is None:
            return driver.want_save_last, {}
        key = next((k for k, handles in self._unfinished.items() if handle in handles), None)
        if handle.ok is None and key is not None and driver.saved_step >= key[0]:
            handle.step, handle.ok = driver.saved_step, True
        if handle.ok is not None:
            return False, {"ok": handle.ok, "step": handle.step}
        if time.monotonic() >= self._deadline_s:
            return False, {"ok": False, "step": None}
        # A part of what was staged in an earlier World may be lost with who had it.
        return key is None or self._staged_in != driver.generation, {}

    def _saved(self, outcome: Outcome) -> None:
        """Keep how the wait has ended: a joiner may come in right after it."""
        place, ordinal = self._waits_at
        ended = {"place": place, "ordinal": ordinal, "ok": outcome.saved["ok"]}
        ended["saved"] = outcome.saved["step"]
        self._extras.waits = [*self._extras.waits, ended][-_WAITS_KEPT:]

    def _record(self) -> dict[str, Any] | None:
        place, ordinal = self._waits_at
        return next(
            (
                past
                for past in self._extras.waits
                if past["place"] == place and past["ordinal"] == ordinal
            ),
            None,
        )

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
        if due and self._driver.settled:
            self._save(outcome, step, self._driver.generation)
        elif due:
            # In a reshape: a joiner knows nothing of it, others may have staged the step already.
            # All stage it anew at one agreement, so that their parts are of one moment.
            self._driver.want_save_last = True

    def save_last(self, outcome: Outcome) -> None:
        """Stage the step before the one that is agreed on, as asked for between the two."""
        driver = self._driver
        if self.enabled and (driver.staged_step, self._staged_in) != (
            driver.step,
            driver.generation,
        ):
            self._save(outcome, driver.step, driver.generation)

    def save_at_end(self) -> None:
        """Stage the last step on all workers alike, if it is not; called by all of them."""
        driver = self._driver
        while True:
            here = (driver.staged_step, self._staged_in) == (driver.step, driver.generation)
            driver.want_save_last = not here and driver.saved_step < driver.step
            self.agree_to_save()
            outcome = driver.outcome
            if outcome is None or not (outcome.save_last and outcome.busy):
                return
            self._wait_message()  # for a half of the arena

    def _save(self, outcome: Outcome, step: int, generation: int) -> None:
        if outcome.busy:
            self._driver.events.emit(
                "checkpoint.skipped",
                step=step,
                reason="the previous checkpoints are still being written",
            )
            self._retry = True
            return
        self.stage(step, generation)

    def stage(self, step: int, generation: int) -> None:
        """Copy this worker's part of the state into its arena.

        Args:
            step: the last step.
            generation: that agreed on the step, or on saving it.

        Raises GroupBroken when copies that heal this World, and are part of it, do not arrive.
        """
        driver = self._driver
        assert driver.layout is not None
        driver.finish_healing()
        driver.phase(WorkerPhase.SAVE)
        began_s = time.monotonic()
        mine = [s for s, who in enumerate(driver.placement) if who[0] == driver.worker_id]
        pieces = pieces_of(mine, driver.layout, driver.optimizers)
        total = sum(-(-len(data) // 64) * 64 for _, data in pieces)
        if self._arena is None:
            self._arena = Arena(self._arena_fd, total + _HALF_SLACK_BYTES)
        # A step may be staged before the first agreement of the World that it is staged in.
        lineage = with_generation(driver.lineage, driver.generation, step)
        half = self._arena.stage(
            step=step,
            generation=generation,
            pieces=pieces,
            extra=self._extras.to_dict(),
            segments=mine,
            num_segments=driver.layout.num_segments,
            lineage=lineage,
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
        driver.staged_step, self._staged_in, self._staged_as = step, driver.generation, generation
        handles = self._asked
        for key in [k for k in self._unfinished if k[0] == step]:  # an earlier try, in vain
            handles.extend(self._unfinished.pop(key))
        self._unfinished[step, generation] = handles
        self._asked = []
        driver.events.emit(
            "checkpoint.staged", step=step, bytes=total, blocked_ms=blocked_ms, half=half
        )
        if driver.committed >= step:
            self.step_committed(step)
        driver.control.send(
            t="staged",
            step=step,
            generation=generation,
            half=half,
            bytes=total,
            segments=mine,
            num_segments=driver.layout.num_segments,
            lineage=lineage,
        )

    def step_committed(self, step: int) -> None:
        """Tell the agent, if this step was staged under another World than agreed on it."""
        driver = self._driver
        if step == driver.staged_step and self._staged_as != driver.agreed_generation:
            driver.control.send(t="committed", step=step, generation=self._staged_as)

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
            self._driver.saved_step = max(self._driver.saved_step, step)
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
