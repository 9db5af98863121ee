"""Everstep: a training run that keeps its steps.

`elastic.run(train, ...)` is the way in. Names are loaded on first use, so that `import elastic`
(in every command, in the agent) brings no torch into the process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.context import Context
    from elastic.errors import (
        ElasticError,
        ExitCode,
        Fatal,
        Fenced,
        Misconfigured,
        Reform,
        Reshaped,
        Retryable,
        RunFailed,
    )
    from elastic.result import RunResult
    from elastic.run import run

_HOMES = {
    "Context": "elastic.context",
    "ElasticError": "elastic.errors",
    "ExitCode": "elastic.errors",
    "Fatal": "elastic.errors",
    "Fenced": "elastic.errors",
    "Misconfigured": "elastic.errors",
    "Reform": "elastic.errors",
    "Reshaped": "elastic.errors",
    "Retryable": "elastic.errors",
    "RunFailed": "elastic.errors",
    "RunResult": "elastic.result",
}

__all__ = [
    "Context",
    "ElasticError",
    "ExitCode",
    "Fatal",
    "Fenced",
    "Misconfigured",
    "Reform",
    "Reshaped",
    "Retryable",
    "RunFailed",
    "RunResult",
    "run",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name == "run":
        # The module itself, which can be called: importing it anywhere puts it here anyway.
        return importlib.import_module("elastic.run")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
