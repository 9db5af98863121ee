"""Carries out the transfers of a recovery plan.

Rows are needed before the next forward, so they are waited for. Optimizer state for new holders
is only needed at the next agreement, so it moves in the group's thread while the next step is
computed. Nobody changes optimizer state before that agreement, so what is sent is the plan's step.

One blob per (source, target): header length, msgpack header, then the tensors, each aligned.
"""

from __future__ import annotations

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


def transfer_state(
    transfers: Sequence[Transfer],
    rank_of: Mapping[str, int],
    group: Group,
    layout: StateLayout,
    optimizers: Sequence[SegmentOptimizer],
) -> int:
    """Move optimizer state to new holders and install it there; returns bytes sent here.

    The extra segment (buffers) has no optimizer state; its rows are all there is to it.
    """
    works: list[tuple[Any, torch.Tensor]] = []
    sizes: list[tuple[int, int, torch.Tensor, Any]] = []
    moved = 0
    for index, transfer in enumerate(transfers):
        source, target = rank_of[transfer.source], rank_of[transfer.target]
        if group.rank == target:
            size = torch.zeros(1, dtype=torch.int64)
            sizes.append((index, source, size, group.receive(size, source, _TAG_SIZE + index)))
        elif group.rank == source:
            segments = [s for s in transfer.segments if s < layout.num_trainable]
            blob = pack_state(optimizers, segments)
            size = torch.tensor([blob.numel()], dtype=torch.int64)
            works.append((group.send(size, target, _TAG_SIZE + index), size))
            works.append((group.send(blob, target, _TAG_BLOB + index), blob))
            moved += blob.numel()
    arriving: list[tuple[Any, torch.Tensor]] = []
    for index, source, size, work in sizes:
        group.wait(work)
        blob = torch.empty(int(size.item()), dtype=torch.uint8)
        arriving.append((group.receive(blob, source, _TAG_BLOB + index), blob))
    for work, blob in arriving:
        group.wait(work)
        unpack_state(blob, optimizers, layout.device)
    for work, _ in works:
        group.wait(work)
    return moved


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
