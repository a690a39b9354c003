"""Layers that are computed again: what runs how often, what is kept meanwhile, and what is refused."""

from __future__ import annotations

import weakref
from collections import Counter

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fppo import models, tree
from fppo.grad import value_and_grad
from fppo.steps.forward import Forward, forward_micro_batch
from fppo_kernels.attention.eager import eager
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import make
from tests.models.hybrids import HYBRIDS
from tests.models.test_families import packed_logits

LAYERS = 2
HOW = (False, True, "selective")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class Operations(TorchDispatchMode):
    """How often each operation has run, forward or recomputed."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def gradients(model, params, batch, output, **settings):
    forward = Forward(model, **settings)

    def loss(params):
        return getattr(forward_micro_batch(params, batch, forward=forward, outputs=(output,)), output).square().sum()

    return value_and_grad(loss)(params)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize(("head", "output"), [("lm", "log_probs"), ("value", "values")])
def test_attention_that_is_kept_runs_once_and_changes_no_bit(dtype, remove_padding, head, output):
    """Whole layers run it twice; with rows of one length, which are attention's as they come, and of several."""
    model, params = tiny.model_and_params(head, dtype=dtype)
    for rows in (1, 5):
        batch = tiny.experience(3, rows, dtype=dtype)
        found, runs = {}, {}
        for how in HOW:
            with Operations() as operations:
                own = attrs.evolve(model, checkpoint_layers=how)
                found[how] = tree.digest(gradients(own, params, batch, output, remove_padding=remove_padding))
            runs[how] = operations.counts[FLASH]
        assert found[False] == found[True] == found["selective"]
        assert runs[False] == runs["selective"] >= LAYERS
        assert runs[True] == 2 * runs[False]


def kept(model, params, batch, kernels):
    """Bytes that a pass leaves for its backward pass."""
    alive: dict[int, tuple[weakref.ref, int]] = {}

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor):
                    storage = x.untyped_storage()
                    alive[storage.data_ptr()] = weakref.ref(storage), storage.nbytes()
            return out

    leaves = {name: x.detach().requires_grad_() for name, x in params.items()}
    with Made():
        out = forward_micro_batch(leaves, batch, forward=Forward(model, kernels=kernels)).log_probs
    sizes = [size for ref, size in alive.values() if ref() is not None]
    del out
    return sum(sizes)


def test_beside_a_layers_input_attentions_output_and_its_sums_are_kept():
    """Of rows of one length; not queries, keys and values, and nothing of attention that is given back as it was."""
    batch = tiny.experience(3, 1)
    tokens, (model, params) = int(batch.attention_mask.sum()), tiny.model_and_params()
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    sizes = {how: kept(attrs.evolve(model, checkpoint_layers=how), params, batch, Kernels.named()) for how in HOW}
    assert sizes["selective"] - sizes[True] == LAYERS * 8 * tokens * (width + heads)
    assert sizes[False] > sizes["selective"] + LAYERS * 8 * tokens * 4 * width


def test_a_kernel_of_any_kind_runs_once():
    """Also one of several operations, of which the last keeps nothing."""
    model, params = tiny.model_and_params()
    batch, calls = tiny.experience(3, 5), []

    def attention(*args, **kwargs):
        calls.append(1)
        return eager(*args, **kwargs).clone()

    kernels = attrs.evolve(Kernels.named(), attention=attention)
    found = []
    for how, expected in zip(HOW, (LAYERS, 2 * LAYERS, LAYERS), strict=True):
        calls.clear()
        own = attrs.evolve(model, checkpoint_layers=how)
        found.append(tree.digest(gradients(own, params, batch, "log_probs", kernels=kernels)))
        assert len(calls) == expected
    assert found[0] == found[1] == found[2]


def test_a_graph_may_be_used_twice():
    model, params = make("qwen2", checkpoint_layers="selective")
    leaves = {name: x.requires_grad_() for name, x in params.items()}
    loss = packed_logits(model, leaves).square().sum()
    first, second = (torch.autograd.grad(loss, list(leaves.values()), retain_graph=again) for again in (True, False))
    assert all(map(torch.equal, first, second))


def test_attention_whose_output_changes_in_place_is_refused():
    model, params = make("qwen2", checkpoint_layers="selective")
    projection = model.skeleton.get_submodule("layers.1.self_attn.o_proj")
    projection.register_forward_pre_hook(lambda module, inputs: (inputs[0].mul_(2),))
    with pytest.raises(ValueError, match="changes the output of its attention in place"):
        value_and_grad(lambda p: packed_logits(model, p).sum())(params)


def test_a_model_without_attention_has_none_to_keep():
    with pytest.raises(ValueError, match="model type 'mamba' has no attention to keep results of"):
        models.build(HYBRIDS["mamba"], checkpoint_layers="selective")
    models.build(HYBRIDS["qwen3_next"], checkpoint_layers="selective")
