"""The decoder of known families computes what their modules do, and every other model runs as it is."""

import attrs
import pytest
import torch
from torch.nn import functional as F

from fppo import models
from fppo.batch import Column
from fppo.key import Key
from fppo.rollout import decoder, embedded
from fppo.rollout.engine import Ask, Sampling
from fppo_kernels import table
from fppo_kernels.linear.cpp import Joined
from fppo_kernels.table import Kernels, needs_cpp
from tests.models.families import make, plain
from tests.rollout.test_embedded import LENGTHS, engine_of, make_prompts, plain_logits

KNOWN = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"]


@pytest.mark.slow
@pytest.mark.parametrize("joined", [0, 1 << 28])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_a_decoder_computes_what_the_modules_do(name, dtype, joined, monkeypatch):
    """Rows of equal length and of different ones draw the same tokens."""
    model, params = make(name, dtype=dtype)
    ask = Ask(make_prompts((4,) * 6 if joined else LENGTHS), Sampling(n=2, max_tokens=12, stop_token_ids=(5,)), Key(4))
    monkeypatch.setattr(decoder, "JOINED", joined)
    made = []
    monkeypatch.setattr(
        embedded, "decoder_of", lambda *args, **how: made.append(decoder.decoder_of(*args, **how)) or made[-1]
    )
    fast = engine_of(model).generate(params, ask)
    assert len(made[0].layers[0].qkv) == (1 if joined else 3)
    monkeypatch.setattr(embedded, "decoder_of", lambda *args, **how: None)
    slow = engine_of(model).generate(params, ask)
    assert torch.equal(fast.tokens, slow.tokens)
    rounding = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(fast.rollout_log_probs, slow.rollout_log_probs, rtol=0, atol=rounding)


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]])
@pytest.mark.parametrize("linear", ["onednn", "cpp"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_decoder_with_packed_weights_draws_what_it_draws_with_plain_ones(name, linear, lengths, monkeypatch):
    if linear == "cpp" and needs_cpp() is not None:
        pytest.skip("needs a C++ compiler")
    model, params = make(name, dtype=torch.float32)
    ask = Ask(make_prompts(lengths), Sampling(n=2, max_tokens=12, stop_token_ids=(5,)), Key(4))
    made = []
    monkeypatch.setattr(
        embedded, "decoder_of", lambda *args, **how: made.append(decoder.decoder_of(*args, **how)) or made[-1]
    )
    engine = attrs.evolve(engine_of(model), kernels=Kernels.named(linear=linear))
    packed = engine.generate(params, ask)
    monkeypatch.setattr(decoder, "PACKED", 0)
    plain_ones = engine.generate(params, ask)
    for one, layout in zip(made, (torch._mkldnn, torch.strided), strict=True):
        layer = one.layers[0]
        weights = [*(weight for weight, _ in (*layer.qkv, *layer.gate_up)), layer.out[0], layer.down[0]]
        copies = [weight.copied if isinstance(weight, Joined) else weight for weight in weights]
        assert {weight.layout for weight in copies} == {layout}
    assert torch.equal(packed.tokens, plain_ones.tokens)
    torch.testing.assert_close(packed.rollout_log_probs, plain_ones.rollout_log_probs, rtol=0, atol=5e-6)
    tokens = engine_of(model).generate(params, ask).tokens
    assert torch.equal(packed.tokens, tokens)


SAMPLING = Sampling(n=2, max_tokens=12, stop_token_ids=(5,))
IN_CPP = dict.fromkeys(("rms_norm", "rotary", "glu", "decode_attention"), "cpp")


@pytest.mark.skipif(table.needs_cpp() is not None, reason="no kernels in C++")
@pytest.mark.parametrize("linear", ["torch", "onednn", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama3-rope", "mistral", "qwen2"])
def test_steps_with_all_kernels_in_cpp_are_one_call_between_two_products_and_draw_the_same_bits(
    name, dtype, linear, monkeypatch
):
    """Rows of equal length and of different ones, of which some end early; passes over drafts, after which rows lag
    behind others. Mistral's attention has a window."""
    model, params = make(name, dtype=dtype)
    without = attrs.evolve(engine_of(model), kernels=Kernels.named(**IN_CPP, linear=linear))
    fused, made = [], decoder.decoder_of
    monkeypatch.setattr(
        decoder.Decoder, "fused_hidden", lambda *args, run=decoder.Decoder.fused_hidden: fused.append(1) or run(*args)
    )
    prompts = make_prompts(LENGTHS)
    drawn = without.generate(params, Ask(prompts, SAMPLING, Key(4))).tokens[:, -12:].view(-1, 2, 12)
    drawn[:, :, 7] = 0  # what is drafted is right but for this
    earlier = attrs.evolve(prompts, earlier=Column(drawn.tolist()))
    for asked, drafts in ((make_prompts((4,) * 6), 0), (prompts, 0), (earlier, 4)):
        ask, engine = Ask(asked, SAMPLING, Key(4)), attrs.evolve(without, draft_tokens=drafts)
        together = engine.generate(params, ask)
        count = len(fused)
        with monkeypatch.context() as patch:
            patch.setattr(embedded, "decoder_of", lambda *args, **how: made(*args, **how | {"decode_attention": None}))
            apart = engine.generate(params, ask)
        assert len(fused) == count >= 10
        assert torch.equal(together.tokens, apart.tokens)
        assert torch.equal(together.rollout_log_probs, apart.rollout_log_probs)
        assert not drafts or 0 < int(together.drafts[:, 1].sum()) < int(together.drafts[:, 0].sum())


@pytest.mark.skipif(table.needs_cpp() is not None, reason="no kernels in C++")
def test_a_linear_kernel_of_ones_own_may_return_any_layout():
    def transposed(x, weight, bias=None):
        y = (weight @ x.flatten(0, -2).t()).t()
        return (y if bias is None else y + bias).unflatten(0, x.shape[:-1])

    model, params = make("qwen2")
    kernels, ask = Kernels.named(**IN_CPP), Ask(make_prompts(LENGTHS), Sampling(max_tokens=5), Key(4))
    engines = [attrs.evolve(engine_of(model), kernels=attrs.evolve(kernels, linear=x)) for x in (transposed, F.linear)]
    found, expected = (engine.generate(params, ask) for engine in engines)
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("other", [{"rms_norm": "eager"}, {"rotary": "eager"}, {"glu": "eager"}, {}, None])
def test_a_step_is_fused_only_if_it_would_call_just_these_kernels(other):
    """Qwen3 has norms of queries and keys."""
    model, params = make("qwen3" if other == {} else "llama")
    kernels = Kernels.named(**IN_CPP | (other or {}))
    bound = models.Bound.of(model, params, kernels=kernels)
    made = bound(lambda skeleton: decoder.decoder_of(skeleton, decode_attention=kernels.decode_attention))
    assert (made.fused is not None) == (other is None)
    eager = table.get("decode_attention", "eager")
    assert bound(lambda skeleton: decoder.decoder_of(skeleton, decode_attention=eager)).fused is None


@pytest.mark.slow
def test_a_model_with_a_module_of_another_kind_runs_as_it_is():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for name in KNOWN:
        model, params = make(name)
        for tokens in (None, 3):  # an MLP in slices is whole for one token
            own = attrs.evolve(model, mlp_slice_tokens=tokens)
            assert models.bind(own, params, decoder.decoder_of) is not None
    for name in ("gemma2", "cohere", "granite", "smollm3", "qwen3_moe", "phi3", "gpt2"):
        assert models.bind(*make(name), decoder.decoder_of) is None
    model, params = make("llama")
    projection = model.skeleton.get_submodule(f"{model.layers[1]}.mlp.up_proj")
    projection.__class__ = Doubled
    assert models.bind(model, params, decoder.decoder_of) is None
    module = plain(model, params)
    module.model.layers[1].mlp.up_proj.__class__ = Doubled
    rollout = engine_of(model).generate(params, Ask(make_prompts(), Sampling(max_tokens=3), Key(0)))
    for row in range(2):
        logits = plain_logits(module, rollout, row)
        full = logits.log_softmax(-1).gather(1, rollout.tokens[row, -3:, None])[:, 0]
        torch.testing.assert_close(rollout.rollout_log_probs[row], full, rtol=0, atol=1e-10)
