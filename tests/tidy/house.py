"""What the tidy tests read: the modules of this checkout, as text and as syntax trees."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("elastic", "ckpt", "chaos")
PURE = "Pure: no I/O, no clock."


def python_files(*folders):
    """Return the Python files below these folders of the checkout, those that exist."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def shown(path):
    return path.relative_to(ROOT).as_posix()


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree(path):
    return ast.parse(path.read_text(), filename=str(path))


def is_pure(path):
    return (ast.get_docstring(tree(path)) or "").endswith(PURE)


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def contract(name):
    contracts = project()["tool"]["importlinter"]["contracts"]
    (found,) = [c for c in contracts if c["name"] == name]
    return found
