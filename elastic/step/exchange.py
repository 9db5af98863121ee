"""The two transfers of a step: partial sums to primaries and twins, new rows to everybody.

Both go bucket by bucket. A bucket is a run of neighbouring segments with the same holders, at
most `bucket_bytes` long, so a slice of a flat buffer is a message and nothing is packed. Receives
are posted for the whole step at once, so that the network works while sums are formed.

Bytes are received only into buffers that belong to the generation, and are copied into live
memory after their wait succeeded: an operation of a cut group may still write into its target
later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic.step.layout import ALIGN_BYTES
from elastic.step.tree import Node, merges, partials

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic.step.layout import Span, StateLayout
    from elastic.step.process_group import Group

BUCKET_BYTES = 4 << 20

_TAG_PARTIAL = 1 << 24
_TAG_FINISHED = 2 << 24
_TAG_ROWS = 3 << 24
_TAGS_PER_BUCKET = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A run of segments [first:last) with the same holders; bytes [lo:hi) of its flat buffer."""

    index: int
    first: int
    last: int
    lo: int
    hi: int
    holders: tuple[int, ...]

    @property
    def primary(self) -> int:
        """Rank of the first holder."""
        return self.holders[0]


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
        self._group = group
        self._layout = layout
        self._rank = group.rank
        self._shares = shares
        self._num_leaves = num_leaves
        self._finished = finished
        self._finished_constant = finished_constant
        self.buckets = make_buckets(layout, placement[: layout.num_trainable])
        self._constant_holders = tuple(placement[layout.num_trainable])
        self._spans = {b.index: list(layout.spans(b.lo, b.hi)) for b in self.buckets}
        self._landing: dict[tuple[int, Node], torch.Tensor] = {}
        self._twin_landing: dict[int, torch.Tensor] = {}
        self._rows_landing: dict[int, torch.Tensor] = {}
        self._constant_landing = torch.empty(0, dtype=torch.uint8)
        self.bytes_sent = 0

    # -- gradients ---------------------------------------------------------------------------

    def reduce(
        self,
        nodes: Mapping[Node, torch.Tensor],
        present: int,
        total_weight: float,
        constant: torch.Tensor | None,
    ) -> None:
        """Bring the finished gradient of every held segment into `finished`.

        Args:
            nodes: this worker's partial sums, flat buffers by tree node.
            present: number of leaves that are not empty in this step.
            total_weight: what the sum of all leaves is divided by.
            constant: value of the buffers after leaf 0, given by the worker of leaf 0.
        """
        held_by: list[tuple[Node, ...]] = [
            partials(r.start, r.stop, self._num_leaves, present) for r in self._shares
        ]
        works: list[Any] = []
        incoming = self._post_partials(held_by)
        twins = self._post_finished()
        constants = self._post_constant(present)
        for bucket in self.buckets:
            if bucket.primary != self._rank and bucket.hi > bucket.lo:
                for k, node in enumerate(held_by[self._rank]):
                    works.append(
                        self._send(
                            nodes[node][bucket.lo : bucket.hi],
                            bucket.primary,
                            _TAG_PARTIAL + bucket.index * _TAGS_PER_BUCKET + k,
                        )
                    )
        works.extend(self._send_constant(constant))
        all_nodes = [node for owned in held_by for node in owned]
        plan = merges(all_nodes, self._num_leaves, present)
        for bucket in self.buckets:
            if bucket.primary == self._rank:
                self._finish(bucket, nodes, incoming.get(bucket.index, []), plan, total_weight)
                works.extend(
                    self._send(
                        self._finished[bucket.lo : bucket.hi],
                        twin,
                        _TAG_FINISHED + bucket.index,
                    )
                    for twin in bucket.holders[1:]
                    if bucket.hi > bucket.lo
                )
        works.extend(self._take_constant(constant, constants))
        for bucket_index, work in twins:
            self._group.wait(work)
            bucket = self.buckets[bucket_index]
            self._finished[bucket.lo : bucket.hi].copy_(self._twin_landing[bucket_index])
        for work in works:
            self._group.wait(work)

    def _send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        self.bytes_sent += tensor.numel()
        return self._group.send(tensor, target, tag)

    def _post_partials(
        self, held_by: Sequence[tuple[Node, ...]]
    ) -> dict[int, list[tuple[Node, Any]]]:
        incoming: dict[int, list[tuple[Node, Any]]] = {}
        for bucket in self.buckets:
            if bucket.primary != self._rank or bucket.hi == bucket.lo:
                continue
            posted = []
            for rank, owned in enumerate(held_by):
                if rank == self._rank:
                    continue
                for k, node in enumerate(owned):
                    landing = self._landing.get((bucket.index, node))
                    if landing is None:
                        landing = landing_buffer(bucket.lo, bucket.hi)
                        self._landing[bucket.index, node] = landing
                    tag = _TAG_PARTIAL + bucket.index * _TAGS_PER_BUCKET + k
                    posted.append((node, self._group.receive(landing, rank, tag)))
            incoming[bucket.index] = posted
        return incoming

    def _post_finished(self) -> list[tuple[int, Any]]:
        posted = []
        for bucket in self.buckets:
            if self._rank in bucket.holders[1:] and bucket.hi > bucket.lo:
                landing = self._twin_landing.get(bucket.index)
                if landing is None:
                    landing = landing_buffer(bucket.lo, bucket.hi)
                    self._twin_landing[bucket.index] = landing
                work = self._group.receive(landing, bucket.primary, _TAG_FINISHED + bucket.index)
                posted.append((bucket.index, work))
        return posted

    def _finish(
        self,
        bucket: Bucket,
        nodes: Mapping[Node, torch.Tensor],
        incoming: Sequence[tuple[Node, Any]],
        plan: Sequence[tuple[Node, Node, Node]],
        total_weight: float,
    ) -> None:
        lo, hi = bucket.lo, bucket.hi
        if hi == lo:
            return
        have: dict[Node, torch.Tensor] = {node: flat[lo:hi] for node, flat in nodes.items()}
        for node, work in incoming:
            self._group.wait(work)
            have[node] = self._landing[bucket.index, node]
        spans = self._spans[bucket.index]
        for left, right, result in plan:
            target, other = have.pop(left), have.pop(right)
            for span in spans:
                _typed(target, span, lo).add_(_typed(other, span, lo))
            have[result] = target
        assert len(have) == 1, "the tree was not finished"
        (total,) = have.values()
        for span in spans:
            torch.div(
                _typed(total, span, lo),
                total_weight,
                out=self._finished[span.lo : span.hi].view(span.dtype),
            )

    # -- the extra segment: buffers as virtual rank 0 left them --------------------------------

    def _constant_owner(self) -> int:
        return next(rank for rank, share in enumerate(self._shares) if 0 in share)

    def _post_constant(self, present: int) -> list[Any]:
        if not present or not self._layout.has_buffers:
            return []
        owner = self._constant_owner()
        if self._rank in self._constant_holders and self._rank != owner:
            self._constant_landing = torch.empty_like(self._finished_constant)
            return [self._group.receive(self._constant_landing, owner, _TAG_ROWS - 1)]
        return []

    def _send_constant(self, constant: torch.Tensor | None) -> list[Any]:
        if constant is None or not self._layout.has_buffers:
            return []
        return [
            self._send(constant, holder, _TAG_ROWS - 1)
            for holder in self._constant_holders
            if holder != self._rank
        ]

    def _take_constant(self, constant: torch.Tensor | None, posted: Sequence[Any]) -> list[Any]:
        if not self._layout.has_buffers:
            self._finished_constant.copy_(self._layout.canonical)
        elif constant is not None and self._rank in self._constant_holders:
            self._finished_constant.copy_(constant)
        for work in posted:
            self._group.wait(work)
            self._finished_constant.copy_(self._constant_landing)
        return []

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
            elif self._rank not in bucket.holders:
                landing = self._rows_landing.get(bucket.index)
                if landing is None:
                    landing = landing_buffer(bucket.lo, bucket.hi)
                    self._rows_landing[bucket.index] = landing
                work = self._group.receive(landing, bucket.primary, _TAG_ROWS + bucket.index)
                posted.append((bucket, work))
            elif bucket.primary == self._rank:
                rows = self._layout.flat[bucket.lo : bucket.hi]
                works.extend(
                    self._send(rows, rank, _TAG_ROWS + bucket.index)
                    for rank in range(self._group.size)
                    if rank not in bucket.holders
                )
        constant = self._gather_constant(works)
        for bucket, work in posted:
            self._group.wait(work)
            self._layout.flat[bucket.lo : bucket.hi].copy_(self._rows_landing[bucket.index])
            on_rows(bucket.first, bucket.last)
        if constant is not None:
            self._group.wait(constant)
            self._layout.canonical.copy_(self._constant_landing)
        on_rows(self._layout.num_trainable, self._layout.num_segments)
        for work in works:
            self._group.wait(work)

    def _gather_constant(self, works: list[Any]) -> Any:
        if not self._layout.has_buffers:
            return None
        tag = _TAG_ROWS + (1 << 23)
        holders = self._constant_holders
        if self._rank not in holders:
            self._constant_landing = torch.empty_like(self._layout.canonical)
            return self._group.receive(self._constant_landing, holders[0], tag)
        if self._rank == holders[0]:
            works.extend(
                self._send(self._layout.canonical, rank, tag)
                for rank in range(self._group.size)
                if rank not in holders
            )
        return None


def landing_buffer(lo: int, hi: int) -> torch.Tensor:
    """Return a fresh buffer for bytes [lo:hi) of a flat buffer, aligned as they are there."""
    base = lo // ALIGN_BYTES * ALIGN_BYTES
    return torch.empty(hi - base, dtype=torch.uint8)[lo - base :]


def _typed(tensor: torch.Tensor, span: Span, lo: int) -> torch.Tensor:
    return tensor[span.lo - lo : span.hi - lo].view(span.dtype)
