"""The user's optimizer, run on the fixed pieces of the segments this worker holds.

The user's object stays what it is: it keeps the hyperparameters and is what schedulers act on.
For every optimizer a twin object of the same class is kept whose parameters are the pieces
(dim-0 blocks of parameters, views of the flat buffer) of the held segments. Primary and twin of
a segment run the same arithmetic on the same pieces, whatever the world size.

Row cuts are right only for optimizers that treat every element alone; a list of those is kept.
Others get whole-parameter segments, and what cannot be right either is refused.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from elastic.errors import Misconfigured
from elastic.step.layout import dtype_name
from elastic.step.probe import check_independent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic.step.layout import StateLayout
    from elastic.step.segments import Piece

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam",
        "ASGD", "Rprop",
    )
)  # fmt: skip
_WHOLE = frozenset(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)
_REFUSED = {
    torch.optim.LBFGS: "it calls the model several times in one step",
    torch.optim.SparseAdam: "sparse gradients cannot be summed in a fixed order",
}


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return True when rows of a parameter may be updated apart from each other."""
    return type(optimizer) in _ELEMENTWISE


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise Misconfigured for an optimizer whose result could not be right."""
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise Misconfigured(
                f"{kind.__name__} cannot be prepared: {reason}; use an optimizer such as AdamW"
            )
    if type(optimizer) not in _ELEMENTWISE | _WHOLE:
        check_independent(optimizer)


class SegmentOptimizer:
    """One user optimizer on the pieces of held segments.

    Args:
        optimizer: the user's optimizer; its param_groups are read at every step.
        layout: where parameters lie.
        finished: flat buffer of finished gradients with the layout's offsets.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, layout: StateLayout, finished: torch.Tensor
    ) -> None:
        self.user = optimizer
        self._layout = layout
        self._finished = finished
        self._group_of = {
            layout.index_of[id(p)]: g
            for g, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if id(p) in layout.index_of
        }
        self.inner: Any = object.__new__(type(optimizer))
        self.inner.__dict__.update(optimizer.__dict__)
        for patched in ("step", "zero_grad"):  # instance attributes of schedulers and of ours
            self.inner.__dict__.pop(patched, None)
        self.inner.state = defaultdict(dict)
        self.inner.param_groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": []}
            for group in optimizer.param_groups
        ]
        self._pieces: dict[int, list[tuple[Piece, torch.Tensor]]] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}

    def owns(self, piece: Piece) -> bool:
        """Return True when the piece's parameter belongs to this optimizer."""
        return piece.param in self._group_of

    def hold(self, segments: Iterable[int]) -> None:
        """Hold exactly these trainable segments; state of others is dropped."""
        wanted = set(segments)
        for segment in [s for s in self._pieces if s not in wanted]:
            del self._gradients[segment]
            for _, tensor in self._pieces.pop(segment):
                self.inner.state.pop(tensor, None)
        for segment in sorted(wanted - self._pieces.keys()):
            self._pieces[segment] = [
                (piece, self._tensor(piece))
                for piece in self._layout.segments[segment].pieces
                if self.owns(piece) and piece.stop > piece.start
            ]
            self._gradients[segment] = [
                self._layout.trainable[p.param].view(self._finished, p.start, p.stop)
                for p, _ in self._pieces[segment]
            ]
        for group in self.inner.param_groups:
            group["params"] = []
        for segment in sorted(self._pieces):
            for piece, tensor in self._pieces[segment]:
                self.inner.param_groups[self._group_of[piece.param]]["params"].append(tensor)

    def _tensor(self, piece: Piece) -> torch.Tensor:
        entry = self._layout.trainable[piece.param]
        return entry.view(self._layout.flat, piece.start, piece.stop)

    def step(self, segments: Iterable[int], touched: int) -> None:
        """Apply the finished gradients of these held segments once.

        Args:
            segments: which held segments to step (all others keep their state).
            touched: bit i set if parameter i got a gradient in this step.
        """
        self._take_hyperparameters()
        wanted = set(segments)
        for segment, pieces in self._pieces.items():
            for (piece, tensor), gradient in zip(pieces, self._gradients[segment], strict=True):
                steps = segment in wanted and touched >> piece.param & 1
                tensor.grad = gradient if steps else None
        with torch.no_grad():
            type(self.user).step(self.inner)

    def _take_hyperparameters(self) -> None:
        for mine, theirs in zip(self.inner.param_groups, self.user.param_groups, strict=True):
            for key, value in theirs.items():
                if key != "params":
                    mine[key] = value
        self.inner.defaults = self.user.defaults

    # -- state in and out ------------------------------------------------------------------

    def export_state(self, segment: int) -> list[tuple[Piece, dict[str, Any]]]:
        """Return the state of each piece of a held segment (live tensors, not copies)."""
        return [
            (piece, dict(self.inner.state.get(tensor, {})))
            for piece, tensor in self._pieces[segment]
        ]

    def import_state(self, segment: int, states: Sequence[dict[str, Any]]) -> None:
        """Install the state of each piece of a held segment, in `export_state`'s order."""
        for (_, tensor), state in zip(self._pieces[segment], states, strict=True):
            if state:
                self.inner.state[tensor] = state
            else:
                self.inner.state.pop(tensor, None)


# -- hyperparameters as plain values -----------------------------------------------------------


def capture_hyper(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Return every optimizer's parameter-group values as plain data."""
    return [
        [
            {k: _plain(k, v) for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def install_hyper(optimizers: Sequence[torch.optim.Optimizer], captured: Sequence[Any]) -> None:
    """Set every optimizer's parameter-group values from `capture_hyper`'s result."""
    for optimizer, groups in zip(optimizers, captured, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            for key, value in values.items():
                current = group.get(key)
                if isinstance(current, torch.Tensor):
                    current.fill_(value)
                elif isinstance(current, tuple):
                    group[key] = tuple(value)
                else:
                    group[key] = value


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(key, item) for item in value]
    raise Misconfigured(
        f"optimizer option {key!r} is a {type(value).__name__}, which cannot be agreed on; "
        "use numbers or text"
    )


# -- piece state as bytes ------------------------------------------------------------------------


def describe_state(state: dict[str, Any]) -> tuple[list[list[Any]], list[torch.Tensor]]:
    """Return (plain description, tensors in that order) of one piece's state."""
    description: list[list[Any]] = []
    tensors: list[torch.Tensor] = []
    for name in sorted(state):
        value = state[name]
        if isinstance(value, torch.Tensor):
            description.append([name, "tensor", dtype_name(value.dtype), list(value.shape)])
            tensors.append(value.detach().contiguous())
        elif value is None or isinstance(value, (bool, int, float, str)):
            description.append([name, "plain", value])
        else:
            raise Misconfigured(
                f"optimizer state {name!r} is a {type(value).__name__}; only tensors and plain "
                "values can be held by two workers"
            )
    return description, tensors
