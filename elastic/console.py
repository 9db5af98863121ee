"""What the person who started a run sees of it.

On a terminal: a live view of a few lines that stays at the bottom, with the main worker's output
above it. Elsewhere (a file, a pipe, CI): one plain line every few seconds, and the events that
matter at once. The view goes to standard error and the main worker's output to standard output, so
`python script.py > log` keeps only what the script printed. Everything shown comes from RunView.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic import render
from elastic.view import TOKENS_KEY, RunView, WorkerState

PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.2
_MARK = "everstep: "

_STATE_STYLES = {
    WorkerState.STARTING: ("○", "yellow"),
    WorkerState.READY: ("◐", "cyan"),
    WorkerState.RUNNING: ("●", "green"),
    WorkerState.SUSPECT: ("◍", "magenta"),
    WorkerState.DEAD: ("✗", "bold red"),
    WorkerState.FINISHED: ("●", "blue"),
}
_PHASE_STYLES = {
    "running": "green",
    "done": "bold green",
    "reshaping": "bold yellow",
    "stopped": "bold",
    "failed": "bold red",
}


class Console(Protocol):
    """Where a run is shown."""

    def note(self, lines: Sequence[str]) -> None:
        """Show lines about what just happened."""
        ...

    def output(self, data: str) -> None:
        """Show whole lines that the main worker printed."""
        ...

    def update(self, view: RunView, now_s: float) -> None:
        """Show the present state; called often, draws as often as is useful."""
        ...

    def close(self, view: RunView) -> None:
        """Show the last state and leave the terminal as it was."""
        ...


def make_console(mode: str, stdout: TextIO, stderr: TextIO) -> Console:
    """Return the console for a mode of the configuration: auto, live, plain or off."""
    if mode == "off":
        return SilentConsole(stdout)
    if mode == "live" or (mode == "auto" and _is_terminal(stderr)):
        return LiveConsole(stdout, stderr)
    return PlainConsole(stdout, stderr)


class SilentConsole:
    """Passes on what the main worker prints and nothing else."""

    def __init__(self, stdout: TextIO) -> None:
        self._stdout = stdout

    def note(self, lines: Sequence[str]) -> None:
        """Show nothing."""

    def output(self, data: str) -> None:
        """Pass the lines on."""
        self._stdout.write(data)
        self._stdout.flush()

    def update(self, view: RunView, now_s: float) -> None:
        """Show nothing."""

    def close(self, view: RunView) -> None:
        """Show nothing."""


class PlainConsole:
    """Whole lines only; a status line every `PLAIN_EVERY_S`, if a step was committed meanwhile."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self._next_at_s = 0.0
        self._shown_step = -1

    def note(self, lines: Sequence[str]) -> None:
        """Print each line with our mark before it."""
        for line in lines:
            self._stderr.write(f"{_MARK}{line}\n")
        self._stderr.flush()

    def output(self, data: str) -> None:
        """Pass the lines on."""
        self._stdout.write(data)
        self._stdout.flush()

    def update(self, view: RunView, now_s: float) -> None:
        """Print a status line when it is due and a step was committed since the last one."""
        if now_s < self._next_at_s or view.step == self._shown_step or view.step == 0:
            return
        self._next_at_s = now_s + PLAIN_EVERY_S
        self._shown_step = view.step
        self.note([status_line(view)])

    def close(self, view: RunView) -> None:
        """Print the last state if it was not shown."""
        if view.step not in (0, self._shown_step):
            self.note([status_line(view)])


class LiveConsole:
    """A few lines at the bottom of the terminal, redrawn in place."""

    def __init__(
        self, stdout: TextIO, stderr: TextIO, *, console: RichConsole | None = None
    ) -> None:
        self._stdout = None if _is_terminal(stdout) else stdout
        self._console = console or RichConsole(file=stderr)
        # Not refreshed by a thread of its own: the one who waits for the run draws. And standard
        # output is left alone: it belongs to the user's process.
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start()
        self._next_at_s = 0.0

    def note(self, lines: Sequence[str]) -> None:
        """Nothing: what happened stands in the view itself, unless it would not stay there."""

    def output(self, data: str) -> None:
        """Print the lines above the view, or to standard output where that is no terminal."""
        if self._stdout is not None:
            self._stdout.write(data)
            self._stdout.flush()
            return
        for line in data.splitlines():
            # A progress bar of the user's own redraws its line; its last state is what counts.
            last = line.rstrip("\r").rpartition("\r")[2]
            self._console.print(Text.from_ansi(last), soft_wrap=True)

    def update(self, view: RunView, now_s: float) -> None:
        """Redraw when it is due."""
        if now_s < self._next_at_s:
            return
        self._next_at_s = now_s + LIVE_EVERY_S
        self._live.update(draw(view, now_s), refresh=True)

    def close(self, view: RunView) -> None:
        """Draw once more, and leave the cursor below."""
        self._live.update(draw(view, view.now_s), refresh=True)
        self._live.stop()


