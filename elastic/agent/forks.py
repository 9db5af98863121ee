"""The agent's line to its fork server: start it, ask it for workers, notice its end.

The fork server is an exec'ed process of this package (elastic/agent/forkserver.py). It holds no
state that matters: when it dies, living workers go on, and another one is started. Requests that
were under way are answered as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.frames import FrameChannel, FrameError
from elastic.agent import forkserver

ANSWER_TIMEOUT_S = 60.0
_TAIL_BYTES = 4000
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent.parent
# -P keeps the user's directory out of sys.path, where a file could shadow a module of ours; the
# script's own search path is set up in the worker.
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from elastic.agent.forkserver import main; main()"
)

OnUp = Callable[[], None]
OnDown = Callable[[str], None]
OnSpawned = Callable[[str, int], None]
OnFailed = Callable[[str, str], None]


class ForkServer:
    """One fork server at a time; the callbacks come on the event loop.

    Args:
        environ: of the fork server and so of every worker.
        log_path: what it prints itself; workers have their own files.
        preload: modules that it imports before it is up.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str],
        log_path: Path,
        preload: Sequence[str] = forkserver.PRELOAD,
    ) -> None:
        self.on_up: OnUp = lambda: None
        self.on_down: OnDown = lambda _reason: None
        self.on_spawned: OnSpawned = lambda _worker_id, _pid: None
        self.on_failed: OnFailed = lambda _worker_id, _reason: None
        self._environ = worker_environ(environ)
        self._log_path = log_path
        self._preload = ",".join(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: FrameChannel | None = None
        self._asked: dict[str, asyncio.TimerHandle] = {}

    @property
    def pid(self) -> int | None:
        """The running fork server."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it; `on_up` or `on_down` follows. Must be called from the main thread.

        (A child asks to die with its parent *thread*.)
        """
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        fd = theirs.fileno()
        command = [sys.executable, "-P", "-c", _BOOT, str(_PACKAGE_ROOT)]
        command += ["--control-fd", str(fd), "--agent-pid", str(os.getpid())]
        command += ["--preload", self._preload]
        with theirs, self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(fd,),
                env=self._environ,
            )
        self._channel = FrameChannel(ours, self._take, self._hung_up)

    def spawn(self, spec: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Ask for a worker; `on_spawned` or `on_failed` follows. The caller keeps its `fds`."""
        worker_id = str(spec["worker_id"])
        loop = asyncio.get_running_loop()
        sent = False
        with contextlib.suppress(FrameError):
            message = {"t": "spawn", "spec": dict(spec)}
            sent = self._channel is not None and self._channel.send(message, fds)
        if not sent:
            loop.call_soon(self.on_failed, worker_id, "the fork server is not running")
            return
        self._asked[worker_id] = loop.call_later(ANSWER_TIMEOUT_S, self._silent, worker_id)

    def close(self) -> None:
        """End it; nothing is called back any more."""
        self.on_up, self.on_down = lambda: None, lambda _reason: None
        self.on_spawned = lambda _worker_id, _pid: None
        self.on_failed = lambda _worker_id, _reason: None
        self._end()

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if message["t"] == "up":
            self.on_up()
            return
        worker_id = str(message.get("worker_id", ""))
        timer = self._asked.pop(worker_id, None)
        if timer is not None:
            timer.cancel()
        if message["t"] == "spawned":
            self.on_spawned(worker_id, int(message["pid"]))
        elif message["t"] == "spawn_failed":
            self.on_failed(worker_id, str(message["error"]))

    def _silent(self, worker_id: str) -> None:
        """Give up a fork server that does not answer: it is stuck, and the next one will not be."""
        if worker_id in self._asked:
            self._gone(f"it did not start {worker_id} within {ANSWER_TIMEOUT_S:.0f} s")

    def _hung_up(self) -> None:
        self._gone("it ended")

    def _gone(self, why: str) -> None:
        self._end()
        asked, self._asked = self._asked, {}
        for worker_id, timer in asked.items():
            timer.cancel()
            self.on_failed(worker_id, f"the fork server is gone: {why}")
        self.on_down(f"{why}; its log {self._log_path} ends with: {self._tail()}")

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)  # SIGKILL takes milliseconds

    def _tail(self) -> str:
        try:
            text = self._log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return "(it cannot be read)"
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "(nothing)"


def worker_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the fork server and its workers.

    One BLAS thread, so that importing NumPy starts none: a process with threads must not fork.
    Workers set torch's own threads from the configuration. Hashing is fixed, because the order of a
    set of strings may decide the order of a model's parameters.
    """
    fixed = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", **environ, **fixed}
