"""The step protocol as one worker carries it out, between two calls of the user's iterator.

    begin -> (enter, body, leave) per leaf -> close: exchange, agree, apply, gather

A worker enters the agreement of step s only when it has all rows of s-1, has applied s-1 on every
segment it holds, holds the finished gradient of s for every segment it holds, and all copies that
heal the generation are complete (the gate). An agreement that completed anywhere is never taken
back: after a failure the ones behind take its result and apply it (elastic/step/reform.py).

Step s is committed, and only then published, when the agreement after it has completed.
This class holds the protocol state; it runs on the worker's main thread only.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from elastic.agent.progress import WorkerPhase
from elastic.errors import UserError
from elastic.step.agreement import (
    VOID,
    Outcome,
    Payload,
    Read,
    conclude,
    kind_of,
    pack_result,
)
from elastic.step.compute import StepCompute
from elastic.step.guard import checksums, difference
from elastic.step.layout import StateLayout
from elastic.step.optimizer import SegmentOptimizer, install_hyper
from elastic.step.position import Position, StepPlan
from elastic.step.process_group import GroupBroken
from elastic.step.recovery import Agreement
from elastic.step.scaling import apply_updates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic.agent.progress import ProgressPage
    from elastic.config import ElasticConfig
    from elastic.events import EventLog
    from elastic.membership.messages import World
    from elastic.step.balance import Balance
    from elastic.step.control import Control
    from elastic.step.exchange import Exchange
    from elastic.step.prepared import Prepared
    from elastic.step.process_group import Group, Task

BREAK_HINT = "end the loop on all workers with ctx.stop(), not with break"


@dataclass(slots=True)
class StepRecord:
    """What is published about a step once it is committed."""

    step: int
    epoch: int
    index: int
    generation: int
    outcome: Outcome
    started_at_s: float
    agreed_at_s: float
    lr: list[float]


def with_generation(lineage: list[list[int]], generation: int, step: int) -> list[list[int]]:
    """Return the lineage with a World in it that began from `step`; each is added once.

    A World counts from its first agreement: of one that nobody completes an agreement in, some
    workers may have been in it and others not.
    """
    if lineage and lineage[-1][0] >= generation:
        return lineage
    return [*lineage, [generation, step]]


class Driver:
    """One worker's side of the step protocol.

    Args:
        worker_id: this worker.
        config: the job's configuration.
        prepared: registry of the user's objects.
    """

    def __init__(  # noqa: PLR0913 - the parts of one worker, connected once
        self,
        *,
        worker_id: str,
        node: str,
        config: ElasticConfig,
        num_leaves: int,
        device: torch.device,
        prepared: Prepared,
        control: Control,
        progress: ProgressPage,
        events: EventLog,
    ) -> None:
        self.worker_id = worker_id
        self.node = node
        self.config = config
        self.num_leaves = num_leaves
        self.device = device
        self.prepared = prepared
        self.control = control
        self.progress = progress
        self.events = events
        # state
        self.layout: StateLayout | None = None
        self.optimizers: list[SegmentOptimizer] = []
        self.compute: StepCompute | None = None
        self.finished = torch.empty(0, dtype=torch.uint8)
        self.finished_constant = torch.empty(0, dtype=torch.uint8)
        self.initial_crc = ""
        # the world
        self.world: World | None = None
        self.group: Group | None = None
        self.exchange: Exchange | None = None
        self.rank = 0
        self.size = 1
        self.placement: tuple[tuple[str, ...], ...] = ()
        self.shares: tuple[range, ...] = ()
        self.balance: Balance | None = None
        self.fresh_times = False
        # the protocol
        self.fresh = True
        self.seq = 0
        self.step = 0
        self.agreement: Agreement | None = None
        self.outcome: Outcome | None = None
        self.row_steps: list[int] = []
        self.held: dict[int, int] = {}
        self.gradients: set[int] = set()
        self.gradient_step = 0
        self.healing: Task[int] | None = None
        self.heal_bytes = 0
        self.formed = False
        self.after_step_done = 0
        self.outcome_due = False  # of the last step, to be told to `on_outcome`
        self.settled = True  # False while a reshape is under way
        self.position = Position()
        self.stopping = False
        self.want_stop = False
        self.want_save = False
        self.want_save_last = False
        self.staged_step = 0  # last step that was staged; a joiner has it from the others
        self.saved_step = 0  # last step that is known to be durable
        self.on_save_last: Callable[[Outcome], None] = lambda _outcome: None
        self.on_saved: Callable[[Outcome], None] = lambda _outcome: None
        self.save_busy: Callable[[], bool] = lambda: False
        self.unclaimed: Callable[[], Sequence[str]] = lambda: ()
        self.refresh: Callable[[Sequence[str], Group], None] = lambda _names, _group: None
        self.on_outcome: Callable[[Outcome, int], None] = lambda _outcome, _step: None
        self.on_formed: Callable[[], None] = lambda: None
        self.on_evaluated: Callable[[Outcome], None] = lambda _outcome: None
        self.step_functions: list[Callable[[], None]] = []
        self.lineage: list[list[int]] = []
        self.agreed_generation = 0
        self.step_log: dict[str, float] = {}
        self.skipped = 0
        self.nonfinite_run = 0
        self.overlap = config.overlap
        self.split: dict[str, float] = {}
        # the step under way
        self.plan: StepPlan | None = None
        self.leaf: int | None = None
        self._unpublished: StepRecord | None = None

    # -- set-up -------------------------------------------------------------------------------

    def build_layout(self) -> None:
        """Move the prepared models into flat storage; called before the first step."""
        self.layout = StateLayout(
            self.prepared.named_models(),
            self.prepared.optimized_parameters(),
            splittable=self.prepared.splittable and self.config.segments != "parameter",
            num_segments=(
                self.config.segments if isinstance(self.config.segments, int) else 1 << 30
            ),
            device=self.device,
        )
        self.finished = torch.zeros_like(self.layout.flat)
        self.finished_constant = self.layout.canonical.clone()
        self.optimizers = [
            SegmentOptimizer(optimizer, self.layout, self.finished)
            for optimizer in self.prepared.optimizers
        ]
        if self.compute is not None:
            self.compute.tap.remove()
        self.compute = StepCompute(self, self.layout)
        self.row_steps = [0] * self.layout.num_segments
        self.held.clear()
        self.gradients.clear()
        self.initial_crc = self.layout.crc()

    @property
    def generation(self) -> int:
        """Number of the World this worker is in, 0 before the first."""
        return 0 if self.world is None else self.world.generation

    def phase(self, phase: WorkerPhase) -> None:
        """Publish on the progress page what this worker does now."""
        self.progress.write(
            phase=phase,
            step=self.step + 1,
            committed=self.committed,
            generation=self.generation,
        )

    @property
    def committed(self) -> int:
        """Last committed step known here."""
        return self.step if self._unpublished is None else self._unpublished.step - 1

    def check_alive(self) -> None:
        """Raise GroupBroken if the generation is over; cheap, called between micro-batches."""
        if self.group is not None and self.group.is_cut:
            raise GroupBroken("a newer World was announced")

    # -- the leaves ---------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Start computing a step from its first leaf."""
        assert self.compute is not None
        self._check_agreed()
        self.check_alive()
        self._rebalance()
        self.plan = plan
        self.compute.begin(plan)
        self.phase(WorkerPhase.COMPUTE)

    def _rebalance(self) -> None:
        """Share micro-batches out anew if the agreed times of the last steps call for it."""
        outcome, exchange = self.outcome, self.exchange
        if not (self.config.balance and self.fresh_times and outcome is not None):
            return
        self.fresh_times = False
        assert exchange is not None
        assert self.balance is not None
        each = self.config.accumulate
        counts = [len(share) // each for share in self.shares]
        self.balance.observe(outcome.seconds, counts)
        wanted = self.balance.decide(counts)
        if wanted is None:
            return
        starts = [sum(wanted[:rank]) * each for rank in range(self.size + 1)]
        self.shares = tuple(range(a, b) for a, b in pairwise(starts))
        exchange.share_out(self.shares)
        if self.rank == 0:
            self.events.emit("shares.changed", counts=wanted, before=counts)

    def leaves(self) -> range:
        """Return this worker's leaves of the step under way."""
        assert self.compute is not None
        return self.compute.leaves()

    def enter(self, leaf: int) -> None:
        """Prepare the body of one micro-batch."""
        assert self.compute is not None
        self.check_alive()
        self.progress.beat()
        self.leaf = leaf
        self.compute.enter(leaf)

    def leave(self, leaf: int) -> None:
        """Take the gradient and the records of one micro-batch."""
        assert self.compute is not None
        self.leaf = None
        self.compute.leave(leaf)

    def note_read(
        self, loader: int, epoch: int, index: int, samples: int, digest: int | None
    ) -> None:
        """Take note of what the body of the running micro-batch gets from a loader."""
        if self.compute is not None:
            self.compute.reads.append(Read(loader, epoch, index, samples, digest))

    def abandon(self) -> None:
        """Leave the step under way, because its generation is over."""
        if self.compute is not None:
            self.compute.abandon()

    # -- closing a step -------------------------------------------------------------------------

    def close(self) -> None:
        """Complete the step under way on all workers: exchange, agree, apply, gather."""
        assert self.plan is not None
        assert self.compute is not None
        plan, compute = self.plan, self.compute
        computed_at_s = time.monotonic()
        self.phase(WorkerPhase.EXCHANGE)
        self.check_alive()
        compute.finish()
        self.finish_healing()
        self.gradients = {s for s, who in enumerate(self.placement) if self.worker_id in who}
        self.gradient_step = plan.step
        exchanged_at_s = time.monotonic()
        payload = Payload(
            norms=compute.norms(),
            touched=compute.fold.touched,
            leaves=compute.records,
            hyper=compute.hyper,
            scheduler_calls=compute.scheduler_calls,
            scaler_updates=compute.scaler_updates,
            clip=compute.clip,
            pending_generation=self._known_generation(),
            stop=self.want_stop or self.control.stop_requested,
            save=self.want_save or self.control.take_save_request(),
            save_last=self.want_save_last,
            busy=self.save_busy(),
            guard=checksums(self, plan.step),
            seconds=compute.seconds,
            unclaimed=self.unclaimed(),
        )
        self.fresh_times = False
        self.agree(VOID if compute.changed else "step", plan.step, payload)
        if self.step < plan.step:
            return  # void: to be computed again
        self.fresh_times = plan.present == self.num_leaves
        agreed_at_s = time.monotonic()
        self.phase(WorkerPhase.GATHER)
        self.gather()
        self.after_step()
        self.split = {
            "compute_ms": 1e3 * (computed_at_s - compute.started_at_s),
            "exchange_ms": 1e3 * (exchanged_at_s - computed_at_s),
            "agree_apply_ms": 1e3 * (agreed_at_s - exchanged_at_s),
            "gather_ms": 1e3 * (time.monotonic() - agreed_at_s),
        }
        self._check_agreed()

    def _check_agreed(self) -> None:
        """Raise, on all workers alike, if the last step showed that going on makes no sense."""
        if self.outcome is not None and self.outcome.unequal:
            raise difference(self.outcome.unequal, self.step)
        most = self.config.max_nonfinite_steps
        if most and self.nonfinite_run >= most:
            raise UserError(
                f"the gradient was not finite in {most} steps one after the other, up to step "
                f"{self.step - 1}; lower the learning rate, clip, or look at the data "
                "(max_nonfinite_steps sets how many are borne)"
            )

    def gather(self) -> None:
        """Fetch the rows of the applied step that this worker does not hold."""
        assert self.exchange is not None

        def arrived(first: int, last: int) -> None:
            for segment in range(first, last):
                self.row_steps[segment] = self.step

        assert self.group is not None
        exchange = self.exchange
        self.group.run(lambda: exchange.gather(arrived))
        assert all(s == self.step for s in self.row_steps), "rows of two steps are mixed"

    def after_step(self) -> None:
        """Run what happens once per applied step, when all rows are in place."""
        self.run_step_functions()
        if self.outcome is not None and self.outcome.behind:
            assert self.group is not None
            self.refresh(self.outcome.behind, self.group)
        self.tell_outcome()

    def run_step_functions(self) -> None:
        """Run the user's functions of an applied step; after that its global state is whole."""
        assert self.layout is not None
        if self.after_step_done >= self.step or self.outcome is None:
            return
        self.after_step_done = self.step
        self.layout.install_constants()
        self.plan = None
        for function in self.step_functions:
            function()
        self.outcome_due = True

    def tell_outcome(self) -> None:
        """Save the last step, if its agreement says so and it was not done yet."""
        if self.outcome_due and self.outcome is not None:
            self.outcome_due = False
            self.on_outcome(self.outcome, self.step)

    def finish_healing(self) -> None:
        """Complete the copies that heal this generation; part of the gate of every agreement."""
        assert self.group is not None
        if self.healing is None:
            return
        self.heal_bytes = self.group.finish(self.healing)
        # A copy counts as soon as it is whole. Nobody may drop or change what it was made from
        # before the agreement that every holder enters with its copies complete.
        mine = {s for s, who in enumerate(self.placement) if self.worker_id in who}
        self.held.update(dict.fromkeys(mine - self.held.keys(), self.step))
        self.healing = None

    def _known_generation(self) -> int:
        world = self.control.newest_world()
        return 0 if world is None else world.generation

    # -- agreements -----------------------------------------------------------------------------

    def agree(self, kind: str, step: int, payload: Payload) -> Outcome:
        """Enter the next agreement; returns what all workers conclude from it."""
        assert self.group is not None
        self.finish_healing()
        self.phase(WorkerPhase.AGREE)
        seq = self.seq + 1
        payloads = self.group.gather_bytes(payload.encode(seq, kind, step))
        self.complete(
            Agreement(
                seq=seq,
                kind=kind_of(payloads, kind),
                step=step,
                generation=self.generation,
                result=pack_result(payloads),
            )
        )
        assert self.outcome is not None
        return self.outcome

    def complete(self, agreement: Agreement) -> None:
        """Take the result of an agreement: confirm copies, apply, note what may be published.

        Never fails half-way for a reason outside this process: a worker that dies here is dead.
        """
        outcome = conclude(agreement)
        self._publish()
        begun = agreement.step - 1 if agreement.kind in ("step", VOID) else agreement.step
        self.lineage = with_generation(self.lineage, agreement.generation, begun)
        self.agreement = agreement
        self.seq = agreement.seq
        self.outcome = outcome
        if outcome.saved:
            self.on_saved(outcome)
        elif outcome.save_last and agreement.generation == self.generation:
            self.on_save_last(outcome)
        if agreement.kind in ("step", "save"):
            self.want_save_last = False
        if agreement.kind == "step":
            self.phase(WorkerPhase.APPLY)
            self._apply(outcome, agreement)
        elif agreement.kind == VOID:
            self.gradients = set()
            self.overlap = False  # the loop body changes gradients: do not take them early again
        elif agreement.kind == "close":
            self.position = self.position.after_close()
        elif agreement.kind == "evaluate":
            self.on_evaluated(outcome)
        if outcome.stop and agreement.kind != VOID:
            self.stopping = True
        if agreement.generation == self.generation and not self.formed:
            self.formed = True
            self._drop_moved()
            self.on_formed()

    def _drop_moved(self) -> None:
        mine = {s for s, who in enumerate(self.placement) if self.worker_id in who}
        for segment in [s for s in self.held if s not in mine]:
            del self.held[segment]
        self._hold(mine)

    def _hold(self, segments: set[int]) -> None:
        assert self.layout is not None
        trainable = [s for s in segments if s < self.layout.num_trainable]
        for optimizer in self.optimizers:
            optimizer.hold(trainable)

    def _apply(self, outcome: Outcome, agreement: Agreement) -> None:
        assert self.layout is not None
        step = agreement.step
        targets = [s for s in self.held if s in self.gradients]
        trainable = [s for s in targets if s < self.layout.num_trainable]
        if outcome.hyper is not None:
            install_hyper(self.prepared.optimizers, outcome.hyper)
        lr = [g["lr"] for o in self.prepared.optimizers for g in o.param_groups if "lr" in g]
        if outcome.finite:
            coefficient = outcome.clip_coefficient
            if coefficient is not None:
                spans = [span for s in trainable for span in self.layout.segment_spans[s]]
                if spans:
                    torch._foreach_mul_(
                        [self.finished[s.lo : s.hi].view(s.dtype) for s in spans], coefficient
                    )
            for optimizer in self.optimizers:
                optimizer.step(trainable, outcome.touched)
            self.nonfinite_run = 0
        else:
            self.skipped += 1
            self.nonfinite_run += 1
        apply_updates(self.prepared.scalers, outcome.scaler_updates, finite=outcome.finite)
        self.prepared.virtual.apply(outcome.states)
        if self.layout.num_trainable in targets:
            self.layout.canonical.copy_(self.finished_constant)
        self.prepared.apply_scheduler_calls(dict(outcome.scheduler_calls))
        for segment in targets:
            self.held[segment] = step
            self.row_steps[segment] = step
        for segment in [s for s in self.held if s not in self.gradients]:
            del self.held[segment]  # moved away in this generation, and its copy is confirmed
        self.gradients = set()
        self.step = step
        self.progress.write(phase=self.progress.last.phase, done=self.progress.last.done + 1)
        self.step_log = dict(outcome.log)
        self.agreed_generation = agreement.generation
        self.position = self.position.after_step()
        self.want_stop = False
        self.want_save = False
        self._unpublished = StepRecord(
            step=step,
            epoch=self.position.epoch,
            index=self.position.index - 1,
            generation=agreement.generation,
            outcome=outcome,
            started_at_s=0.0 if self.compute is None else self.compute.started_at_s,
            agreed_at_s=time.monotonic(),
            lr=[float(v) for v in lr],
        )

    # -- publishing -----------------------------------------------------------------------------

    def _publish(self) -> None:
        """Make the step that is committed by now visible outside."""
        record, self._unpublished = self._unpublished, None
        if record is None:
            return
        if not record.outcome.finite:
            self.events.emit("step.skipped", step=record.step, reason="the gradient is not finite")
        self.events.emit(
            "step.committed",
            step=record.step,
            epoch=record.epoch,
            log=dict(record.outcome.log),
            duration_s=record.agreed_at_s - record.started_at_s,
            samples=record.outcome.samples,
            lr=record.lr,
            grad_norm=record.outcome.norm,
            index=record.index,
            split=self.split,
            reads=[read.plain() for read in record.outcome.reads],
        )
        self.on_committed(record)

    on_committed: Callable[[StepRecord], None] = staticmethod(lambda _record: None)

    # -- ending ---------------------------------------------------------------------------------

    def leave_process(self, code: int) -> None:
        """End this process at once, after the event log is written out."""
        self.events.close()
        os._exit(code)

    def rank_of(self) -> Mapping[str, int]:
        """Return the rank of every worker of the World."""
        assert self.world is not None
        return {ref.worker_id: rank for rank, ref in enumerate(self.world.workers)}