def status_line(view: RunView) -> str:
    """Return the state of a run on one line."""
    of = f"/{view.total_steps}" if view.total_steps else ""
    parts = [f"step {view.step}{of}", _epoch(view), _values(view), _rate(view)]
    parts.append(f"world {view.world_size}")
    if view.generation is not None:
        parts.append(f"generation {view.generation}")
    saves = _saves(view, None)
    parts.append(saves if saves != "none" else "")
    return "  ".join(part for part in parts if part)


def draw(view: RunView, now_s: float) -> RenderableType:
    """Return the live view: title, progress, values, world, saves, what just happened."""
    title = Text.assemble(
        ("Everstep ", "bold"),
        (view.job, "bold cyan"),
        "  ",
        (view.phase, _PHASE_STYLES.get(view.phase, "yellow")),
    )
    if view.generation is not None:
        title.append(f"  generation {view.generation}")
    rows = Table.grid(padding=(0, 1), expand=True)
    rows.add_column(style="dim", no_wrap=True, min_width=5)
    rows.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
    rows.add_row("step", _progress(view))
    train = (_epoch(view), _values(view), _rate(view))
    rows.add_row("train", "  ".join(part for part in train if part) or "-")
    rows.add_row("world", _world(view))
    rows.add_row("saves", _saves(view, now_s))
    for index, (clock, text) in enumerate(reversed(view.news)):
        rows.add_row(
            "now" if index == 0 else "", Text(f"{clock}  {text}", "" if not index else "dim")
        )
    return Group(title, rows)


def _progress(view: RunView) -> RenderableType:
    if not view.total_steps:
        return f"{view.step}"
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        f"{view.step}/{view.total_steps}",
        ProgressBar(total=view.total_steps, completed=min(view.step, view.total_steps), width=32),
        f"{100 * view.step // view.total_steps} %",
        "" if view.remaining_s is None else f"{_span(view.remaining_s)} left",
    )
    return grid


def _epoch(view: RunView) -> str:
    return "" if view.epoch is None else f"epoch {view.epoch}"


def _values(view: RunView) -> str:
    shown = {key: value for key, value in view.log.items() if key != TOKENS_KEY}
    return render.values(shown, most=5)


def _rate(view: RunView) -> str:
    parts = []
    if view.tokens_per_s is not None:
        parts.append(f"{view.tokens_per_s:,.0f} tokens/s")
    elif view.samples_per_s is not None:
        parts.append(f"{render.number(view.samples_per_s)} samples/s")
    if view.step_s is not None:
        parts.append(f"{view.step_s:.2f} s/step")
    return "  ".join(parts)


def _world(view: RunView) -> Text:
    text = Text(f"{view.world_size}  ")
    for place in sorted(view.workers, key=_place_key):
        row = view.workers[place]
        mark, style = _STATE_STYLES[row.state]
        text.append(f"{mark}{place.rpartition('.')[2]}", style)
        if row.state not in (WorkerState.RUNNING, WorkerState.FINISHED):
            text.append(f" {row.state}", style)
        text.append("  ")
    return text


def _place_key(place: str) -> tuple[str, int]:
    node, _, slot = place.rpartition(".")
    return node, int(slot) if slot.isdigit() else 0


def _saves(view: RunView, now_s: float | None) -> str:
    parts = []
    for tier, step in sorted(view.saved.items(), key=lambda item: -item[1]):
        parts.append(f"step {step} {tier}")
    if now_s is not None and view.saved_at_s is not None:
        parts.append(f"{_span(max(0.0, now_s - view.saved_at_s))} ago")
    if view.saving is not None:
        parts.append(f"step {view.saving} is being written")
    if view.save_error:
        parts.append(view.save_error)
    if now_s is None:
        return f"saved {', '.join(parts)}" if view.saved else "none"
    return ", ".join(parts) or "none"


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # replaced by something simpler, or closed
        return False


def write_error(sentence: str) -> None:
    """Print one sentence to standard error."""
    try:
        sys.stderr.write(f"{_MARK}{sentence}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody listens any more
        pass
