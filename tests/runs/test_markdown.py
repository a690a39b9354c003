"""Markdown of untrusted text, as a parser of CommonMark with tables reads it."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fppo._errors import MOST, printable
from fppo.runs import markdown

NASTY = "# a\n- *b* _c_ `d` [e](http://f) ![g](h) <img src=x onerror=alert(1)> | &lt; \\* www.x.org ~~i~~ $j$ 1. k\n---"
PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


@given(st.lists(st.lists(st.text(max_size=20), min_size=2, max_size=2), min_size=1, max_size=3))
@example([[NASTY, NASTY], ["`", "|"]])
def test_a_table_shows_texts_as_they_are(rows):
    tokens = PARSER.parse(markdown.table(("a|b", "<b>"), rows))
    assert tokens[0].type == "table_open"
    assert tokens[-1].type == "table_close"
    cells = [token for token in tokens if token.type == "inline"]
    assert len(cells) == 2 * len(rows) + 2
    for cell, text in zip(cells, ["a|b", "<b>", *(x for row in rows for x in row)], strict=True):
        parts = cell.children or []
        assert {part.type for part in parts} <= {"text", "text_special", "html_inline"}
        assert all(part.content == "<br>" for part in parts if part.type == "html_inline")
        shown = "".join("" if part.type == "html_inline" else part.content for part in parts)
        assert squeezed(shown) == squeezed(printable(text, lines=True))


@pytest.mark.parametrize(
    "text", ["www.example.org", "http://example.org", "@someone", "#12", "a@b.org", "1. one", "$x$"]
)
def test_no_text_is_what_hubs_make_a_link_or_a_formula_of(text):
    shown = markdown.escaped(text)
    assert not re.search(r"[#@$:]|\w\.\w", re.sub(r"&#\d+;", "", shown))
    assert [token.type for token in PARSER.parse(shown)] == ["paragraph_open", "inline", "paragraph_close"]


@given(st.text(max_size=40))
@example("```\n````python\n# a\n~~~")
@example(NASTY)
def test_a_block_of_code_ends_where_the_text_does(text):
    tokens = PARSER.parse(f"{markdown.fenced(text, 'toml')}\n\nend")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]
    assert tokens[0].content.rstrip() == printable(text, lines=True).rstrip()


def test_numbers_and_missing_cells_are_short():
    assert markdown.table(("a", "b"), [(1 / 3, None)]).splitlines()[-1] == "| 0.333333 |  |"


@given(
    st.lists(st.text(max_size=30) | st.integers(0, 10**12) | st.floats(0, 9), min_size=1, max_size=3),
    st.integers(2, 20),
)
def test_a_cell_is_as_long_as_it_may_be(row, most):
    """Numbers have six digits, and what is longer than it may be loses its middle."""
    for limit, asked in ((most, [most]), (MOST, [])):
        (line,) = markdown.table(["a"] * len(row), [row], *asked).splitlines()[2:]
        cells = [f"{x:.6g}" if isinstance(x, float) else markdown.escaped(str(x), limit) for x in row]
        assert line == f"| {' | '.join(cells)} |"


def test_code_is_shown_whole_however_long():
    text = "\n".join(f"line {i}" for i in range(2 * MOST))
    assert markdown.fenced(text) == f"```\n{text}\n```"
    assert markdown.fenced("a````b", "x") == "`````x\na````b\n`````"


def test_the_number_of_an_item_stays_a_number():
    shown = [markdown.escaped(text) for text in ("1. a", "  12. b", "3.", "1.5", "a 1. b")]
    assert shown == ["1&#46; a", "  12&#46; b", "3&#46;", "1.5", "a 1. b"]
