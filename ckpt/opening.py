"""Opening: from roots to the checkpoint that a run should go on from.

Roots are tried nearest first. One process should resolve "the newest" and tell the others its step
and generation: two that ask at different moments may get different answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt.discover import Candidates
from ckpt.errors import Corrupt, NotFound
from ckpt.reader import Checkpoint, ReadProblem
from ckpt.tier import Tier, open_tier

__all__ = ["open_checkpoint", "open_latest"]


def open_latest(  # noqa: PLR0913 - each narrows the question
    roots: Sequence[str],
    *,
    step: int | None = None,
    generation: int | None = None,
    before: int | None = None,
    skip_unreachable: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    """The newest checkpoint on the newest lineage whose packs are all there; None if there is none.

    Roots are paths or fsspec URLs, nearest first. A checkpoint with a damaged manifest, or with a
    pack that is missing or cut in every root, is passed over and reported. A root that cannot be
    asked is an error, since it may have the newest one, unless `skip_unreachable`.

    `before` asks for an older step, e.g. when reading found the newest one damaged. `step`, with or
    without `generation`, asks for that one alone; without, the one on the newest lineage is taken,
    else that of the newest generation which has the step. Its packs are not looked for.

    Raises Corrupt when there are checkpoints but none is usable: that is not "nothing there".
    """
    tiers = [open_tier(root, options=options) for root in roots]
    try:
        candidates = Candidates(tiers, skip_unreachable=skip_unreachable)
        if step is not None:
            found = _named(candidates, tiers, step, generation)
        else:
            found = _newest(candidates, tiers, before)
    except BaseException:
        _close(tiers)
        raise
    if found is None:
        _close(tiers)
    return found


def open_checkpoint(
    roots: str | Sequence[str],
    step: int | None = None,
    *,
    generation: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The checkpoint of `step`, by default the newest. Raises NotFound if there is none."""
    roots = [roots] if isinstance(roots, str) else list(roots)
    found = open_latest(roots, step=step, generation=generation, options=options)
    if found is None:
        what = "checkpoint" if step is None else f"committed checkpoint of step {step}"
        raise NotFound(
            f"there is no {what} in {', '.join(roots)}",
            kind="not-found",
            hint="`ckpt ls` shows what is there",
        )
    return found


def _newest(candidates: Candidates, tiers: Sequence[Tier], before: int | None) -> Checkpoint | None:
    passed_over: list[ReadProblem] = []
    for step, generation in candidates.newest_first():
        if before is not None and step >= before:
            continue
        manifest = candidates.load(step, generation)
        if manifest is None:
            continue
        checkpoint = Checkpoint(manifest, tiers)
        lost = checkpoint.missing_packs()
        if not lost:
            checkpoint.report += _reported(candidates, step, generation) + passed_over
            return checkpoint
        passed_over.append(
            ReadProblem(
                object=manifest.dir,
                start=0,
                stop=0,
                root=", ".join(tier.url for tier in tiers),
                problem=f"{len(lost)} packs are missing or cut everywhere, e.g. {lost[0]}",
                used="an older checkpoint",
            )
        )
    if passed_over or candidates.problems:
        first = passed_over[0].problem if passed_over else candidates.problems[0][1]
        raise Corrupt(
            f"no usable checkpoint was found, but damaged ones are there: {first}",
            kind="nothing-usable",
            hint="look with `ckpt verify`, or begin afresh on purpose",
        )
    return None


def _named(
    candidates: Candidates, tiers: Sequence[Tier], step: int, generation: int | None
) -> Checkpoint | None:
    if generation is None:
        current = [g for s, g in candidates.newest_first() if s == step]
        generations = current + [g for s, g in reversed(candidates.places()) if s == step]
    else:
        generations = [generation]
    for each in generations:
        manifest = candidates.load(step, each)
        if manifest is not None:
            checkpoint = Checkpoint(manifest, tiers)
            checkpoint.report += _reported(candidates, step, each)
            return checkpoint
    if candidates.problems:
        raise Corrupt(
            f"step {step} cannot be used: {candidates.problems[0][1]}", kind="nothing-usable"
        )
    return None


def _reported(candidates: Candidates, step: int, generation: int) -> list[ReadProblem]:
    used = f"step {step} of generation {generation}"
    return [
        ReadProblem(object="manifest", start=0, stop=0, root=place, problem=problem, used=used)
        for place, problem in candidates.problems
    ]


def _close(tiers: Iterable[Tier]) -> None:
    for tier in tiers:
        tier.close()
