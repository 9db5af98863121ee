"""The drawings of the report: SVG text from numbers, with colours that the page's style sets.

Each function returns one `<svg>` element. Marks carry a `<title>`, which browsers show on hover,
and nothing is told by colour alone: every mark, line and bar has its name beside it. Nothing here
reads a file or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 920
LEFT = 56
RIGHT = 18
CHAR_PX = 7.0  # of the label font, about; only decides which labels would overlap
LABEL_ROW_PX = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at a step: drawn as a vertical line with its name on top."""

    step: int
    kind: str
    """"fault", "joined", "saved" or "restored"."""
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSpan:
    """One World and how long it was in force, in seconds since training began."""

    from_s: float
    until_s: float
    size: int
    generation: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One horizontal bar: what it is, and its named parts in ms."""

    label: str
    parts: Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to pixels."""

    low: float
    high: float
    from_px: float
    until_px: float

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        span = self.high - self.low or 1.0
        return self.from_px + (value - self.low) / span * (self.until_px - self.from_px)


def loss_chart(
    loss: Sequence[tuple[int, float]],
    undisturbed: Sequence[tuple[int, float]],
    marks: Sequence[Mark],
) -> str:
    """Draw the loss by step, the undisturbed run as a band below it, and what happened."""
    rows = _label_rows([m.step for m in marks], [m.label for m in marks], _step_scale(loss))
    top = 24 + LABEL_ROW_PX * (max(rows, default=-1) + 1)
    height, bottom = top + 250, top + 214
    x = _step_scale(loss)
    values = [value for _, value in [*loss, *undisturbed]]
    ticks = nice_ticks(min(values, default=0.0), max(values, default=1.0), 5)
    y = Scale(ticks[0], ticks[-1], bottom, top)
    parts = [*_grid(y, ticks, "loss"), *_steps_axis(x, bottom)]
    parts.append(f'<path class="undisturbed" d="{_path(undisturbed, x, y)}"/>')
    parts.append(f'<path class="loss" d="{_path(loss, x, y)}"/>')
    for mark, row in zip(marks, rows, strict=True):
        parts.append(_mark(mark, x.at(mark.step), 10 + LABEL_ROW_PX * row, bottom))
    for step, value in loss:
        tip = escape(f"step {step}: loss {value:.4f}")
        parts.append(
            f'<circle class="hit" cx="{x.at(step):.1f}" cy="{y.at(value):.1f}" r="5">'
            f"<title>{tip}</title></circle>"
        )
    return _svg(height, "Loss by step, with the fault and the restore marked", parts)


def worlds_chart(spans: Sequence[WorldSpan]) -> str:
    """Draw how many workers there were over time; no line where no process ran."""
    top, bottom, height = 30.0, 130.0, 156
    most = max((span.size for span in spans), default=1)
    end_s = max((span.until_s for span in spans), default=1.0)
    x = Scale(0.0, end_s, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, most + 0.5, bottom, top)
    parts = [*_grid(y, [float(n) for n in range(most + 1)], "workers")]
    ticks = [tick for tick in nice_ticks(0.0, end_s, 8) if tick <= end_s]
    parts += [_text(x.at(tick), bottom + 18, f"{tick:g} s", "tick", "middle") for tick in ticks]
    last: WorldSpan | None = None
    for span in spans:
        a, b, level = x.at(span.from_s), x.at(span.until_s), y.at(span.size)
        tip = escape(
            f"generation {span.generation}: {span.size} workers, "
            f"{span.until_s - span.from_s:.1f} s; {span.note}"
        )
        parts.append(
            f'<rect class="area" x="{a:.1f}" y="{level:.1f}" width="{max(b - a, 1):.1f}" '
            f'height="{bottom - level:.1f}"><title>{tip}</title></rect>'
        )
        if last is not None and math.isclose(last.until_s, span.from_s):
            parts.append(_line("world", a, y.at(last.size), a, level))
        elif last is not None:
            middle = (x.at(last.until_s) + a) / 2
            if a - x.at(last.until_s) > CHAR_PX * 12:
                parts.append(_text(middle, bottom - 8, "no process", "note", "middle"))
        parts.append(_line("world", a, level, b, level))
        if b - a > CHAR_PX * 9:
            parts.append(_text((a + b) / 2, level - 5, f"{span.size} workers", "note", "middle"))
        last = span
    return _svg(height, "Number of workers over time", parts)


