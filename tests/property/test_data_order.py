"""Each sample of an epoch exactly once, for every length, batch size, leaf count and key."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from elastic.data import MicroBatches
from elastic.permutation import Permutation


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return i


def source_of(length, *, seed=0, leaves=4, **loader):
    return MicroBatches(DataLoader(Numbers(length), **loader), seed=seed, num_leaves=leaves)


def epoch_of(source, epoch, leaves):
    """All samples of an epoch, leaf by leaf; checks that counts tell the truth."""
    steps = []
    for j in range(source.steps_per_epoch):
        counts = source.counts(epoch, j)
        got = [list(source.indices(epoch, j, leaf)) for leaf in range(leaves)]
        assert tuple(len(indices) for indices in got) == counts
        steps.append(got)
    return steps


@given(length=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_permutation_meets_every_value_once(length, key):
    order = Permutation(length, key)
    assert len({order[i] for i in range(length)}) == length
    assert all(0 <= order[i] < length for i in range(length))


@given(length=st.integers(2, 2**63), key=st.integers(0, 2**64 - 1), place=st.integers(0, 2**63))
@settings(max_examples=100, deadline=None)
def test_no_two_places_hold_the_same_value_at_any_length(length, key, place):
    order = Permutation(length, key)
    first, second = place % length, (place + 1) % length
    assert 0 <= order[first] < length
    assert order[first] != order[second]


@given(
    length=st.integers(1, 400),
    batch_size=st.integers(1, 17),
    leaves=st.integers(1, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_an_epoch_uses_each_sample_exactly_once(length, batch_size, leaves, shuffle, epoch):
    source = source_of(length, leaves=leaves, batch_size=batch_size, shuffle=shuffle)
    steps = epoch_of(source, epoch, leaves)
    flat = [i for step in steps for leaf in step for i in leaf]
    assert sorted(flat) == list(range(length))
    if not shuffle:
        assert flat == list(range(length))
    # Only the last step is not full, and it is filled in order: full, one short, rest empty.
    for step in steps[:-1]:
        assert all(len(leaf) == batch_size for leaf in step)
    tail = [len(leaf) for leaf in steps[-1]]
    full, short = divmod(sum(tail), batch_size)
    assert sum(tail) > 0
    assert tail == ([batch_size] * full + [short] + [0] * leaves)[:leaves]


@given(length=st.integers(1, 400), batch_size=st.integers(1, 17), leaves=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_drop_last_leaves_out_the_short_batch_alone(length, batch_size, leaves):
    if length < batch_size:
        return
    source = source_of(length, leaves=leaves, batch_size=batch_size, shuffle=True, drop_last=True)
    steps = epoch_of(source, 0, leaves)
    counts = Counter(i for step in steps for leaf in step for i in leaf)
    assert set(counts.values()) == {1}
    assert len(counts) == length - length % batch_size
    assert {len(leaf) for step in steps for leaf in step} <= {0, batch_size}


@given(seed=st.integers(0, 2**31), epoch=st.integers(0, 50), noise=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_order_is_a_function_of_seed_and_epoch(seed, epoch, noise):
    def order(seed, epoch, generator=None):
        source = source_of(97, seed=seed, leaves=3, batch_size=4, shuffle=True, generator=generator)
        return epoch_of(source, epoch, 3)

    reference = order(seed, epoch)
    torch.manual_seed(noise)  # what others draw, and how the loader was seeded, does not matter
    torch.rand(noise % 7)
    assert order(seed, epoch, torch.Generator().manual_seed(noise)) == reference
    assert order(seed, epoch + 1) != reference
    assert order(seed + 1, epoch) != reference


@given(
    length=st.integers(1, 300),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    virtual_ranks=st.integers(6, 9),
)
@settings(max_examples=60, deadline=None)
def test_no_sequence_of_world_sizes_changes_what_a_step_uses(length, worlds, virtual_ranks):
    def leaves_of(rank, size):
        return range(rank * virtual_ranks // size, (rank + 1) * virtual_ranks // size)

    reference = epoch_of(
        source_of(length, leaves=virtual_ranks, batch_size=3, shuffle=True), 1, virtual_ranks
    )
    used = []
    for j in range(len(reference)):
        size = worlds[j % len(worlds)]
        step = []
        for rank in range(size):  # every member computes its own share, from nothing but (epoch, j)
            own = source_of(length, leaves=virtual_ranks, batch_size=3, shuffle=True)
            step += [list(own.indices(1, j, leaf)) for leaf in leaves_of(rank, size)]
        used.append(step)
    assert used == reference
