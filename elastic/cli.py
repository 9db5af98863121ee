"""The `elastic` command: run a script, look at a run from another shell, end it.

Errors are one sentence on standard error; `--debug` adds the traceback. Exit codes are those of
`elastic.errors.ExitCode`. The options of `elastic run` are the rows of the configuration's table.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console as RichConsole
from rich.table import Table

from elastic import config as configuration
from elastic import render, status
from elastic.config_fields import FIELDS, Field, NotAllowed, endpoints
from elastic.errors import (
    ElasticError,
    ExitCode,
    Misconfigured,
    RunFailed,
    ended_by,
    exit_code_of,
    meaning,
)
from elastic.events import EventTail, read_events
from elastic.script import run_module, run_script

if TYPE_CHECKING:
    from elastic.audit import Report

_FOLLOW_PAUSE_S = 0.1


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and leave with its exit code."""
    try:
        code = commands.main(arguments, prog_name="elastic", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(int(ExitCode.MISCONFIGURED))
    except click.ClickException as error:
        click.echo(f"everstep: {' '.join(error.format_message().split())}", err=True)
        sys.exit(int(ExitCode.MISCONFIGURED))
    except click.Abort:
        sys.exit(ended_by(2))
    sys.exit(code if isinstance(code, int) else 0)


class _Commands(click.Group):
    """A group that turns our errors into one sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except ElasticError as error:
            if ctx.meta.get("elastic.debug"):
                raise
            click.echo(f"everstep: {error}", err=True)
            ctx.exit(exit_code_of(error))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def commands(ctx: click.Context, debug: bool) -> None:  # noqa: FBT001 - click passes options by position
    """Run training that keeps its steps, and look after it."""
    ctx.meta["elastic.debug"] = debug


# -- run -----------------------------------------------------------------------------------------


def _option(field: Field) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    text = configuration.field_docs().get(field.name, "")
    first = text.split(". ")[0].rstrip(".").replace("`", "")
    default = configuration.shown(field.name, configuration.default_of(field.name))
    if field.is_switch:
        return click.option(
            f"{field.flag}/--no-{field.flag[2:]}",
            field.name,
            default=None,
            help=f"{first}. [{default}]",
        )
    return click.option(field.flag, field.name, metavar=field.metavar, help=f"{first}. [{default}]")


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for field in reversed(FIELDS):
        function = _option(field)(function)
    return function


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@commands.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    help="Run SCRIPT; its own elastic.run() takes these options over what the script says.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what was resolved and from where; start nothing."
)
@click.option("--module", is_flag=True, help="SCRIPT is a module, run as by python -m.")
@_as_json
@_options
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(  # noqa: PLR0913 - one for each option that is not a configuration field
    script: str,
    arguments: tuple[str, ...],
    dry_run: bool,  # noqa: FBT001 - click passes options by position
    module: bool,  # noqa: FBT001 - as above
    as_json: bool,  # noqa: FBT001 - as above
    **options: Any,
) -> None:
    """Run a script in this process as `python SCRIPT` would."""
    given = {name: value for name, value in options.items() if value is not None}
    # Not `import elastic.run`: the name of the package's attribute is the callable module.
    caller = importlib.import_module("elastic.run")
    caller.configure(given, dry_run=dry_run, as_json=as_json)
    run_main = _prepare(script, arguments, module=module)
    try:
        run_main()
    except (RunFailed, Misconfigured) as error:
        caller.report(error, trace=_beyond_here(error.__traceback__))
        raise SystemExit(exit_code_of(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(ended_by(2)) from None
    except Exception as error:  # noqa: BLE001 - shown as the interpreter shows it, without our frames
        sys.excepthook(type(error), error, _beyond_here(error.__traceback__))
        raise SystemExit(1) from None
    if not caller.was_called():
        raise Misconfigured(
            f"{script} ended without calling elastic.run()",
            kind="never-called",
            hint="call elastic.run(train, ...) at its top level, on every path",
        )


def _prepare(script: str, arguments: tuple[str, ...], *, module: bool) -> Callable[[], None]:
    """Make this process look as if python had been given the script, and return its start."""
    if module:
        sys.path[:] = [os.getcwd(), *sys.path]
        sys.argv[:] = [script, *arguments]
        return lambda: run_module(script)
    path = Path(script).resolve()
    if not path.is_file():
        raise Misconfigured(f"there is no script {script}", kind="no-script", hint="check the path")
    sys.path[:] = [str(path.parent), *sys.path]
    sys.argv[:] = [script, *arguments]
    return lambda: run_script(str(path))


def _beyond_here(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the user's own file."""
    ours = {__file__, importlib.import_module("elastic.script").__file__}
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in ours
        or trace.tb_frame.f_code.co_filename.startswith("<frozen runpy>")
    ):
        trace = trace.tb_next
    return trace


