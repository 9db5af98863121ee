"""The demo's report as one HTML file: readable in light and dark, without anything from outside.

The page shows what report.json holds and draws it; it decides nothing. Its verdict is the report's:
a promise that was not kept stands at the top. Nothing here reads a file or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from scripts.report_charts import (
    Bar,
    Mark,
    WorldSpan,
    bars_chart,
    loss_chart,
    worlds_chart,
)
from scripts.run_facts import PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that the page shows.

    `report` is the content of report.json; the rest is what is too long for it.
    """

    report: Mapping[str, Any]
    loss: Sequence[tuple[int, float]]
    undisturbed: Sequence[tuple[int, float]]
    marks: Sequence[Mark]
    worlds: Sequence[WorldSpan]


def render(story: Story) -> str:
    """Return the whole page."""
    report = story.report
    kept = not report["broken_promises"]
    body = [
        _verdict(report, kept=kept),
        _tiles(report),
        _section(
            "Loss",
            "The line is the disturbed training, the pale band below it the undisturbed one: where "
            "both have the same loss, the band runs around the line.",
            _drawing(loss_chart(story.loss, story.undisturbed, story.marks)),
        ),
        _section(
            "Workers over time",
            "How many workers were in the World, in seconds since the first one was formed.",
            _drawing(worlds_chart(story.worlds)),
        ),
        _section(
            "What the fault cost",
            "From the kill's own time stamp to the moment when the last survivor had agreed on a "
            "step again. No survivor restarted its process.",
            _recovery_chart(report) + _recoveries(report["recoveries"]),
        ),
        _section(
            "Bit for bit",
            "Every tensor of both runs' checkpoints was hashed; random state and the place in the "
            "data are compared as stored.",
            _comparisons(report["comparisons"]),
        ),
        _footer(report),
    ]
    title = "Everstep demo: " + ("all promises kept" if kept else "a promise was broken")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _verdict(report: Mapping[str, Any], *, kept: bool) -> str:
    if kept:
        word, kind = "Kept", "kept"
        sentence = report["summary"]
    else:
        word, kind = "Broken", "broken"
        sentence = "; ".join(report["broken_promises"])
    return (
        f'<header><p class="name">Everstep demo</p><h1><span class="badge {kind}">{word}</span> '
        f"{escape(str(sentence))}</h1></header>"
    )


