"""Adapters: the base as it is while B is 0, merged weights while it is not, and the full gradient's projections."""

from functools import partial

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fppo import models, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models import adapted as values
from fppo.models import bases, lora
from fppo.models.adapted import FACTORS, Adapted, Lora, Parts
from fppo.models.heads import logits_of
from fppo.runtime.mesh import Mesh
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.collectives import Axis
from fppo_kernels.linear.onednn import onednn
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models import families

FEW = ("llama", "gpt2", "phi3", "qwen3_moe", "gpt_oss")
OTHERS = sorted((families.CONFIGS | families.EXPERTS).keys() - set(FEW))
LENGTHS = [7, 4]
SPEC = Lora(rank=3, alpha=6.0)


def noisy(params, seed=2):
    """No factor is 0: with B = 0 a lost scale passes every law."""
    g = torch.Generator().manual_seed(seed)
    return {n: x + 0.1 * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x) for n, x in params.items()}


def logits(params, *, model, kernels=None):
    tokens = torch.randint(2, model.config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
    tokens[3] = 0  # what some models pad with
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    attend = models.packed_attention(sdpa, make_lengths(LENGTHS))
    hidden = models.hidden_states(model, params, tokens, positions, attend=attend, kernels=kernels)
    return logits_of(models.output_head(model, params), hidden)


def weighed(params, *, model):
    out = logits(params, model=model)
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)).sum()


def projections(adapted, adapter, grads):
    """The gradients of A and B, from those of the merged weights."""
    found = {}
    for name, flipped in lora.frozen_of(adapted).places.items():
        grad = grads[name].mT if flipped else grads[name]
        a, b = adapter[f"{name}.lora_A"], adapter[f"{name}.lora_B"]
        scale = lora.frozen_of(adapted).lora.scale
        found |= {f"{name}.lora_A": scale * b.mT @ grad, f"{name}.lora_B": scale * grad @ a.mT}
    return found


def check_laws(model, params, spec):
    adapted, fresh = lora.adapt(model, params, spec, key=Key(3), dtype=torch.float64)
    assert torch.equal(logits(fresh, model=adapted), logits(params, model=model))
    adapter = noisy(fresh)
    merged = lora.merged(adapted, adapter)
    assert merged.keys() == model.shapes.keys() == adapted.plain.shapes.keys()
    assert torch.allclose(logits(adapter, model=adapted), logits(merged, model=model), rtol=1e-10, atol=1e-10)
    _, got = value_and_grad(partial(weighed, model=adapted))(adapter)
    _, full = value_and_grad(partial(weighed, model=model))(merged)
    assert got.keys() == adapter.keys()
    for name, x in projections(adapted, adapter, full).items():
        assert torch.allclose(got[name], x, rtol=1e-10, atol=1e-10), name
        assert x.abs().max() > 1e-6, name
    return adapted, adapter


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_an_adapter_is_the_base_then_merged_weights_and_learns_by_projections(name):
    adapted, _ = check_laws(*families.make(name), SPEC)
    layers = len(adapted.layers)
    assert len(lora.frozen_of(adapted).places) >= 4 * layers
    lora.check_adapted(adapted.plain, SPEC)


def test_recomputed_layers_and_rslora_keep_the_laws():
    model, params = families.make("qwen2", checkpoint_layers=True)
    adapted, _ = check_laws(model, params, Lora(4, 8.0, ("q_proj", "mlp.down_proj"), "rslora"))
    assert lora.frozen_of(adapted).lora.scale == 4.0
    assert {name.split(".")[-2] for name in lora.frozen_of(adapted).places} == {"q_proj", "down_proj"}


@pytest.mark.parametrize("name", ["qwen2", "llama"])  # with a tied head, and without
def test_embeddings_and_head_are_adapted_on_request(name):
    targets = ("embed_tokens",) if name == "qwen2" else ("embed_tokens", "lm_head")
    adapted, _ = check_laws(*families.make(name), attrs.evolve(SPEC, targets=targets))
    assert len(lora.frozen_of(adapted).places) == len(targets)


