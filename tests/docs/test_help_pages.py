"""What the pages of first aid name exists: settings, metrics, extras."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import attrs
import pytest

from fppo.fields import fields_of, name_of, table_of
from fppo.settings.train import TrainSettings

from .pages import GUIDE, ROOT
from .test_metrics import missing

DOCS = ROOT / "docs"


def named(page: str) -> list[str]:
    """The texts in backticks outside of blocks; `page` is a path in the docs, or an absolute one."""
    text = re.sub(r"^```.*?^```", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


def paths_of(section: object, prefix: str = "") -> Iterator[str]:
    """A pattern for each setting and section; a part takes any keyword."""
    for field in fields_of(type(section)):
        path = f"{prefix}{name_of(field)}"
        yield re.escape(path)
        if attrs.has(type(value := getattr(section, field.name))):
            yield from paths_of(value, f"{path}.")
            yield from [re.escape(path) + r"\.\w+"] * (table_of(type(value)) is not None)


@pytest.mark.parametrize(
    "page", ["troubleshooting.md", "algorithms.md", "installation.md", "guides/memory.md", str(GUIDE)]
)
def test_every_setting_that_a_page_names_exists(page):
    sections = "|".join(name_of(field) for field in fields_of(TrainSettings) if attrs.has(field.type or str))
    known = re.compile("|".join(paths_of(TrainSettings())))
    words = [word for text in named(page) for word in re.findall(rf"(?<![\w./])(?:(?:{sections})\.[a-z_.-]+)", text)]
    assert [word for word in words if not known.fullmatch(word.replace("-", "_"))] == []
    assert words or page == "installation.md"


@pytest.mark.parametrize(("page", "least"), [("troubleshooting.md", 20), (str(GUIDE), 6)])
def test_every_metric_that_a_page_of_troubles_names_has_its_line(page, least):
    names = {text for text in named(page) if re.fullmatch(r"[a-z_]+/[\w/]+", text)}
    spread = {name.replace("SPREAD", "mean").replace("AXIS", "shard") for name in names}
    assert len(names) >= least
    assert missing(spread) == []


def test_every_extra_has_its_row():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[\w`, -]+) \|", (DOCS / "installation.md").read_text(), flags=re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    assert sorted(listed) == sorted(extras)
