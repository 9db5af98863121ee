"""The page stands alone, says what the report says, and draws marks where things happened."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from scripts.demo_report import tell
from scripts.report_charts import (
    LEFT,
    RIGHT,
    WIDTH,
    Bar,
    Mark,
    WorldSpan,
    bars_chart,
    loss_chart,
    nice_ticks,
    worlds_chart,
)
from scripts.report_page import render
from tests.run_story import killed_run
from tests.unit.test_demo_report import EQUAL, PLAN, SURROUNDINGS, seen

VOID = {"meta", "br", "link", "img"}


class Reader(HTMLParser):
    """Collects tags and attributes, and fails on tags that do not close each other."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page(**changes):
    return render(tell(PLAN, seen(**changes), SURROUNDINGS))


def read(html):
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def elements(svg, kind):
    return [e for e in ElementTree.fromstring(svg).iter() if e.get("class", "") == kind]


def test_the_page_needs_nothing_from_outside():
    html = page()
    found = read(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert not {"src", "href", "srcset", "data"} & {name for name, _ in found.attributes}
    assert not re.search(r"url\(|@import|https?:|//", html.replace("<!doctype html>", ""))


def test_the_page_is_whole_and_has_its_drawings():
    found = read(page())
    assert found.tags.count("svg") == 3
    assert found.tags.count("table") == 2


def test_every_drawing_is_well_formed():
    for svg in re.findall(r"<svg.*?</svg>", page(), flags=re.DOTALL):
        assert ElementTree.fromstring(svg).get("aria-label")


def test_both_colour_schemes_set_every_colour_that_is_used():
    style = re.search(r"<style>(.*?)</style>", page(), flags=re.DOTALL)[1]
    light, dark = re.findall(r":root\{(.*?)\}", style, flags=re.DOTALL)
    used = set(re.findall(r"var\((--[a-z-]+)\)", style))
    assert used
    for scheme in (light, dark):
        assert used <= set(re.findall(r"(--[a-z-]+):", scheme))
    assert "prefers-color-scheme:dark" in style


def test_the_verdict_stands_on_top():
    good = read(page()).text
    assert "Kept" in good
    assert "25 steps, none lost" in good
    bad = read(page(bytes_from_s3=5)).text
    assert "Kept" not in bad
    assert "Broken" in bad
    assert "the S3 server has sent 5 bytes" in bad


def test_figures_of_the_report_are_on_the_page():
    text = read(page()).text
    for figure in ("150 ms", "120 ms", "4 → 3", "4 again after 0.3 s", "0 lost", "commit abc"):
        assert figure in text


def test_a_difference_is_named_on_the_page():
    different = dataclasses.replace(EQUAL, optimizer=False, differences=("optimizer x: 1 and 2",))
    text = read(page(comparisons=[("end", different)])).text
    assert "DIFFERENT" in text
    assert "optimizer x: 1 and 2" in text


def test_what_a_run_says_is_text_and_never_markup():
    first, fault = killed_run()
    for record in first.events:
        if record["event"] == "generation.formed":
            record["reason"] = "<script>alert(1)</script>"
    html = page(first=first.events, faults=[fault])
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_marks_are_drawn_at_their_step():
    loss = [(step, 3.0 - step / 100) for step in range(1, 102)]
    svg = loss_chart(loss, loss, [Mark(step=51, kind="fault", label="killed")])
    (rule,) = elements(svg, "rule")
    assert float(rule.get("x1")) == pytest.approx((LEFT + WIDTH - RIGHT) / 2, abs=0.1)
    (mark,) = elements(svg, "mark fault")
    assert mark.get("data-step") == "51"


def test_labels_of_close_marks_stand_in_rows_of_their_own():
    loss = [(step, 1.0 + step) for step in range(1, 101)]
    marks = [Mark(step=50 + i, kind="saved", label="a long label") for i in range(3)]
    heights = {e.get("y") for e in elements(loss_chart(loss, [], marks), "marklabel")}
    assert len(heights) == 3


def test_labels_at_the_right_edge_stay_inside():
    loss = [(step, 1.0 + step) for step in range(1, 101)]
    svg = loss_chart(loss, [], [Mark(step=100, kind="restored", label="restored from S3")])
    (label,) = elements(svg, "marklabel")
    assert label.get("text-anchor") == "end"


def test_the_loss_is_drawn_inside_its_axes():
    loss = [(1, 5.0), (2, 0.5), (3, 2.0)]
    svg = loss_chart(loss, loss, [])
    (line,) = elements(svg, "loss")
    grid = [float(e.get("y1")) for e in elements(svg, "grid")]
    heights = [float(y) for y in re.findall(r",([\d.]+)", line.get("d"))]
    assert min(grid) <= min(heights)
    assert max(heights) <= max(grid)
    assert heights[0] < heights[2] < heights[1]


def test_a_world_is_as_high_as_it_has_workers():
    spans = [
        WorldSpan(from_s=0, until_s=10, size=4, generation=1, note=""),
        WorldSpan(from_s=10, until_s=11, size=3, generation=2, note="one is gone"),
        WorldSpan(from_s=15, until_s=20, size=2, generation=3, note="restored"),
    ]
    svg = worlds_chart(spans)
    four, three, two = (float(e.get("height")) for e in elements(svg, "area"))
    assert four / 4 == pytest.approx(three / 3, rel=0.01) == pytest.approx(two / 2, rel=0.01)
    assert "no process" in svg


def test_parts_of_a_bar_add_up_to_its_length():
    bars = [
        Bar(label="kill", parts=[("detect", 20.0), ("redo", 100.0)]),
        Bar(label="step", parts=[("redo", 120.0)]),
    ]
    svg = bars_chart(bars, ("detect", "redo"))
    rects = [e for e in elements(svg, "part redo") if e.get("height") == "18"]
    ends = [float(e.get("x")) + float(e.get("width")) for e in rects]
    assert ends[0] == pytest.approx(ends[1], abs=0.2)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1.7, 5.5), (0, 383.2), (-2, -1), (3, 3), (0, float("inf"))]
)
def test_ticks_are_round_and_enclose_what_is_drawn(low, high):
    ticks = nice_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low
    assert ticks[-1] >= high or high == float("inf")
