"""One live run per job root on a host.

The lock is an `flock` on a file in the job's root directory. It belongs to the open file, so the
caller takes it before anything is started and hands the open file to the agent: there is no moment
without it, and it is free as soon as the agent is gone, however it went. The file's text says
who holds it, for the sentence that refuses a second run; it means nothing without the lock.

Not covered: two hosts that share a directory. There each node has its own agent on purpose, and
etcd refuses a second node of the same name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Self

from elastic.errors import Misconfigured

FILE_NAME = "job.lock"
_TRIES = 5
_PAUSE_S = 0.02


class JobLock:
    """Held from `take` (or `adopt`) until the last process that has the open file ends."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    @classmethod
    def take(cls, root: str | os.PathLike[str], job: str) -> Self:
        """Hold the lock of this root. Raises Misconfigured: a live run has it.

        If this process has the locked file open already (an agent that was given it by its
        caller), that one is returned.
        """
        path = Path(root) / FILE_NAME
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        held = _open_here(fd)
        if held is not None:
            os.close(fd)
            return cls(held, path)
        # More than once: somebody who only looks (`holder`) has it for a moment.
        for _ in range(_TRIES):
            if _locked(fd, fcntl.LOCK_EX):
                return cls(fd, path)
            time.sleep(_PAUSE_S)
        os.close(fd)
        raise _refusal(path, job)

    def describe(self, *, pid: int, job: str, run_dir: str) -> None:
        """Write who holds the lock, for a person who is refused."""
        text = json.dumps({"pid": pid, "job": job, "run_dir": run_dir}) + "\n"
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, text.encode(), 0)

    def close(self) -> None:
        """Give up this process's part; the lock stays while another process has the file open."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def holder(root: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return what the live run of this root wrote about itself, or None if there is none."""
    path = Path(root) / FILE_NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _locked(fd, fcntl.LOCK_SH) else _read(path)
    finally:
        os.close(fd)


def _refusal(path: Path, job: str) -> Misconfigured:
    seen = _read(path)
    who = f" by pid {seen['pid']}, run directory {seen['run_dir']}" if seen else ""
    return Misconfigured(
        f"job {seen.get('job', job)!r} in {path.parent} is running{who}",
        kind="job-live",
        hint="stop it with `elastic stop`, wait for its end, or give another job or checkpoint",
        **seen,
    )


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        seen = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return seen if isinstance(seen, dict) and {"pid", "run_dir"} <= seen.keys() else {}


def _open_here(fd: int) -> int | None:
    """Return another open file of this process for the same file, if there is one."""
    wanted = os.fstat(fd)
    for name in os.listdir("/proc/self/fd"):
        other = int(name)
        try:
            seen = os.fstat(other)
        except OSError:  # the listing's own descriptor, closed by now
            continue
        if other != fd and (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino):
            return other
    return None
