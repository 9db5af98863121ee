"""Carries out the transfers of a recovery plan.

Rows are needed before the next forward, so they are waited for. Optimizer state for new holders
is only needed at the next agreement (whose completion makes them holders), so its transfer is
started here and finished there, and the next step's compute hides it. What is sent is a copy
made at the plan's step; the source may go on.

One blob per (source, target): header length, msgpack header, then the tensors, each aligned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from elastic.step.layout import ALIGN_BYTES
from elastic.step.optimizer import SegmentOptimizer, describe_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic.step.layout import StateLayout
    from elastic.step.process_group import Group
    from elastic.step.recovery import Transfer

_TAG_SIZE = 4 << 24
_TAG_BLOB = 5 << 24
_TAG_ROWS = 6 << 24
_SIZE_BYTES = 8


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def pack_state(optimizers: Sequence[SegmentOptimizer], segments: Sequence[int]) -> torch.Tensor:
    """Return the optimizer state of some held segments as one blob (uint8)."""
    header: list[Any] = []
    tensors: list[torch.Tensor] = []
    for segment in segments:
        per_optimizer = []
        for optimizer in optimizers:
            pieces = []
            for _, state in optimizer.export_state(segment):
                description, found = describe_state(state)
                pieces.append(description)
                tensors.extend(found)
            per_optimizer.append(pieces)
        header.append([segment, per_optimizer])
    head: bytes = msgpack.packb(header)
    offset = _aligned(_SIZE_BYTES + len(head))
    places = []
    for tensor in tensors:
        places.append(offset)
        offset = _aligned(offset + tensor.numel() * tensor.element_size())
    blob = torch.zeros(offset, dtype=torch.uint8)
    prefix = len(head).to_bytes(_SIZE_BYTES, "little") + head
    blob[: len(prefix)] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8)
    for place, tensor in zip(places, tensors, strict=True):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            blob[place : place + nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return blob


def unpack_state(
    blob: torch.Tensor, optimizers: Sequence[SegmentOptimizer], device: torch.device
) -> tuple[int, ...]:
    """Install a blob's states into held segments; returns the segments."""
    size = int.from_bytes(blob[:_SIZE_BYTES].numpy().tobytes(), "little")
    header = msgpack.unpackb(
        blob[_SIZE_BYTES : _SIZE_BYTES + size].numpy().tobytes(), strict_map_key=False
    )
    offset = _aligned(_SIZE_BYTES + size)
    segments = []
    for segment, per_optimizer in header:
        segments.append(segment)
        for optimizer, pieces in zip(optimizers, per_optimizer, strict=True):
            states: list[dict[str, Any]] = []
            for description in pieces:
                state: dict[str, Any] = {}
                for item in description:
                    if item[1] == "plain":
                        state[item[0]] = item[2]
                        continue
                    dtype = getattr(torch, item[2])
                    count = 1
                    for n in item[3]:
                        count *= n
                    nbytes = count * torch.empty(0, dtype=dtype).element_size()
                    raw = blob[offset : offset + nbytes].view(dtype).reshape(item[3])
                    # 0-dim counters stay on the CPU, as torch's optimizers keep them
                    state[item[0]] = raw.clone() if not item[3] else raw.clone().to(device)
                    offset = _aligned(offset + nbytes)
                states.append(state)
            optimizer.import_state(segment, states)
    return tuple(segments)


@dataclass(slots=True)
class Healing:
    """State transfers under way; finished before the next agreement."""

    incoming: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    outgoing: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    bytes_moved: int = 0

    def finish(
        self, group: Group, optimizers: Sequence[SegmentOptimizer], device: torch.device
    ) -> tuple[int, ...]:
        """Wait for every transfer and install what arrived; returns the received segments."""
        received: list[int] = []
        for work, blob in self.incoming:
            group.wait(work)
            received.extend(unpack_state(blob, optimizers, device))
        for work, _ in self.outgoing:
            group.wait(work)
        self.incoming.clear()
        self.outgoing.clear()
        return tuple(received)


def start_state_transfers(
    transfers: Sequence[Transfer],
    rank_of: Mapping[str, int],
    group: Group,
    optimizers: Sequence[SegmentOptimizer],
    num_trainable: int,
) -> Healing:
    """Start moving optimizer state to new holders.

    The extra segment (buffers) has no optimizer state; its rows are all there is to it.
    """
    healing = Healing()
    sizes: list[tuple[int, torch.Tensor, Any]] = []
    for index, transfer in enumerate(transfers):
        source, target = rank_of[transfer.source], rank_of[transfer.target]
        segments = [s for s in transfer.segments if s < num_trainable]
        if group.rank == source:
            blob = pack_state(optimizers, segments)
            size = torch.tensor([blob.numel()], dtype=torch.int64)
            healing.outgoing.append((group.send(size, target, _TAG_SIZE + index), size))
            healing.outgoing.append((group.send(blob, target, _TAG_BLOB + index), blob))
            healing.bytes_moved += blob.numel()
        elif group.rank == target:
            size = torch.zeros(1, dtype=torch.int64)
            work = group.receive(size, source, _TAG_SIZE + index)
            sizes.append((index, size, (source, work)))
    for index, size, (source, work) in sizes:
        group.wait(work)
        blob = torch.empty(int(size.item()), dtype=torch.uint8)
        healing.incoming.append((group.receive(blob, source, _TAG_BLOB + index), blob))
    return healing


def transfer_rows(
    transfers: Sequence[Transfer],
    rank_of: Mapping[str, int],
    group: Group,
    layout: StateLayout,
) -> int:
    """Move parameter rows (and buffers) to workers that lack them; returns bytes sent here."""
    sending: list[tuple[Any, torch.Tensor]] = []
    arriving: list[tuple[Any, torch.Tensor, list[tuple[torch.Tensor, int, int]]]] = []
    moved = 0
    for index, transfer in enumerate(transfers):
        source, target = rank_of[transfer.source], rank_of[transfer.target]
        if group.rank not in (source, target):
            continue
        runs = [layout.rows_range(s) for s in transfer.segments]
        runs = [(flat, lo, hi) for flat, lo, hi in runs if hi > lo]
        total = sum(hi - lo for _, lo, hi in runs)
        if total == 0:
            continue
        if group.rank == source:
            packed = torch.cat([flat[lo:hi] for flat, lo, hi in runs]).cpu()
            sending.append((group.send(packed, target, _TAG_ROWS + index), packed))
            moved += total
        else:
            landing = torch.empty(total, dtype=torch.uint8)
            arriving.append((group.receive(landing, source, _TAG_ROWS + index), landing, runs))
    for work, landing, runs in arriving:
        group.wait(work)
        offset = 0
        for flat, lo, hi in runs:
            flat[lo:hi].copy_(landing[offset : offset + hi - lo])
            offset += hi - lo
    for work, _ in sending:
        group.wait(work)
    return moved
