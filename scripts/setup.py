"""Make the virtual environment of this checkout: all that `make` needs, at pinned versions.

Steps: find a Python of at least 3.11, make `.venv`, install requirements.lock and this project, and
bring an etcd (scripts/fetch_etcd.py). Every step may be repeated; what is there already is kept.
This file runs before anything is installed, so it uses the standard library of any Python 3.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
READY = VENV / ".ready"  # written last: the Makefile looks at its age
# The checkout on sys.path, not a finder behind it: beside that, a folder named ckpt next to a
# user's script (a place for checkpoints) would be imported instead of the package.
BY_PATH = ["--config-settings", "editable_mode=compat"]
PIP_SETTINGS = ["--disable-pip-version-check", "--no-input"]


class SetupError(Exception):
    """A step cannot be done; the message tells a person what to do."""


def main() -> int:
    """Do all steps; say what is being done."""
    if sys.version_info < OLDEST:
        return use_newer_python()
    started_s = time.monotonic()
    try:
        READY.unlink(missing_ok=True)
        pip = make_venv()
        say("installing the pinned packages of requirements.lock (torch is the large one)")
        install(pip, "-r", str(ROOT / "requirements.lock"))
        install(pip, "--no-deps", "--no-build-isolation", *BY_PATH, "--editable", str(ROOT))
        say("looking for etcd")
        run([str(PYTHON), str(ROOT / "scripts" / "fetch_etcd.py")], "no etcd could be had")
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    READY.touch()
    say(f"ready in {time.monotonic() - started_s:.0f} s")
    return 0


def use_newer_python() -> int:
    """Go on with a newer Python when there is one on PATH."""
    for minor in range(20, OLDEST[1] - 1, -1):
        other = shutil.which(f"python3.{minor}")
        if other and subprocess.run([other, "-c", ""], check=False).returncode == 0:
            os.execv(other, [other, __file__])  # noqa: S606
    have = ".".join(str(part) for part in sys.version_info[:3])
    print(
        f"setup: Python 3.11 or newer is needed, this is {have}; "
        "install one, or name it with: make setup PYTHON=/path/to/python3",
        file=sys.stderr,
    )
    return 2


def make_venv() -> list[str]:
    """Make `.venv` when there is none that runs; return the command that is pip for it."""
    if not runs([str(PYTHON), "-c", ""]):
        say(f"making {VENV.name} with Python {sys.version.split()[0]}")
        without = [] if runs([sys.executable, "-c", "import ensurepip"]) else ["--without-pip"]
        run([sys.executable, "-m", "venv", "--clear", *without, str(VENV)], "no venv could be made")
    if runs([str(PYTHON), "-m", "pip", "--version"]):
        return [str(PYTHON), "-m", "pip"]
    outer = [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    if runs([*outer, "--version"]):
        return outer
    raise SetupError("this Python has neither ensurepip nor pip; install python3-venv and repeat")


def install(pip: list[str], *what: str) -> None:
    """Install with pip, which says why when it cannot."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]  # a person watches the downloads, a log not
    run([*pip, "install", *PIP_SETTINGS, *quiet, *what], "pip could not install what is pinned")


def run(command: list[str], otherwise: str) -> None:
    """Run a step in the checkout; raises SetupError when it fails."""
    result = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        raise SetupError(f"{otherwise} (exit code {result.returncode}); the reason stands above")


def runs(command: list[str]) -> bool:
    """Return whether a command can be run and succeeds."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, cwd=ROOT
        )
    except OSError:
        return False
    return done.returncode == 0


def say(what: str) -> None:
    """Print one line of progress."""
    print(f"setup: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
