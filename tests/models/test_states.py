"""Layers that carry states along a row: each row of a pass has its own, and the model is transformers'."""

import attrs
import pytest
import torch
from transformers.models.lfm2 import modeling_lfm2

from fppo import models
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models import flops, states
from fppo.rollout import Ask, Sampling
from fppo.steps import Forward, forward_micro_batch
from tests.models.families import CONFIGS, make, plain
from tests.models.hybrids import EXACT, HYBRIDS
from tests.models.test_families import WEIGHTS, assert_grads_close, packed_logits, padded_logits, plain_logits
from tests.rollout.test_embedded import engine_of, make_prompts


@pytest.mark.parametrize("name", EXACT)
def test_rows_packed_and_padded_are_transformers_rows_alone(name):
    model, params = make(name, config=HYBRIDS[name])
    module = plain(model, params)
    expected = plain_logits(module)
    _, grads = value_and_grad(lambda p: (packed_logits(model, p) * WEIGHTS).sum())(params)
    how = True if len(model.stateful) == len(model.layers) else "selective"
    again = attrs.evolve(model, checkpoint_layers=how)
    _, recomputed = value_and_grad(lambda p: (packed_logits(again, p) * WEIGHTS).sum())(params)
    (expected * WEIGHTS).sum().backward()
    torch.testing.assert_close(packed_logits(model, params), expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(padded_logits(model, params), expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(recomputed, grads, rtol=0, atol=0)
    named = {n: p.grad for n, p in module.named_parameters()}
    scale = max(g.abs().max() for g in named.values())
    assert model.buffers >= grads.keys() - named.keys()
    assert_grads_close({n: g / scale for n, g in grads.items() if n in named}, {n: g / scale for n, g in named.items()})


@pytest.mark.parametrize("kinds", [["full_attention", "conv"], ["full_attention", "conv", "full_attention", "conv"]])
def test_layers_with_states_are_found_behind_others(kinds):
    """Where the first layers have attention."""
    sizes = {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    model, params = make("lfm2", config=type(HYBRIDS["lfm2"])(**HYBRIDS["lfm2"].to_dict() | sizes))
    assert model.stateful == tuple(number for number, kind in enumerate(kinds) if kind == "conv")
    torch.testing.assert_close(packed_logits(model, params), plain_logits(plain(model, params)), rtol=1e-10, atol=1e-12)


def test_of_modules_within_each_other_that_fill_a_cache_the_innermost_is_the_mixer():
    layer, outer = torch.nn.Module(), torch.nn.Module()
    layer.outer, outer.inner, found = outer, torch.nn.Linear(2, 2), states.Found("cache", 3)
    (seam,) = states._put_seams(layer, {"outer": found, "outer.inner": found})
    assert layer.outer is outer
    assert outer.inner is seam


class Renamed(modeling_lfm2.Lfm2ShortConv):
    """A short convolution as another release may have it: its cache is an argument of another name, behind another."""

    def forward(self, hidden_states, attention_mask=None, *, memory=None, **_):
        return super().forward(hidden_states, memory, attention_mask)


def test_a_mixer_is_found_by_the_cache_that_it_fills_whatever_the_argument_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr(modeling_lfm2, "Lfm2ShortConv", Renamed)
    model, params = make("lfm2", config=HYBRIDS["lfm2"])
    module = plain(model, params)
    module.save_pretrained(tmp_path)
    model, params = models.load(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(packed_logits(model, params), plain_logits(module), rtol=1e-10, atol=1e-12)
    prompts = make_prompts((3, 6))
    rollout = engine_of(model).generate(params, Ask(prompts, Sampling(max_tokens=4), Key(0)))
    out = forward_micro_batch(params, rollout, forward=Forward(model))
    torch.testing.assert_close(out.log_probs, rollout.rollout_log_probs, rtol=0, atol=1e-10)


def test_flops_are_those_of_what_a_layer_has():
    model, _ = make("qwen3_5_text", config=HYBRIDS["qwen3_5_text"])
    weights = sum(x.numel() for name, x in model.shapes.items() if ".layers." in name and len(x) > 1)
    attention = 4 * 4 * 8 * 10 * 11 / 2  # of the second layer: 4 heads of 8, 55 pairs
    states = flops.STATE * 4 * 4 * 6 * 10  # of the first: 4 heads, 4 by 6
    assert flops.forward_flops(model, [10], head_tokens=0) == 2 * weights * 10 + attention + states


def test_states_stay_whole_on_axes_that_cut_rows_or_heads():
    """The axes are named, those of one rank and those of whole rows are not, nor is a model without states."""
    config = HYBRIDS["qwen3_5_text"]
    whole = {"shard": 4, "replicate": 2, "pipeline": 2, "sequence": 1, "tensor": 1}
    models.check_rows_whole(config, whole)
    models.check_rows_whole(CONFIGS["llama"], {"tensor": 2, "sequence": 2, "context": 2})
    for axes, words in (
        ({"sequence": 2}, "a sequence axis of 2 ranks"),
        ({"context": 3, "tensor": 4}, "a context axis of 3 ranks and a tensor axis of 4 ranks"),
    ):
        with pytest.raises(ValueError, match=rf"'qwen3_5_text' on {words}: its layers \[0\] carry states"):
            models.check_rows_whole(config, whole | axes)
