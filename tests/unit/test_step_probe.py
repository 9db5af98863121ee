"""Optimizers of unknown classes: what may be prepared, and what is refused with the reason."""

from __future__ import annotations

import pytest
import torch

from elastic.errors import Misconfigured
from elastic.step.optimizer import check_supported
from elastic.step.probe import check_independent


def parameters():
    return [torch.nn.Parameter(torch.ones(5, 2)), torch.nn.Parameter(torch.ones(3))]


class Lamb(torch.optim.Optimizer):
    """Each parameter's step is scaled by its own norm."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["m"] = state.get("m", torch.zeros_like(p)) * 0.9 + p.grad * 0.1
                    p.sub_(state["m"] * group["lr"] * p.norm() / (state["m"].norm() + 1e-6))


class GlobalNorm(Lamb):
    """One norm over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / norm)


class GroupCounter(Lamb):
    """Counts steps in the parameter group, as some old optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)


class SelfCounter(Lamb):
    """Counts steps in an attribute."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer; needs a closure."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure):
        closure()


class MyAdam(torch.optim.Adam):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("kind", [Lamb, MyAdam])
def test_independent_ones_may_be_prepared(kind):
    optimizer = kind(parameters())
    before = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    check_supported(optimizer)
    after = [p for g in optimizer.param_groups for p in g["params"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not optimizer.state


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "AdamW", "SGD"])
def test_what_is_known_of_torchs_own_is_true(name):
    check_independent(getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(5, 2))]))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (GlobalNorm, "depends on others"),
        (GroupCounter, "group value 'step'"),
        (SelfCounter, "attribute 'calls'"),
        (Lookahead, "could not be tried out"),
    ],
)
def test_others_are_refused_with_the_reason(kind, said):
    with pytest.raises(Misconfigured, match=said):
        check_supported(kind(parameters()))


def test_an_optimizer_may_vouch_for_itself():
    optimizer = Lookahead(parameters())
    optimizer.independent_parameters = True
    check_supported(optimizer)
