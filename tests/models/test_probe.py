"""A model that fppo would run otherwise than transformers does is refused when it is loaded, by name."""

import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    Qwen3_5TextConfig,
    SmolLM3Config,
)

from fppo import models
from fppo.key import Key
from fppo.models import lora
from fppo.models import probe as probes
from fppo.models.adapted import Lora
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels
from tests.models.families import CHANGED, COMMON, CONFIGS, DYNAMIC, LONGROPE, OWN, make, plain
from tests.models.hybrids import DELTA, MAMBA

KERNELS = Kernels.named()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_runs_as_in_transformers_is_accepted(name):
    models.check_model(models.build(CONFIGS[name]))


@pytest.mark.parametrize("name", CHANGED)
def test_a_type_that_came_to_use_the_interface_is_accepted(name):
    models.check_model(models.build(CHANGED[name]))


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (CONFIGS["gemma3"], (4.0, 1.0)),
        (CONFIGS["cohere"], (None, 0.25)),
        (CONFIGS["granite"], (None, 1 / 3)),
        (HyperCLOVAXConfig(**COMMON, logits_scaling=0.5), (None, 0.5)),  # a factor, where Granite's divides
        (FalconH1Config(**COMMON | MAMBA, mamba_d_ssm=32, head_dim=4, lm_head_multiplier=0.0390625), (None, 0.0390625)),
    ],
)
def test_what_becomes_of_the_heads_products_is_measured(config, form):
    model = models.build(config)
    assert model.logit_form == form
    models.check_model(model)


def test_logits_that_are_no_scaled_or_capped_products_are_refused(monkeypatch):
    whole = LlamaForCausalLM.forward

    def squared(self, *args, **kwargs):
        out = whole(self, *args, **kwargs)
        out.logits = out.logits**2
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", squared)
    with pytest.raises(
        ValueError, match=r"model type 'llama': LlamaForCausalLM makes .*neither a factor nor a soft cap"
    ):
        models.build(CONFIGS["llama"])


@pytest.mark.parametrize("name", OWN)
def test_what_computes_attention_in_a_way_of_its_own_is_refused(name):
    with pytest.raises(ValueError, match=f"cannot run model type '{name}'.*(code of their own|no attention mask)"):
        models.check_model(models.build(OWN[name]))


