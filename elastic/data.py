"""The data source of a prepared DataLoader: micro-batch by (epoch, step, leaf), whoever asks.

A global step takes `num_leaves` micro-batches (virtual ranks times accumulation), and leaf l of
step j of an epoch is micro-batch j * num_leaves + l. The tail of an epoch fills the leaves in
order: full ones, one short one, the rest empty. Nothing here has a position: where a job stands is
two integers (epoch, step) of the caller, so nothing is lost when a worker dies and nothing is
skipped on resume.

Of the DataLoader these are followed: dataset, batch_size, sampler or batch_sampler (each of its
batches is one micro-batch), shuffle, drop_last, collate_fn, num_workers, prefetch_factor,
persistent_workers (without it, each epoch starts new processes, as in torch), worker_init_fn,
timeout, multiprocessing_context, and pin_memory when batches go to a GPU. Its `generator` is not
(see elastic/data_order.py), and batches always come in order.
Does not: drive a step, or read IterableDatasets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from elastic.data_order import Order
from elastic.data_workers import Fetcher, LoaderWorkers, Tag
from elastic.rng import generators_set_to
from elastic.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.data import DataLoader


class MicroBatches:
    """All micro-batches of one prepared DataLoader, each the same whoever fetches it and when.

    Args:
        loader: the user's DataLoader; it is read for its settings and never iterated.
        seed: the job's seed.
        num_leaves: micro-batches of a global step.
        device: where batches are moved to.
        index: the place of this loader among the prepared ones; each has an order of its own.
        close_fds: descriptors that forked loader processes must not keep, or a function for them.
        on_read: gets (epoch, step in it, samples, their hash) of each batch that is handed out.
    """

    def __init__(  # noqa: PLR0913 - a loader and six facts of the job
        self,
        loader: DataLoader[Any],
        *,
        seed: int,
        num_leaves: int,
        device: torch.device | str = "cpu",
        index: int = 0,
        close_fds: Sequence[int] | Callable[[], Sequence[int]] = (),
        on_read: Callable[[int, int, int, int | None], None] = lambda *_: None,
    ) -> None:
        self._on_read = on_read
        self._source = derive_seed("loader", seed, index)
        self._order = Order(loader, self._source)
        self._num_leaves = num_leaves
        self._device = torch.device(device)
        self._pin = loader.pin_memory and self._device.type == "cuda"
        self._fetcher = Fetcher.of(loader)
        self._workers: LoaderWorkers | None = None
        self._keep_workers = loader.persistent_workers
        self._epoch: int | None = None  # of the loader processes
        if loader.num_workers > 0:
            self._workers = LoaderWorkers(
                loader, self._task_of, pin=self._pin, close_fds=_as_function(close_fds)
            )

    @property
    def batch_size(self) -> int:
        """Samples of a full micro-batch; 1 when the user's sampler decides it."""
        return self._order.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Global steps of an epoch, the last of which may have empty leaves."""
        return -(-self._order.num_micro_batches // self._num_leaves)

    def facts(self) -> dict[str, Any]:
        """Return what an auditor needs to say which samples every step must have read."""
        return {
            "order": self._order.kind,
            "samples": self._order.num_places,
            "batch_size": self._order.batch_size,
            "micro_batches": self._order.num_micro_batches,
            "leaves": self._num_leaves,
            "source": f"{self._source:016x}",
            "items": self._order.items,
        }

    def counts(self, epoch: int, j: int) -> tuple[int, ...]:
        """Return the number of samples of each leaf of step j; in a tail the last may have 0."""
        return tuple(
            self._order.count(epoch, self._at(j, leaf)) for leaf in range(self._num_leaves)
        )

    def indices(self, epoch: int, j: int, leaf: int) -> Sequence[int]:
        """Return the numbers of the samples of one leaf, in their order in the batch."""
        place = self._at(j, leaf)
        return self._order.indices(epoch, place) if self._order.count(epoch, place) else ()

    def fetch(self, epoch: int, j: int, leaf: int) -> Any:
        """Return the batch of one leaf that is not empty, on the device; draws nothing outside."""
        tag = (epoch, j, leaf)
        if self._workers is None:
            key, source = self._task_of(tag)
            with generators_set_to(source):
                batch, read = self._fetcher.fetch(key)
            batch = to_device(batch, self._device, pin=self._pin)
        else:
            self._enter(epoch)
            batch, read = self._workers.fetch(tag)
            batch = to_device(batch, self._device)
        self._on_read(epoch, j, *read)
        return batch

    def prefetch(self, epoch: int, j: int, leaves_for: Callable[[int], Sequence[int]]) -> None:
        """Let loader processes work ahead from step j to the end of the epoch.

        Args:
            epoch: the epoch that is being trained.
            j: the step that is fetched next.
            leaves_for: the leaves of a step that this worker will fetch, in that order. A guess:
                `fetch` returns what it is asked for in any case.
        """
        if self._workers is None:
            return
        self._enter(epoch)

        def plan() -> Iterator[Tag]:
            for step in range(j, self.steps_per_epoch):
                for leaf in leaves_for(step):
                    if self._order.count(epoch, self._at(step, leaf)):
                        yield epoch, step, leaf

        def wanted(tag: Tag) -> bool:
            return tag[0] == epoch and tag[1] >= j and tag[2] in leaves_for(tag[1])

        self._workers.follow(plan(), wanted)

    def close(self) -> None:
        """End the loader processes, if there are any."""
        if self._workers is not None:
            self._workers.close()

    def _at(self, j: int, leaf: int) -> int:
        """Return the number within its epoch of a micro-batch."""
        if not (0 <= j < self.steps_per_epoch and 0 <= leaf < self._num_leaves):
            raise IndexError(
                f"step {j}, leaf {leaf} is outside an epoch of {self.steps_per_epoch} steps of "
                f"{self._num_leaves} leaves"
            )
        return j * self._num_leaves + leaf

    def _task_of(self, tag: Tag) -> tuple[Any, int]:
        epoch, j, leaf = tag
        place = self._at(j, leaf)
        if not self._order.count(epoch, place):
            raise IndexError(f"leaf {leaf} of step {j} is empty")
        return self._order.key(epoch, place), derive_seed("fetch", self._source, epoch, j, leaf)

    def _enter(self, epoch: int) -> None:
        """Start the loader processes anew for a new epoch, unless they are to persist."""
        if epoch != self._epoch and not self._keep_workers:
            self.close()
        self._epoch = epoch


def num_evaluation_batches(loader: DataLoader[Any]) -> int:
    """Return how many batches an evaluation over this DataLoader has."""
    return _evaluation_order(loader).num_micro_batches


def evaluation_batches(
    loader: DataLoader[Any],
    start: int,
    stop: int,
    device: torch.device | str = "cpu",
    *,
    close_fds: Sequence[int] | Callable[[], Sequence[int]] = (),
) -> Iterator[Any]:
    """Yield batches start..stop of a DataLoader in one fixed order, never shuffled.

    The same batch numbers give the same bits on every worker and each time; nothing is drawn from
    the global generators. Loader processes live as long as this iterator.
    """
    order, fetcher = _evaluation_order(loader), Fetcher.of(loader)
    device = torch.device(device)
    pin = loader.pin_memory and device.type == "cuda"

    def task_of(tag: Tag) -> tuple[Any, int]:
        return order.key(0, tag[1]), derive_seed("evaluation", tag[1])

    tags = [(0, m, 0) for m in range(start, min(stop, order.num_micro_batches))]
    if loader.num_workers == 0:
        for tag in tags:
            key, source = task_of(tag)
            with generators_set_to(source):
                batch, _ = fetcher.fetch(key)
            yield to_device(batch, device, pin=pin)
        return
    workers = LoaderWorkers(loader, task_of, pin=pin, close_fds=_as_function(close_fds))
    try:
        workers.follow(iter(tags), lambda _: True)
        for tag in tags:
            batch, _ = workers.fetch(tag)
            yield to_device(batch, device)
    finally:
        workers.close()


def to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Move every tensor in a batch; on the CPU the batch itself is returned.

    Looks into tuples, named tuples, lists and mappings; anything else with a `.to()` is asked to
    move itself, and the rest is left alone.
    """
    if device.type == "cpu" or isinstance(batch, (str, bytes)):
        return batch
    if isinstance(batch, torch.Tensor):
        source = batch.pin_memory() if pin and batch.device.type == "cpu" else batch
        return source.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, pin=pin) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, pin=pin) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device, pin=pin) for value in batch)
    return batch


def _evaluation_order(loader: DataLoader[Any]) -> Order:
    return Order(loader, derive_seed("evaluation"), shuffles=False)


def _as_function(fds: Sequence[int] | Callable[[], Sequence[int]]) -> Callable[[], Sequence[int]]:
    return fds if callable(fds) else lambda: fds
