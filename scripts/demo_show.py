"""What a person sees of the demo while it goes on: news as lines, and one status line below them.

News come from the event files of the run that is shown, with times counted from the fault. Without
a terminal the status line is printed every few seconds instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from elastic.render import worker_name
from scripts.run_facts import TOKENS_KEY, Fault, Record, Recovery
from scripts.runs import Run

DRAW_EVERY_S = 0.2
PRINT_EVERY_S = 5.0
RATE_STEPS = 10
WIDE = 110  # columns that the status line takes with everything in it
HOLD_S = 0.15  # an end is written down when the process is reaped, later than it is noticed
SLOW = ("agree", "unblock", "rebuild", "heal")


class Show:
    """The demo's terminal. Use as a context manager: it leaves the terminal as it was."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._next_at_s = 0.0
        self._steps: list[Record] = []
        self._told: set[tuple[Any, ...]] = set()
        self._held: list[Record] = []
        self._name = ""
        self._total = 0
        self._world = 0
        self._generation = 0
        self.fault: Fault | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def chapter(self, title: str) -> None:
        """Begin a part of the demo."""
        self._release(float("inf"))
        self._live.update("", refresh=self._live.is_started)
        self.console.print(f"\n[bold]{escape(title)}[/]")

    def say(self, text: str, style: str = "") -> None:
        """Print one line of news."""
        self.console.print(f"  {text}", style=style, soft_wrap=True)

    def begin(self, name: str, total: int) -> None:
        """Follow another run from now on."""
        self._name, self._total = name, total
        self._steps, self._told = [], set()
        self._world = self._generation = 0
        self.fault = None

    def follow(self, run: Run, new: Sequence[Record]) -> None:
        """Tell what the new events say, and redraw the status line when it is due."""
        for record in new:
            if record["event"] == "step.committed" and self._is_news("step", record["step"]):
                self._steps = [*self._steps, record][-RATE_STEPS - 1 :]
        self._held += [record for record in new if record["event"] in _NEWS]
        self._release(time.monotonic() - HOLD_S)
        if run.world is not None:
            self._world, self._generation = run.world.size, run.world.generation
        now_s = time.monotonic()
        if now_s < self._next_at_s or not self._steps:
            return
        if self._live.is_started:
            self._next_at_s = now_s + DRAW_EVERY_S
            self._live.update(self._status(), refresh=True)
        else:
            self._next_at_s = now_s + PRINT_EVERY_S
            self.say(self._line(), style="dim")

    def recovered(self, found: Recovery) -> None:
        """Tell what a recovery consisted of."""
        self._release(found.finished_at_s)
        parts = ", ".join(f"{name} {found.parts_ms[name]:.0f}" for name in SLOW)
        self.say(
            f"[green]recovered[/] {found.total_ms:.0f} ms after the kill: noticed after "
            f"{found.parts_ms['detect']:.0f} ms, reshaped in {found.reshape_ms:.0f} ms ({parts}), "
            f"step computed again in {found.parts_ms['redo']:.0f} ms"
        )

    def _is_news(self, *key: Any) -> bool:
        if key in self._told:
            return False
        self._told.add(key)
        return True

    def _release(self, until_s: float) -> None:
        """Tell what was held back, in the order in which it happened."""
        held = sorted(self._held, key=_at_s)
        for record in held:
            if _at_s(record) <= until_s:
                self._news(record)
        self._held = [record for record in held if _at_s(record) > until_s]

    def _news(self, record: Record) -> None:
        text, key = _NEWS[record["event"]](record)
        if text and self._is_news(record["event"], *key):
            since = ""
            if self.fault is not None and _at_s(record) >= self.fault.at_s:
                since = f"[dim]+{_at_s(record) - self.fault.at_s:.3f} s[/] "
            self.say(since + text)

    def _status(self) -> Table:
        step = int(self._steps[-1]["step"])
        row = Table.grid(padding=(0, 1))
        wide = self.console.width >= WIDE
        bar = ProgressBar(self._total, step, width=28 if wide else 12)
        row.add_row(f"  {self._name}", bar, self._line(generation=wide))
        return row

    def _line(self, *, generation: bool = True) -> str:
        last = self._steps[-1]
        parts = [f"step {last['step']}/{self._total}"]
        if "loss" in last["log"]:
            parts.append(f"loss {last['log']['loss']:.3f}")
        rate = self._rate()
        if rate is not None:
            parts.append(f"{rate:,.0f} tokens/s".replace(",", " "))
        which = f", generation {self._generation}" if generation else ""
        parts.append(f"{self._world} workers{which}")
        return "  ".join(parts)

    def _rate(self) -> float | None:
        each = self._steps[-1]["log"].get(TOKENS_KEY)
        span_s = float(self._steps[-1]["t_mono_s"]) - float(self._steps[0]["t_mono_s"])
        if each is None or span_s <= 0:
            return None
        return float(each) * sum(int(r["samples"]) for r in self._steps[1:]) / span_s


