"""Every exhibit is caught by its law, and the tables of the docs are what the museum prints."""

import re
from functools import cache
from pathlib import Path

import pytest

from fppo import advantages, laws, losses

from .__main__ import ROOMS, row
from .beside_the_loss import START, run
from .estimates import to_go
from .exhibit import exhibit, raised
from .normalisation import token_mean, value_mean
from .terms import slope_of, value_of

EXHIBITS = [exhibit for room in ROOMS.values() for exhibit in room]
KEPT = Path(__file__).parents[2] / "docs" / "results" / "museum.md"


@cache
def said_of(exhibit):
    return exhibit.show()


def without_numbers(text):
    """The words of a line; where a machine rounds otherwise, a batch may differ."""
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "0", text)


@pytest.mark.slow
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.source)
def test_the_law_catches_it(exhibit):
    assert said_of(exhibit)


def test_the_kept_tables_show_the_museum():
    rows = [line for line in KEPT.read_text("utf-8").splitlines() if line.startswith("| [")]
    shown = [row(exhibit, said_of(exhibit)) for exhibit in EXHIBITS]
    assert list(map(without_numbers, rows)) == list(map(without_numbers, shown)), (
        "python -m tests.museum > docs/results/museum.md"
    )


def test_the_page_of_audits_counts_them():
    page = (KEPT.parents[1] / "audit.md").read_text("utf-8")
    assert f"`tests/museum` makes {len(EXHIBITS)} mistakes" in page
    assert [name for name, room in ROOMS.items() if f"\n| {name} | {len(room)} | " not in page] == []


def test_sources_differ_and_there_are_forty():
    assert len(EXHIBITS) >= 40
    assert len({(exhibit.source, exhibit.story) for exhibit in EXHIBITS}) == len(EXHIBITS)
    assert all(exhibit.link.endswith(")") for exhibit in EXHIBITS)


@pytest.mark.slow
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


def test_what_an_exhibit_prints_is_its_mistake(monkeypatch):
    """Neither a note, nor what another law sees; what is right shows nothing."""
    asked = []

    def found(*outcomes):
        verdicts = tuple(laws.Verdict("law", "it holds", outcome, f"why {outcome}") for outcome in outcomes)
        monkeypatch.setattr(laws, "verdicts", lambda fn, **how: asked.append((fn, how)) or verdicts)
        return exhibit("a#1", "A story.", "a law", "a kind", reference=len, tokens=3)(token_mean).show()

    assert (found("holds"), found("note", "holds"), found()) == (None, None, None)
    assert found("note", "fault") == "why fault"
    assert (
        asked
        == [
            (
                token_mean,
                {"kind": "a kind", "only": ("a law",), "name": token_mean.__name__, "reference": len, "tokens": 3},
            )
        ]
        * 4
    )
    monkeypatch.undo()
    assert value_of("a#1", "It is right.", lambda a, b: losses.kl_estimate(a, b, "k1")).show() is None
    assert slope_of("a#1", "It is right.", lambda a, b: losses.kl_estimate(a, b, "k2")).show() is None

    def breaks(law):
        raise laws.LawViolation("it breaks\n  so and so\nmore", law, {})

    assert raised("a#1", "It is right.", "resume", lambda: None).show() is None
    assert raised("a#1", "Another law sees it.", "resume", lambda: breaks("values")).show() is None
    assert raised("a#1", "It is wrong.", "resume", lambda: breaks("resume of x")).show() == "so and so"


def test_sources_link_to_what_they_name():
    links = {each.source: each.link for each in EXHIBITS}
    assert links["trl#6625"] == "[trl#6625](https://github.com/huggingface/trl/issues/6625)"
    assert links["arXiv:2604.23747"] == "[arXiv:2604.23747](https://arxiv.org/abs/2604.23747)"


@pytest.mark.parametrize(
    ("kind", "fn", "only"),
    [
        ("whole_value_loss", value_mean, ("micro-batches",)),
        ("temporal", lambda rewards, values, mask: to_go(rewards, mask), ("masked steps", "masked garbage")),
    ],
)
def test_kinds_that_no_other_law_needs_keep_theirs(kind, fn, only):
    found = laws.verdicts(fn, kind=kind, only=only)
    assert [verdict.outcome for verdict in found] == ["holds"] * len(only)
