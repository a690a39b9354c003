"""What many rows have wrong is said once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.commands import cli
from fppo.data.examples import check_fields
from fppo.data.problems import SHOWN, DataError, FieldError, Problems, fail, together
from fppo.data.read import rows_of
from fppo.settings import files
from tests import tiny_run


@given(st.lists(st.tuples(st.sampled_from("abcdefghijklmno"), st.integers(1, 99))))
def test_each_text_is_one_line_and_all_are_counted(found):
    problems = Problems()
    for text, place in found:
        problems.add(text, at=f"f:{place}")
    if not found:
        return problems.check("data")
    with pytest.raises(ValueError) as told:
        problems.check("data")
    head, *lines = str(told.value).split("\n  ")
    assert head == f"{len(found)} problem{'s' * (len(found) > 1)} in the data:"
    texts = list(dict.fromkeys(text for text, _ in found))
    expected = []
    for text in texts[:SHOWN]:
        places = [place for other, place in found if other == text]
        more = f" (and {len(places) - 1} more have it)" if len(places) > 1 else ""
        expected.append(f"f:{places[0]}: {text}{more}")
    left = sum(text in texts[SHOWN:] for text, _ in found)
    assert lines == expected + ([f"and {left} more"] if left else [])


found = st.lists(st.tuples(st.sampled_from("abcdefghijkl"), st.sampled_from(["f:1", "g:2", ""])), max_size=SHOWN)


def noted(pairs):
    problems = Problems()
    for text, place in pairs:
        problems.add(text, at=place)
    return problems


@settings(max_examples=60)
@given(found, found)
def test_problems_of_two_sets_are_those_of_one_with_all(first, second):
    both = noted(first).merged_with(noted(second))
    whole = noted(first + second)
    assert both.count == whole.count
    assert both.text("data") == whole.text("data")


def test_data_errors_of_one_kind_are_one_error_and_others_stay_apart():
    ours = noted([("a", "f:1"), ("b", "f:2")])
    errors = [
        DataError(ours, "data"),
        ValueError("x"),
        DataError(noted([("c", "g:1"), ("a", "g:2")]), "data"),
        DataError(noted([("a", "f:1")]), "prompts"),
        ValueError("x"),
    ]
    merged = together([*errors, DataError(noted([("d", "h:1")]), "prompts")])
    assert [str(error) for error in merged] == [
        str(DataError(noted([("a", "f:1"), ("b", "f:2"), ("c", "g:1"), ("a", "g:2")]), "data")),
        "x",
        str(DataError(noted([("a", "f:1"), ("d", "h:1")]), "prompts")),
        "x",
    ]
    assert together([errors[0], DataError(ours, "data")]) == errors[:1]  # of the same rows
    assert together([]) == []


def test_texts_fail_together_and_none_do_not():
    fail([], "prompts")
    with pytest.raises(DataError) as told:
        fail(["a", "b", "a"], "prompts")
    assert str(told.value) == "3 problems in the prompts:\n  a (and 1 more have it)\n  b"
    assert (told.value.subject, told.value.problems.count) == ("prompts", 3)


def test_a_field_that_no_row_has_is_one_line_for_all_sets(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    rows = [json.dumps({"question": f"{i}", "answer": "1"}) for i in range(20)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    files.save(tiny_run.settings(tmp_path), tmp_path / "run.toml")
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"fppo train: 1 problem in {tmp_path / 'run.toml'}:\n  data.prompt = 'prompt': no row has that field; "
        "did you mean 'question'? there are 'answer', 'question'\n"
    )


def test_rows_with_a_fault_are_one_line_for_all_and_a_problem_each_kind(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    rows = [json.dumps({"prompt": f"{i}", "answer": "1" if i == 7 else None}) for i in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    files.save(tiny_run.settings(tmp_path), tmp_path / "run.toml")
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 2
    said = f"fppo train: 1 problem in {tmp_path / 'run.toml'}:\n  {tmp_path / 'train.jsonl'}:1: field 'answer': null "
    assert capsys.readouterr().err == f"{said}(and 18 more have it)\n"


@pytest.mark.parametrize(
    ("named", "row", "said"),
    [
        ("promt", {"prompt": 1, "answer": 2}, "did you mean 'prompt'? there are 'answer', 'prompt'"),
        ("prompt", {"Question": 1}, "did you mean 'Question'? there are 'Question'"),
        ("answer", {"prompt": 1, "reward_model": {"ground_truth": 2}}, "did you mean 'reward_model.ground_truth'?"),
        ("extra.lvel", {"extra": {"level": 2}, "x": 1}, "did you mean 'extra.level'?"),
        ("Q: {questoin}", {"question": 1}, "has the field 'questoin'; did you mean 'question'?"),
        ("z", {"prompt": 1}, "no row has that field; there are 'prompt'"),
        ("z", {}, "no row has that field; there are none"),
    ],
)
def test_the_nearest_field_is_named_or_one_that_means_the_same(named, row, said):
    rows = rows_of([row, row], "mine")
    with pytest.raises(FieldError) as told:
        check_fields(rows, {"data.prompt": named, "data.source": None}, noted([("a", "f:1")]))
    first, other = told.value.lines
    assert first.startswith(f"data.prompt = {named!r}: no row has ")
    assert said in first
    assert other == "f:1: a"


def test_a_field_that_one_row_has_is_a_fault_of_the_others():
    check_fields(rows_of([{"x": 1}, {"prompt": 1}], "mine"), {"data.prompt": "prompt"}, Problems())
    check_fields([], {"data.prompt": "prompt"}, Problems())
