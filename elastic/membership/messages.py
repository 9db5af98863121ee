"""What agents tell each other through the coordination store: members, Worlds, snapshots.

A `Member` is one agent's own record and lives as long as its lease. A `World` is the numbered,
immutable answer to "who takes part, in which order"; the rank of a worker is its index in
`World.workers`. A `Snapshot` is everything that a decision may look at, at one revision.

Each has `to_dict`, which gives plain values for JSON, and `from_dict`, which raises ValueError on
anything that `to_dict` would not have written, save that unknown keys are passed over: a newer
agent may add some. A World is written by columns, because one of 4,000 agents has to stay well
below etcd's limit for a value: node names once, workers as runs of slots, ids without their
"node.slot-" part.

This module does not decide who is a member, and does not know where records are kept.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from itertools import groupby
from types import MappingProxyType
from typing import Any, TypeVar

Plain = dict[str, Any]

MAX_STORES = 2
_NAME = re.compile(r"[^\s/]+")
_WHOLE_ID = "="  # marks a worker id that is not of the form node.slot-suffix

_T = TypeVar("_T")


class Mode(StrEnum):
    """How the workers of the generation before go over to a new World."""

    NOW = "now"  # somebody is gone: cut the collective and reform
    BOUNDARY = "boundary"  # all are there: agree on a step boundary and move at it


def _refuses(parse: Callable[[Any, Plain], _T]) -> Callable[[Any, Plain], _T]:
    """Turn what indexing into strange data raises into one ValueError that says so."""

    @wraps(parse)
    def checked(cls: Any, plain: Plain) -> _T:
        try:
            return parse(cls, plain)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"this is no {cls.__name__} record: {error!r}") from error

    return checked


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{what} must be a word without spaces and slashes, not {name!r}")


def _check_slot(slot: object) -> None:
    if not isinstance(slot, int) or slot < 0:
        raise ValueError(f"a slot is counted from 0, not {slot!r}")


def _check_generation(generation: object) -> None:
    if not isinstance(generation, int) or generation < 1:
        raise ValueError(f"generations count from 1, not {generation!r}")


def _check_unique(what: str, values: list[Any]) -> None:
    if len(set(values)) < len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise ValueError(f"{what} {twice!r} stands twice in one record")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRef:
    """One worker's place in a World."""

    worker_id: str
    node: str
    slot: int

    def __post_init__(self) -> None:
        _check_name("a worker id", self.worker_id)
        _check_name("a node name", self.node)
        _check_slot(self.slot)

    def to_dict(self) -> Plain:
        """Return plain values for JSON."""
        return {"worker_id": self.worker_id, "node": self.node, "slot": self.slot}

    @classmethod
    @_refuses
    def from_dict(cls, plain: Plain) -> WorkerRef:
        """Undo `to_dict`. Raises ValueError."""
        return cls(worker_id=plain["worker_id"], node=plain["node"], slot=plain["slot"])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What an agent says about one of its living workers; a dead one is not listed."""

    worker_id: str
    slot: int
    ready: bool

    def __post_init__(self) -> None:
        _check_name("a worker id", self.worker_id)
        _check_slot(self.slot)

    def to_dict(self) -> Plain:
        """Return plain values for JSON."""
        return {"worker_id": self.worker_id, "slot": self.slot, "ready": self.ready}

    @classmethod
    @_refuses
    def from_dict(cls, plain: Plain) -> WorkerStatus:
        """Undo `to_dict`. Raises ValueError."""
        return cls(worker_id=plain["worker_id"], slot=plain["slot"], ready=bool(plain["ready"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One agent as it describes itself.

    Args:
        node: name of the host's agent in this job.
        incarnation: new for each start of the agent.
        address: "host:port" of the agent's token-protected service.
        slots: number of workers it runs when all is well.
        workers: those that are alive.
        leaving: it drains; give it nothing new.
        finished: all its workers in the World have come to the end of the train function.
        stalled: the generation in which all its workers have waited too long for others, else 0.
    """

    node: str
    incarnation: str
    address: str
    slots: int
    workers: tuple[WorkerStatus, ...]
    leaving: bool = False
    finished: bool = False
    stalled: int = 0

    def __post_init__(self) -> None:
        _check_name("a node name", self.node)
        _check_name("an incarnation", self.incarnation)
        _check_slot(self.slots)
        _check_unique("worker", [worker.worker_id for worker in self.workers])
        _check_unique("slot", [worker.slot for worker in self.workers])

    def to_dict(self) -> Plain:
        """Return plain values for JSON; workers as [id, slot, ready] rows."""
        return {
            "node": self.node,
            "incarnation": self.incarnation,
            "address": self.address,
            "slots": self.slots,
            "workers": [[w.worker_id, w.slot, int(w.ready)] for w in self.workers],
            "leaving": self.leaving,
            "finished": self.finished,
            **({"stalled": self.stalled} if self.stalled else {}),
        }

    @classmethod
    @_refuses
    def from_dict(cls, plain: Plain) -> Member:
        """Undo `to_dict`. Raises ValueError."""
        return cls(
            node=plain["node"],
            incarnation=plain["incarnation"],
            address=plain["address"],
            slots=plain["slots"],
            workers=tuple(
                WorkerStatus(worker_id=worker_id, slot=slot, ready=bool(ready))
                for worker_id, slot, ready in plain["workers"]
            ),
            leaving=bool(plain["leaving"]),
            finished=bool(plain["finished"]),
            stalled=int(plain.get("stalled", 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The agreed answer of one generation; never changed, only followed by the next.

    Args:
        generation: counts from 1; the fencing token of all that this World writes.
        workers: in rank order.
        stores: addresses of up to two agents that serve the bootstrap store.
        mode: how the workers of the generation before go over to it.
        reason: one sentence for people.
    """

    generation: int
    workers: tuple[WorkerRef, ...]
    stores: tuple[str, ...]
    mode: Mode
    reason: str

    def __post_init__(self) -> None:
        _check_generation(self.generation)
        if not self.workers:
            raise ValueError(f"World {self.generation} has no worker")
        if len(self.stores) > MAX_STORES:
            raise ValueError(f"World {self.generation} names more than {MAX_STORES} stores")
        _check_unique("worker", [worker.worker_id for worker in self.workers])
        _check_unique("slot", [(worker.node, worker.slot) for worker in self.workers])

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that take part, in the order of their lowest rank."""
        return tuple(dict.fromkeys(worker.node for worker in self.workers))

    def rank_of(self, worker_id: str) -> int | None:
        """Return a worker's rank, or None when it is not part of this World."""
        for rank, worker in enumerate(self.workers):
            if worker.worker_id == worker_id:
                return rank
        return None

    def to_dict(self) -> Plain:
        """Return plain values for JSON, by columns (see the module's text).

        `runs` is flat: (index into nodes, first slot, number of workers) for each run of
        consecutive slots on one node; `ids` has one word per worker.
        """
        index = {node: i for i, node in enumerate(self.nodes)}
        runs: list[int] = []
        # Within a run, rank and slot grow together: their difference is the run's own mark.
        for (node, _), run in groupby(
            enumerate(self.workers), key=lambda item: (item[1].node, item[0] - item[1].slot)
        ):
            members = list(run)
            runs += (index[node], members[0][1].slot, len(members))
        return {
            "generation": self.generation,
            "mode": self.mode.value,
            "reason": self.reason,
            "stores": list(self.stores),
            "nodes": list(index),
            "runs": runs,
            "ids": " ".join(_short_id(worker) for worker in self.workers),
        }

    @classmethod
    @_refuses
    def from_dict(cls, plain: Plain) -> World:
        """Undo `to_dict`. Raises ValueError."""
        words = plain["ids"].split(" ")
        places = list(_places(plain["nodes"], plain["runs"]))
        if len(words) != len(places):
            raise ValueError(f"this World has {len(places)} places and {len(words)} worker ids")
        return cls(
            generation=plain["generation"],
            workers=tuple(
                WorkerRef(worker_id=_long_id(word, node, slot), node=node, slot=slot)
                for word, (node, slot) in zip(words, places, strict=True)
            ),
            stores=tuple(plain["stores"]),
            mode=Mode(plain["mode"]),
            reason=plain["reason"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All keys of a job that decisions look at, at one revision of the store.

    Args:
        revision: the store was in this state at this revision; later snapshots have higher ones,
            unless the store itself was put back to an older state.
        world_revision: of the World's last change; 0 = there is none. What `propose_world` takes.
        member_revisions: of each member record's last change.
        result: what the job ended with.
        stop: somebody asked the job to end after an agreed step.
    """

    revision: int
    world: World | None
    world_revision: int
    members: Mapping[str, Member] = field(default_factory=dict)
    member_revisions: Mapping[str, int] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    stop: bool = False

    def __post_init__(self) -> None:
        if self.members.keys() != self.member_revisions.keys():
            raise ValueError("each member of a snapshot needs its revision, and no other node one")
        object.__setattr__(self, "members", MappingProxyType(dict(self.members)))
        object.__setattr__(self, "member_revisions", MappingProxyType(dict(self.member_revisions)))

    def to_dict(self) -> Plain:
        """Return plain values for JSON."""
        return {
            "revision": self.revision,
            "world": self.world.to_dict() if self.world else None,
            "world_revision": self.world_revision,
            "members": {node: member.to_dict() for node, member in self.members.items()},
            "member_revisions": dict(self.member_revisions),
            "result": self.result,
            "stop": self.stop,
        }

    @classmethod
    @_refuses
    def from_dict(cls, plain: Plain) -> Snapshot:
        """Undo `to_dict`. Raises ValueError."""
        world = plain["world"]
        return cls(
            revision=plain["revision"],
            world=None if world is None else World.from_dict(world),
            world_revision=plain["world_revision"],
            members={node: Member.from_dict(each) for node, each in plain["members"].items()},
            member_revisions=plain["member_revisions"],
            result=plain["result"],
            stop=bool(plain["stop"]),
        )


def _short_id(worker: WorkerRef) -> str:
    usual = f"{worker.node}.{worker.slot}-"
    suffix = worker.worker_id.removeprefix(usual)
    if suffix and suffix != worker.worker_id and not suffix.startswith(_WHOLE_ID):
        return suffix
    return _WHOLE_ID + worker.worker_id


def _long_id(word: str, node: str, slot: int) -> str:
    if word.startswith(_WHOLE_ID):
        return word.removeprefix(_WHOLE_ID)
    return f"{node}.{slot}-{word}"


def _places(nodes: list[str], runs: list[int]) -> Iterator[tuple[str, int]]:
    for i in range(0, len(runs), 3):
        index, first, count = runs[i : i + 3]
        if index < 0:
            raise ValueError("a run of a World names no node")
        for slot in range(first, first + count):
            yield nodes[index], slot
