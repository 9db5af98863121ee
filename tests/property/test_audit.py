"""The auditor over made-up histories: true ones pass, and each kind of fault is found."""

from __future__ import annotations

import copy
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from elastic.audit import IN_ORDER, NOTHING, ONCE, PARTS, NoRecords, audit
from elastic.data import MicroBatches
from elastic.digest import add, digest_of, digest_of_places, digest_of_range
from elastic.permutation import Permutation


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return i


def history(length, leaves, *, epochs=2, generation=1, steps=None, **loader):
    """The events of a job that has done all its epochs, made by the real order of samples."""
    reads: dict = {}

    def on_read(epoch, index, samples, digest):
        before = reads.get((epoch, index), (0, 0))
        known = before[1] is not None and digest is not None
        total = add((before[1], digest)) if known else None
        reads[epoch, index] = (before[0] + samples, total)

    source = MicroBatches(
        DataLoader(Numbers(length), **loader), seed=3, num_leaves=leaves, on_read=on_read
    )
    for epoch in range(epochs):
        for index in range(source.steps_per_epoch):
            for leaf, count in enumerate(source.counts(epoch, index)):
                if count:
                    source.fetch(epoch, index, leaf)
    events = [{"event": "data.order", "loader": 0, **source.facts()}]
    for step, ((epoch, index), (samples, digest)) in enumerate(sorted(reads.items()), 1):
        if steps is None or step in steps:
            events.append(committed(step, generation, [0, epoch, index, samples, digest]))
    return events


def committed(step, generation, read):
    hashed = None if read[4] is None else f"{read[4]:016x}"
    reads = [[*read[:4], hashed]]
    return {"event": "step.committed", "step": step, "generation": generation, "reads": reads}


LENGTHS = st.integers(1, 90)
BATCHES = st.integers(1, 7)
LEAVES = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, BATCHES, LEAVES, st.booleans(), st.booleans())
def test_true_histories_pass(length, batch, leaves, shuffle, drop_last):
    drop_last = drop_last and length >= batch
    events = history(length, leaves, batch_size=batch, shuffle=shuffle, drop_last=drop_last)
    report = audit(events)
    assert report.ok, report.problems
    assert [each.proved for each in report.epochs] == [IN_ORDER, IN_ORDER]
    assert all(each.whole for each in report.epochs)
    left = length % batch if drop_last else 0
    assert {each.samples for each in report.epochs} == {length - left}


@settings(max_examples=80, deadline=None)
@given(st.integers(12, 90), BATCHES, LEAVES, st.integers(0, 10**6), st.booleans())
def test_every_fault_is_found(length, batch, leaves, seed, shuffle):
    events = history(length, leaves, batch_size=batch, shuffle=shuffle)
    random = Random(seed)
    steps = events[1:]
    victim = random.randrange(len(steps))
    read = steps[victim]["reads"][0]
    for fault in ("other sample", "one more", "hash", "lost in the middle", "place", "told twice"):
        broken = copy.deepcopy(events)
        now = broken[1 + victim]["reads"][0]
        if fault == "other sample":
            wrong = add((int(read[4], 16), digest_of([0]), -digest_of([1])))
            now[4] = f"{wrong:016x}"
        elif fault == "one more":
            now[3] += 1
        elif fault == "hash":
            now[4] = f"{int(read[4], 16) ^ 1 << random.randrange(64):016x}"
        elif fault == "lost in the middle":
            if victim == len(steps) - 1:
                continue
            del broken[1 + victim]
        elif fault == "place":
            now[2] += 1
        else:
            other = copy.deepcopy(broken[1 + victim])
            other["reads"][0][3] += 1
            broken.append(other)
        report = audit(broken)
        assert not report.ok, fault
        assert report.problems


def test_samples_exchanged_between_steps_are_found_and_the_steps_are_named():
    events = history(40, 2, batch_size=5)
    a, b = events[1]["reads"][0], events[2]["reads"][0]
    a[4], b[4] = b[4], a[4]
    report = audit(events)
    assert report.problems == [
        "epoch 0: step 1 has read other samples than were its turn",
        "epoch 0: step 2 has read other samples than were its turn",
    ]
    assert [each.proved for each in report.epochs] == [NOTHING, IN_ORDER]


