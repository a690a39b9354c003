"""What is said of the first step of a run: responses that are cut, and scores that tell nothing apart."""

from __future__ import annotations

import json

import pytest
import torch

from fppo.assembly.run import assemble
from fppo.batch import Column, Scored, extend
from fppo.runs import session
from fppo.runs.first_step import complaints
from tests import tiny_run
from tests.rewards.samples import rollout

NONE = float("nan")


def scored(scores, cut=0, outcomes=None, taught=None):
    """Rows with these scores, the first of them cut."""
    ends = Column(["length"] * cut + ["stop"] * (len(scores) - cut))
    rows = rollout(["a"] * len(scores), ["b"] * len(scores), [None] * len(scores))
    columns = {"scores": torch.tensor(scores), "named_scores": {}}
    columns["outcomes"] = None if outcomes is None else torch.tensor(outcomes)
    columns["taught"] = None if taught is None else torch.tensor(taught)
    fields = {name: getattr(rows, name) for name in ("tokens", "attention_mask")} | columns
    return extend(Scored, rows, **(fields | {"finish": ends}))


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        (scored([0.0, 1.0, 0.0, 1.0], cut=2), []),
        (scored([0.0, 1.0, 0.0, 1.0], cut=3), ["3 of 4 responses were cut at rollout.max_tokens = 3: "]),
        (scored([0.0, 0.0]), ["all 2 responses have the score 0: "]),
        (scored([1.0, NONE, 1.0]), ["all 2 responses have the score 1: "]),
        (scored([-1.0, 0.0, NONE]), ["no response of 2 scored above 0: the scores are -1 to 0"]),
        (scored([-0.5, -0.25], outcomes=[0.0, 0.0]), ["all 2 responses have the score 0: "]),
        (scored([-0.5, 0.5], outcomes=[0.0, 1.0]), []),
        (scored([NONE, NONE]), []),
        (scored([1.0]), []),
        (scored([0.0, 1.0], taught=[False, True]), []),
        (scored([0.0, 1.0], taught=[False, False]), ["no response is taught: data.teacher_prompt returned None"]),
        (scored([0.0, 0.0], cut=2), ["2 of 2 responses were cut", "all 2 responses"]),
    ],
)
def test_what_is_wrong_with_a_batch(tmp_path, rows, texts):
    tiny_run.write_task(tmp_path)
    found = complaints(rows, tiny_run.settings(tmp_path))
    assert len(found) == len(texts)
    for text, begin in zip(found, texts, strict=True):
        assert text.startswith(begin)


def test_turns_have_a_bound_of_their_own(tmp_path):
    tiny_run.write_task(tmp_path)
    turns = {"rollout__turns__respond": "calculator", "rollout__turns__turn_tokens": 2, "rollout__stop": ["="]}
    (text,) = complaints(scored([0.0, 1.0], cut=2), tiny_run.settings(tmp_path, **turns))
    assert "at rollout.max_tokens = 3 or rollout.turns.turn_tokens = 2; a cut turn ends its episode" in text


@pytest.mark.slow
def test_a_run_says_it_once(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    lines = [json.dumps({"prompt": f"{number}+1=", "answer": "never"}) for number in range(9)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    settings = tiny_run.settings(tmp_path, steps=2)
    with assemble(settings) as made:
        session.run_training(settings, made)
    error = capsys.readouterr().err
    assert error.count("step 1: all 8 responses have the score 0: there is nothing to tell them apart by") == 1
    assert "step 2:" not in error
