"""torch's GradScaler in a step that is agreed on: unscaled per micro-batch, updated once per step.

`scaler.scale(loss)` stays torch's own. In the body of a step `unscale_` divides this micro-batch's
gradients, `scaler.step(optimizer)` divides if that was not done yet and records the step, and
`update()` is recorded. Whether the step found an infinity is a property of the whole gradient, so
it is the agreement that says it: the scale then shrinks or grows on all workers alike.
Source of the rule: torch.amp.GradScaler.update.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from elastic.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic.step.prepared import Recorder


def next_scale(state: dict[str, Any], *, finite: bool) -> dict[str, Any]:
    """Return a GradScaler's state after one step whose gradient was finite or not."""
    scale, tracker = float(state["scale"]), int(state["_growth_tracker"])
    if not finite:
        scale, tracker = scale * state["backoff_factor"], 0
    elif tracker + 1 == state["growth_interval"]:
        grown = scale * state["growth_factor"]
        scale, tracker = (grown if grown <= torch.finfo(torch.float32).max else scale), 0
    else:
        tracker += 1
    return {**state, "scale": scale, "_growth_tracker": tracker}


def record_scaler(scaler: torch.amp.GradScaler, index: int, recorder: Recorder) -> None:
    """Make a scaler's `unscale_`, `step` and `update` record inside the body of a step."""
    real_unscale, real_step, real_update = scaler.unscale_, scaler.step, scaler.update

    def unscale_(optimizer: torch.optim.Optimizer) -> None:
        if not (recorder.in_body and scaler.is_enabled()):
            real_unscale(optimizer)
            return
        if id(optimizer) in recorder.unscaled:
            raise UserError("scaler.unscale_() was called twice for one optimizer in a micro-batch")
        recorder.unscaled.add(id(optimizer))
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / scaler.get_scale())

    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not (recorder.in_body and scaler.is_enabled()):
            return real_step(optimizer, *args, **kwargs)
        if id(optimizer) not in recorder.unscaled:
            unscale_(optimizer)
        optimizer.step(*args, **kwargs)
        return None

    def update(new_scale: float | torch.Tensor | None = None) -> None:
        if not (recorder.in_body and scaler.is_enabled()):
            real_update(new_scale)
            return
        if new_scale is not None:
            raise UserError(
                "scaler.update(new_scale) inside a step cannot be agreed on by all workers; "
                "call update() without a value"
            )
        recorder.scaler_updates.append(index)

    for name, mine in (("unscale_", unscale_), ("step", step), ("update", update)):
        functools.update_wrapper(mine, getattr(type(scaler), name))
        setattr(scaler, name, mine)


def apply_updates(
    scalers: Sequence[torch.amp.GradScaler], updates: Sequence[int], *, finite: bool
) -> None:
    """Make the recorded `update()` calls of one agreed step."""
    for index in updates:
        scaler = scalers[index]
        scaler.load_state_dict(next_scale(scaler.state_dict(), finite=finite))
