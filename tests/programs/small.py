"""A small net with everything that can go wrong in it: BatchNorm, dropout, clipping, a schedule."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digest(model: nn.Module) -> str:
    """Return a hash of a model's parameters and buffers."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode())
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def data(count: int = 203) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, generator=generator)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    return TensorDataset(x, y)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )


class Odd(nn.Module):
    """Tied weights, an unused branch, a frozen parameter, a 0-dim and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16, bias=False)
        self.hidden = nn.Linear(16, 16)
        self.output = nn.Linear(16, 16, bias=False)
        self.output.weight = self.embed.weight
        self.unused = nn.Linear(16, 5)
        self.head = nn.Linear(16, 4)
        self.frozen = nn.Parameter(torch.full((16,), 0.5), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.hidden(torch.tanh(self.embed(x)))) + self.frozen
        return self.head(self.output(h)) * self.scale


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups and an empty one."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
        {"params": []},
    ]


def save_here(ctx: Any) -> list[Any]:
    """Save between steps; whether it is durable and of which step it is."""
    handle = ctx.save()
    return [handle.wait(60.0), handle.step]


def train(
    ctx: Any,
    *,
    steps: int = 0,
    epochs: int = 0,
    pause_s: float = 0.0,
    model: str = "net",
    optimizer: str = "adamw",
    clip: float | None = 0.5,
    loader_workers: int = 0,
    stop_at: int | None = None,
    poison_at: int | None = None,
    evaluate_first: bool = False,
    evaluate_s: float = 0.0,
    slow_rank: int | None = None,
    save_epochs: bool = False,
    before_forward: Any = lambda _module, _inputs: None,
) -> dict[str, Any]:
    """Train by steps or by epochs; returns what has to be equal in every World."""
    built = net() if model == "net" else Odd()
    built.register_forward_pre_hook(before_forward)
    opt = OPTIMIZERS[optimizer](groups(built))
    schedule = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.2, total_iters=15)
    dataset = data()
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=loader_workers)
    held_out = DataLoader(dataset, batch_size=16)
    built, opt, loader, schedule = ctx.prepare(built, opt, loader, schedule)
    applied: list[int] = []
    ctx.on_step(lambda: applied.append(ctx.step))

    def body(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(built(x), y)
        if ctx.step == poison_at:
            loss = loss * torch.tensor(float("nan"))
        loss.backward()
        if ctx.step == stop_at:
            ctx.stop()
        if clip is not None:
            ctx.clip_grad_norm_(clip)
        opt.step()
        schedule.step()
        opt.zero_grad()
        ctx.log(loss=loss)
        if pause_s:
            slower = 4 if ctx.rank == slow_rank else 1
            time.sleep(pause_s * slower)  # sleep: a step long enough to be hit, a slow worker

    def accuracy() -> dict[str, float]:
        def measure(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
            time.sleep(evaluate_s)  # sleep: makes an evaluation long enough to be hit
            return {"accuracy": (built(batch[0]).argmax(1) == batch[1]).float()}

        return ctx.evaluate(measure, held_out)

    saved: list[list[Any]] = []
    curve = [accuracy()] if evaluate_first else []
    for epoch in ctx.epochs(epochs) if epochs else ():
        for x, y in loader:
            body(x, y)
        curve.append([epoch, accuracy()["accuracy"]])
        if save_epochs:
            saved.append(save_here(ctx))
    for _ in ctx.steps(steps) if steps else ():
        x, y = next(loader)
        body(x, y)
    return {
        "digest": digest(built),
        "accuracy": accuracy()["accuracy"],
        "lr": opt.param_groups[0]["lr"],
        "step": ctx.step,
        "curve": curve,
        "saved": saved,
        "tied": model != "odd" or built.output.weight is built.embed.weight,
    }