# -- looking ------------------------------------------------------------------------------------


def _servers(
    _ctx: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...]:
    try:
        return endpoints(value) if value else ()
    except NotAllowed as error:
        raise click.BadParameter(str(error)) from None


_etcd = click.option(
    "--etcd",
    metavar="HOST:PORT,...",
    callback=_servers,
    help="Ask these servers about the job of that name, from any host.",
)


@commands.command("status")
@_as_json
@_etcd
@click.argument("job")
def status_command(job: str, etcd: tuple[str, ...], as_json: bool) -> None:  # noqa: FBT001 - as above
    """Show what JOB (a run directory, a checkpoint directory, or a name) is doing."""
    if etcd:
        found = {"running": True, "run_dir": None, **status.read_store(etcd, job)}
        found["running"] = found["result"] is None
    else:
        found = _status_here(status.find_run(job))
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show_status(found)


def _status_here(run_dir: Path) -> dict[str, Any]:
    here = {"running": False, "run_dir": str(run_dir.resolve())}
    if status.is_running(run_dir):
        with contextlib.suppress(Misconfigured):  # it may have ended between the two questions
            return {**here, **status.ask(run_dir, "/status"), "running": True}
    result = status.last_result(run_dir)
    if result is not None:
        return {**here, **result}
    if status.is_running(run_dir):
        return {**here, "running": True, **status.ask(run_dir, "/status")}
    return {**here, "cause": "the agent ended without writing a result (was it killed?)"}


def _show_status(found: dict[str, Any]) -> None:
    console = RichConsole(highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False)

    if not found["running"]:
        result = found.get("result") or found
        code = result.get("exit_code")
        how = "ended" if code is None else f"ended with exit code {code} ({meaning(code)})"
        say(f"{how}: {result.get('cause') or 'done'}" if code != 0 else how)
        if found["run_dir"] is not None:
            say(f"step {result.get('step')}  run directory {found['run_dir']}")
        return
    say(
        f"job {found.get('job')}  {found.get('phase')}  generation {found.get('generation')}"
        + (f"  step {found['step']}" if "step" in found else "")
        + (f"  committed {found['committed_step']}" if "committed_step" in found else "")
    )
    if found.get("reason"):
        say(str(found["reason"]))
    if found.get("last_log"):
        say(render.values(found["last_log"]))
    console.print(_world_table([*(found.get("world") or []), *(found.get("waiting") or [])]))
    if "failures" in found:
        say(f"failures {found['failures']}  reshapes {found.get('reshapes')}")
    saves = found.get("saves") or {}
    if saves.get("last_committed_step"):
        say(f"last checkpoint: step {saves['last_committed_step']}")
    if saves.get("last_error"):
        say(f"last save failed: {saves['last_error']}")


def _world_table(rows: list[dict[str, Any]]) -> Table:
    cells = ("rank", "worker_id", "node", "pid", "state", "step", "committed")
    shown = [cell for cell in cells if any(row.get(cell) is not None for row in rows)]
    table = Table(*(cell.replace("_id", "") for cell in shown), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*("-" if row.get(cell) is None else str(row[cell]) for cell in shown))
    return table


