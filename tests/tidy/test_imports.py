"""What a process has in memory is what it needs: seen in a fresh interpreter, not in a graph.

The contracts in pyproject.toml look at import statements; these tests also see what packages run
when they are imported.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tidy.house import ROOT, contract, module_name, python_files

LOADS = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
TORCH_IS_THEIRS = {"elastic.agent.forkserver"}
RUNS_AT_IMPORT = {"elastic.agent.__main__"}


def loaded_by(modules):
    """Return the top-level names that a fresh interpreter has after importing these modules."""
    command = [sys.executable, "-c", LOADS, json.dumps(sorted(modules))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def modules_of(*folders):
    return {module_name(path) for path in python_files(*folders)}


def test_import_elastic_is_light():
    assert not loaded_by(["elastic"]) & {"torch", "grpc", "numpy", "fsspec", "aiohttp"}


def test_the_agents_side_has_no_torch():
    agent = modules_of("elastic/agent", "elastic/membership") - TORCH_IS_THEIRS - RUNS_AT_IMPORT
    assert "torch" not in loaded_by(agent | {"elastic.config", "elastic.errors", "elastic.events"})


def test_checkpoints_are_read_without_torch_and_without_elastic():
    modules = modules_of("ckpt") - {"ckpt.dcp"}
    assert not loaded_by(modules) & {"torch", "elastic", "grpc"}


def test_workers_have_no_grpc():
    step = modules_of("elastic/step")
    assert "grpc" not in loaded_by(step | {"elastic.worker", "elastic.context", "elastic.data"})


@pytest.mark.parametrize("module", contract("pure")["source_modules"])
def test_a_pure_module_stands_in_a_package_that_exists(module):
    assert module in modules_of("elastic", "ckpt", "chaos")


def test_pure_modules_bring_nothing_heavy():
    pure = contract("pure")["source_modules"]
    heavy = {"torch", "grpc", "aiohttp", "fsspec", "s3fs", "structlog", "rich"}
    assert not loaded_by(pure) & heavy
