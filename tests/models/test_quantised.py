"""Quantised bases: the function and the gradients of the base dequantised by hand, its bits while B is 0, few bytes."""

import sys
from functools import partial

import attrs
import pytest
import torch
from torch.nn import functional as F

from fppo import models
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models import bases, lora
from fppo.models.adapted import Lora
from fppo.models.codes import values
from fppo.models.quantised import Form, Quantised, plain, quantised_weight
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.runtime.mesh import Mesh
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.micro_batching import MicroBatching
from fppo_kernels.collectives import Axis
from fppo_kernels.linear.onednn import onednn
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models import families
from tests.models.test_lora import logits, noisy, projections, weighed
from tests.rollout.test_embedded import make_prompts

pytest.importorskip("bitsandbytes", reason="pip install 'fppo[quantised]'")

KINDS = ("int8", "nf4")
SPEC = Lora(rank=3, alpha=6.0)
NF4 = [  # arXiv:2305.14314, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def by_hand(x):
    """The weight that codes stand for, by the papers' formulas."""
    if not isinstance(x, Quantised):
        return x
    kind, codes, scales, shape, dtype, turned = x.stored
    if kind == "int8":
        rows = codes.double() * scales.double()[..., None] / 127
    else:
        numbers = torch.tensor(NF4, dtype=torch.float64)[torch.stack([codes >> 4, codes & 15], -1).flatten().long()]
        blocks = numbers.view(-1, 64) * scales.double().flatten()[:, None]
        rows = blocks.view(*shape[:-2], -1)[..., : shape[-2:].numel()].reshape(shape)
    return (rows.mT if turned else rows).to(dtype)


def on_codes(name, kind, *, spec=SPEC, dtype=torch.float64, **changes):
    """A model on a quantised base, a fresh adapter, and the model on that base dequantised by hand."""
    model, params = families.make(name, dtype=dtype, **changes)
    coded, base = models.quantise(model, params, kind)
    adapted, fresh = lora.adapt(coded, base, spec, key=Key(3), dtype=dtype)
    dense = {n: by_hand(x) for n, x in values(base, coded.forms).items()}
    other, _ = lora.adapt(model, dense, spec, key=Key(3), dtype=dtype)
    return adapted, fresh, other


def near(got, expected, tolerance=1e-5):
    return (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "qwen3_moe", "gpt_oss"])
def test_a_quantised_base_is_the_base_dequantised_by_hand(name, kind):
    adapted, fresh, other = on_codes(name, kind)
    assert bases.base_kind(adapted) == kind
    assert torch.equal(logits(fresh, model=adapted), logits({}, model=lora.base_of(adapted)))
    adapter = noisy(fresh)
    assert near(logits(adapter, model=adapted), logits(adapter, model=other))
    merged = lora.merged(adapted, adapter)
    assert not any(isinstance(x, Quantised) for x in merged.values())
    assert near(logits(merged, model=adapted.plain), logits(adapter, model=other))
    _, got = value_and_grad(partial(weighed, model=adapted))(adapter)
    _, expected = value_and_grad(partial(weighed, model=other))(adapter)
    _, full = value_and_grad(partial(weighed, model=adapted.plain))(merged)
    for n, x in projections(adapted, adapter, full).items():
        assert near(got[n], expected[n]), n
        assert near(got[n], x), n
        assert x.abs().max() > 1e-6, n


@pytest.mark.parametrize("kind", KINDS)
def test_weights_without_factors_are_in_codes_too_and_recomputed_layers_give_the_same(kind):
    spec = attrs.evolve(SPEC, targets=("q_proj",))
    adapted, fresh, other = on_codes("qwen2", kind, spec=spec, dtype=torch.float32, checkpoint_layers="selective")
    in_codes = {name.removesuffix(".codes") for name in lora.frozen_of(adapted).params if name.endswith(".codes")}
    assert in_codes == lora.linear_weights(adapted.plain).keys() > lora.frozen_of(adapted).places.keys()
    adapter = noisy(fresh)
    _, got = value_and_grad(partial(weighed, model=adapted))(adapter)
    again = attrs.evolve(adapted, checkpoint_layers=False)
    _, kept = value_and_grad(partial(weighed, model=again))(adapter)
    _, expected = value_and_grad(partial(weighed, model=other))(adapter)
    assert all(torch.equal(got[n], x) for n, x in kept.items())
    assert all(near(got[n], x, 1e-4) for n, x in expected.items())


@pytest.mark.parametrize("run_by", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("name", "kind"), [("qwen3_moe", "nf4"), ("gpt_oss", "int8")])
def test_experts_in_codes_run_by_each_of_transformers_kernels_and_keep_no_stack_of_weights(name, kind, run_by):
    adapted, fresh, other = on_codes(name, kind, dtype=torch.float32)
    adapter, saved = noisy(fresh), []
    _, expected = value_and_grad(partial(weighed, model=other))(adapter)
    adapted.skeleton.set_experts_implementation(run_by)
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            _, got = value_and_grad(partial(weighed, model=adapted))(adapter)
    finally:
        adapted.skeleton.set_experts_implementation("eager")
    assert all(near(got[n], x, 1e-4) for n, x in expected.items())
    stacks = [form.shape for form in adapted.forms.values() if len(form.shape) == 3]
    assert stacks
    matrices = {frozenset(shape[1:]) for shape in stacks}
    assert not [t for t in saved if t.is_floating_point() and t.dim() == 3 and frozenset(t.shape[-2:]) in matrices]


