"""Experts over the ranks of an axis, which have other rows: the sum of the ranks is what one process computes."""

from functools import partial

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import models
from fppo.grad import value_and_grad
from fppo.models.routing import Routes
from fppo.models.run import hidden_states
from fppo.runtime.mesh import Mesh, Sharding, data_sum, gradient_sum
from fppo.runtime.simulate import simulate
from fppo.steps import optimizers
from fppo.steps.forward import Forward, forward_micro_batch
from fppo_kernels import collectives
from fppo_kernels.collectives import Axis
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import make, skip_without_plan

BATCH = tiny.experience(3, 5)
CASES = [
    *((name, {"expert": 2}) for name in ("mixtral", "qwen2_moe", "olmoe", "granitemoe", "gpt_oss", "glm4_moe")),
    ("deepseek_v3", {"expert": 4}),
    ("qwen3_moe", {"expert": 2, "sequence": 2}),
    ("qwen3_moe", {"shard": 2, "expert": 2}),
    *((name, {"expert": 2, "tensor": 2}) for name in ("qwen2_moe", "olmoe", "gpt_oss", "glm4_moe")),
    ("qwen3_moe", {"expert": 2, "sequence": 2, "tensor": 2}),
    pytest.param("mixtral", {"shard": 2, "expert": 2, "context": 2, "tensor": 2}, marks=pytest.mark.slow),
]


def outcome(mesh, name, stage=3, checkpoint_layers=False, edit=lambda params: params):
    """A sum of log-probs and entropies of this rank's rows, all ranks' gradients of it, whole, and their norm."""
    model, params = make(name)
    params = edit(params)
    model = models.place(attrs.evolve(model, checkpoint_layers=checkpoint_layers), mesh)
    sharding = None if stage is None else Sharding(stage=stage)
    mesh = attrs.evolve(mesh, sharding=sharding, layout=model.layout)
    ranks = mesh["shard"].size * mesh["expert"].size
    rows = batches.rows(BATCH, range(mesh["shard"].rank * mesh["expert"].size + mesh["expert"].rank, 5, ranks))

    def objective(own):
        forward = Forward(model, mesh=mesh)
        out = forward_micro_batch(own, rows, forward=forward, outputs=("log_probs", "entropy"))
        weights = (rows.row_ids[:, None] + 1.3).cos() * torch.arange(1.0, 7.0, dtype=torch.float64).sin()
        return (weights * (out.log_probs + 0.3 * out.entropy)).sum()

    value, grads = value_and_grad(objective)(models.own_params(model, params, mesh))
    grads = gradient_sum(grads, mesh)
    layout, sharded = model.layout, mesh.sharded
    own = [g if layout is None or layout.owns(n, sharded=sharded) else g[:0] for n, g in grads.items()]
    norm = optimizers.global_norm(own, mesh)
    return data_sum(value, mesh), models.whole_params(model, grads, mesh), norm


def assert_same(found, expected, tolerance=1e-11):
    value, grads, norm = expected
    for got_value, got, got_norm in found:
        torch.testing.assert_close(got_value, value, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got_norm, norm, rtol=tolerance, atol=0)
        assert list(got) == list(grads)
        for name, grad in grads.items():
            difference = (got[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-3 * norm)
            assert difference < tolerance, f"{name}: {difference:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), CASES)
def test_experts_on_several_ranks_are_those_of_one(name, axes):
    skip_without_plan(name)
    checkpoint_layers = name in ("mixtral", "deepseek_v3")
    run = partial(outcome, name=name, checkpoint_layers=checkpoint_layers)
    expected = outcome(Mesh(), name)
    for stage in (3, 1, None) if axes == {"shard": 2, "expert": 2} else (3,):
        assert_same(simulate(axes, partial(run, stage=stage)), expected)


def test_a_rank_that_no_token_goes_to_stays_in_the_graph():
    def to_the_first(params):
        far = torch.tensor([90.0, 90.0, 0.0, 0.0], dtype=torch.float64)
        return {name: x + far if name.endswith("router.bias") else x for name, x in params.items()}

    run = partial(outcome, name="gpt_oss", edit=to_the_first)
    expected = run(Mesh())
    assert expected[1]["model.layers.0.mlp.experts.down_proj"][2:].abs().max() == 0
    assert_same(simulate({"expert": 2}, run), expected)


def test_what_travels_is_the_rows_of_experts_elsewhere(monkeypatch):
    """2 k N H numbers forward, and as many backward, of which (e - 1) / e leave a rank if all experts get as many."""
    model, params = make("qwen3_moe")
    rows = [torch.arange(3, 11), torch.arange(12, 20)]
    attend, sent = models.packed_attention(Kernels.named().attention, make_lengths([8])), []
    own = collectives._Exchange.forward

    def counted(ctx, x, axis, to, received):
        sent.append(x[0].numel() * (sum(to) - to[axis.rank]))
        return own(ctx, x, axis, to, received)

    def run(mesh):
        placed = models.place(model, mesh)
        row = rows[mesh["expert"].rank]

        def loss(own):
            return hidden_states(placed, own, row, torch.arange(8), attend=attend).square().sum()

        value_and_grad(loss)(models.own_params(placed, params, mesh))

    elsewhere = 0
    for rank, row in enumerate(rows):
        routes = Routes()
        hidden_states(model, params, row, torch.arange(8), attend=attend, routes=routes)
        elsewhere += sum(int((routes.routed[i].chosen // 2 != rank).sum()) for i in range(2))
    monkeypatch.setattr(collectives._Exchange, "forward", staticmethod(counted))
    simulate({"expert": 2}, run)
    assert sum(sent) == 4 * elsewhere * 16
    assert 0 < elsewhere < 2 * 2 * 2 * 8  # of two layers, ranks and choices of 8 tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_the_probe_at_load_accepts_what_fits(name, monkeypatch):
    model, _ = make(name)
    models.check_dispatched(model, 2)
    models.check_dispatched(model, 2, tensor=2)
    own = models.regions.ExpertsSeam._of
    monkeypatch.setattr(models.regions.ExpertsSeam, "_of", lambda seam, rows, numbers: own(seam, rows, numbers.flip(0)))
    with pytest.raises(ValueError, match=f"'{name}' on an expert axis of 2 ranks: cut over 2, .* logits that differ"):
        models.check_dispatched(model, 2)


def test_what_cannot_be_cut_is_refused_by_name_and_number():
    with pytest.raises(ValueError, match="'llama' on an expert axis of 2 ranks: its config names no experts to cut"):
        models.dispatched(make("llama")[0], 2)
    with pytest.raises(
        ValueError, match=r"axis of 3 ranks: it does not divide the model's 4 experts; give one of \[1, 2"
    ):
        models.dispatched(make("mixtral")[0], 3)
    with pytest.raises(ValueError, match="the model is placed already"):
        models.dispatched(models.place(make("qwen3_moe")[0], Mesh({"expert": Axis(2, 1)})), 2)


def test_layers_that_exchange_tokens_are_not_compiled():
    placed = models.place(make("qwen3_moe")[0], Mesh({"expert": Axis(2, 1)}))
    with pytest.raises(ValueError, match="layers on a tensor axis or an expert axis cannot be compiled"):
        placed.own_skeleton(compiled=True)
