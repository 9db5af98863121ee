"""Which samples are in micro-batch m of an epoch: a function of the seed and the epoch alone.

A DataLoader that shuffles gets a keyed permutation (never stored, any size), a sequential one the
identity. The user's own sampler, or batch sampler, is read to its end once per epoch, with all
global generators and its own `generator` set from (seed, epoch), after `set_epoch(epoch)` if it has
that. A sampler whose order comes from anything else (a generator of its own, a count of past
epochs) would answer differently on a worker that joined later, so the first reading is done twice
and a difference is refused.

The `generator` given to a DataLoader is not used: its state depends on what was drawn before, which
a joiner cannot know. The job's `seed` chooses the order.
Does not: read a sample, or know of leaves and steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from elastic.errors import Misconfigured
from elastic.permutation import Permutation
from elastic.rng import generators_set_to
from elastic.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

Places = Sequence[Any] | Permutation

_EPOCHS_KEPT = 2  # a step is redone in its own epoch, and the next one may be read ahead


class Order:
    """The micro-batches of every epoch of one DataLoader.

    Args:
        loader: the user's DataLoader; only its attributes are read, it is never iterated.
        source: a number that stands for the job's seed and the place of the loader in it.
        shuffles: False takes the samples of a loader that shuffles in their stored order.
    """

    def __init__(self, loader: DataLoader[Any], source: int, *, shuffles: bool = True) -> None:
        _refuse_what_cannot_be_shared_out(loader)
        self._source = source
        batches = loader.batch_sampler
        if type(batches) is BatchSampler:  # torch's own: DataLoader(batch_size=...) makes one
            self._sampler: Any = batches.sampler
            self._width: int | None = batches.batch_size
            drop_last = batches.drop_last
        else:  # the fetcher gets the sampler's elements: lists, or with batch_size=None anything
            self._sampler = loader.sampler if batches is None else batches
            self._width, drop_last = None, False
        self._permuted = shuffles and _is_plain_shuffle(self._sampler)
        self._stored = type(self._sampler) is SequentialSampler or (
            not shuffles and _is_plain_shuffle(self._sampler)
        )
        self.items = _length(loader.dataset)
        self._checked = False
        self._cache: dict[int, Places] = {}
        self.num_places = self._count_places()
        if self._width is None:
            self.num_micro_batches = self.num_places
        elif drop_last:
            self.num_micro_batches = self.num_places // self._width
        else:
            self.num_micro_batches = -(-self.num_places // self._width)
        self._refuse_nothing(loader)

    @property
    def batch_size(self) -> int:
        """Places per micro-batch; 1 when the sampler itself says what is in a micro-batch."""
        return self._width or 1

    @property
    def kind(self) -> str:
        """How places become samples: "permuted", "stored", "sampler" or "batches" (a sampler's)."""
        if self._permuted:
            return "permuted"
        if self._stored:
            return "stored"
        return "batches" if self._width is None else "sampler"

    def key(self, epoch: int, micro_batch: int) -> Any:
        """Return what a fetcher needs to make this micro-batch: indices, or the sampler's word."""
        places = self._places(epoch)
        if self._width is None:
            return places[micro_batch]
        first = micro_batch * self._width
        return [places[i] for i in range(first, min(first + self._width, self.num_places))]

    def indices(self, epoch: int, micro_batch: int) -> Sequence[Any]:
        """Return the samples of this micro-batch."""
        key = self.key(epoch, micro_batch)
        return key if isinstance(key, (list, tuple)) else [key]

    def count(self, epoch: int, micro_batch: int) -> int:
        """Return how many samples are in this micro-batch; 0 past the end of the epoch."""
        if micro_batch >= self.num_micro_batches:
            return 0
        if self._width is None:
            return len(self.indices(epoch, micro_batch))
        return min(self._width, self.num_places - micro_batch * self._width)

    def _places(self, epoch: int) -> Places:
        """Return the epoch's sequence of samples, or of whole micro-batches."""
        places = self._cache.get(epoch)
        if places is None:
            places = self._make_places(epoch)
            while len(self._cache) >= _EPOCHS_KEPT:
                del self._cache[next(iter(self._cache))]
            self._cache[epoch] = places
        return places

    def _make_places(self, epoch: int) -> Places:
        key = derive_seed("order", self._source, epoch)
        if self._permuted:
            return Permutation(self.num_places, key)
        if self._stored:
            return range(self.num_places)
        places = _read(self._sampler, epoch, key)
        if not self._checked:
            again = _read(self._sampler, epoch, key)
            if [_plain(place) for place in places] != [_plain(place) for place in again]:
                raise Misconfigured(
                    f"the order that {type(self._sampler).__name__} gives for epoch {epoch} "
                    "changes each time it is read, so workers could not agree on it",
                    kind="sampler-not-repeatable",
                    hint="draw from torch's global generator in its __iter__, or from one seeded "
                    "by set_epoch(epoch)",
                )
            self._checked = True
        if len(places) != self.num_places:
            raise Misconfigured(
                f"{type(self._sampler).__name__} gave {len(places)} entries in epoch {epoch}, but "
                f"{self.num_places} are one epoch",
                kind="sampler-length-changes",
                hint="let every epoch have the length that its __len__ says",
                epoch=epoch,
            )
        return places

    def _count_places(self) -> int:
        if self._permuted or self._stored:
            return len(self._sampler.data_source)
        if hasattr(self._sampler, "__len__"):
            return len(self._sampler)
        return len(_read(self._sampler, 0, derive_seed("order", self._source, 0)))

    def _refuse_nothing(self, loader: DataLoader[Any]) -> None:
        if self.num_micro_batches > 0:
            return
        if self.num_places == 0:
            raise Misconfigured(
                f"the DataLoader over {type(loader.dataset).__name__} has no samples",
                kind="no-samples",
                hint="check where the data is read from",
            )
        raise Misconfigured(
            f"the DataLoader over {type(loader.dataset).__name__} has {self.num_places} "
            f"samples, less than one batch_size={self._width}, and drop_last=True drops them",
            kind="no-samples",
            hint="use a smaller batch_size or drop_last=False",
        )


def _refuse_what_cannot_be_shared_out(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise Misconfigured(
            f"{type(loader.dataset).__name__} is an IterableDataset, whose samples have no numbers "
            "to share out and to find again after a failure",
            kind="iterable-dataset",
            hint="use a map-style dataset, one with __len__ and __getitem__",
        )
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise Misconfigured(
                f"the DataLoader has a DistributedSampler for {sampler.num_replicas} replicas, "
                "which would leave all but its own share of the samples out",
                kind="distributed-sampler",
                hint="give shuffle=True instead: ctx.prepare shares the samples out",
            )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    found = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return [sampler for sampler in found if sampler is not None]


def _is_plain_shuffle(sampler: Any) -> bool:
    """Say whether this is what `shuffle=True` makes: every sample once, in any order."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def _read(sampler: Any, epoch: int, key: int) -> Sequence[Any]:
    """Read a sampler to its end in the state that belongs to (key, epoch)."""
    if isinstance(sampler, (list, tuple, range)):
        return sampler
    inner = getattr(sampler, "sampler", None)
    for part in (sampler, inner):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    generators = [getattr(part, "generator", None) for part in (sampler, inner)]
    with generators_set_to(key), _seeded([g for g in generators if g is not None], key):
        return list(sampler)


@contextmanager
def _seeded(generators: Sequence[Any], key: int) -> Iterator[None]:
    """Set a sampler's own torch generators inside the block; outside nothing has been drawn."""
    ours = [g for g in generators if isinstance(g, torch.Generator)]
    states = [g.get_state() for g in ours]
    for generator in ours:
        generator.manual_seed(derive_seed("generator", key))
    try:
        yield
    finally:
        for generator, state in zip(ours, states, strict=True):
            generator.set_state(state)


def _plain(place: Any) -> Any:
    """Make one element of a sampler comparable with ==."""
    if isinstance(place, (list, tuple)):
        return [_plain(item) for item in place]
    return place.tolist() if hasattr(place, "tolist") else place
