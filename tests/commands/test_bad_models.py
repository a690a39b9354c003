"""Models that cannot be loaded, and those that do not fit, end in one clear message before any work."""

import json

import pytest

from fppo import models
from fppo.commands import cli
from fppo.key import Key
from fppo.quickstart import character_tokenizer, small_model
from fppo.settings import places
from tests import tiny_run
from tests.commands.refused import fails, make_read


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
    said = fails(task, capsys)
    assert {"pad": "padding", "eos": "end"}[token] in said


def test_a_critic_with_another_vocabulary(task, capsys):
    other = small_model(40, width=16, layers=1)
    models.save(other, models.init_params(other, Key(0)), task / "other", tokenizer=character_tokenizer())
    said = fails(task, capsys, "--model.critic-path", str(task / "other"))
    assert "critic has 40 tokens" in said


def test_a_missing_model(task, capsys):
    assert "nowhere" in fails(task, capsys, "--model.path", str(task / "nowhere"))


@pytest.mark.parametrize("name", ["reward.model.path", "reward.judge.path"])
def test_a_model_of_rewards_that_is_nowhere_is_named_with_its_setting(task, capsys, monkeypatch, name):
    def away(*_, **__):
        raise FileNotFoundError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", away)
    said = fails(task, capsys, f"--{name}", "someone/nowhere")
    assert f"{name}: someone/nowhere is no directory, and the hub gave no model of that name: no route to" in said


def test_what_is_no_reward_model_is_named_with_its_setting(task, capsys):
    said = fails(task, capsys, "--reward.model.path", str(task / "start"))
    assert f"reward.model.path: {task / 'start'} is not a reward model" in said


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"", "is cut off: it has 0 bytes"),
        ("model.safetensors", b"\xff" * 8 + b"{}", "is cut off: it has 10 bytes"),
        ("model.safetensors", b"\x02" + b"\0" * 7 + b"[]", "no safetensors file: its header cannot be read"),
        ("model.safetensors", None, "holds no model.safetensors"),
        ("model.safetensors.index.json", b"{", "is not an index of weights"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "gone.safetensors"}}',
            "its index names: ['gone.safetensors']",
        ),
        ("config.json", None, "holds no config.json"),
        ("config.json", b"{", "config.json is not JSON"),
    ],
)
def test_a_model_that_is_not_whole(task, capsys, file, content, message):
    if content is None:
        (task / "start" / file).unlink()
    else:
        (task / "start" / file).write_bytes(content)
    make_read(task, file)
    said = fails(task, capsys)
    assert f"model.path = {str(task / 'start')!r}: " in said
    assert message in said


def test_weights_that_are_cut_off_are_told_from_whole_ones(task):
    whole = task / "start" / "model.safetensors"
    assert places.weights_problem(whole) is None
    content = whole.read_bytes()
    for changed, message in ((content[:-1], "is cut off"), (content + b"0", "is too long")):
        whole.write_bytes(changed)
        assert message in places.weights_problem(whole)
        with pytest.raises(ValueError, match=r"cut off or damaged .* copy or download it again"):
            models.load(task / "start")


def test_a_model_without_a_tokenizer(task, capsys):
    for name in places.TOKENIZER_FILES:
        (task / "start" / name).unlink(missing_ok=True)
    (problem,) = [x for x in places.place_problems(tiny_run.settings(task)) if "holds no tokenizer, none of" in str(x)]
    assert problem.path == "model.path"
    assert "give one with model.tokenizer" in str(problem)
    assert "holds no tokenizer, none of" in fails(task, capsys)
    (task / "start" / "tokenizer.json").write_text("{")
    assert "tokenizer.json is not JSON" in fails(task, capsys)
    (task / "start" / "tokenizer.json").write_text("{}")
    assert "model.path: no tokenizer came from" in fails(task, capsys)


def test_the_directory_of_a_run_is_no_model(task, capsys):
    (task / "done").mkdir()
    (task / "done" / "settings.toml").write_text("")
    (task / "done" / "model").mkdir()
    said = fails(task, capsys, "--model.path", str(task / "done"))
    assert f"is the directory of a run, not of a model; give {task / 'done' / 'model'}" in said
    assert cli.main(["train", str(task / "done")]) == 2
    assert f"the settings of the run in it are {task / 'done' / 'settings.toml'}" in capsys.readouterr().err
    assert cli.main(["export", str(task / "out"), str(task / "done")]) == 2
    assert f"give the run first: fppo export {task / 'done'} {task / 'out'}" in capsys.readouterr().err


