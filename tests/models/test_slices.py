"""MLPs in slices of tokens: the numbers of whole ones, with less memory, and what is left whole."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad
from torch.nn import functional as F

from fppo import laws, losses, models
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models import Lora
from fppo.models.slices import find_mlps
from fppo.runtime import fsdp
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, forward_micro_batch
from fppo_kernels.table import Kernels
from tests import tiny
from tests.limited import Limited
from tests.models import families

HOW = (False, True, "selective")
WHOLE = {"opt", "olmoe", "qwen3_moe", "gpt_oss", "granitemoe", "mixtral"}  # no MLP, or experts alone
# with MLPs of three linear layers, two fused ones, two with biases, norms behind them, and beside experts
SLICED = ("llama", "phi3", "gpt2", "gemma2", "qwen2_moe")


def sliced(model, tokens, how=False):
    return attrs.evolve(model, mlp_slice_tokens=tokens, checkpoint_layers=how)


def outcome(model, params, batch, **settings):
    """The sum of log-probs, and its gradient for each parameter."""
    forward = Forward(model, **settings)
    return value_and_grad(lambda p: forward_micro_batch(p, batch, forward=forward).log_probs.square().sum())(params)


def assert_same(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


MODEL, PARAMS = tiny.model_and_params()


@given(
    rows=st.integers(1, 4),
    tokens=st.sampled_from([1, 2, 3, 5, 7, 64]),
    how=st.sampled_from(HOW),
    packed=st.booleans(),
)
def test_slices_of_any_size_change_no_number(rows, tokens, how, packed):
    """Sizes that divide the tokens or not, larger ones, and 1; packed and padded; beside each way to recompute."""
    batch = tiny.experience(rows, rows)
    expected = outcome(MODEL, PARAMS, batch, remove_padding=packed)
    assert_same(outcome(sliced(MODEL, tokens, how), PARAMS, batch, remove_padding=packed), expected)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SLICED else pytest.mark.slow)
        for name in sorted((families.CONFIGS | families.EXPERTS).keys() - WHOLE)
    ],
)
def test_families_have_the_numbers_of_whole_mlps(name):
    families.skip_without_plan(name)
    model, params = families.make(name)
    batch = tiny.experience(4, 3)
    expected = outcome(model, params, batch)
    for how in (False, "selective"):
        assert_same(outcome(sliced(model, 3, how), params, batch), expected)


def test_mlps_are_found_by_what_they_do():
    """Not attention, experts with their router, or an MLP that takes the residual, too; but a shared expert is one."""
    for name, inside in (("llama", "mlp"), ("gpt2", "mlp"), ("qwen2_moe", "mlp.shared_expert")):
        model, _ = families.make(name)
        assert find_mlps(model.skeleton) == tuple(f"{layer}.{inside}" for layer in model.layers)
    for config in (families.EXPERTS["mixtral"], families.CONFIGS["opt"], families.OWN["bloom"]):
        model = models.build(config)
        with pytest.raises(
            ValueError, match=f"{config.model_type!r}: its layers have no MLP .* leave mlp_slice_tokens"
        ):
            find_mlps(model.skeleton)


def test_an_mlp_that_mixes_tokens_is_left_whole():
    model, _ = families.make("llama")
    first, second = (model.skeleton.get_submodule(f"{layer}.mlp") for layer in model.layers)

    class Mixing(type(second)):
        def forward(self, x):
            return super().forward(x - x.mean(-2, keepdim=True))

    second.__class__ = Mixing
    assert [model.skeleton.get_submodule(path) for path in find_mlps(model.skeleton)] == [first]


@pytest.mark.parametrize("how", HOW)
def test_adapters_are_trained_and_their_base_is_not(how):
    model, params = families.make("qwen2")
    adapted, adapter = models.adapt(model, params, Lora(rank=2, alpha=3.0), key=Key(1), dtype=torch.float64)
    adapter = {name: x + 0.1 for name, x in adapter.items()}
    batch = tiny.experience(4, 3)
    expected = outcome(adapted, adapter, batch)
    assert_same(outcome(sliced(adapted, 3, how), adapter, batch), expected)
    assert all("lora" in name for name in expected[1])


@pytest.mark.slow
def test_a_quantised_base_stays_in_codes():
    pytest.importorskip("bitsandbytes", reason="pip install 'fppo[quantised]'")
    model, params = families.make("qwen2", dtype=torch.float32)
    coded, base = models.quantise(model, params, "int8")
    adapted, adapter = models.adapt(coded, base, Lora(rank=2, alpha=3.0), key=Key(1))
    adapter, batch = {name: x + 0.1 for name, x in adapter.items()}, tiny.experience(4, 3, dtype=torch.float32)
    expected = outcome(adapted, adapter, batch)
    for how in HOW:
        assert_same(outcome(sliced(adapted, 3, how), adapter, batch), expected, 1e-4)


def test_only_what_needs_a_gradient_gets_one():
    """The MLPs' input alone, parameters alone, and some of these."""
    batch = tiny.experience(2, 3)
    for kept in ("embed_tokens", "gate_proj", "layers.1.mlp.down_proj"):
        own = {name: x for name, x in PARAMS.items() if kept in name}
        loss = [
            value_and_grad(
                lambda p, m=m: forward_micro_batch(PARAMS | p, batch, forward=Forward(m)).log_probs.square().sum()
            )(own)
            for m in (MODEL, sliced(MODEL, 3), sliced(MODEL, 3, "selective"))
        ]
        assert_same(loss[1], loss[0])
        assert_same(loss[2], loss[0])


