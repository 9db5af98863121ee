"""Upload of one object to S3: a sliding window of parts, all or nothing.

Parts are cut in order and sent at once while earlier ones are still under way; a slow part does not
hold up the others. The number of parts in memory is bounded for the whole process and not for each
object. Nothing is visible before the last request, which is made only when every byte has been read
and passed its checksum. On any failure, cancellation included, the parts are given back.

A process that is killed cannot give anything back. So each upload is written into a journal before
it begins; whoever finds a journal whose owner is dead (the kernel has dropped its lock) aborts what
it lists. The name of the object suffices for that, as each name is written by one process only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from ckpt.crc import Bytes
from ckpt.errors import CheckpointError, Corrupt, NotFound
from ckpt.s3 import S3
from ckpt.tier import Source

__all__ = ["Journal", "Uploader"]

PART_BYTES = 16 << 20
MAX_PARTS = 9_000
"""S3 takes 10,000; what is above is kept for objects that grow while they are sent."""
PARTS_IN_FLIGHT = 4
GIVE_UP_S = 300.0
"""How long one request is tried before the upload fails."""
ABORT_S = 10.0


class Journal:
    """Which uploads are open, on disk, for the case that we are killed; safe in many threads."""

    def __init__(self, directory: Path, url: str) -> None:
        self._lock = threading.Lock()
        self._directory = directory
        self._url = url
        self._fd = -1
        self._open: set[str] = set()
        self._path = directory / f"{uuid.uuid4().hex[:12]}.jsonl"

    def begin(self, key: str) -> None:
        """The object `key` may have parts from now on. Durable when this returns."""
        with self._lock:
            if self._fd < 0:
                self._fd = self._create()
            self._open.add(key)
            self._write({"begin": key, "url": self._url})

    def end(self, key: str) -> None:
        """The object `key` has no open parts any more."""
        with self._lock:
            self._open.discard(key)
            if self._open:
                self._write({"end": key})
            else:
                os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Let go of the journal; it stays only if an upload is open."""
        if self._fd < 0:
            return
        if not self._open:
            with contextlib.suppress(OSError):
                self._path.unlink()
                self._directory.rmdir()
        os.close(self._fd)
        self._fd = -1

    def orphans(self) -> Iterator[tuple[Path, list[str]]]:
        """Journals of dead owners for our URL with their open uploads, locked one at a time."""
        for path in sorted(self._directory.glob("*.jsonl")):
            if path == self._path:
                continue
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield from self._orphan(path)
            except BlockingIOError:
                continue
            finally:
                os.close(fd)

    def _create(self) -> int:
        """Make the file and lock it; a sweep between the two may have taken it for an orphan."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        while True:
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(self._path, flags, 0o600)
            except FileNotFoundError:
                continue  # another owner has just removed the directory with its last journal
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.stat(self._path).st_ino == os.fstat(fd).st_ino:
                    return fd
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _orphan(self, path: Path) -> Iterator[tuple[Path, list[str]]]:
        keys: dict[str, None] = {}
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # torn by the kill; what it announces was not begun
            if "end" in record:
                keys.pop(record["end"], None)
            elif record.get("url") == self._url:
                keys[record["begin"]] = None
            else:
                return  # of another store: theirs to sweep
        yield path, list(keys)

    def _write(self, record: dict[str, str]) -> None:
        os.write(self._fd, (json.dumps(record) + "\n").encode())
        os.fsync(self._fd)


class Uploader:
    """Puts objects into one bucket. Make and use it on the loop of its S3."""

    def __init__(self, s3: S3, journal: Journal | None) -> None:
        self._s3 = s3
        self._journal = journal
        self._parts = asyncio.Semaphore(PARTS_IN_FLIGHT)

    async def put(self, key: str, source: Source) -> None:
        """The whole object stands at `key` when this returns; nothing does if it raises."""
        part_bytes = max(PART_BYTES, -(-source.size // MAX_PARTS))
        if source.size <= part_bytes:
            await self._put_whole(key, source)
        elif self._journal is None:
            await self._put_parts(key, source, part_bytes)
        else:
            await asyncio.to_thread(self._journal.begin, key)
            if await self._put_parts(key, source, part_bytes):
                await asyncio.to_thread(self._journal.end, key)
        await self._check_size(key, source.size)

    async def abort(self, key: str, *, deadline_s: float = ABORT_S) -> int:
        """Give back all parts of uploads to `key`; how many uploads there were."""
        count = 0
        uploads = self._s3.pages("list_multipart_uploads", Prefix=key, deadline_s=deadline_s)
        async for page in uploads:
            for upload in page.get("Uploads") or ():
                if upload["Key"] == key:
                    await self._abort(key, upload["UploadId"], deadline_s)
                    count += 1
        return count

    async def sweep(self) -> list[str]:
        """Abort what dead owners left open; the keys. Journals that fail are kept for next time."""
        swept: list[str] = []
        if self._journal is None:
            return swept
        for path, keys in self._journal.orphans():
            for key in keys:
                if await self.abort(key):
                    swept += [key]
            path.unlink(missing_ok=True)
        return swept

    async def _put_whole(self, key: str, source: Source) -> None:
        async with self._parts:
            body = b""
            async for part in _iterate(source, max(source.size, 1)):
                body = part
            await self._s3.call("put_object", Key=key, Body=body, deadline_s=GIVE_UP_S)

    async def _put_parts(self, key: str, source: Source, part_bytes: int) -> bool:
        """True when no part is left open; raises if the object is not there."""
        answer = await self._s3.call("create_multipart_upload", Key=key, deadline_s=GIVE_UP_S)
        upload_id: str = answer["UploadId"]
        sending: set[asyncio.Task[None]] = set()
        etags: dict[int, str] = {}
        try:
            number = 0
            parts = _iterate(source, part_bytes)
            while True:
                await self._parts.acquire()
                try:
                    body = await anext(parts, None)
                except BaseException:
                    self._parts.release()
                    raise
                if body is None:
                    self._parts.release()
                    break
                number += 1
                task = asyncio.create_task(self._send(key, upload_id, number, body, etags))
                del body
                sending.add(task)
                for done in [t for t in sending if t.done()]:
                    sending.discard(done)
                    done.result()
            await asyncio.gather(*sending)
            await self._complete(key, upload_id, etags, source.size)
        except BaseException:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
            with contextlib.suppress(CheckpointError):
                await asyncio.shield(self._abort(key, upload_id, ABORT_S))
                if self._journal is not None:
                    self._journal.end(key)
            raise
        return True

    async def _send(
        self, key: str, upload_id: str, number: int, body: bytes, etags: dict[int, str]
    ) -> None:
        try:
            answer = await self._s3.call(
                "upload_part",
                Key=key,
                UploadId=upload_id,
                PartNumber=number,
                Body=body,
                deadline_s=GIVE_UP_S,
            )
            etags[number] = answer["ETag"]
        finally:
            self._parts.release()

    async def _complete(self, key: str, upload_id: str, etags: dict[int, str], size: int) -> None:
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        try:
            await self._s3.call(
                "complete_multipart_upload",
                Key=key,
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
                deadline_s=GIVE_UP_S,
            )
        except NotFound:
            # Done by an attempt whose answer was lost, or swept by somebody: the object tells.
            await self._check_size(key, size)

    async def _abort(self, key: str, upload_id: str, deadline_s: float) -> None:
        with contextlib.suppress(NotFound):
            await self._s3.call(
                "abort_multipart_upload", Key=key, UploadId=upload_id, deadline_s=deadline_s
            )

    async def _check_size(self, key: str, size: int) -> None:
        answer = await self._s3.call("head_object", Key=key, deadline_s=GIVE_UP_S)
        if answer["ContentLength"] != size:
            raise Corrupt(
                f"{self._s3.shown}/{key} has {answer['ContentLength']} bytes after an upload of "
                f"{size}",
                kind="size",
            )


async def _iterate(source: Source, part_bytes: int) -> AsyncIterator[bytes]:
    """The source's parts as bytes of our own, read and checked in a thread."""
    parts = source.chunks(part_bytes)

    def following() -> bytes | None:
        part: Bytes | None = next(parts, None)
        return None if part is None else part.tobytes()

    while (body := await asyncio.to_thread(following)) is not None:
        yield body
