"""The viewer's reading of a run: complete, cheap where nothing changed, and calm where files are torn."""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fppo.report import viewed
from fppo.runs import jsonl, memory, sample_files
from fppo.runs.jsonl import JsonLines
from fppo.runs.sample_files import SAMPLES
from tests.report import view_runs
from tests.report.view_runs import ARABIC, MARKUP


def rows_of(content: bytes) -> list[dict]:
    return pq.read_table(io.BytesIO(content)).to_pylist()


def test_a_state_has_what_the_page_shows(tmp_path):
    run = view_runs.write_run(tmp_path / "a run's", steps=4)
    state = viewed.state_of(run, "mine")
    assert state is not None
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    assert [line["step"] for line in state["lines"]["records"]] == [0, 1, 2, 3, 4]
    assert [step for step, _ in state["samples"]] == [1, 2, 3, 4]
    assert state["settings"]["actor.optimizer.lr"] == 1e-6
    assert state["settings"]["reward.weights"] == [1.0, 0.5]
    assert {"reward.weights", "seed"} & set(state["chosen"]) == {"reward.weights"}
    assert state["quoted"] == "'" + str(run).replace("'", "'\"'\"'") + "'"
    assert [name for name, _ in state["stages"]] == ["gen", "update_actor"]
    assert ["score", "critic/score/mean"] in next(x["metrics"] for x in state["panels"] if x["title"] == "Reward")
    assert ["mean@1", "val-core/sums/reward/mean@1"] in state["panels"][0]["metrics"]
    assert {bar["kind"] for bar in state["work"]} == {"other", "rollout", "reward", "actor"}
    assert state["notes"] == []


def test_a_state_that_is_known_is_not_read_again(tmp_path):
    run = view_runs.write_run(tmp_path, steps=2)
    state = viewed.state_of(run, "")
    known = state["lines"]["stamp"], 3
    assert viewed.state_of(run, "", known) is None
    view_runs.write_table(run, 3, view_runs.table(3, 2))
    more = viewed.state_of(run, "", known)
    assert [step for step, _ in more["samples"]] == [1, 2, 3]
    assert more["lines"]["records"] == []


def test_the_memory_is_that_of_the_last_step_and_of_the_fullest_rank(tmp_path):
    run = view_runs.write_run(tmp_path / "mine", steps=4)
    shown = viewed.state_of(run, "")["memory"]
    assert (shown["step"], shown["rank"], shown["ranks"]) == (4, 1, 2)
    assert [stage["stage"] for stage in shown["stages"]] == ["gen", "update_actor"]
    update = attrs.asdict(memory.read(run, (4,))[1].stages[1])
    assert shown["stages"][1] == update
    assert update["peak"] == sum(size for name, size in update.items() if name not in ("stage", "peak"))
    known = viewed.state_of(run, "")["lines"]["stamp"], 5
    view_runs.write_memory(run, 5)
    assert viewed.state_of(run, "", known)["memory"]["step"] == 5
    for path in (run / memory.MEMORY).iterdir():
        path.unlink()
    assert viewed.state_of(run, "")["memory"] is None


LINES = st.lists(st.sampled_from(["line", "cut", "rest", "damaged", "again", "look"]), max_size=12)


@given(LINES)
@example(["line", "line", "look", "again", "line", "line", "look"])
def test_whoever_looks_now_and_then_has_all_lines(tmp_path_factory, moves):
    """Appended lines, a line that is being written, a damaged one, and a resumed run that replaces the file."""
    run = tmp_path_factory.mktemp("run")
    path, step, half, numbers = run / "metrics.jsonl", 0, "", itertools.count()
    path.touch()
    seen: list[dict] = []
    stamp = None
    for move in [*moves, "rest", "look"]:
        if move in ("line", "cut"):
            step += 1
            text = json.dumps({"step": step, "x": next(numbers)})
            written = text + "\n" if move == "line" else text[:-3]
            half = "" if move == "line" else text[-3:] + "\n"
            with path.open("a") as file:
                file.write(written)
        elif move == "rest" and half:
            with path.open("a") as file:
                file.write(half)
            half = ""
        elif move == "damaged" and not half:
            with path.open("a") as file:
                file.write("{no json\n")
        elif move == "again":
            step, half = step // 2, ""
            JsonLines(path, first_step=step + 1).close()
        elif move == "look":
            state = viewed.state_of(run, "", None if stamp is None else (stamp, len(seen)))
            if state is not None:
                stamp = state["lines"]["stamp"]
                seen = [*seen[: state["lines"]["from"]], *state["lines"]["records"]]
            assert seen == jsonl.read(path, on_damage=lambda _: None)


