"""Bad input ends in one clear message, before any work, and nothing is lost."""

import json
import shutil
import subprocess
import sys

import pytest

from fppo import models
from fppo.commands import cli
from fppo.key import Key
from fppo.quickstart import character_tokenizer, small_model
from fppo.runs import session
from fppo.runtime import checkpoint
from fppo.settings import files
from tests import tiny_run


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    files.save(tiny_run.settings(tmp_path), tmp_path / "run.toml")
    return tmp_path


def nan_reward(sample):
    return float("nan")


def no_reward(sample):
    return None


def _fails(task, capsys, *overrides, begun=False):
    """What `fppo train` says of bad settings; nothing may have been written unless the run had begun."""
    assert cli.main(["train", str(task / "run.toml"), *overrides]) == 2
    assert (task / "run").exists() == begun
    return capsys.readouterr().err


def test_a_malformed_row_names_file_line_and_field(task, capsys):
    path = task / "train.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = '{"prompt": "1+1="}'
    lines[4] = "{"
    path.write_text("\n".join(lines))
    said = _fails(task, capsys)
    assert "train.jsonl" in said
    assert "'answer'" in said
    assert "3" in said
    assert "5" in said


def test_an_empty_data_set_and_a_missing_one(task, capsys):
    (task / "train.jsonl").write_text("")
    assert "no " in _fails(task, capsys)
    (task / "train.jsonl").unlink()
    assert "train.jsonl" in _fails(task, capsys)


def test_prompts_over_the_limit(task, capsys):
    assert "max_prompt_tokens" in _fails(task, capsys, "--data.max-prompt-tokens", "3")
    assert "dropped" in _fails(task, capsys, "--data.max-prompt-tokens", "3", "--data.over-long", "drop")


def test_an_unknown_setting_names_the_nearest(task, capsys):
    text = (task / "run.toml").read_text().replace("batch_size", "batchsize")
    (task / "run.toml").write_text(text)
    assert "batch_size" in _fails(task, capsys)


def test_conflicting_sizes_are_named_at_once(task, capsys):
    said = _fails(task, capsys, "--rollout.n", "3", "--actor.mini-batch-size", "5", "--critic.mini-batch-size", "7")
    assert "rollout.batch_size" in said
    assert "actor.mini_batch_size" in said
    assert "critic.mini_batch_size" in said


def test_a_chat_template_is_needed(task, capsys):
    assert "chat template" in _fails(task, capsys, "--data.chat")


@pytest.mark.parametrize("token", ["pad", "eos"])
def test_a_tokenizer_without_a_token(task, capsys, token):
    path = task / "start" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings[f"{token}_token"]
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings))
    (task / "start" / "config.json").write_text(
        (task / "start" / "config.json").read_text().replace('"model_type": "qwen2"', '"model_type": "llama"')
    )
    said = _fails(task, capsys)
    assert {"pad": "padding", "eos": "end"}[token] in said


def test_a_critic_with_another_vocabulary(task, capsys):
    other = small_model(40, width=16, layers=1)
    models.save(other, models.init_params(other, Key(0)), task / "other", tokenizer=character_tokenizer())
    said = _fails(task, capsys, "--model.critic-path", str(task / "other"))
    assert "critic has 40 tokens" in said


def test_a_reward_that_does_not_import_or_is_unknown(task, capsys):
    assert "nowhere" in _fails(task, capsys, "--reward.functions", "nowhere:reward")
    assert "exact_match" in _fails(task, capsys, "--reward.functions", "exact_macth")


def test_a_loss_that_does_not_import(task, capsys):
    assert "actor.loss.name" in _fails(task, capsys, "--actor.loss.name", "nowhere:loss")


@pytest.mark.parametrize("name", ["nan_reward", "no_reward"])
def test_a_reward_that_returns_no_number(task, capsys, name):
    said = _fails(task, capsys, "--reward.functions", f"tests.commands.test_bad_input:{name}", begun=True)
    assert name in said
    assert "sample 0" in said


def test_a_missing_model(task, capsys):
    assert "nowhere" in _fails(task, capsys, "--model.path", str(task / "nowhere"))


