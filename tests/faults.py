"""Faults at exact places: a worker kills itself before or after a named call of the step protocol.

The test's own training function arms an `Injector` in its worker; production code has no name of
it. The injector wraps the functions that `POINTS` names, in this one process. When a fault's
place is reached, a line that says where is written to a file of its name, and then the process
sends itself SIGKILL. The file is made with O_EXCL, so a fault happens once in a run, whoever
reaches it first, and a test can tell that it happened at all.

A fault waits for its step, and for a World of its size: after a kill the next fault can wait
until a spare has come in.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from elastic.agent.progress import WorkerPhase
from elastic.step import reduction

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic.step.driver import Driver

Who = Literal["any", "new", "old"]


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the protocol: before or after one function of ours (or of torch) is called.

    Args:
        target: `module:attribute.path` of the function.
        when: "before" or "after" the call.
        which: tells from the call's arguments whether it is one that is meant.
        during: the worker is in one of these phases.
        reforming: True: only between leaving a World and the first agreement of the next one;
            False: only outside of that; None: both.
        who: "new" is a worker without state of the job, "old" one with it.
        calls: how many such calls a step has on every worker at least: buckets, messages, leaves.
        sized: the size of its World is known to a worker here; not while it still looks for it.
        first_rank: only the first rank comes here: it computes the first micro-batch.
    """

    target: str
    when: Literal["before", "after"]
    which: Callable[..., bool] = lambda *_args, **_kwargs: True
    during: tuple[WorkerPhase, ...] = ()
    reforming: bool | None = None
    who: Who = "any"
    calls: int = 1
    first_rank: bool = False
    sized: bool = True


def _tags(first: int, last: int) -> Callable[..., bool]:
    return lambda _exchange, _tensor, _target, tag: first <= tag < last


def _says(*kinds: str) -> Callable[..., bool]:
    return lambda _control, **message: message["t"] in kinds


def _agrees(*kinds: str) -> Callable[..., bool]:
    return lambda _driver, kind, _step, _payload: kind in kinds


_PARTIAL = _tags(reduction.TAG_PARTIAL, reduction.TAG_FINISHED)
_FINISHED = _tags(reduction.TAG_FINISHED, reduction.TAG_CONSTANT)
_CONSTANT = _tags(reduction.TAG_CONSTANT, reduction.TAG_ROWS)
_ROWS = _tags(reduction.TAG_ROWS, reduction.TAG_ROWS + (1 << 24))
_STEP = "elastic.step."
_DRIVER = _STEP + "driver:Driver."
_COMPUTE = _STEP + "compute:StepCompute."
_REDUCTION = _STEP + "reduction:Reduction."
_EXCHANGE = _STEP + "exchange:Exchange."
_GROUP = _STEP + "process_group:Group."
_REFORM = _STEP + "reform:"
_SAVES = _STEP + "checkpoints:Checkpoints."
_LEFT = _REFORM + "Reformer.reform"
_GATHERING = (WorkerPhase.GATHER,)
_AGREEING = (WorkerPhase.AGREE,)


def _both(name: str, target: str, **how: Any) -> dict[str, Point]:
    return {
        f"before {name}": Point(target, "before", **how),
        f"after {name}": Point(target, "after", **how),
    }


