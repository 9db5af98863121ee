"""What workers are told to run: found by kind, refused in a sentence, entered like the caller."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from elastic import script
from elastic.errors import Misconfigured
from elastic.script import ScriptSpec, describe, enter, load_function
from tests.tidy.house import ROOT


def train(ctx, steps=1, *, lr=0.1):
    return ctx, steps, lr


async def train_async(ctx):
    return ctx


def train_generator(ctx):
    yield ctx


class Trainer:
    def train(self, ctx):
        return ctx

    @staticmethod
    def static(ctx):
        return ctx

    def __call__(self, ctx):
        return ctx


def wrapped(fn):
    @functools.wraps(fn)
    def inner(ctx):
        return fn(ctx)

    return inner


@wrapped
def decorated(ctx):
    return ctx


def bare(fn):
    def inner(ctx):
        return fn(ctx)

    return inner


@bare
def decorated_carelessly(ctx):
    return ctx


shadowed = train


def made_inside():
    def inner(ctx):
        return ctx

    return inner


short = lambda ctx: ctx  # noqa: E731 - the case under test


# -- refusals -------------------------------------------------------------------------------------

REMEDY = "put train in a file"


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (made_inside(), ["made_inside.inner is made inside another function", REMEDY]),
        (short, ["a lambda", REMEDY]),
        (decorated_carelessly, ["made inside another function", REMEDY]),
        (functools.partial(train, steps=3), ["functools.partial", "args= and kwargs="]),
        (Trainer().train, ["not a plain function", REMEDY]),
        (Trainer(), ["not a plain function", REMEDY]),
        (Trainer, ["not a plain function", REMEDY]),
        (print, ["not a plain function"]),
        ("train", ["'train' is not a plain function"]),
        (None, ["None is not a plain function"]),
        (train_async, ["async function", "ordinary function"]),
        (train_generator, ["generator", "ordinary function"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", str(value)[:20]),
)
def test_what_a_worker_could_not_find_is_refused_in_one_sentence(fn, says):
    with pytest.raises(Misconfigured) as caught:
        describe(fn)
    assert [part for part in says if part not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_a_name_that_means_something_else_by_now_is_refused(monkeypatch):
    original = train
    monkeypatch.setitem(globals(), "train", decorated)
    with pytest.raises(Misconfigured, match="is not what module"):
        describe(original)


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((1, 2), {}, "too many positional"),
        ((), {"learning_rate": 1}, "learning_rate"),
        ((), {"ctx": 1}, "ctx"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_any_process_starts(args, kwargs, says):
    with pytest.raises(Misconfigured, match="cannot be called with ctx") as caught:
        describe(train, args, kwargs)
    assert says in str(caught.value)


def test_arguments_of_a_function_must_be_plain():
    with pytest.raises(Misconfigured, match=r"kwargs\['lr'\] is a builtins.object"):
        describe(train, (), {"lr": object()})


@pytest.mark.parametrize("fn", [train, decorated, Trainer.static])
def test_functions_of_a_module_are_found_again(fn):
    spec = ScriptSpec.from_dict(json.loads(json.dumps(describe(fn).to_dict())))
    assert spec.kind == "function"  # pytest is the main program, and no worker should run that
    assert load_function(spec) is fn


# -- which main program ---------------------------------------------------------------------------


def as_main(monkeypatch, **attributes):
    main = types.ModuleType("__main__")
    vars(main).update(attributes)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def of_main(main, **attributes):
    vars(main).update(attributes)
    exec("def train(ctx): pass", vars(main))
    return main.train


def test_a_notebook_is_refused(monkeypatch, tmp_path):
    file = tmp_path / "cell.py"
    file.touch()
    main = as_main(monkeypatch, get_ipython=print, __file__=str(file))
    with pytest.raises(Misconfigured, match=f"a notebook, where workers.*; {REMEDY}"):
        describe(of_main(main))


def test_an_installed_program_is_not_what_workers_run(monkeypatch):
    main = as_main(monkeypatch, __file__=pytest.__file__)
    with pytest.raises(Misconfigured, match="program of this installation"):
        describe(of_main(main))


PROGRAM = """\
import json, sys
from elastic.errors import Misconfigured
from elastic.script import describe

class Config: pass

def train(ctx, config=None): pass

if __name__ == "__main__":
    try:
        print(json.dumps(describe(train, (), {"config": Config()}).to_dict()))
    except Misconfigured as error:
        print(json.dumps({"refused": str(error)}))
