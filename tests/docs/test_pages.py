"""The pages are in reach of a reader who begins with the first of them."""

from __future__ import annotations

import re

from .pages import ROOT

DOCS = ROOT / "docs"


def test_the_index_links_every_page_and_no_other():
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "index.md").read_text()))
    assert linked == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}


def test_the_navigation_holds_every_page():
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
