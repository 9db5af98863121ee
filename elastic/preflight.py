"""Refuse before anything is started what this machine cannot hold, with the sums.

`look` measures the machine; `check` compares it with what was asked for and changes nothing. The
size of the model is not known here: what is counted is what every run needs. A worker that has
prepared its model refuses in the same way, by `check_memory`, what its arena and gradients need.
Whether etcd and the object store answer is asked by those who talk to them.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic.config import ElasticConfig
from elastic.errors import Misconfigured

MIB = 1 << 20

# Measured with torch 2.13 on a CPU: private pages of a forked worker that has built a tiny model
# and its process group, and of the processes beside the workers (agent, fork server, save service,
# etcd). Rounded up; a model's own needs come on top.
WORKER_BYTES = 160 * MIB
BESIDE_BYTES = 480 * MIB
ETCD_DISK_BYTES = 160 * MIB  # two preallocated log segments and the backend file
LOGS_DISK_BYTES = 32 * MIB
CHECKPOINT_DISK_BYTES = 32 * MIB
FILES_BASE = 128
FILES_PER_WORKER = 16
FILES_PER_PEER = 4  # one pair of connections each for the group that ends and the one that forms


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A directory that is written to: why, where, and what is free there."""

    purpose: str
    path: str
    free_bytes: int
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this host has to offer."""

    memory_free_bytes: int
    memory_limit: str
    open_files_most: int
    disks: tuple[Disk, ...]


def look(config: ElasticConfig, *, run_root: Path) -> Machine:
    """Measure this host; makes the directories that the run writes to.

    Raises Misconfigured: a directory cannot be made or written to.
    """
    needed = {"run directory (log_dir)": run_root}
    if config.checkpoint is not None:
        needed["checkpoint directory"] = Path(config.checkpoint)
    if config.remote is not None and "://" not in config.remote:
        needed["remote directory"] = Path(config.remote)
    memory_free_bytes, memory_limit = memory_free()
    return Machine(
        memory_free_bytes=memory_free_bytes,
        memory_limit=memory_limit,
        open_files_most=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        disks=tuple(_disk(purpose, path) for purpose, path in needed.items()),
    )


def check(config: ElasticConfig, machine: Machine) -> None:
    """Raise Misconfigured if this run cannot fit, naming what is missing and the remedy."""
    workers = (config.nproc or 1) + config.spares
    check_memory(
        f"{workers} workers",
        {f"{workers} workers": workers * WORKER_BYTES, "the processes beside them": BESIDE_BYTES},
        machine.memory_free_bytes,
        where=machine.memory_limit,
        remedy="ask for fewer workers (nproc, spares) or free memory",
    )
    _check_disks(config, machine.disks)
    files = files_needed(config)
    if 0 <= machine.open_files_most < files:
        raise Misconfigured(
            f"{workers} workers need about {files} open files per process, but the limit is "
            f"{machine.open_files_most}",
            kind="too-few-files",
            hint="raise it with `ulimit -Hn`, or ask for fewer workers",
        )


def check_memory(
    what: str,
    parts: Mapping[str, int],
    free_bytes: int,
    *,
    where: str = "on this machine",
    remedy: str = "ask for fewer workers or free memory",
) -> None:
    """Raise Misconfigured with the sum of `parts` if it is more than is free."""
    total = sum(parts.values())
    if total <= free_bytes:
        return
    sums = " + ".join(f"{shown_bytes(size)} for {name}" for name, size in parts.items())
    raise Misconfigured(
        f"{what} need {shown_bytes(total)} of memory ({sums}), but {shown_bytes(free_bytes)} are "
        f"free {where}",
        kind="too-little-memory",
        hint=remedy,
        needed_bytes=total,
        free_bytes=free_bytes,
    )


def files_needed(config: ElasticConfig) -> int:
    """Return how many files a process of this run may have open."""
    workers = (config.nproc or 1) + config.spares
    peers = (config.nproc or 1) * config.max_nodes
    return FILES_BASE + FILES_PER_WORKER * workers + FILES_PER_PEER * peers


def allow_files(pid: int, count: int) -> None:
    """Raise the soft limit of open files of a child to `count`, never above its hard limit."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))


def memory_free() -> tuple[int, str]:
    """Return the bytes that can still be had, and which limit says so."""
    free_bytes, limit = _meminfo_available(), "on this machine"
    for directory in _cgroups():
        left = _cgroup_left(directory)
        if left is not None and left < free_bytes:
            free_bytes, limit = left, "in this container (cgroup memory limit)"
    return free_bytes, limit


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the GPUs that a worker of this installation could use, without starting CUDA."""
    try:
        if "+cpu" in importlib.metadata.version("torch"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        return 0
    present = sum(1 for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    listed = [item for item in visible.split(",") if item.strip() not in ("", "-1")]
    return min(present, len(listed))


def shown_bytes(size: int) -> str:
    """Return a size as a person reads it."""
    if size >= 10 * 1024 * MIB:
        return f"{size / (1024 * MIB):.0f} GiB"
    if size >= 1024 * MIB:
        return f"{size / (1024 * MIB):.1f} GiB"
    return f"{size / MIB:.0f} MiB"


def _check_disks(config: ElasticConfig, disks: tuple[Disk, ...]) -> None:
    run_bytes = LOGS_DISK_BYTES + (0 if config.etcd else ETCD_DISK_BYTES)
    for device in {disk.device for disk in disks}:
        parts = {
            f"the {disk.purpose} {disk.path}": (
                run_bytes if "log_dir" in disk.purpose else CHECKPOINT_DISK_BYTES
            )
            for disk in disks
            if disk.device == device
        }
        free_bytes = min(disk.free_bytes for disk in disks if disk.device == device)
        total = sum(parts.values())
        if total > free_bytes:
            sums = " + ".join(f"{shown_bytes(size)} for {name}" for name, size in parts.items())
            raise Misconfigured(
                f"this run needs at least {shown_bytes(total)} of disk ({sums}), but "
                f"{shown_bytes(free_bytes)} are free there",
                kind="too-little-disk",
                hint="free space, or choose another checkpoint or log_dir",
            )


def _disk(purpose: str, path: Path) -> Disk:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, prefix=".everstep-probe-"):
            pass
        free_bytes = shutil.disk_usage(path).free
        device = path.stat().st_dev
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Misconfigured(
                f"{purpose} {path}: no space is left", kind="too-little-disk", hint="free space"
            ) from None
        raise Misconfigured(
            f"{purpose} {path} cannot be written to: {error.strerror or error}",
            kind="not-writable",
            hint="choose another directory, or change its owner or mode",
        ) from None
    return Disk(purpose=purpose, path=str(path), free_bytes=free_bytes, device=device)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroups() -> list[Path]:
    """Return the directories of this process's memory cgroup and of all above it."""
    root = Path("/sys/fs/cgroup")
    found: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        here = base / path.lstrip("/")
        found.extend([here, *(up for up in here.parents if up.is_relative_to(base))])
    return found


def _cgroup_left(directory: Path) -> int | None:
    """Return what a memory cgroup may still take; its page cache counts as free."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int((directory / limit_name).read_text())
            used = int((directory / used_name).read_text())
            stat = (directory / "memory.stat").read_text()
        except (OSError, ValueError):  # not there, or "max"
            continue
        cache = [int(v) for k, v in (line.split() for line in stat.splitlines()) if k == cache_name]
        return max(0, limit - used + sum(cache))
    return None