COMPUTE = {
    **_both("the step begins", _DRIVER + "begin", reforming=False),
    **_both("a micro-batch is entered", _COMPUTE + "enter", calls=2, reforming=False),
    **_both("a gradient is taken", _STEP + "tap:GradientTap._take", calls=12, reforming=False),
    **_both("a leaf is folded", _STEP + "gradients:LeafFold.close", calls=2, reforming=False),
    **_both("a micro-batch is left", _COMPUTE + "leave", calls=2, reforming=False),
}
EXCHANGE = {
    **_both("a bucket is sent", _REDUCTION + "send", calls=8, reforming=False),
    **_both("a partial sum is sent", _EXCHANGE + "send", which=_PARTIAL, calls=6, reforming=False),
    **_both("a bucket is finished", _REDUCTION + "_finish", calls=2, reforming=False),
    **_both(
        "a finished gradient is sent", _EXCHANGE + "send", which=_FINISHED, calls=2, reforming=False
    ),
    **_both(
        "buffers are sent to holders",
        _EXCHANGE + "send",
        which=_CONSTANT,
        first_rank=True,
        reforming=False,
    ),
    **_both("a bucket's norms are taken", _REDUCTION + "_take_norms", calls=2, reforming=False),
    **_both("the buffers are taken", _REDUCTION + "_take_constant", reforming=False),
    **_both("the exchange is completed", _COMPUTE + "finish", reforming=False),
    **_both("the guard's checksums", _STEP + "driver:checksums", reforming=False),
}
AGREE = {
    **_both("the agreement", _DRIVER + "agree", which=_agrees("step"), reforming=False),
    **_both("a message of the agreement", _GROUP + "_allgather", during=_AGREEING, reforming=False),
    "in a message of the agreement": Point(
        _GROUP + "wait", "before", during=_AGREEING, reforming=False
    ),
    **_both("the commit", _DRIVER + "complete", reforming=False),
    **_both("a step is published", _DRIVER + "_publish", reforming=False),
}
APPLY = {
    **_both("the apply", _DRIVER + "_apply", reforming=False),
    **_both("the optimizer", _STEP + "optimizer:SegmentOptimizer.step", reforming=False),
    "in the middle of the optimizer": Point(
        "torch:_foreach_lerp_", "after", during=(WorkerPhase.APPLY,), reforming=False
    ),
    **_both("state of virtual ranks", _STEP + "virtual_state:VirtualState.apply", reforming=False),
    **_both("schedulers", _STEP + "prepared:Prepared.apply_scheduler_calls", reforming=False),
}
GATHER = {
    **_both("the rows are gathered", _EXCHANGE + "gather", reforming=False),
    **_both("rows are sent", _EXCHANGE + "send", which=_ROWS, calls=3, reforming=False),
    **_both("a message of rows", _GROUP + "wait", during=_GATHERING, calls=3, reforming=False),
    **_both("the step's end", _DRIVER + "after_step", reforming=False),
    **_both(
        "buffers are installed", _STEP + "layout:StateLayout.install_constants", reforming=False
    ),
}
SAVE = {
    **_both("a step is staged", _SAVES + "stage", reforming=False),
    **_both("the arena is filled", "ckpt.arena:Arena.stage", reforming=False),
    **_both("staged is said", _STEP + "control:Control.send", which=_says("staged")),
    **_both("committed is said", _STEP + "control:Control.send", which=_says("committed")),
    **_both("the save between steps", _SAVES + "save_last", reforming=False),
    **_both("the agreement to save", _DRIVER + "agree", which=_agrees("save"), reforming=False),
    **_both("the wait for a save", _SAVES + "_wait_message", reforming=False),
}
EVALUATE = {
    **_both("an evaluation", "elastic.context:Context._evaluation", reforming=False),
    **_both("a batch of an evaluation", "elastic.context:_accumulate", calls=3, reforming=False),
    **_both("the evaluation is kept", "elastic.context:Context._evaluated", reforming=False),
    **_both(
        "the agreement on an evaluation", _DRIVER + "agree", which=_agrees("evaluate"),
        reforming=False,
    ),
    **_both("the close of an epoch", _DRIVER + "agree", which=_agrees("close"), reforming=False),
    **_both("the end of the loop", "elastic.loops:Engine.close_agreement", reforming=False),
}  # fmt: skip
END = {
    **_both("finished is said", "elastic.worker:Worker._say_finished", reforming=False),
}
FIRST = {  # in the very first World, before anybody has state
    **_both("the first group", _GROUP + "build", who="new", sized=False),
    **_both("the first inventories", _REFORM + "_encode_inventory", who="new"),
    **_both("the first placement", _REFORM + "Reformer._install_placement", who="new"),
    "after the first recovery": Point(_REFORM + "Reformer._recover", "after"),
}
# On survivors, after somebody died. Who sends the state of its segments has the only copy of them:
# with it training goes back to a checkpoint, which is another test's matter.
REFORM = {
    **_both("the World is left", _REFORM + "Reformer.reform", sized=False),
    **_both(
        "the store is reached",
        _STEP + "bootstrap_client:BootstrapStore.connect",
        who="old",
        sized=False,
    ),
    "after an address is published": Point(
        _STEP + "bootstrap_client:BootstrapStore.set", "after", who="old", sized=False
    ),
    **_both("the group is built", _GROUP + "build", who="old", sized=False),
    **_both("the recovery", _REFORM + "Reformer._recover", who="old"),
    **_both("the inventory", _REFORM + "_encode_inventory", who="old"),
    **_both("the plan", _REFORM + "recover", who="old"),
    **_both("a missed agreement is taken", _REFORM + "Reformer._take_agreement", who="old"),
    **_both("the placement is installed", _REFORM + "Reformer._install_placement", who="old"),
    **_both("rows are fetched", _REFORM + "transfer_rows", who="old"),
    **_both("state is copied", _REFORM + "transfer_state", who="old"),
    **_both("state is unpacked", _STEP + "heal:unpack_state", who="old"),
    **_both("the healing ends", _DRIVER + "finish_healing", reforming=True, who="old"),
    "before a healing agreement": Point(_DRIVER + "agree", "before", reforming=True, who="old"),
    "before a healing commit": Point(_DRIVER + "complete", "before", reforming=True, who="old"),
    **_both("moved copies are dropped", _DRIVER + "_drop_moved", who="old"),
    **_both("formed is said", _STEP + "control:Control.send", which=_says("formed"), who="old"),
}
JOIN = {  # the one that comes in
    "joiner before the group is built": Point(_GROUP + "build", "before", who="new", sized=False),
    "joiner after its address is published": Point(
        _STEP + "bootstrap_client:BootstrapStore.set", "after", who="new", sized=False
    ),
    "joiner after the group is built": Point(_GROUP + "build", "after", who="new", sized=False),
    "joiner after the inventory": Point(_REFORM + "_encode_inventory", "after", who="new"),
    "joiner before the global state": Point(_STEP + "extras:Extras.install", "before", who="new"),
    "joiner after the global state": Point(_STEP + "extras:Extras.install", "after", who="new"),
    "joiner before rows are fetched": Point(_REFORM + "transfer_rows", "before", who="new"),
    "joiner after rows are fetched": Point(_REFORM + "transfer_rows", "after", who="new"),
    "joiner before state is unpacked": Point(_STEP + "heal:unpack_state", "before"),
    "joiner after state is unpacked": Point(_STEP + "heal:unpack_state", "after"),
    "donor before the global state": Point(_STEP + "extras:Extras.capture", "before", who="old"),
    "donor after the global state": Point(_STEP + "extras:Extras.capture", "after", who="old"),
    "donor before rows are sent": Point(_REFORM + "transfer_rows", "before", who="old"),
    "donor after rows are sent": Point(_REFORM + "transfer_rows", "after", who="old"),
    "donor before state is packed": Point(_STEP + "heal:pack_state", "before", who="old"),
    "donor after state is packed": Point(_STEP + "heal:pack_state", "after", who="old"),
}
FAMILIES: dict[str, dict[str, Point]] = {
    "compute": COMPUTE,
    "exchange": EXCHANGE,
    "agree": AGREE,
    "apply": APPLY,
    "gather": GATHER,
    "save": SAVE,
    "evaluate": EVALUATE,
    "end": END,
    "first": FIRST,
    "reform": REFORM,
    "join": JOIN,
}
POINTS = {name: point for family in FAMILIES.values() for name, point in family.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One death.

    Args:
        point: a name in POINTS.
        step: not before this many steps are applied on the worker.
        rank: of the worker in its World; None: any that may die without taking the last living
            copy of a segment with it.
        index: which of the calls of one step in one generation that fit, from 0: the bucket, the
            message, the micro-batch.
        size: the World has this many workers; 0: any.
        after: number of faults of this run that have happened before.
    """

    point: str
    step: int = 0
    rank: int | None = 0
    index: int = 0
    size: int = 0
    after: int = 0

    def name(self, number: int) -> str:
        """Return the name of the file that tells that it happened."""
        return f"{number:02d} {self.point} {self.index}"


def to_plain(faults: list[Fault]) -> list[dict[str, Any]]:
    """Return faults as a training function's argument."""
    return [asdict(fault) for fault in faults]


class Injector:
    """Arms faults in this worker process.

    Args:
        driver: this worker's protocol state.
        faults: from `to_plain`.
        directory: where what happened is written.
    """

    def __init__(self, driver: Driver, faults: list[dict[str, Any]], directory: Path) -> None:
        self._driver = driver
        self._faults = [Fault(**plain) for plain in faults]
        self._directory = directory
        self._counts: Counter[tuple[int, int, int, str]] = Counter()
        self._lock = threading.Lock()
        self._confirmed: tuple[tuple[str, ...], ...] = ()
        directory.mkdir(exist_ok=True)
        for target in {_LEFT, *(POINTS[fault.point].target for fault in self._faults)}:
            self._wrap(target)

    def _wrap(self, target: str) -> None:
        module, _, path = target.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = owner.__dict__[name]
        function = original.__func__ if isinstance(original, staticmethod) else original

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._reached(target, "before", args, kwargs)
            result = function(*args, **kwargs)
            self._reached(target, "after", args, kwargs)
            return result

        setattr(owner, name, staticmethod(wrapper) if function is not original else wrapper)
        for attribute, value in list(vars(self._driver).items()):  # methods that were bound before
            if getattr(value, "__func__", None) is original:
                setattr(self._driver, attribute, getattr(value.__self__, name))

    def _reached(self, target: str, when: str, args: Any, kwargs: Any) -> None:
        if target == _LEFT and when == "before" and self._driver.formed:
            self._confirmed = self._driver.placement  # whose copies count until the next agreement
        for number, fault in enumerate(self._faults):
            point = POINTS[fault.point]
            if point.target == target and point.when == when:
                with self._lock:
                    if self._meant(number, fault, point, args, kwargs):
                        self._die(number, fault)

    def _meant(self, number: int, fault: Fault, point: Point, args: Any, kwargs: Any) -> bool:
        driver = self._driver
        if driver.step < fault.step or (fault.size and driver.size != fault.size):
            return False
        if fault.rank is not None and driver.rank != fault.rank:
            return False
        if fault.rank is None and not self._may_die():
            return False
        if point.who != "any" and driver.fresh != (point.who == "new"):
            return False
        if point.during and driver.progress.last.phase not in point.during:
            return False
        if point.reforming is not None and point.reforming == driver.formed:
            return False
        if not point.which(*args, **kwargs):
            return False
        before = happened(self._directory).values()
        if len(before) < fault.after:
            return False
        if fault.rank is not None and any(w["generation"] >= driver.generation for w in before):
            return False  # the World that this fault waits for has no dead in it
        key = (number, driver.generation, driver.step, point.when)
        self._counts[key] += 1
        return self._counts[key] == fault.index + 1

    def _may_die(self) -> bool:
        """Return True if every segment has a living holder without this worker."""
        gone = {where["worker"] for where in happened(self._directory).values()}
        gone.add(self._driver.worker_id)
        return all(set(holders) - gone for holders in self._confirmed)

    def _die(self, number: int, fault: Fault) -> None:
        driver = self._driver
        try:
            fd = os.open(
                self._directory / fault.name(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
            )
        except FileExistsError:
            return
        where = {
            "worker": driver.worker_id,
            "pid": os.getpid(),
            "generation": driver.generation,
            "rank": driver.rank,
            "size": driver.size,
            "step": driver.step,
            "phase": driver.progress.last.phase.name,
        }
        os.write(fd, json.dumps(where).encode())
        os.close(fd)
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # the signal is on its way: nothing more may happen here


def happened(directory: Path) -> dict[str, dict[str, Any]]:
    """Return what has happened: the fault's name -> where."""
    written = {path.name: path.read_text() for path in sorted(directory.iterdir())}
    return {name: json.loads(text) for name, text in written.items() if text}
