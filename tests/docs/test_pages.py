"""The pages are in reach of a reader who begins with the first of them."""

from __future__ import annotations

import re

from fppo_kernels.table import BUILTIN

from .pages import PAGES, ROOT, blocks

DOCS = ROOT / "docs"


RESULTS = DOCS / "results"  # what commands print, as it is


def test_the_index_links_every_page_and_no_other():
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "index.md").read_text()))
    pages = {page for page in DOCS.rglob("*.md") if page.parent != RESULTS}
    assert linked == {str(page.relative_to(DOCS)) for page in pages} - {"index.md"}


def test_a_page_links_each_file_of_results():
    texts = [page.read_text() for page in PAGES if page.parent not in (RESULTS, ROOT)]
    for file in RESULTS.glob("*.md"):
        assert any(f"results/{file.name})" in text for text in texts), file.name


def test_the_navigation_holds_every_page():
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_prose_has_at_most_120_columns():
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        lines = dict(enumerate(page.read_text().splitlines(), start=1))
        for block in blocks(page):
            for number in range(block.line, block.line + block.text.count("\n")):
                del lines[number]
        long = [number for number, line in lines.items() if len(line) > 120 and not line.lstrip().startswith("|")]
        assert not long, f"{page.name}: lines {long} are longer than 120 columns"


def test_every_picture_says_what_it_shows():
    for page in PAGES:
        for shown in re.findall(r"!\[(.*?)\]\(", page.read_text()):
            assert len(shown.split()) > 3, f"{page.name}: a picture is described as {shown!r}"


def test_the_page_of_kernels_lists_every_implementation():
    rows = re.findall(r"^\| (`\w+`.*?) \| (.*) \|$", (DOCS / "tutorials" / "kernel.md").read_text(), flags=re.MULTILINE)
    listed = {op: set(re.findall(r"`(\w+)`", names)) for ops, names in rows for op in re.findall(r"`(\w+)`", ops)}
    assert listed.keys() == BUILTIN.keys()
    assert all(set(BUILTIN[op]) <= names for op, names in listed.items())
