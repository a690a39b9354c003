"""Damage to a run's small records is named, and stops neither a healthy run nor what does not need them."""

import os
import shutil

import pytest

from fppo.commands import cli
from fppo.runs import jsonl, starts
from fppo.runtime import exports
from fppo.settings import files
from tests import tiny_run

START = "starts/step_00000000.toml"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A task, a run of it that stands at step 1, and the digests of one that was left alone."""
    task = tmp_path_factory.mktemp("task")
    tiny_run.write_task(task)
    files.save(tiny_run.settings(task, steps=2, data__eval_path=[]), task / "run.toml")
    assert cli.main(["train", str(task / "run.toml"), "--steps", "1"]) == 0
    shutil.copytree(task / "run", task / "begun")
    assert cli.main(["train", str(task / "run.toml")]) == 0
    return task, jsonl.read(task / "run" / "digests.jsonl")


def _cut(data):
    return data[: len(data) // 2]


def _flip(data):
    place = data.index(b"batch_size = 8") + len("batch_size = ")
    return data[:place] + b"4" + data[place + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (START, lambda data: b""),
        pytest.param(START, lambda data: b"\0" * len(data), marks=pytest.mark.slow),
        (START, _cut),
        (START, _flip),
        pytest.param(START, lambda data: b"\xff\xfe" + data, marks=pytest.mark.slow),
        pytest.param(START, lambda data: b"a = " + b"[" * 5000, marks=pytest.mark.slow),
        ("settings.toml", _cut),
        ("configs/actor/fppo_files.json", lambda data: b""),
        pytest.param("configs/actor/fppo_files.json", _cut, marks=pytest.mark.slow),
        ("configs/critic/fppo_files.json", lambda data: b'{"files": "all"}'),
        ("configs/critic/fppo_files.json", lambda data: b"[" * 50_000),
        ("metrics.jsonl", lambda data: b'{"step": "one"}\n' + data),
        ("digests.jsonl", lambda data: b"{}\n" + data),
    ],
)
def test_a_run_goes_on_bit_for_bit_over_damaged_records(begun, tmp_path, capsys, file, damage):
    task, digests = begun
    run = tmp_path / "run"
    shutil.copytree(task / "begun", run)
    (run / file).write_bytes(damage((run / file).read_bytes()))
    assert cli.main(["train", str(task / "run.toml"), "--output-dir", str(run)]) == 0
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert jsonl.read(run / "digests.jsonl")[-2:] == digests
    if file == START:
        assert f"{run / START} is damaged: the settings of the steps from 1 are unknown" in said
        assert cli.main(["replay", str(run), "--step", "2"]) == 0
        assert cli.main(["replay", str(run), "--step", "1"]) == 2
        assert f"{run / START} is damaged: the settings that made step 1 are unknown" in capsys.readouterr().err


def test_a_record_of_a_version_before_has_no_digest_and_is_read(begun, tmp_path):
    task, _ = begun
    shutil.copytree(task / "begun", tmp_path / "run")
    place = tmp_path / "run" / START
    place.write_text(place.read_text().partition("\n")[2])
    assert starts.load(tmp_path / "run", 1).rollout.batch_size == 8


def test_an_export_whose_list_is_damaged_gives_way_to_the_next_but_other_files_do_not(tmp_path):
    with exports.replacing(tmp_path / "model") as draft:
        draft.mkdir()
        (draft / "config.json").write_text("{}")
        (draft / "model.safetensors").write_text("")
    (tmp_path / "model" / exports.CONTENTS).write_text("{")
    exports.check_replaceable(tmp_path / "model")
    (tmp_path / "model" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="holds thesis"):
        exports.check_replaceable(tmp_path / "model")


@pytest.mark.parametrize("write", ["starts", "lines", "export"])
def test_what_is_written_whole_is_synced_before_it_has_its_name(tmp_path, monkeypatch, write):
    """And its name after: else a crash of the machine leaves an empty file where a whole one was."""
    done: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), real["fsync"](handle)))
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, lambda *a, _name=name: (done.append("name"), real[_name](*a)))
    match write:
        case "starts":
            starts.record(tiny_run.settings(tmp_path, output_dir=str(tmp_path)), 0)
        case "lines":
            (tmp_path / "a.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
            jsonl.JsonLines(tmp_path / "a.jsonl", first_step=2).close()
        case "export":
            with exports.replacing(tmp_path / "model") as draft:
                draft.mkdir()
    assert "name" in done
    for place in (i for i, what in enumerate(done) if what == "name"):
        assert place > 0
        assert done[place - 1] == done[place + 1] == "sync"
