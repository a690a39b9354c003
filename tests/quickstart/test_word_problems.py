"""The quickstart's task for a real model: its questions, their split, and the reward that only the answer gets."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import attrs
import pytest

from fppo import rewards
from fppo.quickstart import word_problems
from fppo.settings import files, modules
from tests.rewards.samples import sample


def test_every_answer_is_right_and_in_no_question():
    compute = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "x": lambda a, b: a * b}
    everything = word_problems.word_problems()
    for problem in everything:
        a, b = map(int, re.findall(r"\d+", problem.question))
        assert (a, b) == problem.numbers
        assert problem.answer == compute[problem.sign](a, b) > 0
        assert problem.answer not in (a, b)
    assert len({problem.question for problem in everything}) == len(everything)
    assert everything == word_problems.word_problems()
    counts = Counter(problem.sign for problem in everything)
    assert min(counts.values()) > 0.8 * max(counts.values())
    changes = sum(one.sign != other.sign for one, other in pairwise(everything))
    assert changes > 0.5 * len(everything)  # in an order by chance


def test_what_is_held_out_is_computed_nowhere_in_training():
    train, held_out = word_problems.split()
    facts = [{(p.sign, *sorted(p.numbers)) for p in part} for part in (train, held_out)]
    assert not facts[0] & facts[1]
    assert len(train) + len(held_out) == len(word_problems.word_problems())
    assert 64 <= len(held_out) <= 0.2 * len(train)
    assert {p.sign for p in held_out} == {"+", "-", "x"}


def score_of(outcome):
    return outcome["score"] if isinstance(outcome, dict) else outcome


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("2 times 3 is 6.", 1),
        ("2 * 3 = **6**", 1),
        ("6", 1),
        ("It costs $6\n\nAsk me more!", 1),
        ("To find 2 times 3, we simply multiply 2*3.", 0),  # math-verify took this for 6 once
        ("If Lin has 4 apples and buys 2 more apples, then Lin has 4 + 2 apples.", 0),
        ("6 = 2 * 3", 0),
        ("It is 5 or 6 or 7.", 0),
        ("It is -6.", 0),
        ("It is 3.6", 0),
        ("It is 6.5", 0),
        ("It is 16.", 0),
        ("It is 60.", 0),
        ("It is 1,6", 0),
        ("It is six.", 0),
        ("", 0),
    ],
)
def test_only_a_text_whose_last_number_is_the_answer_scores(response, score):
    reward = rewards.regular_expression(pattern=word_problems.LAST_NUMBER)
    assert score_of(reward(sample(response, "6"))) == score


def test_no_question_answers_itself():
    reward = rewards.regular_expression(pattern=word_problems.LAST_NUMBER)
    for problem in word_problems.word_problems():
        assert score_of(reward(sample(problem.question, str(problem.answer)))) == 0.0


def test_files_hold_chats_with_their_answers(tmp_path):
    word_problems.prepare(tmp_path / "new")
    for name, part in zip((word_problems.TRAIN, word_problems.TEST), word_problems.split(), strict=True):
        rows = [json.loads(line) for line in (tmp_path / "new" / name).read_text().splitlines()]
        assert [row["answer"] for row in rows] == [str(p.answer) for p in part]
        assert [row["prompt"] for row in rows] == [word_problems.row(p)["prompt"] for p in part]
        assert rows[0]["prompt"][-1] == {"role": "user", "content": part[0].question}


def test_the_run_is_of_the_named_model_on_its_files():
    found = word_problems.settings(Path("here"), 5)
    assert (found.output_dir, found.seed, found.model.path, found.data.chat) == ("here", 5, "smol", True)
    train, test = word_problems.TRAIN, word_problems.TEST
    assert (found.data.path, found.data.eval_path) == ((f"here/{train}",), (f"here/{test}",))
    files.check(found)


def test_the_reference_runs_train_as_the_quickstart_does(tmp_path, monkeypatch):
    """On the same rows, by the same updates; only the reward is one of two."""
    place = Path(__file__).parents[2] / "experiments" / "reference" / "word_problems.toml"
    found = files.load(place, look=lambda settings, known: modules.module_problems(settings))
    own = word_problems.settings(tmp_path, found.seed)
    for name in ("steps", "model", "rollout", "algorithm", "actor", "checkpoint"):
        assert getattr(found, name) == getattr(own, name), name
    assert attrs.evolve(found.eval, every=own.eval.every) == own.eval
    pattern = own.reward.arguments["regular_expression"]["pattern"]
    assert found.reward.arguments["regular_expression"]["pattern"] == pattern
    assert (found.reward.functions[0], found.reward.weights) == ("regular_expression", (1.0, 0.0))
    monkeypatch.syspath_prepend(str(place.parent))
    rows = importlib.import_module("word_rows")
    word_problems.prepare(tmp_path)
    for name, made in ((word_problems.TRAIN, rows.train()), (word_problems.TEST, rows.test())):
        assert [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] == list(made)
