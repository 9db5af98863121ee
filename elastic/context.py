"""All that a training function sees: the Context that `elastic.run` hands to it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from elastic.agent.progress import WorkerPhase
from elastic.data import MicroBatches, evaluation_batches, num_evaluation_batches
from elastic.errors import Misconfigured, UserError
from elastic.loader import PreparedLoader
from elastic.rng import capture_rng, restore_rng
from elastic.step.agreement import Payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic.loops import Engine
    from elastic.step.agreement import Outcome
    from elastic.step.checkpoints import SaveHandle
    from elastic.step.extras import Extras


_EVALUATIONS_KEPT = 1000


class Context:
    """The face of a job inside one worker.

    One object lives as long as the training function runs; the World behind it changes.
    """

    def __init__(self, engine: Engine, extras: Extras, *, first: bool) -> None:
        self._engine = engine
        self._driver = engine.driver
        self._extras = extras
        self._first = first
        self._loaders: list[PreparedLoader] = []
        self._evaluations_at: tuple[int, int] = (-2, 0)
        self._layout_size = (-1, -1)
        engine.driver.on_evaluated = self._evaluated

    # -- who and where ----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Index of this worker in the World; changes when the World does."""
        return self._driver.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the World."""
        return self._driver.size

    @property
    def generation(self) -> int:
        """Number of the World."""
        return self._driver.generation

    @property
    def epoch(self) -> int:
        """Pass over the data, from 0."""
        return self._driver.position.epoch

    @property
    def step(self) -> int:
        """Index, from 0, of the step being computed (between steps: of the next one)."""
        return self._driver.step

    @property
    def device(self) -> torch.device:
        """Where models and batches of this worker live."""
        return self._driver.device

    @property
    def virtual_ranks(self) -> int:
        """Number of virtual ranks: micro-batches of a step, fixed for the job."""
        return self._driver.num_leaves // self._driver.config.accumulate

    @property
    def is_main(self) -> bool:
        """True on one worker of the World; a label for printing, not a lock."""
        return self._driver.rank == 0

    @property
    def grad_norm(self) -> float | None:
        """2-norm of the last step's whole gradient before clipping, None before the first."""
        outcome = self._driver.outcome
        return None if outcome is None or self._driver.step == 0 else outcome.norm

    @property
    def group(self) -> Any:
        """The process group of this generation, for collectives between steps; None when alone."""
        return None if self._driver.group is None else self._driver.group.backend

    # -- preparing --------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Register objects, move models to the device, and restore them; returns them in order.

        Models and optimizers stay the same objects; a DataLoader is answered by one that drives
        the steps. Preparing an object twice returns the same. On a worker that joins a running
        job the values arrive when the first loop is entered.

        Raises Misconfigured for what cannot be prepared, UserError for a model or optimizer
        first prepared after the first step.
        """
        prepared = [self._prepare_one(obj) for obj in objects]
        registry = self._driver.prepared
        size = (len(registry.models), len(registry.optimizers))
        complete = bool(registry.models and registry.optimizers)
        if self._first and complete and size != self._layout_size:
            self.sync()
        self._extras.claim()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_one(self, obj: Any) -> Any:
        registry = self._driver.prepared
        if registry.knows(obj):
            return registry.known(obj)
        answer = obj
        if isinstance(obj, torch.optim.swa_utils.AveragedModel):
            registry.add_unnamed(obj)
        elif isinstance(obj, torch.nn.Module):
            self._refuse_late("model")
            registry.add_model(obj)
            obj.to(self._driver.device)
        elif isinstance(obj, torch.optim.Optimizer):
            self._refuse_late("optimizer")
            registry.add_optimizer(obj)
        elif isinstance(obj, (LRScheduler, ReduceLROnPlateau)):
            registry.add_scheduler(obj)
        elif isinstance(obj, DataLoader):
            answer = self._prepare_loader(obj)
        elif isinstance(obj, torch.amp.GradScaler):
            registry.add_scaler(obj)
        elif hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"):
            registry.add_unnamed(obj)
        else:
            raise Misconfigured(
                f"ctx.prepare was given a {type(obj).__name__}; it takes models, optimizers, "
                "schedulers, DataLoaders and objects with state_dict and load_state_dict"
            )
        registry.remember(obj, answer)
        return answer

    def _refuse_late(self, what: str) -> None:
        if self._driver.step > 0 and self._driver.after_step_done > self._restored_step():
            raise UserError(
                f"a {what} was first prepared after the first step; prepare it before the loop"
            )

    def _restored_step(self) -> int:
        return self._engine.reformer.restored_step

    def _prepare_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        driver = self._driver
        batches = MicroBatches(
            loader,
            seed=driver.config.seed,
            num_leaves=driver.num_leaves,
            device=driver.device,
            index=len(self._loaders),
            close_fds=(driver.control.fileno(),),
            on_read=partial(driver.note_read, len(self._loaders)),
        )
        driver.events.emit("data.order", loader=len(self._loaders), **batches.facts())
        answer = PreparedLoader(loader, batches, self._engine)
        self._loaders.append(answer)
        return answer

    def sync_for_steps(self) -> None:
        """Enter a World, with something to train."""
        registry = self._driver.prepared
        if not registry.models or not registry.optimizers:
            raise UserError("the loop began before ctx.prepare was given a model and its optimizer")
        self.sync()

    def sync(self) -> None:
        """Build the state if it is not built, and enter a World if this worker is in none."""
        driver = self._driver
        registry = driver.prepared
        size = (len(registry.models), len(registry.optimizers))
        if size == self._layout_size:
            return
        self._layout_size = size
        driver.fresh = True
        driver.build_layout()
        assert driver.layout is not None
        self._engine.reformer.enter(driver.layout.fingerprint())
        self._extras.claim()
        driver.phase(WorkerPhase.BETWEEN)

    # -- loops ------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """Yield what is left of `n` epochs of the job (a total, not an addition)."""
        return self._in_mode("epochs", self._engine.epochs(n))

    def steps(self, n: int) -> Iterator[int]:
        """Yield the index of each step left of `n`, once per micro-batch of this worker."""
        return self._in_mode(
            "steps",
            self._engine.count_steps(
                n, lambda: self._loaders[0].batches if self._loaders else None
            ),
        )

    def _in_mode(self, mode: str, inner: Iterator[int]) -> Iterator[int]:
        self._engine.active = mode
        try:
            yield from inner
        finally:
            self._engine.active = None

    def stop(self) -> None:
        """End the loops on all workers after this step."""
        self._driver.want_stop = True

    # -- inside the body --------------------------------------------------------------------

    def log(self, **scalars: Any) -> None:
        """Record values of this micro-batch; published as means over the step, once committed."""
        recorder = self._driver.prepared.recorder
        values = {
            key: float(value.item() if isinstance(value, torch.Tensor) else value)
            for key, value in scalars.items()
        }
        if recorder.in_body:
            recorder.log.update(values)

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clip the whole gradient of this step to a 2-norm of `max_norm`, before the optimizer."""
        if not max_norm > 0:
            raise UserError(f"clip_grad_norm_ was given max_norm={max_norm}; it must be positive")
        recorder = self._driver.prepared.recorder
        if not recorder.in_body:
            raise UserError("ctx.clip_grad_norm_ belongs in the body of a step")
        recorder.clip = float(max_norm)

    def save(self) -> SaveHandle:
        """Ask for a checkpoint of this step; between steps, of the last one as it is now.

        Returns a handle with `wait()`, which is for places between steps and to be called by all
        workers alike; `ctx.save()` itself may be called by any of them.
        """
        engine = self._engine
        if self._driver.leaf is None and engine.program_step < self._driver.step:
            return engine.checkpoints.past(max(0, engine.program_step))
        return engine.checkpoints.ask()

    # -- registered state and functions -------------------------------------------------------

    def state(self, name: str, obj: Any, scope: str = "global") -> Any:
        """Make an object with state_dict/load_state_dict part of the job's state; returns it.

        Args:
            name: what it is called in checkpoints; given once.
            obj: holds plain values and tensors. State that was restored before the object was
                registered is handed to it now.
            scope: `global`: one state, equal on all workers (change it in `ctx.on_step`
                functions; workers that differ end the run with an error that names it).
                `virtual_rank`: one state for each virtual rank; in the body of a micro-batch the
                object has the state of its virtual rank, and what the body changes counts when
                the step does. At most 1 MiB each.
        """
        if scope not in ("global", "virtual_rank"):
            raise UserError(
                f"ctx.state was given scope={scope!r}; it is 'global' or 'virtual_rank'"
            )
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise UserError(
                f"ctx.state was given a {type(obj).__name__} as {name!r}; it takes objects with "
                "state_dict and load_state_dict"
            )
        registry = self._driver.prepared
        if not registry.knows(obj):
            if scope == "virtual_rank":
                if name in registry.objects:
                    raise UserError(
                        f"the state name {name!r} is used twice; give each object its own"
                    )
                registry.virtual.add(name, obj)
            else:
                registry.add_object(name, obj)
            registry.remember(obj, obj)
        self._extras.claim()
        return obj

    def on_step(self, fn: Callable[[], None]) -> None:
        """Call `fn` once per applied step, when all parameters are in place."""
        self._driver.step_functions.append(fn)

    def on_reshape(self, fn: Callable[[], None]) -> None:
        """Call `fn` after each change of the World."""
        self._engine.on_reshape.append(fn)

    # -- evaluation -------------------------------------------------------------------------

    def evaluate(self, fn: Callable[[Any], Mapping[str, Any]], loader: Any) -> dict[str, float]:
        """Return named means over a loader, equal on all workers and in every World.

        Args:
            fn: batch -> name -> (sum, count), or name -> per-sample values.
            loader: a DataLoader, prepared or not; it is read in its own fixed order.

        The batches are shared out by virtual rank; the model is in eval mode without gradients
        while `fn` runs; no step, random state or buffer is touched. After a reshape it is
        repeated whole.
        """
        engine, driver = self._engine, self._driver
        engine.check_not_in_step("ctx.evaluate")
        self.sync()
        place = engine.program_step
        at, ordinal = self._evaluations_at
        ordinal = ordinal + 1 if at == place else 0
        self._evaluations_at = (place, ordinal)
        for past in self._extras.evaluations:
            if past["step"] == place and past["ordinal"] == ordinal:
                return dict(past["values"])
        plain = loader.loader if isinstance(loader, PreparedLoader) else loader
        began_s = time.monotonic()
        engine.agree("evaluate", lambda: self._evaluation(fn, plain))
        values = dict(self._extras.evaluations[-1]["values"])
        driver.events.emit(
            "evaluate.finished",
            step=driver.step,
            values=values,
            duration_s=time.monotonic() - began_s,
        )
        driver.phase(WorkerPhase.BETWEEN)
        return values

    def _evaluated(self, outcome: Outcome) -> None:
        """Keep the result as part of the agreement: a joiner may come in right after it."""
        place, ordinal = self._evaluations_at
        record = {"step": place, "ordinal": ordinal, "values": dict(outcome.values)}
        self._extras.evaluations = [*self._extras.evaluations, record][-_EVALUATIONS_KEPT:]

    def _evaluation(self, fn: Callable[[Any], Mapping[str, Any]], loader: Any) -> Payload:
        driver = self._driver
        driver.phase(WorkerPhase.EVALUATE)
        total = num_evaluation_batches(loader)
        shares = driver.num_leaves
        values: dict[int, dict[str, tuple[float, float]]] = {}
        models = driver.prepared.models
        modes = [[(m, m.training) for m in model.modules()] for model in models]
        random = capture_rng()
        live = None if driver.layout is None else driver.layout.live.clone()
        try:
            for model in models:
                model.eval()
            with torch.no_grad():
                mine = driver.shares[driver.rank]
                # One pass over this worker's batches: loader processes are started once.
                start, stop = mine.start * total // shares, mine.stop * total // shares
                batches = evaluation_batches(
                    loader, start, stop, driver.device, close_fds=(driver.control.fileno(),)
                )
                owner = mine.start
                for number, batch in enumerate(batches, start):
                    while number >= (owner + 1) * total // shares:
                        owner += 1
                    driver.check_alive()
                    driver.progress.beat()
                    _accumulate(values.setdefault(owner, {}), _called(fn, batch))
        finally:
            for model_modes in modes:
                for module, mode in model_modes:
                    module.training = mode
            restore_rng(random)
            if live is not None and driver.layout is not None:
                driver.layout.live.copy_(live)
        world = driver.control.newest_world()
        return Payload(
            pending_generation=0 if world is None else world.generation,
            stop=driver.control.stop_requested,
            values=values,
        )

    def close(self) -> None:
        """Release loader workers."""
        for loader in self._loaders:
            with contextlib.suppress(Exception):  # the process ends anyway
                loader.batches.close()


def _called(fn: Callable[[Any], Mapping[str, Any]], batch: Any) -> Mapping[str, Any]:
    """Return what the function of an evaluation found in a batch; say how it is called."""
    hint = "it is called with one batch and returns name -> per-sample values or (sum, count)"
    name = getattr(fn, "__name__", "the function")
    try:
        found = fn(batch)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # from within it, so its own
        raise UserError(f"ctx.evaluate cannot call its function: {error}", hint=hint) from error
    if not isinstance(found, Mapping):
        raise UserError(f"{name} returned a {type(found).__name__} to ctx.evaluate", hint=hint)
    return found


def _accumulate(sums: dict[str, tuple[float, float]], found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if isinstance(value, tuple):
            total, count = float(value[0]), float(value[1])
        else:
            tensor = torch.as_tensor(value, dtype=torch.float64).reshape(-1)
            total, count = math.fsum(tensor.tolist()), float(tensor.numel())
        old_total, old_count = sums.get(name, (0.0, 0.0))
        sums[name] = (old_total + total, old_count + count)
