"""House rules that no linter knows."""

from __future__ import annotations

import ast

import pytest

from tests.tidy.house import (
    SHIPPED,
    contract,
    is_pure,
    module_name,
    python_files,
    shown,
    tree,
)

READS_ENVIRONMENT = {
    "elastic/config.py",  # the one reader of settings
    "elastic/agent/exec_child.py",  # hands a program exactly the environment it is told
    "ckpt/service.py",  # hands its own environment on to the process it starts
}
SPEAKS = {  # whatever else has something to say emits an event
    "elastic/cli.py",
    "ckpt/cli.py",
    "chaos/cli.py",
    "elastic/console.py",
    "chaos/s3_server.py",
    "elastic/worker.py",  # a traceback, into the worker's own log
}
MAY_SLEEP = {"tests/support.py", "tests/conftest.py"}
SLEEP_EXCUSE = "# sleep: "  # on the line itself, followed by what is simulated


def dotted(node):
    """Return `a.b.c` for such an expression, else an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def uses(path, names):
    """Return the lines on which one of these dotted names is used."""
    expressions = (n for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute | ast.Name))
    return [f"{shown(path)}:{n.lineno}" for n in expressions if dotted(n) in names]


def test_the_list_of_pure_modules_is_the_one_that_docstrings_promise():
    promised = {module_name(path) for path in python_files(*SHIPPED) if is_pure(path)}
    assert promised == set(contract("pure")["source_modules"])


def test_the_promise_of_purity_is_spelled_in_one_way():
    close = [
        shown(path)
        for path in python_files(*SHIPPED)
        if not is_pure(path)
        and "pure: no" in " ".join((ast.get_docstring(tree(path)) or "").lower().split())
    ]
    assert close == []


def test_settings_come_from_the_environment_in_one_place():
    readers = {"os.environ", "os.getenv", "os.environb"}
    others = [path for path in python_files(*SHIPPED) if shown(path) not in READS_ENVIRONMENT]
    assert [use for path in others for use in uses(path, readers)] == []


def test_only_commands_and_the_console_print():
    others = [path for path in python_files(*SHIPPED) if shown(path) not in SPEAKS]
    assert [use for path in others for use in uses(path, {"print"})] == []


def sleeps(path):
    """Return the sleeps of a file that give way to nothing: no zero, no excuse on the line."""
    lines = path.read_text().splitlines()
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call) or dotted(node.func) not in {
            "time.sleep",
            "asyncio.sleep",
            "sleep",
        }:
            continue
        gives_way = any(isinstance(a, ast.Constant) and a.value == 0 for a in node.args)
        if not gives_way and SLEEP_EXCUSE not in lines[node.lineno - 1]:
            yield f"{shown(path)}:{node.lineno}"


def test_tests_wait_for_conditions_and_not_for_time():
    files = [path for path in python_files("tests") if shown(path) not in MAY_SLEEP]
    assert [line for path in files for line in sleeps(path)] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import time\ntime.sleep(1)\n", 1),
        ("import asyncio\nasyncio.sleep(0)\n", 0),
        ("import asyncio\nasyncio.sleep(0.1)\n", 1),
        ("import time\ntime.sleep(1)  # sleep: a slow disk\n", 0),
    ],
)
def test_the_rule_on_sleep_itself(tmp_path, monkeypatch, code, found):
    monkeypatch.setattr("tests.tidy.test_rules.shown", str)
    path = tmp_path / "test_x.py"
    path.write_text(code)
    assert len(list(sleeps(path))) == found