def _at_s(record: Record) -> float:
    """Return when it happened: an end is written down later than it is noticed."""
    return float(record.get("noticed_at_s") or record["t_mono_s"])


def _exited(record: Record) -> tuple[str, tuple[Any, ...]]:
    if record["exit_code"] == 0 and not record["signal"]:
        return "", ()
    who = f"{worker_name(str(record['worker_id']))} (pid {record['pid']})"
    return f"the agent sees that {who} is gone", (record["worker_id"],)


def _formed(record: Record) -> tuple[str, tuple[Any, ...]]:
    count = len(record["workers"])
    text = f"World {record['generation']}: {count} workers ({escape(str(record['reason']))})"
    return text, (record["generation"],)


def _redone(record: Record) -> tuple[str, tuple[Any, ...]]:
    text = f"step {record['step']} is computed again, shared out anew"
    return text, (record["step"], record["generation"])


def _committed(record: Record) -> tuple[str, tuple[Any, ...]]:
    text = f"checkpoint of step {record['step']} committed ({record['tier']})"
    return text, (record["step"], record["tier"])


def _restored(record: Record) -> tuple[str, tuple[Any, ...]]:
    text = (
        f"{worker_name(str(record['worker_id']))} read its part of step {record['step']}: "
        f"{record['bytes_read'] / 1e6:.1f} MB in {record['duration_s']:.2f} s"
    )
    return text, (record["worker_id"],)


_NEWS: Mapping[str, Any] = {
    "worker.exited": _exited,
    "generation.formed": _formed,
    "step.redone": _redone,
    "checkpoint.committed": _committed,
    "restore.finished": _restored,
}


def summary(report: Mapping[str, Any]) -> Table:
    """Return the report as a person reads it."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for found in report["recoveries"]:
        table.add_row(
            found["cause"],
            f"{found['world_before']} -> {found['world_after']} workers, next step after "
            f"{found['total_ms']:.0f} ms, of it {found['redone_step_ms']:.0f} ms the step itself",
        )
        if found["full_strength_s"] is not None:
            table.add_row("", f"{found['world_before']} again after {found['full_strength_s']} s")
    table.add_row("committed steps", f"{report['committed_steps']}, lost {report['steps_lost']}")
    table.add_row(
        "restore",
        f"step {report['restored_step']} from S3 alone with {report['restored_world_size']} "
        f"workers, {report['restored_bytes_from_s3'] / 1e6:.1f} MB counted at the server",
    )
    table.add_row(
        "undisturbed run",
        "equal, bit for bit" if report["bit_equal_to_undisturbed"] else "DIFFERENT",
    )
    table.add_row(
        "loss", f"{report['loss_first']} -> {report['loss_last']} (below {report['loss_below']})"
    )
    if report["tokens_per_s"] is not None:
        table.add_row("speed", f"{report['tokens_per_s']:.0f} tokens/s")
    return table


def complain(sentence: str) -> None:
    """Print one sentence to standard error."""
    print(f"demo: {sentence}", file=sys.stderr)
