"""Files of a run step by step, against their definitions: lines of JSON, records of starts, and rows."""

from __future__ import annotations

import json
import math
import platform
import tempfile
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fppo.runs import jsonl, origins, sample_files, starts
from fppo.runs.jsonl import JsonLines
from fppo.settings import files
from tests import tiny_run

# lines of JSON


def plainly(value):
    """A value as strict JSON has it, by hand."""
    match value:
        case dict():
            return {str(key): plainly(x) for key, x in value.items()}
        case list() | tuple():
            return [plainly(x) for x in value]
        case float() if not math.isfinite(value):
            return None
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(Path("a/b"))
keys = st.text(max_size=2) | st.integers(0, 9) | st.just((1, 2))
nested = st.recursive(
    leaves,
    lambda x: st.lists(x, max_size=3) | st.lists(x, max_size=3).map(tuple) | st.dictionaries(keys, x, max_size=3),
    max_leaves=8,
)


@settings(max_examples=15)
@given(st.dictionaries(keys, nested, max_size=3))
@example({1: (math.nan, [math.inf, (True, None)])})
def test_any_value_is_a_line_that_json_reads(value):
    assert jsonl.plain(value) == plainly(value)
    with tempfile.TemporaryDirectory() as place:
        log = JsonLines(Path(place) / "x.jsonl")
        log.write({"value": value}, {"step": 2})
        log.close()
        first, second = (Path(place) / "x.jsonl").read_bytes().decode().split("\n")[:-1]
    read = json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read == {"value": json.loads(json.dumps(plainly(value)))}
    assert json.loads(second) == {"step": 2}


steps_of = st.sets(st.integers(0, 14), max_size=10)


def spans(steps, every):
    """Steps as text: those that follow each other at the spacing as one span."""
    found = []
    for step in sorted(steps):
        if found and found[-1][1] == step - every:
            found[-1][1] = step
        else:
            found.append([step, step])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in found)


@settings(max_examples=60)
@given(steps_of, st.integers(0, 9), st.integers(0, 14), st.integers(0, 4))
@example({2}, 1, 8, 2)
@example(set(), 1, 9, 3)
def test_steps_without_a_line_are_named_in_spans(present, first, last, every):
    due = {step for step in range(first, last + 1) if every and step % every == 0}
    gone = due - present
    expected = [f"x holds nothing of step {spans(gone, every)}"] if gone else []
    assert jsonl.missing("x", present, first, last, every=every) == expected


@pytest.mark.parametrize("every", [1, 2])
def test_what_is_gone_of_a_file_is_its_damaged_lines_and_the_steps_without_one(tmp_path, every):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": true}\n{"step": "2"}\n[3]\n{"step": 6}\n{"step": 8}')
    said = jsonl.gone(path, 1, 8, every=every)
    assert [text.partition(": ")[0] for text in said[:-1]] == [f"{path}, line {number}" for number in (2, 3, 4, 5)]
    assert [text.rpartition(": ")[2] for text in said[1:-1]] == [
        *["its step is not an integer"] * 2,
        "holds a list, not an object",
    ]
    assert said[-1] == f"{path} holds nothing of step {'2 to 5, 7' if every == 1 else '2 to 4'}"
    assert jsonl.gone(tmp_path / "none", 1, 2) == [f"{tmp_path / 'none'} holds nothing of step 1 to 2"]


LINES = st.lists(st.tuples(st.sampled_from(["step", "plain", "damaged", "blank"]), st.integers(0, 6)), max_size=8)


@settings(max_examples=40)
@given(LINES, st.integers(0, 7), st.sampled_from([None, 1, 3]), st.sampled_from(["", '{"step": 1}', '{"st']))
def test_a_file_that_goes_on_keeps_what_was_before_and_a_copy_of_what_is_damaged(lines, first_step, newest, torn):
    """Each line of an earlier step, or of none, once and in order; of these the newest."""
    texts = {"step": '{{"step": {}, "x": "é"}}', "plain": '{{"y": {}}}', "damaged": "{{no {}", "blank": " "}
    text = "".join(texts[kind].format(number) + "\n" for kind, number in lines) + torn
    records = [
        json.loads(x) for x in text.splitlines() if x.strip() and not x.startswith(("{no", '{"st":')) and x != '{"st'
    ]
    kept = [x for x in records if x.get("step", 0) < first_step]
    kept = kept if newest is None else kept[-newest:]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "m.jsonl"
        path.write_text(text, encoding="utf-8")
        log = JsonLines(path, first_step=first_step, newest=newest)
        assert [json.loads(x) for x in path.read_text(encoding="utf-8").splitlines()] == kept
        log.log(9, {"z": 1.0})
        assert [json.loads(x) for x in path.read_text(encoding="utf-8").splitlines()] == [*kept, {"step": 9, "z": 1.0}]
        log.close()
        damaged = path.with_name("m.jsonl.damaged")
        assert damaged.exists() == any(kind == "damaged" for kind, _ in lines)
        assert not damaged.exists() or damaged.read_text(encoding="utf-8") == text


# records of starts

MOVES = (
    *([(0, 0), (0, 0), (3, 1), (3, 1), (2, 1)], [(0, 0), (4, 1), (2, 0), (4, 0)]),
    *([(2, 0), (2, 1), (4, 1), (2, 1)], [(0, 2), (1, 0), (3, 1), (1, 0)]),
)


