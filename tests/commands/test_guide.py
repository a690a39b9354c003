"""`fppo guide`: a skill for agents that is short, and prints as an agent's file of skills."""

from __future__ import annotations

import pytest

from fppo.commands import cli
from tests.docs.pages import GUIDE, blocks

yaml = pytest.importorskip("yaml")


def test_the_command_prints_all_blocks_and_no_comment(capsys):
    assert cli.main(["guide"]) == 0
    printed = capsys.readouterr().out
    assert "<!--" not in printed
    assert all(block.text.rstrip() in printed for block in blocks(GUIDE))
    assert [line for line in GUIDE.read_text().splitlines() if line not in printed.splitlines()] == [
        "<!-- run with: warm_up=2 steps=1 -->"
    ]


def test_it_is_one_short_skill(capsys):
    assert cli.main(["guide"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 120
    first, front, text = printed.split("---\n", 2)
    about = yaml.safe_load(front)
    assert (first, about.keys(), about["name"]) == ("", {"name", "description"}, "fppo")
    assert text.startswith("\n# fppo")


def test_it_takes_no_arguments(capsys):
    assert cli.main(["guide", "losses"]) == 2
    assert "fppo guide takes no arguments" in capsys.readouterr().err
