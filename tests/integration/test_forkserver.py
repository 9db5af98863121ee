"""The fork server and the workers it gives birth to, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.frames import recv_frame, send_frame
from elastic.agent import process
from elastic.agent.forks import ForkServer, worker_environ
from elastic.agent.workers import Workers
from elastic.membership import commands as c
from tests.agent_process import alive
from tests.support import eventually, eventually_async

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parent.parent.parent


class Raw:
    """A fork server reached by its bare socket, without the agent's own code."""

    def __init__(self, preload: str = "tests.agent_workers") -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.settimeout(30.0)
        self.sock = ours
        command = [sys.executable, "-P", "-m", "elastic.agent.forkserver"]
        command += ["--control-fd", str(theirs.fileno()), "--agent-pid", str(os.getpid())]
        command += ["--preload", preload]
        environ = worker_environ({**os.environ, "PYTHONPATH": str(ROOT)})
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environ)
        theirs.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()

    def ask(self, message: dict, fds=()) -> dict:
        send_frame(self.sock, message, fds)
        answer, _ = recv_frame(self.sock)
        return answer


@pytest.fixture(autouse=True)
def _subreaper():
    """Be what an agent is: the parent of orphans, which are reaped at the end."""
    process.adopt_orphans()
    yield

    def none_left():
        for pid in process.children():
            process.reap_pid(pid)
        return not process.children()

    eventually(none_left, what="every child is gone")
    process._prctl(process.PR_SET_CHILD_SUBREAPER, 0)


