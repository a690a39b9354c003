"""Rows of files: each with its line, its fields and its source, however the file ends its lines."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.data import Problems, Row, read_rows, rows_of

cells = st.text('ab,"\n ', max_size=4)
ENDS = ["\n", "\r\n", "\r"]


@settings(max_examples=40)
@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=4), st.sampled_from(ENDS[:2]), st.booleans())
def test_rows_of_a_csv_file_are_its_records_with_their_first_lines(tmp_path_factory, records, end, mark):
    file = tmp_path_factory.mktemp("csv") / "a.CSV"
    text, expected = io.StringIO(newline=""), []
    writer = csv.writer(text, lineterminator=end)
    writer.writerow(["x", "y z"])
    for record in records:
        line = 1 + text.getvalue().count("\n")
        writer.writerow(record)
        expected.append(Row(str(file), line, dict(zip(("x", "y z"), record, strict=True)), "a"))
    file.write_bytes(("\ufeff" if mark else "").encode() + text.getvalue().encode())
    assert read_rows(file) == expected


values = st.dictionaries(st.sampled_from(["a", "é\u2028"]), st.sampled_from([1, None, "x\u2028y", [{"b": None}]]))
lines = st.lists(st.tuples(st.sampled_from(["", " ", "\t"]), values | st.just(None)), max_size=5)


@settings(max_examples=40)
@given(lines, st.sampled_from(ENDS), st.booleans(), st.sampled_from(["jsonl", "json"]))
def test_rows_of_lines_are_their_objects_whatever_ends_a_line(tmp_path_factory, drawn, end, mark, kind):
    file = tmp_path_factory.mktemp("lines") / f"set.{kind}"
    written = [space + ("" if value is None else json.dumps(value, ensure_ascii=False)) for space, value in drawn]
    file.write_bytes(("\ufeff" if mark else "").encode() + end.join(written).encode())
    expected = [Row(str(file), n, value, "set") for n, (_, value) in enumerate(drawn, 1) if value is not None]
    if not expected:
        with pytest.raises(ValueError, match="the data set is empty: no rows in "):
            read_rows(file)
        return
    assert read_rows(file) == expected
    assert [row.filled for row in read_rows(file)] == [False] * len(expected)
    assert (expected[0].place, expected[0].name) == (f"{file}:{expected[0].line}", f"set.{kind}:{expected[0].line}")


def test_rows_of_arrays_columns_directories_and_functions_are_numbered_and_say_what_may_be_filled_in(tmp_path):
    import datasets

    objects = [{"a": {"b": None, "c": 1}}, {"a": {"b": 2, "c": None}}]
    (tmp_path / "one.json").write_text("\n [" + json.dumps(objects[0]) + ",\n" + json.dumps(objects[1]) + "]")
    table = datasets.Dataset.from_list(objects)
    (tmp_path / "set").mkdir()
    table.to_parquet(str(tmp_path / "set" / "train.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(dev=table, train=table.select([1])).save_to_disk(str(tmp_path / "splits"))

    def rows(file, source, *, filled):
        return [Row(str(file), number, each, source, filled) for number, each in enumerate(objects, 1)]

    parquet = tmp_path / "set" / "train.parquet"
    assert read_rows(tmp_path / "one.json") == rows(tmp_path / "one.json", "one", filled=False)
    assert read_rows(parquet) == rows(parquet, "train", filled=True)
    assert read_rows(tmp_path / "set") == rows(parquet, "set", filled=True)
    assert read_rows(tmp_path / "saved") == rows(f"{tmp_path / 'saved'}[train]", "saved", filled=True)
    assert read_rows(tmp_path / "splits", split="dev") == rows(f"{tmp_path / 'splits'}[dev]", "splits", filled=True)
    assert rows_of(iter(objects), "mine:rows") == rows("mine:rows", "mine:rows", filled=True)
    both = read_rows([parquet, str(tmp_path / "one.json")])
    assert both == rows(parquet, "train", filled=True) + rows(tmp_path / "one.json", "one", filled=False)


def test_faults_are_noted_where_problems_are_gathered_and_other_rows_come(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n[1]\n{"a": 2\n{"b": 3}\n')
    problems = Problems()
    rows = read_rows(tmp_path / "a.jsonl", problems=problems)
    assert [(row.line, row.fields) for row in rows] == [(1, {"a": 1}), (4, {"b": 3})]
    assert problems.count == 2
    assert [row.fields for row in rows_of([{"a": 1}, 3, {"b": 2}], "mine", problems=problems)] == [{"a": 1}, {"b": 2}]
    assert problems.count == 3
    assert "mine:2: a int, not a dict with fields" in problems.text("data")
    assert rows_of([3], "mine", problems=Problems()) == []
    for call in (lambda: read_rows(tmp_path / "a.jsonl"), lambda: rows_of([3], "mine")):
        with pytest.raises(ValueError, match=r"problems? in the data:"):
            call()
    with pytest.raises(ValueError, match="the data set is empty: mine gave no rows"):
        rows_of([], "mine", problems=Problems())


@pytest.mark.parametrize("text", ["x,y\n1,2\n", 'x,y\n1,"2\n'])
def test_the_limit_of_fields_of_other_readers_is_left_as_it_was(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    before = csv.field_size_limit(1000)
    try:
        read_rows(tmp_path / "a.csv", problems=Problems())
        assert csv.field_size_limit() == 1000
    finally:
        csv.field_size_limit(before)


def test_a_directory_of_images_with_their_lines_is_read_by_the_library_that_pairs_them(tmp_path, monkeypatch):
    import datasets
    from PIL import Image

    folder = tmp_path / "seen"
    folder.mkdir()
    for number in range(2):
        Image.new("RGB", (3, 2), (number, 0, 0)).save(folder / f"{number}.png")
    lines = [json.dumps({"file_name": f"{number}.png", "prompt": f"{number}?"}) for number in range(2)]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name: load(name, cache_dir=str(tmp_path / "cache")))
    rows = read_rows(folder)
    assert [(row.place, row.source, row.filled) for row in rows] == [
        (f"{folder}[train]:{number}", "seen", True) for number in (1, 2)
    ]
    assert [row.fields["prompt"] for row in rows] == ["0?", "1?"]
    assert [row.fields["image"].getpixel((0, 0)) for row in rows] == [(0, 0, 0), (1, 0, 0)]
