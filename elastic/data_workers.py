"""Processes that make micro-batches ahead of time, and the one way a micro-batch is made.

torch's own DataLoader does the work (processes, shared memory, pinning, errors), over a source of
tasks that never ends and that we feed. So the processes stay when the plan changes: what was asked
for and is still wanted is kept, the rest is called off (each task has a number, and a shared array
says which numbers to skip) or thrown away when it arrives. At most num_workers * prefetch_factor
tasks are out at a time, and as many results wait here.

All generators are set before every fetch from the number of that micro-batch, so its bits do not
depend on which process makes it, nor on `num_workers`. Batches are not kept after they are handed
out: the loop may change them in place, so a redone step fetches them again.

A loader process leaves with the process that started it, even when that is killed (the kernel's
parent-death signal, which hangs on the *thread* that started it: start these from the main thread).
Does not: choose the order of samples (elastic/data_order.py).
"""

from __future__ import annotations

import ctypes
import os
import signal
import warnings
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from elastic.digest import digest_of
from elastic.rng import set_generators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Tag = tuple[int, int, int]  # epoch, step within it, leaf
Read = tuple[int, int | None]  # how many samples, and the hash of their numbers if they have one

_PR_SET_PDEATHSIG = 1
_HELD_WHILE_STARTING = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_SET_BY_TORCH = (signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Makes one micro-batch the way the user's DataLoader would."""

    dataset: Any
    collate: Callable[[Any], Any]
    whole_batches: bool
    """False for DataLoader(batch_size=None): the key is one index, and nothing is collated."""

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Fetcher:
        """Return the fetcher of a DataLoader."""
        return cls(loader.dataset, loader.collate_fn, loader.batch_sampler is not None)

    def fetch(self, key: Any) -> tuple[Any, Read]:
        """Read the samples that `key` names and collate them; also which they were."""
        if not self.whole_batches:
            return self.collate(self.dataset[key]), (1, digest_of(key))
        read_many = getattr(self.dataset, "__getitems__", None)
        batch = self.collate(read_many(key) if read_many else [self.dataset[i] for i in key])
        return batch, (len(key), digest_of(key))


class LoaderWorkers:
    """The loader processes of one DataLoader, kept through changes of plan.

    Args:
        loader: the user's DataLoader, with num_workers > 0.
        task_of: says for a tag what to fetch and the number that its generators are set from.
        pin: whether results go into pinned memory.
        close_fds: descriptors that a forked loader process must not keep; asked when they start.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        task_of: Callable[[Tag], tuple[Any, int]],
        *,
        pin: bool,
        close_fds: Callable[[], Sequence[int]],
    ) -> None:
        self._loader = loader
        self._task_of = task_of
        self._pin = pin
        self._close_fds = close_fds
        self._capacity = loader.num_workers * (loader.prefetch_factor or 2)
        self._plan: Iterator[Tag] = iter(())
        self._urgent: deque[Tag] = deque()
        self._out: deque[_Out] = deque()  # in the order in which results will come
        self._waiting: dict[Tag, Any] = {}  # results that nobody asked for yet
        self._number = 0
        self._results: Iterator[Any] | None = None
        self._called_off: Any = None

    def follow(self, plan: Iterator[Tag], wanted: Callable[[Tag], bool]) -> None:
        """Fetch along `plan` from now on; keep what is under way where it is `wanted`."""
        self._plan = plan
        self._urgent.clear()
        self._waiting = {tag: got for tag, got in self._waiting.items() if wanted(tag)}
        for out in self._out:
            if out.tag is not None and not wanted(out.tag):
                self._called_off[out.number % self._capacity] = out.number
                out.tag = None
        if self._results is None:
            self._start()
        while self._out and self._out[0].idle:  # makes room for the plan; an idle task is no work
            self._receive()
            if self._out and self._out[-1].idle:
                break  # what was sent just now: the plan has nothing that is not there already

    def fetch(self, tag: Tag) -> tuple[Any, Read]:
        """Return this micro-batch, planned or not; raises what its dataset raised.

        With it comes what the process has read that made it.
        """
        if tag not in self._waiting and not self._is_out(tag):
            self._urgent.append(tag)
        if self._results is None:
            self._start()
        while tag not in self._waiting:
            self._receive()
        got = self._waiting.pop(tag)
        if isinstance(got, ExceptionWrapper):
            got.reraise()  # type: ignore[no-untyped-call]
        batch, read = got
        return batch, read

    def close(self) -> None:
        """End the loader processes; a later fetch starts new ones."""
        results, self._results = self._results, None
        self._out.clear()
        self._waiting.clear()
        self._urgent.clear()
        self._plan = iter(())
        shut_down = getattr(results, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()  # dropping the last reference does the same, but a traceback may hold one

    # -- the source that the torch loader reads -----------------------------------------------

    def next_task(self) -> _Task:
        """Return what a loader process gets next; called by torch whenever one has room."""
        tag = self._next_tag()
        self._number += 1
        self._out.append(_Out(self._number, tag, idle=tag is None))
        if tag is None:
            return _Task(self._number, None, None)
        key, source = self._task_of(tag)
        return _Task(self._number, key, source)

    def _next_tag(self) -> Tag | None:
        if self._urgent:
            return self._urgent.popleft()
        for tag in self._plan:
            if tag not in self._waiting and not self._is_out(tag):
                return tag
        return None

    def _is_out(self, tag: Tag) -> bool:
        return any(out.tag == tag for out in self._out)

    def _receive(self) -> None:
        """Take the next result that arrives, and let the source send one task more."""
        assert self._results is not None
        try:
            number, got = next(self._results)
        except BaseException:  # a loader process died or took too long: none of this can be used
            self.close()
            raise
        out = self._out.popleft()
        assert out.number == number, "torch's loader hands results out in the order of the tasks"
        if out.tag is None:
            return
        self._waiting[out.tag] = got
        if len(self._waiting) > self._capacity:  # planned, passed over, and never asked for
            del self._waiting[next(iter(self._waiting))]

    def _start(self) -> None:
        loader = self._loader
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        self._called_off = context.RawArray("q", self._capacity)
        begin = _Begin(
            user_init=loader.worker_init_fn,
            parent_pid=os.getpid(),
            start_method=context.get_start_method(),
            close_fds=tuple(self._close_fds()),
        )
        inner: DataLoader[Any] = DataLoader(
            _Tasks(Fetcher.of(loader), self._called_off),
            batch_size=None,
            sampler=_Source(self),
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin,
            timeout=loader.timeout,
            worker_init_fn=begin,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator().manual_seed(0),  # else torch draws from the global one
            prefetch_factor=loader.prefetch_factor,
        )
        with _signals_held(), warnings.catch_warnings():
            # torch said it when the user made the loader that this one stands for.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._results = iter(inner)


@dataclass(slots=True)
class _Out:
    """A task that was sent; `tag` is None when its result will be thrown away."""

    number: int
    tag: Tag | None
    idle: bool


class _Task(NamedTuple):
    """What a loader process is sent; an idle task has no source."""

    number: int
    key: Any
    source: int | None


class _Source(Sampler[_Task]):
    """The endless sampler over the tasks of a LoaderWorkers."""

    def __init__(self, workers: LoaderWorkers) -> None:
        self._workers = workers

    def __iter__(self) -> Iterator[_Task]:
        while True:
            yield self._workers.next_task()


class _Tasks(Dataset[Any]):
    """What a loader process indexes: the answer to a task, with its number."""

    def __init__(self, fetcher: Fetcher, called_off: Any) -> None:
        self.fetcher = fetcher
        self._called_off = called_off

    def __getitem__(self, task: _Task) -> tuple[int, Any]:
        if (
            task.source is None
            or self._called_off[task.number % len(self._called_off)] == task.number
        ):
            return task.number, None
        try:
            set_generators(task.source)
            return task.number, self.fetcher.fetch(task.key)
        except Exception:  # noqa: BLE001 - raised again where, and only if, this batch is asked for
            info = get_worker_info()
            where = f"in DataLoader worker process {info.id if info else 0}"
            return task.number, ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Begin:
    """Runs first in a loader process: undo what was inherited, then the user's worker_init_fn."""

    user_init: Callable[[int], None] | None
    parent_pid: int
    start_method: str
    close_fds: tuple[int, ...]

    def __call__(self, worker_id: int) -> None:
        _leave_with_parent(None if self.start_method == "forkserver" else self.parent_pid)
        if self.start_method == "fork":  # elsewhere these numbers are other files
            for fd in self.close_fds:
                with suppress(OSError):
                    os.close(fd)
        _reset_signals()
        info = get_worker_info()
        if info is not None:  # user code looks for its own dataset there
            ours: Any = info.dataset
            object.__setattr__(info, "dataset", ours.fetcher.dataset)
        if self.user_init is not None:
            self.user_init(worker_id)


def _leave_with_parent(parent_pid: int | None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)  # it ended before we could ask


def _reset_signals() -> None:
    """Drop the handlers and the wake-up descriptor of the process that we were forked from."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number not in _SET_BY_TORCH and callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_WHILE_STARTING)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold signals back while processes start, so that none meets our handlers in a child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_WHILE_STARTING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_it_is(data: Any) -> Any:
    return data