def test_a_pass_in_16_bits_rounds_no_scale():
    model, params = families.make("llama", dtype=torch.float32, compute_dtype=torch.bfloat16)
    coded, base = models.quantise(model, params, "int8")
    adapted, fresh = lora.adapt(coded, base, SPEC, key=Key(3))
    dense = {n: plain(x) for n, x in values(base, coded.forms, torch.bfloat16).items()}
    other, _ = lora.adapt(model, dense, SPEC, key=Key(3))
    assert torch.equal(logits(fresh, model=adapted), logits(fresh, model=other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_weight_is_rounded_once(kind):
    """Codes of weights in 16 bits are summed with their factors in float32."""
    model, params = families.make("gpt2", dtype=torch.bfloat16)
    coded, base = models.quantise(model, params, kind)
    adapted, fresh = lora.adapt(coded, base, SPEC, key=Key(3))
    adapter, wide = noisy(fresh), {n: by_hand(x) for n, x in values(base, coded.forms, torch.float64).items()}
    merged = lora.merged(adapted, adapter)
    assert {x.dtype for x in merged.values()} == {torch.bfloat16}
    for name, flipped in lora.frozen_of(adapted).places.items():
        a, b = (adapter[name + factor].double() for factor in (".lora_A", ".lora_B"))
        exact = wide[name] + 2.0 * ((b @ a).mT if flipped else b @ a)
        assert (merged[name] - exact).abs().max() <= 2**-8 * 1.01 * exact.abs().max()
        assert (merged[name].double() - exact.bfloat16().double()).abs().mean() < 1e-4 * exact.abs().mean()


def test_a_kernel_for_linear_layers_computes_with_the_dequantised_weights():
    adapted, fresh, other = on_codes("llama", "nf4", dtype=torch.float32)
    seen = []

    def kernel(x, weight, bias=None):
        seen.append(type(weight))
        return onednn(x, weight, bias)

    kernels = attrs.evolve(Kernels.named(), linear=kernel)
    adapter = noisy(fresh)
    _, got = value_and_grad(lambda p: logits(p, model=adapted, kernels=kernels).square().sum())(adapter)
    _, expected = value_and_grad(lambda p: logits(p, model=other).square().sum())(adapter)
    assert set(seen) == {torch.Tensor}
    assert all(near(got[n], x, 1e-4) for n, x in expected.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 48), (5, 6), (7, 13), (2, 128), (1, 1)], ids=str)
def test_codes_of_any_shape_stand_for_numbers_near_the_weight_and_products_are_theirs(shape, dtype, kind):
    g = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=g).to(dtype)
    for w, turned in ((weight, False), (weight.mT, True)):
        q = quantised_weight(w, kind, turned=turned)
        assert (q.shape, q.dtype, q.T.shape, len(q)) == (w.shape, dtype, w.T.shape, len(w))
        assert near(plain(q).float(), by_hand(in_float32(q)), 1e-6 if dtype == torch.float32 else 0.005)
        assert torch.equal(plain(q.T), plain(q).T)
        assert torch.equal(q + 0.0, plain(q) + 0.0)  # any other use sees the numbers
        assert torch.equal(plain(q.to(torch.float64).to(dtype)), plain(q))
        assert q.to(dtype) is q
        assert near(plain(q).float(), w.float(), 0.16 if kind == "nf4" else 0.01)
        x = torch.randn(4, w.shape[1], generator=g).to(dtype).requires_grad_()
        out = F.linear(x, q)
        assert torch.equal(out, F.linear(x, plain(q)))
        (grad,) = torch.autograd.grad(out.sum(), [x])
        assert near(grad.float(), plain(q).float().sum(0).expand(4, -1), 0.02)
        form, kept = Form(kind, w.shape, dtype, turned), q.stored[1:3]
        assert list(zip(form.shapes, form.dtypes, strict=True)) == [(t.shape, t.dtype) for t in kept]


def in_float32(q):
    """The value in float32, which both dtypes round."""
    return Quantised.of(q.stored._replace(dtype=torch.float32))


