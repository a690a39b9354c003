"""What a newcomer and a reporter of a problem find at the root is short, and true."""

from __future__ import annotations

import re
import tomllib

import pytest

import fppo
from fppo.commands import cli, options

from .pages import PAGES, ROOT, blocks

yaml = pytest.importorskip("yaml")


def test_the_page_for_agents_is_short_and_its_places_are_there():
    page = ROOT / "AGENTS.md"
    assert page in PAGES  # whose commands are checked
    text = page.read_text()
    assert len(text.splitlines()) <= 80
    assert sum(block.language == "bash" for block in blocks(page)) >= 3
    named = re.findall(r"`((?:fppo|kernels|tests|experiments|docs)/?[\w/.]*|CHANGELOG.md)`", text)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists() and name != "fppo.train"] == []


def test_reports_of_problems_ask_for_what_fppo_env_prints():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    asked = [field["attributes"]["label"] for field in form["body"] if field["validations"]["required"]]
    assert "The output of `fppo env --json`" in asked
    assert "fppo env --json" in (ROOT / ".github/pull_request_template.md").read_text()
    assert cli.COMMANDS["env"].options is options.EnvOptions


def test_the_citation_and_the_changelog_are_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert cited["version"] == fppo.__version__ == project["version"] == headings[1]
    assert cited["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
