"""The iterators that drive the step: a prepared loader, `ctx.epochs`, `ctx.steps`.

They are generators: the body of the user's loop runs while they are suspended, and asking them for
more is what closes a step. When the World changes, they yield the micro-batches of the step
again, newly shared out; user code needs no `try`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic.agent.progress import WorkerPhase
from elastic.errors import UserError
from elastic.step.agreement import Payload
from elastic.step.driver import BREAK_HINT
from elastic.step.position import StepPlan
from elastic.step.process_group import GroupBroken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic.data import MicroBatches
    from elastic.step.checkpoints import Checkpoints
    from elastic.step.driver import Driver
    from elastic.step.reform import Reformer


class Engine:
    """Runs steps, closing agreements and evaluations through every reshape.

    `sync` is called before the first collective: it builds the state and enters a World.
    """

    def __init__(
        self,
        driver: Driver,
        reformer: Reformer,
        checkpoints: Checkpoints,
    ) -> None:
        self.driver = driver
        self.reformer = reformer
        self.checkpoints = checkpoints
        checkpoints.agree_to_save = self.agree_to_save
        checkpoints.place = lambda: self.program_step
        self.sync: Callable[[], None] = lambda: None
        self.epochs_total: int | None = None
        self._told_total: int | None = None
        self.active: str | None = None
        self.on_reshape: list[Callable[[], None]] = []
        self._open_step: int | None = None
        # Where the program stands, in steps: -1 before its first loop. A joiner or a resumed
        # worker passes loops that are over; what it evaluates there was evaluated before.
        self.program_step = -1

    # -- one step ---------------------------------------------------------------------------

    def steps(
        self,
        next_plan: Callable[[], StepPlan | None],
        fetch: Callable[[StepPlan, int], Any],
        on_begin: Callable[[StepPlan], None] = lambda _plan: None,
    ) -> Iterator[Any]:
        """Yield the micro-batches of one step after the other until `next_plan` says None."""
        driver = self.driver
        while True:
            plan = None if driver.stopping else next_plan()
            if plan is None:
                return
            try:
                driver.begin(plan)
                self.reformer.tell_unclaimed()
                on_begin(plan)
                for leaf in driver.leaves():
                    driver.enter(leaf)
                    self._open_step = plan.step
                    yield fetch(plan, leaf)
                    self._open_step = None
                    driver.leave(leaf)
                driver.want_save = driver.want_save or self.checkpoints.wish()
                driver.close()
                if driver.step < plan.step:
                    driver.events.emit("step.redone", step=plan.step)
                self._boundary()
                self.program_step = driver.step
                driver.phase(WorkerPhase.BETWEEN)
            except GroupBroken as reason:
                self.reform(reason)
                self.program_step = driver.step
                if driver.step < plan.step:
                    driver.events.emit("step.redone", step=plan.step)

    def check_not_in_step(self, what: str) -> None:
        """Raise UserError when the body of a step was left by `break`."""
        if self._open_step is not None:
            raise UserError(
                f"{what} was reached inside step {self._open_step - 1}: the loop was left in "
                f"mid-step; {BREAK_HINT}"
            )

    def _boundary(self) -> None:
        """Move into an announced World if the last agreement says that everybody knows it."""
        driver = self.driver
        if driver.outcome is not None and driver.outcome.next_generation > driver.generation:
            self.reform(None)

    def reform(self, reason: GroupBroken | None) -> None:
        """Come back in the next World and tell whoever asked to be told."""
        self.driver.prepared.recorder.close()
        self.driver.abandon()
        self._open_step = None
        self.reformer.reform(reason)
        self.checkpoints.reshaped()
        for function in self.on_reshape:
            function()

    # -- agreements that are not steps -------------------------------------------------------

    def agree(self, kind: str, payload: Callable[[], Payload]) -> None:
        """Complete one agreement on all workers, whatever happens in between."""
        driver = self.driver
        wanted = driver.seq + 1
        while driver.seq < wanted:
            try:
                driver.check_alive()
                driver.agree(kind, driver.step, payload())
            except GroupBroken as reason:
                self.reform(reason)
                continue
            self._boundary()

    def close_agreement(self, *, at_end: bool) -> None:
        """Commit the last step before an iterator ends.

        Args:
            at_end: the loop has done all its steps; otherwise it was stopped, and what is left of
                it is done when the job is resumed.
        """
        self.agree("close" if at_end else "halt", self._plain_payload)
        self.driver.phase(WorkerPhase.BETWEEN)

    def agree_to_save(self) -> None:
        """Save the last step now, and see whether it is durable; all workers wait for that."""
        self.agree("save", self._save_payload)

    def _save_payload(self) -> Payload:
        busy = self.checkpoints.busy()
        save_last, saved = self.checkpoints.awaited()
        return replace(self._plain_payload(), save_last=save_last, saved=saved, busy=busy)

    def _plain_payload(self) -> Payload:
        driver = self.driver
        world = driver.control.newest_world()
        return Payload(
            pending_generation=0 if world is None else world.generation,
            stop=driver.control.stop_requested,
        )

    # -- epochs -----------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs that are left of `total`."""
        self.check_not_in_step("ctx.epochs")
        self.sync()
        driver = self.driver
        self.epochs_total = total
        while driver.position.epoch < total and not driver.stopping:
            epoch = driver.position.epoch
            yield epoch
            self.check_not_in_step("the end of an epoch")
            if driver.position.epoch == epoch and not self._halted():
                driver.position = driver.position.next_epoch()
        self.epochs_total = None

    def epoch_of(self, source: MicroBatches) -> Iterator[Any]:
        """Yield this worker's micro-batches of the running epoch, closing each step."""
        self.check_not_in_step("the loader's loop")
        self.sync()
        driver = self.driver

        def next_plan() -> StepPlan | None:
            position = driver.position
            if position.closed or position.index >= source.steps_per_epoch:
                return None
            return StepPlan(
                step=driver.step + 1,
                epoch=position.epoch,
                index=position.index,
                counts=tuple(source.counts(position.epoch, position.index)),
                full=source.batch_size,
            )

        def fetch(plan: StepPlan, leaf: int) -> Any:
            return source.fetch(plan.epoch, plan.index, leaf)

        self.program_step = driver.step
        if self.epochs_total is not None:
            left = (self.epochs_total - driver.position.epoch) * source.steps_per_epoch
            self._tell_total(driver.step + left - driver.position.index)
        yield from self.steps(next_plan, fetch, self._prefetch_from(lambda: source))
        if not driver.position.closed:
            self.close_agreement(at_end=driver.position.index >= source.steps_per_epoch)

    def _prefetch_from(
        self, source: Callable[[], MicroBatches | None]
    ) -> Callable[[StepPlan], None]:
        """Return what lets loader processes work ahead, anew for each epoch and World."""
        current: list[tuple[int, int, range]] = []

        def begin(plan: StepPlan) -> None:
            key = (self.driver.generation, plan.epoch, self._my_leaves())
            batches = source()
            if batches is not None and current != [key]:
                current[:] = [key]
                batches.prefetch(plan.epoch, plan.index, lambda _index: self._my_leaves())

        return begin

    def _tell_total(self, total: int) -> None:
        """Let those who show progress know where the loop ends; early ends are not foreseen."""
        if total != self._told_total:
            self._told_total = total
            self.driver.events.emit("run.planned", total_steps=total)

    def _halted(self) -> bool:
        """Whether the running epoch was left by ctx.stop() or the operator before its end."""
        return self.driver.stopping and not self.driver.position.closed

    def _my_leaves(self) -> range:
        return self.driver.shares[self.driver.rank]

    # -- steps ------------------------------------------------------------------------------

    def count_steps(self, total: int, source: Callable[[], MicroBatches | None]) -> Iterator[int]:
        """Yield the index of each step that is left of `total`, once per micro-batch."""
        self.check_not_in_step("ctx.steps")
        self.sync()
        driver = self.driver

        def next_plan() -> StepPlan | None:
            if driver.step >= total:
                return None
            batches = source()
            if batches is None:
                counts, full, epoch, index = (1,) * driver.num_leaves, 1, 0, driver.step
            else:
                epoch, index = divmod(driver.step, batches.steps_per_epoch)
                counts, full = tuple(batches.counts(epoch, index)), batches.batch_size
            return StepPlan(
                step=driver.step + 1, epoch=epoch, index=index, counts=counts, full=full
            )

        self.program_step = min(driver.step, total)
        self._tell_total(total)
        yield from self.steps(
            next_plan, lambda plan, _leaf: plan.step - 1, self._prefetch_from(source)
        )
        ended = driver.step == total or driver.stopping  # a joiner may be past this loop
        if ended and driver.step > 0 and not driver.position.closed:
            self.close_agreement(at_end=driver.step >= total)
