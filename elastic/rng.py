"""Random numbers that depend on where in the training one is, not on who computes or when.

Before each micro-batch the generators that user code draws from (`random`, NumPy's global one,
torch's default ones) are set from (seed, step, leaf). So there is no RNG state to carry through a
reshape or a checkpoint: dropout of leaf 3 in step 1200 is the same on any worker, the first time
and when the step is redone.

The three libraries get different numbers: `random` and NumPy run the same algorithm and would
otherwise give the same stream. Does not: reach generators that user code made for itself
(`torch.Generator`, `numpy.random.default_rng`); these belong into `ctx.state`.
"""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from elastic.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_everything(seed: int, step: int, leaf: int) -> None:
    """Set all global generators for one micro-batch: leaf `leaf` of global step `step`."""
    set_generators(derive_seed("micro-batch", seed, step, leaf))


def set_generators(source: int) -> None:
    """Set `random`, NumPy's global generator (when NumPy is loaded) and torch's from one number."""
    random.seed(derive_seed("python", source))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        value = derive_seed("numpy", source)
        numpy.random.seed([value & 0xFFFFFFFF, value >> 32])
    value = derive_seed("torch", source)
    torch.default_generator.manual_seed(value)  # torch.manual_seed itself costs 100 times more
    if _cuda_in_use():
        torch.cuda.manual_seed(value)


def capture_rng() -> dict[str, Any]:
    """Return the state of the generators that `set_generators` sets, as plain values and tensors.

    Of several GPUs only the current one's generator is part of it.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if _cuda_in_use():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put the generators back to what `capture_rng` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def generators_set_to(source: int) -> Iterator[None]:
    """Set all generators inside the block; outside nothing has been drawn."""
    state = capture_rng()
    set_generators(source)
    try:
        yield
    finally:
        restore_rng(state)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
