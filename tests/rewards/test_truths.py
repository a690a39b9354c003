"""Ground truths: the texts they stand for, and the check of a data set's truths before a run."""

from __future__ import annotations

import pytest

from fppo import rewards
from fppo.data.problems import DataError
from fppo.rewards.truths import check_truths, texts_of
from tests.rewards import functions
from tests.rewards.samples import sample

GROUP = {"regular_expression": {"pattern": r"####\s*(-?[\d,]+)"}}


@pytest.mark.parametrize(
    ("truth", "texts"),
    [
        ("18", ("18",)),
        (" a b\n", ("a b",)),
        (18, ("18",)),
        (18.0, ("18", "18.0")),
        (-3.0, ("-3", "-3.0")),
        (0.5, ("0.5",)),
        (1e16, ("10000000000000000", "1e+16")),
        (1e-7, ("0.0000001", "1e-07")),
        (True, ("true", "True")),
        (False, ("false", "False")),
    ],
)
def test_a_truth_stands_for_its_texts(truth, texts):
    assert texts_of(truth) == texts
    for text in texts:
        assert rewards.exact_match(sample(f" {text}\n", truth))["score"] == 1.0


@pytest.mark.parametrize("truth", ["", " \n", None, [], ["3"], {"a": 1}, float("nan"), float("inf")])
def test_what_no_response_should_equal(truth):
    with pytest.raises(ValueError, match=r"no response equals the ground truth .*data\.ground_truth"):
        texts_of(truth)


@pytest.mark.parametrize("truth", [r"\$18", r"\$1,200", "$18", r"\$2.50", "18 dollars", "50%", "1 1/2", "x^2+1", "C"])
def test_mathematics_takes_truths_as_data_sets_write_them(truth):
    check_truths(rewards.combine(["math_verify"]), [("row 1", truth)])


def problems_of(names, truths, **arguments):
    """What is wrong with these truths of rows 1, 2, ..., by functions of these names."""
    rows = [(f"row {number}", truth) for number, truth in enumerate(truths, start=1)]
    try:
        check_truths(rewards.combine(names, arguments=arguments), rows)
    except DataError as error:
        return str(error)
    return ""


def test_truths_that_a_function_can_never_score_are_named_with_their_rows():
    truths = ["18", "", 18.0, ["a"], "1,234", "none"]
    assert problems_of(["tests.rewards.functions:length", "length_penalty"][:1], truths) == ""
    for name in ("exact_match", "math_verify"):
        text = problems_of([name], truths)
        assert text.startswith("2 problems in the ground truths:")
        assert f"row 2: the reward {name}: no response equals the ground truth ''" in text
        assert "row 4: " in text
    text = problems_of(["regular_expression"], truths, **GROUP)
    assert text.startswith("3 problems in the ground truths:")
    assert "never equals the ground truth 'none'" in text
    assert problems_of(["regular_expression"], ["", None], regular_expression={"pattern": "<think>"}) == ""
    assert problems_of(["exact_match"], ["x" * 10**6, ["y" * 10**6]]).count("y") < 300
    assert functions.length  # which reads no truth


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:a|b)\s*(\d+)",
        r"\((\d+)\)",
        r"[(](\d+)",
        r"(?P<x>\w)\s(\d+)",
        r"(\d+(?:\.\d)?)",
        r"(^\d+$)",
        r"(\w+)\s\1",
        r"(?i)answer: (\d+|NONE)",
        r"(\S+)\s*(\d*)",
    ],
)
def test_a_group_that_can_equal_the_truth_is_no_problem(pattern):
    assert problems_of(["regular_expression"], ["18", 18.0], regular_expression={"pattern": pattern}) == ""
