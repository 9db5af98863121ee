"""The lock is complete, exact, and says nothing of the machine it was made on."""

from __future__ import annotations

import re
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tidy.house import ROOT, project

PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.]*")
OF_TORCH = {"cuda", "nvidia", "triton"}  # torch pins the libraries of its own build itself


def pinned():
    lines = [line.strip() for line in (ROOT / "requirements.lock").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def versions():
    return {canonicalize_name(n): v for n, _, v in (pin.partition("==") for pin in pinned())}


def requirements():
    whole = project()
    extras = whole["project"]["optional-dependencies"].values()
    texts = [*whole["project"]["dependencies"], *whole["dependency-groups"]["dev"]]
    return [Requirement(text) for text in [*texts, *(t for extra in extras for t in extra)]]


def test_every_line_is_one_exact_public_version():
    assert [line for line in pinned() if not PIN.fullmatch(line)] == []


def test_no_package_stands_there_twice():
    assert len(versions()) == len(pinned())


def test_what_the_project_asks_for_is_pinned_within_its_range():
    lock = versions()
    wrong = [
        f"{r.name}: {lock.get(canonicalize_name(r.name))} is not {r.specifier}"
        for r in requirements()
        if lock.get(canonicalize_name(r.name)) not in r.specifier
    ]
    assert wrong == []


def test_what_the_pinned_packages_ask_for_is_pinned_too():
    lock = versions()
    missing = set()
    for name in lock:
        for text in metadata.requires(name) or ():
            need = Requirement(text)
            wanted = need.marker is None or need.marker.evaluate({"extra": ""})
            of_torch = name == "torch" and need.name.partition("-")[0] in OF_TORCH
            if wanted and not of_torch and canonicalize_name(need.name) not in lock:
                missing.add(f"{name} needs {need.name}")
    assert missing == set()


def test_this_environment_is_the_locked_one():
    different = {}
    for name, version in versions().items():
        installed = metadata.version(name).partition("+")[0]
        if installed != version:
            different[name] = f"{installed} is installed, {version} is locked: make setup"
    assert different == {}
