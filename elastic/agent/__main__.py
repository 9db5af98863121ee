"""Run one agent: `python -m elastic.agent --run-dir DIR --spec-fd N [--caller-fd M]`.

Started by `elastic.run()` in a session of its own. Its exit code is the run's.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from elastic.agent.agent import Agent
from elastic.agent.leaving import result_of
from elastic.agent.spec import AgentSpec, RunDir, read_spec
from elastic.errors import ExitCode, Misconfigured
from elastic.joblock import JobLock
from elastic.membership.commands import Outcome


def main(arguments: list[str] | None = None) -> int:
    """Run the agent to its end and return the exit code."""
    parser = argparse.ArgumentParser(prog="elastic.agent")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--spec-fd", type=int, required=True)
    parser.add_argument("--caller-fd", type=int, default=-1)
    options = parser.parse_args(arguments)
    run_dir = RunDir(options.run_dir.absolute())
    run_dir.prepare()
    try:
        spec = read_spec(options.spec_fd)
        lock = _take_lock(spec, run_dir)
    except Misconfigured as error:
        outcome = Outcome(exit_code=ExitCode.MISCONFIGURED, cause=str(error))
        run_dir.write_result(result_of(outcome, run_dir.path))
        return int(ExitCode.MISCONFIGURED)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    for name in ("asyncio", "aiohttp"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if options.caller_fd >= 0:
        os.set_inheritable(options.caller_fd, False)
    try:
        return asyncio.run(_run(spec, run_dir, options.caller_fd))
    finally:
        if lock is not None:
            lock.close()


async def _run(spec: AgentSpec, run_dir: RunDir, caller_fd: int) -> int:
    outcome = await Agent(spec, run_dir, caller_fd=caller_fd).run()
    return int(outcome.exit_code)


def _take_lock(spec: AgentSpec, run_dir: RunDir) -> JobLock | None:
    """Hold the job's lock; the caller's open file is taken over when it passed one."""
    if spec.lock_root is None:
        return None
    lock = JobLock.take(spec.lock_root, spec.job)
    os.set_inheritable(lock.fd, False)
    lock.describe(pid=os.getpid(), job=spec.job, run_dir=str(run_dir.path))
    return lock


if __name__ == "__main__":
    sys.exit(main())
