"""What the end of a command needs is tried before its work: names, room, forms of models, and what is written there."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file

from fppo._errors import UsageError
from fppo.commands import push
from fppo.commands.cli import main
from fppo.settings import files
from tests import tiny_run


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    return tmp_path


def told(task, capsys, **changes):
    """The statuses of a look at a run and of the run, and what both say."""
    files.save(tiny_run.settings(task, steps=1, eval__before=False, **changes), task / "run.toml")
    statuses = [main(["check", str(task / "run.toml"), "--gpu", "cpu", "--prompts", "0"])]
    looked = capsys.readouterr()
    statuses.append(main(["train", str(task / "run.toml")]))
    ran = capsys.readouterr()
    return statuses, looked.out + looked.err, ran.out + ran.err


def lines(task):
    file = task / "run" / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.slow
def test_an_adapter_that_pefts_files_cannot_hold_is_exported_merged_and_said_before(task, capsys):
    own = {"model__lora__rank": 2, "model__lora__targets": ["embed_tokens", "q_proj"]}
    statuses, looked, ran = told(task, capsys, **own)
    assert statuses == [0, 0]
    for said in (looked, ran):
        words = " ".join(said.split())
        assert "export whole weights, with the adapter merged in: model.embed_tokens.weight is the vocabulary" in words
    assert main(["export", str(task / "run"), str(task / "out"), "--merge"]) == 0
    ended, merged = (load_file(place / "model.safetensors") for place in (task / "run" / "model", task / "out"))
    assert ended.keys() == merged.keys()
    assert all(torch.equal(x, merged[name]) for name, x in ended.items())
    start = load_file(task / "start" / "model.safetensors")
    assert not torch.equal(ended["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
    assert "tokenizer.json" in {path.name for path in (task / "run" / "model").iterdir()}


@pytest.mark.slow
def test_one_stack_of_experts_is_exported_as_an_adapter(task, capsys):
    tiny_run.write_mixture(task)
    own = {"model__lora__rank": 2, "model__lora__targets": ["experts.down_proj"]}
    statuses, looked, _ = told(task, capsys, **own)
    assert statuses == [0, 0]
    assert "merged in" not in looked
    config = json.loads((task / "run" / "model" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj"]
    again = {"model__lora__path": str(task / "run" / "model"), "output_dir": str(task / "again")}
    assert told(task, capsys, **again)[0] == [0, 0]


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_model_whose_words_cannot_be_written_is_named_before_any_work(task, capsys, command):
    place = task / "start" / "tokenizer_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"chat_template": "\ud800"}))
    if command == "train":
        statuses, looked, ran = told(task, capsys)
        assert statuses == [2, 2]
        assert "model.path: the policy could not be exported: UnicodeEncodeError" in looked
    else:
        settings = tiny_run.settings(task, sft__batch_size=4, sft__response="answer")
        files.save(settings, task / "run.toml")
        assert main(["sft", str(task / "run.toml"), "--steps", "1"]) == 2
        ran = capsys.readouterr().err
    assert "model.path: the policy could not be exported: UnicodeEncodeError" in ran
    assert lines(task) == []


def test_targets_that_name_nothing_are_a_problem_among_others(task, capsys):
    own = {"model__lora__rank": 2, "model__lora__targets": ["nothing"], "reward__functions": ["nowhere:reward"]}
    statuses, looked, _ = told(task, capsys, **own)
    assert statuses == [2, 2]
    assert "nowhere" in looked
    files.save(tiny_run.settings(task, model__lora__rank=2, model__lora__targets=["nothing"]), task / "run.toml")
    assert main(["check", str(task / "run.toml"), "--gpu", "cpu"]) == 2
    assert "model.lora.targets: targets ['nothing'] name no weight that can be adapted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "is_file"), [("report.html", False), ("curves.png", False), ("evaluations", True), ("samples", True)]
)
def test_what_is_in_the_way_of_files_of_the_end_is_named_before_the_start(task, capsys, name, is_file):
    (task / "run").mkdir()
    (task / "run" / name).touch() if is_file else (task / "run" / name).mkdir()
    statuses, looked, ran = told(task, capsys)
    assert statuses == [2, 2]
    kind = "directory" if is_file else "file"
    for said in (looked, ran):
        assert f"{task / 'run' / name} is no {kind}, which a run writes there" in said
    assert lines(task) == []


@pytest.mark.parametrize("room", [100, 8000, 10**9])
def test_a_disk_without_room_for_the_last_checkpoint_and_the_model_is_no_start(task, monkeypatch, capsys, room):
    files.save(tiny_run.settings(task, steps=1, eval__before=False), task / "run.toml")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(total=10**12, free=room))
    status = main(["train", str(task / "run.toml")])
    said = capsys.readouterr().err
    if room == 10**9:
        assert status == 0
        return
    assert status == 2
    assert "output_dir: the run ends with a checkpoint and a model of" in said
    assert lines(task) == []


@pytest.mark.parametrize(
    "words",
    [
        ["ablate", "--op", "gae", "--json"],
        ["ablate", "--op", "gae", "--png"],
        ["bias", "--markdown"],
        ["plan", "--model.path", "qwen2.5-0.5b", "--json"],
        ["audit", "trl", "--json"],
        ["trace", "nowhere", "--out"],
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_any_work(tmp_path, capsys, words):
    (tmp_path / "file").touch()
    for place, why in ((tmp_path, "is a directory"), (tmp_path / "file" / "x", f"{tmp_path / 'file'} is no directory")):
        assert main([*words, str(place)]) == 2
        assert why in capsys.readouterr().err


def test_a_repository_that_is_public_already_is_named_before_the_export():
    class Hub(HfApi):
        def whoami(self, *_, **__):
            return {"name": "me"}

        def repo_info(self, repo_id, *_, **__):
            assert repo_id == "me/new"
            return SimpleNamespace(private=False)

    with pytest.raises(UsageError, match="me/new: it is there and public; give --public"):
        push.check("new", Hub())
    push.check("new", Hub(), public=True)