def test_a_wrong_model_is_refused_before_its_weights_are_read(tmp_path):
    AutoModelForCausalLM.from_config(OWN["gpt_neo"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    for head in ("lm", "value"):
        with pytest.raises(ValueError, match="model type 'gpt_neo': its layers compute attention in code of their own"):
            models.load(tmp_path, head)


def scaled_head(model, params):
    return models.output_head(model, params)._replace(scale=1.0)


def test_a_head_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setattr("fppo.models.probe.output_head", scaled_head)
    with pytest.raises(ValueError, match="model type 'cohere': the logits of packed rows of 5 and 24 tokens differ"):
        models.check_model(models.build(CONFIGS["cohere"]))


def test_rows_that_see_one_another_are_refused(monkeypatch):
    monkeypatch.setattr(probes, "make_lengths", lambda lengths: make_lengths([sum(lengths)]))
    with pytest.raises(ValueError, match="model type 'llama': the logits of packed rows"):
        models.check_model(models.build(CONFIGS["llama"]))


@pytest.mark.parametrize("feature", ["window", "sinks", "softcap"])
def test_an_attention_that_leaves_something_out_is_refused(feature, monkeypatch):
    def deaf(*args, **kwargs):
        return KERNELS.attention(*args, **kwargs | {feature: None})

    monkeypatch.setattr(probes, "sdpa", deaf)
    name = {"window": "mistral", "sinks": "gpt_oss", "softcap": "gemma2"}[feature]
    with pytest.raises(ValueError, match="differ from transformers'"):
        models.check_model(models.build(CONFIGS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "layers", "millions"),
    [
        (LlamaConfig(num_key_value_heads=8), 2, 1),
        (Gemma3TextConfig(), 6, 6),
        (SmolLM3Config(), 4, 2),
        (OlmoeConfig(), 2, 8),
        (OPTConfig(hidden_size=1024, word_embed_proj_dim=512, num_attention_heads=16), 2, 2),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_a_large_model_is_probed_on_a_small_instance_with_a_layer_of_each_kind(config, layers, millions):
    model = models.build(config)
    probe = probes.make_probe(model)
    assert sum(x.numel() for x in probe.params.values()) < millions * 1e6
    assert len(probe.model.layers) == layers
    for kinds in ("layer_types", "no_rope_layers"):
        if getattr(config, kinds, None):
            assert set(getattr(probe.model.config, kinds)) == set(getattr(config, kinds))
    models.check_model(model)


@pytest.mark.parametrize("config", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_a_rope_that_changes_with_the_length_gives_each_row_its_own_numbers_or_refuses_it(config, monkeypatch):
    monkeypatch.setitem(CONFIGS, "rope", config)
    model, params = make("rope")
    assert models.longest_row(config) == 12
    models.check_model(model)
    module = plain(model, params)

    def run(lengths):
        tokens = torch.randint(3, 31, (sum(lengths),), generator=torch.Generator().manual_seed(0))
        positions = torch.cat([torch.arange(n) for n in lengths])
        attend = models.packed_attention(KERNELS.attention, make_lengths(lengths))
        hidden = models.hidden_states(model, params, tokens, positions, attend=attend)
        return tokens, hidden @ models.output_head(model, params).weight.T

    tokens, logits = run([5, 12])
    with pytest.raises(ValueError, match=r"a row of 13 tokens.*longrope or dynamic.*config.json"):
        run([5, 13])
    assert torch.equal(run([5, 12])[1], logits)
    with torch.no_grad():
        for own, row in zip(logits.split([5, 12]), tokens.split([5, 12]), strict=True):
            torch.testing.assert_close(own, module.double()(row[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_other_ropes_have_no_longest_row():
    assert {models.longest_row(config) for config in CONFIGS.values()} == {None}
    assert models.longest_row(Phi3Config(bos_token_id=1, eos_token_id=2, pad_token_id=0)) is None


def test_a_family_whose_small_instances_do_not_run_is_refused(monkeypatch):
    def broken(*_):
        raise TypeError("no such width")

    monkeypatch.setattr(probes, "_filled", broken)
    with pytest.raises(ValueError, match=r"cannot check whether it runs model type 'llama'.*TypeError: no such width"):
        models.check_model(models.build(CONFIGS["llama"]))


def test_the_probe_draws_nothing_of_others():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    models.check_model(models.build(CONFIGS["llama"]))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(models.init_params(models.build(CONFIGS["qwen2"]), Key(1))["model.norm.weight"], torch.ones(16))


def test_numbers_differ_beyond_rounding_or_where_one_is_none():
    """Rounding grows with the largest expected number, if that is above 1."""
    x = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert probes.difference(x, x + 3e-6) is None
    assert probes.difference(x + 5e-6, x) == pytest.approx(5e-6)
    assert probes.difference(x / 1000, x / 1000 + 3e-6) == pytest.approx(3e-6)
    assert probes.difference(x + 1e-3, x, 1e-3) is None
    assert math.isnan(probes.difference(x, torch.tensor([1.0, math.nan])))
    probes.compare("llama", x + 1e-3, x, "the logits")
    with pytest.raises(ValueError, match=r"'llama': the logits differ from transformers' by 0\.01 in a small"):
        probes.compare("llama", x + 1e-2, x, "the logits")


def test_a_probe_has_rows_beyond_the_windows_of_its_model():
    """Whatever the windows of the model are."""
    for changes in ({"sliding_window": 4096}, {"sliding_window": 2}):
        probe = probes.make_probe(models.build(MistralConfig(**COMMON, **changes)))
        assert probe.model.config.sliding_window < len(probes.probe_rows(probe)[1])
        assert probe.model.config.sliding_window <= changes["sliding_window"]


@pytest.mark.parametrize(("heads", "expected"), [((16, 32), (2, 4)), ((5, 10), (1, 2)), ((1, 3), (1, 3))])
def test_a_probe_has_one_or_two_heads_of_linear_attention_in_their_proportions(heads, expected):
    names = ("linear_num_key_heads", "linear_num_value_heads")
    wide = DELTA | {"hidden_size": 1024, "num_attention_heads": 16} | dict(zip(names, heads, strict=True))
    model = models.build(Qwen3_5TextConfig(**wide))
    probe = probes.make_probe(model)
    assert tuple(getattr(probe.model.config, name) for name in names) == expected
    models.check_model(model)


def test_a_probe_of_an_adapter_has_it_on_the_same_weights():
    model, _ = make("llama", dtype=torch.float32)
    probe = probes.make_probe(model)
    for targets in (("q_proj", "mlp.up_proj"), ("all-linear",), ("q_proj", "lm_head")):
        spec = Lora(3, 6.0, targets)
        adapted, adapter = lora.adapted_probe(model, probe, spec)
        ends = {name.rpartition(".layers.")[2].partition(".")[2] or name for name in lora.places_of(model, targets)}
        found = lora.frozen_of(adapted).places
        assert {name.rpartition(".layers.")[2].partition(".")[2] or name for name in found} == ends
        assert all(x.abs().max() > 0 for x in adapter.values())