def test_damage_is_named_and_the_rest_is_shown(tmp_path):
    run = view_runs.write_run(tmp_path, steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4\n{"step": 5, "critic/score/mean": 0.5}\n{"step": 6, "criti')
    (run / "settings.toml").write_text("steps = = 3")
    state = viewed.state_of(run, "")
    assert [line["step"] for line in state["lines"]["records"]] == [0, 1, 2, 3, 5]
    assert any("line 5" in note for note in state["notes"])
    assert any("step 4" in note for note in state["notes"])
    assert any("not TOML" in note for note in state["notes"])
    assert state["settings"] == {}


def test_a_run_that_has_only_begun_is_empty(tmp_path):
    (tmp_path / SAMPLES).mkdir()
    state = viewed.state_of(tmp_path, "")
    assert state["lines"]["records"] == state["samples"] == state["tiles"] == state["panels"] == []
    assert rows_of(viewed.index_of(tmp_path, [])) == []
    assert rows_of(viewed.index_of(tmp_path, [1, 2])) == []


def test_steps_without_metrics_are_known_by_their_rows(tmp_path):
    run = view_runs.write_run(tmp_path, steps=3)
    (run / "metrics.jsonl").unlink()
    assert [record["step"] for record in viewed.state_of(run, "")["others"]] == [1, 2, 3]


def test_an_index_has_every_row_and_its_place(tmp_path):
    run = view_runs.write_run(tmp_path, steps=3, rows=6)
    rows = rows_of(viewed.index_of(run, [3, 1]))
    files = {step: sample_files.read(run / SAMPLES / f"{step:06d}.parquet").to_pylist() for step in (1, 3)}
    assert [(row["step"], row["number"]) for row in rows] == [(step, i) for step in (1, 3) for i in range(6)]
    for row in rows:
        whole = files[row["step"]][row["number"]]
        for name in ("row_id", "group", "id", "source", "finish", "version", "score", "score.politeness", "length"):
            assert row[name] == whole[name]
        assert row["pictures"] == (row["step"] == 3)
        assert (row["response"] == whole["response"]) == (len(whole["response"]) <= 1000)
        assert "advantages" not in row
        assert "images" not in row
    assert [rows[6]["response"], rows[8]["response"]] == [ARABIC, MARKUP]
    long = rows[7]["response"]
    assert long == "x" * viewed.HEAD + " … " + "x" * viewed.TAIL
    same = [(row["prompt_key"], files[row["step"]][row["number"]]["prompt"]) for row in rows]
    assert all((a == c) == (b == d) for a, b in same for c, d in same)


def test_prompts_that_only_differ_in_the_middle_have_different_keys(tmp_path):
    table = view_runs.table(1, 2)
    prompts = ["a" * 5000 + middle + "b" * 5000 for middle in "12"]
    view_runs.write_table(
        tmp_path, 1, table.set_column(table.column_names.index("prompt"), "prompt", pa.array(prompts))
    )
    first, second = rows_of(viewed.index_of(tmp_path, [1]))
    assert first["prompt"] == second["prompt"]
    assert first["prompt_key"] != second["prompt_key"]


def test_torn_and_foreign_files_are_left_out_of_an_index(tmp_path):
    run = view_runs.write_run(tmp_path, steps=3, rows=2)
    path = run / SAMPLES / "000002.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    pq.write_table(pa.table({"x": [1]}), run / SAMPLES / "000003.parquet")
    assert {row["step"] for row in rows_of(viewed.index_of(run, [1, 2, 3]))} == {1}


def test_a_link_out_of_the_run_is_not_followed(tmp_path):
    run, other = view_runs.write_run(tmp_path / "run", steps=1), view_runs.write_run(tmp_path / "other", steps=1)
    (run / SAMPLES / "000002.parquet").symlink_to(other / SAMPLES / "000001.parquet")
    (run / SAMPLES / "000003.parquet").symlink_to(run / SAMPLES / "000001.parquet")
    assert viewed.sample_file(run, 2) is None
    assert viewed.sample_file(run, 3) is not None
    assert {row["step"] for row in rows_of(viewed.index_of(run, [2]))} == set()


def test_runs_are_found_in_a_directory_that_holds_them(tmp_path):
    paths = [tmp_path / "x" / name for name in ("lr=1/seed_0", "lr=1/seed_1", "lr=2/seed_0")]
    for path in paths:
        view_runs.write_run(path, steps=1)
    (tmp_path / "x" / "compare.txt").touch()
    assert viewed.find_runs([tmp_path / "x"]) == paths
    assert viewed.find_runs([paths[1], tmp_path / "x"]) == [paths[1], paths[0], paths[2]]
    assert viewed.titles(paths) == ["lr=1/seed_0", "lr=1/seed_1", "lr=2/seed_0"]
    assert viewed.titles(paths[:1]) == ["seed_0"]
    with pytest.raises(ValueError, match="no record of a run"):
        viewed.find_runs([tmp_path / "x", tmp_path / "y"])


def test_a_file_that_vanishes_while_it_is_listed_is_left_out(tmp_path, monkeypatch):
    run = view_runs.write_run(tmp_path, steps=2)
    found = sample_files.files(run / SAMPLES)
    os.unlink(found[1])
    monkeypatch.setattr(sample_files, "files", lambda directory: found)
    assert [step for step, _ in viewed.state_of(Path(run), "")["samples"]] == [2]
