"""From one World to the next, in place: new group, inventories, plan, transfers.

Every survivor and joiner sends an inventory of what it has over the new group and computes the
same plan from all of them (elastic/step/recovery.py). There is no undo: workers that missed the
newest agreement take its result and apply it, then missing rows are fetched and new holders are
filled. Any failure on the way is answered by the next World, from the beginning, with inventories
as they are then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

import ckpt
from elastic.agent.progress import WorkerPhase
from elastic.errors import Fenced, Misconfigured
from elastic.step.agreement import behind
from elastic.step.balance import Balance
from elastic.step.bootstrap_client import BootstrapStore
from elastic.step.exchange import Exchange
from elastic.step.heal import transfer_rows, transfer_state
from elastic.step.placement import share_out
from elastic.step.process_group import Group, GroupBroken
from elastic.step.recovery import Agreement, Inventory, Plan, recover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic.membership.messages import World
    from elastic.step.driver import Driver
    from elastic.step.extras import Extras
    from elastic.step.restoring import Restorer

GROUP_TIMEOUT_S = 1800.0


class Reenter(BaseException):
    """No living worker holds some segment: unwind `train` and enter it again from a checkpoint.

    Not an Exception, so that a `try` in the training code does not swallow it.
    """


@dataclass(slots=True)
class ReformTimes:
    """CLOCK_MONOTONIC stamps of one reshape, for its event."""

    left_s: float
    world_s: float = 0.0
    began_s: float = 0.0
    built_s: float = 0.0
    recovered_s: float = 0.0
    healed_s: float = 0.0
    phase: str = ""
    cause: str = ""
    base: str = ""
    heal_bytes: int = 0
    joined: int = 0
    left: int = 0
    initial: bool = False


class Reformer:
    """Brings a driver from its World into the newest one.

    Args:
        driver: the worker's protocol state.
        extras: the small global state that travels to joiners.
        restorer: reads checkpoints.
        token: the job's token, for the bootstrap store.
    """

    def __init__(self, driver: Driver, extras: Extras, restorer: Restorer, token: str) -> None:
        self._driver = driver
        self._extras = extras
        self._restorer = restorer
        self._token = token
        self.times: ReformTimes | None = None
        self._unclaimed_told = False

    @property
    def restored_step(self) -> int:
        """Step of the checkpoint this worker began from, 0 without one."""
        return self._restorer.restored_step

    # -- entry points -----------------------------------------------------------------------

    def enter(self, layout: str) -> None:
        """Ask to be put into a World and wait until this worker is in one, with state."""
        driver = self._driver
        driver.control.send(t="ready", layout=layout)
        driver.phase(WorkerPhase.WAITING)
        self.times = ReformTimes(left_s=time.monotonic(), phase="start", initial=True)
        if driver.group is not None and not driver.group.is_cut and driver.world is not None:
            try:  # re-entered after a Reenter: the group still stands
                self._recover(driver.group, driver.world)
            except GroupBroken as error:
                self.reform(error)
            return
        self._loop()

    def reform(self, reason: GroupBroken | None) -> None:
        """Leave the running generation and come back in the next one.

        Args:
            reason: what broke, or None at a step boundary that all workers agreed on.
        """
        driver = self._driver
        now_s = time.monotonic()
        cause = "boundary" if reason is None else str(reason)[:200]
        phase = driver.progress.last.phase.name.lower()
        self.times = ReformTimes(left_s=now_s, phase=phase, cause=cause)
        driver.events.emit("reshape.started", cause=cause, phase=phase)
        newest = driver.control.newest_world()
        if reason is not None and (newest is None or newest.generation <= driver.generation):
            driver.control.send(t="peer_error", generation=driver.generation, error=cause)
        driver.phase(WorkerPhase.REFORM)
        self._loop()

    # -- the loop ---------------------------------------------------------------------------

    def _loop(self) -> None:
        driver = self._driver
        driver.healing = None
        if driver.group is not None:
            driver.group.drop()
            driver.group = None
        after = driver.generation
        while True:
            world = driver.control.wait_world(after, None)
            assert world is not None
            after = world.generation
            if all(ref.worker_id != driver.worker_id for ref in world.workers):
                raise Fenced(
                    f"generation {world.generation} was formed without this worker",
                    hint="it leaves and may join again as a new one",
                )
            assert self.times is not None
            self.times.world_s = driver.control.world_heard_at_s()
            self.times.began_s = time.monotonic()
            rank = [ref.worker_id for ref in world.workers].index(driver.worker_id)
            group = Group(generation=world.generation, rank=rank, size=len(world.workers))
            group.on_wait = driver.progress.beat
            driver.control.watch(group)
            try:
                store = BootstrapStore(world.stores, self._token)
                group.build(store, timeout_s=GROUP_TIMEOUT_S)
                self.times.built_s = time.monotonic()
                self._recover(group, world)
            except GroupBroken as error:
                driver.healing = None
                group.drop()
                driver.group = None
                newest = driver.control.newest_world()
                if newest is not None and newest.generation == after:
                    driver.control.send(t="peer_error", generation=after, error=str(error)[:200])
                continue
            return

    # -- recovery ---------------------------------------------------------------------------

    def _recover(self, group: Group, world: World) -> None:
        driver = self._driver
        assert driver.layout is not None
        assert self.times is not None
        previous = driver.world
        driver.world = world
        driver.group = group
        driver.rank = group.rank
        driver.size = group.size
        driver.formed = False
        driver.events.bind(generation=world.generation, rank=group.rank)
        inventories = [
            _decode_inventory(raw)
            for raw in group.gather_bytes(_encode_inventory(self.inventory()))
        ]
        self._check_layouts(inventories)
        base = "initial"
        if all(inventory.fresh for inventory in inventories):
            base = self._choose_base(group)
        plan = recover(
            inventories,
            driver.layout.num_segments,
            base_when_fresh="checkpoint" if base == "checkpoint" else "initial",
            replicas=driver.config.replicas,
        )
        if plan.lost:
            raise Reenter
        self._take_agreement(plan)
        self._install_placement(plan, world, group)
        self.times.recovered_s = time.monotonic()
        if plan.base == "checkpoint":
            self._restore(plan, group)
            driver.held = dict.fromkeys(self._mine(plan, primary_only=True), driver.step)
        elif plan.base == "initial":
            driver.held = dict.fromkeys(self._mine(plan), 0)
        rank_of = driver.rank_of()
        layout, optimizers = driver.layout, driver.optimizers
        moved = group.run(lambda: transfer_rows(plan.rows, rank_of, group, layout))
        step = driver.step if plan.base == "checkpoint" else plan.step
        driver.row_steps = [step] * driver.layout.num_segments
        driver.layout.install_constants()
        # A step may have been applied whose rows did not arrive before the World changed. What the
        # user does once per step comes first: a joiner must get the state as it is after the step.
        driver.run_step_functions()
        names = behind([each.unclaimed for each in inventories if not each.fresh])
        if names and plan.base != "checkpoint":
            self._extras.refresh(names, group)
        self._share_extras(plan, inventories, group)
        driver.healing = group.start(
            lambda: transfer_state(plan.state, rank_of, group, layout, optimizers)
        )
        driver.fresh = False
        self.times.healed_s = time.monotonic()
        self.times.base = plan.base
        self.times.heal_bytes = moved
        before = {ref.worker_id for ref in previous.workers} if previous is not None else set()
        now = {ref.worker_id for ref in world.workers}
        self.times.joined = len(now - before)
        self.times.left = len(before - now)
        driver.settled = False
        driver.tell_outcome()
        driver.settled = True

    def tell_unclaimed(self) -> None:
        """Say once, when the first step begins, which restored state nothing has asked for."""
        if self._unclaimed_told:
            return
        self._unclaimed_told = True
        names = self._extras.unclaimed()
        if names and self._driver.rank == 0:
            self._driver.events.emit("state.unclaimed", names=names)

    def _restore(self, plan: Plan, group: Group) -> None:
        """Read the chosen checkpoint, or an older one if any worker finds it damaged."""
        restorer = self._restorer
        while True:
            problem = restorer.read(self._mine(plan, primary_only=True))
            said = [text.decode() for text in group.gather_bytes(problem.encode()) if text]
            if not said:
                restorer.install()
                return
            restorer.reject(said[0])
            if not restorer.accept(group.gather_bytes(self._chosen_by_first(group))[0]):
                raise ckpt.Corrupt(
                    f"no checkpoint is whole: {said[0]}",
                    kind="no-checkpoint",
                    hint="look at each with `ckpt verify`, or start anew with resume='fresh'",
                )

    def _chosen_by_first(self, group: Group) -> bytes:
        return self._restorer.choose() if group.rank == 0 else b""

    def _mine(self, plan: Plan, *, primary_only: bool = False) -> list[int]:
        me = self._driver.worker_id
        return [
            segment
            for segment, holders in enumerate(plan.placement)
            if (holders[0] == me if primary_only else me in holders)
        ]

    def inventory(self) -> Inventory:
        """Return what this worker has; made by the main thread, which alone knows."""
        driver = self._driver
        assert driver.layout is not None
        return Inventory(
            worker_id=driver.worker_id,
            node=driver.node,
            fresh=driver.fresh,
            layout=driver.layout.fingerprint(),
            initial=driver.initial_crc if driver.fresh else "",
            agreement=driver.agreement,
            row_steps=tuple(driver.row_steps),
            held=dict(driver.held),
            gradients=frozenset(driver.gradients),
            gradient_step=driver.gradient_step,
            unclaimed=tuple(driver.unclaimed()),
        )

    def _check_layouts(self, inventories: Sequence[Inventory]) -> None:
        layouts = {inventory.layout for inventory in inventories}
        if len(layouts) > 1:
            raise Misconfigured(
                "the workers prepared different models or optimizers "
                f"({', '.join(f'{i.worker_id}: {i.layout}' for i in inventories)})",
                hint="train must build the same state on every worker",
            )

    def _choose_base(self, group: Group) -> str:
        """Let the first rank decide what a job without living state begins from."""
        answer = group.gather_bytes(self._chosen_by_first(group))[0]
        return "checkpoint" if self._restorer.accept(answer) else "initial"

    def _take_agreement(self, plan: Plan) -> None:
        driver = self._driver
        if driver.worker_id in plan.behind:
            assert plan.agreement is not None
            driver.complete(plan.agreement)
        elif driver.fresh and plan.base == "survivors":
            driver.agreement = plan.agreement
            driver.seq = 0 if plan.agreement is None else plan.agreement.seq
            driver.step = plan.step
            driver.after_step_done = plan.step
            driver.held.clear()
        driver.gradients = set()

    def _share_extras(self, plan: Plan, inventories: Sequence[Inventory], group: Group) -> None:
        if plan.base != "survivors" or not any(i.fresh for i in inventories):
            return
        source = next(rank for rank, i in enumerate(inventories) if not i.fresh)
        mine = self._extras.capture() if group.rank == source else b""
        data = group.gather_bytes(mine)[source]
        if self._driver.fresh:
            self._extras.install(data)

    def _install_placement(self, plan: Plan, world: World, group: Group) -> None:
        driver = self._driver
        assert driver.layout is not None
        driver.placement = plan.placement
        members = [ref.worker_id for ref in world.workers]
        shares = share_out(driver.config.virtual_ranks or driver.num_leaves, members)
        accumulate = driver.config.accumulate
        driver.shares = tuple(
            range(share.start * accumulate, share.stop * accumulate) for share in shares
        )
        driver.balance = Balance(len(shares))
        driver.fresh_times = False
        rank_of = driver.rank_of()
        driver.exchange = Exchange(
            group=group,
            layout=driver.layout,
            placement=[[rank_of[w] for w in holders] for holders in plan.placement],
            shares=driver.shares,
            num_leaves=driver.num_leaves,
            finished=driver.finished,
            finished_constant=driver.finished_constant,
        )
        mine = set(self._mine(plan))
        trainable = {s for s in mine | driver.held.keys() if s < driver.layout.num_trainable}
        for optimizer in driver.optimizers:
            optimizer.hold(trainable)

    # -- the event of a finished reshape ------------------------------------------------------

    def finished(self) -> None:
        """Tell the agent and the event log that the generation's first agreement is complete."""
        driver = self._driver
        times, self.times = self.times, None
        driver.control.send(t="formed", generation=driver.generation, step=driver.step)
        if times is None:
            return
        now_s = time.monotonic()
        driver.events.emit(
            "reshape.finished",
            unblock_ms=1e3 * max(0.0, times.left_s - (times.world_s or times.left_s)),
            rebuild_ms=1e3 * (times.built_s - times.began_s) if times.built_s else 0.0,
            recover_ms=1e3 * (times.recovered_s - (times.built_s or times.left_s)),
            heal_ms=1e3 * (times.healed_s - times.recovered_s),
            redo_ms=1e3 * (now_s - times.healed_s),
            agree_ms=1e3 * max(0.0, times.world_s - times.left_s),
            total_ms=1e3 * (now_s - times.left_s),
            heal_bytes=times.heal_bytes + driver.heal_bytes,
            joined=times.joined,
            left=times.left,
            base=times.base,
        )


