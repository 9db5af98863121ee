"""What the checkpoint that a run begins from fixes: asked for before anything is started.

Virtual ranks, segments, seed and threads belong to a job for its life, so they come from the
manifest, and another explicit value is refused. Only the manifest is read here, by a process of
its own (`python -m elastic.resume`): object-store clients start threads and take seconds, which is
nothing for the caller's process to live with, and a wait on them has a bound. The workers read
the state itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.config import Origin, Resolved
from elastic.errors import ExitCode, Misconfigured, RunFailed

FIXED = ("virtual_ranks", "accumulate", "segments", "seed", "threads")
LOOK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint to begin from, as its manifest describes it."""

    job: str
    step: int
    generation: int
    fixed: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "job": self.job,
            "step": self.step,
            "generation": self.generation,
            "fixed": self.fixed,
        }


def roots_of(resolved: Resolved) -> list[str]:
    """Return where to look for the checkpoint to begin from, nearest first; empty: nowhere."""
    config = resolved.config
    if config.resume == "fresh":
        return []
    if isinstance(config.resume, str) and config.resume != "auto":
        return [config.resume]
    roots = []
    if config.checkpoint is not None and any(Path(config.checkpoint).glob("step-*")):
        roots.append(config.checkpoint)
    if config.remote is not None:
        roots.append(config.remote)
    return roots


def look(resolved: Resolved, *, timeout_s: float = LOOK_TIMEOUT_S) -> Found | None:
    """Return the checkpoint that the run will begin from, or None if it starts from the beginning.

    Raises Misconfigured: a place cannot be read, or the one that was named is not there.
    Raises RunFailed (storage): the store does not answer.
    """
    roots = roots_of(resolved)
    if not roots:
        if isinstance(resolved.config.resume, int):
            raise _nothing(resolved)
        return None
    step = resolved.config.resume if isinstance(resolved.config.resume, int) else None
    question = json.dumps({"roots": roots, "step": step})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "elastic.resume"],
            input=question,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(
            ExitCode.STORAGE,
            f"{', '.join(roots)} did not tell within {timeout_s:.0f} s which checkpoints there "
            "are; check the address and the network",
        ) from None
    answer = _answer(done.stdout)
    if answer is None or done.returncode not in (0, int(ExitCode.MISCONFIGURED)):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sentence = (answer or {}).get("error") or last
        raise RunFailed(ExitCode.STORAGE, f"{', '.join(roots)} could not be read: {sentence}")
    if "error" in answer:
        raise Misconfigured(str(answer["error"]), kind="checkpoint-unreadable")
    if answer["found"] is None:
        if resolved.config.resume != "auto":
            raise _nothing(resolved)
        return None
    return Found(**answer["found"])


def adopt(resolved: Resolved, found: Found) -> Resolved:
    """Return the configuration with what the checkpoint fixes.

    Raises Misconfigured: a person asked for another value, with the difference.
    """
    config = resolved.config
    fixed = {name: found.fixed[name] for name in FIXED if name in found.fixed}
    other = [
        f"{name}={getattr(config, name)} ({resolved.origins[name]}) but {value} in the checkpoint"
        for name, value in fixed.items()
        if resolved.is_explicit(name) and getattr(config, name) not in (value, None)
    ]
    if other:
        raise Misconfigured(
            f"job {found.job!r} goes on from step {found.step} with other values than it was "
            f"started with: {'; '.join(other)}",
            kind="fixed-for-the-job",
            hint='leave them out, or start anew with resume="fresh" in another directory',
        )
    workers = (config.nproc or 1) * config.max_nodes
    if fixed.get("virtual_ranks", workers) < workers:
        raise Misconfigured(
            f"job {found.job!r} was started with virtual_ranks={fixed['virtual_ranks']}, and "
            f"{workers} workers are more than that",
            kind="too-few-virtual-ranks",
            hint=f"ask for at most {fixed['virtual_ranks']} workers (nproc, nodes)",
        )
    taken = {name: value for name, value in fixed.items() if getattr(config, name) != value}
    return resolved.replace(Origin.CHECKPOINT, **taken) if taken else resolved


def _nothing(resolved: Resolved) -> Misconfigured:
    config = resolved.config
    places = roots_of(resolved) or [p for p in (config.checkpoint, config.remote) if p is not None]
    return Misconfigured(
        f"resume={config.resume}: there is no such checkpoint in {', '.join(places)}",
        kind="no-checkpoint",
        hint="list what there is with `ckpt ls`",
    )


def _answer(text: str) -> dict[str, Any] | None:
    try:
        answer = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return answer if isinstance(answer, dict) else None


def _read(roots: Sequence[str], step: int | None) -> dict[str, Any]:
    """Read the manifest; runs in the process of its own."""
    import ckpt

    found = ckpt.open_latest(roots) if step is None else ckpt.open_latest(roots, step=step)
    if found is None:
        return {"found": None}
    fixed = dict(found.extra.get("job") or {})
    return {
        "found": {
            "job": found.manifest.job,
            "step": found.step,
            "generation": found.generation,
            "fixed": {name: fixed[name] for name in FIXED if name in fixed},
        }
    }


def main() -> int:
    """Answer one question on standard input with one line of JSON."""
    from ckpt import errors

    question = json.load(sys.stdin)
    try:
        answer, code = _read(question["roots"], question["step"]), 0
    except (errors.Misconfigured, errors.NotFound) as error:
        answer, code = {"error": str(error)}, int(ExitCode.MISCONFIGURED)
    except errors.CheckpointError as error:
        answer, code = {"error": str(error)}, int(ExitCode.STORAGE)
    sys.stdout.write(json.dumps(answer) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
