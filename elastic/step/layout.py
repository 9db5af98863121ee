"""Where each piece of a job's trainable state lies: one flat buffer, cut into fixed segments.

All parameters that an optimizer owns are moved into one flat, 64-byte aligned byte buffer in
registration order; the parameters stay what they were (the same nn.Parameter objects) but become
views of it. A segment is a contiguous range of that buffer, so sending a segment's rows, its
gradient or its partial sums is one slice and no packing. Gradient-sized buffers use the same
offsets, so a slice means the same rows everywhere.

What nobody optimizes (buffers such as BatchNorm statistics, frozen parameters) lies in a second
buffer, which is one extra segment of its own: number `num_trainable`.

Gaps between parameters are zero in every buffer and stay zero, so sums and norms may run over
them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import google_crc32c
import torch

from elastic.errors import Misconfigured
from elastic.step.segments import ParamSpec, Segment, cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ALIGN_BYTES = 64


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the package prefix."""
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class Entry:
    """One tensor of the state and its place in its flat buffer.

    `rows` is the size of dim 0 (1 for a 0-dim tensor); `row_bytes` the bytes of one row.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def rows(self) -> int:
        """Number of dim-0 rows."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, 0 for an empty tensor."""
        return self.nbytes // self.rows if self.rows else 0

    def view(self, flat: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start:stop) of this entry as they lie in `flat` (uint8)."""
        stop = self.rows if stop is None else stop
        a = self.offset + start * self.row_bytes
        b = self.offset + stop * self.row_bytes
        typed = flat[a:b].view(self.dtype)
        if not self.shape:
            return typed.reshape(())
        return typed.view(stop - start, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes [lo:hi) of one dtype."""

    lo: int
    hi: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Alias:
    """A second name of a tied tensor."""

    name: str
    target: str


def _place(
    named: Sequence[tuple[str, torch.Tensor]], device: torch.device
) -> tuple[list[Entry], torch.Tensor]:
    entries = []
    offset = 0
    for name, tensor in named:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(
            Entry(
                name=name,
                tensor=tensor,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                offset=offset,
                nbytes=nbytes,
            )
        )
        offset = _aligned(offset + nbytes)
    flat = torch.zeros(offset, dtype=torch.uint8, device=device)
    return entries, flat


