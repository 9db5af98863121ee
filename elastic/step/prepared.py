"""What the user gave to `ctx.prepare`, and the calls of the loop body that are recorded.

In the body of a step, `optimizer.step()`, `scheduler.step()` and `zero_grad()` only record: the
step is closed by the iterator when it is asked for more. Outside a step they do what they always
do. The user's objects keep their class and identity; only these methods are replaced, on the
instance.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from elastic.errors import Misconfigured, UserError
from elastic.step.optimizer import capture_hyper, check_supported, is_elementwise
from elastic.step.scaling import record_scaler
from elastic.step.virtual_state import VirtualState

if TYPE_CHECKING:
    from collections.abc import Callable


class Recorder:
    """What the body of the current micro-batch has called so far."""

    def __init__(self) -> None:
        self.in_body = False
        self.gradients: dict[int, list[torch.Tensor | None]] = {}
        self.stepped: set[int] = set()
        self.scheduler_calls: dict[int, int] = {}
        self.scaler_updates: list[int] = []
        self.unscaled: set[int] = set()
        self.hyper: list[Any] | None = None
        self.wants_hyper = False
        self.clip: float | None = None
        self.log: dict[str, float] = {}

    def open(self) -> None:
        """Begin a micro-batch."""
        self.in_body = True
        self.gradients.clear()
        self.stepped.clear()
        self.scheduler_calls = {}
        self.scaler_updates = []
        self.unscaled.clear()
        self.hyper = None
        self.clip = None
        self.log = {}

    def close(self) -> None:
        """End a micro-batch; what it recorded stays readable."""
        self.in_body = False


class Prepared:
    """The registry of prepared objects, in the order they were given."""

    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.objects: dict[str, Any] = {}
        self.virtual = VirtualState()
        self.recorder = Recorder()
        self._seen: dict[int, Any] = {}
        self._real_scheduler_step: list[Callable[..., Any]] = []

    def knows(self, obj: object) -> bool:
        """Return True for an object that was prepared before."""
        return id(obj) in self._seen

    def remember(self, obj: object, prepared: object) -> None:
        """Keep an object alive and known, with what it was answered with."""
        self._seen[id(obj)] = (obj, prepared)
        self._seen[id(prepared)] = (prepared, prepared)

    def known(self, obj: object) -> Any:
        """Return what `prepare` answered for a known object."""
        return self._seen[id(obj)][1]

    # -- models -----------------------------------------------------------------------------

    def add_model(self, model: torch.nn.Module) -> None:
        """Register a model; wrappers of other distributed packages are refused."""
        name = type(model).__name__
        if name in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            raise Misconfigured(
                f"ctx.prepare was given a model inside {name}; pass the bare model, "
                "elastic does the data parallelism itself"
            )
        self.models.append(model)

    def named_models(self) -> list[tuple[str, torch.nn.Module]]:
        """Return (prefix, bare module) pairs; names never carry a wrapper's prefix."""
        many = len(self.models) > 1
        return [
            (f"model{i}" if many else "model", getattr(model, "_orig_mod", model))
            for i, model in enumerate(self.models)
        ]

    # -- optimizers -------------------------------------------------------------------------

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer and make its `step` and `zero_grad` record inside a body."""
        check_supported(optimizer)
        index = len(self.optimizers)
        self.optimizers.append(optimizer)
        recorder = self.recorder

        def step(closure: Callable[[], float] | None = None) -> None:
            if closure is not None:
                raise UserError(
                    "optimizer.step(closure) cannot be recorded; compute the loss in the loop "
                    "body and call optimizer.step() without a closure"
                )
            if not recorder.in_body:
                raise UserError(
                    "optimizer.step() was called outside a step; call it in the body of the "
                    "prepared loader's loop or of ctx.steps"
                )
            if index in recorder.stepped:
                raise UserError(
                    "optimizer.step() was called twice in one micro-batch; a step is one update "
                    "of the whole job (use accumulate= for larger batches)"
                )
            recorder.stepped.add(index)
            if recorder.wants_hyper:  # one micro-batch of the step speaks for all
                recorder.hyper = capture_hyper(self.optimizers)
            grads: list[torch.Tensor | None] = []
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    grads.append(parameter.grad)
                    parameter.grad = None
            recorder.gradients[index] = grads

        def zero_grad(set_to_none: bool = True) -> None:  # noqa: ARG001, FBT001, FBT002 - torch's signature
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

        functools.update_wrapper(step, type(optimizer).step)
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer._opt_called = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign, assignment]
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    @property
    def splittable(self) -> bool:
        """False when some optimizer needs whole parameters."""
        return all(is_elementwise(optimizer) for optimizer in self.optimizers)

    def optimized_parameters(self) -> list[torch.Tensor]:
        """Return every parameter that an optimizer owns; one owner each."""
        owner: dict[int, int] = {}
        parameters = []
        for index, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if owner.setdefault(id(parameter), index) != index:
                        raise Misconfigured(
                            "two optimizers own the same parameter; give each parameter to one"
                        )
                    parameters.append(parameter)
        return parameters

    # -- schedulers and everything else -------------------------------------------------------

    def add_scheduler(self, scheduler: Any) -> None:
        """Register a scheduler and make its `step` record inside a body."""
        index = len(self.schedulers)
        self.schedulers.append(scheduler)
        real = scheduler.step
        self._real_scheduler_step.append(real)
        recorder = self.recorder

        def step(*args: Any, **kwargs: Any) -> None:
            if not recorder.in_body:
                real(*args, **kwargs)
                return
            if args or kwargs:
                raise UserError(
                    "scheduler.step(value) inside a step cannot be agreed on by all workers; call "
                    "it after the epoch with a value from ctx.evaluate"
                )
            recorder.scheduler_calls[index] = recorder.scheduler_calls.get(index, 0) + 1

        functools.update_wrapper(step, type(scheduler).step)
        scheduler.step = step

    def apply_scheduler_calls(self, calls: dict[int, int]) -> None:
        """Make the recorded `scheduler.step()` calls of one committed step."""
        for index in sorted(calls):
            for _ in range(calls[index]):
                self._real_scheduler_step[index]()

    def add_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Register a gradient scaler; its state is global and moves with the agreed steps."""
        index = len(self.scalers)
        self.add_unnamed(scaler)
        self.scalers.append(scaler)
        record_scaler(scaler, index, self.recorder)

    def add_unnamed(self, obj: Any) -> None:
        """Register an object under its class and its number among those of its class.

        So objects of different kinds may be prepared in any order, before or after a restore.
        """
        kind = type(obj).__name__
        count = sum(type(other).__name__ == kind for other in self.objects.values())
        self.add_object(f"{kind}{count}", obj)

    def add_object(self, name: str, obj: Any) -> None:
        """Register an object with state_dict/load_state_dict as global state."""
        if name in self.objects or name in self.virtual:
            raise Misconfigured(f"the state name {name!r} is used twice; give each object its own")
        self.objects[name] = obj
