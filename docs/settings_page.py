"""The page of settings, written from their classes and from `tests/settings/known.txt`, which has their bounds.

`python docs/settings_page.py` writes it anew.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from fppo.commands.help import texts_of
from fppo.fields import Problem, fields_of, kinds_of, name_of, table_of
from fppo.settings.component import Functions, signature_of
from fppo.settings.placement import Pool
from fppo.settings.sft import is_read
from fppo.settings.train import TrainSettings
from fppo.settings.values import described

ROOT = Path(__file__).parent.parent
PAGE, KNOWN = ROOT / "docs" / "settings.md", ROOT / "tests" / "settings" / "known.txt"
HEAD = """# Settings

All settings of a run, as they stand in a file and, with `--`, on [the command line](guides/command-line.md#flags).
`fppo train --help SECTION` says the same. The search of these pages finds a setting by its name or its words. Leave out
a setting whose default is None unless you give it a value. What `fppo train` reads, other commands that take a run's
file read as well (`check`, `rollout`, `eval`, `plan`, `compare`); `fppo sft` reads less. Commands' own options are in
`fppo COMMAND --help`. This page is written by `python docs/settings_page.py`.
"""
_BOUND = re.compile(r"must be (\S+ or (?:more|less)|greater than \S+|less than \S+|from \S+ to \S+)(?:;|$)")
_LARGE = 1e6  # bounds beyond it only keep mistakes out
_WIDEST = 40  # characters of a default


def page() -> str:
    """The page in Markdown."""
    bounds = dict(_bounds())
    parts = [HEAD, "## The run\n\n" + _table(TrainSettings(), "", bounds)]
    parts += _sections(TrainSettings(), "", bounds)
    parts.append("## A pool in placement.pools\n\n" + _table(Pool(), "placement.pools.NAME.", bounds))
    return "\n".join(parts)


def _bounds() -> Iterator[tuple[str, str]]:
    for line in KNOWN.read_text(encoding="utf-8").splitlines():
        kind, path, *_ = line.split(" ")
        if kind in ("run", "pool"):
            found = [text for text in _BOUND.findall(line) if not _is_large(text)]
            yield f"placement.pools.NAME.{path}" if kind == "pool" else path, ", ".join(found)


def _is_large(text: str) -> bool:
    return text.endswith("or less") and float(text.split()[0]) > _LARGE


def _sections(section: Any, prefix: str, bounds: dict[str, str]) -> Iterator[str]:
    """The sections in a section, each with its table and those in it."""
    for field in fields_of(type(section)):
        inner, path = getattr(section, field.name), f"{prefix}{name_of(field)}"
        if attrs.has(type(inner)):
            first = "\n".join(textwrap.wrap(" ".join((type(inner).__doc__ or "").split()), 120))
            yield f"## {path}\n\n{first}\n\n{_table(inner, f'{path}.', bounds)}"
            if (table := table_of(type(inner))) is not None:
                yield _keywords(table)
            yield from _sections(inner, f"{path}.", bounds)


def _table(section: Any, prefix: str, bounds: dict[str, str]) -> str:
    kinds, texts = kinds_of(type(section)), texts_of(type(section))
    lines = ["| setting | default | may be | what it says | read by |", "|---|---|---|---|---|"]
    for field in fields_of(type(section)):
        name, value = name_of(field), getattr(section, field.name)
        if not attrs.has(type(value)):
            path = f"{prefix}{name}"
            may_be = "; ".join(filter(None, [described(kinds[name]), bounds[path]]))
            cells = [f"`{path}`", _written(value), may_be, " ".join(texts[field.name].split()), _readers(path)]
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _keywords(table: Functions) -> str:
    """The functions of a part with their keywords and defaults."""
    lines = ["| `name` | keywords, with their defaults |", "|---|---|"]
    for name in table:
        signature = signature_of(name, table)
        keywords = {} if signature is None else signature.keywords
        words = [f"`{key}` {_written(keyword.default)}" for key, keyword in keywords.items()]
        lines.append(f"| `{name}` | {', '.join(words) or 'none'} |".replace("||", "&#124;&#124;"))
    return "\n".join(lines) + "\n"


def _written(value: Any) -> str:
    """A default as a file of settings has it, cut if it is long."""
    if value is None or value is attrs.NOTHING:
        return "None" if value is None else "(give one)"
    text = str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)
    text = " ".join(text.replace("'", '"').split()) or '""'
    return f"`{text}`" if len(text) <= _WIDEST else f"`{text[:_WIDEST]}` ..."


def _readers(path: str) -> str:
    """The commands that read a setting."""
    sft = is_read(Problem(path, attrs.NOTHING, ""))
    return ", ".join(["train"] * (not path.startswith("sft.")) + ["sft"] * sft)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