def bars_chart(bars: Sequence[Bar], names: Sequence[str]) -> str:
    """Draw stacked bars of milliseconds, one row each, with a legend of the parts."""
    row_px, top, label_px = 30.0, 30.0, 210.0
    bottom = top + row_px * len(bars)
    longest = max((sum(ms for _, ms in bar.parts) for bar in bars), default=1.0)
    ticks = nice_ticks(0.0, longest, 6)
    x = Scale(0.0, ticks[-1], label_px, WIDTH - RIGHT - 64)
    parts: list[str] = []
    at = label_px
    for name in names:
        parts.append(f'<rect class="part {escape(name)}" x="{at}" y="6" width="11" height="11"/>')
        parts.append(_text(at + 16, 16, name, "note", "start"))
        at += 34 + CHAR_PX * len(name)
    for tick in ticks:
        parts.append(_line("grid", x.at(tick), top, x.at(tick), bottom))
        parts.append(_text(x.at(tick), bottom + 16, f"{tick:g} ms", "tick", "middle"))
    for index, bar in enumerate(bars):
        y = top + row_px * index + 6
        parts.append(_text(label_px - 10, y + 13, bar.label, "note", "end"))
        begin = 0.0
        for name, ms in bar.parts:
            tip = escape(f"{bar.label}: {name} {ms:.1f} ms")
            # Two pixels of surface between neighbours keep thin parts apart.
            width = max(x.at(begin + ms) - x.at(begin) - 2, 0.5)
            parts.append(
                f'<rect class="part {escape(name)}" x="{x.at(begin):.1f}" y="{y}" '
                f'width="{width:.1f}" height="18"><title>{tip}</title></rect>'
            )
            begin += ms
        parts.append(_text(x.at(begin) + 6, y + 13, f"{begin:.0f} ms", "value", "start"))
    return _svg(bottom + 26, "What a recovery consists of", parts)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers from at or below `low` to at or above `high`."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        high = low + 1.0 if math.isfinite(low) else 1.0
        low = low if math.isfinite(low) else 0.0
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999) * power
    first = math.floor(low / unit)
    last = math.ceil(high / unit - 1e-9)
    return [round(n * unit, 10) for n in range(first, max(last, first + 1) + 1)]


def _step_scale(loss: Sequence[tuple[int, float]]) -> Scale:
    steps = [step for step, _ in loss] or [0, 1]
    return Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)


def _steps_axis(x: Scale, bottom: float) -> list[str]:
    ticks = [t for t in nice_ticks(x.low, x.high, 8) if x.low <= t <= x.high]
    return [_text(x.at(t), bottom + 18, f"{t:g}", "tick", "middle") for t in ticks] + [
        _text(WIDTH - RIGHT, bottom + 33, "step", "tick", "end")
    ]


def _label_rows(steps: Sequence[int], labels: Sequence[str], x: Scale) -> list[int]:
    """Return for each label the uppermost row in which it hits no other one."""
    taken: dict[int, list[tuple[float, float]]] = {}
    rows = []
    for step, label in zip(steps, labels, strict=True):
        a, b = _label_span(x.at(step), label)
        row = 0
        while any(a < right and left < b for left, right in taken.get(row, ())):
            row += 1
        taken.setdefault(row, []).append((a - 8, b + 8))
        rows.append(row)
    return rows


def _label_span(at: float, label: str) -> tuple[float, float]:
    width = CHAR_PX * len(label) + 10
    return (at - width, at) if at + width > WIDTH - RIGHT else (at, at + width)


def _mark(mark: Mark, at: float, label_y: float, bottom: float) -> str:
    left, _ = _label_span(at, mark.label)
    anchor, shift = ("end", -5) if left < at else ("start", 5)
    kind = escape(mark.kind)
    return (
        f'<g class="mark {kind}" data-step="{mark.step}"><title>{escape(mark.label)}</title>'
        + _line("rule", at, label_y - 8, at, bottom)
        + _text(at + shift, label_y + 3, mark.label, "marklabel", anchor)
        + "</g>"
    )


def _grid(y: Scale, ticks: Sequence[float], unit: str) -> list[str]:
    lines = [_line("grid", LEFT, y.at(t), WIDTH - RIGHT, y.at(t)) for t in ticks]
    labels = [_text(LEFT - 8, y.at(t) + 4, f"{t:g}", "tick", "end") for t in ticks]
    return [*lines, *labels, _text(LEFT - 8, y.until_px - 14, unit, "tick", "end")]


def _path(points: Sequence[tuple[int, float]], x: Scale, y: Scale) -> str:
    pairs = [f"{x.at(step):.1f},{y.at(value):.1f}" for step, value in points]
    return "M" + " L".join(pairs) if pairs else ""


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _svg(height: float, name: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(name)}">'
        + "".join(parts)
        + "</svg>"
    )
