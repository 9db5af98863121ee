"""House rules of the suite, held by the suite itself.

- Every skipped test is printed with its reason, and one that `tests/allowed_skips.txt` does not
  list fails the run: a test that silently stopped running protects nothing.
- Whatever a test starts is gone when it ends. Processes carry the name of the test that started
  them in their environment (pytest sets it), so a process left behind names its test.
- The time of each folder is printed beside its part of the budget in the Makefile.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"
SESSION_MARK = "PYTEST_EVERSTEP_SESSION"  # in the environment of all that this run starts
BUDGETS_S = {  # as in the Makefile
    "unit": 240,
    "property": 120,
    "transcripts": 20,
    "tidy": 90,
    "contract": 240,
    "integration": 900,
    "chaos": 360,
}
LEAK_GRACE_S = 5.0


@dataclass
class Tally:
    """What this run has seen so far."""

    skips: dict[str, str] = field(default_factory=dict)
    folder_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unlisted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


TALLY = Tally()


def allowed_skips(text: str) -> list[tuple[str, str]]:
    """Return (pattern of test ids, pattern of reasons) for each line `ids -- reason`."""
    lines = [line.strip() for line in text.splitlines()]
    rules = [line for line in lines if line and not line.startswith("#")]
    return [
        (ids.strip(), reason.strip()) for ids, _, reason in (r.partition(" -- ") for r in rules)
    ]


def unlisted_skips(skips: dict[str, str], rules: list[tuple[str, str]]) -> list[str]:
    """Return the ids of skipped tests that no rule allows for that reason."""
    return [
        test
        for test, reason in skips.items()
        if not any(
            fnmatch.fnmatchcase(test, ids) and fnmatch.fnmatchcase(reason, why)
            for ids, why in rules
        )
    ]


def _note_skip(report: pytest.CollectReport | pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        TALLY.skips[report.nodeid] = reason.removeprefix("Skipped: ")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)
    parts = report.nodeid.split("/")
    TALLY.folder_s[parts[1] if len(parts) > 2 else "."] += report.duration


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    TALLY.unlisted = unlisted_skips(TALLY.skips, allowed_skips(ALLOWED_SKIPS.read_text()))
    if TALLY.unlisted and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    write = terminalreporter.write_line
    terminalreporter.section("time by folder")
    for folder, spent_s in sorted(TALLY.folder_s.items()):
        budget_s = BUDGETS_S.get(folder)
        write(f"{folder:<14}{spent_s:7.1f} s" + (f" of {budget_s} s" if budget_s else ""))
    for note in TALLY.notes:
        write(f"note: {note}")
    terminalreporter.section(f"skipped tests: {len(TALLY.skips)}")
    for test, reason in TALLY.skips.items():
        mark = "NOT LISTED in tests/allowed_skips.txt: " if test in TALLY.unlisted else ""
        write(f"{mark}{test}: {reason}", red=bool(mark))


@pytest.fixture
def notes() -> list[str]:
    """Lines to be printed at the end of the run: worth a look, no failure."""
    return TALLY.notes


@pytest.fixture(scope="session", autouse=True)
def _interrupts_reach_children():
    """Undo what a shell does to a job in the background: it and all its children ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _session_mark():
    os.environ[SESSION_MARK] = str(os.getpid())
    yield
    os.environ.pop(SESSION_MARK, None)


@pytest.fixture(autouse=True)
def _no_process_left(request: pytest.FixtureRequest, _session_mark: None):
    yield
    if request.node.get_closest_marker("integration") is None:
        return
    if request.node.get_closest_marker("allow_leak") is not None:
        return
    deadline_s = time.monotonic() + LEAK_GRACE_S
    time.sleep(0.02)  # a process in the middle of its exec shows no environment
    while (left := _started_by(request.node.nodeid)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    if left:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"left running: {list(left.values())}", pytrace=False)


def _started_by(nodeid: str) -> dict[int, str]:
    """Return pid and command line of living processes that this test of this run started."""
    session = f"{SESSION_MARK}={os.getpid()}".encode()
    test = f"PYTEST_CURRENT_TEST={nodeid} (call)".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue  # ended meanwhile, or another user's
        if session in environment and test in environment and int(process.name) != os.getpid():
            found[int(process.name)] = command
    return found
