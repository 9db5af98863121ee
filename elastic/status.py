"""Find a job on this host and talk to its agent.

A job is named by its run directory, its checkpoint directory, or its name below `.everstep` here.
The agent's address and token stand in `agent.json` of the run directory, readable by its owner.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from elastic import job_root
from elastic.errors import Misconfigured

TIMEOUT_S = 5.0


def find_run(name: str) -> Path:
    """Return the newest run directory of a job. Raises Misconfigured: there is none."""
    for directory in (Path(name), Path(job_root.HOME) / name):
        if not directory.is_dir():
            continue
        if job_root.is_run_dir(directory):
            return directory
        for runs in (directory / "runs", directory):
            found = job_root.run_dirs(runs)
            if found:
                return found[-1]
    raise Misconfigured(
        f"no run of {name!r} is known here",
        kind="no-run",
        hint="give a run directory, a checkpoint directory, or a job name below .everstep",
    )


def is_running(run_dir: Path) -> bool:
    """Whether the agent that wrote this run directory lives."""
    try:
        pid = int(_facts(run_dir)["pid"])
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (Misconfigured, KeyError, ProcessLookupError):
        return False
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return str(run_dir.resolve()).encode() in command


def ask(run_dir: Path, path: str, *, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask the agent of a run; with a body it is a request to act.

    Raises Misconfigured: the run has ended, or its agent does not answer.
    """
    if not is_running(run_dir):
        raise Misconfigured(
            f"the run in {run_dir} is not running",
            kind="not-running",
            hint="its events are still there: elastic events",
        )
    facts = _facts(run_dir)
    url = f"http://{facts['http']}{path}"
    request = urllib.request.Request(  # noqa: S310 - our own agent's address, always http
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {facts['token']}",
            "Content-Type": "application/json",
        },
        method="GET" if body is None else "POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            found = json.loads(answer.read())
    except (OSError, ValueError) as error:
        raise Misconfigured(
            f"the agent of {run_dir} (pid {facts.get('pid')}) does not answer: {error}",
            kind="no-answer",
            hint="look at logs/agent.log there",
        ) from None
    return found if isinstance(found, dict) else {}


def last_result(run_dir: Path) -> dict[str, Any] | None:
    """Return what an ended run left as its result, None while it runs or if it was killed."""
    try:
        found = json.loads((run_dir / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _facts(run_dir: Path) -> dict[str, Any]:
    try:
        facts = json.loads((run_dir / "agent.json").read_text())
    except (OSError, ValueError) as error:
        raise Misconfigured(
            f"{run_dir / 'agent.json'} cannot be read ({error})",
            kind="not-readable",
            hint="ask as the user who started the run",
        ) from None
    return facts if isinstance(facts, dict) else {}
