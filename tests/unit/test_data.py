"""The data source: what is in a step, the same bits whoever fetches it, no process left over."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import namedtuple
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from elastic.data import MicroBatches, evaluation_batches, num_evaluation_batches, to_device
from elastic.errors import Misconfigured
from elastic.rng import capture_rng, restore_rng, seed_everything
from elastic.seeds import derive_seed
from tests.support import alive, eventually

LEAVES = 4
ROOT = Path(__file__).parents[2]


class Noisy(Dataset):
    """Each sample is its number, and something drawn from each of the three generators."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return i, torch.randn(3), np.random.rand(), random.random()


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return i


def source_of(dataset, *, seed=7, leaves=LEAVES, index=0, close_fds=(), **loader):
    loader.setdefault("batch_size", 3)
    return MicroBatches(
        DataLoader(dataset, **loader),
        seed=seed,
        num_leaves=leaves,
        index=index,
        close_fds=close_fds,
    )


@pytest.fixture
def open_source():
    """Make sources that are closed when the test ends."""
    made = []

    def make(*args, **kwargs):
        made.append(source_of(*args, **kwargs))
        return made[-1]

    yield make
    for source in made:
        source.close()


def places(source, epoch=0):
    """Every (step, leaf) of an epoch that has samples."""
    return [
        (j, leaf)
        for j in range(source.steps_per_epoch)
        for leaf, count in enumerate(source.counts(epoch, j))
        if count
    ]


def order(source, epoch=0):
    return [i for j, leaf in places(source, epoch) for i in source.indices(epoch, j, leaf)]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def children():
    """The processes under this one, but for the tracker that spawning starts once and for all."""
    found = psutil.Process().children(recursive=True)
    return [child.pid for child in found if "resource_tracker" not in " ".join(child.cmdline())]


# -- what is in a step -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "batch_size", "drop_last", "counts"),
    [
        (24, 3, False, [(3, 3, 3, 3), (3, 3, 3, 3)]),
        (25, 3, False, [(3, 3, 3, 3), (3, 3, 3, 3), (1, 0, 0, 0)]),
        (20, 3, False, [(3, 3, 3, 3), (3, 3, 2, 0)]),
        (20, 3, True, [(3, 3, 3, 3), (3, 3, 0, 0)]),
        (3, 8, False, [(3, 0, 0, 0)]),  # a dataset smaller than one micro-batch
        (3, 1, False, [(1, 1, 1, 0)]),  # and one smaller than the leaves of a step
        (1, 1, True, [(1, 0, 0, 0)]),
    ],
)
def test_steps_are_filled_in_order(length, batch_size, drop_last, counts):
    source = source_of(Numbers(length), batch_size=batch_size, drop_last=drop_last, shuffle=True)
    assert source.steps_per_epoch == len(counts)
    assert [source.counts(5, j) for j in range(len(counts))] == counts
    assert len(set(order(source, 5))) == sum(map(sum, counts))


def test_an_empty_leaf_has_no_samples_and_is_not_fetched():
    source = source_of(Numbers(4))
    assert source.indices(0, 0, 3) == ()
    with pytest.raises(IndexError, match="leaf 3 of step 0 is empty"):
        source.fetch(0, 0, 3)
    with pytest.raises(IndexError, match="outside an epoch of 1 steps of 4 leaves"):
        source.counts(0, 1)


def test_a_billion_samples_start_at_once_and_take_no_memory():
    tracemalloc.start()
    source = source_of(Numbers(10**9), batch_size=10, shuffle=True)
    assert source.steps_per_epoch == 25_000_000
    late = source.indices(3, 24_999_999, 3)
    batch = source.fetch(3, 12_345_678, 1)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(late)) == 10
    assert batch.tolist() == source.indices(3, 12_345_678, 1)
    assert peak_bytes < 1_000_000


# -- order -------------------------------------------------------------------------------------


def test_epochs_seeds_and_loaders_have_orders_of_their_own():
    orders = [
        order(source_of(Numbers(50), shuffle=True, seed=seed, index=index), epoch)
        for seed, index, epoch in [(7, 0, 0), (7, 0, 1), (8, 0, 0), (7, 1, 0)]
    ]
    assert len({tuple(o) for o in orders}) == 4
    assert order(source_of(Numbers(50), shuffle=True)) == orders[0]


