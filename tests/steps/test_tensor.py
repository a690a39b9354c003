"""A model cut over a tensor axis computes what the whole one does: outputs, gradients, norm, updates."""

import sys
from collections import Counter
from functools import partial

import attrs
import pytest
import torch

from fppo import models, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models import narrow as narrowing
from fppo.models import regions
from fppo.runtime import mesh as meshes
from fppo.runtime.layout import Layout
from fppo.runtime.mesh import Mesh, gradient_sum
from fppo.runtime.simulate import simulate
from fppo.steps import forward as forwards
from fppo.steps import optimizers
from fppo.steps.forward import Forward, compute_values, forward_micro_batch
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.muon import muon
from fppo.steps.scores import compute_reward_scores
from fppo.studies.plan.track import counting_mesh
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import CONFIGS, make

REFUSED = {
    "gpt2": "do not make attn and mlp of h.0 smaller",
    "gpt_neox": "do not make attention of layers.0 smaller",
    "opt": "do not make self_attn and fc1 and fc2 of decoder.layers.0 smaller",
}
CASES = [(name, 2) for name in CONFIGS if name not in REFUSED]
CASES += [("llama", 4), ("gpt_oss", 4), ("olmo2", 4)]  # 2 key heads on 4 ranks
BATCH = tiny.experience(3, 5)


def objective(params, forward, outputs):
    """A sum of all outputs with weights, of rows whose tokens some models pad with."""
    rows = tree.replace(BATCH, tokens=BATCH.tokens % 8)
    out = forward_micro_batch(params, rows, forward=forward, outputs=outputs, temperature=0.8)
    numbers = torch.cat([x.flatten() for x in out if x is not None])
    weights = torch.randn(numbers.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (weights * numbers).sum(), numbers.detach()


def outcome(mesh, model, params, outputs=("log_probs", "entropy", "sum_squared_probs", "hidden")):
    """Outputs, whole gradients and their norm, as one rank has them."""
    model = models.place(model, mesh)
    own = models.own_params(model, params, mesh)
    (_, numbers), grads = value_and_grad(partial(objective, outputs=outputs), has_aux=True)(
        own, Forward(model, mesh=mesh)
    )
    mesh = attrs.evolve(mesh, layout=model.layout)
    grads = gradient_sum(grads, mesh)
    layout = model.layout
    norm = optimizers.global_norm([g for n, g in grads.items() if layout is None or layout.owns(n)], mesh)
    return numbers, models.whole_params(model, grads, mesh), norm


def assert_same(found, expected, tolerance=1e-11):
    numbers, grads, norm = expected
    for got_numbers, got, got_norm in found:
        torch.testing.assert_close(got_numbers, numbers, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got_norm, norm, rtol=tolerance, atol=0)
        for name, grad in grads.items():
            difference = (got[name] - grad).abs().max() / grads[name].abs().max().clamp(min=1e-3 * norm)
            assert difference < tolerance, f"{name}: {difference:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_cut_model_is_the_whole_one(name, ranks):
    model, params = make(name)
    expected = outcome(Mesh.local(), model, params)
    assert_same(simulate({"tensor": ranks}, partial(outcome, model=model, params=params)), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused(name):
    model, _ = make(name)
    with pytest.raises(
        ValueError, match=f"cannot run model type '{name}' on a tensor axis of 2 ranks: .* {REFUSED[name]}"
    ):
        models.check_placed(model, 2)


embedding_seam = regions.EmbeddingSeam.__init__


def own_padding(self, inner, region, first):
    embedding_seam(self, inner, region, first)
    inner.padding_idx, self._pad = 0, None


MISTAKES = {
    "biases on all ranks": (sys.modules["fppo.models.place"], "_added_once", lambda model, cuts: frozenset()),
    "losses summed over ranks": (forwards, "same", lambda x, axis: x),
    "shares not summed": (meshes, "_slots", lambda grad, cut, name, axis: (None, 0)),
    "copies counted in the norm": (Layout, "owns", lambda self, name: True),
    "copies of a part not summed": (meshes, "_slots", lambda grad, cut, name, axis: (None if cut else grad[None], 0)),
    "another's padding": (regions.EmbeddingSeam, "__init__", own_padding),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, monkeypatch):
    model, params = make("llama")
    expected = outcome(Mesh.local(), model, params)
    home, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(home, name, wrong)
    with pytest.raises(AssertionError):
        assert_same(simulate({"tensor": 4}, partial(outcome, model=model, params=params)), expected, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"tensor": 2}, {"sequence": 2, "tensor": 2}, {"context": 4}, {"context": 2, "tensor": 2}], ids=str
)
def test_values_and_scores_are_those_of_one_process(axes):
    model, params = make("qwen3", head="value")

    def run(mesh):
        placed = models.place(model, mesh)
        own, forward = models.own_params(placed, params, mesh), Forward(placed, mesh=mesh)
        cut = MicroBatching(size=2)
        values = compute_values(own, BATCH, forward=forward, micro_batching=cut)
        return values, compute_reward_scores(own, BATCH, forward=forward, micro_batching=cut)

    ((values, scores),) = simulate({}, run)
    for got_values, got_scores in simulate(axes, run):
        torch.testing.assert_close(got_values, values, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(got_scores, scores, rtol=1e-6, atol=1e-6)
    if axes == {"tensor": 2}:
        found = simulate(axes, partial(outcome, model=model, params=params, outputs=("values",)))
        assert_same(found, outcome(Mesh.local(), model, params, outputs=("values",)))


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4},
            4,
            "heads = 6, .*give one of .1, 2, 3, 6",
        ),
        ({"intermediate_size": 23}, 2, r"intermediate_size = 23; give one of \[1]"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4},
            6,
            "heads = 4 .*one of .1, 2, 4, 12",
        ),
    ],
    ids=["heads", "inner", "key heads"],
)
def test_sizes_that_do_not_divide_are_named(sizes, ranks, words):
    model = models.build(tiny.config(**sizes))
    with pytest.raises(ValueError, match=f"a tensor axis of {ranks} ranks does not divide the model's .*{words}"):
        models.narrowed(model, ranks)


