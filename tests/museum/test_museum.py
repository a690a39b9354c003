"""Every exhibit is caught by its law, and the page of the docs shows what the museum does."""

import re
from functools import cache
from pathlib import Path

import pytest

from fppo import advantages, laws, losses

from .__main__ import HEAD, ROOMS, row, written
from .beside_the_loss import START, run
from .normalisation import token_mean

EXHIBITS = [exhibit for room in ROOMS.values() for exhibit in room]
PAGE = Path(__file__).parents[2] / "docs" / "museum.md"


@cache
def said_of(exhibit):
    return exhibit.show()


def without_numbers(text):
    """The words of a line; where a machine rounds otherwise, a batch may differ."""
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "0", text)


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.source)
def test_the_law_catches_it(exhibit):
    assert said_of(exhibit)


def test_the_page_shows_the_museum():
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| [")]
    shown = [row(exhibit, said_of(exhibit)) for exhibit in EXHIBITS]
    assert list(map(without_numbers, rows)) == list(map(without_numbers, shown)), (
        "python -m tests.museum docs/museum.md"
    )


def test_sources_differ_and_there_are_forty():
    assert len(EXHIBITS) >= 40
    assert len({(exhibit.source, exhibit.story) for exhibit in EXHIBITS}) == len(EXHIBITS)
    assert all(exhibit.link.endswith(")") for exhibit in EXHIBITS)


def test_what_is_mutated_keeps_the_laws():
    """Each law that catches something here holds for ours, so that it is the mistake which is caught."""
    ours = {
        "whole_loss": token_mean,
        "policy_loss": losses.ppo_clip,
        "value_loss": losses.value_loss,
        "gae": advantages.gae,
        "advantages": advantages.grpo,
        "whiten": advantages.whiten,
    }
    for kind, fn in ours.items():
        assert all(verdict.outcome == "holds" for verdict in laws.verdicts(fn, kind=kind)), kind
    laws.check_resume(run, START, save=dict, load=dict)


def test_tables_replace_those_of_a_page():
    page = "# The museum\n\nWords.\n\n## Old\n\n| a |\n"
    assert written(page, ["## New", "", *HEAD, ""]) == "# The museum\n\nWords.\n\n" + "\n".join(
        ["## New", "", *HEAD, ""]
    )
