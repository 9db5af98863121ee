"""The model that the benchmark and its peers train: about 10.5 M parameters, AdamW, random data.

One definition for all, so that a difference in time is one between runtimes. Ten square layers are
enough to make a gradient of 42 MB, which is what an exchange, a save or a repair has to move.
"""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 1024
DEPTH = 10
BATCH = 8
LEARNING_RATE = 1e-4
SEED = 1


def make_model(width: int = WIDTH, depth: int = DEPTH) -> nn.Sequential:
    """Return the same untrained model in every process."""
    torch.manual_seed(SEED)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of the benchmark."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def sample(index: int, width: int = WIDTH) -> torch.Tensor:
    """Return sample `index` of an endless data set: float32[width]."""
    return torch.randn(width, generator=torch.Generator().manual_seed(index))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Return the loss: a per-sample mean, as every loss here has to be."""
    return output.square().mean()


def num_parameters(width: int = WIDTH, depth: int = DEPTH) -> int:
    """Return how many numbers the model has."""
    return depth * (width * width + width)
