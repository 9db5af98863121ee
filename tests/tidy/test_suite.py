"""The rules of the suite itself: run on small suites that break them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import conftest
from tests.tidy.house import ROOT, project

pytestmark = pytest.mark.integration


def run_suite(tmp_path, code, allowed=""):
    """Run one test file under our conftest, in a folder of its own; return exit code and output."""
    folder = tmp_path / "tests" / "integration"
    folder.mkdir(parents=True)
    (tmp_path / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "tests" / "allowed_skips.txt").write_text(allowed)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  integration\n  allow_leak\n")
    (folder / "test_it.py").write_text(code)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return result.returncode, result.stdout


SKIPS = """
import pytest
def test_runs():
    pass
@pytest.mark.skip(reason="the moon is full")
def test_skips():
    pass
"""
SKIPS_WHOLE = 'import pytest\npytest.skip("the moon is full", allow_module_level=True)\n'
XFAILS = """
import pytest
@pytest.mark.xfail(reason="known")
def test_fails():
    assert False
"""


def test_a_skipped_test_that_is_not_listed_fails_the_run(tmp_path):
    code, output = run_suite(tmp_path, SKIPS)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "NOT LISTED in tests/allowed_skips.txt" in output
    assert "tests/integration/test_it.py::test_skips: the moon is full" in output


@pytest.mark.parametrize("code", [SKIPS, SKIPS_WHOLE], ids=["one test", "a module"])
def test_a_listed_one_is_printed_with_its_reason(tmp_path, code):
    allowed = "# a comment\ntests/integration/test_it.py* -- the moon is *\n"
    status, output = run_suite(tmp_path, code, allowed)
    assert status in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    assert "the moon is full" in output
    assert "NOT LISTED" not in output


def test_a_listed_test_may_not_skip_for_another_reason(tmp_path):
    allowed = "tests/integration/test_it.py::* -- needs a GPU*\n"
    assert run_suite(tmp_path, SKIPS, allowed)[0] == pytest.ExitCode.TESTS_FAILED


def test_an_expected_failure_is_no_skip(tmp_path):
    code, output = run_suite(tmp_path, XFAILS)
    assert code == pytest.ExitCode.OK
    assert "skipped tests: 0" in output


LEAKS = """
import subprocess, pytest
pytestmark = pytest.mark.integration
def test_leaks():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("started", child.pid)
"""


def test_a_process_left_behind_fails_the_test_that_started_it(tmp_path):
    code, output = run_suite(tmp_path, LEAKS)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "left running: ['sleep 60']" in output
    assert conftest.LEAK_GRACE_S < 10


def test_the_budget_in_the_makefile_is_the_one_that_is_printed():
    comment = (ROOT / "Makefile").read_text().partition("\n\n")[0]
    minutes = [int(m) for m in re.findall(r"^#   .*?\s(\d+) min\s", comment, re.M)]
    shares = dict(re.findall(r"^#   (\S[^\d]*?)\s+(\d+) min\s", comment, re.M))
    assert sum(minutes) == 45
    small = ("unit", "property", "transcripts", "tidy")
    assert sum(conftest.BUDGETS_S[folder] for folder in small) <= 60 * int(shares[", ".join(small)])
    for folder in ("contract", "integration", "chaos"):
        assert conftest.BUDGETS_S[folder] == 60 * int(shares[folder])


def test_ci_runs_what_a_developer_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    commands = [line for line in lines if re.search(r"\bmake\b", line)]
    assert len(commands) == 1
    assert re.fullmatch(r"exec timeout .*\b45m make check test .*", commands[0])


def test_warnings_are_errors_and_names_are_strict():
    settings = project()["tool"]["pytest"]["ini_options"]
    assert settings["filterwarnings"][0] == "error"
    assert settings["xfail_strict"] is True
    assert {"--strict-markers", "-ra"} <= set(settings["addopts"])
