"""The gradients of one step: partial sums to primaries, finished gradients to twins.

    main thread                         the group's thread
    send(bucket)  as soon as its        run(): for every bucket of this primary, wait for the
    sums are complete here              others' sums, finish the tree, forward it to the twins

Sends start from the main thread, in mid-backward where the sums of a bucket allow it, and never
block. Receives are posted for the whole step at once. What the group's thread waits for never
waits for that thread itself on another worker: all sends of partial sums come from main threads.

Bytes are received only into buffers that belong to the generation, and are copied into live
memory after their wait succeeded: an operation of a cut group may still write into its target
later.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic.step.layout import ALIGN_BYTES
from elastic.step.tree import Node, merges, partials

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic.step.exchange import Exchange
    from elastic.step.layout import Span

TAG_PARTIAL = 1 << 24
TAG_FINISHED = 2 << 24
TAG_ROWS = 3 << 24
TAG_CONSTANT = TAG_ROWS - 1
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


class Reduction:
    """The transfers of one step.

    Args:
        exchange: the generation's buffers and shares.
        present: number of leaves that are not empty in this step.
        total_weight: what the sum of all leaves is divided by.
    """

    def __init__(self, exchange: Exchange, present: int, total_weight: float) -> None:
        self._exchange = exchange
        self._group = exchange.group
        self._present = present
        self._total_weight = total_weight
        self._held_by: list[tuple[Node, ...]] = [
            partials(r.start, r.stop, exchange.num_leaves, present) for r in exchange.shares
        ]
        self._nodes: Mapping[Node, torch.Tensor] = {}
        self._constant: torch.Tensor | None = None
        self._works: list[Any] = []
        self._complete: set[int] = set()
        self._all_complete = False
        self.norms: dict[int, float] = {}

    # -- main thread ----------------------------------------------------------------------------

    def send(self, bucket: Bucket, nodes: Mapping[Node, torch.Tensor]) -> None:
        """Take a bucket whose sums are complete on this worker; raises GroupBroken."""
        exchange = self._exchange
        if bucket.index in self._complete:
            return
        self._nodes = nodes
        if bucket.primary != exchange.rank and bucket.hi > bucket.lo:
            for k, node in enumerate(self._held_by[exchange.rank]):
                tag = TAG_PARTIAL + bucket.index * _TAGS_PER_BUCKET + k
                data = nodes[node][bucket.lo : bucket.hi]
                self._works.append(exchange.send(data, bucket.primary, tag))
        with self._group.changed:
            self._complete.add(bucket.index)
            self._group.changed.notify_all()

    def finish(self, nodes: Mapping[Node, torch.Tensor], constant: torch.Tensor | None) -> None:
        """Take all buckets that are left, and the buffers after leaf 0 from its worker."""
        exchange = self._exchange
        self._nodes = nodes
        for bucket in exchange.buckets:
            self.send(bucket, nodes)
        if constant is not None and exchange.layout.has_buffers:
            self._works.extend(
                exchange.send(constant, holder, TAG_CONSTANT)
                for holder in exchange.constant_holders
                if holder != exchange.rank
            )
        self._constant = constant
        with self._group.changed:
            self._all_complete = True
            self._group.changed.notify_all()

    # -- the group's thread ---------------------------------------------------------------------

    def run(self) -> None:
        """Bring the finished gradient of every held segment into `finished`."""
        exchange = self._exchange
        incoming = self._post_partials()
        twins = self._post_finished()
        constants = self._post_constant()
        all_nodes = [node for owned in self._held_by for node in owned]
        plan = merges(all_nodes, exchange.num_leaves, self._present)
        forwarded: list[Any] = []
        # Backward goes from the last parameters to the first, so the last buckets come first.
        for bucket in reversed(exchange.buckets):
            if bucket.primary != exchange.rank:
                continue
            if bucket.hi == bucket.lo:
                self.norms.update(dict.fromkeys(range(bucket.first, bucket.last), 0.0))
                continue
            self._group.wait_for(functools.partial(self._complete.__contains__, bucket.index))
            self._finish(bucket, incoming[bucket.index], plan)
            finished = exchange.finished[bucket.lo : bucket.hi]
            forwarded.extend(
                exchange.send(finished, twin, TAG_FINISHED + bucket.index)
                for twin in bucket.holders[1:]
            )
            self._take_norms(bucket)
        for bucket, work in twins:
            self._group.wait(work)
            exchange.finished[bucket.lo : bucket.hi].copy_(exchange.twin_landing[bucket.index])
        self._group.wait_for(lambda: self._all_complete)
        self._take_constant(constants)
        for work in (*self._works, *forwarded):
            self._group.wait(work)

    def _post_partials(self) -> dict[int, list[tuple[Node, Any]]]:
        exchange = self._exchange
        incoming: dict[int, list[tuple[Node, Any]]] = {}
        for bucket in reversed(exchange.buckets):
            if bucket.primary != exchange.rank or bucket.hi == bucket.lo:
                continue
            posted = []
            for rank, owned in enumerate(self._held_by):
                if rank == exchange.rank:
                    continue
                for k, node in enumerate(owned):
                    landing = exchange.landing.get((bucket.index, node))
                    if landing is None:
                        landing = landing_buffer(bucket.lo, bucket.hi)
                        exchange.landing[bucket.index, node] = landing
                    tag = TAG_PARTIAL + bucket.index * _TAGS_PER_BUCKET + k
                    posted.append((node, self._group.receive(landing, rank, tag)))
            incoming[bucket.index] = posted
        return incoming

    def _post_finished(self) -> list[tuple[Bucket, Any]]:
        exchange = self._exchange
        posted = []
        for bucket in reversed(exchange.buckets):
            if exchange.rank in bucket.holders[1:] and bucket.hi > bucket.lo:
                landing = exchange.twin_landing.get(bucket.index)
                if landing is None:
                    landing = landing_buffer(bucket.lo, bucket.hi)
                    exchange.twin_landing[bucket.index] = landing
                work = self._group.receive(landing, bucket.primary, TAG_FINISHED + bucket.index)
                posted.append((bucket, work))
        return posted

    def _finish(
        self,
        bucket: Bucket,
        incoming: Sequence[tuple[Node, Any]],
        plan: Sequence[tuple[Node, Node, Node]],
    ) -> None:
        exchange = self._exchange
        lo, hi = bucket.lo, bucket.hi
        have: dict[Node, torch.Tensor] = {node: flat[lo:hi] for node, flat in self._nodes.items()}
        for node, work in incoming:
            self._group.wait(work)
            have[node] = exchange.landing[bucket.index, node]
        spans = exchange.spans[bucket.index]
        for left, right, result in plan:
            target, other = have.pop(left), have.pop(right)
            for span in spans:
                typed(target, span, lo).add_(typed(other, span, lo))
            have[result] = target
        assert len(have) == 1, "the tree was not finished"
        (total,) = have.values()
        for span in spans:
            torch.div(
                typed(total, span, lo),
                self._total_weight,
                out=exchange.finished[span.lo : span.hi].view(span.dtype),
            )

    def _take_norms(self, bucket: Bucket) -> None:
        """Keep the squared 2-norm of each segment: its pieces' sums in their order."""
        exchange = self._exchange
        owners: list[int] = []
        views: list[torch.Tensor] = []
        for segment in range(bucket.first, bucket.last):
            self.norms[segment] = 0.0
            for span in exchange.layout.segment_spans[segment]:
                owners.append(segment)
                views.append(exchange.finished[span.lo : span.hi].view(span.dtype))
        for segment, norm in zip(owners, torch._foreach_norm(views), strict=True):
            self.norms[segment] += float(norm) ** 2

    # -- the extra segment: buffers as virtual rank 0 left them -----------------------------------

    def _post_constant(self) -> list[Any]:
        exchange = self._exchange
        if not self._present or not exchange.layout.has_buffers:
            return []
        owner = next(rank for rank, share in enumerate(exchange.shares) if 0 in share)
        if exchange.rank in exchange.constant_holders and exchange.rank != owner:
            exchange.constant_landing = torch.empty_like(exchange.finished_constant)
            return [self._group.receive(exchange.constant_landing, owner, TAG_CONSTANT)]
        return []

    def _take_constant(self, posted: Sequence[Any]) -> None:
        exchange = self._exchange
        if not exchange.layout.has_buffers:
            exchange.finished_constant.copy_(exchange.layout.canonical)
        elif self._constant is not None and exchange.rank in exchange.constant_holders:
            exchange.finished_constant.copy_(self._constant)
        for work in posted:
            self._group.wait(work)
            exchange.finished_constant.copy_(exchange.constant_landing)


def landing_buffer(lo: int, hi: int) -> torch.Tensor:
    """Return a fresh buffer for bytes [lo:hi) of a flat buffer, aligned as they are there."""
    base = lo // ALIGN_BYTES * ALIGN_BYTES
    return torch.empty(hi - base, dtype=torch.uint8)[lo - base :]


def typed(tensor: torch.Tensor, span: Span, lo: int) -> torch.Tensor:
    """Return the part of a bucket's bytes that a span covers, in its dtype; lo: bucket's start."""
    return tensor[span.lo - lo : span.hi - lo].view(span.dtype)
