"""Checkpoints that are there whole or not at all, and that open at any world size.

Needs neither torch nor a running job: `open_latest(["ckpt-dir", "s3://bucket/job"])` gives the
newest usable checkpoint, and its `read` the bytes of any rows of any tensor, from the nearest copy
that passes its checksums. The format is documented in docs/format.md.
"""

from __future__ import annotations

from ckpt.errors import (
    CheckpointError,
    Conflict,
    Corrupt,
    Fatal,
    Misconfigured,
    NotFound,
    Retryable,
)
from ckpt.opening import open_checkpoint, open_latest
from ckpt.reader import Checkpoint, ReadProblem
from ckpt.slices import TensorInfo, TensorSlice

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Conflict",
    "Corrupt",
    "Fatal",
    "Misconfigured",
    "NotFound",
    "ReadProblem",
    "Retryable",
    "TensorInfo",
    "TensorSlice",
    "open_checkpoint",
    "open_latest",
]
