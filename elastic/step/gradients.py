"""A worker's leaves of the summation tree, folded as they come.

The gradient of each micro-batch is one leaf of a fixed binary tree over all leaves of the step.
A worker folds its own leaves along that tree, holding at most log2(n) + 1 gradient-sized
buffers. Autograd's own accumulation is not used across leaves: its order would depend on who
computes what.

A leaf may be given parameter by parameter while its backward still runs (`give`), or whole when
it ends (`close`); the sums are the same. With buckets to watch, the sums of a bucket are complete
as soon as all its parameters are given, and `ready` is called with it.

A parameter that a leaf did not touch counts as zeros, added as zeros, so that the bits do not
depend on where the fold happened; whether anybody touched it is decided by the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic.errors import UserError
from elastic.step.tree import Node, fold_after, partials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic.step.layout import Span, StateLayout
    from elastic.step.reduction import Bucket


class _Buffer:
    """One gradient-sized flat buffer and its per-parameter views."""

    __slots__ = ("flat", "views")

    def __init__(self, layout: StateLayout) -> None:
        self.flat = torch.zeros_like(layout.flat)
        self.views = [entry.view(self.flat) for entry in layout.trainable]


class Watch:
    """Which buckets wait for which parameters; made once for the buckets of a generation."""

    def __init__(self, layout: StateLayout, buckets: Sequence[Bucket]) -> None:
        self.buckets = [bucket for bucket in buckets if bucket.hi > bucket.lo]
        self.spans: list[list[Span]] = [list(layout.spans(b.lo, b.hi)) for b in self.buckets]
        self.buckets_of: list[list[int]] = [[] for _ in layout.trainable]
        self.counts = [0] * len(self.buckets)
        for k, bucket in enumerate(self.buckets):
            for i, entry in enumerate(layout.trainable):
                if entry.offset < bucket.hi and entry.offset + entry.nbytes > bucket.lo:
                    self.buckets_of[i].append(k)
                    self.counts[k] += 1


class LeafFold:
    """Folds the leaves [start:stop) of one step.

    `begin` a step; for each leaf in order `open` it, perhaps `give` parameters, and `close` it with
    the rest; then read `nodes`: partial sums keyed by their tree node, each a flat uint8 buffer
    with the layout's offsets. Buffers are reused by the next `begin`.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._free: list[_Buffer] = []
        self._stack: list[_Buffer] = []
        self._range = (0, 0)
        self._num_leaves = 1
        self._present = 0
        self._spans = list(layout.spans(0, layout.flat.numel()))
        self._adds = False
        self._merges = 0
        self._given: set[int] = set()
        self._watch: Watch | None = None
        self._left: list[int] = []
        self._ready: Callable[[Bucket], None] = lambda _bucket: None
        self.touched = 0

    def begin(self, start: int, stop: int, num_leaves: int, present: int) -> None:
        """Start a step in which this worker has leaves [start:stop) of `num_leaves`."""
        self._free.extend(self._stack)
        self._stack.clear()
        self._range = (start, stop)
        self._num_leaves = num_leaves
        self._present = present
        self.touched = 0

    def open(
        self,
        leaf: int,
        watch: Watch | None = None,
        ready: Callable[[Bucket], None] = lambda _bucket: None,
    ) -> None:
        """Start a leaf.

        Args:
            leaf: its number; the worker's leaves come in order.
            watch: given with its last leaf: buckets to complete one by one.
            ready: called with each bucket of `watch` whose sums are complete.
        """
        merges = fold_after(leaf, *self._range, self._num_leaves, self._present)
        self._adds = merges > 0
        if not self._adds:
            self._stack.append(self._free.pop() if self._free else _Buffer(self._layout))
        self._merges = max(0, merges - 1)
        self._given.clear()
        self._watch = watch
        self._left = [] if watch is None else list(watch.counts)
        self._ready = ready

    def give(self, i: int, gradient: torch.Tensor) -> None:
        """Add the gradient of parameter i to the open leaf; it is not changed."""
        with torch.no_grad():
            view = self._stack[-1].views[i]
            if self._adds:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        self.touched |= 1 << i
        self._given.add(i)
        self._count(i)

    def close(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        """End the leaf with all parameters that were not given.

        Args:
            gradients: in the layout's parameter order; None where none came. Those of parameters
                that were not given are consumed, the others are not looked at.
            weight: what those are multiplied by.
        """
        rest = [i for i in range(len(gradients)) if i not in self._given]
        found: list[int] = []
        dense: list[torch.Tensor] = []
        absent: list[int] = []
        for i in rest:
            gradient = gradients[i]
            if gradient is None:
                absent.append(i)
                continue
            if gradient.layout is not torch.strided:
                raise UserError(
                    f"parameter {self._layout.trainable[i].name} has a sparse gradient; "
                    "only dense gradients can be summed in a fixed order (use sparse=False)"
                )
            found.append(i)
            dense.append(gradient)
            self.touched |= 1 << i
        views = self._stack[-1].views
        with torch.no_grad():
            if dense:
                if weight != 1.0:
                    torch._foreach_mul_(dense, weight)
                fold = torch._foreach_add_ if self._adds else torch._foreach_copy_
                fold([views[i] for i in found], dense)
            if absent and self._adds:
                torch._foreach_add_([views[i] for i in absent], 0.0)
            elif absent:
                torch._foreach_zero_([views[i] for i in absent])
        for i in rest:
            self._count(i)
        if self._watch is None:
            self._merge(self._spans)
        for _ in range(self._merges):
            self._free.append(self._stack.pop())
        self._watch = None

    def _count(self, i: int) -> None:
        watch = self._watch
        if watch is None:
            return
        for k in watch.buckets_of[i]:
            self._left[k] -= 1
            if not self._left[k]:
                self._merge(watch.spans[k])
                self._ready(watch.buckets[k])

    def _merge(self, spans: Sequence[Span]) -> None:
        """Add the finished top sums downwards, as far as the tree says after this leaf."""
        with torch.no_grad():
            for k in range(self._merges):
                left, right = self._stack[-2 - k].flat, self._stack[-1 - k].flat
                for span in spans:
                    left[span.lo : span.hi].view(span.dtype).add_(
                        right[span.lo : span.hi].view(span.dtype)
                    )

    def nodes(self) -> dict[Node, torch.Tensor]:
        """Return this worker's partial sums; of watched buckets as soon as they are ready."""
        names = partials(*self._range, self._num_leaves, self._present)
        buffers = self._stack[: len(names)]  # the rest is being merged into them
        assert len(names) == len(buffers), "the fold and the tree disagree"
        return {node: buffer.flat for node, buffer in zip(names, buffers, strict=True)}
