"""The seam to storage: what a tier promises, and how one is made from a URL.

A tier is a place for checkpoints: a directory, or a prefix of an object store. Paths are relative
to its root, with forward slashes. Promises that every tier keeps and the contract suite proves:

- `put` is atomic and durable: a reader sees all bytes or nothing, and after it returns they stay.
- `create` wins once: of any number of writers exactly one kind of content is there afterwards; a
  writer whose reply was lost finds its own content and has won too.
- an object is never changed once it is there.
- `list_dir` asks the device each time; an error is an error and never an empty answer.
- every call may be made from any thread, and ends: each has a deadline.
- what fails raises an error of ckpt.errors whose sentence names the URL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ckpt.crc import Bytes
from ckpt.errors import Misconfigured

__all__ = ["Created", "Source", "Tier", "open_tier"]


class Created(Enum):
    """How a `create` ended."""

    NEW = "new"
    """The content is there now, by this call."""
    SAME = "same"
    """The same content was there already."""
    OTHER = "other"
    """Another content was there and stays."""


class Source(Protocol):
    """The bytes of an object to be put, produced in order."""

    @property
    def size(self) -> int:
        """All bytes."""
        ...

    def chunks(self, max_bytes: int) -> Iterator[Bytes]:
        """The bytes in order, in parts of `max_bytes`, the last one shorter.

        A part is valid until the next one is asked for. Raises Corrupt, at the latest in place of
        the end, if the bytes are not the ones that were staged: nothing may become visible then.
        """
        ...


class Tier(Protocol):
    """One place for checkpoints."""

    @property
    def name(self) -> str:
        """ "local" or "remote"."""
        ...

    @property
    def url(self) -> str:
        """For people."""
        ...

    def probe(self) -> None:
        """Return if objects can be written here; leaves nothing. Raises Misconfigured if not."""
        ...

    def put(self, path: str, source: Source) -> None:
        """Write one object."""
        ...

    def create(self, path: str, data: bytes) -> Created:
        """Write one small object unless another is there."""
        ...

    def get(self, path: str) -> bytes:
        """A small object, whole. Raises NotFound."""
        ...

    def read_into(self, path: str, offset: int, target: Bytes) -> None:
        """Fill `target` with the bytes from `offset`. Raises NotFound; Corrupt if it ends."""
        ...

    def size(self, path: str) -> int:
        """Bytes of an object. Raises NotFound."""
        ...

    def list_dir(self, path: str) -> list[str]:
        """Names directly below a directory, of files and directories; none if it is not there."""
        ...

    def delete(self, path: str) -> None:
        """Remove one object; it need not be there."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


def open_tier(
    root: str, *, options: Mapping[str, Any] | None = None, journal: Path | None = None
) -> Tier:
    """The tier at a path or any fsspec URL. Touches nothing yet. Raises Misconfigured.

    `options` go to the fsspec file system; `journal` is a local directory in which uploads that
    are under way leave a trace, for stores where they need one.
    """
    scheme = urlsplit(root).scheme if "://" in root else ""
    if not root:
        raise Misconfigured(
            "an empty text is no place for checkpoints", kind="url", hint="give a path or a URL"
        )
    if scheme in ("", "file", "local"):
        from ckpt.tier_local import LocalTier

        return LocalTier(root.split("://", 1)[1] if scheme else root)
    # The clients take most of a second to import: only who needs one pays.
    from ckpt.tier_object import FsspecTier, S3Tier

    if scheme in ("s3", "s3a"):
        return S3Tier(root, options=options, journal=journal)
    return FsspecTier(root, options=options)
