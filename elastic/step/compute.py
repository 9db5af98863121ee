"""The micro-batches of one step on one worker, up to the finished gradients of what it holds.

    begin -> (enter, body, leave) per leaf -> finish

The gradients of the worker's last micro-batch are taken while its backward runs (see
elastic/step/tap.py), and leave for their primaries bucket by bucket meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from elastic.errors import UserError
from elastic.rng import seed_everything
from elastic.step.agreement import LeafRecord, Read
from elastic.step.gradients import LeafFold
from elastic.step.process_group import GroupBroken
from elastic.step.tap import GradientTap

if TYPE_CHECKING:
    import torch

    from elastic.step.driver import Driver
    from elastic.step.layout import StateLayout
    from elastic.step.position import StepPlan
    from elastic.step.process_group import Task
    from elastic.step.reduction import Bucket, Reduction


class StepCompute:
    """What a worker has of the step under way.

    Args:
        driver: whose step.
        layout: where gradients lie.
    """

    def __init__(self, driver: Driver, layout: StateLayout) -> None:
        self._driver = driver
        self._layout = layout
        self._recorder = driver.prepared.recorder
        self.fold = LeafFold(layout)
        self.tap = GradientTap(layout, self.fold)
        self._verified = False
        self._plan: StepPlan | None = None
        self._reduction: Reduction | None = None
        self._task: Task[None] | None = None
        self.started_at_s = 0.0
        self.seconds = 0.0
        self._entered_at_s = 0.0
        self.records: dict[int, LeafRecord] = {}
        self.reads: list[Read] = []
        self.hyper: list[Any] | None = None
        self.scheduler_calls: dict[int, int] | None = None
        self.scaler_updates: list[int] | None = None
        self.clip: float | None = None
        self._constant: torch.Tensor | None = None

    @property
    def changed(self) -> bool:
        """True when gradients were changed after they were taken: the step must not count."""
        return self.tap.changed

    def begin(self, plan: StepPlan) -> None:
        """Start a step."""
        driver = self._driver
        assert self._task is None, "the transfers of a step were left running"
        assert driver.exchange is not None
        self._plan = plan
        self.records = {}
        self.hyper = None
        self.scheduler_calls = None
        self.scaler_updates = None
        self.clip = None
        self._constant = None
        self.tap.changed = False
        self.tap.broken = None
        self.started_at_s = time.monotonic()
        self.seconds = 0.0
        share = driver.shares[driver.rank]
        self.fold.begin(share.start, share.stop, driver.num_leaves, plan.present)
        self._reduction = driver.exchange.reduction(plan.present, plan.total_weight)

    def leaves(self) -> range:
        """Return this worker's leaves of the step under way."""
        assert self._plan is not None
        share = self._driver.shares[self._driver.rank]
        return range(share.start, max(share.start, min(share.stop, self._plan.present)))

    def enter(self, leaf: int) -> None:
        """Prepare the body of one micro-batch: random state, buffers, recorder, tap."""
        driver, plan = self._driver, self._plan
        assert plan is not None
        assert driver.exchange is not None
        self._entered_at_s = time.monotonic()
        self._layout.restore_buffers()
        driver.prepared.virtual.enter(leaf)
        seed_everything(driver.config.seed, plan.step, leaf)
        self.reads = []
        self._recorder.open()
        self._recorder.wants_hyper = leaf == 0
        scaled = any(scaler.is_enabled() for scaler in driver.prepared.scalers)
        taps = driver.overlap and plan.weight(leaf) == 1.0 and not scaled
        if taps and leaf == self.leaves()[-1] and driver.size > 1:
            self._start()
            self.fold.open(leaf, driver.exchange.watch, self._send)
        else:
            self.fold.open(leaf)
        if taps:
            every = driver.config.guard_every
            self.tap.open(verify=not self._verified or bool(every and plan.step % every == 0))
            self._verified = True

    def leave(self, leaf: int) -> None:
        """Take the gradient and the records of one micro-batch."""
        driver, plan, recorder = self._driver, self._plan, self._recorder
        assert plan is not None
        recorder.close()
        if recorder.stepped != set(range(len(driver.prepared.optimizers))):
            raise UserError(
                f"the loop body of step {plan.step - 1} did not call optimizer.step(); it is "
                "called for every micro-batch here: use virtual_ranks or accumulate= for larger "
                "batches, and ctx.evaluate for loops that do not train"
            )
        gradients: list[torch.Tensor | None] = [None] * len(self._layout.trainable)
        for index, found in recorder.gradients.items():
            flat = iter(found)
            for group in driver.prepared.optimizers[index].param_groups:
                for parameter in group["params"]:
                    gradients[self._layout.index_of[id(parameter)]] = next(flat)
        self.tap.close(gradients)
        self.fold.close(gradients, plan.weight(leaf))
        self.records[leaf] = LeafRecord(
            samples=plan.counts[leaf],
            log=dict(recorder.log),
            state=driver.prepared.virtual.leave(leaf),
            reads=self.reads,
        )
        self.seconds += time.monotonic() - self._entered_at_s
        if leaf == 0:
            self.hyper = recorder.hyper
            self.scheduler_calls = recorder.scheduler_calls
            self.scaler_updates = recorder.scaler_updates
            self.clip = recorder.clip
            if self._layout.has_buffers:
                self._layout.reclaim_buffers()
                self._constant = self._layout.live.clone()

    def finish(self) -> None:
        """Complete the transfers; then `finished` has the gradient of every held segment."""
        driver = self._driver
        assert self._reduction is not None
        assert driver.group is not None
        if self.tap.broken is not None:
            raise self.tap.broken
        if driver.size > 1:
            self._start()
        self._reduction.finish(self.fold.nodes(), self._constant)
        if driver.size == 1:
            self._reduction.run()
            return
        assert self._task is not None
        driver.group.finish(self._task)
        self._task = None

    def norms(self) -> dict[int, float]:
        """Return the squared 2-norm of each finished segment that this worker is primary of."""
        assert self._reduction is not None
        return self._reduction.norms

    def abandon(self) -> None:
        """Leave the transfers of a broken step; nothing of them runs on when this returns."""
        task, self._task = self._task, None
        if task is not None and self._driver.group is not None:
            self._driver.group.cut()
            with contextlib.suppress(GroupBroken):
                self._driver.group.finish(task)

    def _start(self) -> None:
        """Let the group's thread post receives and finish what is complete."""
        if self._task is None:
            assert self._driver.group is not None
            assert self._reduction is not None
            self._task = self._driver.group.start(self._reduction.run)

    def _send(self, bucket: Bucket) -> None:
        assert self._reduction is not None
        if self.tap.broken is None:
            self._reduction.send(bucket, self.fold.nodes())
