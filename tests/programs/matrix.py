"""One training loop over models, optimizers and options that may each change the arithmetic."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.programs.small import Odd, data, digest, groups
from tests.programs.traced import Trace
from train import digits
from train.corpus import Windows, read_text
from train.model import GPT, Size

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=2e-2, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def gpt() -> tuple[nn.Module, Dataset[Any]]:
    """Return a very small GPT and bytes of Python's own sources."""
    size = Size(layers=1, channels=32, heads=2, context=16, dropout=0.1)
    return GPT(size), Windows(read_text(bytes_max=8_000), size.context)


def digits_net() -> tuple[nn.Module, Dataset[Any]]:
    """Return the digits net (BatchNorm, dropout) and some of its images."""
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images[:310].reshape(-1, 1, 8, 8).astype("float32") / 16)
    return digits.net(), TensorDataset(x, torch.from_numpy(labels[:310]))


def odd() -> tuple[nn.Module, Dataset[Any]]:
    """Return tied weights, an unused branch, frozen, 0-dim and empty parameters."""
    return Odd(), data()


MODELS = {"gpt": gpt, "digits": digits_net, "odd": odd}


def train(
    ctx: Any,
    *,
    traces: str,
    model: str,
    optimizer: str,
    steps: int,
    clip: bool = False,
    schedule: bool = False,
    autocast: bool = False,
    scaler: bool = False,
    recompute: bool = False,
    compiler: str = "",
    pause_s: float = 0.0,
) -> dict[str, Any]:
    """Train `steps` steps and leave traces; returns a hash of the model."""
    built, dataset = MODELS[model]()
    opt = OPTIMIZERS[optimizer](groups(built))
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=5, enabled=scaler)
    rates = torch.optim.lr_scheduler.OneCycleLR(  # changes momentum or betas too
        opt, max_lr=1e-2, total_steps=steps + 1, cycle_momentum=optimizer != "adagrad"
    )
    built, opt, loader, scale = ctx.prepare(built, opt, loader, scale)
    if schedule:
        rates = ctx.prepare(rates)
    trace = Trace(ctx, Path(traces), built)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = built(x).float()
        return nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), y.reshape(-1))

    compute = torch.compile(loss_of, backend=compiler) if compiler else loss_of
    for _ in ctx.steps(steps):
        x, y = next(loader)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = checkpoint(compute, x, y, use_reentrant=False) if recompute else compute(x, y)
        scale.scale(loss).backward()
        if clip:
            ctx.clip_grad_norm_(0.5)
        scale.step(opt)
        scale.update()
        if schedule:
            rates.step()
        opt.zero_grad()
        ctx.log(loss=loss)
        trace.micro_batch(x, y)
        if pause_s:
            time.sleep(pause_s)  # sleep: a step long enough for a World to change in it
    return {
        "digest": digest(built),
        "scale": scale.state_dict(),
        "step": ctx.step,
        "threads": torch.get_num_threads(),
    }
