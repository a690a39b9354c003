"""Routers of experts tell what they choose, and choose again what they are told; all else stays theirs."""

import attrs
import pytest
import torch

from fppo import models
from fppo.grad import value_and_grad
from fppo.models.model import causal_lm
from fppo.models.routing import Routed, Router, RouterSeam, Routes, experts_of, put_routers
from fppo.models.seams import find_layers
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels
from tests.models.families import CONFIGS, make, skip_without_plan

KERNELS = Kernels.named()
TOKENS = torch.tensor([5, 7, 3, 9, 4, 8, 6])
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 2, 3])
ATTEND = models.packed_attention(KERNELS.attention, make_lengths([3, 4]))
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "glm4_moe", "deepseek_v3")


def gradients(model, params, routes=None):
    """The sum of squared hidden states, and its gradients."""

    def loss(own):
        hidden = models.hidden_states(model, own, TOKENS, POSITIONS, attend=ATTEND, routes=routes)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0), dtype=hidden.dtype)
        return (weights * hidden).sum()

    return value_and_grad(loss)(params)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_recorded_and_replayed_is_the_plain_pass_to_the_bit(name):
    skip_without_plan(name)
    model, params = make(name)
    model = attrs.evolve(model, checkpoint_layers=name in ("mixtral", "glm4_moe"))
    layers = [router.layer for router in model.routers]
    assert layers == ([1] if name in ("glm4_moe", "deepseek_v3") else [0, 1])
    expected = gradients(model, params)
    told = Routes()
    recorded = gradients(model, params, told)
    chosen = torch.stack([told.routed[i].chosen for i in range(len(layers))], 1)
    experts, k = model.routers[0].experts, model.routers[0].chosen
    assert chosen.shape == (len(TOKENS), len(layers), k)
    assert told.routed[0].logits.shape == (len(TOKENS), experts)
    replayed = gradients(model, params, Routes(chosen.to(torch.uint8)))
    for value, grads in (recorded, replayed):
        assert torch.equal(value, expected[0])
        assert all(torch.equal(grads[name], x) for name, x in expected[1].items())
    others = {"another row's": chosen.roll(1, 0)} | ({"another layer's": chosen.flip(1)} if len(layers) > 1 else {})
    for what, other in others.items():
        value, grads = gradients(model, params, Routes(other))
        assert abs(value - expected[0]) > 1e-3, what
        assert any(grads[name].abs().sum() > 0 for name in params if "gate" in name or "router" in name)


def test_the_weights_of_replayed_experts_are_this_pass_s_own():
    """With other parameters the choice stays, and its gradient reaches the router."""
    model, params = make("qwen3_moe")
    told = Routes()
    gradients(model, params, told)
    chosen = torch.stack([told.routed[i].chosen for i in range(2)], 1)
    moved = {name: x + 0.3 if name.endswith("gate.weight") else x * 1.1 for name, x in params.items()}
    again = Routes(chosen)
    _, grads = gradients(model, moved, again)
    assert all(torch.equal(again.routed[i].chosen, chosen[:, i]) for i in range(2))
    assert all(grads[f"model.layers.{i}.mlp.gate.weight"].abs().max() > 1e-6 for i in range(2))


def test_the_choice_without_a_replay_is_kept_beside_it_on_request():
    """The first router gets equal tokens in both passes."""
    model, params = make("qwen3_moe")
    told = Routes()
    gradients(model, params, told)
    chosen = torch.stack([told.routed[i].chosen for i in range(2)], 1)
    other = chosen.roll(1, 0)
    again, silent = Routes(other, own=True), Routes(other)
    (value, _), (plain, _) = gradients(model, params, again), gradients(model, params, silent)
    assert torch.equal(value, plain)
    for i in range(2):
        assert torch.equal(again.routed[i].chosen, other[:, i])
        assert torch.equal(silent.routed[i].own, other[:, i])
    assert torch.equal(again.routed[0].own.sort().values, chosen[:, 0].sort().values)
    assert not torch.equal(again.routed[0].own, again.routed[0].chosen)
    found = experts_of(again.routed, model.routers, TOKENS)
    assert torch.equal(found[:, 0].sort().values.long(), chosen[:, 0].sort().values)
    nothing = experts_of({1: again.routed[1]}, model.routers, TOKENS)
    assert not nothing[:, 0].any()
    assert torch.equal(nothing[:, 1].long(), again.routed[1].own)


def test_the_experts_of_other_tokens_are_refused():
    model, params = make("qwen3_moe")
    with pytest.raises(ValueError, match="a router gets 7 tokens, and the replayed experts of 5"):
        gradients(model, params, Routes(torch.zeros(5, 2, 2, dtype=torch.uint8)))


def test_a_router_that_chooses_in_its_own_way_is_refused():
    model, params = make("qwen3_moe")

    def own(*_):
        return torch.zeros(7, 4), torch.ones(7, 2), torch.zeros(7, 2, dtype=torch.int64)

    for module in model.skeleton.modules():
        if isinstance(module, RouterSeam):
            module._inner[0].forward = own
    with pytest.raises(ValueError, match=r"Qwen3MoeTopKRouter chooses experts without torch\.topk"):
        gradients(model, params, Routes(torch.zeros(7, 2, 2, dtype=torch.uint8)))


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.int32), (512, torch.int32)])
def test_numbers_of_experts_are_kept_as_they_are(experts, dtype):
    chosen = torch.tensor([[0, experts - 1]])
    found = experts_of({0: Routed(torch.zeros(1, experts), chosen, chosen)}, [Router(0, experts, 2, None)], chosen)
    assert found.dtype == dtype
    assert found.tolist() == [[[0, experts - 1]]]


def test_routers_of_several_kinds_are_left_as_they_are():
    """With other numbers of experts, or of chosen ones."""
    for change, count in ((None, 2), ("chosen", 0), ("experts", 0)):
        base = causal_lm(CONFIGS["qwen3_moe"], "meta").base_model
        gate = base.get_submodule("layers.1.mlp.gate")
        if change == "chosen":
            gate.top_k = 1
        elif change == "experts":
            gate.weight = torch.nn.Parameter(torch.empty(5, 16, device="meta"))
        routers = put_routers(base, find_layers(base), {})
        assert len(routers) == count
        assert sum(isinstance(module, RouterSeam) for module in base.modules()) == count
        assert all(router == Router(number, 4, 2, None) for number, router in enumerate(routers))
