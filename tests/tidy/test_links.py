"""Every relative link of the documents leads somewhere, headings included."""

from __future__ import annotations

import re

import pytest

from tests.tidy.house import ROOT, shown

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def headings(text):
    """Return the anchors of a document, made as the usual renderers make them."""
    found = re.findall(
        r"^#+\s+(.+?)\s*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def broken_links(document):
    for plain, image in LINK.findall(without_code(document.read_text())):
        link = plain or image
        if re.match(r"[a-z]+:", link):
            continue  # another site's
        place, _, anchor = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        there = target.exists() and target.is_relative_to(ROOT)
        if there and anchor and target.suffix == ".md":
            there = anchor in headings(target.read_text())
        if not there:
            yield link


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_links_resolve(document):
    assert list(broken_links(document)) == []


def test_the_check_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.tidy.test_links.ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# A heading: of `two` parts\n```\n# not one\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-heading-of-two-parts) [c](https://x.y/z) `[d](code.md)`\n"
        "[e](absent.md) [f](there.md#not-one) ![g](absent.png) [h](../outside.md)\n"
    )
    expected = ["absent.md", "there.md#not-one", "absent.png", "../outside.md"]
    assert list(broken_links(page)) == expected
