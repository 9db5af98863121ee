"""The `elastic` command: run a script, look at a run from another shell, end it.

Errors are one sentence on standard error; `--debug` adds the traceback. Exit codes are those of
`elastic.errors.ExitCode`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console as RichConsole
from rich.table import Table

from elastic import config as configuration
from elastic import render, status
from elastic.config_fields import FIELDS, Field
from elastic.errors import ElasticError, Misconfigured, RunFailed, exit_code_of
from elastic.events import EventTail, read_events
from elastic.script import run_script

_FOLLOW_PAUSE_S = 0.1


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
def main(ctx: click.Context, debug: bool) -> None:  # noqa: FBT001 - click passes options by position
    """Run training that keeps its steps, and look after it."""
    ctx.meta["elastic.debug"] = debug


# -- run -----------------------------------------------------------------------------------------


def _option(field: Field) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    text = " ".join(configuration.field_docs().get(field.name, "").split())
    first = text.split(". ")[0].rstrip(".")
    shown = configuration.shown(configuration.default_of(field.name))
    if field.is_switch:
        return click.option(
            f"{field.flag}/--no-{field.flag[2:]}",
            field.name,
            default=None,
            help=f"{first}. [{shown}]",
        )
    return click.option(
        field.flag, field.name, metavar=field.metavar or "VALUE", help=f"{first}. [{shown}]"
    )


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for field in reversed(FIELDS):
        function = _option(field)(function)
    return function


@main.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    help="Run SCRIPT; its own elastic.run() takes these options over what the script says.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what was resolved and from where; start nothing."
)
@_options
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    script: str,
    arguments: tuple[str, ...],
    dry_run: bool,  # noqa: FBT001 - click passes options by position
    **options: Any,
) -> None:
    """Run a script in this process as `python SCRIPT` would."""
    given = {name: value for name, value in options.items() if value is not None}
    # Not `import elastic.run`: the name of the package's attribute is the callable module.
    run_module = importlib.import_module("elastic.run")
    run_module.configure(given, dry_run=dry_run)
    path = str(Path(script).resolve())
    sys.argv[:] = [script, *arguments]
    sys.path[:] = [os.path.dirname(path), *sys.path]
    try:
        run_script(path)
    except (RunFailed, Misconfigured) as error:
        run_module.report(error, debug=bool(given.get("debug")), trace=error.__traceback__)
        raise SystemExit(exit_code_of(error)) from None


# -- looking ------------------------------------------------------------------------------------

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@main.command("status")
@_as_json
@click.argument("job")
def status_command(job: str, as_json: bool) -> None:  # noqa: FBT001 - as above
    """Show what JOB (a run directory, a checkpoint directory, or a name) is doing."""
    run_dir = status.find_run(job)
    if status.is_running(run_dir):
        found = {"running": True, "run_dir": str(run_dir), **status.ask(run_dir, "/status")}
    else:
        found = {"running": False, "run_dir": str(run_dir), **(status.last_result(run_dir) or {})}
        if len(found) == 2:
            found["cause"] = "the agent ended without writing a result (was it killed?)"
    if as_json:
        click.echo(json.dumps(found))
        return
    _show_status(found)


def _show_status(found: dict[str, Any]) -> None:
    console = RichConsole(highlight=False)
    if not found["running"]:
        code = found.get("exit_code", "unknown")
        console.print(f"ended with exit code {code}: {found.get('cause') or 'done'}")
        console.print(f"step {found.get('step')}, run directory {found['run_dir']}")
        return
    console.print(
        f"job {found.get('job')}  {found.get('phase')}  generation {found.get('generation')}  "
        f"step {found.get('step')}  committed {found.get('committed_step')}"
    )
    if found.get("reason"):
        console.print(str(found["reason"]))
    table = Table("rank", "worker", "node", "pid", "state", "step", "committed")
    for row in found.get("world") or []:
        cells = ("rank", "worker_id", "node", "pid", "state", "step", "committed")
        table.add_row(*(str("" if row.get(key) is None else row[key]) for key in cells))
    console.print(table)
    saves = found.get("saves") or {}
    console.print(
        f"failures {found.get('failures')}  reshapes {found.get('reshapes')}  "
        f"last checkpoint {saves.get('last_committed_step')}"
        + (f"  save error: {saves['last_error']}" if saves.get("last_error") else "")
    )


@main.command("events")
@_as_json
@click.option("--name", "names", multiple=True, help="Only events whose name begins so.")
@click.option("--worker", help="Only events of this worker (id, or its beginning).")
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
        return worker is None or str(record.get("worker_id") or "").startswith(worker)

    def show(records: list[Any]) -> None:
        for record in records:
            if wanted(record):
                click.echo(json.dumps(record) if as_json else render.full_line(record))

    with contextlib.suppress(BrokenPipeError):
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


# -- ending -------------------------------------------------------------------------------------


@main.command("stop")
@click.option("--now", is_flag=True, help="Do not wait for an agreed step.")
@click.argument("job")
def stop_command(job: str, now: bool) -> None:  # noqa: FBT001 - as above
    """End JOB on all its nodes after an agreed step, saving if it has a place to save to."""
    status.ask(status.find_run(job), "/stop", body={"now": now})
    click.echo("asked to stop")


@main.command("drain")
@click.argument("job")
def drain_command(job: str) -> None:
    """Have this host leave JOB; the other hosts go on."""
    status.ask(status.find_run(job), "/drain", body={})
    click.echo("asked to drain")


@main.command("save")
@click.argument("job")
def save_command(job: str) -> None:
    """Ask JOB for a checkpoint of its next step."""
    status.ask(status.find_run(job), "/save", body={})
    click.echo("asked for a checkpoint")


if __name__ == "__main__":
    main()
