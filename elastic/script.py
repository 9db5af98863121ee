"""What the workers have to run: found in the caller, carried as plain values, entered in a worker.

A worker never receives code or pickles. It runs what the caller runs: the same script by its path
as `__main__` (so classes defined there work), the same module as by `python -m`, or, where the
main program is not the user's (pytest, a server), one importable function. In a script or module
the worker's own call of `elastic.run()` then takes over; what stands before it runs in every
worker too, what stands after it only in the caller.

Not carried: anything that exists only in the caller's memory. Closures, lambdas, functions made
inside functions, notebook cells and programs read from standard input are refused, because a
worker that starts later, or on another host, could not find them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import runpy
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from elastic.errors import Misconfigured
from elastic.values import NotPlain, from_plain, to_plain

REMEDY = "put train in a file"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec:
    """What to run, as plain values. `kind`: "script", "module" or "function"."""

    kind: str
    path: str
    argv: tuple[str, ...]
    module: str
    qualname: str
    cwd: str
    sys_path: tuple[str, ...]
    args: Any = None
    kwargs: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "argv": list(self.argv), "sys_path": list(self.sys_path)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Undo `to_dict`."""
        return cls(**{**plain, "argv": tuple(plain["argv"]), "sys_path": tuple(plain["sys_path"])})

    @property
    def shown(self) -> str:
        """What a person calls it: train.py, package.module, or module:function."""
        if self.kind == "script":
            return Path(self.path).name
        return self.module if self.kind == "module" else f"{self.module}:{self.qualname}"


