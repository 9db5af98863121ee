"""The training that `bench.py step` times: a script under `elastic.run` that waits for its turns.

    python scripts/bench_step_workload.py DIRECTORY STEPS [--width N] [--depth N]

World and shares come from EVERSTEP_* in the environment.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import elastic
from scripts.bench_model import BATCH, DEPTH, WIDTH, loss_of, make_model, make_optimizer
from scripts.bench_turns import Turn
from scripts.bench_workload import Noise


def train(ctx: elastic.Context, directory: str, steps: int, width: int, depth: int) -> int:
    """Train so many steps, in turns with the peers."""
    model = make_model(width, depth)
    optimizer = make_optimizer(model)
    loader = torch.utils.data.DataLoader(Noise(width), batch_size=BATCH)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    turn: Turn | None = None
    seen = -1
    for step in ctx.steps(steps):
        if step != seen:  # the body runs for each micro-batch
            seen = step
            turn = turn or Turn(directory, "ours", ctx.rank)
            turn.step()
        loss = loss_of(model(next(loader)))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if turn is not None:
        turn.last(peak_kb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return ctx.step


def main() -> None:
    """Run under Everstep with what the environment says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("steps", type=int)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--depth", type=int, default=DEPTH)
    given = parser.parse_args()
    elastic.run(train, args=(given.directory, given.steps, given.width, given.depth))


if __name__ == "__main__":
    main()
