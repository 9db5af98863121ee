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


def open_latest(
    roots: Sequence[str],
    *,
    before: int | None = None,
    skip_unreachable: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    """The newest checkpoint on the newest lineage whose packs are all there; None if there is none.

    Roots are paths or fsspec URLs, nearest first. A checkpoint with a damaged manifest or a missing
    or cut pack in every root is passed over and reported. `before` asks for an older step, e.g.
    when reading found the newest one damaged. A root that cannot be asked is an error, since it may
    have the newest one, unless `skip_unreachable`.
    """
    tiers = [open_tier(root, options=options) for root in roots]
    try:
        candidates = Candidates(tiers, skip_unreachable=skip_unreachable)
        report: list[ReadProblem] = []
        for step, generation in candidates.newest_first():
            if before is not None and step >= before:
                continue
            manifest = candidates.load(step, generation)
            if manifest is None:
                continue
            checkpoint = Checkpoint(manifest, tiers)
            lost = checkpoint.missing_packs()
            if not lost:
                used = f"step {step} of generation {generation}"
                checkpoint.report += [
                    ReadProblem(object=place, start=0, stop=0, root=place, problem=what, used=used)
                    for place, what in candidates.problems
                ]
                checkpoint.report += report
                return checkpoint
            report.append(
                ReadProblem(
                    object=manifest.dir,
                    start=0,
                    stop=0,
                    root=", ".join(tier.url for tier in tiers),
                    problem=f"{len(lost)} packs are missing or cut everywhere, e.g. {lost[0]}",
                    used="an older checkpoint",
                )
            )
    except BaseException:
        _close(tiers)
        raise
    _close(tiers)
    if report or candidates.problems:
        first = str(report[0].problem) if report else candidates.problems[0][1]
        raise Corrupt(
            f"no usable checkpoint was found, but damaged ones are there: {first}",
            kind="nothing-usable",
            hint="look with `ckpt verify`, or begin afresh on purpose",
        )
    return None


def open_checkpoint(
    roots: str | Sequence[str],
    step: int | None = None,
    *,
    generation: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The checkpoint of `step`, by default the newest. Raises NotFound if there is none.

    Without `generation` the one on the newest lineage is taken, else the newest generation that has
    the step. Packs are not looked for before they are read.
    """
    roots = [roots] if isinstance(roots, str) else list(roots)
    if step is None:
        latest = open_latest(roots, options=options)
        if latest is None:
            raise NotFound(f"there is no checkpoint in {', '.join(roots)}", kind="not-found")
        return latest
    tiers = [open_tier(root, options=options) for root in roots]
    try:
        candidates = Candidates(tiers, skip_unreachable=False)
        if generation is None:
            current = [place for place in candidates.newest_first() if place[0] == step]
            others = [place for place in candidates.places() if place[0] == step]
            generations = [g for _, g in [*current, *reversed(others)]]
        else:
            generations = [generation]
        for each in generations:
            manifest = candidates.load(step, each)
            if manifest is not None:
                return Checkpoint(manifest, tiers)
        why = f" ({candidates.problems[0][1]})" if candidates.problems else ""
        raise NotFound(
            f"there is no committed checkpoint of step {step} in {', '.join(roots)}{why}",
            kind="not-found",
            hint="`ckpt ls` shows what is there",
        )
    except BaseException:
        _close(tiers)
        raise


def _close(tiers: Iterable[Tier]) -> None:
    for tier in tiers:
        tier.close()