"""


def run_python(*arguments, cwd, stdin=None):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        input=stdin,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def package(tmp_path):
    (tmp_path / "pkg").mkdir()
    for name in ("__init__.py", "prog.py", "__main__.py"):
        (tmp_path / "pkg" / name).write_text("" if name == "__init__.py" else PROGRAM)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


@pytest.mark.integration
def test_each_way_to_start_python_has_its_kind(package):
    script_run = run_python("train.py", "--lr", "3", cwd=package)
    assert script_run["kind"] == "script"
    assert script_run["path"] == str(package / "train.py")
    assert script_run["argv"] == ["train.py", "--lr", "3"]
    assert script_run["cwd"] == str(package)
    assert script_run["args"] is None  # the script makes its own, so they may be anything
    module_run = run_python("-m", "pkg.prog", cwd=package)
    assert (module_run["kind"], module_run["module"]) == ("module", "pkg.prog")
    package_run = run_python("-m", "pkg", cwd=package)
    assert (package_run["kind"], package_run["module"]) == ("module", "pkg.__main__")
    for arguments, stdin in ((["-c", PROGRAM], None), (["-"], PROGRAM)):
        refused = run_python(*arguments, cwd=package, stdin=stdin)["refused"]
        assert refused.endswith(
            f"standard input or the command line, where workers cannot find it; {REMEDY}"
        )


@pytest.mark.integration
def test_a_spawned_child_that_imports_the_script_starts_no_run(tmp_path):
    (tmp_path / "unguarded.py").write_text(
        "import multiprocessing, sys\n"
        "import elastic\n"
        "def train(ctx): pass\n"
        "def child(): pass\n"
        "if __name__ == '__mp_main__':\n"
        "    elastic.run(train)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, "unguarded.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode != 0
    assert 'put the call under if __name__ == "__main__":' in done.stderr
    assert not (tmp_path / ".everstep").exists()


# -- entering -------------------------------------------------------------------------------------


@pytest.fixture
def in_a_worker(monkeypatch, tmp_path):
    """What `enter` changes of a process, put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return tmp_path


def spec_of(kind, path="", module="__main__", qualname="train", **more):
    fields = {"argv": ("prog", "--x"), "cwd": str(Path.cwd()), "sys_path": ("/nowhere",), **more}
    return ScriptSpec(kind=kind, path=str(path), module=module, qualname=qualname, **fields)


def test_a_script_is_entered_as_main_with_the_callers_arguments(in_a_worker):
    path = in_a_worker / "prog.py"
    path.write_text(
        "import sys, pickle\n"
        "class Here: pass\n"
        "again = pickle.loads(pickle.dumps(Here)) is Here\n"
        "seen = [__name__, sys.argv, sys.path[0], __file__, again]\n"
    )
    enter(spec_of("script", path), call=pytest.fail)
    assert sys.modules["__main__"].seen == [
        "__main__",
        ["prog", "--x"],
        "/nowhere",
        str(path),
        True,
    ]


def test_a_function_is_called_with_its_arguments(in_a_worker):
    calls = []
    spec = describe(train, (3,), {"lr": 0.5})
    enter(spec, call=lambda fn, args, kwargs: calls.append((fn, args, kwargs)))
    assert calls == [(train, (3,), {"lr": 0.5})]


def test_a_function_is_found_by_its_file_when_its_module_has_no_importable_name(in_a_worker):
    path = in_a_worker / "odd name.py"
    path.write_text("def train(ctx): return 'found'\n")
    spec = spec_of("function", path, module="no_such.module_here", args=[], kwargs={})
    assert load_function(spec)(None) == "found"
    del sys.modules["no_such.module_here"]


def test_a_function_that_is_nowhere_is_named(in_a_worker):
    with pytest.raises(Misconfigured, match=r"cannot import no_such\.module"):
        load_function(spec_of("function", "/nowhere.py", module="no_such.module"))
    with pytest.raises(Misconfigured, match="has no function nothing"):
        load_function(spec_of("function", module=__name__, qualname="nothing"))


def test_an_import_error_inside_the_users_module_is_the_users(in_a_worker):
    (in_a_worker / "needs_more.py").write_text("import surely_not_installed\n")
    sys.path.insert(0, str(in_a_worker))
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load_function(spec_of("function", module="needs_more"))


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        (spec_of("script", "/a/train.py"), "train.py"),
        (spec_of("module", module="pkg.prog"), "pkg.prog"),
        (spec_of("function", module="pkg.prog"), "pkg.prog:train"),
    ],
)
def test_a_person_reads_a_short_name(spec, shown):
    assert spec.shown == shown


def test_the_search_path_has_no_entry_that_depends_on_the_directory(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", "lib", "/abs", ""])
    assert script._search_path() == (str(Path.cwd()), str(Path.cwd() / "lib"), "/abs")