@pytest.mark.parametrize("kind", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_run_adapted_by_each_of_transformers_kernels(name, kind):
    model, params = families.make(name, dtype=torch.float32)
    adapted, adapter = lora.adapt(model, params, SPEC, key=Key(3))
    adapter = noisy(adapter)
    merged = lora.merged(adapted, adapter)
    expected = logits(merged, model=model)
    adapted.skeleton.set_experts_implementation(kind)
    try:
        torch.testing.assert_close(logits(adapter, model=adapted), expected, rtol=1e-4, atol=1e-5)
    finally:
        adapted.skeleton.set_experts_implementation("eager")


def test_every_adapted_weight_has_a_draw_of_its_own():
    """Also where shapes are equal, in a layer and over layers; the same by another order of parameters."""
    model, params = tiny.model_and_params("lm")
    _, adapter = lora.adapt(model, params, SPEC, key=Key(3), dtype=torch.float64)
    drawn = {name: x for name, x in adapter.items() if name.endswith("lora_A")}
    shapes = {x.shape for x in drawn.values()}
    assert len(shapes) < len(drawn) == 14
    for x in drawn.values():  # PEFT's: uniform within 1 / sqrt(what goes in), its kaiming_uniform of a = sqrt(5)
        bound = x.shape[-1] ** -0.5
        assert 0.8 * bound < x.max() <= bound
        assert -bound <= x.min() < -0.8 * bound
    names = list(drawn)
    for i, one in enumerate(names):
        for other in names[:i]:
            if drawn[one].shape == drawn[other].shape:
                both = torch.stack([drawn[one].flatten(), drawn[other].flatten()])
                assert torch.corrcoef(both)[0, 1].abs() < 0.6, (one, other)
    reverse = dict(reversed(params.items()))
    _, again = lora.adapt(model, reverse, SPEC, key=Key(3), dtype=torch.float64)
    assert all(torch.equal(again[name], x) for name, x in adapter.items())
    _, other = lora.adapt(model, params, SPEC, key=Key(4), dtype=torch.float64)
    assert not any(torch.equal(other[name], x) for name, x in drawn.items())


def test_a_value_head_is_trained_whole_beside_the_factors():
    model, params = tiny.model_and_params("value")
    adapted, adapter = lora.adapt(model, params, SPEC, key=Key(0))
    assert adapter["score.weight"] is params["score.weight"]
    assert "score.weight" not in lora.frozen_of(adapted).params
    assert lora.merged(adapted, adapter)["score.weight"] is params["score.weight"]
    attrs.evolve(SPEC, targets=("all-linear", "lm_head"))
    lora.adapt(model, params, attrs.evolve(SPEC, targets=("q_proj", "lm_head")), key=Key(0))  # which it lacks


def test_the_base_is_not_copied_and_its_digest_tells_it_from_another():
    model, params = tiny.model_and_params()
    one, _ = lora.adapt(model, params, SPEC, key=Key(0))
    two, _ = lora.adapt(model, params, Lora(1, 1.0), key=Key(1))
    assert lora.same_base(one, two)
    assert lora.frozen_of(one).digest == lora.frozen_of(two).digest
    name = "model.layers.1.mlp.up_proj.weight"
    other = {**params, name: params[name].clone()}
    other[name][0, 0] += 1e-12
    three, _ = lora.adapt(model, other, SPEC, key=Key(0))
    assert lora.frozen_of(three).digest != lora.frozen_of(one).digest
    assert not lora.same_base(one, three)
    trained, _ = lora.adapt(model, {n: x.clone().requires_grad_() for n, x in params.items()}, SPEC, key=Key(0))
    assert not any(x.requires_grad for x in lora.frozen_of(trained).params.values())


def test_the_base_alone_is_a_model_without_parameters():
    model, params = tiny.model_and_params()
    adapted, _ = lora.adapt(model, params, SPEC, key=Key(0))
    assert torch.equal(logits({}, model=lora.base_of(adapted)), logits(params, model=model))


def test_a_kernel_for_linear_layers_takes_the_products_with_the_base():
    calls = []

    def kernel(x, weight, bias=None):
        calls.append(type(weight))
        return F.linear(x, weight, bias)

    for name in ("qwen2", "gpt2"):
        model, params = families.make(name)
        adapted, adapter = lora.adapt(model, params, SPEC, key=Key(0), dtype=torch.float64)
        adapter, calls[:] = noisy(adapter), []
        got = logits(adapter, model=adapted, kernels=attrs.evolve(Kernels.named(), linear=kernel))
        assert torch.allclose(got, logits(adapter, model=adapted), rtol=1e-10, atol=1e-10)
        assert calls
        assert Adapted not in calls
    model, params = families.make("qwen2", dtype=torch.float32)
    adapted, adapter = lora.adapt(model, params, SPEC, key=Key(0))
    fast = attrs.evolve(Kernels.named(), linear=onednn)

    def loss(params, kernels=None):
        return logits(params, model=adapted, kernels=kernels).square().sum()

    adapter = noisy(adapter)
    _, plain = value_and_grad(loss)(adapter)
    _, grads = value_and_grad(partial(loss, kernels=fast))(adapter)
    for name, x in plain.items():
        torch.testing.assert_close(grads[name], x, rtol=1e-3, atol=1e-3 * float(x.abs().max()))


def test_sixteen_bits_keep_the_base_bit_for_bit():
    model, params = families.make("qwen2", dtype=torch.float32, compute_dtype=torch.bfloat16)
    adapted, adapter = lora.adapt(model, params, SPEC, key=Key(0))
    assert torch.equal(logits(adapter, model=adapted), logits(params, model=model))
    narrow, _ = lora.adapt(model, {name: x.bfloat16() for name, x in params.items()}, SPEC, key=Key(0))
    assert torch.equal(logits(adapter, model=narrow), logits(params, model=model))


def value():
    w, a, b = (torch.randn(shape, dtype=torch.float64) for shape in ((8, 6), (2, 6), (8, 2)))
    return Adapted.of(Parts(w, a, b, 0.5, False))


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.sum(),
        lambda w: w[:3],
        lambda w: w + 1,
        lambda w: w @ torch.ones(6, 1, dtype=torch.float64),
        lambda w: torch.ones(1, 8, dtype=torch.float64) @ w,
        lambda w: torch.einsum("oi,ni->no", w, torch.ones(2, 6, dtype=torch.float64)),
        lambda w: w.chunk(2),
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: torch.cat([w, w]),
        lambda w: F.embedding(torch.zeros(1, dtype=torch.int64), w, None, 1.0),
    ],
)
def test_an_adapted_weight_refuses_what_would_lose_its_factors(use):
    with pytest.raises(RuntimeError, match="adapted weight"):
        use(value())


