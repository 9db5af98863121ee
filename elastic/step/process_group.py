"""One generation's communication: build it, use it, cut it from another thread, drop it.

torch's gloo group has no working abort (in 2.13 `abort`, `shutdown` and
`destroy_process_group` unblock nobody), and tells only the ranks that exchange data with a dead
one. So a group is *cut*: `socket.shutdown` on its connected TCP descriptors makes every blocked
operation of this process raise within milliseconds. Never the listening descriptor: gloo's
accept loop would end the process. A cut group is dropped in a background thread, because its
destructor joins gloo's threads.

The cut alone is not enough: now and then a waiter of gloo is not told that its pair is gone, and
would sit until the operation's timeout. So whatever may block runs in the group's own thread
(`run`), and the main thread leaves as soon as the group is cut and that thread is either done or
inside such a wait. When the wait ends after all, it raises before anything is changed.

What this does not do: it decides nothing about who is alive; a broken group is answered with
`GroupBroken`, and the driver waits for the World that explains it.

Source: torch.distributed.ProcessGroupGloo; measurements in docs/design.md.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from elastic.errors import ElasticError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic.step.bootstrap_client import BootstrapStore

T = TypeVar("T")

_SMALL_BYTES = 16384
_LENGTH_BYTES = 4
_CONNECT_TIMEOUT_S = 15.0
BEAT_S = 0.25


class GroupBroken(ElasticError):
    """A collective of this generation failed or was cut; a newer World must explain it."""


def _sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed while we looked
        if link.startswith("socket:"):
            found[int(name)] = link
    return found


class Task(Generic[T]):
    """One piece of work for the group's thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.done = False

    def execute(self) -> None:
        """Do it, and keep what came of it."""
        assert self._work is not None
        try:
            self._value.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            self._error = error
        self._work = None

    def outcome(self) -> T:
        """Return or raise what came of it."""
        if self._error is not None:
            raise self._error
        return self._value[0]


