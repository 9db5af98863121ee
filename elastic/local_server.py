"""One server program of our own on this host: found a port, ready when it says so, gone with us.

The device is a child process. It promises: the child never outlives the thread that spawned it,
however that one ends (`elastic/agent/exec_child.py`); it runs in its own session, so that Ctrl-C
at a terminal reaches it only through us; all that it prints is in one log file; `stop` and `kill`
return when it is reaped. Ports are chosen by the kernel, but between that choice and the child's
own bind another process may take them: whoever starts a server tries again then (`PortTaken`).

Starting is written as a generator of pauses, so that the same code serves callers with an event
loop and callers without. It does not restart what fails, and it speaks no server's protocol.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from elastic.errors import Retryable

LOOPBACK = "127.0.0.1"
START_ATTEMPTS = 5
PROBE_PAUSE_S = 0.01
_LAUNCHER = Path(__file__).parent / "agent" / "exec_child.py"
_TAIL_BYTES = 2000


class ServerNotReady(Retryable):
    """A server that was started did not come up; the message ends with what it printed last."""

    default_kind = "server-not-ready"


class PortTaken(ServerNotReady):
    """Another process was faster at one of the ports; trying again with others may work."""

    default_kind = "port-taken"


def free_ports(count: int) -> list[int]:
    """Return that many different loopback TCP ports that nobody listened on just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class LocalServer:
    """A child process with a log, which dies with the thread that spawned it.

    Args:
        program: its name for people, as in "etcd".
        log_path: receives all that it prints; appended to.
        stop_timeout_s: how long `stop` waits between SIGTERM and SIGKILL.
    """

    def __init__(self, program: str, log_path: Path, *, stop_timeout_s: float = 5.0) -> None:
        self.program = program
        self.log_path = log_path
        self.stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """The process id of the server; it keeps it from its start to its end."""
        if self._process is None:
            raise RuntimeError(f"{self.program} has not been started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def spawn(
        self, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the program with nothing but `environment`; its directory and log are private."""
        if self.running:
            raise RuntimeError(f"{self.program} is running already")
        pairs = [f"{name}={value}" for name, value in (environment or {}).items()]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *pairs, "--", *command],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log_tail(self) -> str:
        """Return the last lines that this life of the server has printed."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()

    def not_ready(self, waited_s: float) -> ServerNotReady:
        """Return the error that says why it did not come up, as far as its log tells."""
        tail = self.log_tail()
        if self.running:
            what = f"{self.program} (pid {self.pid}) did not answer within {waited_s:.1f} s"
            return ServerNotReady(what, hint=f"its log {self.log_path} ends with: {tail}")
        error = PortTaken if "address already in use" in tail else ServerNotReady
        code = self._process.returncode if self._process else None
        what = f"{self.program} ended with code {code} while it was starting"
        return error(what, hint=f"its log {self.log_path} ends with: {tail}")

    def kill(self) -> None:
        """End it at once with SIGKILL, as a crash would; returns when it is reaped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Ask it to end, insist after `stop_timeout_s`; returns when it is reaped."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(self.stop_timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()


def drive(pauses: Iterator[float]) -> None:
    """Run a start to its end in this thread."""
    for pause_s in pauses:
        time.sleep(pause_s)


async def drive_async(pauses: Iterator[float]) -> None:
    """Run a start to its end on the event loop, which goes on between the probes."""
    for pause_s in pauses:
        await asyncio.sleep(pause_s)
