"""The caller's side of its agent: start it, pass signals on, wait for its end, read the result.

The agent is a program of its own in its own session, so that Ctrl-C at the terminal reaches it
only through here. It holds one end of a pipe whose other end is ours: when this process ends in
any way, it notices and drains. Signal handlers only note the number; a loop passes it on. Every
wait after a signal has a bound, at whose end the agent is killed and named.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elastic import preflight
from elastic.config import ElasticConfig, process_environ
from elastic.errors import ExitCode, RunFailed, ended_by, meaning
from elastic.events import EventLog

PAUSE_S = 0.05
STOP_MARGIN_S = 30.0  # beyond grace_s, for what the agent does when the workers are gone
NOW_S = 10.0
_TAIL_BYTES = 4000


class AgentProcess:
    """The agent of this host, from its start to its end; ends with us."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, caller_fd: int) -> None:
        self._process = process
        self._run_dir = run_dir
        self._caller_fd = caller_fd

    @classmethod
    def start(
        cls, spec: Mapping[str, Any], run_dir: Path, *, config: ElasticConfig, lock_fd: int | None
    ) -> Self:
        """Start the agent with this spec."""
        spec_fd = _as_file(json.dumps(spec).encode())
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        held = [spec_fd, read_fd] + ([] if lock_fd is None else [lock_fd])
        command = [sys.executable, "-P", "-m", "elastic.agent", "--run-dir", str(run_dir)]
        command += ["--spec-fd", str(spec_fd), "--caller-fd", str(read_fd)]
        try:
            with (run_dir / "logs" / "agent.log").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=held,
                    env=_environ(),
                )
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(spec_fd)
            os.close(read_fd)
        agent = cls(process, run_dir, write_fd)
        _LIVING.add(agent)
        with contextlib.suppress(OSError, ValueError):
            preflight.allow_files(process.pid, preflight.files_needed(config))
        return agent

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return how it ended (negative: by that signal), or None while it lives."""
        return self._process.poll()

    def send(self, signal_number: int) -> None:
        """Pass a signal on."""
        self._process.send_signal(signal_number)

    def end(self, *, within_s: float) -> None:
        """See that it is gone: ask, wait that long, kill."""
        if self.poll() is None:
            self.send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(within_s)
        self.kill()

    def kill(self) -> None:
        """Kill it if it lives; its workers end with it."""
        if self.poll() is None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Let go of the pipe, and remove what an agent that was killed could not."""
        self.let_go()
        shutil.rmtree(self._run_dir / "etcd", ignore_errors=True)

    def let_go(self) -> None:
        """Close our end of the pipe: the agent sees that nobody waits for it here."""
        _LIVING.discard(self)
        fd, self._caller_fd = self._caller_fd, -1
        if fd >= 0:
            _close_quietly(fd)


_LIVING: set[AgentProcess] = set()


def _let_go_in_child() -> None:
    """A forked child of the caller must not keep an agent believing that its caller lives."""
    for agent in list(_LIVING):
        agent.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


class Signals:
    """Notes the signals that arrive while a run goes on; in the main thread only."""

    def __init__(self, config: ElasticConfig) -> None:
        self.noted: list[int] = []
        self._before: dict[int, Any] = {}
        wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        wanted += [signal.Signals[name] for name in config.notice_signals]
        self._wanted = list(dict.fromkeys(wanted))

    def __enter__(self) -> Self:
        """Take over the signals that are not ignored: one ignored at the start stays so."""
        if threading.current_thread() is threading.main_thread():
            for number in self._wanted:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def take(self) -> Iterator[int]:
        """Yield and forget what has arrived."""
        while self.noted:
            yield self.noted.pop(0)

    def _note(self, number: int, _frame: object) -> None:
        self.noted.append(number)


@dataclass(slots=True)
class _Stop:
    """A stop under way: because of which signal, and until when we wait."""

    signal_number: int
    deadline_s: float
    waits_s: float


def wait(
    agent: AgentProcess,
    signals: Signals,
    *,
    config: ElasticConfig,
    events: EventLog,
    look: Callable[[], None],
) -> int:
    """Wait for the agent's end, passing signals on; return how it ended.

    Raises RunFailed: it did not end in time after a signal, and was killed.
    """
    stop: _Stop | None = None
    interrupts = 0
    while True:
        returncode = agent.poll()
        look()
        if returncode is not None:
            return returncode
        for number in signals.take():
            interrupts += number == signal.SIGINT
            at_once = number == signal.SIGINT and interrupts > 1
            action = "end now" if at_once else "passed on to the agent"
            events.emit("signal.received", signal=signal.Signals(number).name, action=action)
            agent.send(number)
            waits_s = NOW_S if at_once else config.grace_s + STOP_MARGIN_S
            deadline_s = time.monotonic() + waits_s
            if stop is None or deadline_s < stop.deadline_s:
                stop = _Stop(number, deadline_s, waits_s)
        if stop is not None and time.monotonic() > stop.deadline_s:
            agent.kill()
            raise _too_slow(agent.pid, stop)
        time.sleep(PAUSE_S)


def read_result(returncode: int, run_dir: Path, agent_pid: int) -> dict[str, Any]:
    """Return the result that the agent wrote, if the run succeeded.

    Raises RunFailed: with the agent's own cause, or with what can be said without it.
    """
    log = run_dir / "logs" / "agent.log"
    if returncode < 0:
        name = signal.Signals(-returncode).name
        raise RunFailed(
            ExitCode.INFRASTRUCTURE,
            f"the agent (pid {agent_pid}) was killed by {name}, and its workers ended with it; "
            f"its log is {log}",
            run_dir=str(run_dir),
        )
    try:
        result = json.loads((run_dir / "result.json").read_text())
    except (OSError, ValueError):
        result = None
    if not isinstance(result, dict):
        raise RunFailed(
            returncode or ExitCode.INFRASTRUCTURE,
            f"the agent (pid {agent_pid}) ended without a result ({_last_line(log)}); its log is "
            f"{log}",
            run_dir=str(run_dir),
        )
    exit_code = int(result.get("exit_code", returncode))
    if exit_code == 0 and returncode == 0:
        return result
    exit_code = exit_code or returncode
    raise RunFailed(
        exit_code,
        str(result.get("cause") or meaning(exit_code)),
        traceback=str(result.get("traceback") or ""),
        worker=str(result.get("worker") or ""),
        run_dir=str(run_dir),
    )


def _too_slow(pid: int, stop: _Stop) -> RunFailed:
    name = signal.Signals(stop.signal_number).name
    code = ended_by(signal.SIGINT) if stop.waits_s == NOW_S else ExitCode.INFRASTRUCTURE
    return RunFailed(
        code,
        f"the agent (pid {pid}) did not end within {stop.waits_s:.0f} s of {name} and was killed; "
        "what was committed before stays valid",
    )


def _environ() -> dict[str, str]:
    """Return the environment of the agent: ours, and where this package lies if not installed."""
    environ = process_environ()
    root = str(Path(__file__).resolve().parent.parent)
    installed = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    if root not in installed:
        known = environ.get("PYTHONPATH", "").split(os.pathsep)
        environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([root, *filter(None, known)]))
    return environ


def _as_file(data: bytes) -> int:
    """Return a descriptor from which exactly these bytes can be read; nothing on any disk."""
    fd = os.memfd_create("everstep-spec", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _last_line(log: Path) -> str:
    try:
        text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return "its log cannot be read"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _close_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
