"""A worker's leaves of the summation tree, folded as they come.

The gradient of each micro-batch is one leaf of a fixed binary tree over all leaves of the step.
A worker folds its own leaves along that tree, holding at most log2(n) + 1 gradient-sized
buffers. Autograd's own accumulation is not used across leaves: its order would depend on who
computes what.

A parameter that a leaf did not touch counts as zeros, added as zeros, so that the bits do not
depend on where the fold happened; whether anybody touched it is decided by the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic.errors import UserError
from elastic.step.tree import Node, fold_after, partials

if TYPE_CHECKING:
    from elastic.step.layout import StateLayout


class _Buffer:
    """One gradient-sized flat buffer and its per-parameter views."""

    __slots__ = ("flat", "views")

    def __init__(self, layout: StateLayout) -> None:
        self.flat = torch.zeros_like(layout.flat)
        self.views = [entry.view(self.flat) for entry in layout.trainable]


class LeafFold:
    """Folds the leaves [start:stop) of one step.

    `begin` a step, `push` each leaf in order, then read `nodes`: partial sums keyed by their
    tree node, each a flat uint8 buffer with the layout's offsets. Buffers are reused by the next
    `begin`.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._free: list[_Buffer] = []
        self._stack: list[_Buffer] = []
        self._range = (0, 0)
        self._num_leaves = 1
        self._present = 0
        self._spans = list(layout.spans(0, layout.flat.numel()))
        self.touched = 0

    def begin(self, start: int, stop: int, num_leaves: int, present: int) -> None:
        """Start a step in which this worker has leaves [start:stop) of `num_leaves`."""
        self._free.extend(self._stack)
        self._stack.clear()
        self._range = (start, stop)
        self._num_leaves = num_leaves
        self._present = present
        self.touched = 0

    def push(self, leaf: int, gradients: list[torch.Tensor | None], weight: float) -> None:
        """Add one leaf; `gradients` is in the layout's parameter order and is consumed."""
        given = [i for i, g in enumerate(gradients) if g is not None]
        absent = [i for i, g in enumerate(gradients) if g is None]
        dense: list[torch.Tensor] = []
        for i in given:
            gradient = gradients[i]
            assert gradient is not None
            if gradient.layout is not torch.strided:
                raise UserError(
                    f"parameter {self._layout.trainable[i].name} has a sparse gradient; "
                    "only dense gradients can be summed in a fixed order (use sparse=False)"
                )
            dense.append(gradient)
            self.touched |= 1 << i
        with torch.no_grad():
            if weight != 1.0 and dense:
                torch._foreach_mul_(dense, weight)
            merges = fold_after(leaf, *self._range, self._num_leaves, self._present)
            if merges:
                self._add_leaf(self._stack[-1], given, dense, absent)
                merges -= 1
            else:
                self._copy_leaf(given, dense, absent)
            for _ in range(merges):
                right = self._stack.pop()
                left = self._stack[-1]
                for span in self._spans:
                    left.flat[span.lo : span.hi].view(span.dtype).add_(
                        right.flat[span.lo : span.hi].view(span.dtype)
                    )
                self._free.append(right)

    def _copy_leaf(self, given: list[int], dense: list[torch.Tensor], absent: list[int]) -> None:
        buffer = self._free.pop() if self._free else _Buffer(self._layout)
        if dense:
            torch._foreach_copy_([buffer.views[i] for i in given], dense)
        if absent:
            torch._foreach_zero_([buffer.views[i] for i in absent])
        self._stack.append(buffer)

    @staticmethod
    def _add_leaf(
        buffer: _Buffer, given: list[int], dense: list[torch.Tensor], absent: list[int]
    ) -> None:
        if dense:
            torch._foreach_add_([buffer.views[i] for i in given], dense)
        if absent:
            torch._foreach_add_([buffer.views[i] for i in absent], 0.0)

    def nodes(self) -> dict[Node, torch.Tensor]:
        """Return this worker's partial sums after its last leaf."""
        names = partials(*self._range, self._num_leaves, self._present)
        assert len(names) == len(self._stack), "the fold and the tree disagree"
        return {node: buffer.flat for node, buffer in zip(names, self._stack, strict=True)}
