"""Checkpoints as the agent sees them: workers stage, the save service writes, manifests follow.

A bridge, with no rule of its own: that the packs of a save are complete is said by
`ckpt.commit.assemble`, that its step counts by the workers ("committed"). A save is committed when
both are true. Packs of several nodes are told through the coordination store, one record for each
pack; with one node nothing is written there. A worker that is dead does not stop its save: the
bytes are in its arena. When the service itself dies, another one is started and what was under way
is ordered again as far as its workers live.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt.commit import Missing, assemble
from ckpt.errors import CheckpointError, Misconfigured, Retryable
from ckpt.service import SaveService
from elastic.agent.saving import Message, Surroundings
from elastic.errors import ElasticError, ExitCode
from elastic.membership import commands as c
from elastic.membership.coord import Coord

MAX_SERVICE_DEATHS = 3
KNOWN_STEPS = 256
"""How many committed steps are remembered, for a staged part that is told later than the step."""
FIRST_ASK_S = 0.1
LAST_ASK_S = 2.0

Key = tuple[int, int]


@dataclass(slots=True)
class Save:
    """One step's save on this node."""

    step: int
    generation: int
    halves: dict[str, int] = field(default_factory=dict)
    """Worker to the half that holds its part, until it is free again."""
    workers: set[str] = field(default_factory=set)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    step_committed: bool = False
    asked: bool = False
    done_tiers: tuple[str, ...] = ()
    collecting: asyncio.Task[None] | None = None

    @property
    def key(self) -> Key:
        """Step and the generation that agreed on it: what entries combine by."""
        return (self.step, self.generation)


