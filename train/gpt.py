"""Train a small GPT on bytes of real text, through whatever happens to its workers.

    python train/gpt.py --size tiny --nproc 2
    python train/gpt.py --size demo --nproc 4 --checkpoint ckpt-dir --save-every 50
    python train/gpt.py --nproc 4 --text ~/books --remote s3://bucket/gpt

Started again with the same --checkpoint it goes on where it was, with as many workers as you like.
The learning rate follows --decay-steps and not --steps: to stop earlier or to go on changes nothing
of what was learnt on the way.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import elastic
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `python train/gpt.py` finds train

from train.corpus import read_text, split
from train.model import GPT, SIZES, weight_groups

WEIGHT_DECAY = 0.1
GRADIENT_NORM_MAX = 1.0
WARMUP_PART = 0.1
RATE_MIN = 0.1  # of the highest rate, at and after the end of the decay
PROMPT = b"def "
SAMPLE_BYTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a size is trained when nothing else is said; a step takes 8 virtual ranks' batches."""

    steps: int
    batch_size: int
    lr: float


RECIPES = {
    "tiny": Recipe(steps=200, batch_size=8, lr=6e-3),
    "demo": Recipe(steps=200, batch_size=4, lr=4e-3),
    "default": Recipe(steps=2000, batch_size=4, lr=1e-3),
}


def rate(step: int, decay_steps: int) -> float:
    """Return the part of the highest learning rate: up in a line, down in half a cosine."""
    warmup_steps = max(1, int(WARMUP_PART * decay_steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    return RATE_MIN + (1 - RATE_MIN) * 0.5 * (1 + math.cos(math.pi * done))


def train(ctx: elastic.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Train, measure on text that was not trained on, and write a little."""
    size = SIZES[options["size"]]
    text = read_text(Path(options["text"]) if options["text"] else None)
    seen, unseen = split(text, size.context)

    torch.manual_seed(options["seed"])
    model = GPT(size)
    optimizer = torch.optim.AdamW(
        weight_groups(model, WEIGHT_DECAY), lr=options["lr"], betas=(0.9, 0.95)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate(step, options["decay_steps"])
    )
    loader = DataLoader(seen, batch_size=options["batch_size"], shuffle=True)
    model, optimizer, scheduler, loader = ctx.prepare(model, optimizer, scheduler, loader)

    for _ in ctx.steps(options["steps"]):
        x_BT, y_BT = next(loader)
        loss = model.loss(x_BT, y_BT)
        loss.backward()
        ctx.clip_grad_norm_(GRADIENT_NORM_MAX)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ctx.log(loss=loss, tokens_per_sample=x_BT.shape[1])  # the console's tokens/s come from it

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, tuple[float, int]]:
        x_BT, y_BT = batch
        return {"loss": (float(model.loss(x_BT, y_BT)) * len(x_BT), len(x_BT))}

    found = ctx.evaluate(loss_of, DataLoader(unseen, batch_size=options["batch_size"]))
    if not ctx.is_main:
        return {}
    sample = model.continuation(PROMPT, SAMPLE_BYTES, seed=options["seed"])
    print(f"step {ctx.step}: validation loss {found['loss']:.3f}; a sample:\n{sample}", flush=True)
    return {"val_loss": found["loss"], "sample": sample, "steps": ctx.step}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what is not given follows the size's recipe, or Everstep's rules."""
    parser = argparse.ArgumentParser(description="Train a small GPT on bytes of real text.")
    add = parser.add_argument
    add("--size", choices=SIZES, default="default", help="about 0.1 M, 1.3 M or 10 M parameters")
    add("--text", metavar="DIR|FILE", help="text to train on [the standard library of Python]")
    add("--steps", type=int, help="global steps of the whole job")
    add("--decay-steps", type=int, help="length of the learning rate's way down")
    add("--batch-size", type=int, help="windows of text in a micro-batch")
    add("--lr", type=float, help="highest learning rate")
    add("--seed", type=int, default=0)
    add("--result", type=Path, metavar="FILE", help="write the outcome there, as JSON")
    world = parser.add_argument_group("passed on to elastic.run")
    add = world.add_argument
    add("--nproc", type=int, help="workers on this host")
    add("--virtual-ranks", type=int, default=8, help="micro-batches of a global step [8]")
    add("--checkpoint", metavar="DIR", help="where to save on this host")
    add("--remote", metavar="URL", help="where to save for all hosts, such as s3://bucket/job")
    add("--save-every", metavar="STEPS|TIME", help="such as 100 or 5min")
    add("--resume", metavar="auto|fresh|STEP|URL")
    add("--etcd", metavar="HOST:PORT,...", type=lambda value: value.split(","))
    add("--job", metavar="NAME")
    given = parser.parse_args(arguments)
    if given.text and not Path(given.text).exists():
        parser.error(f"--text {given.text} does not exist")
    given.text = given.text and str(Path(given.text).absolute())
    recipe = RECIPES[given.size]
    for name, value in {
        "steps": recipe.steps,
        "decay_steps": recipe.steps,
        "batch_size": recipe.batch_size,
        "lr": recipe.lr,
    }.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


def main() -> None:
    """Run what the command line asks for."""
    given = vars(parse())
    names = [
        "nproc",
        "virtual_ranks",
        "checkpoint",
        "remote",
        "save_every",
        "resume",
        "etcd",
        "job",
    ]
    config = {name: given[name] for name in names if given[name] is not None}
    options = {name: value for name, value in given.items() if name not in [*names, "result"]}
    result = elastic.run(train, args=(options,), seed=given["seed"], **config)
    if given["result"] is not None:
        outcome = {
            "value": result.value,
            "step": result.step,
            "generation": result.generation,
            "goodput": result.goodput,
            "events_path": result.events_path,
        }
        given["result"].write_text(json.dumps(outcome, indent=2) + "\n")


if __name__ == "__main__":
    main()
