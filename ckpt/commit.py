"""Commit: which packs together are a checkpoint, and which checkpoint is the newest.

No collective and no coordinator takes part. Each worker's save service publishes an entry for each
pack that is safe; whoever sees entries that cover every segment may write the manifest. Two rules
keep worlds apart: entries combine only when both the step and the generation that agreed on the
step are equal, and a checkpoint is chosen only if it lies on the lineage of the newest generation.

A lineage is [(generation, base step), ...]: generation g began from the state of its base step. A
run that went back to step 100 in generation 4 has (4, 100) in it, which cuts off what generation 3
wrote after step 100: shown, never chosen. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import Conflict, Corrupt
from ckpt.manifest import Manifest, PackRef
from ckpt.pack import Lineage, decode_index, encode_index
from ckpt.slices import TensorInfo, TensorSlice, check_disjoint

__all__ = ["Missing", "assemble", "make_entry", "on_lineage", "uncovered_rows"]

MAX_ROWS = 48_000
"""Slices up to which the manifest lists the rows of each pack: keeps it below 1 MB."""
MAX_INDEX_CHARS = 40_000
"""Longest index that an entry carries; with it an entry stays below 64 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The entries do not make a checkpoint yet."""

    step: int
    generation: int
    segments: tuple[int, ...]
    """Segments that no entry has."""
    num_segments: int | None
    """None when there is no entry at all."""

    def __str__(self) -> str:
        if self.num_segments is None:
            return f"no pack of step {self.step}, generation {self.generation} is known"
        shown = ", ".join(map(str, self.segments[:8])) + (", ..." if len(self.segments) > 8 else "")
        return (
            f"step {self.step}, generation {self.generation} lacks segments {shown} "
            f"({len(self.segments)} of {self.num_segments})"
        )


def make_entry(  # noqa: PLR0913 - a record with many fields
    *,
    job: str,
    node: str,
    worker_id: str,
    step: int,
    generation: int,
    object: str,
    size: int,
    crc: int,
    footer_offset: int,
    footer_bytes: int,
    footer_crc: int,
    segments: Sequence[int],
    num_segments: int,
    lineage: Lineage,
    extra_crc: int,
    slices: Sequence[TensorSlice],
) -> dict[str, Any]:
    """What is published about one safe pack: plain values, below 64 kB."""
    index = encode_index(slices)
    return {
        "job": job,
        "node": node,
        "worker_id": worker_id,
        "step": step,
        "generation": generation,
        "object": object,
        "size": size,
        "crc": crc,
        "footer_offset": footer_offset,
        "footer_bytes": footer_bytes,
        "footer_crc": footer_crc,
        "segments": list(segments),
        "num_segments": num_segments,
        "lineage": [list(pair) for pair in lineage],
        "extra_crc": extra_crc,
        "index": index if len(index) <= MAX_INDEX_CHARS else None,
    }


def assemble(
    entries: Iterable[Mapping[str, Any]],
    *,
    step: int,
    generation: int,
    extra: Mapping[str, Any] | None = None,
) -> Manifest | Missing:
    """The manifest of (step, generation), or what is missing. The order of entries is irrelevant.

    Entries of other steps or generations are left aside; of two entries of one worker the first
    counts. Raises Conflict if entries contradict each other, or if all segments are there but some
    rows are not: such a checkpoint must not exist.
    """
    chosen: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        if entry["step"] == step and entry["generation"] == generation:
            chosen.setdefault(entry["worker_id"], entry)
    parts = [chosen[worker_id] for worker_id in sorted(chosen)]
    if not parts:
        return Missing(step=step, generation=generation, segments=(), num_segments=None)
    for field in ("job", "num_segments", "lineage", "extra_crc"):
        for part in parts[1:]:
            if part[field] != parts[0][field]:
                raise Conflict(
                    f"the packs of step {step} by {parts[0]['worker_id']} and {part['worker_id']} "
                    f"differ in {field}",
                    kind="entries-differ",
                    field=field,
                )
    num_segments = int(parts[0]["num_segments"])
    missing = set(range(num_segments)).difference(*(part["segments"] for part in parts))
    if missing:
        return Missing(
            step=step,
            generation=generation,
            segments=tuple(sorted(missing)),
            num_segments=num_segments,
        )
    tensors, rows = _index(parts)
    return Manifest(
        job=parts[0]["job"],
        step=step,
        generation=generation,
        lineage=tuple((int(g), int(base)) for g, base in parts[0]["lineage"]),
        num_segments=num_segments,
        tensors=tensors,
        packs=tuple(
            PackRef(
                object=part["object"],
                worker_id=part["worker_id"],
                node=part["node"],
                size=part["size"],
                crc=part["crc"],
                footer_offset=part["footer_offset"],
                footer_bytes=part["footer_bytes"],
                footer_crc=part["footer_crc"],
                segments=tuple(part["segments"]),
                rows=part_rows,
            )
            for part, part_rows in zip(parts, rows, strict=True)
        ),
        extra={} if extra is None else extra,
    )


def on_lineage(step: int, generation: int, lineage: Lineage) -> bool:
    """True if a run with this lineage went through `step` as `generation` agreed on it."""
    for i, (each, _base) in enumerate(lineage):
        if each == generation:
            return all(step <= base for _, base in lineage[i + 1 :])
    return False


def uncovered_rows(
    tensors: Mapping[str, TensorInfo], slices: Iterable[TensorSlice]
) -> list[tuple[str, int, int]]:
    """Rows of `tensors` that no slice holds, as (name, start, stop). Slices may overlap."""
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    for each in slices:
        if each.start < each.stop:
            ranges[each.name].append((each.start, each.stop))
    gaps = []
    for name, info in tensors.items():
        at = 0
        for start, stop in sorted(ranges[name]):
            if start > at:
                gaps.append((name, at, start))
            at = max(at, stop)
        if at < info.rows:
            gaps.append((name, at, info.rows))
    return gaps


Rows = tuple[tuple[int, int, int], ...]


def _index(
    parts: Collection[Mapping[str, Any]],
) -> tuple[dict[str, TensorInfo] | None, list[Rows | None]]:
    """Tensors of all parts, and for each part its rows; None where that is too much to list."""
    nothing: list[Rows | None] = [None] * len(parts)
    if any(part["index"] is None for part in parts):
        return None, nothing
    slices = [decode_index(part["index"]) for part in parts]
    tensors: dict[str, TensorInfo] = {}
    for part, part_slices in zip(parts, slices, strict=True):
        for each in part_slices:
            if tensors.setdefault(each.name, each.info) != each.info:
                raise Conflict(
                    f"{each.name} is {each.info} in the pack of {part['worker_id']} and "
                    f"{tensors[each.name]} in another",
                    kind="entries-differ",
                    field=each.name,
                )
        try:
            check_disjoint(part_slices)
        except ValueError as error:
            raise Corrupt(f"the pack of {part['worker_id']}: {error}", kind="index") from error
    gaps = uncovered_rows(tensors, (each for part in slices for each in part))
    if gaps:
        name, start, stop = gaps[0]
        raise Conflict(
            f"every segment is there, but no pack has rows [{start}, {stop}) of {name}",
            kind="rows-missing",
        )
    ordered = dict(sorted(tensors.items()))
    if sum(map(len, slices)) > MAX_ROWS:
        return ordered, nothing
    number = {name: i for i, name in enumerate(ordered)}
    return ordered, [
        tuple((number[each.name], each.start, each.stop) for each in part) for part in slices
    ]