def test_a_run_interrupted_twice_in_an_epoch_goes_on_where_it_was():
    # What a resume has is (epoch, step): nothing of the source's past matters.
    whole = source_of(Numbers(53), shuffle=True)
    steps = [[whole.indices(2, j, leaf) for leaf in range(LEAVES)] for j in range(5)]
    got = []
    for first, stop in [(0, 2), (2, 3), (3, 5)]:
        resumed = source_of(Numbers(53), shuffle=True)
        got += [[resumed.indices(2, j, leaf) for leaf in range(LEAVES)] for j in range(first, stop)]
    assert got == steps


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda data: RandomSampler(data, replacement=True, num_samples=31),
        lambda data: RandomSampler(data, num_samples=31, generator=torch.Generator()),
        lambda data: SubsetRandomSampler(range(5, 36)),
        lambda data: SubsetRandomSampler(range(5, 36), generator=torch.Generator()),
        lambda data: WeightedRandomSampler([1.0] * 50, 31),
        lambda data: DistributedSampler(data, num_replicas=1, rank=0),
    ],
    ids=["replacement", "some", "subset", "subset-generator", "weighted", "distributed"],
)
def test_torchs_samplers_are_repeated_from_seed_and_epoch(make_sampler):
    data = Numbers(50)
    first = source_of(data, sampler=make_sampler(data))
    wanted = {epoch: order(first, epoch) for epoch in (3, 4)}
    torch.rand(5)
    later = source_of(data, sampler=make_sampler(data))
    assert order(later, 4) == wanted[4]
    assert order(later, 3) == wanted[3]
    assert wanted[3] != wanted[4]
    assert order(source_of(data, sampler=make_sampler(data), index=1), 3) != wanted[
        3
    ] or isinstance(make_sampler(data), DistributedSampler)


class EveryEpochShorter(Sampler):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(20 - self.epoch))

    def __len__(self):
        return 20


class Remembers(Sampler):
    """Draws from a generator of its own, which a worker that joins later would not have."""

    def __init__(self):
        self.own = random.Random(0)

    def __iter__(self):
        return iter(self.own.sample(range(20), 20))

    def __len__(self):
        return 20


def test_a_list_is_a_sampler_and_a_sampler_need_not_know_its_length():
    class Forward:
        def __iter__(self):
            yield from (5, 3, 1)

    assert order(source_of(Numbers(9), sampler=[5, 3, 1])) == [5, 3, 1]
    assert order(source_of(Numbers(9), sampler=Forward())) == [5, 3, 1]


def test_each_batch_of_a_batch_sampler_is_one_micro_batch():
    source = source_of(
        Numbers(9), batch_size=1, batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7], [8]]
    )
    assert source.steps_per_epoch == 2
    assert source.counts(0, 0) == (3, 1, 2, 2)
    assert source.counts(0, 1) == (1, 0, 0, 0)
    assert source.fetch(0, 0, 2).tolist() == [4, 5]
    plain = BatchSampler(RandomSampler(Numbers(9)), 2, drop_last=True)
    same_as = source_of(Numbers(9), batch_size=2, drop_last=True, shuffle=True)
    assert order(source_of(Numbers(9), batch_size=1, batch_sampler=plain)) == order(same_as)