def test_a_pass_without_gradients_is_cut_too():
    batch = tiny.experience(2, 3)
    with torch.no_grad():
        whole, cut = (
            forward_micro_batch(PARAMS, batch, forward=Forward(m)).log_probs for m in (MODEL, sliced(MODEL, 3))
        )
    assert_same(cut, whole)


def test_kernels_run_inside_slices():
    batch, kernels = tiny.experience(2, 3), Kernels.named(linear="torch", rms_norm="torch")
    expected = outcome(MODEL, PARAMS, batch, kernels=kernels)
    assert_same(outcome(sliced(MODEL, 3, "selective"), PARAMS, batch, kernels=kernels), expected)


def test_recomputed_layers_compute_mlps_no_more_often_than_without_slices():
    """What is computed again for the backward pass is each slice once, not the whole MLP before."""
    batch, widths = tiny.experience(2, 3), []

    def linear(x, weight, bias=None):
        widths.append(x[..., 0].numel() if len(weight) == MODEL.config.intermediate_size else 0)
        return F.linear(x, weight, bias)

    kernels, found = attrs.evolve(Kernels.named(), linear=linear), []
    for tokens in (None, 3):
        widths.clear()
        outcome(sliced(MODEL, tokens, "selective"), PARAMS, batch, kernels=kernels)
        found.append(sum(widths))
    assert found[0] == found[1] == 2 * 2 * 2 * int(batch.attention_mask.sum())  # layers, products, runs


def test_a_graph_may_be_used_twice():
    for how in HOW:
        leaves = {name: x.detach().requires_grad_() for name, x in PARAMS.items()}
        out = forward_micro_batch(leaves, tiny.experience(2, 3), forward=Forward(sliced(MODEL, 3, how))).log_probs
        first, second = (torch.autograd.grad(out.sum(), list(leaves.values()), retain_graph=x) for x in (True, False))
        assert all(map(torch.equal, first, second))


def test_sums_over_slices_are_rounded_once_in_sixteen_bits():
    """So many slices of one token would else lose a part of the gradient."""
    model, params = tiny.model_and_params(dtype=torch.float32)
    half = attrs.evolve(model, compute_dtype=torch.bfloat16)
    batch = tiny.experience(3, 24, response=24, dtype=torch.float32)
    exact, whole, cut = (outcome(m, params, batch)[1] for m in (model, half, sliced(half, 1, "selective")))
    names = [name for name in exact if "mlp" in name]
    errors = [sum(float((x[n] - exact[n]).norm() / exact[n].norm()) for n in names) for x in (whole, cut)]
    assert errors[1] < 1.2 * errors[0]


def test_torch_func_sees_whole_mlps():
    batch = tiny.experience(2, 3)
    found = [
        grad(lambda p, m=m: forward_micro_batch(p, batch, forward=Forward(m)).log_probs.square().sum())(PARAMS)
        for m in (MODEL, sliced(MODEL, 3))
    ]
    assert_same(found[1], found[0])


def test_compiled_layers_are_refused():
    model = attrs.evolve(sliced(MODEL, 3), compile_layers=True)
    with pytest.raises(ValueError, match="leave mlp_slice_tokens or compile_layers out"):
        model.own_skeleton(compiled=True)


@pytest.mark.parametrize(("stage", "how"), [(3, False), (3, "selective"), (1, True)])
def test_sharded_layers_are_cut_too(stage, how):
    """Two ranks with the same rows: twice the gradient."""
    batch = tiny.experience(2, 3)
    loss, expected = outcome(MODEL, PARAMS, batch)

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage))
        found, grads = outcome(sliced(MODEL, 3, how), fsdp.shard(PARAMS, mesh), batch, mesh=mesh)
        return found, fsdp.gather(grads, MODEL.shapes, mesh)

    for found, grads in simulate({"shard": 2}, run):
        assert_same(found, loss)
        assert_same(grads, {name: 2 * x for name, x in expected.items()})


@pytest.mark.slow
def test_updates_keep_the_law_of_layouts():
    def update(*, forward, **options):
        forward = attrs.evolve(forward, model=attrs.evolve(forward.model, mlp_slice_tokens=3))
        return UpdateActor(loss_fn=losses.ppo_clip, forward=forward, **options)

    laws.check_layout_fn(update, modes=("token-mean",), each=2, max_ranks=2)


def wide():
    model = models.build(tiny.config(intermediate_size=128, max_position_embeddings=1024))
    return model, models.init_params(model, Key(0))


def peak(model, params, batch, *, trains=True):
    """The most bytes that are alive in a pass, of what it makes."""
    with Limited() as limited:
        if trains:
            outcome(model, params, batch)
        else:
            with torch.no_grad():
                forward_micro_batch(params, batch, forward=Forward(model))
    return limited.peak


def test_long_rows_take_less_memory():
    """Of an MLP eight times as wide as the model: at most 0.6 beside recomputed layers, and in a pass alone."""
    model, params = wide()
    batch = tiny.experience(5, 1, prompt=500, response=500, dtype=torch.float32)
    for how in ("selective", True):
        assert peak(sliced(model, 32, how), params, batch) < 0.6 * peak(sliced(model, None, how), params, batch)
    whole, cut = (peak(sliced(model, size), params, batch, trains=False) for size in (None, 32))
    assert cut < 0.6 * whole


class AtEmbedding(Limited):
    """Counts the tensors of the size of hidden states that are alive when a backward pass comes to the embeddings, its
    last operation."""

    left = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.left = sum(ref().nbytes() >= args[0].nbytes for ref in self._seen.values())
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_layer_keeps_nothing_behind_its_backward_pass():
    for how in ("selective", True):
        with AtEmbedding() as counted:
            outcome(sliced(MODEL, 3, how), PARAMS, tiny.experience(5, 1, prompt=50, response=50))
        assert counted.left == 1, "the gradient of the embeddings"
