"""Which checkpoints there are, and which one a run goes on from.

Names of directories are numbers to us, never text; what does not parse is a stranger and left
alone. Only a manifest makes a checkpoint: directories without one, pointers and markers mean
nothing. The device is asked each time, and an error is an error: "nothing found" is said only by a
device that has answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.commit import on_lineage
from ckpt.errors import CheckpointError, Corrupt, NotFound
from ckpt.manifest import (
    MANIFEST_NAME,
    Manifest,
    checkpoint_dir,
    decode,
    parse_generation_dir,
    parse_step_dir,
)
from ckpt.tier import Tier

__all__ = ["Candidates", "Found", "list_checkpoints", "load_manifest", "survey"]

_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A place where a checkpoint is or was to be."""

    step: int
    generation: int
    manifest: Manifest | None
    """None when there is none, or a damaged one."""
    committed: bool
    """There is a manifest, even if it is damaged."""
    current: bool
    """It lies on the lineage of the newest generation."""
    problem: str = ""


def list_checkpoints(tier: Tier) -> list[tuple[int, int]]:
    """All (step, generation) that have a place, by number. Whether committed is not looked at."""
    steps = sorted(s for name in tier.list_dir("") if (s := parse_step_dir(name)) is not None)
    if not steps:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(steps))) as pool:
        names = list(pool.map(lambda step: tier.list_dir(f"step-{step:09d}"), steps))
    places = []
    for step, found in zip(steps, names, strict=True):
        parsed = [parse_generation_dir(name) for name in found]
        places += [(step, generation) for generation in parsed if generation is not None]
    return sorted(places)


def load_manifest(tier: Tier, step: int, generation: int) -> Manifest:
    """The manifest that stands there. Raises NotFound, Corrupt and what the tier raises."""
    path = f"{checkpoint_dir(step, generation)}/{MANIFEST_NAME}"
    where = f"{tier.url}/{path}"
    manifest = decode(tier.get(path), where)
    if (manifest.step, manifest.generation) != (step, generation):
        raise Corrupt(
            f"{where} belongs to step {manifest.step}, generation {manifest.generation}",
            kind="manifest-swapped",
        )
    return manifest


def survey(tier: Tier) -> list[Found]:
    """Everything at one tier, oldest first, each judged by its manifest."""
    places = list_checkpoints(tier)

    def look(place: tuple[int, int]) -> tuple[Manifest | None, bool, str]:
        try:
            return load_manifest(tier, *place), True, ""
        except NotFound:
            return None, False, "no manifest: not committed"
        except Corrupt as error:
            return None, True, error.message

    if not places:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(places))) as pool:
        looks = list(pool.map(look, places))
    manifests = [manifest for manifest, _, _ in looks if manifest is not None]
    newest = max(manifests, key=lambda m: (m.generation, m.step), default=None)
    return [
        Found(
            step=step,
            generation=generation,
            manifest=manifest,
            committed=committed,
            current=newest is not None
            and manifest is not None
            and on_lineage(step, generation, newest.lineage),
            problem=problem,
        )
        for (step, generation), (manifest, committed, problem) in zip(places, looks, strict=True)
    ]


class Candidates:
    """The checkpoints of several roots, nearest root first, newest usable one first.

    The lineage is that of the highest generation with a sound manifest anywhere; what is off it is
    never offered. Manifests are read when they are needed.
    """

    def __init__(self, tiers: Sequence[Tier], *, skip_unreachable: bool) -> None:
        self.problems: list[tuple[str, str]] = []
        """(place, what was wrong with it) of what had to be passed over."""
        self._tiers = tiers
        self._at: dict[tuple[int, int], list[Tier]] = {}
        for tier in tiers:
            try:
                places = list_checkpoints(tier)
            except CheckpointError as error:
                if not skip_unreachable:
                    raise
                self.problems.append((tier.url, error.message))
                continue
            for place in places:
                self._at.setdefault(place, []).append(tier)
        self._skip_unreachable = skip_unreachable
        self._loaded: dict[tuple[int, int], Manifest | None] = {}

    def places(self) -> list[tuple[int, int]]:
        """All (step, generation) that have a place in some root, by number."""
        return sorted(self._at)

    def newest_first(self) -> list[tuple[int, int]]:
        """All places on the newest lineage, by step, the newest first."""
        for step, generation in sorted(self._at, key=lambda p: (p[1], p[0]), reverse=True):
            manifest = self.load(step, generation)
            if manifest is not None:
                lineage = manifest.lineage
                return sorted((p for p in self._at if on_lineage(*p, lineage)), reverse=True)
        return []

    def load(self, step: int, generation: int) -> Manifest | None:
        """The manifest from the nearest root that has a sound one; None if none has."""
        place = (step, generation)
        if place in self._loaded:
            return self._loaded[place]
        found: Manifest | None = None
        for tier in self._at.get(place, ()):
            try:
                found = load_manifest(tier, step, generation)
                break
            except NotFound:
                continue  # not committed here, perhaps elsewhere
            except Corrupt as error:
                self.problems.append((f"{tier.url}/{checkpoint_dir(*place)}", error.message))
            except CheckpointError as error:
                if not self._skip_unreachable:
                    raise
                self.problems.append((tier.url, error.message))
        self._loaded[place] = found
        return found
