"""The torchft peer of `bench.py step`: its own packages, its lighthouse, one process per worker.

torchft (https://github.com/meta-pytorch/torchft) keeps one replica of the model per group and asks
a lighthouse for a quorum in every step. Here each worker is a group of one, over its gloo process
group. Its packages go into a directory below build/, once, and are no dependency of the project.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from scripts.programs import ROOT, Program, ProgramFailed

VERSION = "0.2.0"
PACKAGES = (
    "opentelemetry-api==1.45.2",
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-exporter-otlp-proto-http==1.45.2",
)
HOME = ROOT / "build" / "peers" / f"torchft-{VERSION}"
WORKER = Path(__file__).resolve().parent / "peer_torchft_worker.py"
INSTALL_TIMEOUT_S = 300.0
READY_TIMEOUT_S = 30.0
POLL_S = 0.05


def install() -> str:
    """Bring torchft into its directory; "" if it is there, else why it cannot be used."""
    done = HOME / ".installed"
    if done.exists():
        return ""
    base = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    base += ["--target", str(HOME)]
    for what in (["--no-deps", f"torchft=={VERSION}"], list(PACKAGES)):
        try:
            got = subprocess.run(
                [*base, *what],
                capture_output=True,
                text=True,
                check=False,
                timeout=INSTALL_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"torchft {VERSION} was not installed within {INSTALL_TIMEOUT_S:.0f} s"
        if got.returncode != 0:
            last = got.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
            return f"torchft {VERSION} cannot be installed: {last[0]}"
    done.touch()
    return ""


def start_lighthouse(directory: Path, workers: int) -> tuple[Program, str]:
    """Start the lighthouse for so many groups; returns it with its address."""
    log = directory / "lighthouse.log"
    command = [str(HOME / "bin" / "torchft_lighthouse"), "--min_replicas", str(workers)]
    command += ["--join_timeout_ms", "10000", "--quorum_tick_ms", "20", "--bind", "127.0.0.1:0"]
    environment = {"PYTHONPATH": str(HOME), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    lighthouse = Program(
        "torchft's lighthouse",
        [sys.executable, *command],
        log_path=log,
        environment=environment,
    )
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        found = re.search(r"listening on:? *(http://\S+:\d+)", log.read_text(errors="replace"))
        if found:
            port = found[1].rpartition(":")[2]
            return lighthouse, f"http://127.0.0.1:{port}"
        lighthouse.check()
        time.sleep(POLL_S)
    text = lighthouse.tail()
    lighthouse.stop()
    raise ProgramFailed(f"torchft's lighthouse did not say where it listens:\n{text}")


def start_worker(rank: int, address: str, directory: Path, environment: dict[str, str]) -> Program:
    """Start one group of one."""
    path = os.pathsep.join((str(ROOT), str(HOME)))
    more = {"PYTHONPATH": path, "PEER_RANK": str(rank), "PEER_LIGHTHOUSE": address}
    return Program(
        f"torchft's worker {rank}",
        [sys.executable, str(WORKER)],
        log_path=directory / f"torchft-{rank}.log",
        environment={**environment, **more},
    )