def test_without_batches_each_sample_is_a_micro_batch():
    source = source_of(Numbers(6), batch_size=None)
    assert (source.batch_size, source.counts(0, 1)) == (1, (1, 1, 0, 0))
    assert source.fetch(0, 0, 2) == 2
    lists = source_of(
        torch.arange(10), batch_size=None, sampler=BatchSampler(range(10), 4, drop_last=False)
    )
    assert lists.counts(0, 0) == (4, 4, 2, 0)
    assert lists.fetch(0, 0, 1).tolist() == [4, 5, 6, 7]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: source_of(Endless()), "iterable-dataset"),
        (lambda: source_of(Numbers(0)), "no-samples"),
        (lambda: source_of(Numbers(2), drop_last=True), "no-samples"),
        (
            lambda: source_of(
                Numbers(9), sampler=DistributedSampler(Numbers(9), num_replicas=2, rank=0)
            ),
            "distributed-sampler",
        ),
        (
            lambda: source_of(Numbers(20), sampler=Remembers()).indices(4, 0, 0),
            "sampler-not-repeatable",
        ),
        (
            lambda: source_of(Numbers(20), sampler=EveryEpochShorter()).indices(4, 0, 0),
            "sampler-length-changes",
        ),
        (lambda: num_evaluation_batches(DataLoader(Endless())), "iterable-dataset"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_remedy(make, kind):
    with pytest.raises(Misconfigured) as caught:
        make()
    assert caught.value.kind == kind
    assert caught.value.hint


# -- fetching ----------------------------------------------------------------------------------


def test_a_fetch_draws_nothing_from_the_global_generators(open_source):
    for workers in (0, 1):
        source = open_source(Noisy(20), shuffle=True, num_workers=workers)
        seed_everything(1, 2, 3)
        expected = (torch.rand(1).item(), np.random.rand(), random.random())
        seed_everything(1, 2, 3)
        source.prefetch(0, 0, lambda j: range(LEAVES))
        source.fetch(0, 0, 1)
        assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_batches_have_the_same_bits_at_any_number_of_loader_processes(open_source):
    reference = open_source(Noisy(40), shuffle=True)
    wanted = {place: reference.fetch(0, *place) for place in places(reference)}
    torch.manual_seed(99)
    assert same(wanted[1, 2], open_source(Noisy(40), shuffle=True).fetch(0, 1, 2))
    assert not torch.equal(wanted[0, 0][1], wanted[0, 1][1])
    assert not torch.equal(wanted[0, 0][1], reference.fetch(1, 0, 0)[1])
    for workers in (1, 2):
        source = open_source(Noisy(40), shuffle=True, num_workers=workers)
        source.prefetch(0, 0, lambda j: range(LEAVES))
        for place, batch in wanted.items():
            assert same(source.fetch(0, *place), batch)


def test_a_changed_plan_a_wrong_plan_and_no_plan_give_the_same_batches(open_source):
    reference = open_source(Noisy(100), shuffle=True)
    source = open_source(Noisy(100), shuffle=True, num_workers=2, persistent_workers=True)

    def check(epoch, j, leaf):
        assert same(source.fetch(epoch, j, leaf), reference.fetch(epoch, j, leaf))

    check(0, 3, 1)  # nothing was announced
    pids = children()
    source.prefetch(0, 0, lambda j: range(2))
    check(0, 0, 0)
    source.prefetch(0, 0, lambda j: range(3))  # two workers became one: the step is given out anew
    for leaf in range(3):
        check(0, 0, leaf)
    source.prefetch(0, 1, lambda j: [3])
    for leaf in (2, 1, 3, 0):  # not what was announced, and in no order
        check(0, 1, leaf)
    check(0, 2, 3)
    check(0, 2, 3)  # the same again, as for a step that is redone
    source.prefetch(2, 0, lambda j: range(4))
    for place in places(reference, 2):
        check(2, *place)
    check(3, 0, 0)
    assert children() == pids  # the processes were kept through all of it


class Counted(Numbers):
    def __init__(self, length):
        super().__init__(length)
        self.reads = multiprocessing.get_context("fork").Value("q", 0)

    def __getitem__(self, i):
        with self.reads.get_lock():
            self.reads.value += 1
        return i


def test_looking_ahead_is_bounded_and_called_off_work_is_not_done(open_source):
    data = Counted(10_000)
    source = open_source(data, batch_size=1, num_workers=2, prefetch_factor=3)
    source.prefetch(0, 0, lambda j: [0])
    eventually(lambda: data.reads.value == 6, what="2 processes times 3 ahead")
    for j in range(4):
        source.fetch(0, j, 0)
    eventually(lambda: data.reads.value == 10, what="one more for each that was taken")
    source.prefetch(0, 4, lambda j: [0])  # the same plan: what is there stays there
    for j in range(4, 8):
        source.fetch(0, j, 0)
    eventually(lambda: data.reads.value == 14, what="nothing was read twice")
    source.prefetch(0, 100, lambda j: [1])
    assert source.fetch(0, 100, 1).tolist() == [401]
    eventually(lambda: data.reads.value == 14 + 7, what="the new plan alone was read")


def test_a_new_epoch_is_read_ahead_before_its_first_batch_is_asked_for(open_source):
    data = Counted(4)
    source = open_source(data, batch_size=1, num_workers=1, persistent_workers=True)
    source.prefetch(0, 0, lambda j: range(LEAVES))
    for leaf in range(LEAVES):
        source.fetch(0, 0, leaf)
    assert data.reads.value == 4  # the epoch is over: its processes idle
    source.prefetch(1, 0, lambda j: range(LEAVES))
    eventually(lambda: data.reads.value == 6, what="the new epoch's first batches")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_new_plan_near_the_end_that_is_read_already_waits_for_nothing(open_source, workers):
    data = Counted(4)
    source = open_source(data, batch_size=1, num_workers=workers, prefetch_factor=4)
    source.prefetch(0, 0, lambda j: range(LEAVES))
    assert source.fetch(0, 0, 3).tolist() == [3]  # the others came before it, and the epoch is over
    source.prefetch(0, 0, lambda j: range(3))
    for leaf in range(3):
        assert source.fetch(0, 0, leaf).tolist() == [leaf]
    assert data.reads.value == 4


class Gated(Counted):
    """Sample 0 takes until the gate is opened."""

    def __init__(self, length):
        super().__init__(length)
        self.gate = multiprocessing.get_context("fork").Event()

    def __getitem__(self, i):
        if i == 0:
            self.gate.wait()
        return super().__getitem__(i)


def test_work_that_nobody_wants_any_more_is_skipped(open_source):
    data = Gated(1000)
    source = open_source(data, batch_size=1, num_workers=1, prefetch_factor=8)
    source.prefetch(0, 0, lambda j: [0])  # the only process is held at the first sample
    source.prefetch(0, 50, lambda j: [2])
    data.gate.set()
    source.fetch(0, 50, 2)
    source.close()
    assert data.reads.value <= 1 + 9  # sample 0, then the new plan; not the seven in between


class Broken(Numbers):
    def __getitem__(self, i):
        if i == 7:
            raise KeyError("sample 7 is damaged")
        return i


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_surfaces_where_its_batch_is_asked_for(open_source, workers):
    source = open_source(Broken(24), num_workers=workers)
    source.prefetch(0, 0, lambda j: range(LEAVES))
    assert source.fetch(0, 0, 0).tolist() == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(KeyError, match="sample 7 is damaged") as caught:
            source.fetch(0, 0, 2)
        assert ("in DataLoader worker process" in str(caught.value)) == (workers > 0)
    assert source.fetch(0, 1, 0).tolist() == [12, 13, 14]


def test_a_killed_loader_process_is_an_error_and_the_next_fetch_starts_anew(open_source):
    data = Gated(100)
    source = open_source(data, batch_size=1, num_workers=1)
    source.prefetch(0, 0, lambda j: [0])
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        source.fetch(0, 0, 0)
    assert source.fetch(0, 1, 1).tolist() == [5]


class Slow(Numbers):
    def __getitem__(self, i):
        time.sleep(0.3)  # sleep: a slow disk
        return i


def test_a_fetch_that_takes_too_long_is_an_error(open_source):
    source = open_source(Slow(100), batch_size=1, num_workers=1, timeout=0.05)
    with pytest.raises(RuntimeError, match="timed out"):
        source.fetch(0, 0, 0)


# -- the loader's other settings ------------------------------------------------------------------


class Opened(Numbers):
    """Says what a loader process looks like from inside."""

    handle = "closed"

    def __init__(self, length, fd):
        super().__init__(length)
        self.fd = fd

    def __getitem__(self, i):
        try:
            os.fstat(self.fd)
            inherited = True
        except OSError:
            inherited = False
        handlers = [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGHUP)]
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return self.handle, inherited, handlers == [signal.SIG_DFL] * 2, sorted(held)


