"""State that is easily forgotten: a gradient scaler, averages, counters per virtual rank."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.programs.small import data, digest, net


class Tally:
    """A plain value that the loop body changes."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


def train(
    ctx: Any,
    *,
    steps: int,
    scaler: bool = False,
    explode_at: int | None = None,
    seen_scope: str = "virtual_rank",
    poison_from: int | None = None,
    late_average: bool = False,
    forget: bool = False,
    pause_s: float = 0.0,
) -> dict[str, Any]:
    """Train `steps` steps; returns everything that must be equal in every World."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4, enabled=scaler)
    model, optimizer, loader, scale = ctx.prepare(model, optimizer, loader, scale)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if not late_average and not forget:
        average = ctx.prepare(average)
    seen = Tally() if forget else ctx.state("seen", Tally(), scope=seen_scope)
    totals: list[float] = []
    ctx.on_step(lambda: average.update_parameters(model))
    for step in ctx.steps(steps):
        if late_average and not forget:
            average = ctx.prepare(average)
        x, y = next(loader)
        loss = nn.functional.cross_entropy(model(x), y)
        if step == explode_at:
            loss = loss * 1e38
        if poison_from is not None and step >= poison_from:
            loss = loss * float("nan")
        scale.scale(loss).backward()
        if scaler and step % 2:
            scale.unscale_(optimizer)
        ctx.clip_grad_norm_(0.5)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        seen.total += float(x[0, 0])  # what this virtual rank has seen, never what others have
        if step == steps - 1:
            totals.append(seen.total)
        ctx.log(loss=loss, seen=seen.total)
        if pause_s:
            time.sleep(pause_s)  # sleep: makes a step long enough to be hit
    return {
        "digest": digest(model),
        "average": digest(average),
        "averaged": int(average.n_averaged),
        "scale": scale.state_dict(),
        "step": ctx.step,
    }
