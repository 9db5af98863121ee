"""A directory as a tier.

What the file system is trusted with: fsync makes a file durable, rename and link within a directory
are atomic, link refuses an existing name, fsync of a directory makes its names durable. A lock
taken with flock ends with the process that holds it, so who is dead can be asked of the kernel:

- a file that is being written is locked; `sweep` removes those that are not locked any more;
- the `packs` directory of a save that is not committed yet is held by a shared lock; `sweep`
  removes those without a manifest that nobody holds.

It does not use O_DIRECT, and it does not repair: what is damaged is found by its readers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ckpt.crc import Bytes
from ckpt.errors import CheckpointError, Corrupt, Fatal, Misconfigured, NotFound
from ckpt.manifest import (
    MANIFEST_NAME,
    PACKS_DIR,
    parse_generation_dir,
    parse_step_dir,
)
from ckpt.tier import Created, Source

__all__ = ["LocalTier"]

_WRITE_BYTES = 8 << 20


class LocalTier:
    """Checkpoints below a directory, which is made when the first one is written."""

    name = "local"

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser().absolute()
        self.url = str(self.root)

    def probe(self) -> None:
        """Return if files can be written here. Makes the directory, leaves nothing in it."""
        path = self.root / _temporary("probe")
        with self._errors(self.root):
            _make_dirs(self.root)
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, b"probe")
                os.fsync(fd)
            finally:
                os.close(fd)
                path.unlink()

    def put(self, path: str, source: Source) -> None:
        """Write to a temporary name, fsync, rename, fsync the directory."""
        target = self.root / path
        temporary = target.with_name(_temporary(target.name))
        with self._errors(target):
            _make_dirs(target.parent)
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                _reserve(fd, source.size)
                written = 0
                for part in source.chunks(_WRITE_BYTES):
                    _write_all(fd, part.data)
                    written += len(part)
                if written != source.size:
                    raise Corrupt(f"{target} got another size than announced", kind="size")
                os.fsync(fd)
                temporary.rename(target)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            finally:
                os.close(fd)
            _sync_dir(target.parent)

    def create(self, path: str, data: bytes) -> Created:
        """Write to a temporary name, fsync, link, fsync the directory."""
        target = self.root / path
        temporary = target.with_name(_temporary(target.name))
        with self._errors(target):
            _make_dirs(target.parent)
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                _write_all(fd, memoryview(data))
                os.fsync(fd)
                os.link(temporary, target)
                created = Created.NEW
            except FileExistsError:
                created = Created.SAME if target.read_bytes() == data else Created.OTHER
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                os.close(fd)
            _sync_dir(target.parent)
            return created

    def get(self, path: str) -> bytes:
        """A small file, whole."""
        with self._errors(self.root / path):
            return (self.root / path).read_bytes()

    def read_into(self, path: str, offset: int, target: Bytes) -> None:
        """Fill `target` with the bytes from `offset`."""
        full = self.root / path
        with self._errors(full):
            fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC)
            try:
                view = target.data
                while view:
                    count = os.preadv(fd, [view], offset)
                    if count == 0:
                        raise Corrupt(
                            f"{full} ends before byte {offset + len(view)}", kind="truncated"
                        )
                    view = view[count:]
                    offset += count
            finally:
                os.close(fd)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        with self._errors(self.root / path):
            return (self.root / path).stat().st_size

    def list_dir(self, path: str) -> list[str]:
        """Names directly below a directory."""
        with self._errors(self.root / path):
            try:
                return sorted(os.listdir(self.root / path))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, path: str) -> None:
        """Remove one file, and the directories that are empty then, up to the root."""
        full = self.root / path
        with self._errors(full):
            full.unlink(missing_ok=True)
            self._remove_empty(full.parent)

    def close(self) -> None:
        """Nothing is kept open."""

    def hold(self, path: str) -> int:
        """Keep `sweep` away from a directory, made if need be, until the descriptor is closed."""
        full = self.root / path
        with self._errors(full):
            while True:
                _make_dirs(full)
                try:
                    fd = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue  # swept in between
                fcntl.flock(fd, fcntl.LOCK_SH)
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(full).st_ino == os.fstat(fd).st_ino:
                        return fd
                os.close(fd)  # the sweeper removed it while we waited for the lock

    def sweep(self) -> list[str]:
        """Remove what dead writers left: unfinished files, and packs that nobody will commit.

        What a living process of any job works on is locked and stays; so do committed checkpoints
        and every file that is not ours by its name.
        """
        removed: list[str] = []
        with self._errors(self.root):
            self._sweep_temporaries(self.root, removed)
            for step in sorted(self.root.glob("step-*")):
                if parse_step_dir(step.name) is None:
                    continue
                for generation in sorted(step.glob("g*")):
                    if parse_generation_dir(generation.name) is not None:
                        self._sweep_checkpoint(generation, removed)
                self._remove_empty(step)
        return removed

    def _sweep_checkpoint(self, directory: Path, removed: list[str]) -> None:
        packs = directory / PACKS_DIR
        try:
            fd = os.open(packs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            self._sweep_temporaries(directory, removed)
            self._remove_empty(directory)
            return
        try:
            self._sweep_temporaries(packs, removed)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            self._sweep_temporaries(directory, removed)
            if not (directory / MANIFEST_NAME).exists():
                for pack in sorted(packs.glob("*.pack")):
                    pack.unlink(missing_ok=True)
                    removed.append(str(pack.relative_to(self.root)))
                self._remove_empty(packs)
        finally:
            os.close(fd)

    def _sweep_temporaries(self, directory: Path, removed: list[str]) -> None:
        for path in sorted(directory.glob(".*.tmp")):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed.append(str(path.relative_to(self.root)))
                finally:
                    os.close(fd)

    def _remove_empty(self, directory: Path) -> None:
        while directory != self.root and self.root in directory.parents:
            try:
                directory.rmdir()
            except OSError:
                return
            directory = directory.parent

    @contextlib.contextmanager
    def _errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            _translate(error, path)


def _translate(error: OSError, path: Path) -> NoReturn:
    why = error.strerror or str(error)
    match error.errno:
        case errno.ENOENT:
            raise NotFound(f"{path} does not exist", kind="not-found") from error
        case errno.ENOSPC | errno.EDQUOT:
            raise Fatal(
                f"{path} cannot be written: {why}", kind="disk-full", hint="make room on that disk"
            ) from error
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR | errno.EISDIR | errno.EEXIST:
            raise Misconfigured(
                f"{path} cannot be used: {why}",
                kind="not-writable",
                hint="choose a directory that this user may write to",
            ) from error
        case _:
            raise Fatal(f"{path} failed: {why}", kind="io") from error


def _temporary(name: str) -> str:
    return f".{name}.{uuid.uuid4().hex[:12]}.tmp"


def _make_dirs(directory: Path) -> None:
    """Make a directory and its parents, each durable in its own parent."""
    if directory.is_dir():
        return
    missing = [directory]
    while not missing[-1].parent.is_dir() and missing[-1] != missing[-1].parent:
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        try:
            each.mkdir(exist_ok=True)
        except FileNotFoundError:  # swept in between
            each.parent.mkdir(parents=True, exist_ok=True)
            each.mkdir(exist_ok=True)
        _sync_dir(each.parent)


def _sync_dir(directory: Path) -> None:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # swept in between; whoever wrote into it made it anew
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reserve(fd: int, size: int) -> None:
    """Fail now, and not half-way, when the disk is full."""
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]