def open_dataset(worker_id):
    info = get_worker_info()
    info.dataset.handle = f"opened by {worker_id} of {info.num_workers}"


def test_loader_processes_start_clean_and_run_the_users_init_on_the_users_dataset(open_source):
    read, write = os.pipe()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        source = open_source(
            Opened(4, read),
            batch_size=1,
            num_workers=1,
            worker_init_fn=open_dataset,
            collate_fn=lambda samples: samples[0],
            close_fds=lambda: [read, 10_000],
        )
        assert source.fetch(0, 0, 0) == ("opened by 0 of 1", False, True, [])
        os.fstat(read)  # ours is still open
        assert callable(signal.getsignal(signal.SIGUSR1))
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.close(read)
        os.close(write)


def test_processes_persist_over_epochs_only_when_asked_to(open_source):
    for persistent in (True, False):
        source = open_source(Numbers(30), num_workers=1, persistent_workers=persistent)
        source.prefetch(0, 0, lambda j: range(LEAVES))
        first = children()
        source.fetch(0, 0, 0)
        source.prefetch(0, 1, lambda j: range(LEAVES))
        assert children() == first
        source.prefetch(1, 0, lambda j: range(LEAVES))
        assert (children() == first) == persistent
        assert len(children()) == 1
        source.close()
        assert not children()


