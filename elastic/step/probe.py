"""May an optimizer of an unknown class be run on parameters apart from each other? Try it out.

Pieces of the optimizer's state live on different workers, so the update of a parameter may depend
on its own gradient and state alone. A copy of the optimizer is run for a few steps on two small
parameters, twice, with other gradients for the second: the first must come out the same. What
changes outside `optimizer.state` (parameter groups, attributes) would be neither kept nor
restored, and is found in the same way. An optimizer may say of itself that it is fine with the
attribute `independent_parameters = True`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from elastic.errors import Misconfigured

if TYPE_CHECKING:
    from collections.abc import Mapping

_STEPS = 3
_OWN = frozenset({"state", "param_groups"})
_TORCH = frozenset({"_opt_called", "_step_count", "step", "zero_grad", "_profile_hook"})


def check_independent(optimizer: torch.optim.Optimizer) -> None:
    """Raise Misconfigured if parameters of this optimizer cannot be updated apart."""
    if getattr(optimizer, "independent_parameters", False):
        return
    name = type(optimizer).__name__
    declare = "if it is right all the same, set independent_parameters = True on the optimizer"
    try:
        one, kept_outside = _trajectory(optimizer, 1.0)
        other, _ = _trajectory(optimizer, -3.7)
    except Exception as error:
        raise Misconfigured(
            f"{name} cannot be prepared: whether its parameters are independent could not be tried "
            f"out ({type(error).__name__}: {error})",
            hint=declare,
        ) from error
    if kept_outside:
        raise Misconfigured(
            f"{name} cannot be prepared: its step() changes {kept_outside}, which is not part of "
            "the state of a parameter and would be lost with a worker",
            hint="use one that keeps everything in optimizer.state",
        )
    if not torch.equal(one, other):
        raise Misconfigured(
            f"{name} cannot be prepared: its update of one parameter depends on others, and they "
            "are held by different workers",
            hint="use one that treats every parameter alone",
        )


def _trajectory(optimizer: torch.optim.Optimizer, factor: float) -> tuple[torch.Tensor, str]:
    """Return the first parameter after some steps, and what else the steps have changed."""
    first = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(4, 3))
    second = torch.nn.Parameter(torch.linspace(0.5, 2.0, 12).view(3, 4))
    trial: Any = object.__new__(type(optimizer))
    for key, value in optimizer.__dict__.items():
        if key not in _OWN | _TORCH:
            trial.__dict__[key] = copy.deepcopy(value)
    trial.state = defaultdict(dict)
    options = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[0].items() if k != "params"}
    trial.param_groups = [{**options, "params": [first, second]}]
    before = copy.deepcopy({k: v for k, v in trial.__dict__.items() if k not in _OWN | _TORCH})
    for k in range(1, _STEPS + 1):
        first.grad = torch.sin(torch.arange(12.0) * k).view(4, 3)
        second.grad = factor * torch.cos(torch.arange(12.0) * k).view(3, 4)
        type(optimizer).step(trial)
    attributes = {k: v for k, v in trial.__dict__.items() if k not in _OWN | _TORCH}
    values = {k: v for k, v in trial.param_groups[0].items() if k != "params"}
    changed = _changed(before, attributes, "its attribute")
    return first.detach(), changed or _changed(options, values, "its group value")


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], what: str) -> str:
    for key, value in after.items():
        if key not in before or not _same(before[key], value):
            return f"{what} {key!r}"
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and bool(torch.equal(one, other))
        )
    if isinstance(one, (bool, int, float, str, tuple, list, type(None))):
        return bool(one == other)
    return True  # functions, hooks: objects of their own after the copy
