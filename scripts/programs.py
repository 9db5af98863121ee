"""Programs that the demo and the benchmark start: each ends with us, and all it prints is kept.

The child is tied to the thread that starts it (`elastic/agent/exec_child.py`), so it also ends when
this process is killed; it runs in its own session, so that Ctrl-C at the terminal reaches it only
through us. What it starts itself is its own business: `elastic.run` sees to its agent and workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ROOT / "elastic" / "agent" / "exec_child.py"
TAIL_LINES = 12
POLL_S = 0.02
STOP_TIMEOUT_S = 45.0


class ProgramFailed(Exception):
    """A program did not do what it was started for; the message is for a person."""


class Program:
    """One running child program.

    Args:
        name: what a person calls it.
        environment: added to this process's own.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.name = name
        self.log_path = log_path
        # Nothing of ours has to be installed: what we start finds the packages where we did.
        settings = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        pairs = [f"{key}={value}" for key, value in settings.items()]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", LAUNCHER, str(os.getpid()), *pairs, "--", *command],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code (negative: the signal that ended it), or None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise ProgramFailed if it has ended with an error."""
        if self.poll():
            raise ProgramFailed(
                f"{self.name} ended with {_ending(self.poll())}; its output is in {self.log_path} "
                f"and ends with:\n{self.tail()}"
            )

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code, or None if it still runs after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.poll()

    def tail(self) -> str:
        """Return the last lines it has printed."""
        lines = self.log_path.read_bytes().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask it to end, insist after that time; returns when it is reaped."""
        if self.poll() is None:
            self._process.terminate()
            if self.wait(timeout_s) is None:
                self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended but is not reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


def wait_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Return those of these processes that still run after that time."""
    deadline_s = time.monotonic() + timeout_s
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    return left


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this program as Ctrl-C does: every `with` block is left."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def commit_of(root: Path = ROOT) -> str | None:
    """Return the commit of this checkout, with a mark if files differ from it; None without git."""
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return head + (
        "+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    )


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