# -- inventories as bytes -------------------------------------------------------------------------


def _encode_inventory(inventory: Inventory) -> bytes:
    agreement = inventory.agreement
    packed: bytes = msgpack.packb(
        [
            inventory.worker_id,
            inventory.node,
            inventory.fresh,
            inventory.layout,
            inventory.initial,
            None
            if agreement is None
            else [
                agreement.seq,
                agreement.kind,
                agreement.step,
                agreement.generation,
                agreement.result,
            ],
            list(inventory.row_steps),
            list(inventory.held.items()),
            sorted(inventory.gradients),
            inventory.gradient_step,
            list(inventory.unclaimed),
        ]
    )
    return packed


def _decode_inventory(raw: bytes) -> Inventory:
    (
        worker_id,
        node,
        fresh,
        layout,
        initial,
        agreement,
        row_steps,
        held,
        gradients,
        gradient_step,
        unclaimed,
    ) = msgpack.unpackb(raw)
    taken: Agreement | None = None
    if agreement is not None:
        seq, kind, step, generation, result = agreement
        taken = Agreement(seq=seq, kind=kind, step=step, generation=generation, result=result)
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "node": node,
        "fresh": fresh,
        "layout": layout,
        "initial": initial,
        "agreement": taken,
        "row_steps": tuple(row_steps),
        "held": dict(held),
        "gradients": frozenset(gradients),
        "gradient_step": gradient_step,
        "unclaimed": tuple(unclaimed),
    }
    return Inventory(**fields)
