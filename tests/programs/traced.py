"""A training function that tells of every step and micro-batch what must not depend on Worlds."""

from __future__ import annotations

import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic.step.optimizer import describe_state
from tests.faults import Injector
from tests.programs.hidden import Tally
from tests.programs.small import data, digest, net


def plain_hash(value: Any) -> str:
    """Return a hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def segment_hash(driver: Any, segment: int) -> str:
    """Return a hash of a held segment's optimizer state, as this worker has it."""
    sha = hashlib.sha256()
    for optimizer in driver.optimizers:
        for piece, state in optimizer.export_state(segment):
            description, tensors = describe_state(state)
            sha.update(repr((piece, description)).encode())
            for tensor in tensors:
                sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()[:16]


def generators() -> str:
    """Return a hash of the state of all generators that a loop body draws from."""
    sha = hashlib.sha256()
    sha.update(repr(random.getstate()).encode())
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global one is what is promised
    sha.update(repr((name, rest)).encode() + np.asarray(keys).tobytes())
    sha.update(torch.get_rng_state().numpy().tobytes())
    return sha.hexdigest()[:16]


class Trace:
    """Writes one line for each applied step and each micro-batch of this worker.

    Args:
        ctx: the Context.
        directory: gets a file for each worker.
        models: what is trained.
    """

    def __init__(self, ctx: Any, directory: Path, *models: nn.Module) -> None:
        self._driver = ctx._driver
        self._models = models
        directory.mkdir(exist_ok=True)
        self._file = (directory / f"{self._driver.worker_id}.jsonl").open("a", buffering=1)
        ctx.on_step(self._applied)

    def _say(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    def micro_batch(self, *batch: torch.Tensor) -> None:
        """Note what the running micro-batch has drawn and was given; called at its end."""
        driver = self._driver
        sha = hashlib.sha256(b"".join(t.numpy().tobytes() for t in batch))
        self._say(
            step=driver.step + 1,
            leaf=driver.leaf,
            generators=generators(),
            samples=sha.hexdigest()[:16],
        )

    def _applied(self) -> None:
        driver = self._driver
        trainable = driver.layout.num_trainable
        self._say(
            step=driver.step,
            model=[digest(model) for model in self._models],
            optimizer={
                s: segment_hash(driver, s)
                for s, at in sorted(driver.held.items())
                if s < trainable and at == driver.step
            },
            cursor=driver.position.to_dict(),
            hyper=[
                {k: v for k, v in group.items() if k != "params"}
                for optimizer in driver.prepared.optimizers
                for group in optimizer.param_groups
            ],
            schedulers=[s.last_epoch for s in driver.prepared.schedulers],
            virtual=plain_hash(driver.prepared.virtual.to_dict()),
            objects={
                name: plain_hash(obj.state_dict())
                for name, obj in driver.prepared.objects.items()
                if isinstance(obj, Tally)
            },
            segments=trainable,
        )


def train(
    ctx: Any,
    *,
    traces: str,
    faults: list[dict[str, Any]] | None = None,
    fired: str = "",
    epochs: int,
    full: int = 0,
    count: int = 90,
) -> dict[str, Any]:
    """Train, with faults, and leave traces."""
    if faults:
        Injector(ctx._driver, faults, Path(fired))
    model = net()
    # foreach: so that "in the middle of the optimizer" is between two halves of all pieces
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=15)
    loader = DataLoader(data(count), batch_size=4, shuffle=True)
    held_out = DataLoader(data(64), batch_size=4)
    model, optimizer, loader, schedule = ctx.prepare(model, optimizer, loader, schedule)
    seen = ctx.state("seen", Tally(), scope="virtual_rank")
    applied = ctx.state("applied", Tally())
    trace = Trace(ctx, Path(traces), model)

    def count_applied() -> None:
        applied.total += 1

    ctx.on_step(count_applied)

    def body(x: torch.Tensor, y: torch.Tensor) -> None:
        noise = random.random() + float(np.random.random())  # noqa: NPY002 - the global one
        loss = nn.functional.cross_entropy(model(x + 0.01 * noise), y)
        loss.backward()
        ctx.clip_grad_norm_(0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.total += float(x[0, 0])
        ctx.log(loss=loss, seen=seen.total)
        trace.micro_batch(x, y)
        if ctx.world_size < full:
            time.sleep(0.01)  # sleep: a step long enough for a spare to come in before the end

    def accuracy() -> dict[str, float]:
        return ctx.evaluate(lambda b: {"right": (model(b[0]).argmax(1) == b[1]).float()}, held_out)

    curve: list[Any] = []
    saved: list[Any] = []
    for epoch in ctx.epochs(epochs):
        for x, y in loader:
            body(x, y)
        curve.append([epoch, accuracy()])
        handle = ctx.save()
        saved.append([handle.wait(30.0), handle.step])
    return {
        "model": digest(model),
        "step": ctx.step,
        "curve": curve,
        "saved": saved,
        "lr": optimizer.param_groups[0]["lr"],
        "applied": applied.total,
    }
