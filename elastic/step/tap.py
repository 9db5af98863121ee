"""Takes each gradient in the moment autograd has finished it, so that sending can begin.

The gradient stays in `parameter.grad` for the user's code to look at. Code that changes it
afterwards (or calls backward twice in one micro-batch) changes what was already taken: that is
noticed by the tensor's version counter, and in some steps by comparing values too. The step then
does not count and is computed again without the tap (`changed`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from elastic.step.process_group import GroupBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic.step.gradients import LeafFold
    from elastic.step.layout import StateLayout


class GradientTap:
    """Hooks on all trainable parameters that feed a fold.

    Args:
        layout: whose parameters.
        fold: gets gradients by `give` while the tap is open.
    """

    def __init__(self, layout: StateLayout, fold: LeafFold) -> None:
        self._fold = fold
        self._open = False
        self._verify = False
        self._taken: dict[int, tuple[torch.Tensor, int, torch.Tensor | None]] = {}
        self.changed = False
        self.broken: GroupBroken | None = None
        self._handles = [
            entry.tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._take, i)
            )
            for i, entry in enumerate(layout.trainable)
            if entry.tensor.requires_grad
        ]

    def open(self, *, verify: bool) -> None:
        """Take gradients from now on, for one micro-batch.

        Args:
            verify: compare values at the end, not only version counters; costs a copy.
        """
        self._open = True
        self._verify = verify
        self._taken.clear()

    def close(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """End the micro-batch; `changed` turns True if taken gradients are not what they were.

        Args:
            gradients: what the user's code handed to `optimizer.step()`, in the layout's order.
        """
        self._open = False
        for i, (gradient, version, copy) in self._taken.items():
            same = gradients[i] is gradient and gradient._version == version
            if not same or (copy is not None and not _same_bits(gradient, copy)):
                self.changed = True
        self._taken.clear()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _take(self, i: int, parameter: torch.Tensor) -> None:
        if not self._open:
            return
        gradient = parameter.grad
        if i in self._taken:
            self.changed = True
            return
        if (
            gradient is None
            or gradient.layout is not torch.strided
            or gradient.dtype != parameter.dtype
        ):
            return  # given at the end of the micro-batch, or refused there
        copy = gradient.clone() if self._verify else None
        self._taken[i] = (gradient, gradient._version, copy)
        try:
            self._fold.give(i, gradient)
        except GroupBroken as error:  # not from the middle of the user's backward
            self.broken = error


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    a, b = one.detach().contiguous().reshape(-1), other.contiguous().reshape(-1)
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
