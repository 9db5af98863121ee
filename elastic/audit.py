"""Proves from the events of a job that every sample of every epoch is in exactly one step.

Each committed step says what its workers have really read: for each loader how many samples, and
the hash of their numbers (elastic/digest.py). The hashes of an epoch add up to that of all samples
exactly if each was read once. Where the order is a function that can be computed again, each step
is checked by itself too, so that a fault is named by its step.

A job may have been resumed, from a checkpoint older than its last step. What was done behind that
checkpoint does not count any more: of two generations the later one is right about every step from
its first one on. The part of an epoch that was not reached, because the job was stopped, is told
and is no fault. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.digest import add, digest_of_places, digest_of_range
from elastic.permutation import Permutation
from elastic.seeds import derive_seed

Record = Mapping[str, Any]
Generation = tuple[int, int]  # which start of the job, and the number that it had there

MAX_PROBLEMS = 20
"""Problems that are spelled out; the rest is counted."""
IN_ORDER = "each sample once, in the job's order"
ONCE = "each sample once"
PARTS = "what was done, in the job's order"
UNFINISHED = "nothing yet: it is not finished"
NOTHING = "not provable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """How a loader's samples are shared out; see the event `data.order`."""

    order: str
    samples: int
    batch_size: int
    micro_batches: int
    leaves: int
    source: int
    items: int | None = None  # of the dataset

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.micro_batches // self.leaves)

    @property
    def read(self) -> int | None:
        """Samples of an epoch, less what drop_last drops; None if a batch sampler decides it."""
        if self.order == "batches":
            return None
        return min(self.samples, self.micro_batches * self.batch_size)

    @property
    def computable(self) -> bool:
        """Whether the order can be computed again."""
        return self.order in ("permuted", "stored")

    def digest(self, epoch: int, index: int) -> int:
        """Return the hash of the samples of one step."""
        width = self.leaves * self.batch_size
        assert self.read is not None
        order: Permutation | range = range(self.samples)
        if self.order == "permuted":
            order = Permutation(self.samples, derive_seed("order", self.source, epoch))
        return digest_of_places(order, index * width, min((index + 1) * width, self.read))


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What one step has read from one loader."""

    step: int
    loader: int
    epoch: int
    index: int
    samples: int
    digest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What was found about one epoch of one loader."""

    loader: int
    epoch: int
    steps: int
    steps_of_epoch: int
    samples: int
    samples_of_epoch: int | None
    proved: str

    @property
    def whole(self) -> bool:
        """Whether all its steps were done."""
        return self.steps == self.steps_of_epoch


