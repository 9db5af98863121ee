"""A prefix of an object store as a tier; any fsspec URL, S3 first.

What S3 is trusted with: a PUT or a completed multipart upload is atomic and durable; a read after a
write sees it; If-None-Match lets one writer win. A reply may be lost after the deed: so a refused
create is followed by reading what is there, and equal content means that we have won.

Other protocols go through fsspec's plain calls, whose promises differ: a create is followed by
reading back, which is right for one writer at a time; deadlines are those of that implementation.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from ckpt.crc import Bytes
from ckpt.errors import (
    CheckpointError,
    Conflict,
    Corrupt,
    Fatal,
    Misconfigured,
    NotFound,
    Retryable,
)
from ckpt.s3 import S3
from ckpt.tier import Created, Source
from ckpt.uploader import GIVE_UP_S, Journal, Uploader

__all__ = ["FsspecTier", "S3Tier"]

PROBE_S = 10.0
_COPY_BYTES = 8 << 20


class S3Tier:
    """Checkpoints below `s3://bucket/prefix`; `journal` keeps traces of open uploads."""

    name = "remote"

    def __init__(
        self, url: str, *, options: Mapping[str, Any] | None = None, journal: Path | None = None
    ) -> None:
        parts = urlsplit(url)
        if not parts.netloc:
            raise Misconfigured(f"{url} names no bucket", kind="url", hint="write s3://bucket/path")
        self.url = _without_secrets(url)
        self._prefix = parts.path.strip("/")
        self._s3 = S3(parts.netloc, options=options or {}, shown=f"s3://{parts.netloc}")
        self._journal = None if journal is None else Journal(journal, self.url)
        self._uploader = Uploader(self._s3, self._journal)

    def probe(self) -> None:
        """Return if objects can be listed and written: an upload is begun and given back."""
        try:
            self._s3.run(self._probe())
        except Retryable as error:
            raise Misconfigured(error.message, kind=error.kind, hint=error.hint) from error

    def put(self, path: str, source: Source) -> None:
        """Upload in parallel parts; the object appears with the last request."""
        self._s3.run(self._uploader.put(self._key(path), source))

    def create(self, path: str, data: bytes) -> Created:
        """One conditional PUT; a refusal is resolved by reading back."""
        return self._s3.run(self._create(self._key(path), data))

    def get(self, path: str) -> bytes:
        """A small object, whole."""
        return bytes(self._s3.run(self._s3.call("get_object", Key=self._key(path)))["Body"])

    def read_into(self, path: str, offset: int, target: Bytes) -> None:
        """One ranged GET."""
        if not len(target):
            return
        span = f"bytes={offset}-{offset + len(target) - 1}"
        answer = self._s3.run(self._s3.call("get_object", Key=self._key(path), Range=span))
        body = answer["Body"]
        if len(body) > len(target) and not answer.get("ContentRange"):
            body = body[offset : offset + len(target)]  # a server that ignores ranges
        if len(body) != len(target):
            raise Corrupt(
                f"{self.url}/{path} ends before byte {offset + len(target)}", kind="truncated"
            )
        target[:] = np.frombuffer(body, np.uint8)

    def size(self, path: str) -> int:
        """Bytes of an object."""
        answer = self._s3.run(self._s3.call("head_object", Key=self._key(path)))
        return int(answer["ContentLength"])

    def list_dir(self, path: str) -> list[str]:
        """Names directly below a prefix, asked of the server each time."""
        return self._s3.run(self._list(self._key(path)))

    def delete(self, path: str) -> None:
        """Remove one object."""
        with contextlib.suppress(NotFound):
            self._s3.run(self._s3.call("delete_object", Key=self._key(path)))

    def sweep(self) -> list[str]:
        """Give back the parts that uploads of dead processes have left; the objects' keys."""
        return self._s3.run(self._uploader.sweep())

    def open_uploads(self) -> list[str]:
        """Keys of all uploads below our prefix that are neither complete nor given back."""
        return self._s3.run(self._open_uploads())

    def close(self) -> None:
        """Close connections, and the journal if nothing is open."""
        self._s3.close()
        if self._journal is not None:
            self._journal.close()

    def _key(self, path: str) -> str:
        return "/".join(part for part in (self._prefix, path) if part)

    async def _probe(self) -> None:
        await self._s3.call("list_objects_v2", MaxKeys=1, deadline_s=PROBE_S)
        key = self._key(f".probe-{uuid.uuid4().hex[:12]}")
        begun = await self._s3.call("create_multipart_upload", Key=key, deadline_s=PROBE_S)
        await self._s3.call(
            "abort_multipart_upload", Key=key, UploadId=begun["UploadId"], deadline_s=PROBE_S
        )

    async def _create(self, key: str, data: bytes) -> Created:
        try:
            await self._s3.call(
                "put_object", Key=key, Body=data, IfNoneMatch="*", deadline_s=GIVE_UP_S
            )
            return Created.NEW
        except Conflict:
            found = await self._s3.call("get_object", Key=key, deadline_s=GIVE_UP_S)
            return Created.SAME if found["Body"] == data else Created.OTHER

    async def _list(self, prefix: str) -> list[str]:
        prefix = f"{prefix}/" if prefix else ""
        names: list[str] = []
        async for page in self._s3.pages("list_objects_v2", Prefix=prefix, Delimiter="/"):
            found = [each["Prefix"] for each in page.get("CommonPrefixes") or ()]
            found += [each["Key"] for each in page.get("Contents") or ()]
            names += [name for each in found if (name := each[len(prefix) :].rstrip("/"))]
        return sorted(names)

    async def _open_uploads(self) -> list[str]:
        prefix = f"{self._prefix}/" if self._prefix else ""
        keys: list[str] = []
        async for page in self._s3.pages("list_multipart_uploads", Prefix=prefix):
            keys += [each["Key"] for each in page.get("Uploads") or ()]
        return sorted(keys)


