"""Shards and their collectives: what lies where, how much of it, and in which dtype it travels."""

from functools import partial

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from fppo import models, tree
from fppo.runtime import fsdp
from fppo.runtime.layout import Cut
from fppo.runtime.mesh import DENSE, Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo.runtime.watch import watched
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state


def sharded(mesh, **changes):
    return attrs.evolve(mesh, sharding=Sharding(**changes))


def whole_params(sizes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {str(i): torch.randn(size, generator=generator, dtype=dtype) for i, size in enumerate(sizes)}


SHAPES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 3)) | st.tuples(st.integers(1, 9)), min_size=1, max_size=4
)


@settings(max_examples=25)
@given(shapes=SHAPES, ranks=st.sampled_from([1, 2, 3, 4, 8]), seed=st.integers(0, 99))
def test_gather_undoes_shard_and_its_gradient_is_the_shard_of_the_sum(shapes, ranks, seed):
    params = whole_params(shapes, seed)
    sizes = {name: x.shape for name, x in params.items()}
    weights = [whole_params(shapes, 100 + rank) for rank in range(ranks)]

    def run(mesh, own):
        mesh = sharded(mesh)
        shards = {name: x.requires_grad_() for name, x in fsdp.shard(params, mesh).items()}
        whole = fsdp.gather(shards, sizes, mesh)
        loss = torch.stack([(whole[name] * own[name]).sum() for name in whole]).sum()
        grads = dict(zip(shards, torch.autograd.grad(loss, list(shards.values())), strict=True))
        return (
            tree.map(torch.detach, whole),
            shards,
            grads,
            fsdp.shard({name: torch.stack([w[name] for w in weights]).sum(0) for name in params}, mesh),
        )

    found = simulate({"shard": ranks}, run, weights)
    for whole, _, grads, expected in found:
        for name, x in params.items():
            assert torch.equal(whole[name], x)
            torch.testing.assert_close(grads[name], expected[name], rtol=1e-12, atol=1e-12)
    for name, x in params.items():
        assert sum(len(shards[name]) for _, shards, _, _ in found) == len(x)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    leaves=st.lists(st.tuples(st.integers(1, 13), st.booleans()), min_size=1, max_size=4),
    axes=st.permutations([("shard", 2), ("expert", 3)])
    | st.sampled_from([[("shard", 3), ("expert", 2)], [("expert", 2)], [("shard", 1), ("expert", 4)]]),
    seed=st.integers(0, 99),
)
def test_experts_are_shared_by_the_shard_axis_and_all_else_by_both_axes_as_one(leaves, axes, seed):
    """By the definition: rank (s, e) has chunk s * experts + e of what is dense, and chunk s of part e of experts."""
    sizes = {"shard": 1, **dict(axes)}
    ranks, experts = sizes["shard"], sizes["expert"]
    params = whole_params([(rows * (experts if cut else 1), 2) for rows, cut in leaves], seed)
    cuts = {str(i): Cut(0, experts, (len(params[str(i)]),), "expert") for i, (_, cut) in enumerate(leaves) if cut}

    def run(mesh):
        mesh, place = sharded(mesh), (mesh["shard"].rank, mesh["expert"].rank)
        placed = {name: cuts[name].take(x, place[1]) if name in cuts else x for name, x in params.items()}
        shards = {name: x.requires_grad_() for name, x in fsdp.shard(placed, mesh, cuts).items()}
        whole = fsdp.gather(shards, {name: x.shape for name, x in placed.items()}, mesh, cuts=cuts)
        assert all(torch.equal(whole[name], x) for name, x in placed.items())
        loss = torch.stack([x.sum() * 2.0 ** (place[0] * experts + place[1]) for x in whole.values()]).sum()
        return place, shards, torch.autograd.grad(loss, list(shards.values()))

    for (s, e), shards, grads in simulate(dict(axes), run):
        for (name, x), grad in zip(params.items(), grads, strict=True):
            own = cuts[name].take(x, e) if name in cuts else x
            number, count = (s, ranks) if name in cuts else (s * experts + e, ranks * experts)
            every = [*own.chunk(count), *[own[:0]] * count]
            assert torch.equal(shards[name], every[number])
            with_rows = [2.0 ** (i * experts + e) for i in range(ranks)] if name in cuts else [2.0 ** (count) - 1.0]
            torch.testing.assert_close(grad, torch.full_like(grad, sum(with_rows)))


