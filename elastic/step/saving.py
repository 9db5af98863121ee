"""Which bytes a worker stages for a checkpoint: the state of the segments it is primary of.

Names are those of the bare model, and the bytes of a tensor do not depend on who staged which
rows: `model.<parameter>`, `optimizer.<parameter>.<state>`, `model.<buffer>`. Counters that every
piece of a parameter carries alike are stored once, by the holder of its first row.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from ckpt.slices import TensorSlice
from elastic.step.layout import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic.step.layout import Entry, StateLayout
    from elastic.step.optimizer import SegmentOptimizer

PLAIN_STATE = "#plain"


def optimizer_prefix(index: int, count: int) -> str:
    """Return the name prefix of one optimizer's state."""
    return f"optimizer{index}" if count > 1 else "optimizer"


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's bytes without copying (CPU) or as a host copy."""
    host = tensor.detach().to("cpu").contiguous()
    if host.numel() == 0:
        return memoryview(b"")
    return _view(host.reshape(-1).view(torch.uint8).numpy())


def _view(array: Any) -> memoryview:
    return memoryview(array)


def pieces_of(
    segments: Iterable[int],
    layout: StateLayout,
    optimizers: Sequence[SegmentOptimizer],
) -> list[tuple[TensorSlice, memoryview]]:
    """Return every slice that the primary of these segments stages."""
    out: list[tuple[TensorSlice, memoryview]] = []
    for segment in segments:
        if segment == layout.num_trainable:
            out.extend(
                _rows(entry, entry.view(layout.canonical), 0, entry.rows)
                for entry in layout.constant
            )
            continue
        for piece in layout.segments[segment].pieces:
            entry = layout.trainable[piece.param]
            out.append(
                _rows(
                    entry,
                    entry.view(layout.flat, piece.start, piece.stop),
                    piece.start,
                    piece.stop,
                )
            )
        for index, optimizer in enumerate(optimizers):
            prefix = optimizer_prefix(index, len(optimizers))
            for piece, state in optimizer.export_state(segment):
                entry = layout.trainable[piece.param]
                out.extend(_state(f"{prefix}.{entry.name}", entry, piece.start, piece.stop, state))
    return out


def _rows(
    entry: Entry, view: torch.Tensor, start: int, stop: int
) -> tuple[TensorSlice, memoryview]:
    piece = TensorSlice(
        name=entry.name,
        dtype=dtype_name(entry.dtype),
        shape=entry.shape,
        start=start,
        stop=stop,
    )
    return piece, as_bytes(view)


def _state(
    name: str, entry: Entry, start: int, stop: int, state: dict[str, Any]
) -> Iterable[tuple[TensorSlice, memoryview]]:
    plain: dict[str, Any] = {}
    whole = start == 0 and stop == entry.rows
    piece_shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
    for key in sorted(state):
        value = state[key]
        if not isinstance(value, torch.Tensor):
            plain[key] = value
            continue
        shape = tuple(value.shape)
        if shape == piece_shape and shape:
            full, lo, hi = entry.shape, start, stop
        elif whole or (start == 0 and not shape):
            full, lo, hi = shape, 0, shape[0] if shape else 1
        else:
            continue  # a counter: the holder of the first row stores it
        yield (
            TensorSlice(
                name=f"{name}.{key}",
                dtype=dtype_name(value.dtype),
                shape=full,
                start=lo,
                stop=hi,
            ),
            as_bytes(value),
        )
    if plain and start == 0:
        text = json.dumps(plain, sort_keys=True).encode()
        yield (
            TensorSlice(
                name=f"{name}.{PLAIN_STATE}",
                dtype="uint8",
                shape=(len(text),),
                start=0,
                stop=len(text),
            ),
            memoryview(text),
        )
