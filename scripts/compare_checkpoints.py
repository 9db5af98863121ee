"""Whether two checkpoints hold the same state, bit for bit, and if not, where they differ.

    python scripts/compare_checkpoints.py ROOT_A ROOT_B [--step N]

Compared are every tensor's type, shape and sha256 (parameters, buffers, optimizer state), the
random state (a function of the job's seed, its virtual ranks and the step), the place in the data,
and the rest of what a run would go on from: schedulers, hyperparameters, registered objects. Not
compared is what tells how a run came here and not where it is: its generations and lineage, and
what it evaluated on the way. Only bytes that pass their checksums are compared, so a difference is
one of content and never one of storage.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ckpt

OPTIMIZER_PREFIX = "optimizer"
RNG_KEYS = ("seed", "virtual_ranks", "accumulate")
HISTORY_KEYS = ("lineage", "evaluations", "version")
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds, as far as two can be compared."""

    step: int
    parameters: Mapping[str, str]
    optimizer: Mapping[str, str]
    rng: Mapping[str, Any]
    cursor: Mapping[str, Any]
    other: Mapping[str, Any]
    nbytes: int

    @property
    def digest(self) -> str:
        """One sha256 over the names and hashes of all tensors."""
        lines = sorted(f"{name} {value}" for name, value in self.tensors.items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def tensors(self) -> dict[str, str]:
        """Hashes of all tensors by name."""
        return {**self.parameters, **self.optimizer}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answer, part by part; `differences` names what differs, a few of each kind."""

    step: int
    parameters: bool
    optimizer: bool
    rng: bool
    cursor: bool
    other: bool
    tensors: int
    nbytes: int
    digest: str
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if a run that goes on from either would compute the same."""
        return self.parameters and self.optimizer and self.rng and self.cursor and self.other


def compare(a_url: str, b_url: str, *, step: int | None = None) -> Comparison:
    """Compare two checkpoints, by default the newest of each root. Raises NotFound."""
    return judge(read(a_url, step=step), read(b_url, step=step))


def read(url: str, *, step: int | None = None) -> Contents:
    """Read and hash one checkpoint; every byte is checked against its checksum on the way."""
    with ckpt.open_checkpoint(url, step) as checkpoint:
        hashes: dict[str, str] = {}
        nbytes = 0
        for name, info in checkpoint.tensors.items():
            data = checkpoint.read(name)
            nbytes += len(data)
            shape = "x".join(map(str, info.shape))
            hashes[name] = f"{info.dtype}[{shape}] {hashlib.sha256(data.data).hexdigest()}"
        extra = checkpoint.extra
        job = dict(extra["job"])
        rng = {key: job.pop(key) for key in RNG_KEYS}
        cursor = extra["position"]
        rest = {
            key: value
            for key, value in extra.items()
            if key not in (*HISTORY_KEYS, "job", "position", "step")
        }
        return Contents(
            step=checkpoint.step,
            parameters={n: h for n, h in hashes.items() if not n.startswith(OPTIMIZER_PREFIX)},
            optimizer={n: h for n, h in hashes.items() if n.startswith(OPTIMIZER_PREFIX)},
            rng={**rng, "step": extra["step"]},
            cursor={**cursor, "step": extra["step"]},
            other={**rest, "job": job},
            nbytes=nbytes,
        )


def judge(a: Contents, b: Contents) -> Comparison:
    """Compare what was read. A checkpoint without parameters is equal to nothing."""
    found: list[str] = []

    def same(what: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
        names = sorted(first.keys() | second.keys())
        wrong = [n for n in names if n not in first or n not in second or first[n] != second[n]]
        found.extend(_difference(what, n, first, second) for n in wrong[:SHOWN])
        if len(wrong) > SHOWN:
            found.append(f"{what}: {len(wrong) - SHOWN} more differ")
        return not wrong

    if not a.parameters:
        found.append("the first checkpoint holds no parameters")
    return Comparison(
        step=a.step,
        parameters=same("parameter", a.parameters, b.parameters) and bool(a.parameters),
        optimizer=same("optimizer state", a.optimizer, b.optimizer),
        rng=same("random state", a.rng, b.rng),
        cursor=same("place in the data", a.cursor, b.cursor),
        other=same("other state", a.other, b.other),
        tensors=len(a.tensors),
        nbytes=a.nbytes,
        digest=a.digest,
        differences=tuple(found),
    )


def _difference(what: str, name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    if name not in a or name not in b:
        return f"{what} {name} is only in the {'first' if name in a else 'second'}"
    return f"{what} {name}: {_short(a[name])} and {_short(b[name])}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@click.command()
@click.argument("a_url", metavar="ROOT_A")
@click.argument("b_url", metavar="ROOT_B")
@click.option("--step", type=int, help="Compare this step; by default the newest of each.")
def main(a_url: str, b_url: str, step: int | None) -> None:
    """Compare two checkpoints bit for bit; exit code 1 if they differ."""
    try:
        found = compare(a_url, b_url, step=step)
    except ckpt.CheckpointError as error:
        print(f"compare: {error}", file=sys.stderr)
        sys.exit(2)
    for line in found.differences:
        print(line)
    print(f"step {found.step}: " + ("equal, bit for bit" if found.equal else "different"))
    sys.exit(0 if found.equal else 1)


if __name__ == "__main__":
    main()