def test_what_does_not_go_with_a_tensor_axis_is_refused():
    model, params = tiny.model_and_params("lm")

    def run(mesh, **changes):
        placed = models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        forward = Forward(changes.pop("model", placed), mesh=mesh, **changes)
        return forward_micro_batch(own, BATCH, forward=forward)

    for changes, words in (
        ({"model": model}, "the model is one for 1: give models.place"),
        ({"remove_padding": False}, "a tensor axis of 2 ranks cuts one packed row"),
        ({"kernels": Kernels.named(log_probs="compiled")}, "cannot split the vocabulary over ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate({"tensor": 2}, partial(run, **changes))
    with pytest.raises(ValueError, match="placed on a tensor axis already"):
        simulate({"tensor": 2}, lambda mesh: models.place(models.place(model, mesh), mesh))


def test_muon_refuses_matrices_that_are_cut():
    optimizer = muon(lambda step: 0.1)

    def run(mesh):
        params = {"layers.0.weight": torch.ones(2, 2)}
        return optimizer.update(params, params, optimizer.init(params), 0, mesh=mesh, donate=False)

    with pytest.raises(ValueError, match="the tensor axis of 2 ranks"):
        simulate({"tensor": 2}, run)


@pytest.mark.parametrize("name", ["llama", "phi3", "olmo2", "qwen3_moe"])
def test_a_model_that_can_be_cut_passes_its_check(name):
    models.check_placed(make(name)[0], 2)


def test_a_model_that_would_run_wrong_is_refused(monkeypatch):
    monkeypatch.setattr(narrowing, "_segments", lambda name, size, config: (size,))
    model, _ = make("phi3")
    with pytest.raises(ValueError, match=r"cut over 2, a small random model of this kind gives logits that differ"):
        models.check_placed(model, 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_sends_eight_activations_and_no_rank_has_the_vocabulary(ranks):
    """Forward and backward: four all-gathers and four reduce-scatters, each of (ranks - 1) / ranks of N x H numbers."""

    def sent_by(layers):
        model = models.build(tiny.config(num_hidden_layers=layers, vocab_size=40))
        sent = []
        mesh = counting_mesh({"tensor": ranks}, {}, None, lambda axis, op, size, *_: sent.append((op, size)))
        placed = models.place(model, mesh)
        own = models.own_params(placed, models.init_params(model, Key(0)), mesh)
        value_and_grad(partial(objective, outputs=("log_probs",)), has_aux=True)(own, Forward(placed, mesh=mesh))
        assert all(40 not in x.shape for x in own.values())
        return Counter(sent)

    tokens = int(BATCH.attention_mask.sum())
    activation = -(-tokens // ranks) * ranks * 16 * 4
    more = sent_by(3) - sent_by(2)
    assert sum(more.values()) == 8
    assert sum(count * size for (_, size), count in more.items()) == 8 * activation * (ranks - 1) // ranks
    assert {op for op, _ in more} == {"all_gather", "reduce_scatter"}