class Group:
    """The ranks of one World, able to send, receive and gather bytes.

    All methods but `cut` belong to the worker's main thread, or to work that it gave to `run`.
    Every method that communicates raises GroupBroken when the group fails or was cut.
    """

    def __init__(self, *, generation: int, rank: int, size: int) -> None:
        self.generation = generation
        self.rank = rank
        self.size = size
        self._group: Any = None
        self._lock = threading.Lock()
        self._before: dict[int, str] | None = None
        self._known: dict[int, str] | None = None
        self._store: BootstrapStore | None = None
        self._cut = False
        self._built_or_cut = threading.Event()
        self.changed = threading.Condition(self._lock)
        self._in_wait = False
        self._thread: threading.Thread | None = None
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        self.on_wait: Callable[[], None] = lambda: None
        """Called by the main thread every BEAT_S while it waits for the group's thread."""

    def build(self, store: BootstrapStore, *, timeout_s: float) -> None:
        """Connect to every other rank of the generation; about 10 ms for four ranks.

        Args:
            store: the agents' bootstrap store; kept for the group's life.
            timeout_s: limit of one collective, the last layer below all others.
        """
        if self.size == 1:
            return
        with self._lock:
            if self._cut:
                raise GroupBroken("the group was cut before it was built")
            self._store = store
        built: list[Any] = []
        # In a thread of its own: the constructor waits for peers to connect, and a peer that died
        # after it published its address never will. A cut abandons it to its short timeout.
        builder = threading.Thread(
            target=self._construct, args=(store, built), name="everstep-build", daemon=True
        )
        builder.start()
        self._built_or_cut.wait()
        with self._lock:
            if not built or self._cut:
                pass
            elif isinstance(built[0], BaseException):
                raise GroupBroken(f"building generation {self.generation}: {built[0]}")
            else:
                before, now = self._before or {}, _sockets()
                self._known = {f: link for f, link in now.items() if before.get(f) != link}
                self._group = built[0]
        if self._group is None:
            raise GroupBroken("the group was cut while it was built")
        # gloo's context keeps the short timeout of the connect for point-to-point operations, so
        # every wait names the long one.
        self._timeout = timedelta(seconds=timeout_s)
        self._group._set_default_timeout(self._timeout)

    def _construct(self, store: BootstrapStore, built: list[Any]) -> None:
        try:
            store.connect()
            with self._lock:
                if self._cut:
                    return
                self._before = _sockets()
            group = dist.ProcessGroupGloo(
                dist.PrefixStore(f"g{self.generation}", store),  # type: ignore[attr-defined]
                self.rank,
                self.size,
                timedelta(seconds=_CONNECT_TIMEOUT_S),
            )
            built.append(group)
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            built.append(error)
        finally:
            self._built_or_cut.set()

    @property
    def backend(self) -> Any:
        """The torch group, None for a world of one."""
        return self._group

    def cut(self) -> None:
        """Make every blocked and later operation of this group raise; any thread may call it."""
        # One critical section: whoever sees the group cut may build the next one, and its new
        # sockets must not be taken for ours.
        with self._lock:
            if self._cut:
                return
            self._cut = True
            if self._store is not None:
                self._store.interrupt()
            self._shut()
            self._built_or_cut.set()
            self.changed.notify_all()

    @property
    def is_cut(self) -> bool:
        """True once `cut` was called."""
        return self._cut

    def _shut(self) -> None:
        known = self._known
        if known is None:  # still being built: whatever appeared since then
            before = self._before
            known = (
                {}
                if before is None
                else {fd: link for fd, link in _sockets().items() if before.get(fd) != link}
            )
        for fd, link in known.items():
            self._shut_one(fd, link)

    @staticmethod
    def _shut_one(fd: int, link: str) -> None:
        try:
            if os.readlink(f"/proc/self/fd/{fd}") != link:
                return  # the number was given to another file since
            duplicate = os.dup(fd)
        except OSError:
            return
        with socket.socket(fileno=duplicate) as sock:
            try:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    return
                sock.getpeername()  # raises for the listening one, which must not be touched
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def drop(self) -> None:
        """Cut the group and release it without waiting for gloo's threads."""
        self.cut()
        self._tasks.put(None)
        group, self._group = self._group, None
        store, self._store = self._store, None

        def release(held: list[Any]) -> None:
            held.clear()

        if group is not None or store is not None:
            held = [group, store]
            del group, store
            threading.Thread(
                target=release, args=(held,), name="everstep-drop-group", daemon=True
            ).start()

    # -- point to point ---------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        """Start sending a contiguous tensor to a rank; wait with `wait`."""
        return self._start(lambda: self._group.send([tensor], target, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Start receiving into a contiguous tensor of this generation; wait with `wait`."""
        return self._start(lambda: self._group.recv([tensor], source, tag))

    def _start(self, call: Any) -> Any:
        if self._cut or self._group is None:
            raise GroupBroken("the group is cut")
        try:
            return call()
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error

    def wait(self, work: Any) -> None:
        """Wait for one started operation; only inside `run`."""
        with self.changed:
            if self._cut:
                raise GroupBroken("the group is cut")
            self._in_wait = True
        problem: RuntimeError | None = None
        try:
            done = work.wait(self._timeout)
        except RuntimeError as error:
            problem, done = error, False
        with self.changed:
            self._in_wait = False
            if self._cut:
                raise GroupBroken("the group is cut") from problem
        if not done:
            raise GroupBroken(str(problem)) from problem

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until the main thread has made something true; only inside `run`.

        Whoever makes it true notifies `changed`. Raises GroupBroken at the cut.
        """
        with self.changed:
            while not (self._cut or ready()):
                self.changed.wait()
            if self._cut:
                raise GroupBroken("the group is cut")

    # -- what may block -------------------------------------------------------------------------

    def run(self, work: Callable[[], T]) -> T:
        """Do something that communicates; returns its result, or raises GroupBroken at the cut.

        `work` runs in the group's thread. It may change state only between waits: when it is
        abandoned in one, it will not get beyond it.
        """
        if self.size == 1 or threading.current_thread() is self._thread:
            return work()
        return self.finish(self.start(work))

    def start(self, work: Callable[[], T]) -> Task[T]:
        """Have the group's thread do something after all that it was given before."""
        task: Task[T] = Task(work)
        if self.size == 1:
            task.execute()
            task.done = True
            return task
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name=f"everstep-group-{self.generation}", daemon=True
            )
            self._thread.start()
        self._tasks.put(task)
        return task

    def finish(self, task: Task[T]) -> T:
        """Wait for started work; returns its result, or raises GroupBroken at the cut."""
        with self.changed:
            while not task.done and not (self._cut and self._in_wait):
                if not self.changed.wait(BEAT_S):
                    self.on_wait()
            if not task.done:
                raise GroupBroken("the group is cut")
        return task.outcome()

    def _serve(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            task.execute()
            with self.changed:
                task.done = True
                self.changed.notify_all()
            del task

    # -- small collectives ------------------------------------------------------------------

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes in rank order; completes only if every rank entered.

        A first round of fixed size carries the lengths and whatever is short; a second one is
        added, on all ranks alike, when some rank's bytes did not fit.
        """
        if self.size == 1:
            return [data]
        return self.run(lambda: self._gather_bytes(data))

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        room = _SMALL_BYTES - _LENGTH_BYTES
        first = torch.zeros(_SMALL_BYTES, dtype=torch.uint8)
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        rounds = self._allgather(first)
        lengths = [int.from_bytes(raw[:_LENGTH_BYTES], "little") for raw in rounds]
        if max(lengths) <= room:
            return [
                raw[_LENGTH_BYTES : _LENGTH_BYTES + n]
                for raw, n in zip(rounds, lengths, strict=True)
            ]
        second = torch.zeros(max(lengths), dtype=torch.uint8)
        if data:
            second[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [raw[:n] for raw, n in zip(self._allgather(second), lengths, strict=True)]

    def _allgather(self, mine: torch.Tensor) -> list[bytes]:
        outputs = [torch.empty_like(mine) for _ in range(self.size)]
        work = self._start(lambda: self._group.allgather([outputs], [mine]))
        self.wait(work)
        return [output.numpy().tobytes() for output in outputs]