@pytest.mark.parametrize("use", [lambda w: w.unbind(1), lambda w: w.unbind(2), lambda w: w.transpose(0, 1)])
def test_a_stack_of_adapted_weights_comes_apart_by_its_experts_alone(use):
    stack = Adapted.of(Parts(torch.ones(3, 8, 6), torch.ones(3, 2, 6), torch.ones(3, 8, 2), 0.5, False))
    assert [x.shape for x in stack.unbind()] == [(8, 6)] * 3
    with pytest.raises(RuntimeError, match=r"pieces along another dimension|exchange of other dimensions"):
        use(stack)


def test_an_adapted_model_is_held_against_merged_weights(monkeypatch):
    model, _ = tiny.model_and_params()
    lora.check_adapted(model, SPEC)
    merged = lora.merged
    monkeypatch.setattr(lora, "merged", lambda *given: {name: 1.5 * x for name, x in merged(*given).items()})
    with pytest.raises(ValueError, match=r"cannot adapt model type .* that differ by [0-9.e-]+ from those with merged"):
        lora.check_adapted(model, SPEC)


def test_products_of_an_adapted_weight_are_those_of_the_merged_one():
    weight = value()
    merged = values.merged_weight(weight.parts)
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    for use in (
        lambda w: F.linear(x, w),
        lambda w: x @ w.t(),
        lambda w: torch.addmm(torch.ones(8, dtype=torch.float64), x[0], w.T),
        lambda w: F.embedding(torch.tensor([[1, 7]]), w),
        lambda w: F.linear(x, w.to(torch.float64)),
    ):
        torch.testing.assert_close(use(weight), use(merged), rtol=1e-12, atol=1e-12)


