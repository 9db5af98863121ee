"""Files stay readable, packages stay whole, and modules are named for what they hold."""

from __future__ import annotations

import pytest

from tests.tidy.house import ROOT, SHIPPED, module_name, project, python_files, shown

LINES_ASK_WHY = 400
LINES_MAX = 650
SAYS_NOTHING = {"base", "common", "helpers", "manager", "managers", "misc", "util", "utils"}
CODE = python_files(*SHIPPED, "scripts", "train")


def test_no_file_grows_into_the_one_that_knows_everything(notes):
    lines = {shown(path): len(path.read_text().splitlines()) for path in CODE}
    notes += [f"{file} has {n} lines: why?" for file, n in lines.items() if n > LINES_ASK_WHY]
    assert {file: n for file, n in lines.items() if n > LINES_MAX} == {}


def test_every_shipped_folder_is_a_package():
    folders = {path.parent for path in python_files(*SHIPPED)}
    assert [shown(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("package", SHIPPED)
def test_types_are_announced(package):
    assert (ROOT / package / "py.typed").exists()


def test_module_names_say_what_is_inside():
    names = {shown(path): module_name(path).rpartition(".")[2] for path in CODE}
    assert [file for file, name in names.items() if name in SAYS_NOTHING] == []


def test_commands_of_the_wheel_exist():
    scripts = project()["project"]["scripts"]
    missing = [
        target
        for target in scripts.values()
        if not (ROOT / (target.partition(":")[0].replace(".", "/") + ".py")).exists()
    ]
    assert missing == []