@commands.command("events")
@_as_json
@click.option("--name", "names", multiple=True, help="Only events whose name begins so.")
@click.option("--worker", help="Only events of this worker: its id or its slot.")
@click.option("--follow", is_flag=True, help="Go on until the run ends.")
@click.argument("job")
def events_command(
    job: str,
    names: tuple[str, ...],
    worker: str | None,
    follow: bool,  # noqa: FBT001 - as above
    as_json: bool,  # noqa: FBT001 - as above
) -> None:
    """Print the events of JOB, of all its processes, in the order of their time."""
    run_dir = status.find_run(job)

    def wanted(record: dict[str, Any]) -> bool:
        if names and not any(str(record["event"]).startswith(name) for name in names):
            return False
        worker_id = str(record.get("worker_id") or "")
        if worker is None:
            return True
        return worker_id.startswith(worker) or render.worker_name(worker_id) == f"worker {worker}"

    def show(records: list[dict[str, Any]]) -> None:
        for record in records:
            if wanted(record):
                click.echo(json.dumps(record) if as_json else render.full_line(record))

    try:
        if not follow:
            show(read_events(run_dir))
            return
        tail = EventTail(run_dir)
        while True:
            running = status.is_running(run_dir)
            show(tail.read())
            if not running:
                return
            time.sleep(_FOLLOW_PAUSE_S)
    except BrokenPipeError:
        # The reader has seen enough; what the interpreter still holds must not fail on its way.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@commands.command("audit")
@_as_json
@click.argument("job")
def audit_command(job: str, as_json: bool) -> None:  # noqa: FBT001 - as above
    """Prove from the events of JOB that every sample of every epoch is in exactly one step.

    Exit code 1 if it is not so.
    """
    from elastic.audit_runs import audit_job  # NumPy is for this command alone

    report, runs = audit_job(job)
    if as_json:
        epochs = [{**asdict(epoch), "whole": epoch.whole} for epoch in report.epochs]
        answer = {**asdict(report), "epochs": epochs, "ok": report.ok, "runs": [*map(str, runs)]}
        click.echo(json.dumps(answer))
    else:
        _show_audit(report, len(runs))
    sys.exit(int(ExitCode.DONE if report.ok else ExitCode.ANSWER_IS_NO))


def _show_audit(report: Report, num_runs: int) -> None:
    table = Table("loader", "epoch", "steps", "samples", "proved", box=None, pad_edge=False)
    for each in report.epochs:
        of = "?" if each.samples_of_epoch is None else each.samples_of_epoch
        table.add_row(
            str(each.loader),
            str(each.epoch),
            f"{each.steps} of {each.steps_of_epoch}",
            f"{each.samples} of {of}",
            each.proved,
        )
    console = RichConsole(highlight=False, soft_wrap=True)
    console.print(table)
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    lost = f"; {report.superseded} more were done behind a checkpoint that was gone back to"
    console.print(
        f"steps {report.first_step} to {report.last_step} of {runs}"
        + (lost if report.superseded else ""),
        markup=False,
    )
    for problem in report.problems:
        console.print(f"wrong: {problem}", markup=False)
    if report.ok:
        console.print("every sample counts once", markup=False)


# -- ending -------------------------------------------------------------------------------------


@commands.command("stop")
@click.option("--now", is_flag=True, help="Do not wait for an agreed step.")
@_as_json
@_etcd
@click.argument("job")
def stop_command(
    job: str,
    etcd: tuple[str, ...],
    now: bool,  # noqa: FBT001 - as above
    as_json: bool,  # noqa: FBT001 - as above
) -> None:
    """End JOB on all its nodes after an agreed step, saving if it has a place to save to."""
    if etcd:
        if now:
            raise Misconfigured(
                "--now is for the agent itself, not for its store",
                kind="bad-value",
                hint="leave out --etcd, on a host of the job",
            )
        status.stop_by_store(etcd, job)
        _asked("stop", {"job": job}, as_json=as_json)
        return
    _ask_agent("stop", job, {"now": now}, as_json=as_json)


@commands.command("drain")
@_as_json
@click.argument("job")
def drain_command(job: str, as_json: bool) -> None:  # noqa: FBT001 - as above
    """Have this host leave JOB; the other hosts go on."""
    _ask_agent("drain", job, {}, as_json=as_json)


@commands.command("save")
@_as_json
@click.argument("job")
def save_command(job: str, as_json: bool) -> None:  # noqa: FBT001 - as above
    """Ask JOB for a checkpoint of its next step."""
    _ask_agent("save", job, {}, as_json=as_json)


def _ask_agent(what: str, job: str, body: dict[str, Any], *, as_json: bool) -> None:
    run_dir = status.find_run(job)
    status.ask(run_dir, f"/{what}", body=body)
    _asked(what, {"run_dir": str(run_dir.resolve())}, as_json=as_json)


def _asked(what: str, facts: dict[str, Any], *, as_json: bool) -> None:
    click.echo(json.dumps({"asked": what, **facts}) if as_json else f"asked to {what}")


if __name__ == "__main__":
    main()
