"""What is saved is what transformers loads, and what is loaded is what was saved."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from fppo import models, tree
from fppo.key import Key
from fppo.models.model import causal_lm
from fppo.models.save import _filled
from tests.models.families import CONFIGS, make, plain

TOKENS = torch.tensor([[5, 7, 3, 9]])
FLOATS = torch.float32


def assert_same(got, expected):
    assert list(got) == list(expected)
    assert tree.digest(got) == tree.digest(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_and_transformers_logits(name, tmp_path):
    model, params = make(name, dtype=FLOATS)
    models.save(model, params, tmp_path / "m")
    again, loaded = models.load(tmp_path / "m")
    assert_same(loaded, params)
    assert again.config.architectures == [type(plain(model, params)).__name__]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, plain(model, params)(TOKENS).logits, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_nothing_is_written_beside_what_is_saved(tmp_path, capfd):
    model, params = make("llama", dtype=FLOATS)
    shown = transformers_logging.is_progress_bar_enabled()
    models.save(model, params, tmp_path)
    assert "".join(capfd.readouterr()) == ""
    assert transformers_logging.is_progress_bar_enabled() == shown


def test_the_config_keeps_its_dropouts(tmp_path):
    model, params = make("llama", dtype=FLOATS)
    assert model.skeleton.config.attention_dropout == 0.0
    models.save(model, params, tmp_path / "llama")
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["attention_dropout"] == 0.1
    assert CONFIGS["llama"].attention_dropout == 0.1
    model, params = make("phi3", dtype=FLOATS)
    assert model.skeleton.config.resid_pdrop == 0.0
    models.save(model, params, tmp_path / "phi3")
    assert json.loads((tmp_path / "phi3" / "config.json").read_text())["resid_pdrop"] == 0.1


def test_sharded_files(tmp_path):
    model, params = make("llama", dtype=FLOATS)
    models.save(model, params, tmp_path, max_shard_bytes=4000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same(models.load(tmp_path)[1], params)
    next(iter(tmp_path.glob("*.safetensors"))).unlink()
    with pytest.raises(ValueError, match="lacks files that its index names"):
        models.load(tmp_path)


def test_saving_again_replaces_all(tmp_path):
    model, params = make("llama", dtype=FLOATS)
    models.save(model, params, tmp_path / "m", max_shard_bytes=4000)
    changed = {name: x + 1 for name, x in params.items()}
    models.save(model, changed, tmp_path / "m", generation_config=GenerationConfig(max_new_tokens=3))
    assert_same(models.load(tmp_path / "m")[1], changed)
    assert GenerationConfig.from_pretrained(tmp_path / "m").max_new_tokens == 3
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def _all_of(directory):
    return {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")}


@pytest.mark.parametrize(
    "there", ["a file", "notes", "a run", "notes in an export", "another's model", "a damaged list"]
)
def test_only_an_earlier_save_is_replaced(tmp_path, there):
    model, params = make("llama", dtype=FLOATS)
    target = tmp_path / "m"
    if there == "a file":
        target.write_text("mine")
    elif there == "another's model":
        plain(model, params).save_pretrained(target)
    elif there in ("notes in an export", "a damaged list"):
        models.save(model, params, target)
        (target / "sub").mkdir()
        (target / "sub/notes.txt").write_text("mine")
        if there == "a damaged list":
            (target / "fppo_files.json").write_text("mine")
    else:
        (target / "checkpoints").mkdir(parents=True)
        (target / "checkpoints" / "notes.txt").write_text("mine")
    before = _all_of(tmp_path)
    with pytest.raises(ValueError, match=r"a file, which a model does not replace|which saving a model would delete"):
        models.save(model, params, target)
    assert _all_of(tmp_path) == before


def test_an_empty_directory_and_an_earlier_save_behind_a_link_are_replaced(tmp_path):
    model, params = make("llama", dtype=FLOATS)
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to("m")
    for factor in (1, 2):
        models.save(model, {name: x * factor for name, x in params.items()}, tmp_path / "link")
        assert_same(models.load(tmp_path / "m")[1], {name: x * factor for name, x in params.items()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "m"]
    assert (tmp_path / "link").is_symlink()


def test_files_have_the_mode_of_the_umask(tmp_path):
    model, params = make("llama", dtype=FLOATS)
    before = os.umask(0o027)
    try:
        models.save(model, params, tmp_path / "m", max_shard_bytes=4000)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "m").iterdir()} == {"0o640"}


def test_a_model_without_its_parameters_is_built_again(tmp_path):
    for head in ("lm", "value"):
        model, _ = make("llama", head=head, dtype=FLOATS)
        models.save_config(model, tmp_path / head)
        again = models.build(AutoConfig.from_pretrained(tmp_path / head), head)
        assert dict(again.shapes) == dict(model.shapes)
        assert list((tmp_path / head).glob("*.safetensors")) == []


def test_a_failed_save_leaves_the_old_one(tmp_path):
    model, params = make("llama", dtype=FLOATS)
    models.save(model, params, tmp_path / "m")
    with pytest.raises(ValueError, match=r"cannot save.*model\.norm\.weight"):
        models.save(model, {n: x for n, x in params.items() if n != "model.norm.weight"}, tmp_path / "m")

    class Tokenizer:
        def save_pretrained(self, directory):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models.save(model, {n: x + 1 for n, x in params.items()}, tmp_path / "m", tokenizer=Tokenizer())
    assert_same(models.load(tmp_path / "m")[1], params)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_dtype(tmp_path):
    model, params = make("qwen2", dtype=torch.bfloat16)
    models.save(model, params, tmp_path)
    assert_same(models.load(tmp_path, dtype=torch.bfloat16)[1], params)
    assert_same(models.load(tmp_path)[1], {name: x.float() for name, x in params.items()})


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "gemma2", "phi3", "olmo2", "cohere"])
def test_value_models(name, tmp_path):
    model, params = make(name, head="value", dtype=FLOATS)
    models.save(model, params, tmp_path)
    assert_same(models.load(tmp_path, "value")[1], params)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"][0].endswith("ForTokenClassification")
    if type(model.config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        assert name in ("olmo2", "cohere")
        return
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ours = models.hidden_states(
        model, params, TOKENS, torch.arange(4)[None], attend=models.padded_attention(torch.ones(1, 4, dtype=torch.bool))
    )
    head = models.output_head(model, params)
    with torch.no_grad():
        torch.testing.assert_close(ours @ head.weight.T + head.bias, theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_a_causal_checkpoint_as_critic(tmp_path):
    model, params = make("qwen2", dtype=FLOATS)
    models.save(model, params, tmp_path)
    critic, values = models.load(tmp_path, "value", key=Key(1))
    assert list(values) == list(critic.shapes)
    assert all(torch.equal(values[n], params[n]) for n in params)
    assert values["score.weight"].abs().max() > 0
    assert_same(models.load(tmp_path, "value", key=Key(1))[1], values)
    assert not models.load(tmp_path, "value")[1]["score.weight"].any()


def test_trl_value_head(tmp_path):
    model, params = make("llama", dtype=FLOATS)
    models.save(model, params, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    head = {"v_head.summary.weight": torch.randn(1, 16), "v_head.summary.bias": torch.randn(1)}
    save_file({**stored, **head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, values = models.load(tmp_path, "value")
    assert torch.equal(values["score.weight"], head["v_head.summary.weight"])
    assert torch.equal(values["score.bias"], head["v_head.summary.bias"])
    assert_same(models.load(tmp_path)[1], params)


def test_a_sequence_classifier_is_a_reward_model(tmp_path):
    config = CONFIGS["qwen2"].__class__(**{**CONFIGS["qwen2"].to_dict(), "num_labels": 1})
    theirs = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    model, params = models.load(tmp_path, "value")
    attend = models.padded_attention(torch.ones(1, 4, dtype=torch.bool))
    hidden = models.hidden_states(model, params, TOKENS, torch.arange(4)[None], attend=attend)
    head = models.output_head(model, params)
    with torch.no_grad():
        ours = (hidden @ head.weight.T + head.bias)[:, -1]
        torch.testing.assert_close(ours, theirs(TOKENS).logits, rtol=1e-5, atol=1e-6)


def test_every_problem_is_listed(tmp_path):
    model, params = make("llama", dtype=FLOATS)
    models.save(model, params, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.norm.weight"], stored["model.layers.0.mlp.up_proj.weight"]
    stored["model.adapter.weight"] = torch.zeros(2)
    stored["lm_head.weight"] = torch.zeros(5, 16)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="does not hold a whole 'llama' model") as error:
        models.load(tmp_path)
    for part in (
        "model.norm.weight",
        "layers.0.mlp.up_proj",
        "model.adapter.weight",
        "lm_head.weight has shape (5, 16)",
    ):
        assert part in str(error.value)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_parameter_too_many_is_refused(tmp_path):
    """Where nothing else is wrong, so that parts could be read."""
    model, params = make("llama", dtype=FLOATS)
    models.save(model, params, tmp_path)
    stored = load_file(tmp_path / "model.safetensors") | {"model.adapter.weight": torch.zeros(2)}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unknown \['model\.adapter\.weight'\]"):
        models.load(tmp_path)


def test_a_value_head_of_two_labels_is_refused(tmp_path):
    model, params = make("llama", head="value", dtype=FLOATS)
    models.save(model, params, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["score.weight"] = torch.zeros(2, 16)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"score\.weight has shape \(2, 16\), expected \(1, 16\)"):
        models.load(tmp_path, "value")


def test_pickles_and_empty_places_are_refused(tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ValueError, match=r"no model.safetensors; \['pytorch_model.bin'\] are pickles"):
        models.load(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        models.load(tmp_path / "nowhere")


def test_what_a_class_computes_is_not_written():
    model, params = make("llama", dtype=FLOATS)
    module, computed = causal_lm(model.config, "meta"), "model.layers.1.mlp.up_proj.weight"
    module._keys_to_ignore_on_save = {computed}
    assert list(_filled(module, dict(reversed(params.items())))) == [n for n in module.state_dict() if n != computed]


def test_other_parameters_than_those_of_the_class_are_not_saved():
    model, params = make("qwen2", dtype=FLOATS)
    name = "model.norm.weight"
    fewer, more = {n: x for n, x in params.items() if n != name}, {**params, "model.other.weight": params[name]}
    for given, said in ((fewer, rf"does not hold: \['{name}'\]"), (more, r"or lacks \['model.other.weight'\]")):
        with pytest.raises(ValueError, match=f"cannot save: Qwen2ForCausalLM has parameters that fppo .*{said}"):
            _filled(causal_lm(model.config, "meta"), given)


@pytest.mark.parametrize("name", ["qwen2", "cohere"])
def test_a_head_of_several_values_has_a_label_for_each(name, tmp_path):
    """Where the family has a class for it, and where not."""
    model, params = make(name, head="value", dtype=FLOATS, outputs=3)
    models.save(model, params, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_labels, config.dtype) == (3, FLOATS)
    again, loaded = models.load(tmp_path, "value", outputs=3)
    assert again.outputs == 3
    assert_same(loaded, params)
    some, taken = models.load(tmp_path, "value", outputs=range(1, 3))
    assert some.outputs == 2
    heads = {name: x[1:3] for name, x in params.items() if name.startswith("score.")}
    assert_same({name: taken[name] for name in heads}, heads)
