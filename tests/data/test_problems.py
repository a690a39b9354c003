"""What many rows have wrong is said once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.commands import cli
from fppo.data.problems import SHOWN, Problems
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


def test_a_field_that_no_row_has_is_one_line_for_all_sets(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    rows = [json.dumps({"question": f"{i}", "answer": "1"}) for i in range(20)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    files.save(tiny_run.settings(tmp_path), tmp_path / "run.toml")
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 2
    said = capsys.readouterr().err
    assert "40 problems in the data:" in said
    assert said.count("field 'prompt'") == 1
    assert f"{tmp_path / 'train.jsonl'}:1: field 'prompt'" in said
    assert "(and 39 more have it)" in said