def test_a_model_name_without_a_network_is_named_with_its_setting(task, capsys, monkeypatch):
    waited = []

    def away(*_, etag_timeout, **__):
        waited.append(etag_timeout)
        raise FileNotFoundError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", away)
    said = fails(task, capsys, "--model.path", "someone/nowhere")
    assert "1 problem" in said
    assert "model.path: someone/nowhere is no directory, and the hub gave no model of that name: no route" in said
    assert max(waited) < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        '{"hidden_size": "x"}',
        '{"hidden_size": -4}',
        '{"num_attention_heads": 0}',
        '{"num_hidden_layers": 1.5}',
        '{"rope_parameters": 5}',
        '{"rope_parameters": {"rope_type": "nowhere", "rope_theta": 1.0}}',
        '{"hidden_act": "nope"}',
        '{"eos_token_id": [[1]]}',
        '{"dtype": "float99"}',
        '{"layer_types": ["a"]}',
        '{"max_position_embeddings": {"a": []}}',
    ],
)
def test_a_config_with_values_of_other_kinds(task, capsys, config):
    said = fails(task, capsys, "--model.config", config)
    assert "Traceback" not in said
    assert next(iter(json.loads(config))) in said or "transformers builds no model" in said or "layers of kind" in said
    path = task / "start" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(config)))
    assert "model" in fails(task, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer_config.json", {"chat_template": 5}, "is not text: 5"),
        ("tokenizer_config.json", {"chat_template": {"a": 1}}, "is not text: {'a': 1}"),
        ("tokenizer_config.json", {"eos_token": 7}, "model.path"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": 1}}, "model.path"),
        ("generation_config.json", [1], "generation_config.json"),
        ("generation_config.json", 5, "generation_config.json"),
        ("generation_config.json", {"eos_token_id": [[1]]}, "eos_token_id holds [[1]], which are no ids"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id holds ['x'], which are no ids"),
        ("generation_config.json", {"eos_token_id": [1, 99]}, "eos_token_id names [99], and the model has 15 tokens"),
        ("generation_config.json", {"eos_token_id": -2}, "eos_token_id names [-2], and the model has 15 tokens"),
        ("tokenizer.json", {"model": {"vocab": 5, "type": "BPE"}}, "model.path: no tokenizer came from"),
        ("model.safetensors.index.json", {"weight_map": {"a": 5}}, "is not an index of weights"),
        ("adapter_config.json", {"r": [1], "lora_alpha": {}}, "model.lora.path"),
        ("adapter_config.json", [], "model.lora.path"),
    ],
)
def test_files_of_a_model_with_values_of_other_kinds(task, capsys, file, content, said):
    path, words = task / "start" / file, []
    if "chat_template" in str(content):
        words = ["--data.chat"]
    if file == "adapter_config.json":
        words = ["--model.lora.rank", "2", "--model.lora.path", str(task / "start")]
    old = json.loads(path.read_text()) if path.exists() and isinstance(content, dict) and "tok" in file else {}
    path.write_text(json.dumps(old | content if isinstance(content, dict) else content))
    make_read(task, file)
    assert said in fails(task, capsys, *words)


def test_a_plan_of_a_config_with_values_of_other_kinds(task, capsys):
    path = task / "start" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": "wide"}))
    assert cli.main(["plan", "--model.path", str(task / "start")]) == 2
    assert "of config.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "--rollout.max-tokens 40 --eval.max-tokens 3",
            "rollout.max_tokens = 40: with the longest prompt of 4 tokens a row may have 44, and model.path = "
            "'{task}/start' has 32 positions (max_position_embeddings); give at most 28",
        ),
        ("--eval.max-tokens 40", "eval.max_tokens = 40: with the longest prompt of 4 tokens a row may have 44, and"),
        (
            '--model.config {{"max_position_embeddings":3}}',
            "has 3 positions (max_position_embeddings); leave long prompts out",
        ),
        ('--model.config {{"max_position_embeddings":0}}', "has 0 positions (max_position_embeddings)"),
        ("--critic.privileged 30", "with the longest prompt of 34 tokens a row may have 37"),
        ("--model.lora.rank 100000", "model.lora.targets: rank=100000: no weight that is adapted has a rank above 16"),
        ("--model.lora.rank 2 --model.lora.targets nowhere", "model.lora.targets: targets ['nowhere'] name no weight"),
        (
            '--model.config {{"layer_types":["sliding_attention"]}}',
            "has layers of kind 'sliding_attention' and sliding_window = None",
        ),
        (
            '--model.config {{"layer_types":["sliding_attention"],"sliding_window":-3,"use_sliding_window":true}}',
            "sliding_window = -3: give how many tokens they see, or other layer_types",
        ),
        ('--model.config {{"layer_types":["chunked_attention"]}}', "has layers of kind 'chunked_attention' and"),
    ],
)
def test_what_a_model_was_not_made_for_is_named_before_the_run(task, capsys, overrides, said):
    assert said.format(task=task) in fails(task, capsys, *overrides.format(task=task).split())


@pytest.mark.slow
def test_a_model_whose_positions_are_stretched_takes_longer_rows(task, capsys):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    config = json.dumps({"rope_parameters": yarn})
    assert "has 64 positions" in fails(task, capsys, "--model.config", config, "--rollout.max-tokens", "61")
    longer = ["--model.config", json.dumps({"max_position_embeddings": 44}), "--rollout.max-tokens", "40"]
    assert cli.main(["train", str(task / "run.toml"), *longer, "--steps", "1"]) == 0


def test_demonstrations_beyond_the_positions_of_a_model_are_named_by_their_rows(task, capsys):
    rows = [{"prompt": "1+1=", "response": "2" * size} for size in (1, 40)]
    (task / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert cli.main(["sft", str(task / "run.toml"), "--data.eval-path"]) == 2
    said = capsys.readouterr().err
    assert (
        f"train.jsonl:2: 45 tokens, and model.path = '{task}/start' has 32 positions (max_position_embeddings)" in said
    )
