"""What Linux tells and grants about processes, in the few calls that the agent needs.

Device: the kernel. It promises: a process whose parent asked with PR_SET_PDEATHSIG is sent that
signal when the parent *thread* ends; orphans below a subreaper become its children; a pidfd means
one process for ever, and is readable once that process has ended; a zombie keeps its number until
it is reaped, so a group is killed before its leader is reaped. In /proc/PID/stat a dying one shows
PF_EXITING before the kernel has freed its memory and closed its sockets, and a stopped one shows
the state T.

It decides nothing and keeps nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMIN + 7
"""On this one a worker writes its stacks to its log; one that scripts are unlikely to use."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 0x4
_STATE, _FLAGS, _EXIT_STATUS = 0, 6, 49  # places behind the name in /proc/PID/stat
_STAT_BYTES = 1024
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent ends. Check the parent afterwards."""
    _prctl(PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent has ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a process.

    Args:
        state: the letter in /proc/PID/stat: R, S, D, T, t, Z, X.
        exiting: it is on its way out, or gone.
        signal: the signal that ends it, as far as the kernel tells already.
    """

    state: str
    exiting: bool
    signal: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether job control has stopped it (SIGSTOP); a debugger's stop is another letter."""
        return self.state == "T"


GONE = Look("X", True)


def open_stat(pid: int) -> int:
    """Return a descriptor for `look`; it never means another process of the same number."""
    return os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)


def look(stat_fd: int) -> Look:
    """Look at a process; costs some ten microseconds."""
    try:
        text = os.pread(stat_fd, _STAT_BYTES, 0)
    except ProcessLookupError:
        return GONE
    # The name in parentheses may hold anything, also parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    state = fields[_STATE].decode()
    exiting = state in "ZXx" or bool(int(fields[_FLAGS]) & PF_EXITING)
    ended_by = None
    if exiting and len(fields) > _EXIT_STATUS:
        ended_by = int(fields[_EXIT_STATUS]) & 0x7F or None
    return Look(state, exiting, ended_by)


def kill_group(pid: int) -> None:
    """SIGKILL a process and its group; the process must be our child and not reaped yet."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reap(pidfd: int) -> tuple[int | None, int | None] | None:
    """Return (exit code, signal) of a child that has ended, None if it has not.

    (None, None): it is gone, and somebody else has reaped it.
    """
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None, None
    if found is None:
        return None
    if found.si_code == os.CLD_EXITED:
        return found.si_status, None
    return None, found.si_status


def reap_pid(pid: int) -> None:
    """Reap a child if it has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def reap_group(pgid: int) -> bool:
    """Reap ended children in a process group; False when no child is left in it."""
    while True:
        try:
            if os.waitid(os.P_PGID, pgid, os.WEXITED | os.WNOHANG) is None:
                return True
        except ChildProcessError:
            return False


def children() -> set[int]:
    """Return the pids of all children of this process, whoever started them."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory so far, as seen here."""
    total = 0
    for path in (Path("/proc/vmstat"), _own_cgroup() / "memory.events"):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    total += int(count)
    return total


def _own_cgroup() -> Path:
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, rest = line.partition(":")
            if number == "0":
                return Path("/sys/fs/cgroup") / rest.partition(":")[2].lstrip("/")
    return Path("/sys/fs/cgroup")


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor above 2 that is not in `keep`; for a child right after its fork."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(fd)
