"""Starts real agents for tests, with workers that train nothing (tests/agent_workers.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from elastic.config import ElasticConfig
from elastic.events import read_events
from tests.support import eventually

ROOT = Path(__file__).parent.parent


class AgentUnderTest:
    """An agent process; use as a context manager.

    Args:
        run_dir: its run directory.
        entry: function of tests/agent_workers.py that its workers run.
        script: wishes for the workers (see there).
        config: fields of ElasticConfig.
    """

    def __init__(
        self, run_dir: Path, *, entry: str = "train", script: dict | None = None, **config
    ) -> None:
        self.run_dir = run_dir
        config = {"job": "job", "nproc": 2, "virtual_ranks": 8, **config}
        self.spec = {
            "config": ElasticConfig(**config).to_dict(),
            "job": config["job"],
            "script": script or {},
            "entry": f"tests.agent_workers:{entry}",
            "preload": ["tests.agent_workers"],
        }
        self.process: subprocess.Popen | None = None
        self.caller_fd = -1

    def __enter__(self) -> AgentUnderTest:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, launcher: list[str] | None = None) -> AgentUnderTest:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        spec_fd = os.memfd_create("spec")
        os.write(spec_fd, json.dumps(self.spec).encode())
        os.lseek(spec_fd, 0, os.SEEK_SET)
        read_fd, self.caller_fd = os.pipe2(os.O_CLOEXEC)
        command = [*(launcher or []), sys.executable, "-P", "-m", "elastic.agent"]
        command += ["--run-dir", str(self.run_dir), "--spec-fd", str(spec_fd)]
        command += ["--caller-fd", str(read_fd)]
        with (self.run_dir / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(spec_fd, read_fd),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        os.close(spec_fd)
        os.close(read_fd)
        return self

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.hang_up()

    def hang_up(self) -> None:
        if self.caller_fd >= 0:
            os.close(self.caller_fd)
            self.caller_fd = -1

    # -- what it does -----------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, within_s: float = 20.0) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            log = (self.run_dir / "agent.log").read_text()
            raise AssertionError(f"the agent did not end; its log:\n{log}") from None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def result(self) -> dict:
        return json.loads((self.run_dir / "result.json").read_text())

    def events(self, name: str | None = None) -> list[dict]:
        found = read_events(self.run_dir)
        return found if name is None else [each for each in found if each["event"] == name]

    def facts(self) -> dict:
        return json.loads((self.run_dir / "agent.json").read_text())

    def ask(self, path: str, *, method: str = "GET", body: dict | None = None, token=None):
        """Return (status code, answer) of one request."""
        facts = self.facts()
        request = urllib.request.Request(
            f"http://{facts['http']}{path}",
            method=method,
            data=json.dumps(body or {}).encode() if method == "POST" else None,
            headers={"Authorization": f"Bearer {facts['token'] if token is None else token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self) -> dict:
        try:
            return json.loads(self.ask("/status")[1])
        except (OSError, ValueError):
            return {"phase": "", "world": [], "generation": 0, "step": 0}

    def training(self, workers: int, generation: int = 1, within_s: float = 20.0) -> dict:
        """Wait until that many workers of a World train; return the status."""

        def look():
            seen = self.status()
            if seen["generation"] < generation or len(seen["world"]) != workers:
                return None
            here = [row for row in seen["world"] if row["node"] == seen["node"]]
            return seen if all((row["step"] or 0) > 1 for row in here) else None

        return eventually(look, within_s=within_s, what=f"{workers} workers train")

    def pids(self) -> list[int]:
        """Every process below the agent that lives."""
        return descendants(self.pid)


def descendants(pid: int) -> list[int]:
    """Return the living processes whose ancestor is `pid`."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    wave = {pid}
    while wave:
        wave = {child for child, parent in parents.items() if parent in wave}
        found += sorted(wave)
    return found


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
