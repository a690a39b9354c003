"""Stages of a pipeline: balanced cuts, every parameter where it is used, and the model's function in parts."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Glm4MoeConfig

from fppo import models
from fppo.models import flops, spans
from fppo.models.spans import layer_spans, staged
from fppo.runtime.simulate import simulate
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.collectives import Axis
from fppo_kernels.padding import make_lengths
from tests import tiny
from tests.models.families import CONFIGS, GLM4_MOE, make

FEW = ("gemma3", "gpt2", "opt", "qwen3_moe")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_stages_one_after_the_other_are_the_model(name):
    model, _ = make(name)
    models.check_staged(model)


def test_a_model_that_would_run_wrong_is_refused(monkeypatch):
    model, _ = make("llama")
    wrong = {"model.norm.weight": (0,)}
    ends = spans._ends
    monkeypatch.setattr(spans, "_ends", lambda model: ends(model) | wrong)
    with pytest.raises(ValueError, match=r"its norms are in an unknown position: .* logits that differ by"):
        models.check_staged(model)


@st.composite
def costs(draw):
    layers = draw(st.lists(st.integers(1, 6), min_size=2, max_size=7))
    return layers, draw(st.integers(1, len(layers))), draw(st.integers(0, 9)), draw(st.integers(0, 9))


@given(costs())
def test_the_largest_cost_of_a_stage_is_the_least_possible(drawn):
    layers, stages, first, last = drawn
    cost = spans._Costs(layers, first, last).of
    least, cuts = spans._balanced(len(layers), stages, cost, lambda *_: True)
    every = []
    for stops in itertools.combinations(range(1, len(layers)), stages - 1):
        runs = list(itertools.pairwise((0, *stops, len(layers))))
        every.append(max(sum(layers[a:b]) + first * (a == 0) + last * (b == len(layers)) for a, b in runs))
    assert least == min(every) == max(cost(x.start, x.stop) for x in cuts)
    assert [number for x in cuts for number in x] == list(range(len(layers)))


def test_the_head_counts_as_work_and_the_embeddings_where_work_is_equal():
    def cut(stages, layers=6, **changes):
        return [len(x) for x in layer_spans(models.build(tiny.config(num_hidden_layers=layers, **changes)), stages)]

    one = flops.layer_weights(models.build(tiny.config()))[0]
    assert cut(2, vocab_size=int(2 * one / 16)) == [4, 2]
    # three layers are most work on the first stage as on the second, and the first has the embeddings
    assert cut(3, vocab_size=int(2 * one / 16)) == [2, 3, 1]
    with pytest.raises(ValueError, match="the model has 2 layers, and 3 pipeline stages take at least one each"):
        cut(3, layers=2)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dense", [0, 1, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_of_cuts_with_least_work_the_one_with_least_parameters_is_taken(stages, dense, tied):
    """Experts have many parameters and little work; the embeddings are on the first stage, a tied head on both ends."""
    sizes = GLM4_MOE | {"num_hidden_layers": 6, "vocab_size": 200, "tie_word_embeddings": tied}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1}
    model = models.build(Glm4MoeConfig(**sizes, **experts, first_k_dense_replace=dense))
    work, head = flops.layer_weights(model), flops.head_weights(model)
    own = [sum(x.numel() for name, x in model.shapes.items() if f"layers.{i}." in name) for i in range(6)]
    first = model.shapes["model.embed_tokens.weight"].numel()
    last = (first if tied else model.shapes["lm_head.weight"].numel()) + model.shapes["model.norm.weight"].numel()

    def costs(cut):
        works = [sum(work[i] for i in layers) + head * (layers[-1] == 5) for layers in cut]
        parameters = [sum(own[i] for i in x) + first * (x[0] == 0) + last * (x[-1] == 5) for x in cut]
        return max(works), max(parameters)

    every = []
    for stops in itertools.combinations(range(1, 6), stages - 1):
        every.append([range(*ends) for ends in itertools.pairwise((0, *stops, 6))])
    assert costs(layer_spans(model, stages)) == min(map(costs, every))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2), (3, 2)])
def test_every_parameter_is_where_it_is_used(ranks, chunks, head, tied):
    model = models.build(tiny.config(num_hidden_layers=6, tie_word_embeddings=tied), head=head)
    every = [staged(model, Axis(ranks, rank), virtual_stages=chunks) for rank in range(ranks)]
    held = {name: tuple(rank for rank, placed in enumerate(every) if name in placed.shapes) for name in model.shapes}
    assert held == dict(every[0].layout.stages)
    twice = {name for name, of in held.items() if len(of) > 1}
    assert twice == ({"model.embed_tokens.weight"} if tied and head == "lm" else set())
    assert held["model.norm.weight"] == (ranks - 1,)
    assert held["model.embed_tokens.weight"][0] == 0
    layers = [(span.stage, number) for placed in every for span in placed.spans for number in span.layers]
    assert [number for _, number in sorted(layers)] == list(range(6))
    for rank, placed in enumerate(every):
        assert [span.stage for span in placed.spans] == list(range(rank, ranks * chunks, ranks))
        assert placed.whole_shapes == model.shapes
        for number, span in enumerate(placed.spans):
            assert models.stage_of(placed, number).shapes.keys() == set(span.names)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_middle_stage_has_and_makes_nothing_as_large_as_the_embeddings(dtype):
    model = models.build(tiny.config(num_hidden_layers=3, vocab_size=500), compute_dtype=dtype)
    placed, most = staged(model, Axis(3, 1)), 0
    params = {name: torch.randn(shape, requires_grad=True) for name, shape in placed.shapes.items()}
    assert all(placed.layer_of(name) == 1 for name in params)

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            out = func(*args, **(kwargs or {}))
            found = [x.untyped_storage().nbytes() for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            most = max(most, *found, 0)
            return out

    received, tokens = torch.randn(4, 16, dtype=dtype), torch.arange(4)
    attend = models.packed_attention(sdpa, make_lengths([4]))
    with Largest():
        hidden = models.hidden_states(placed, params, tokens, tokens, attend=attend, received=received)
        torch.autograd.grad(hidden.sum(), list(params.values()))
    assert 24 * 16 * 4 <= most < 500 * 16


def test_a_rank_does_not_run_alone():
    model, params = tiny.model_and_params()
    placed = staged(model, Axis(2, 1))
    own = {name: params[name] for name in placed.shapes}
    tokens = torch.arange(3)
    with pytest.raises(ValueError, match=r"this rank has the layers \[\[1\]\] .* call compute_outputs or an update"):
        models.hidden_states(placed, own, tokens, tokens, attend=None)
    with pytest.raises(ValueError, match="placed on a pipeline axis already"):
        staged(placed, Axis(2, 1))


def test_placing_cuts_over_both_axes():
    model, params = tiny.model_and_params()

    def run(mesh):
        placed = models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        whole = models.whole_params(placed, own, mesh)
        assert all(torch.equal(whole[name], x) for name, x in params.items())
        return {name: x.shape for name, x in own.items()} == dict(placed.shapes), len(own)

    found = simulate({"pipeline": 2, "tensor": 2}, run)
    assert all(same for same, _ in found)
    assert sum(count for _, count in found) == 2 * (len(params) + 1)


def test_layers_that_return_more_than_hidden_states_are_refused():
    placed = staged(models.build(tiny.config()), Axis(2, 0))
    relay = spans.Relay(placed.spans[0], None, None)
    relay(placed.spans[0].layers[0], lambda x: (x, None), (torch.ones(1),), {})
    with pytest.raises(ValueError, match="the layers return tuple, but only hidden states pass between stages"):
        relay.result(torch.ones(1))
