"""What an agent is told at its start, and where its run keeps its files.

The caller hands over one JSON object through a descriptor, so that no secret and no long script
path stands on a command line:

    config            ElasticConfig.to_dict(), resolved
    script            elastic.script.ScriptSpec.to_dict(): what the workers run
    job               the job's name
    first_generation  number of the first World: above those of its checkpoints (default 1)
    run_index, earlier_results   of `elastic.run()` calls that came before in the same script
    lock_root         directory of the job's lock, when the caller has not passed the lock itself
    entry, preload    for tests: what a worker calls, and what the fork server imports

Unknown keys are passed over.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elastic.agent.forkserver import PRELOAD
from elastic.config import ElasticConfig
from elastic.errors import Misconfigured
from elastic.membership.choose_world import WorldRules
from elastic.membership.state import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """One agent's task."""

    config: ElasticConfig
    job: str
    node: str
    script: dict[str, Any]
    run_index: int = 0
    earlier_results: tuple[dict[str, Any], ...] = ()
    first_generation: int = 1
    lock_root: str | None = None
    entry: str | None = None
    preload: tuple[str, ...] = PRELOAD

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Read what the caller wrote. Raises Misconfigured."""
        config = ElasticConfig.from_dict(plain["config"])
        job = plain.get("job") or config.job
        if not job:
            raise Misconfigured("the agent was started without a job name", kind="job-missing")
        preload = plain.get("preload")
        return cls(
            config=config,
            job=str(job),
            node=str(plain.get("node") or config.node or f"n-{secrets.token_hex(2)}"),
            script=dict(plain.get("script") or {}),
            run_index=int(plain.get("run_index") or 0),
            earlier_results=tuple(plain.get("earlier_results") or ()),
            first_generation=max(1, int(plain.get("first_generation") or 1)),
            lock_root=plain.get("lock_root"),
            entry=plain.get("entry"),
            preload=PRELOAD if preload is None else tuple(preload),
        )

    @property
    def rules(self) -> Rules:
        """What the configuration says, as far as the machine needs it."""
        config = self.config
        hang = config.hang_timeout_s
        return Rules(
            world=WorldRules(
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                max_workers=config.virtual_ranks,
                min_wait_s=config.min_wait_s,
                first_generation=self.first_generation,
            ),
            slots=config.nproc or 1,
            spares=config.spares,
            respawn=config.respawn,
            max_failures=config.max_failures,
            max_reshapes=config.max_reshapes,
            grace_s=config.grace_s,
            hang_timeout_s=None if isinstance(hang, str) else hang,
            slow_timeout_s=config.slow_timeout_s,
            below_min_timeout_s=config.below_min_timeout_s,
            lease_ttl_s=config.lease_ttl_s,
            fail_on_save_error=config.on_save_error == "fail",
        )


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run; made by the caller, completed here. For its owner alone."""

    path: Path

    def prepare(self) -> None:
        """Make what is missing."""
        for directory in (self.path, self.logs, self.path / "events"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def logs(self) -> Path:
        """One log for each process."""
        return self.path / "logs"

    @property
    def etcd(self) -> Path:
        """Data of the embedded etcd; removed at the end."""
        return self.path / "etcd"

    def events(self, process: str) -> Path:
        """Return the event file of a process, such as "worker-n.0-abc"."""
        return self.path / "events" / f"{process}.jsonl"

    def write_agent(self, facts: Mapping[str, Any]) -> None:
        """Write agent.json: how to reach this agent, token included."""
        _write(self.path / "agent.json", facts)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json: how the run ended."""
        _write(self.path / "result.json", result)


def read_spec(fd: int) -> AgentSpec:
    """Read the spec to the end of the descriptor and close it. Raises Misconfigured."""
    with os.fdopen(fd, "rb") as file:
        data = file.read()
    try:
        plain = json.loads(data)
        return AgentSpec.from_dict(plain)
    except (ValueError, KeyError, TypeError) as error:
        raise Misconfigured(
            f"the agent's spec could not be read: {error!r}", kind="bad-spec"
        ) from error


def _write(path: Path, plain: Mapping[str, Any]) -> None:
    """Replace a file at once, readable by its owner alone."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(plain, file, default=str)
        file.write("\n")
    partial.replace(path)
