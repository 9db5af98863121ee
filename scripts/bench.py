"""Figures of this machine: `bench.py NAME --json` prints one object with the figures of that name.

Each figure is a time or a ratio measured in one call on one machine, peers beside us; none is a
test. What the keys mean stands at the top of the command's module, such as
scripts/bench_recovery.py; times are in ms unless the key says otherwise. A figure that could not be
taken is null, with a why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from elastic.errors import ElasticError
from scripts import bench_balance, bench_join, bench_recovery, bench_step
from scripts.programs import ProgramFailed, signals_raise

LATER = ("detect", "control", "save", "restore", "torn", "peers", "goodput")
THERE = "recovery, step, join, balance"
MISCONFIGURED = 2
INFRASTRUCTURE = 7


class Names(click.Group):
    """Sub-commands by name; one that is planned but not there says so."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Answer a name that has no figures yet with one sentence and exit code 2."""
        if args and args[0] in LATER:
            print(f"bench: {args[0]} is not there yet; there is: {THERE}", file=sys.stderr)
            ctx.exit(MISCONFIGURED)
        return super().resolve_command(ctx, args)


@click.group(cls=Names)
def main() -> None:
    """Measure figures of this machine."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--runs", type=click.IntRange(1), default=10, show_default=True, help="Kills.")
@click.option("--stops", type=click.IntRange(0), default=3, show_default=True, help="SIGSTOPs.")
@click.option("--workers", type=click.IntRange(2), default=4, show_default=True)
@click.option("--width", type=click.IntRange(8), default=1024, show_default=True)
@click.option("--depth", type=click.IntRange(1), default=10, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Chooses victims and moments.")
@click.option("--peers/--no-peers", default=True, show_default=True)
@click.option("--peer-runs", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Keep the run's events in this directory."
)
def recovery(*, as_json: bool, **given: Any) -> None:
    """Measure what it costs to lose one worker, beside a restart by torchrun."""
    _figures(bench_recovery, bench_recovery.Options(**given), as_json=as_json)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--pairs", type=click.IntRange(1), default=3, show_default=True, help="Runs of each.")
@click.option("--steps", type=click.IntRange(1), default=30, show_default=True, help="Per run.")
@click.option("--virtual-ranks", type=click.IntRange(2), default=12, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=64, show_default=True)
@click.option("--width", type=click.IntRange(8), default=1024, show_default=True)
@click.option("--depth", type=click.IntRange(1), default=10, show_default=True)
def balance(*, as_json: bool, **given: Any) -> None:
    """Measure what a slow worker costs, with an even split and with shares by speed."""
    _figures(bench_balance, bench_balance.Options(**given), as_json=as_json)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--workers", type=click.IntRange(2), multiple=True, default=(2, 3, 4))
@click.option("--torchft/--no-torchft", default=True, show_default=True)
@click.option("--blocks", type=click.IntRange(2), default=7, show_default=True, help="Turns.")
@click.option("--virtual-ranks", type=click.IntRange(2), default=12, show_default=True)
@click.option("--width", type=click.IntRange(8), default=1024, show_default=True)
@click.option("--depth", type=click.IntRange(1), default=10, show_default=True)
def step(*, as_json: bool, **given: Any) -> None:
    """Measure a step beside DDP and DDP with ZeRO, in turns."""
    _figures(bench_step, bench_step.Options(**given), as_json=as_json)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--runs", type=click.IntRange(1), default=10, show_default=True, help="Kills.")
@click.option("--workers", type=click.IntRange(2), default=4, show_default=True)
@click.option("--width", type=click.IntRange(8), default=1024, show_default=True)
@click.option("--depth", type=click.IntRange(1), default=10, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Chooses victims and moments.")
def join(*, as_json: bool, **given: Any) -> None:
    """Measure how a new worker comes in: the pause of the others, and when all is whole."""
    _figures(bench_join, bench_join.Options(**given), as_json=as_json)


def _figures(module: Any, options: Any, *, as_json: bool) -> None:
    say = Console(stderr=True, highlight=False).print
    with signals_raise():
        try:
            result = module.run(options, say)
        except (ProgramFailed, ElasticError) as error:
            print(f"bench: {error}", file=sys.stderr)
            sys.exit(INFRASTRUCTURE)
        except KeyboardInterrupt:
            print("bench: interrupted; everything it started has ended", file=sys.stderr)
            sys.exit(130)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        Console().print(module.table(result))


if __name__ == "__main__":
    main()
