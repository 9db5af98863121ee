"""The training that `bench.py recovery` disturbs: a script under `elastic.run`, like any other.

    python scripts/bench_workload.py [--width N] [--depth N] [--batch N] [--stop FILE]

World and failure settings come from EVERSTEP_* in the environment. It trains until FILE exists, so
that the benchmark decides how long that is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import elastic
from scripts.bench_model import (
    BATCH,
    DEPTH,
    WIDTH,
    loss_of,
    make_model,
    make_optimizer,
    sample,
)

SAMPLES = 1 << 40  # never a second epoch


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is noise that depends on i alone."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        """Return a number that no run reaches."""
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one sample."""
        return sample(index, self.width)


def train(ctx: elastic.Context, width: int, depth: int, batch: int, stop: str) -> int:
    """Train until the stop file is there; returns the number of steps."""
    model = make_model(width, depth)
    optimizer = make_optimizer(model)
    loader = torch.utils.data.DataLoader(Noise(width), batch_size=batch, shuffle=True)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for _ in ctx.epochs(1):
        for x in loader:
            loss = loss_of(model(x))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            ctx.log(loss=loss)
            if stop and Path(stop).exists():
                ctx.stop()
    return ctx.step


def main() -> None:
    """Run under Everstep with what the environment says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of a micro-batch")
    parser.add_argument("--stop", default="", help="train until this file exists")
    given = parser.parse_args()
    elastic.run(train, args=(given.width, given.depth, given.batch, given.stop))


if __name__ == "__main__":
    main()
