"""Ground truths are looked at before a run: those that its reward can never score are all named."""

from __future__ import annotations

import json

import pytest

from fppo.assembly.checks import EVALUATE, TRAIN
from fppo.assembly.inputs import Inputs
from fppo.settings import files
from tests import tiny_run


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    return tmp_path


def write(path, truths):
    lines = [json.dumps({"prompt": "1+1=", "answer": truth}) for truth in truths]
    path.write_text("\n".join(lines) + "\n")


def test_all_rows_whose_truth_no_response_can_equal_are_named(task):
    write(task / "train.jsonl", ["2", "", 2.0, " "])
    write(task / "test.jsonl", [["2"], "2"])
    with pytest.raises(files.SettingsError) as found:
        Inputs(settings=tiny_run.settings(task)).need(*TRAIN)
    text = str(found.value)
    assert "3 problems in the settings:" in text
    for place in ("train.jsonl:2", "train.jsonl:4", "test.jsonl:1"):
        assert f"{place}: the reward exact_match: no response equals the ground truth" in text
    with pytest.raises(files.SettingsError, match=r"1 problem in the settings:\s.*test\.jsonl:1: the reward"):
        Inputs(settings=tiny_run.settings(task), trains=False).need(*EVALUATE)


@pytest.mark.slow
def test_what_a_function_of_ones_own_reads_is_its_own_matter(task):
    write(task / "train.jsonl", ["", ["2"], {"a": 1}, "2"])
    Inputs(settings=tiny_run.settings(task, reward__functions=["tests.rewards.functions:length"])).need(*TRAIN)
    changes = {"reward__functions": ["math_verify"], "reward__arguments": {"math_verify": {"expressions": True}}}
    write(task / "train.jsonl", [r"\$18", "1,200", "x^2", True])
    Inputs(settings=tiny_run.settings(task, **changes)).need(*TRAIN)