@given(st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_resumes_from_older_checkpoints_count_what_was_done_last(seed):
    random = Random(seed)
    whole = history(60, 2, batch_size=5, shuffle=True, epochs=3)
    last = len(whole) - 1
    events, generation, done, lost = [whole[0]], 1, 0, 0
    while done < last:
        stop = random.randint(done + 1, last)
        events += [{**each, "generation": generation} for each in whole[done + 1 : stop + 1]]
        if stop == last:
            break
        generation += random.randint(1, 3)
        done = random.randint(max(0, done - 3), stop)
        lost += stop - done
        events.append({"event": "restore.finished", "step": done, "generation": generation})
    report = audit(events)
    assert report.ok, report.problems
    assert report.superseded == lost
    assert report.last_step == last
    assert all(each.proved == IN_ORDER for each in report.epochs)


def test_a_restore_without_a_step_after_it_ends_the_history_there():
    whole = history(60, 2, batch_size=5, epochs=1)
    report = audit([*whole, {"event": "restore.finished", "step": 4, "generation": 2}])
    assert report.ok, report.problems
    assert (report.last_step, report.superseded) == (4, 2)
    assert [(e.steps, e.whole, e.proved) for e in report.epochs] == [(4, False, PARTS)]


def test_a_sampler_of_ones_own_is_proved_by_the_sum_alone():
    class Odd(RandomSampler):
        """A permutation that the auditor cannot compute."""

    numbers = Numbers(30)
    events = history(30, 2, batch_size=4, sampler=Odd(numbers))
    assert events[0]["order"] == "sampler"
    assert [each.proved for each in audit(events).epochs] == [ONCE, ONCE]
    events = history(30, 2, batch_sampler=BatchSampler(Odd(numbers), 4, False))  # noqa: FBT003
    assert [each.proved for each in audit(events).epochs] == [ONCE, ONCE]
    twice = RandomSampler(numbers, replacement=True, num_samples=30)
    report = audit(history(30, 2, batch_size=4, sampler=twice))
    assert not report.ok
    assert [each.proved for each in report.epochs] == [NOTHING, NOTHING]
    assert "cannot be proved" in report.problems[0]


def test_a_fault_of_a_sampler_of_ones_own_is_no_proof():
    class Faulty(RandomSampler):
        def __iter__(self):
            return iter([0, 0, *range(1, 29)])

    assert not audit(history(30, 2, batch_size=4, sampler=Faulty(Numbers(30)))).ok
    events = history(30, 2, batch_sampler=BatchSampler(range(26), 4, False))  # noqa: FBT003
    assert not audit(events).ok, "the dataset has 30"


def test_an_epoch_that_was_left_for_the_next_one_is_no_proof():
    events = history(40, 2, batch_size=5)
    for reads in ([], None):
        broken = copy.deepcopy(events)
        if reads is None:
            del broken[4]["reads"]
        else:
            broken[4]["reads"] = reads
        assert not audit(broken).ok
    for event in events[1:5]:
        event["reads"] = []
    assert "epoch 0 is in no step, but a later one is" in audit(events).problems


def test_logs_that_do_not_say_enough_are_no_proof():
    events = history(30, 2, batch_size=4)
    with pytest.raises(NoRecords):
        audit([])
    old = [{k: v for k, v in event.items() if k != "reads"} for event in events]
    with pytest.raises(NoRecords, match="version"):
        audit(old)
    assert not audit([events[0], *events[3:]]).ok
    assert not audit(events[1:]).ok


@given(st.lists(st.integers(0, 2**63 - 1), max_size=50), st.randoms(use_true_random=False))
def test_the_hash_is_one_of_a_multiset(numbers, random):
    shuffled = random.sample(numbers, len(numbers))
    cut = random.randint(0, len(numbers))
    assert digest_of(numbers) == digest_of(shuffled)
    assert digest_of(numbers) == add((digest_of(numbers[:cut]), digest_of(numbers[cut:])))
    if numbers:
        assert digest_of(numbers[1:]) != digest_of(numbers)
        assert digest_of([*numbers, numbers[0]]) != digest_of(numbers)


def test_what_has_no_numbers_has_no_hash():
    assert digest_of(["a", "b"]) is None
    assert digest_of([[1], [2, 3]]) is None
    assert digest_of(np.array([1.5])) is None
    assert digest_of(range(10)) == digest_of_range(10) == digest_of(np.arange(10))


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=50, deadline=None)
def test_blocks_of_a_permutation_are_its_values(length, key, data):
    order = Permutation(length, key)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    values = [order[i] for i in range(start, stop)]
    assert order.block(start, stop).tolist() == values
    assert digest_of_places(order, start, stop) == digest_of(values)
    assert digest_of_places(order, 0, length) == digest_of_range(length)


def test_blocks_of_a_very_long_permutation():
    for length in (10**9, 2**40 + 7, 2**63):
        order = Permutation(length, 5)
        places = [0, length // 2, length - 4]
        for place in places:
            want = [order[i] for i in range(place, place + 4)]
            assert order.block(place, place + 4).tolist() == want