def test_what_cannot_be_adapted_is_refused_by_name():
    model, params = tiny.model_and_params()
    with pytest.raises(ValueError, match=r"\['q_prj'\] name no weight that can be adapted; there are .*q_proj"):
        lora.adapt(model, params, attrs.evolve(SPEC, targets=("q_prj",)), key=Key(0))
    adapted, adapter = lora.adapt(model, params, SPEC, key=Key(0))
    with pytest.raises(ValueError, match="adapted already"):
        lora.adapt(adapted, adapter, SPEC, key=Key(0))
    with pytest.raises(ValueError, match="no adapter"):
        lora.merged(model, params)
    with pytest.raises(ValueError, match="placed before it is quantised or adapted"):
        models.place(adapted, Mesh({"tensor": Axis(2, 0)}))
    placed = models.place(model, Mesh({"pipeline": Axis(2, 0)}))
    with pytest.raises(ValueError, match=r"targets \['layers.1.mlp.up_proj'\] name nothing in layers \[0\]"):
        lora.adapt(placed, params, attrs.evolve(SPEC, targets=("layers.1.mlp.up_proj",)), key=Key(0))
    for wrong in ({"rank": 0}, {"targets": ()}, {"scaling": "dora"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            attrs.evolve(SPEC, **wrong)
    assert tree.digest(params) == tree.digest(tiny.model_and_params()[1])


ENDS = {
    "q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "model.layers.0.mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
INNER = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
PLACES = {
    "all-linear": {f"model.layers.{i}.{x}" for i in range(2) for x in INNER},
    "model.layers.1*": {f"model.layers.1.{x}" for x in INNER},
    "*.mlp.?ate_proj": {f"model.layers.{i}.mlp.gate_proj" for i in range(2)},
    "embed_tokens": {"model.embed_tokens"},
    "lm_head": {"lm_head"},
} | {end: {f"model.layers.{i}.{x}" for i in range(1 if "layers.0" in end else 2)} for end, x in ENDS.items()}


@given(st.sets(st.sampled_from(list(PLACES)), min_size=1), st.sampled_from(["lm", "value"]))
def test_targets_name_the_weights_whose_paths_they_fit(targets, head):
    """A value model ignores a vocabulary head, which it lacks; a part of a name is none."""
    model = models.build(tiny.config(tie_word_embeddings=False), head)
    expected = set().union(*(PLACES[target] for target in targets)) - ({"lm_head"} if head == "value" else set())
    found = lora.places_of(model, tuple(targets))
    assert {name.removesuffix(".weight") for name in found} == expected
    assert not any(found.values())
    with pytest.raises(ValueError, match=r"targets \['_proj', 'k_pro'\] name no weight"):
        lora.places_of(model, ("_proj", *targets, "k_pro"))


def described(model):
    """A placed model without the cuts of parameters that it lacks; None of no model."""
    fields = ("shapes", "spans", "forms", "frozen", "whole_shapes", "kept_shapes", "extents")
    layout = model and model.layout
    if layout is not None:
        layout = attrs.evolve(layout, cuts={name: cut for name, cut in layout.cuts.items() if name in layout.whole})
    return model and (layout, *(getattr(model, field) for field in fields))


@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
def test_what_is_left_without_an_adapter_is_the_model_that_was_adapted(sizes, kind):
    """On every axis and rank, with the model that it was placed from; plain weights take the place of codes."""
    model, _ = tiny.model_and_params()
    for rank in range(2 if sizes else 1):
        placed = models.place(model, Mesh({name: Axis(size, rank) for name, size in sizes.items()}))
        coded = placed if kind is None else bases.in_codes(placed, kind, torch.float64)
        adapted = lora.without_base(coded, SPEC)
        for one, expected in ((adapted.plain, placed), (adapted.plain.unplaced, placed.unplaced)):
            assert described(one) == described(expected)
        if sizes:
            assert lora.frozen_of(adapted.unplaced).places == lora.frozen_of(adapted).places
        stages, own = ({} if x.layout is None else x.layout.stages for x in (placed, adapted))
        of_factors = {n + end: stages.get(n) for n in lora.frozen_of(adapted).places for end in FACTORS}
        assert {name: own.get(name) for name in of_factors} == of_factors
        assert adapted.whole_shapes.keys() == {*model.shapes, *(n for n in adapted.kept_shapes if n.endswith(FACTORS))}
        assert set(adapted.state_layout.whole if sizes else adapted.shapes) == of_factors.keys()