def _tiles(report: Mapping[str, Any]) -> str:
    recoveries = report["recoveries"]
    worst = max((r["total_ms"] for r in recoveries), default=None)
    tiles = [
        ("committed steps", _number(report["committed_steps"]), f"{report['steps_lost']} lost"),
        (
            "kill to next step",
            _number(worst, " ms"),
            "of it the redone step "
            + _number(max((r["redone_step_ms"] for r in recoveries), default=None), " ms"),
        ),
        (
            "restored from S3",
            _size(report["restored_bytes_from_s3"]),
            f"with {report['restored_world_size']} workers, local copy deleted",
        ),
        (
            "equal to the undisturbed run",
            "yes" if report["bit_equal_to_undisturbed"] else "no",
            "parameters, optimizer, random state, data",
        ),
        (
            "loss",
            f"{_loss(report['loss_first'])} → {_loss(report['loss_last'])}",
            f"has to end below {_loss(report['loss_below'])}",
        ),
        (
            "tokens per second",
            _number(report["tokens_per_s"]),
            f"{_number(report['cpu_count'])} processor cores",
        ),
    ]
    cells = "".join(
        f'<div class="tile"><p class="what">{escape(what)}</p><p class="figure">{escape(figure)}'
        f'</p><p class="note">{escape(note)}</p></div>'
        for what, figure, note in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _recovery_chart(report: Mapping[str, Any]) -> str:
    bars = [
        Bar(label=r["cause"], parts=[(name, r["split_ms"][name]) for name in PARTS])
        for r in report["recoveries"]
    ]
    for size, ms in report["step_ms_by_world"].items():
        if ms is not None and bars:
            bars.append(Bar(label=f"a step of {size} workers", parts=[("redo", ms)]))
    return _drawing(bars_chart(bars, PARTS)) if bars else "<p>No fault was injected.</p>"


def _recoveries(recoveries: Sequence[Mapping[str, Any]]) -> str:
    head = ("what", "at step", "workers", "detected", "reshaped", "step redone", "in all", "back")
    rows = [
        (
            str(r["cause"]),
            _number(r["step"]),
            f"{r['world_before']} → {r['world_after']}",
            _number(r["detect_ms"], " ms"),
            _number(r["reshape_ms"], " ms"),
            _number(r["redone_step_ms"], " ms"),
            _number(r["total_ms"], " ms"),
            "never"
            if r["full_strength_s"] is None
            else f"{r['world_before']} again after {r['full_strength_s']:.1f} s",
        )
        for r in recoveries
    ]
    return _table(head, rows)


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> str:
    head = ("after step", "parameters", "optimizer state", "random state", "place in the data")
    rows = []
    for found in comparisons:
        equal = [_equal(found[key]) for key in ("parameters", "optimizer", "rng", "cursor")]
        rows.append((f"{found['step']} ({found['what']})", *equal))
    differences = [d for found in comparisons for d in found["differences"]]
    extra = "".join(f"<li>{escape(str(d))}</li>" for d in differences)
    digests = "".join(
        f'<p class="digest">step {found["step"]}: sha256 {escape(str(found["digest"]))} over '
        f"{found['tensors']} tensors, {_size(found['bytes'])}</p>"
        for found in comparisons
    )
    return _table(head, rows) + (f"<ul>{extra}</ul>" if extra else "") + digests


def _footer(report: Mapping[str, Any]) -> str:
    facts = [
        ("made by", report["command"]),
        ("commit", report["commit"] or "not in a repository"),
        ("torch", report["torch"]),
        ("cores", report["cpu_count"]),
        ("took", f"{report['duration_s']:.0f} s"),
    ]
    items = " · ".join(f"{escape(name)} {escape(str(value))}" for name, value in facts)
    return f"<footer><p>{items}</p></footer>"


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{content}</section>"


def _drawing(svg: str) -> str:
    return f'<div class="drawing">{svg}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _equal(value: object) -> str:
    return "equal" if value else "DIFFERENT"


def _loss(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def _number(value: float | None, unit: str = "") -> str:
    return "?" if value is None else f"{value:,.0f}{unit}".replace(",", " ")


def _size(count: float | None) -> str:
    return "?" if count is None else f"{count / 1e6:.1f} MB"


STYLE = """
:root{color-scheme:light dark;--page:#f9f9f7;--card:#fcfcfb;--ink:#0b0b0b;--soft:#52514e;
--faint:#898781;--grid:#e1e0d9;--edge:rgba(11,11,11,.10);--line:#2a78d6;--band:#b7d3f6;
--area:rgba(42,120,214,.14);--good:#006300;--good-bg:#d9f2d9;--bad:#a52020;--bad-bg:#fbe0e0;
--fault:#d03b3b;--joined:#1baf7a;--restored:#4a3aa7;--saved:#898781;
--detect:#eb6834;--agree:#eda100;--unblock:#e87ba4;--rebuild:#1baf7a;--heal:#4a3aa7;--redo:#2a78d6}
@media (prefers-color-scheme:dark){:root{--page:#0d0d0d;--card:#1a1a19;--ink:#fff;--soft:#c3c2b7;
--faint:#898781;--grid:#2c2c2a;--edge:rgba(255,255,255,.10);--line:#3987e5;--band:#184f95;
--area:rgba(57,135,229,.20);--good:#7ddc7d;--good-bg:#0e3a0e;--bad:#ff9d9d;--bad-bg:#4a1414;
--fault:#e66767;--joined:#199e70;--restored:#9085e9;--saved:#898781;
--detect:#d95926;--agree:#c98500;--unblock:#d55181;--rebuild:#199e70;--heal:#9085e9;--redo:#3987e5}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.5;
font-family:system-ui,-apple-system,"Segoe UI",sans-serif;font-size:15px}
main{max-width:1000px;margin:0 auto;padding:28px 20px 40px}
.name{margin:0;color:var(--soft)}
h1{font-size:22px;line-height:1.4;margin:4px 0 20px;font-weight:600}
h2{font-size:17px;margin:0 0 4px}section>p{margin:0 0 12px;color:var(--soft);max-width:75ch}
.badge{padding:2px 10px;border-radius:6px;font-size:17px}
.badge.kept{color:var(--good);background:var(--good-bg)}
.badge.broken{color:var(--bad);background:var(--bad-bg)}
section{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:18px 20px;
margin-bottom:16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(250px,1fr));gap:18px 24px}
.tile p{margin:0}.tile .what,.tile .note{color:var(--soft);font-size:13px}
.tile .figure{font-size:26px;font-weight:600;line-height:1.25}
svg{width:100%;min-width:620px;height:auto;display:block}
.drawing{overflow-x:auto}
svg text{font-size:12px;fill:var(--soft)}
svg .tick{fill:var(--faint);font-variant-numeric:tabular-nums}
svg .value{fill:var(--ink)}.grid{stroke:var(--grid)}
.loss{fill:none;stroke:var(--line);stroke-width:2;stroke-linejoin:round}
.undisturbed{fill:none;stroke:var(--band);stroke-width:8;stroke-linejoin:round}
.hit{fill:transparent}.hit:hover{fill:var(--line)}
.rule{stroke-width:1.5;stroke-dasharray:4 3}.marklabel{fill:var(--ink)}
.mark.fault .rule{stroke:var(--fault)}.mark.joined .rule{stroke:var(--joined)}
.mark.restored .rule{stroke:var(--restored)}.mark.saved .rule{stroke:var(--saved)}
.area{fill:var(--area)}.world{stroke:var(--line);stroke-width:2;stroke-linecap:round}
.part.detect{fill:var(--detect)}.part.agree{fill:var(--agree)}.part.unblock{fill:var(--unblock)}
.part.rebuild{fill:var(--rebuild)}.part.heal{fill:var(--heal)}.part.redo{fill:var(--redo)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;margin-top:12px;font-size:14px}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--grid);white-space:nowrap;
font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:500}.digest{font-size:13px;overflow-wrap:anywhere;margin:10px 0 0}
footer{color:var(--faint);font-size:13px}
"""
