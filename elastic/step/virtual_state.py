"""State of the user's that belongs to a virtual rank and follows it from worker to worker.

One object stands for all virtual ranks: before the body of a micro-batch it is given that virtual
rank's state, afterwards its new state is taken. The new state rides in the agreement of the step,
so it counts exactly when the step does, every worker has it from then on, and no death loses it.
With accumulation each of the micro-batches of a virtual rank has a state of its own.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgpack

from elastic.errors import UserError
from elastic.values import NotPlain, from_plain, to_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_BYTES = 1 << 20
"""Of one state of one virtual rank: it travels to every worker with every step that changes it."""


class VirtualState:
    """The registered objects and the agreed state of every leaf."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._initial: dict[str, Any] = {}
        self._agreed: dict[str, dict[int, Any]] = {}
        self._claimed: set[str] = set()

    def add(self, name: str, obj: Any) -> None:
        """Register an object; its state now is what every virtual rank begins with."""
        if name in self._objects:
            raise UserError(f"the state name {name!r} is used twice; give each object its own")
        self._objects[name] = obj
        self._initial[name] = _taken(name, obj)

    def __contains__(self, name: str) -> bool:
        """Whether an object is registered under this name."""
        return name in self._objects

    def enter(self, leaf: int) -> None:
        """Give every object the agreed state of a leaf."""
        for name, obj in self._objects.items():
            plain = self._agreed.get(name, {}).get(leaf, self._initial[name])
            obj.load_state_dict(from_plain(copy.deepcopy(plain)))

    def leave(self, leaf: int) -> dict[str, Any]:
        """Return the states that the body of a leaf has changed, by name."""
        changed = {}
        for name, obj in self._objects.items():
            plain = _taken(name, obj)
            if plain != self._agreed.get(name, {}).get(leaf, self._initial[name]):
                changed[name] = plain
        return changed

    def apply(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over what a step's agreement says."""
        for leaf, named in states.items():
            for name, plain in named.items():
                self._agreed.setdefault(name, {})[leaf] = plain

    # -- as part of the job's state -------------------------------------------------------------

    def to_dict(self) -> dict[str, list[list[Any]]]:
        """Return the agreed states as plain data: name -> [[leaf, state], ...]."""
        return {
            name: [[leaf, states[leaf]] for leaf in sorted(states)]
            for name, states in sorted(self._agreed.items())
        }

    def install(self, plain: Mapping[str, Any]) -> None:
        """Take over what `to_dict` returned elsewhere, for objects known now or later."""
        self._agreed = {
            name: {int(leaf): state for leaf, state in states} for name, states in plain.items()
        }

    def unclaimed(self) -> list[str]:
        """Return names of agreed state that no object is registered for."""
        return sorted(self._agreed.keys() - self._objects.keys())


def _taken(name: str, obj: Any) -> Any:
    try:
        plain = to_plain(obj.state_dict(), f"{name}.state_dict()")
    except NotPlain as error:
        raise UserError(f"state per virtual rank cannot be kept: {error}") from error
    size = len(msgpack.packb(plain))
    if size > MOST_BYTES:
        raise UserError(
            f"the state {name!r} has {size:,} bytes per virtual rank; it may have {MOST_BYTES:,}, "
            "because it travels with every step: keep large values in global state or on disk"
        )
    return plain
