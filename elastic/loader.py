"""What `ctx.prepare` answers for a DataLoader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from elastic.data import MicroBatches
    from elastic.loops import Engine


class PreparedLoader:
    """A DataLoader whose order is a function of (seed, epoch, step, virtual rank).

    Iterated inside `ctx.epochs` it drives the steps; read with `next()` inside `ctx.steps` it
    gives the batch of the running micro-batch; iterated anywhere else it is the plain loader.
    `len()` is the number of global steps of an epoch.
    """

    def __init__(
        self, loader: torch.utils.data.DataLoader[Any], batches: MicroBatches, engine: Engine
    ) -> None:
        self.loader = loader
        self.batches = batches
        self._engine = engine

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.loader.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.batches.batch_size

    def __len__(self) -> int:
        """Return the number of global steps of an epoch."""
        return self.batches.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator that fits where it is called."""
        if self._engine.active == "steps":
            return self
        if self._engine.epochs_total is None:
            return iter(self.loader)
        return self._engine.epoch_of(self.batches)

    def __next__(self) -> Any:
        """Return the batch of the running micro-batch of `ctx.steps`."""
        driver = self._engine.driver
        if driver.plan is None or driver.leaf is None:
            raise UserError(
                "next(loader) was called outside the body of ctx.steps; "
                "iterate the loader inside ctx.epochs, or call next() inside ctx.steps"
            )
        epoch, index = divmod(driver.plan.step - 1, self.batches.steps_per_epoch)
        return self.batches.fetch(epoch, index, driver.leaf)