def test_many_starts_leave_no_process_and_no_descriptor():
    def start():
        source = source_of(Numbers(30), num_workers=1)
        source.prefetch(0, 0, lambda j: range(LEAVES))
        source.fetch(0, 0, 0)
        source.close()

    start()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        start()
    assert not children()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


TRAINER = """
import sys, time
from torch.utils.data import DataLoader
from elastic.data import MicroBatches

class Stuck:
    def __len__(self): return 8
    def __getitem__(self, i): time.sleep(60)

source = MicroBatches(DataLoader(Stuck(), num_workers=2), seed=0, num_leaves=2)
source.prefetch(0, 0, lambda j: [0, 1])
print("started", flush=True)
source.fetch(0, 0, 0)
"""


def test_loader_processes_leave_with_a_trainer_that_is_killed():
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout.readline() == "started\n"
        pids = [child.pid for child in psutil.Process(trainer.pid).children(recursive=True)]
        assert len(pids) == 2
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    eventually(lambda: not any(alive(pid) for pid in pids), within_s=2, what="their end")


@pytest.mark.slow
def test_processes_that_are_spawned_give_the_same_batches(open_source):
    reference = open_source(Noisy(12), shuffle=True)
    source = open_source(
        Noisy(12), shuffle=True, num_workers=1, multiprocessing_context="spawn", close_fds=[0, 1, 2]
    )
    assert same(source.fetch(0, 0, 2), reference.fetch(0, 0, 2))


def test_every_tensor_of_a_batch_is_moved():
    Pair = namedtuple("Pair", "x y")

    class Own:
        def to(self, device):
            return f"moved to {device}"

    t = torch.ones(2)
    batch = {"pair": Pair(t, [t, "text"]), "own": Own(), "number": 3, "none": None, "tuple": (t, t)}
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair)
    tensors = [moved["pair"].x, moved["pair"].y[0], *moved["tuple"]]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert moved["pair"].y[1] == "text"
    assert (moved["own"], moved["number"], moved["none"]) == ("moved to meta", 3, None)
    assert to_device(batch, torch.device("cpu")) is batch


# -- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_takes_every_sample_once_in_one_order(workers):
    loader = DataLoader(Noisy(23), batch_size=4, shuffle=True, num_workers=workers)
    assert num_evaluation_batches(loader) == 6
    seed_everything(1, 2, 3)
    expected = torch.rand(1)
    seed_everything(1, 2, 3)
    whole = list(evaluation_batches(loader, 0, 6))
    shared_out = [b for start in (0, 2, 4) for b in evaluation_batches(loader, start, start + 2)]
    assert torch.equal(torch.rand(1), expected)
    assert torch.cat([batch[0] for batch in whole]).tolist() == list(range(23))
    assert all(same(a, b) for a, b in zip(whole, shared_out, strict=True))
    plain = list(evaluation_batches(DataLoader(Noisy(23), batch_size=4), 0, 6))
    assert all(same(a, b) for a, b in zip(whole, plain, strict=True))
    assert not children()


def test_evaluation_that_is_left_early_leaves_no_process():
    loader = DataLoader(Numbers(23), batch_size=4, num_workers=1)
    batches = evaluation_batches(loader, 0, 6)
    next(batches)
    batches.close()
    assert not children()


# -- random numbers ------------------------------------------------------------------------------


def draw():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


def test_micro_batches_have_random_numbers_of_their_own():
    draws = []
    for place in [(0, 1, 2), (0, 1, 3), (0, 2, 2), (1, 1, 2), (0, 1, 2)]:
        seed_everything(*place)
        draws.append(draw())
    assert draws[0] == draws[4]
    assert len({str(d) for d in draws}) == 4
    # `random` and NumPy run the same algorithm: one seed would make them one stream.
    assert draws[0][1][0] != draws[0][2]


def test_what_was_captured_is_restored():
    seed_everything(3, 1, 4)
    state = capture_rng()
    first = draw()
    assert draw() != first
    restore_rng(state)
    assert draw() == first


def test_seeds_never_change_and_cover_64_bits():
    assert derive_seed("a", 1) == 13924241962069754241
    assert derive_seed("a", 11) != derive_seed("a1", 1)
    for part in range(200):  # half of these are beyond a signed 64-bit number
        seed_everything(part, 0, 0)
