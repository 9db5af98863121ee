"""Where a job lives on this host: its name, its root directory, the directory of one run.

The root is the checkpoint directory, or `.everstep/<job>` here when nothing is saved. It holds the
job's name (`job.json`, made once), its lock, and below `runs/` (or `log_dir`) one directory for
each run, named by the time it was started. A run directory is for its owner alone: it holds the
token of the job.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from elastic.config import ElasticConfig
from elastic.errors import Misconfigured

JOB_FILE = "job.json"
HOME = ".everstep"
_RUN_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRoot:
    """A job's name and its places on this host."""

    job: str
    root: Path
    runs: Path
    is_new_name: bool


def find(config: ElasticConfig, *, stem: str, saved_job: str | None = None) -> JobRoot:
    """Return the job's name and places; reads `job.json`, writes nothing.

    Args:
        stem: what a new name begins with (the script's).
        saved_job: name that the checkpoint to resume from carries, for a host that has lost its
            directory.

    Raises Misconfigured: the checkpoint directory belongs to another job.
    """
    known = _read_name(Path(config.checkpoint)) if config.checkpoint is not None else None
    if known is not None and config.job is not None and known != config.job:
        raise Misconfigured(
            f"checkpoint directory {config.checkpoint} belongs to job {known!r}, not to job "
            f"{config.job!r}",
            kind="other-job",
            hint=f"give job={known!r}, or another checkpoint directory",
        )
    job = config.job or known or saved_job or _new_name(config, stem)
    root = Path(config.checkpoint) if config.checkpoint is not None else Path(HOME) / job
    if config.log_dir is not None:
        runs = Path(config.log_dir)
    else:
        runs = root / "runs" if config.checkpoint is not None else root
    return JobRoot(
        job=job,
        root=Path(os.path.abspath(root)),
        runs=Path(os.path.abspath(runs)),
        is_new_name=config.job is None and known is None and saved_job is None,
    )


def remember(place: JobRoot) -> None:
    """Write the job's name into its root, unless it stands there."""
    if _read_name(place.root) == place.job:
        return
    text = json.dumps({"job": place.job, "created": datetime.now(UTC).isoformat()}) + "\n"
    partial = place.root / f".{JOB_FILE}.{secrets.token_hex(4)}"
    partial.write_text(text)
    partial.replace(place.root / JOB_FILE)


def make_run_dir(runs: Path) -> Path:
    """Make the directory of a new run, readable by its owner alone."""
    runs.mkdir(parents=True, exist_ok=True)
    _ignore_in_git(runs)
    while True:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = runs / f"{stamp}-{secrets.token_hex(2)}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        for part in ("events", "logs"):
            (path / part).mkdir(mode=0o700)
        return path


def run_dirs(directory: Path) -> list[Path]:
    """Return the run directories in a directory, oldest first."""
    if not directory.is_dir():
        return []
    found = (path for path in directory.iterdir() if _RUN_NAME.fullmatch(path.name))
    return sorted((path for path in found if path.is_dir()), key=_age)


def is_run_dir(directory: Path) -> bool:
    """Whether this is the directory of one run."""
    return (directory / "events").is_dir() and (directory / "logs").is_dir()


def name_in(root: Path) -> str | None:
    """Return the job's name that a directory carries, or None if it is not a job's root."""
    try:
        return _read_name(root)
    except Misconfigured:
        return None


def _age(path: Path) -> tuple[str, float]:
    # Two runs of the same second differ only in random digits: then the file system knows.
    return path.name.partition("-")[0], path.stat().st_mtime


def _read_name(root: Path) -> str | None:
    path = root / JOB_FILE
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Misconfigured(
            f"{path} cannot be read: {error.strerror}",
            kind="not-readable",
            hint="choose another checkpoint directory, or change its owner or mode",
        ) from None
    try:
        name = json.loads(text)["job"]
    except (ValueError, KeyError, TypeError):
        name = None
    if not isinstance(name, str):
        raise Misconfigured(
            f"{path} is not a job's name file",
            kind="not-readable",
            hint="remove it and give the name as job=, or choose another checkpoint directory",
        )
    return name


def _new_name(config: ElasticConfig, stem: str) -> str:
    clean = re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-._")[:40] or "job"
    if config.checkpoint is None and config.remote is not None:
        # Nothing here remembers the name, so it must follow from the place that does.
        return f"{clean}-{zlib.crc32(config.remote.encode()):08x}"
    return f"{clean}-{secrets.token_hex(3)}"


def _ignore_in_git(runs: Path) -> None:
    """Keep run directories out of the repository that a person happens to work in."""
    home = next((path for path in (runs, *runs.parents) if path.name == HOME), None)
    if home is not None and not (home / ".gitignore").exists():
        (home / ".gitignore").write_text("*\n")
