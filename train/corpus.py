"""Text to train on that every machine has: the sources of the installed Python, or yours.

Files are taken in an order that their names alone decide (scattered, so that a part of the text is
like the whole), up to a limit, and joined. Every worker reads the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
SUFFIXES = frozenset({".py", ".txt", ".md", ".rst"})
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
BYTES_MAX = 4_000_000
VALIDATION_PART = 0.05
VALIDATION_WINDOWS_MAX = 256  # enough to compare runs, and short beside the training


def read_text(source: Path | None = None, bytes_max: int = BYTES_MAX) -> bytes:
    """Return the text of a file or of all text files in a directory; None is Python's own."""
    root = STANDARD_LIBRARY if source is None else source
    if root.is_file():
        return root.read_bytes()[:bytes_max]
    names = {path.relative_to(root).as_posix(): path for path in _text_files(root)}
    text = bytearray()
    for name in sorted(names, key=_scattered):
        text += names[name].read_bytes() + b"\n"
        if len(text) >= bytes_max:
            break
    if not text:
        raise ValueError(f"{root} has no text files ({', '.join(sorted(SUFFIXES))})")
    return bytes(text[:bytes_max])


def _text_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        if root == STANDARD_LIBRARY:
            folders[:] = [name for name in folders if name not in NOT_THE_LIBRARY]
        yield from (Path(folder, name) for name in files if Path(name).suffix in SUFFIXES)


def _scattered(name: str) -> bytes:
    return hashlib.blake2b(name.encode()).digest()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of `context` bytes with the bytes that follow each, `stride` bytes apart."""

    def __init__(self, text: bytes, context: int, stride: int | None = None) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        self.stride = stride or context

    def __len__(self) -> int:
        return max(0, (len(self.bytes) - 1 - self.context) // self.stride + 1)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Return x_T and y_T, which is x_T moved on by one."""
        start = i * self.stride
        window = self.bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def split(text: bytes, context: int) -> tuple[Windows, Windows]:
    """Return what to train on, and windows from the last part of the text to validate on."""
    cut = int(len(text) * (1 - VALIDATION_PART))
    unseen = text[cut:]
    if len(unseen) <= context:
        raise ValueError(f"{len(text)} bytes of text are too few for windows of {context} bytes")
    stride = max(context, -(-len(unseen) // VALIDATION_WINDOWS_MAX))  # few, from all of it
    return Windows(text[:cut], context), Windows(unseen, context, stride)