def test_dense_parameters_go_in_one_collective_over_both_axes():
    params, cuts = whole_params([(12, 2), (4,), (6, 2)]), {"2": Cut(0, 2, (12,), "expert")}
    sizes = {name: x.shape for name, x in params.items()}

    def on_rank(mesh):
        mesh, watch = watched(sharded(mesh))
        shards = {name: x.requires_grad_() for name, x in fsdp.shard(params, mesh, cuts).items()}
        whole = fsdp.gather(shards, sizes, mesh, cuts=cuts)
        torch.autograd.grad(torch.cat([x.flatten() for x in whole.values()]).sum(), list(shards.values()))
        return {name: (each.calls, each.bytes) for name, each in watch.traffic().items() if each.calls}

    dense = {DENSE: (2, 2 * 28 * 8 * 3 // 4)}  # once gathered, and once reduced
    # each rank has its experts whole, and sends nothing of them
    assert simulate({"expert": 4}, on_rank) == [dense] * 4
    assert simulate({"shard": 2, "expert": 2}, on_rank) == [dense | {"shard": (2, 2 * 12 * 8 // 2)}] * 4


def test_frozen_parameters_take_no_gradient_and_no_wire():
    params = whole_params([(8, 4), (8, 2), (8,)])
    sizes = {name: x.shape for name, x in params.items()}

    def run(mesh):
        mesh, watch = watched(sharded(mesh))
        shards = fsdp.shard(params, mesh)
        shards["1"].requires_grad_()
        whole = fsdp.gather(shards, sizes, mesh)
        assert not whole["0"].requires_grad or not shards["0"].requires_grad
        loss = torch.stack([x.square().sum() for x in whole.values()]).sum()
        return torch.autograd.grad(loss, [shards["1"]])[0], watch.traffic()["shard"].bytes

    parts, sent = zip(*simulate({"shard": 2}, run), strict=True)
    torch.testing.assert_close(torch.cat(parts), 2 * 2 * params["1"])
    assert sent == ((56 + 16) * 8 // 2,) * 2


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_gathers_send_the_compute_dtype_and_gradients_are_added_in_the_reduce_dtype(reduce):
    params = whole_params([(5, 3), (4,)], dtype=torch.float32)
    sizes = {name: x.shape for name, x in params.items()}

    def run(mesh):
        mesh, watch = watched(sharded(mesh, reduce_dtype=reduce))
        shards = {name: x.requires_grad_() for name, x in fsdp.shard(params, mesh).items()}
        whole = fsdp.gather(shards, sizes, mesh, dtypes=dict.fromkeys(sizes, torch.bfloat16))
        assert all(torch.equal(x, params[name].bfloat16()) for name, x in whole.items())
        # 1 + 1/256 is no bfloat16: only a sum in float32 holds it
        weight = 1.0 if mesh["shard"].rank else 1 / 256
        grads = torch.autograd.grad((whole["0"] * weight).sum() + whole["1"].sum() * 0, list(shards.values()))
        return grads, watch.traffic()["shard"].bytes

    grads, sent = zip(*simulate({"shard": 2}, run), strict=True)
    assert sent == ((6 * 3 + 4) * (2 + reduce.itemsize) // 2,) * 2
    assert all(g.dtype == torch.float32 for rank in grads for g in rank)
    expected = 1 + 1 / 256 if reduce == torch.float32 else 1.0
    assert torch.equal(torch.cat([rank[0] for rank in grads]), torch.full((5, 3), expected))


def test_shards_are_the_rows_that_torchs_own_tools_give_a_rank():
    """DTensor's Shard(0) cuts as `torch.chunk` does, with nothing for ranks after the last chunk."""
    params = whole_params([(5, 3), (1, 4), (8,)])
    for rank, shards in enumerate(simulate({"shard": 4}, lambda mesh: fsdp.shard(params, sharded(mesh)))):
        for name, x in params.items():
            chunks = [*x.chunk(4), *[x[:0]] * 4]
            assert torch.equal(shards[name], chunks[rank])
            assert shards[name].untyped_storage().nbytes() == shards[name].nbytes


def test_a_scalar_parameter_is_named():
    with pytest.raises(ValueError, match=r"parameters \['scale'\] have no dimension"):
        simulate({"shard": 2}, lambda mesh: fsdp.shard({"scale": torch.ones(())}, sharded(mesh)))
    with pytest.raises(ValueError, match="stage"):
        Sharding(stage=4)


def bytes_of(values):
    return sum(x.numel() * x.element_size() for _, x in tree.leaves_with_paths(values) if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_state_and_gradients_per_rank_are_their_part_of_the_whole(ranks):
    config = LlamaConfig(
        vocab_size=1003,
        hidden_size=96,
        intermediate_size=260,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = models.build(config)
    params = {name: torch.zeros(shape) for name, shape in model.shapes.items()}

    def held(mesh):
        mesh = sharded(mesh)
        shards = {name: x.requires_grad_() for name, x in fsdp.shard(params, mesh).items()}
        whole = fsdp.gather(shards, model.shapes, mesh)
        loss = torch.stack([x.sum() for x in whole.values()]).sum()
        grads = torch.autograd.grad(loss, list(shards.values()))
        state = init_state(tree.map(torch.detach, shards), adamw(lambda step: 0.1))
        assert all(x.untyped_storage().nbytes() == bytes_of(x) for x in state.params.values())
        return bytes_of(state) + bytes_of(grads)

    total = 4 * bytes_of(params)
    assert max(simulate({"shard": ranks}, held)) <= 1.02 * total / ranks
    assert partial(held, Mesh.local())() == total + 4