@pytest.mark.parametrize(("name", "kind"), [("qwen2", "nf4"), ("gpt2", "int8")])
def test_the_embedded_engine_samples_by_the_codes_and_the_factors(name, kind):
    adapted, fresh, other = on_codes(name, kind, dtype=torch.float32)
    decoded, joined = lora.decoded(adapted, fresh)
    assert decoded is adapted
    assert sum(isinstance(x, Quantised) for x in values(joined, adapted.forms).values()) == len(adapted.forms)
    adapter, ask = noisy(fresh), Ask(make_prompts((3, 1, 4)), Sampling(max_tokens=6, n=2), Key(5))
    rollout = EmbeddedEngine(model=adapted, kernels=Kernels.named(), pad_token_id=0).generate(adapter, ask)
    by_other = EmbeddedEngine(model=other, kernels=Kernels.named(), pad_token_id=0).generate(adapter, ask)
    assert torch.equal(rollout.tokens, by_other.tokens)
    log_probs = compute_log_probs(adapter, rollout, forward=Forward(adapted), micro_batching=MicroBatching(size=2))
    assert (log_probs - rollout.rollout_log_probs).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_is_kept_nothing_as_wide_as_the_weight(kind):
    w, x, saved = torch.randn(64, 256), torch.randn(3, 256, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        F.linear(x, quantised_weight(w, kind), torch.zeros(64))
    assert saved
    assert max(t.nbytes for t in saved) <= w.numel() * (1 if kind == "int8" else 0.5)


def test_codes_are_those_of_bitsandbytes_own_layers():
    bnb, w = pytest.importorskip("bitsandbytes"), torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    nf4, _ = bnb.functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=False)
    int8, scales, _ = bnb.functional.int8_vectorwise_quant(w)
    assert torch.equal(quantised_weight(w, "nf4").stored.codes.flatten(), nf4.flatten())
    own = quantised_weight(w, "int8").stored
    assert torch.equal(own.codes, int8)
    assert torch.equal(own.scales, scales)


def test_nothing_writes_to_codes():
    q = quantised_weight(torch.ones(4, 4), "int8")
    writes = [
        lambda: q.mul_(2),
        lambda: q.copy_(torch.zeros(4, 4)),
        lambda: q.__setitem__(0, 1.0),
        lambda: setattr(q, "data", torch.ones(1)),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match="nothing changes the base of an adapter"):
            write()
    assert torch.equal(plain(q), torch.ones(4, 4))


def test_a_digest_is_of_the_codes():
    model, params = tiny.model_and_params()
    one, other = ({**params, "model.norm.weight": params["model.norm.weight"] * k} for k in (1.0, 2.0))
    found = [(model, params), *(models.quantise(model, p, kind) for p in (one, other) for kind in KINDS)]
    digests = [lora.frozen_of(lora.adapt(*base, SPEC, key=Key(0))[0]).digest for base in found]
    assert len(set(digests)) == len(digests)
    again = lora.adapt(*models.quantise(model, params, "int8"), SPEC, key=Key(1))[0]
    assert lora.frozen_of(again).digest == digests[1]
    name = "model.layers.0.mlp.up_proj.weight"
    nearby = params | {name: params[name].clone()}
    row = nearby[name][0]
    row[row.abs().argmin()] = row.abs().max() / 2  # another code, and the same scales
    moved = lora.adapt(*models.quantise(model, nearby, "int8"), SPEC, key=Key(1))[0]
    assert lora.frozen_of(moved).digest != digests[1]


def test_what_cannot_be_quantised_is_refused_by_name(monkeypatch):
    model, params = tiny.model_and_params()
    coded, _ = models.quantise(model, params, "nf4")
    with pytest.raises(ValueError, match="placed before it is quantised or adapted"):
        models.place(coded, Mesh({"tensor": Axis(2)}))
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=rf"{name}: .* not finite"):
        models.quantise(model, params | {name: params[name] / 0}, "int8")
    with pytest.raises(ValueError, match=r"unknown kind 'int4'; there are \['int8', 'nf4'\]"):
        models.quantise(model, params, "int4")
    monkeypatch.setattr(torch.ops.bitsandbytes, "int8_vectorwise_quant", lambda x, _: (x.to(torch.int8), x[:, 0], None))
    with pytest.raises(ValueError, match="to wrong numbers on this machine"):
        models.quantise(model, params, "int8")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ValueError, match=r"model\.lora\.base = 'int8' needs bitsandbytes .*pip install 'fppo\[quantised\]'"
    ):
        models.quantise(model, params, "int8")


def test_each_weight_keeps_its_own_dtype_in_codes():
    model, params = families.make("llama", dtype=torch.float32)
    own = {name: x.bfloat16() if "up_proj" in name or "norm" in name else x for name, x in params.items()}
    coded, base = models.quantise(model, own, "int8")
    found = {name: x.dtype for name, x in values(base, coded.forms).items()}
    assert found == {name: x.dtype for name, x in own.items()}
    adapted, adapter = lora.adapt(coded, base, SPEC, key=Key(0))
    assert {name: x.dtype for name, x in lora.merged(adapted, adapter).items()} == found
    wide = bases.widened(adapted)
    assert {x.dtype for x in lora.merged(wide, adapter).values()} == {torch.float32}
    kept = {name: x.dtype for name, x in base.items() if name.endswith((".codes", ".scales"))}
    assert {name: lora.frozen_of(wide).params[name].dtype for name in kept} == kept