def after(recorded, step, now):
    """The records of starts after one from a step: later ones are dropped, and one that changes nothing has none."""
    kept = {start: x for start, x in recorded.items() if start <= step}
    last = kept[max(kept)] if kept else None
    return kept if last == now else kept | {step: now}


@pytest.mark.parametrize("made", MOVES)
def test_starts_are_recorded_by_the_steps_that_they_go_on_from(tmp_path, monkeypatch, made):
    """Again from the same step, from an earlier one, or with what was there before: also by their code and versions."""
    run = tmp_path / "run"
    (run / files.STARTS).mkdir(parents=True)
    base = tiny_run.settings(tmp_path)
    expected, last = dict[int, int](), None  # by step, and those of the last start
    for step, own in made:
        monkeypatch.setattr(platform, "python_version", lambda own=own: str(own))
        changes, news = starts.record(attrs.evolve(base, seed=own), step), origins.record(base, step)
        assert changes == ({} if last in (None, own) else {"seed": (last, own)})
        assert news == ([] if last in (None, own) else [f"with other code: python {last} -> {own}"])
        expected, last = after(expected, step, own), own
        texts = {int(path.stem[5:]): json.loads(path.read_text()) for path in (run / files.STARTS).glob("*.json")}
        assert {start: x["versions"]["python"] for start, x in texts.items()} == {
            x: str(y) for x, y in expected.items()
        }
    assert (starts.last(run)["seed"], starts.load(run).seed) == (last, last)

    def made_by(step):
        """The seed that made a step."""
        return expected[max((start for start in expected if start < step), default=min(expected))]

    first = min(expected) + 1
    for step in range(first, first + 3):
        assert starts.load(run, step).seed == made_by(step)
        assert origins.load(run, step).versions["python"] == str(made_by(step))
    ends = [*(start for start in expected if first <= start < 5), 5]
    assert [(x.seed, until) for x, until in starts.spans(run, first, 5)] == [(made_by(end), end) for end in ends]


def test_damaged_records_are_named_with_their_steps_and_kept_beside_the_next(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    for step, seed in ((0, 1), (3, 2), (5, 3)):
        starts.record(tiny_run.settings(tmp_path, seed=seed), step)
    places = [tmp_path / "run" / files.STARTS / f"step_{step:08d}.toml" for step in (0, 3, 5)]
    for place in places[::2]:
        place.write_text("# digest of what follows: 0\nseed = 9")
    capsys.readouterr()
    assert starts.record(tiny_run.settings(tmp_path, seed=4), 5) == {}
    text = "are unknown, and fppo replay refuses them\n"
    assert capsys.readouterr().err == (
        f"{places[0]} is damaged: the settings of the steps from 1 to 3 {text}"
        f"{places[2]} is damaged: the settings of the steps from 6 {text}"
    )
    assert places[2].with_name("step_00000005.toml.damaged").read_text().endswith("seed = 9")
    assert starts.load(tmp_path / "run", 6).seed == 4
    assert starts.load(tmp_path / "run", 4).seed == 2


def test_the_settings_of_a_run_are_relative_to_it_and_ask_for_no_other_checkpoint(tmp_path, monkeypatch):
    """Its start names the other run's by its whole path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    other = tmp_path / "other" / "step_00000004"
    own = {"resume": "other/step_00000004", "data__path": [str(tmp_path / "run" / "own.jsonl")]}
    (tmp_path / "run" / "own.jsonl").touch()
    starts.record(tiny_run.settings(tmp_path, output_dir="run", **own), 4)
    text = (tmp_path / "run" / files.SETTINGS).read_text()
    assert 'resume = "auto"' in text
    assert not text.startswith("#")  # a user may change it, and no digest of it
    assert str(tmp_path / "run") not in text
    assert starts.source(tmp_path / "run") == str(other)
    assert starts.last(tmp_path / "run")["resume"] == str(other)
    found = starts.load(tmp_path / "run")
    assert found.data.path == (str(tmp_path / "run" / "own.jsonl"),)
    assert (found.resume, found.output_dir) == ("auto", str(tmp_path / "run"))


# files of rows


def test_files_of_rows_are_in_the_order_of_their_steps(tmp_path):
    for name in ("1000000", "999999", "000002", "12345", "000003.old", "x000004", "0000011"):
        (tmp_path / f"{name}.parquet").touch()
    assert list(sample_files.files(tmp_path)) == [2, 11, 999999, 1000000]


def test_rows_beyond_the_budget_are_removed_step_by_step(tmp_path, monkeypatch):
    """Each file is 100 bytes."""
    monkeypatch.setattr(sample_files.samples, "on_host", lambda rows: rows)
    monkeypatch.setattr(sample_files.samples, "spread", lambda rows, count: rows)
    monkeypatch.setattr(sample_files.samples, "table_of", lambda rows, tokenizer, step: None)
    monkeypatch.setattr(sample_files.pq, "write_table", lambda table, path, compression: path.write_bytes(b"x" * 100))
    written = sample_files.SampleFiles(tmp_path, None, count=None, most_bytes=300)
    there = []
    for step in range(1, 9):
        written(SimpleNamespace(run=SimpleNamespace(step=step), experience="rows"))
        written.wait()
        there.append(list(sample_files.files(tmp_path)))
    written.close()
    assert there == [[1], [1, 2], [1, 2, 3], [2, 4], [2, 4, 5], [2, 4, 6], [4, 7], [4, 7, 8]]
