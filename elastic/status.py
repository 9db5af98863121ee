"""Find a job on this host and talk to its agent; or ask its coordination store.

A job is named by its run directory, its checkpoint directory, or its name (below `.everstep` here,
or the name that a checkpoint directory here carries). The agent's address and token stand in
`agent.json` of the run directory, readable by its owner. With etcd servers given, the job's records
there are read instead: any host can do that, and they tell of members and the World, not of steps.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic import job_root
from elastic.errors import Misconfigured

TIMEOUT_S = 5.0


def find_run(name: str) -> Path:
    """Return the newest run directory of a job. Raises Misconfigured: there is none."""
    for directory in _places(name):
        if not directory.is_dir():
            continue
        if directory.name == "events":
            directory = directory.parent
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
    except (Misconfigured, KeyError, ValueError, ProcessLookupError):
        return False
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return str(run_dir.resolve()).encode() in command and state != "Z"


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
    # A proxy of the environment is for the internet; the agent is beside us, and gets its token.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
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


def read_store(endpoints: Sequence[str], job: str) -> dict[str, Any]:
    """Return what the coordination store knows of a job, in the form of /status.

    Raises Misconfigured: no server answers, or there is no such job.
    """
    return asyncio.run(_read_store(endpoints, job))


def stop_by_store(endpoints: Sequence[str], job: str) -> None:
    """Ask a job to end after an agreed step, on all its hosts."""
    asyncio.run(_stop_by_store(endpoints, job))


async def _read_store(endpoints: Sequence[str], job: str) -> dict[str, Any]:
    from elastic.membership.coord_etcd import EtcdCoord

    coord = EtcdCoord(endpoints, job)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            snapshot = await anext(coord.snapshots())
    except TimeoutError:
        raise _silent(endpoints) from None
    finally:
        await coord.abandon()
    if snapshot.world is None and not snapshot.members:
        raise Misconfigured(
            f"the store at {', '.join(endpoints)} knows no job {job!r}",
            kind="no-job",
            hint="check the name and the servers",
        )
    world = snapshot.world
    states = {
        worker.worker_id: "ready" if worker.ready else "starting"
        for member in snapshot.members.values()
        for worker in member.workers
    }
    rows = [
        {
            "rank": rank,
            "worker_id": ref.worker_id,
            "node": ref.node,
            "state": states.get(ref.worker_id, "dead"),
        }
        for rank, ref in enumerate(() if world is None else world.workers)
    ]
    return {
        "job": job,
        "phase": "ended" if snapshot.result else "running",
        "generation": 0 if world is None else world.generation,
        "reason": "" if world is None else world.reason,
        "members": sorted(snapshot.members),
        "world": rows,
        "result": snapshot.result,
        "stop": snapshot.stop,
    }


async def _stop_by_store(endpoints: Sequence[str], job: str) -> None:
    from elastic.membership.coord_etcd import EtcdCoord

    coord = EtcdCoord(endpoints, job)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await coord.request_stop()
    except TimeoutError:
        raise _silent(endpoints) from None
    finally:
        await coord.abandon()


def _silent(endpoints: Sequence[str]) -> Misconfigured:
    return Misconfigured(
        f"no server at {', '.join(endpoints)} answered within {TIMEOUT_S:g} s",
        kind="unreachable",
        hint="check the addresses, and that etcd is running there",
    )


def _places(name: str) -> list[Path]:
    """Return the directories that a person may mean by a name, the most literal one first."""
    named = [
        path.parent
        for path in sorted(Path().glob(f"*/{job_root.JOB_FILE}"))
        if job_root.name_in(path.parent) == name
    ]
    return [Path(name), Path(job_root.HOME) / name, *named]


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