class StateLayout:
    """The flat state of some models under some optimizers.

    Building it moves the models to `device` and re-points their parameters and buffers into the
    flat buffers; values do not change.

    Args:
        models: (prefix, module) in the order they were prepared.
        optimized: parameters that some optimizer owns, by identity.
        splittable: False forces whole-parameter segments.
        num_segments: wanted number of trainable segments.
        device: where the state lives.
    """

    def __init__(
        self,
        models: Sequence[tuple[str, torch.nn.Module]],
        optimized: Sequence[torch.Tensor],
        *,
        splittable: bool,
        num_segments: int,
        device: torch.device,
    ) -> None:
        self.device = device
        owned = {id(p) for p in optimized}
        trainable: list[tuple[str, torch.Tensor]] = []
        constant: list[tuple[str, torch.Tensor]] = []
        seen: dict[int, str] = {}
        self.aliases: list[Alias] = []
        self._buffers: list[tuple[torch.nn.Module, str, str]] = []
        for prefix, module in models:
            module.to(device)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                full = f"{prefix}.{name}"
                if id(parameter) in seen:
                    self.aliases.append(Alias(full, seen[id(parameter)]))
                    continue
                seen[id(parameter)] = full
                (trainable if id(parameter) in owned else constant).append((full, parameter))
        missing = owned - seen.keys()
        if missing:
            raise Misconfigured(
                f"an optimizer holds {len(missing)} parameter(s) that belong to no prepared model; "
                "pass the model to ctx.prepare together with its optimizer"
            )
        for prefix, module in models:
            for owner_name, owner in module.named_modules():
                for name, buffer in owner._buffers.items():
                    if buffer is None:
                        continue
                    dotted = f"{owner_name}.{name}" if owner_name else name
                    full = f"{prefix}.{dotted}"
                    if id(buffer) in seen:
                        self.aliases.append(Alias(full, seen[id(buffer)]))
                        continue
                    seen[id(buffer)] = full
                    constant.append((full, buffer))
                    self._buffers.append((owner, name, full))
        self.trainable, self.flat = _place(trainable, device)
        self.constant, self.canonical = _place(constant, device)
        self.live = torch.zeros_like(self.canonical)
        self._adopt()
        specs = [
            ParamSpec(name=e.name, rows=e.rows, row_bytes=e.row_bytes, splittable=splittable)
            for e in self.trainable
        ]
        self.segments: tuple[Segment, ...] = cut(specs, num_segments)
        self.ranges = [self._range(segment) for segment in self.segments]
        self.segment_spans = [list(self.spans(lo, hi)) for lo, hi in self.ranges]
        self.index_of = {id(e.tensor): i for i, e in enumerate(self.trainable)}

    @property
    def num_trainable(self) -> int:
        """Number of trainable segments."""
        return len(self.segments)

    @property
    def num_segments(self) -> int:
        """Number of all segments, the extra one of buffers and frozen parameters included."""
        return len(self.segments) + 1

    @property
    def has_buffers(self) -> bool:
        """True when some module has buffers."""
        return bool(self._buffers)

    def _adopt(self) -> None:
        with torch.no_grad():
            for entry in self.trainable:
                view = entry.view(self.flat)
                view.copy_(entry.tensor.detach())
                entry.tensor.data = view
            for entry in self.constant:
                entry.view(self.canonical).copy_(entry.tensor.detach())
            self.live.copy_(self.canonical)
            for entry in self.constant:
                entry.tensor.data = entry.view(self.live)

    def reclaim_buffers(self) -> None:
        """Take back buffers that a module replaced by new tensors instead of writing in place."""
        by_name = {e.name: e for e in self.constant}
        for owner, name, full in self._buffers:
            entry = by_name[full]
            current = owner._buffers[name]
            if current is entry.tensor or current is None:
                continue
            with torch.no_grad():
                entry.view(self.live).copy_(current)
            owner._buffers[name] = entry.tensor

    def _range(self, segment: Segment) -> tuple[int, int]:
        lo = hi = None
        for piece in segment.pieces:
            entry = self.trainable[piece.param]
            a = entry.offset + piece.start * entry.row_bytes
            b = entry.offset + piece.stop * entry.row_bytes
            if b > a:
                lo = a if lo is None else min(lo, a)
                hi = b if hi is None else max(hi, b)
        return (0, 0) if lo is None or hi is None else (lo, hi)

    def rows_range(self, segment: int) -> tuple[torch.Tensor, int, int]:
        """Return (flat buffer, lo, hi): where a segment's rows lie."""
        if segment < len(self.segments):
            return (self.flat, *self.ranges[segment])
        return (self.canonical, 0, self.canonical.numel())

    def spans(self, lo: int, hi: int) -> Iterator[Span]:
        """Yield [lo:hi) of the trainable buffer as runs of one dtype.

        Neighbouring parameters of one dtype share a run (the zero gap between them included).
        """
        start: int | None = None
        end = lo
        dtype: torch.dtype | None = None
        for entry in self.trainable:
            a = max(entry.offset, lo)
            b = min(entry.offset + entry.nbytes, hi)
            if b <= a:
                continue
            if dtype is not None and entry.dtype != dtype and start is not None:
                yield Span(start, end, dtype)
                start = None
            if start is None:
                start, dtype = a, entry.dtype
            end = b
        if start is not None and dtype is not None:
            yield Span(start, end, dtype)

    def restore_buffers(self) -> None:
        """Let the next forward start from the buffers' committed values."""
        if self._buffers:
            self.reclaim_buffers()
            self.live.copy_(self.canonical)

    def install_constants(self) -> None:
        """Make the committed buffers and frozen parameters the live ones."""
        self.live.copy_(self.canonical)

    def crc(self) -> str:
        """Return a checksum of all rows (trainable, buffers, frozen)."""
        total = google_crc32c.value(self.flat.cpu().numpy())
        total = google_crc32c.extend(total, self.canonical.cpu().numpy())
        return f"{total:08x}"

    def fingerprint(self) -> str:
        """Return a hash of names, shapes, dtypes and cuts: equal on all workers of a job."""
        digest = hashlib.sha256()
        for entry in (*self.trainable, *self.constant):
            digest.update(f"{entry.name}|{dtype_name(entry.dtype)}|{entry.shape}\n".encode())
        for alias in self.aliases:
            digest.update(f"{alias.name}={alias.target}\n".encode())
        for segment in self.segments:
            digest.update(f"{segment.pieces}\n".encode())
        return digest.hexdigest()[:16]
