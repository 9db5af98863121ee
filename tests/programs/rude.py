"""Loop bodies that do things to gradients between backward() and optimizer.step()."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.programs.small import data, digest, net


def train(ctx: Any, *, how: str, since: int = 0, steps: int = 8) -> dict[str, Any]:
    """Train; from step `since` on, do it the rude way."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    parameters = list(model.parameters())
    for step in ctx.steps(steps):
        x, y = next(loader)
        loss = nn.functional.cross_entropy(model(x), y)
        rude = step >= since
        if rude and how == "by hand":
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = g
        else:
            loss.backward()
        if rude and how == "twice":
            nn.functional.mse_loss(model(x), torch.zeros(len(y), 4)).backward()
        for p in parameters:
            assert p.grad is not None
            if rude and how == "clamp":
                p.grad.clamp_(-0.01, 0.01)
            if rude and how == "data":
                p.grad.data.clamp_(-0.01, 0.01)
            if rude and how == "replace":
                p.grad = p.grad * 0.5
        if rude and how == "drop":
            parameters[0].grad = None
        optimizer.step()
        optimizer.zero_grad()
        ctx.log(loss=loss)
    return {"digest": digest(model), "step": ctx.step}
