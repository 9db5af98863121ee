"""The fork server: a process that has torch imported and gives birth to workers in milliseconds.

    python -m elastic.agent.forkserver --control-fd N --agent-pid P [--preload a,b]

Importing torch takes seconds; forking a process that has done so takes milliseconds. It has one
thread and serves one request at a time: a frame {"t": "spawn", "spec": {...}} with four descriptors
(control socket, progress page, arena, log file), answered by {"t": "spawned", worker_id, pid} or
{"t": "spawn_failed", worker_id, error}. A bad request never ends it. It says {"t": "up"} when it
is ready, and leaves when its socket ends or the agent dies.

A worker is forked twice, so that the process in between can end at once and the agent, which adopts
orphans, becomes the worker's parent: it reaps it, and the worker dies with it. What happens in the
child is at the end of this file: it waits for its new parent, puts itself into a process group of
its own, drops every descriptor that is not its own, writes into its log file, and calls
`elastic.worker.main(spec, control_sock, progress_fd, arena_fd)`. For tests, `spec["entry"]` may
name another function as "module:function".

It knows nothing of Worlds and keeps no list of workers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from ckpt.frames import FrameError, recv_frame, send_frame
from elastic.agent.process import close_all_but, die_with_parent
from elastic.errors import ExitCode

PRELOAD = ("numpy", "torch", "elastic.run", "elastic.worker")
NUM_FDS = 4
ADOPTION_TIMEOUT_S = 10.0
_PAUSE_S = 0.0005


@dataclass(frozen=True, slots=True)
class Child:
    """What the new process is to do: the fork server's loop is left with it, and never returns."""

    spec: dict[str, Any]
    fds: tuple[int, ...]
    agent_pid: int


class BadRequest(ValueError):
    """A request that cannot be carried out; answered, not raised."""


def main(arguments: list[str] | None = None) -> None:
    """Serve until the agent goes; in a forked child, become the worker."""
    parser = argparse.ArgumentParser(prog="elastic.agent.forkserver")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--preload", default=",".join(PRELOAD))
    options = parser.parse_args(arguments)
    die_with_parent()
    if os.getppid() != options.agent_pid:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=options.control_fd)
    os.set_inheritable(sock.fileno(), False)
    began_s = time.monotonic()
    for name in filter(None, options.preload.split(",")):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported is never freed: do not touch its pages in every child
    send_frame(
        sock,
        {
            "t": "up",
            "pid": os.getpid(),
            "import_s": time.monotonic() - began_s,
            "threads": len(os.listdir("/proc/self/task")),
        },
    )
    child = serve(sock, options.agent_pid)
    if child is not None:
        # A worker closes what is not its own by number; this object must not close the number once
        # more when the interpreter ends, as it may be a socket of the process group by then.
        sock.detach()
        become_worker(child)


def serve(sock: socket.socket, agent_pid: int) -> Child | None:
    """Answer requests; returns None when the agent has hung up, or what a new child is to do."""
    while True:
        try:
            request, fds = recv_frame(sock)
        except (EOFError, OSError, FrameError):
            return None
        worker_id = ""
        try:
            worker_id = str(request.get("spec", {}).get("worker_id", ""))
            _check(request, fds)
            answer = spawn(request["spec"], tuple(fds), agent_pid)
            if isinstance(answer, Child):
                return answer
            reply = {"t": "spawned", "worker_id": worker_id, "pid": answer}
        except Exception as error:  # noqa: BLE001 - whatever it is, the next request is served
            reply = {"t": "spawn_failed", "worker_id": worker_id, "error": str(error)}
        for fd in fds:
            os.close(fd)
        try:
            send_frame(sock, reply)
        except OSError:
            return None


def _check(request: dict[str, Any], fds: list[int]) -> None:
    if request["t"] != "spawn":
        raise BadRequest(f"there is no request {request['t']!r}")
    if not isinstance(request.get("spec"), dict):
        raise BadRequest("a spawn request needs a spec")
    if len(fds) != NUM_FDS:
        raise BadRequest(f"a spawn request needs {NUM_FDS} descriptors, not {len(fds)}")


def spawn(spec: dict[str, Any], fds: tuple[int, ...], agent_pid: int) -> int | Child:
    """Fork twice. Returns the worker's pid in the fork server, and a Child in the worker."""
    read_fd, write_fd = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    between = os.fork()
    if between == 0:
        try:
            worker = os.fork()
            if worker == 0:
                return Child(spec, fds, agent_pid)
            with contextlib.suppress(OSError):
                os.setpgid(worker, worker)  # also done by the worker: whoever is first
            os.write(write_fd, b"%d" % worker)
        except OSError as error:
            os.write(write_fd, f"cannot fork: {error}".encode())
        os._exit(0)
    os.close(write_fd)
    try:
        # The worker has the other end too, so the end of the stream is not waited for.
        said = os.read(read_fd, 4096)
    finally:
        os.close(read_fd)
    os.waitpid(between, 0)  # from now on the worker is the agent's child
    if not said.isdigit():
        raise OSError(said.decode(errors="replace") or "the process in between died")
    return int(said)


# -- in the worker's process ----------------------------------------------------------------------


def become_worker(child: Child) -> NoReturn:
    """Turn this freshly forked process into a worker; never returns."""
    if not _adopted_by(child.agent_pid):
        os._exit(int(ExitCode.INFRASTRUCTURE))
    die_with_parent()
    if os.getppid() != child.agent_pid:
        os._exit(int(ExitCode.INFRASTRUCTURE))
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    control_fd, progress_fd, arena_fd, log_fd = child.fds
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    close_all_but({control_fd, progress_fd, arena_fd})
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    control = socket.socket(fileno=control_fd)
    try:
        _entry(child.spec)(child.spec, control, progress_fd, arena_fd)
    except Exception:  # noqa: BLE001 - the last frame of a process
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _adopted_by(agent_pid: int) -> bool:
    deadline_s = time.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != agent_pid:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _entry(spec: dict[str, Any]) -> Any:
    module, _, function = spec.get("entry", "elastic.worker:main").partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    # As the module that others import, not as a second copy named __main__: workers make their
    # own __main__ of the user's script.
    from elastic.agent.forkserver import main as _main

    _main()