class Saves:
    """The saves of one node.

    Args:
        service: makes a save service that calls back with its events; `sweep` as there.
        surroundings: the agent.
        coord: the store, for jobs of several nodes; None with one node.
        now_s: monotonic clock.
    """

    def __init__(
        self,
        service: Callable[[Callable[[Message], None], bool], SaveService],
        surroundings: Surroundings,
        *,
        coord: Callable[[], Coord | None] | None,
        now_s: Callable[[], float],
    ) -> None:
        self._make_service = service
        self._surroundings = surroundings
        self._coord = coord
        self._now_s = now_s
        self._service: SaveService | None = None
        self._ready = False
        self._deaths = 0
        self._attached: set[str] = set()
        self._waiting: list[tuple[str, int, Key]] = []
        self._saves: dict[Key, Save] = {}
        self._steps: OrderedDict[Key, None] = OrderedDict()
        self._last_committed: int | None = None
        self._committed_keys: list[Key] = []
        self._last_error: str | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    def status(self) -> dict[str, Any]:
        """Return last_committed_step, in_flight, last_error."""
        return {
            "last_committed_step": self._last_committed,
            "in_flight": sorted(save.step for save in self._saves.values()),
            "last_error": self._last_error,
        }

    async def start(self) -> None:
        """Start the save service and have it try its places."""
        await self._start(sweep=True)

    def message(self, worker_id: str, message: Message) -> None:
        """Take "staged" and "committed" from a worker."""
        try:
            key = (int(message["step"]), int(message["generation"]))
            if message["t"] == "staged":
                self._staged(worker_id, key, int(message["half"]))
            elif message["t"] == "committed":
                self._step_committed(key)
        except (KeyError, TypeError, ValueError) as error:
            self._failed((0, 0), f"a message of {worker_id} about a save is broken: {error!r}")

    def gone(self, worker_id: str) -> None:
        """Let the arena of a reaped worker go when its saves have ended."""
        if worker_id in self._attached:
            self._attached.discard(worker_id)
            self._order(lambda service: service.detach(worker_id))

    def settle(self, deadline_at_s: float) -> None:
        """Finish the saves whose step counts until then; SavesSettled follows."""
        self._task(self._settle(deadline_at_s))

    async def close(self, within_s: float) -> None:
        """End the service; what it has not finished in that time does not count."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        if self._service is not None:
            await self._service.close(within_s)

    # -- what workers say -----------------------------------------------------------------------

    def _staged(self, worker_id: str, key: Key, half: int) -> None:
        save = self._saves.setdefault(key, Save(*key))
        save.workers.add(worker_id)
        save.halves[worker_id] = half
        save.step_committed = save.step_committed or key in self._steps
        if self._ready:
            self._order_save(worker_id, half, key)
        else:
            self._waiting.append((worker_id, half, key))

    def _step_committed(self, key: Key) -> None:
        self._steps[key] = None
        while len(self._steps) > KNOWN_STEPS:
            self._steps.popitem(last=False)
        save = self._saves.get(key)
        if save is not None and not save.step_committed:
            save.step_committed = True
            self._try_commit(save)

    def _order_save(self, worker_id: str, half: int, key: Key) -> None:
        fd = self._surroundings.arena_fd(worker_id)
        if worker_id not in self._attached:
            if fd is None:
                self._lost_part(key, worker_id, "its arena is gone with it")
                return
            self._attached.add(worker_id)
            self._order(lambda service: service.attach(worker_id, fd))
        self._order(lambda service: service.save(worker_id, half, *key))

    def _order(self, call: Callable[[SaveService], None]) -> None:
        """Make one call; a service that has just died says so by its own event."""
        if self._service is not None:
            with contextlib.suppress(Retryable):
                call(self._service)

    # -- what the service says ------------------------------------------------------------------

    def _heard(self, event: Message) -> None:
        kind = event["t"]
        if kind == "died":
            self._service_died(str(event["error"]))
            return
        worker_id = str(event.get("worker_id") or "")
        if kind == "half_free":
            for save in self._saves.values():
                if save.halves.get(worker_id) == event["half"]:
                    del save.halves[worker_id]
            self._surroundings.tell([worker_id], {"t": "half_free", "half": event["half"]})
            return
        key = (int(event["step"]), int(event["generation"]))
        if kind in ("written", "uploaded"):
            self._part_safe(key, worker_id, event)
        elif kind == "committed":
            self._committed(key, event)
        elif kind == "failed":
            if event.get("tier") is None and worker_id:
                self._lost_part(key, worker_id, str(event["error"]))
            else:
                self._failed(key, str(event["error"]), tier=event.get("tier"))
                if event.get("lost", event.get("tier") is None):
                    self._forget(key)
        self._changed.set()

    def _part_safe(self, key: Key, worker_id: str, event: Message) -> None:
        self._surroundings.note(
            f"checkpoint.{event['t']}",
            step=key[0],
            generation=key[1],
            worker_id=worker_id,
            bytes=event["bytes"],
            duration_s=round(float(event["duration_s"]), 6),
        )
        save = self._saves.get(key)
        if save is None or worker_id in save.entries:
            return
        save.entries[worker_id] = event["entry"]
        if self._coord is None:
            self._try_commit(save)
        else:
            self._task(self._publish(save, worker_id, event["entry"]))

    def _committed(self, key: Key, event: Message) -> None:
        save = self._saves.get(key)
        if event["tier"] is not None:
            self._last_committed = max(key[0], self._last_committed or 0)
            self._last_error = None
            self._surroundings.note(
                "checkpoint.committed",
                step=key[0],
                generation=key[1],
                tier=event["tier"],
                manifest=event["manifest"],
            )
            self._say_done(key, ok=True, error=None, tiers=event["tiers"])
            self._abandon_before(key)
        if save is not None:
            save.done_tiers = tuple(event["tiers"])
        if event["final"]:
            self._forget(key)
            self._delete_records(key)

    def _lost_part(self, key: Key, worker_id: str, why: str) -> None:
        self._failed(key, f"{worker_id}: {why}")
        self._order(lambda service: service.drop(*key))
        self._forget(key)

    def _failed(self, key: Key, error: str, tier: str | None = None) -> None:
        self._last_error = error
        self._surroundings.note(
            "checkpoint.failed", step=key[0], generation=key[1], error=error, tier=tier
        )
        save = self._saves.get(key)
        if save is None or not save.done_tiers:
            self._say_done(key, ok=False, error=error, tiers=[])
        self._surroundings.on_event(c.SaveFailed(step=key[0], error=error))
        self._changed.set()

    def _say_done(self, key: Key, *, ok: bool, error: str | None, tiers: list[str]) -> None:
        message = {
            "t": "save_done",
            "step": key[0],
            "generation": key[1],
            "ok": ok,
            "error": error,
            "tiers": tiers,
        }
        self._surroundings.tell(None, message)

    # -- committing -----------------------------------------------------------------------------

    def _try_commit(self, save: Save) -> None:
        if save.asked or not save.step_committed or not self._ready:
            return
        try:
            found = assemble(save.entries.values(), step=save.step, generation=save.generation)
        except CheckpointError as error:
            self._failed(save.key, str(error))
            self._forget(save.key)
            return
        if isinstance(found, Missing):
            return
        save.asked = True
        workers = [pack.worker_id for pack in found.packs]
        self._order(lambda service: service.commit(*save.key, workers, dict(save.entries)))

    async def _publish(self, save: Save, worker_id: str, entry: dict[str, Any]) -> None:
        """Tell other nodes of one pack, then look whether all packs are told."""
        pause_s = FIRST_ASK_S
        while self._saves.get(save.key) is save:
            coord = self._coord() if self._coord is not None else None
            with contextlib.suppress(ElasticError):
                if coord is not None:
                    await coord.put_save(save.step, save.generation, worker_id, entry)
                    break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_ASK_S)
        if save.collecting is None:
            save.collecting = self._task(self._collect(save))

    async def _collect(self, save: Save) -> None:
        """Ask for the packs of all nodes until they are complete, or the save is given up."""
        pause_s = FIRST_ASK_S
        while self._saves.get(save.key) is save and not save.asked:
            coord = self._coord() if self._coord is not None else None
            with contextlib.suppress(ElasticError):
                if coord is not None:
                    told = await coord.list_saves(save.step, save.generation)
                    save.entries = {**told, **save.entries}
                    self._try_commit(save)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_ASK_S)

    def _abandon_before(self, key: Key) -> None:
        """Give up older saves that lack a part for good: a newer checkpoint stands."""
        for other in list(self._saves.values()):
            if other.step < key[0] and not other.asked:
                self._give_up(other, "a newer checkpoint was complete before it")

    def _give_up(self, save: Save, reason: str) -> None:
        self._surroundings.note(
            "checkpoint.abandoned", step=save.step, generation=save.generation, reason=reason
        )
        self._order(lambda service: service.drop(*save.key))
        self._say_done(save.key, ok=False, error=reason, tiers=[])
        self._forget(save.key)

    def _forget(self, key: Key) -> None:
        self._saves.pop(key, None)
        self._changed.set()

    def _delete_records(self, key: Key) -> None:
        """Remove the records of the save before: every node has seen that one complete."""
        self._committed_keys.append(key)
        if self._coord is None or len(self._committed_keys) < 2:
            return
        old = self._committed_keys.pop(0)
        self._task(self._delete(old))

    async def _delete(self, key: Key) -> None:
        coord = self._coord() if self._coord is not None else None
        if coord is not None:
            with contextlib.suppress(ElasticError):
                await coord.delete_saves(*key)

    # -- the service ----------------------------------------------------------------------------

    async def _start(self, *, sweep: bool) -> None:
        self._service = self._make_service(self._heard, sweep)
        try:
            await self._service.start()
        except Misconfigured as error:
            self._surroundings.on_event(
                c.HelperBroken(exit_code=int(ExitCode.MISCONFIGURED), cause=str(error))
            )
            return
        except CheckpointError as error:
            self._service_died(str(error))
            return
        self._ready = True
        waiting, self._waiting = self._waiting, []
        for worker_id, half, key in waiting:
            self._order_save(worker_id, half, key)
        for save in list(self._saves.values()):
            self._try_commit(save)

    def _service_died(self, error: str) -> None:
        """Start another one; order again what the dead one had not finished."""
        self._ready = False
        self._service = None
        self._attached.clear()
        self._deaths += 1
        if self._closing:
            return
        if self._deaths > MAX_SERVICE_DEATHS:
            cause = f"the save service has died {self._deaths} times: {error}"
            self._surroundings.on_event(
                c.HelperBroken(exit_code=int(ExitCode.INFRASTRUCTURE), cause=cause)
            )
            return
        for save in list(self._saves.values()):
            save.asked = False
            unsafe = save.workers - save.entries.keys()
            if any(worker_id not in save.halves for worker_id in unsafe):
                self._failed(save.key, error)
                self._forget(save.key)
                continue
            self._waiting += [(each, half, save.key) for each, half in save.halves.items()]
        self._task(self._start(sweep=False))

    async def _settle(self, deadline_at_s: float) -> None:
        """Wait for the saves whose step counts; the others can never be complete."""
        for save in list(self._saves.values()):
            if not save.step_committed:
                self._give_up(save, "the run ended before its step was committed")
        error = ""
        while not error:
            for save in [each for each in self._saves.values() if self._is_hopeless(each)]:
                self._give_up(save, "a worker died before it had staged its part")
            if not self._saves:
                break
            self._changed.clear()
            left_s = deadline_at_s - self._now_s()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._changed.wait()
            except TimeoutError:
                steps = ", ".join(str(save.step) for save in self._saves.values())
                error = f"the checkpoint of step {steps} was not complete when the run had to end"
        for save in list(self._saves.values()):
            self._give_up(save, "the run had to end")
        self._surroundings.on_event(c.SavesSettled(error=error))

    def _is_hopeless(self, save: Save) -> bool:
        """Whether every part that was staged is safe, and they are not a checkpoint."""
        if self._coord is not None or save.asked or save.workers - save.entries.keys():
            return False
        found = assemble(save.entries.values(), step=save.step, generation=save.generation)
        return isinstance(found, Missing)

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
