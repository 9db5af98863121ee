"""A World of real worker processes without an agent or etcd, driven by the test itself.

The test decides when a World is formed, who is killed and when, and reads what the workers say.
Workers, gloo, the step protocol and recovery are the real ones; only the membership decisions are
made here, in the open, so that a test can put them at the worst moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import elastic.worker
from ckpt.frames import recv_frame, send_frame
from elastic.agent.progress import ProgressPage
from elastic.config import ElasticConfig
from elastic.membership.messages import Mode, WorkerRef, World

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN = "test-token"


class StoreServer:
    """A bootstrap store for the workers of one test."""

    def __init__(self) -> None:
        self._listen = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listen.getsockname()[1]}"
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listen.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), sock:
            hello, _ = recv_frame(sock)
            if hello.get("token") != TOKEN:
                return
            while True:
                message, _ = recv_frame(sock)
                if message["t"] == "set":
                    with self._changed:
                        self._values[message["k"]] = message["v"]
                        self._changed.notify_all()
                    send_frame(sock, {"t": "ok"})
                else:
                    with self._changed:
                        found = self._changed.wait_for(
                            lambda key=message["k"]: key in self._values, message["timeout_s"]
                        )
                        value = self._values.get(message["k"])
                    send_frame(sock, {"t": "value", "v": value} if found else {"t": "timeout"})

    def close(self) -> None:
        self._listen.close()


class WorkerProcess:
    """One forked worker and its control socket."""

    def __init__(self, worker_id: str, slot: int, pid: int, sock: socket.socket, page: int) -> None:
        self.worker_id = worker_id
        self.slot = slot
        self.pid = pid
        self.sock = sock
        self.page = ProgressPage(page)
        self.messages: list[dict[str, Any]] = []
        self.status: int | None = None

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(worker_id=self.worker_id, node="n", slot=self.slot)

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["t"] == kind]


class LocalWorld:
    """Starts workers that run `module:function`, and forms Worlds of them."""

    def __init__(
        self,
        directory: Path,
        function: Callable[..., Any],
        *,
        kwargs: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.directory = directory
        (directory / "events").mkdir(parents=True, exist_ok=True)
        (directory / "logs").mkdir(exist_ok=True)
        self.function = function
        self.kwargs = kwargs or {}
        self.config = ElasticConfig(**config)
        self.store = StoreServer()
        self.workers: list[WorkerProcess] = []
        self.world: World | None = None
        self._count = 0
        self._arena_fds: list[int] = []

    # -- processes ----------------------------------------------------------------------------

    def spawn(self, count: int = 1, *, first: bool = True) -> list[WorkerProcess]:
        started = [self._spawn_one(first=first) for _ in range(count)]
        self.workers.extend(started)
        return started

    def _spawn_one(self, *, first: bool) -> WorkerProcess:
        slot = self._count
        self._count += 1
        worker_id = f"n.{slot}-{slot:06x}"
        ours, theirs = socket.socketpair()
        page = ProgressPage.create_fd(worker_id)
        arena = os.memfd_create("arena")
        self._arena_fds.append(arena)
        from elastic.script import ScriptSpec
        from elastic.values import to_plain

        script = ScriptSpec(
            kind="function",
            path=self.function.__code__.co_filename,
            argv=("test",),
            module=self.function.__module__,
            qualname=self.function.__qualname__,
            cwd=os.getcwd(),
            sys_path=(),
            args=to_plain([]),
            kwargs=to_plain(self.kwargs),
        )
        spec = {
            "worker_id": worker_id,
            "node": "n",
            "slot": slot,
            "job": "test",
            "run_dir": str(self.directory),
            "token": TOKEN,
            "config": self.config.to_dict(),
            "script": script.to_dict(),
            "run_index": 0,
            "earlier_results": [],
            "first": first,
            "events_path": str(self.directory / "events" / f"worker-{worker_id}.jsonl"),
        }
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                ours.close()
                for other in self.workers:
                    other.sock.close()
                log = os.open(
                    self.directory / "logs" / f"worker-{worker_id}.log",
                    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                    0o600,
                )
                os.dup2(log, 1)
                os.dup2(log, 2)
                elastic.worker.main(spec, theirs, page, arena)
            except Exception:
                traceback.print_exc()
            except SystemExit as done:
                code = int(done.code or 0)
            finally:
                os._exit(code)
        theirs.close()
        return WorkerProcess(worker_id, slot, pid, ours, page)

    # -- hearing and saying -------------------------------------------------------------------

    def pump(self, timeout_s: float = 0.05) -> None:
        """Read what the workers say and reap those that ended."""
        live = {w.sock: w for w in self.workers if w.status is None}
        readable, _, _ = select.select(list(live), [], [], timeout_s)
        for sock in readable:
            worker = live[sock]
            if not self._hear(worker):
                self._reap(worker)
        for worker in live.values():
            if worker.status is None:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    worker.status = status
                    self._hear_out(worker)

    def _hear(self, worker: WorkerProcess) -> bool:
        """Take one message; False at the end of what a worker has said."""
        try:
            message, _ = recv_frame(worker.sock)
        except (OSError, EOFError):
            return False
        worker.messages.append(message)
        if message["t"] == "failed":
            print(worker.worker_id, message["traceback"])  # noqa: T201 - read on failure
        self.on_message(worker, message)
        return True

    def _hear_out(self, worker: WorkerProcess) -> None:
        """Take what a worker had said before it ended."""
        while select.select([worker.sock], [], [], 0)[0] and self._hear(worker):
            pass

    def on_message(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Answer a staged half at once, as a service that is never behind."""
        if message["t"] == "staged":
            send_frame(worker.sock, {"t": "half_free", "half": message["half"]})

    def _reap(self, worker: WorkerProcess) -> None:
        _, worker.status = os.waitpid(worker.pid, 0)

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(self.describe())
            self.pump()

    def describe(self) -> str:
        lines = []
        for w in self.workers:
            log = self.directory / "logs" / f"worker-{w.worker_id}.log"
            lines.append(
                f"{w.worker_id} status={w.status} progress={w.page.read()} "
                f"said={[m['t'] for m in w.messages][-5:]} log={log.read_text()[-1500:]}"
            )
        return "\n".join(lines)

    @property
    def alive(self) -> list[WorkerProcess]:
        return [w for w in self.workers if w.status is None]

    def form(self, workers: list[WorkerProcess], mode: Mode = Mode.NOW) -> World:
        generation = 1 if self.world is None else self.world.generation + 1
        self.world = World(
            generation=generation,
            workers=tuple(w.ref for w in workers),
            stores=(self.store.address,),
            mode=mode,
            reason="test",
        )
        for worker in workers:
            with contextlib.suppress(OSError):
                send_frame(worker.sock, {"t": "world", "world": self.world.to_dict()})
        return self.world

    def members(self) -> list[WorkerProcess]:
        assert self.world is not None
        by_id = {w.worker_id: w for w in self.workers}
        return [by_id[ref.worker_id] for ref in self.world.workers]

    def start(self, count: int) -> None:
        """Spawn workers and form the first World of them."""
        started = self.spawn(count)
        self.until(lambda: all(w.said("ready") or w.status is not None for w in started))
        self.form([w for w in started if w.status is None])

    def kill(self, worker: WorkerProcess, sig: int = signal.SIGKILL) -> None:
        os.kill(worker.pid, sig)
        self._reap(worker)

    def wait_step(self, step: int, timeout_s: float = 60.0) -> None:
        """Wait until a live member computes a step beyond `step`."""

        def reached() -> bool:
            pages = [w.page.read() for w in self.alive]
            return any(p is not None and p.step > step for p in pages)

        self.until(reached, timeout_s)

    def finish(self, timeout_s: float = 60.0) -> Any:
        """Wait until every member says finished, let them go, return the first rank's value."""

        def done() -> bool:
            assert self.world is not None
            return all(
                any(m["generation"] == self.world.generation for m in w.said("finished"))
                for w in self.members()
                if w.status is None
            )

        self.until(done, timeout_s)
        members = [w for w in self.members() if w.status is None]
        value = members[0].said("finished")[-1]["value"]
        for worker in members:
            with contextlib.suppress(OSError):  # it has died since
                send_frame(worker.sock, {"t": "finish"})
        self.until(lambda: not self.alive, timeout_s)
        from elastic.values import from_plain

        return from_plain(value)

    def events(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.directory / "events").glob("*.jsonl")):
            found.extend(json.loads(line) for line in path.read_text().splitlines())
        return sorted(found, key=lambda e: e["t_mono_s"])

    def close(self) -> None:
        for worker in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)
        for worker in self.workers:
            worker.sock.close()
        for fd in self._arena_fds:
            os.close(fd)
        self.store.close()