@dataclass(slots=True, kw_only=True)
class Report:
    """What the events prove."""

    first_step: int = 0
    last_step: int = 0
    superseded: int = 0
    epochs: list[Epoch] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against it, and something for it."""
        return not self.problems and self.last_step > 0


class NoRecords(Exception):
    """The events do not say what was read."""


def audit(events: Iterable[Record]) -> Report:
    """Judge the events of all runs of one job.

    A generation's number may come again after a resume from an older checkpoint: `attempt` in an
    event, 0 if it is not there, tells one start of the job from the next.

    Raises NoRecords: there is no committed step, or its records say nothing of samples.
    """
    events = list(events)
    loaders, report = _loaders(events), Report()
    steps = _surviving(events, report)
    if not steps:
        raise NoRecords("no committed step is in these events")
    if all("reads" not in record for record in steps.values()):
        raise NoRecords("these events are of a version that did not write down what was read")
    report.first_step, report.last_step = min(steps), max(steps)
    if report.first_step > 1:
        report.problems.append(
            f"steps 1 to {report.first_step - 1} are not in these events: give the directory of "
            "the whole job"
        )
    for step in range(report.first_step, report.last_step):
        if step not in steps:
            report.problems.append(f"step {step} has no record, but step {report.last_step} has")
    silent = [step for step, record in sorted(steps.items()) if "reads" not in record]
    if silent:
        report.problems.append(f"step {silent[0]} does not say what it has read")
    reads = [
        Read(
            step=step,
            loader=int(loader),
            epoch=int(epoch),
            index=int(index),
            samples=int(samples),
            digest=None if digest is None else int(digest, 16),
        )
        for step, record in sorted(steps.items())
        for loader, epoch, index, samples, digest in record.get("reads") or ()
    ]
    by_epoch: dict[tuple[int, int], list[Read]] = {}
    for read in reads:
        by_epoch.setdefault((read.loader, read.epoch), []).append(read)
    for (loader, epoch), found in sorted(by_epoch.items()):
        if loader not in loaders:
            report.problems.append(f"nothing says how loader {loader} shares its samples out")
            continue
        report.epochs.append(_epoch(loader, epoch, loaders[loader], found, report.problems))
    _check_sequence(report)
    if len(report.problems) > MAX_PROBLEMS:
        more = len(report.problems) - MAX_PROBLEMS
        report.problems[MAX_PROBLEMS:] = [f"and {more} more"]
    return report


def _check_sequence(report: Report) -> None:
    """Only the last epoch of a loader may be unfinished, and none may be left out."""
    of_loader: dict[int, list[Epoch]] = {}
    for each in report.epochs:
        of_loader.setdefault(each.loader, []).append(each)
    for epochs in of_loader.values():
        missing = sorted(set(range(epochs[-1].epoch)) - {each.epoch for each in epochs})
        if missing and report.first_step == 1:
            report.problems.append(f"epoch {missing[0]} is in no step, but a later one is")
        report.problems.extend(
            f"epoch {each.epoch} has {each.steps} of {each.steps_of_epoch} steps, but a later one "
            "was begun"
            for each in epochs[:-1]
            if not each.whole
        )


def _loaders(events: Sequence[Record]) -> dict[int, Loader]:
    """Return the loaders as the newest run has them."""
    return {
        int(record["loader"]): Loader(
            order=str(record["order"]),
            samples=int(record["samples"]),
            batch_size=int(record["batch_size"]),
            micro_batches=int(record["micro_batches"]),
            leaves=int(record["leaves"]),
            source=int(record["source"], 16),
            items=None if record.get("items") is None else int(record["items"]),
        )
        for record in events
        if record["event"] == "data.order"
    }


def _surviving(events: Sequence[Record], report: Report) -> dict[int, Record]:
    """Return the records of the steps that count; says in the report what was done besides."""
    told: dict[Generation, dict[int, Record]] = {}
    starts: dict[Generation, int] = {}
    restores: list[tuple[Generation, int]] = []
    for record in events:
        if record["event"] not in ("step.committed", "restore.finished"):
            continue
        if record.get("generation") is None or record.get("step") is None:
            continue
        generation = (int(record.get("attempt", 0)), int(record["generation"]))
        step = int(record["step"])
        if record["event"] == "restore.finished":
            restores.append((generation, step))
            step += 1
        else:
            first = told.setdefault(generation, {}).setdefault(step, record)
            if first.get("reads") != record.get("reads"):
                report.problems.append(f"workers tell different things about step {step}")
        starts[generation] = min(step, starts.get(generation, step))
    steps: dict[int, Record] = {}
    limit: int | None = None
    for generation in sorted(starts, reverse=True):
        steps |= {
            step: record
            for step, record in told.get(generation, {}).items()
            if limit is None or step < limit
        }
        limit = min(starts[generation], starts[generation] if limit is None else limit)
    report.superseded = sum(
        any(later > generation and step > restored for later, restored in restores)
        for generation, records in told.items()
        for step in records
    )
    return steps


def _epoch(
    number: int, epoch: int, loader: Loader, reads: Sequence[Read], problems: list[str]
) -> Epoch:
    where = f"epoch {epoch}" if number == 0 else f"epoch {epoch} of loader {number}"
    before = len(problems)
    seen: dict[int, int] = {}
    for read in reads:
        if read.index in seen:
            problems.append(
                f"{where}: steps {seen[read.index]} and {read.step} both have its part "
                f"{read.index + 1} of {loader.steps}"
            )
        seen[read.index] = read.step
        if loader.computable:
            _check_step(where, epoch, loader, read, problems)
    whole = len(seen) == loader.steps and max(seen) < loader.steps
    if not whole:
        missing = [i for i in range(max(seen)) if i not in seen]
        if missing:
            problems.append(
                f"{where}: part {missing[0] + 1} of {loader.steps} is in no step"
                + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
            )
    samples = sum(read.samples for read in reads)
    if whole and loader.read is not None and samples != loader.read:
        more = samples - loader.read
        problems.append(
            f"{where}: {abs(more)} samples {'more' if more > 0 else 'fewer'} were read than the "
            f"{loader.read} that it has"
        )
    proved = _proved(loader, reads, whole=whole)
    if proved == NOTHING and len(problems) == before:
        problems.append(
            f"{where}: it cannot be proved that each sample was read once: "
            + (
                "the samples have no numbers"
                if any(read.digest is None for read in reads)
                else "their order is the sampler's own, and they are not all of the dataset, once"
            )
        )
    return Epoch(
        loader=number,
        epoch=epoch,
        steps=len(seen),
        steps_of_epoch=loader.steps,
        samples=samples,
        samples_of_epoch=loader.read,
        proved=NOTHING if len(problems) > before else proved,
    )


def _check_step(where: str, epoch: int, loader: Loader, read: Read, problems: list[str]) -> None:
    width = loader.leaves * loader.batch_size
    assert loader.read is not None
    due = max(0, min(width, loader.read - read.index * width))
    if read.samples != due:
        problems.append(f"{where}: step {read.step} has read {read.samples} samples, not {due}")
    elif read.digest is not None and read.digest != loader.digest(epoch, read.index):
        problems.append(f"{where}: step {read.step} has read other samples than were its turn")


def _proved(loader: Loader, reads: Sequence[Read], *, whole: bool) -> str:
    if any(read.digest is None for read in reads):
        return NOTHING
    if not whole:
        return PARTS if loader.computable else UNFINISHED
    if loader.computable:
        return IN_ORDER
    total = add(read.digest or 0 for read in reads)
    samples = sum(read.samples for read in reads)
    if samples == loader.items and total == digest_of_range(samples):
        return ONCE
    return NOTHING
