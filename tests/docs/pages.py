"""The pages of the project and the blocks of code on them.

An HTML comment before a block says how it is checked: `<!-- skip: needs a GPU -->`, or `<!-- run with: steps=2 -->`,
which gives top-level assignments of a Python block other values, or `<!-- with: openai -->` for a package of the extra
`test`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent.parent
AT_ROOT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
GUIDE = ROOT / "fppo/commands/guide.md"
PAGES = [*AT_ROOT, GUIDE, *sorted((ROOT / "docs").rglob("*.md"))]
REASONS = ("needs a GPU", "needs a network", "needs vLLM", "needs Ray")
_COMMENT = re.compile(r"\s*<!--\s*(skip|run with|with):\s*(.*?)\s*-->\s*")
_FENCE = re.compile(r"(\s*)(```+)(\S*)\s*")


@attrs.frozen
class Block:
    """A fenced block of a page; `line` is that of its first line."""

    page: Path
    line: int
    language: str
    text: str
    skip: str | None = None
    values: str = ""
    package: str | None = None

    @property
    def name(self) -> str:
        """Where it stands, for errors."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the file that the block shows, if its first line is a comment with one."""
        first = re.match(r"# ([\w./-]+\.(?:py|toml))\n", self.text)
        return first and first.group(1)


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    marks: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if comment := _COMMENT.fullmatch(line):
            marks[comment[1]] = comment[2]
        elif fence := _FENCE.fullmatch(line):
            start = number
            while lines[number].strip() != fence[2]:
                number += 1
            text = textwrap.dedent("\n".join(lines[start:number])) + "\n"
            number += 1
            how = marks.get("skip"), marks.get("run with", ""), marks.get("with")
            yield Block(page, start + 1, fence[3], text, *how)
            marks = {}
        elif line.strip():
            marks = {}


def code_of(block: Block) -> ast.Module:
    """The syntax tree of a Python block, its line numbers those of the page, with the values that its mark sets."""
    values = dict(pair.split("=", 1) for pair in block.values.split())
    tree = ast.parse("\n" * (block.line - 1) + block.text, filename=block.name)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in values:
            value = ast.parse(values.pop(node.targets[0].id), mode="eval").body
            node.value = ast.copy_location(value, node.value)
    if values:
        raise ValueError(f"{block.name}: the mark sets {sorted(values)}, which the block does not assign")
    return ast.fix_missing_locations(tree)