def describe(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> ScriptSpec:
    """Return how a worker comes to run `fn(ctx, *args, **kwargs)`.

    Raises Misconfigured: a worker could not find `fn`, or could not call it with these arguments.
    """
    check_function(fn, args, kwargs or {})
    main = sys.modules.get("__main__")
    kind, path, module = _main_program(main) if main is not None else ("", "", "")
    common: dict[str, Any] = {
        "argv": tuple(sys.argv),
        "qualname": fn.__qualname__,
        "cwd": os.getcwd(),
        "sys_path": _search_path(),
    }
    if kind:
        return ScriptSpec(kind=kind, path=path, module=module, **common)
    if fn.__module__ == "__main__":
        raise Misconfigured(
            f"{fn.__qualname__} stands in {_where(main)}, where workers cannot find it",
            kind="not-importable",
            hint=REMEDY,
        )
    try:
        plain = {
            "args": to_plain(list(args), "args"),
            "kwargs": to_plain(dict(kwargs or {}), "kwargs"),
        }
    except NotPlain as error:
        raise Misconfigured(str(error), kind="not-plain", hint=REMEDY) from None
    home = inspect.getsourcefile(fn) or ""
    return ScriptSpec(kind="function", path=home, module=fn.__module__, **common, **plain)


def check_function(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise Misconfigured unless `fn` is a function of a module that takes these arguments."""
    if isinstance(fn, functools.partial):
        raise Misconfigured(
            "a functools.partial cannot be sent to workers",
            kind="not-a-function",
            hint="pass the function itself, and what it needs as args= and kwargs=",
        )
    if not callable(fn) or not inspect.isfunction(inspect.unwrap(fn)):
        raise Misconfigured(
            f"{fn!r:.80} is not a plain function",
            kind="not-a-function",
            hint=f"{REMEDY}, as a function def train(ctx)",
        )
    qualname = fn.__qualname__
    if "<lambda>" in qualname or "<locals>" in qualname:
        what = "a lambda" if "<lambda>" in qualname else "made inside another function"
        raise Misconfigured(
            f"{qualname.replace('.<locals>', '')} is {what}, and workers cannot find it",
            kind="not-importable",
            hint=REMEDY,
        )
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise Misconfigured(
            f"{qualname} is an async function or a generator, and would do nothing when called",
            kind="not-a-function",
            hint="make it an ordinary function",
        )
    if _look_up(sys.modules.get(fn.__module__), qualname) is not fn:
        raise Misconfigured(
            f"{qualname} is not what module {fn.__module__} has under that name",
            kind="not-importable",
            hint=f"{REMEDY} at the top level of the file, under its own name",
        )
    try:
        inspect.signature(fn).bind(object(), *args, **kwargs)
    except TypeError as error:
        raise Misconfigured(
            f"{qualname} cannot be called with ctx and these arguments: {error}",
            kind="bad-arguments",
            hint="pass all but ctx as args= and kwargs=",
        ) from None


def check_not_importing() -> None:
    """Raise Misconfigured in a child of multiprocessing that is still importing the script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise Misconfigured(
            "elastic.run() was reached while a child process was only importing the script",
            kind="unguarded-main",
            hint='put the call under if __name__ == "__main__":',
        )


def enter(spec: ScriptSpec, call: Callable[..., Any]) -> None:
    """Run in a worker what the caller runs.

    A script or module is run as `__main__`; its own `elastic.run()` has to take over from there.
    For a function, `call(fn, args, kwargs)` is called.
    """
    os.chdir(spec.cwd)
    sys.path[:] = [*spec.sys_path, *(entry for entry in sys.path if entry not in spec.sys_path)]
    sys.argv[:] = spec.argv
    if spec.kind == "script":
        run_script(spec.path)
    elif spec.kind == "module":
        run_module(spec.module)
    else:
        call(load_function(spec), tuple(from_plain(spec.args)), from_plain(spec.kwargs))


def run_script(path: str) -> None:
    """Run a file as `__main__`, as `python path` does; it stays `__main__` afterwards."""
    # Not runpy.run_path: that takes __main__ away again, and classes of the script (in a state
    # that is saved while the interpreter shuts down, in a thread) would lose their module.
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def run_module(name: str) -> None:
    """Run a module as `__main__`, as `python -m name` does."""
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def load_function(spec: ScriptSpec) -> Callable[..., Any]:
    """Return the function of a "function" spec. Raises Misconfigured."""
    try:
        module = importlib.import_module(spec.module)
    except ModuleNotFoundError as error:
        if error.name != spec.module and not spec.module.startswith(f"{error.name}."):
            raise
        module = _module_from_file(spec)
    found = _look_up(module, spec.qualname)
    if not callable(found):
        raise Misconfigured(
            f"module {spec.module} has no function {spec.qualname} in the worker",
            kind="not-importable",
            hint=REMEDY,
        )
    return found  # type: ignore[no-any-return]  # callable() was asked above


def _module_from_file(spec: ScriptSpec) -> ModuleType:
    """Import by path a module that its importer put under a name that cannot be looked up."""
    found = importlib.util.spec_from_file_location(spec.module, spec.path)
    if found is None or found.loader is None or not Path(spec.path).is_file():
        raise Misconfigured(
            f"a worker cannot import {spec.module}", kind="not-importable", hint=REMEDY
        )
    module = importlib.util.module_from_spec(found)
    sys.modules[spec.module] = module
    found.loader.exec_module(module)
    return module


def _main_program(main: ModuleType) -> tuple[str, str, str]:
    """Return (kind, path, module) of the user's own main program, or empty texts."""
    file = getattr(main, "__file__", None)
    if _is_notebook(main) or not file or not Path(file).is_file():
        return "", "", ""
    path = str(Path(file).resolve())
    if not path.endswith(".py") or _is_installed(path):
        return "", "", ""  # a console script, pytest, a server: not what the workers should run
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return "module", path, spec.name
    return "script", path, "__main__"


def _is_notebook(main: ModuleType) -> bool:
    return hasattr(main, "get_ipython") or hasattr(main, "__vsc_ipynb_file__")


def _is_installed(path: str) -> bool:
    roots = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.startswith(os.path.realpath(root) + os.sep) for root in roots if root)


def _where(main: ModuleType | None) -> str:
    if main is None or _is_notebook(main):
        return "a notebook"
    file = getattr(main, "__file__", None)
    if file and Path(file).is_file():
        return f"{Path(file).name}, which is a program of this installation"
    if hasattr(sys, "ps1"):
        return "an interactive session"
    return "a program that was read from standard input or the command line"


def _search_path() -> tuple[str, ...]:
    # An empty entry means the current directory, which in a worker is the caller's as well.
    return tuple(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))


def _look_up(module: ModuleType | None, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