class FsspecTier:
    """Checkpoints below any other URL that fsspec knows."""

    name = "remote"

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None) -> None:
        import fsspec

        self.url = _without_secrets(url)
        settings = {"use_listings_cache": False, "skip_instance_cache": True, **(options or {})}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **settings)
        except (ImportError, ValueError) as error:
            raise Misconfigured(f"{self.url} cannot be used: {error}", kind="url") from error
        self._root = str(root).rstrip("/")

    def probe(self) -> None:
        """Return if a small object can be written and removed."""
        path = f".probe-{uuid.uuid4().hex[:12]}"
        try:
            self.create(path, b"probe")
            self.delete(path)
        except Retryable as error:
            raise Misconfigured(error.message, kind=error.kind, hint=error.hint) from error

    def put(self, path: str, source: Source) -> None:
        """Stream into a file that is only committed when all bytes have passed their checksum."""
        with self._errors(path):
            self._fs.makedirs(self._parent(path), exist_ok=True)
            # Leaving a plain `with open` by an exception would publish the short object.
            file = self._fs.open(self._full(path), "wb", autocommit=False)
            try:
                for part in source.chunks(_COPY_BYTES):
                    file.write(part.data)
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                with contextlib.suppress(Exception):  # where nothing can be held back
                    self._fs.rm_file(self._full(path))
                raise
            file.commit()
            size = int(self._fs.info(self._full(path))["size"])
        if size != source.size:
            raise Corrupt(f"{self.url}/{path} has {size} bytes of {source.size}", kind="size")

    def create(self, path: str, data: bytes) -> Created:
        """Write if absent, then read back."""
        with self._errors(path):
            self._fs.makedirs(self._parent(path), exist_ok=True)
            created = Created.NEW
            try:
                self._fs.pipe_file(self._full(path), data, mode="create")
            except FileExistsError:
                created = Created.SAME
            found = self._fs.cat_file(self._full(path))
            return created if found == data else Created.OTHER

    def get(self, path: str) -> bytes:
        """A small object, whole."""
        with self._errors(path):
            return bytes(self._fs.cat_file(self._full(path)))

    def read_into(self, path: str, offset: int, target: Bytes) -> None:
        """One ranged read."""
        end = offset + len(target)
        with self._errors(path):
            body = self._fs.cat_file(self._full(path), start=offset, end=end)
        if len(body) != len(target):
            raise Corrupt(f"{self.url}/{path} ends before byte {end}", kind="truncated")
        target[:] = np.frombuffer(body, np.uint8)

    def size(self, path: str) -> int:
        """Bytes of an object."""
        with self._errors(path):
            return int(self._fs.info(self._full(path))["size"])

    def list_dir(self, path: str) -> list[str]:
        """Names directly below a prefix."""
        with self._errors(path):
            try:
                found = self._fs.ls(self._full(path), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted({str(each).rstrip("/").rsplit("/", 1)[-1] for each in found})

    def delete(self, path: str) -> None:
        """Remove one object."""
        with self._errors(path), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))

    def close(self) -> None:
        """Nothing is kept open that fsspec does not close itself."""

    def _full(self, path: str) -> str:
        return "/".join(part for part in (self._root, path) if part)

    def _parent(self, path: str) -> str:
        return self._full(path).rsplit("/", 1)[0]

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        place = f"{self.url}/{path}" if path else self.url
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise NotFound(f"{place} does not exist", kind="not-found") from error
        except PermissionError as error:
            raise Misconfigured(f"{place} refuses: {error}", kind="access-denied") from error
        except (TimeoutError, ConnectionError) as error:
            raise Retryable(f"{place} cannot be reached: {error}", kind="unreachable") from error
        except Exception as error:
            raise Fatal(f"{place} failed: {error}", kind="io") from error


def _without_secrets(url: str) -> str:
    parts = urlsplit(url.rstrip("/"))
    if "@" not in parts.netloc:
        return url.rstrip("/")
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))