def spawn_report(raw: Raw, tmp_path: Path) -> tuple[dict, dict, int]:
    """Start a worker that reports on itself; return (answer, report, pid)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(20.0)
    progress, arena = os.memfd_create("progress"), os.memfd_create("arena")
    log = os.open(tmp_path / "worker.log", os.O_WRONLY | os.O_CREAT)
    spec = {"worker_id": "n.0-000001", "entry": "tests.agent_workers:report"}
    answer = raw.ask({"t": "spawn", "spec": spec}, (theirs.fileno(), progress, arena, log))
    for fd in (progress, arena, log):
        os.close(fd)
    theirs.close()
    report, _ = recv_frame(ours)
    ours.close()
    return answer, report, answer["pid"]


def test_a_worker_is_the_agents_child_in_its_own_group_with_its_own_descriptors(tmp_path: Path):
    with Raw() as raw:
        up, _ = recv_frame(raw.sock)
        assert up["t"] == "up"
        assert up["threads"] == 1
        answer, report, pid = spawn_report(raw, tmp_path)
    assert answer["t"] == "spawned"
    assert report["pid"] == pid
    assert report["ppid"] == os.getpid()
    assert report["pgid"] == pid
    assert report["sigint"] is True
    # 0, 1, 2, the three that it was given, and the one that lists them
    assert len(report["fds"]) == 7
    assert set(report["kept"]) <= set(report["fds"])
    assert os.waitpid(pid, 0)[1] == 0
    text = (tmp_path / "worker.log").read_text()
    assert "written to the log" in text
    assert "an error line" in text


def test_torch_is_imported_once_and_before_anybody_asks(tmp_path: Path):
    with Raw(preload="numpy,torch,tests.agent_workers") as raw:
        up, _ = recv_frame(raw.sock)
        assert up["threads"] == 1, "a process with threads must not fork"
        _, report, pid = spawn_report(raw, tmp_path)
        os.waitpid(pid, 0)
    assert report["modules"] == ["numpy", "torch"]
    assert report["threads"] == 1


def test_bad_requests_are_answered_and_do_not_end_it(tmp_path: Path):
    with Raw() as raw:
        recv_frame(raw.sock)
        for request in (
            {"t": "sing"},
            {"t": "spawn"},
            {"t": "spawn", "spec": "no map"},
            {"t": "spawn", "spec": {"worker_id": "w"}},
        ):
            assert raw.ask(request)["t"] == "spawn_failed"
        answer, _, pid = spawn_report(raw, tmp_path)
        os.waitpid(pid, 0)
        assert answer["t"] == "spawned"


def test_it_leaves_when_its_agent_hangs_up():
    with Raw() as raw:
        recv_frame(raw.sock)
        raw.sock.close()
        assert raw.process.wait(10) == 0


# -- the agent's side ------------------------------------------------------------------------------


class Watched:
    """Workers on a fork server, with everything that they say."""

    def __init__(self, tmp_path: Path) -> None:
        self.events: list[c.Event] = []
        self.messages: list[tuple[str, dict]] = []
        self.forks = ForkServer(
            environ=os.environ, log_path=tmp_path / "forks.log", preload=["tests.agent_workers"]
        )
        self.forks.on_up = lambda: self.events.append(c.ForkServerUp())
        self.forks.on_down = lambda reason: self.events.append(c.ForkServerDown(reason=reason))
        self.workers = Workers(
            self.forks,
            tmp_path,
            on_event=self.events.append,
            on_message=lambda worker_id, message: self.messages.append((worker_id, message)),
        )
        self.log_dir = tmp_path

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    async def start(self, entry: str, worker_id: str = "n.0-000001", **script) -> None:
        if not self.of(c.ForkServerUp):
            self.forks.start()
            await eventually_async(lambda: self.of(c.ForkServerUp), what="the fork server is up")
        spec = {"worker_id": worker_id, "entry": f"tests.agent_workers:{entry}", "script": script}
        self.workers.start(worker_id, 0, spec)
        await eventually_async(
            lambda: (
                [e for e in self.of(c.WorkerStarted) if e.worker_id == worker_id]
                or self.of(c.WorkerStartFailed)
            )
        )

    async def close(self) -> None:
        self.forks.close()
        assert await self.workers.close(5.0) == []


def watched(test):
    """Run an async test with Watched workers, and end them."""

    def run(tmp_path: Path):
        async def inner():
            seen = Watched(tmp_path)
            try:
                await test(seen)
            finally:
                await seen.close()

        asyncio.run(inner())

    run.__name__ = test.__name__
    return run


@watched
async def test_a_killed_worker_is_seen_dying_and_then_reaped(seen: Watched):
    await seen.start("train")
    await eventually_async(lambda: seen.of(c.WorkerReady))
    (started,) = seen.of(c.WorkerStarted)
    os.kill(started.pid, signal.SIGKILL)
    await eventually_async(lambda: seen.of(c.WorkerReaped))
    (dying,) = seen.of(c.WorkerDying)
    (reaped,) = seen.of(c.WorkerReaped)
    assert seen.events.index(dying) < seen.events.index(reaped)
    assert dying.evidence == "was killed by signal 9"
    assert (reaped.exit_code, reaped.signal) == (None, 9)
    assert "out of memory" in reaped.hint
    assert len(seen.workers) == 0


@watched
async def test_a_stopped_worker_is_told_as_stopped_and_as_going_on(seen: Watched):
    await seen.start("train")
    (started,) = seen.of(c.WorkerStarted)
    os.kill(started.pid, signal.SIGSTOP)
    await eventually_async(lambda: seen.of(c.WorkerStopped))
    os.kill(started.pid, signal.SIGCONT)
    await eventually_async(lambda: seen.of(c.WorkerContinued))


@watched
async def test_what_a_worker_said_last_is_heard_before_its_end(seen: Watched):
    await seen.start("train", fail_at=0)
    seen.workers.tell(["n.0-000001"], {"t": "world", "world": {"generation": 1, "ids": "000001"}})
    worker = seen.workers.get("n.0-000001")
    await eventually_async(lambda: seen.of(c.WorkerFormed))
    assert worker.page.read().generation == 1
    seen.workers.kill("n.0-000001")
    await eventually_async(lambda: seen.of(c.WorkerReaped))
    assert isinstance(seen.events[-1], c.WorkerReaped)
    assert seen.of(c.WorkerReaped)[0].hint == "", "we know who killed it"


@watched
async def test_a_raising_worker_leaves_its_traceback_in_its_log(seen: Watched):
    await seen.start("raises")
    await eventually_async(lambda: seen.of(c.WorkerReaped))
    (reaped,) = seen.of(c.WorkerReaped)
    assert reaped.exit_code == 1
    log = seen.log_dir / "worker-n.0-000001.log"
    assert str(log) in reaped.hint
    assert "RuntimeError: raised in the entry" in log.read_text()


@watched
async def test_workers_outlive_their_fork_server_and_another_one_can_be_started(seen: Watched):
    await seen.start("train")
    os.kill(seen.forks.pid, signal.SIGKILL)
    await eventually_async(lambda: seen.of(c.ForkServerDown))
    (started,) = seen.of(c.WorkerStarted)
    assert alive(started.pid)
    seen.workers.start("n.1-000002", 1, {"worker_id": "n.1-000002"})
    await eventually_async(lambda: seen.of(c.WorkerStartFailed))
    seen.events.clear()
    await seen.start("train", "n.2-000003")
    assert seen.of(c.WorkerStarted)


@watched
async def test_nonsense_from_a_worker_is_its_failure(seen: Watched):
    seen.workers._heard("n.0-000001", {"t": "failed", "error": "X"}, [])
    (failed,) = seen.of(c.WorkerFailed)
    assert failed.kind is c.FailureKind.INTERNAL