def test_a_checkpoint_of_another_model_and_a_damaged_one(task, capsys):
    assert cli.main(["train", str(task / "run.toml"), "--steps", "2"]) == 0
    other = small_model(len(character_tokenizer()), width=32, layers=1)
    shutil.rmtree(task / "start")
    models.save(other, models.init_params(other, Key(0)), task / "start", tokenizer=character_tokenizer())
    assert "of another model" in _fails(task, capsys, begun=True)
    tiny_run.write_task(task)
    newest = checkpoint.path_of(task / "run" / "checkpoints", 2) / "shard_00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    assert "Remove it to resume from step 1" in _fails(task, capsys, begun=True)
    shutil.rmtree(newest.parent)
    assert cli.main(["train", str(task / "run.toml")]) == 0


def test_a_full_disk_keeps_the_last_checkpoint(task, capsys, monkeypatch):
    assert cli.main(["train", str(task / "run.toml"), "--steps", "2"]) == 0

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert "The last complete one is of step 2" in _fails(task, capsys, begun=True)
    monkeypatch.undo()
    assert cli.main(["train", str(task / "run.toml")]) == 0


def test_an_output_directory_that_cannot_be_written(task, capsys, monkeypatch):
    (task / "file").write_text("")
    (task / "file").chmod(0o755)
    for command in ("train", "rollout"):
        for path in ("file", "file/run"):
            assert cli.main([command, str(task / "run.toml"), "--output-dir", str(task / path)]) == 2
            said = capsys.readouterr().err
            assert f"output_dir = {str(task / path)!r}: {task / 'file'} is a file" in said
    monkeypatch.setattr(session.os, "access", lambda *_: False)
    assert f"{task} may not be written to; give another directory" in _fails(task, capsys)


def test_rollouts_of_another_command_are_not_written_over(task, capsys):
    assert cli.main(["rollout", str(task / "run.toml"), "--steps", "2"]) == 0
    before = {path: path.read_bytes() for path in (task / "run" / "rollouts").iterdir()}
    capsys.readouterr()
    said = _fails(task, capsys, "--rollout.save", "--seed", "1", begun=True)
    assert "rollout.save = True: " in said
    assert "holds what fppo rollout made" in said
    assert {path: path.read_bytes() for path in (task / "run" / "rollouts").iterdir()} == before


def test_a_directory_without_rollouts_and_the_one_around_them(task, capsys):
    said = _fails(task, capsys, "--rollout.from", str(task))
    assert f"rollout.from = {str(task)!r}: it holds no rollouts, no step_00000001.safetensors" in said
    made = task / "made"
    assert cli.main(["rollout", str(task / "run.toml"), "--steps", "2", "--output-dir", str(made)]) == 0
    said = _fails(task, capsys, "--rollout.from", str(made))
    assert f"it holds no rollouts; give {made / 'rollouts'}" in said


@pytest.mark.parametrize("name", ["reward.model.path", "reward.judge.path"])
def test_a_model_of_rewards_that_is_nowhere_is_named_with_its_setting(task, capsys, monkeypatch, name):
    def away(*_, **__):
        raise FileNotFoundError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", away)
    said = _fails(task, capsys, f"--{name}", "someone/nowhere")
    assert f"{name}: someone/nowhere is no directory, and no model of that name came from the hub: no route to" in said


def test_what_is_no_reward_model_is_named_with_its_setting(task, capsys):
    said = _fails(task, capsys, "--reward.model.path", str(task / "start"))
    assert f"reward.model.path: {task / 'start'} is no reward model" in said


def test_a_part_of_the_reward_that_there_is_not(task, capsys):
    overrides = ["--rollout.n", "2", "--rollout.filter.groups", "--rollout.filter.by", "nowhere"]
    said = _fails(task, capsys, *overrides, begun=True)
    assert "rollout.filter.by: the reward has no part 'nowhere' to compare groups by; there are ['score', " in said


@pytest.mark.parametrize(("command", "place"), [("train", "run"), ("rollout", "run/rollouts")])
def test_a_directory_that_another_process_writes_to(task, capsys, command, place):
    (task / place).mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from fppo.runs.session import alone_in\n"
        "with alone_in(Path(sys.argv[1])): print('there', flush=True); sys.stdin.read()"
    )
    asked = [sys.executable, "-c", code, str(task / place)]
    with subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "there\n"
        assert cli.main([command, str(task / "run.toml")]) == 2
        assert f"another process is writing to {task / place}" in capsys.readouterr().err
        assert not list((task / place).iterdir())
        other.kill()
    assert cli.main([command, str(task / "run.toml"), "--steps", "1"]) == 0
