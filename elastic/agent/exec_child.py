"""Run a program that cannot outlive the process that asked for it.

    python -I -S exec_child.py PARENT_PID [NAME=VALUE ...] -- PROGRAM [ARGUMENT ...]

A file to execute, not to import. The kernel is asked to send SIGKILL to this process when its
parent ends; that wish survives exec, so the program inherits it without knowing. It is done here
and not between fork and exec of the parent, because a process with threads (gRPC, torch) must not
run Python code there. The program's environment is exactly the NAME=VALUE pairs: what a person has
exported for another server of the same kind does not reach ours.

What the kernel calls the parent is the *thread* that started the child: start such programs from
a thread that lives as long as they should (see `elastic.local_server`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, then become the program; returns only by an error."""
    split = arguments.index("--")
    parent_pid = int(arguments[0])
    environment = dict(pair.split("=", 1) for pair in arguments[1:split])
    command = arguments[split + 1 :]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        return  # it ended before the wish was made: nobody would ever end us
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # blocked signals would stay blocked
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # ignored by Python, and exec would hand that on
    os.execve(command[0], command, environment)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
