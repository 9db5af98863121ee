"""What one generation fixes for its transfers, and the new rows that go to everybody.

Both transfers of a step (gradients: elastic/step/reduction.py; rows: here) go bucket by bucket. A
bucket is a run of neighbouring segments with the same holders, at most `bucket_bytes` long, so a
slice of a flat buffer is a message and nothing is packed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic.step.gradients import Watch
from elastic.step.reduction import TAG_ROWS, Bucket, Reduction, landing_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic.step.layout import StateLayout
    from elastic.step.process_group import Group
    from elastic.step.tree import Node

BUCKET_BYTES = 4 << 20


def make_buckets(
    layout: StateLayout,
    placement: Sequence[Sequence[int]],
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """Cut the trainable segments into buckets; the same on every worker."""
    buckets: list[Bucket] = []
    first = 0
    total = layout.num_trainable
    while first < total:
        holders = tuple(placement[first])
        lo, hi = layout.ranges[first]
        last = first + 1
        while last < total and tuple(placement[last]) == holders:
            a, b = layout.ranges[last]
            if b > a:
                if hi > lo and b - lo > bucket_bytes:
                    break
                lo, hi = (a, b) if hi == lo else (lo, b)
            last += 1
        buckets.append(
            Bucket(index=len(buckets), first=first, last=last, lo=lo, hi=hi, holders=holders)
        )
        first = last
    return tuple(buckets)


class Exchange:
    """The transfers of one generation.

    Args:
        group: the generation's group.
        layout: where rows lie.
        placement: per segment (the extra one last) the ranks of its holders, primary first.
        shares: per rank the range of its leaves.
        finished: flat buffer that takes finished gradients of held segments.
        finished_constant: the same for the extra segment (buffers after the step).
    """

    def __init__(  # noqa: PLR0913 - what one generation fixes
        self,
        *,
        group: Group,
        layout: StateLayout,
        placement: Sequence[Sequence[int]],
        shares: Sequence[range],
        num_leaves: int,
        finished: torch.Tensor,
        finished_constant: torch.Tensor,
    ) -> None:
        self.group = group
        self.layout = layout
        self.rank = group.rank
        self.shares = shares
        self.num_leaves = num_leaves
        self.finished = finished
        self.finished_constant = finished_constant
        self.buckets = make_buckets(layout, placement[: layout.num_trainable])
        self.constant_holders = tuple(placement[layout.num_trainable])
        self.spans = {b.index: list(layout.spans(b.lo, b.hi)) for b in self.buckets}
        self.watch = Watch(layout, self.buckets)
        self.landing: dict[tuple[int, Node], torch.Tensor] = {}
        self.twin_landing: dict[int, torch.Tensor] = {}
        self.constant_landing = torch.empty(0, dtype=torch.uint8)
        self._rows_landing: dict[int, torch.Tensor] = {}
        self.bytes_sent = 0

    def share_out(self, shares: Sequence[range]) -> None:
        """Change who computes which leaves, between two steps, on all workers alike."""
        self.shares = shares
        self.landing.clear()  # it is kept by tree node, and those change

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        """Start sending and count the bytes."""
        self.bytes_sent += tensor.numel()
        return self.group.send(tensor, target, tag)

    def reduction(self, present: int, total_weight: float) -> Reduction:
        """Return the gradient transfers of one step; see there for the arguments."""
        return Reduction(self, present, total_weight)

    # -- rows ----------------------------------------------------------------------------------

    def gather(self, on_rows: Any) -> None:
        """Bring every segment's new rows from its primary to every worker that does not hold it.

        Args:
            on_rows: called as `on_rows(first, last)` when the rows of segments [first:last) are
                in place here.
        """
        works: list[Any] = []
        posted: list[tuple[Bucket, Any]] = []
        for bucket in self.buckets:
            if bucket.hi == bucket.lo:
                on_rows(bucket.first, bucket.last)
            elif self.rank not in bucket.holders:
                landing = self._rows_landing.get(bucket.index)
                if landing is None:
                    landing = landing_buffer(bucket.lo, bucket.hi)
                    self._rows_landing[bucket.index] = landing
                work = self.group.receive(landing, bucket.primary, TAG_ROWS + bucket.index)
                posted.append((bucket, work))
            elif bucket.primary == self.rank:
                rows = self.layout.flat[bucket.lo : bucket.hi]
                works.extend(
                    self.send(rows, rank, TAG_ROWS + bucket.index)
                    for rank in range(self.group.size)
                    if rank not in bucket.holders
                )
        constant = self._gather_constant(works)
        for bucket, work in posted:
            self.group.wait(work)
            self.layout.flat[bucket.lo : bucket.hi].copy_(self._rows_landing[bucket.index])
            on_rows(bucket.first, bucket.last)
        if constant is not None:
            self.group.wait(constant)
            self.layout.canonical.copy_(self.constant_landing)
        on_rows(self.layout.num_trainable, self.layout.num_segments)
        for work in works:
            self.group.wait(work)

    def _gather_constant(self, works: list[Any]) -> Any:
        if not self.layout.has_buffers:
            return None
        tag = TAG_ROWS + (1 << 23)
        holders = self.constant_holders
        if self.rank not in holders:
            self.constant_landing = torch.empty_like(self.layout.canonical)
            return self.group.receive(self.constant_landing, holders[0], tag)
        if self.rank == holders[0]:
            works.extend(
                self.send(self.layout.canonical, rank, tag)
                for rank in range(self.group.size)
                if rank not in holders
            )
        return None
