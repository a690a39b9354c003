"""A model on packed tokens is transformers' own forward, in values and in every gradient."""

import attrs
import pytest
import torch

from fppo import models
from fppo.grad import value_and_grad
from fppo.models.precision import KeepDouble
from fppo_kernels.table import Kernels
from tests.models.families import CONFIGS, make, plain

MASK = torch.tensor(
    [[0, 0, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0]]
).bool()
TOKENS = torch.randint(3, 31, MASK.shape, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.randn(int(MASK.sum()), 31, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
KERNELS = Kernels.named()


def apply_head(head, hidden):
    logits = hidden @ head.weight.T
    logits = (logits if head.bias is None else logits + head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def packed_logits(model, params):
    packed = KERNELS.unpad(TOKENS, MASK)
    attend = models.packed_attention(KERNELS.attention, packed.lengths)
    hidden = models.hidden_states(model, params, packed.tokens, packed.positions, attend=attend)
    return apply_head(models.output_head(model, params), hidden)


def padded_logits(model, params):
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    hidden = models.hidden_states(model, params, TOKENS, positions, attend=models.padded_attention(MASK))
    return apply_head(models.output_head(model, params), hidden)[MASK]


def plain_logits(module):
    with KeepDouble():
        rows = [module(input_ids=row[keep][None]).logits[0] for row, keep in zip(TOKENS, MASK, strict=True)]
        return torch.cat(rows)


def assert_grads_close(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name):
    model, params = make(name)
    module = plain(model, params)
    expected = plain_logits(module)
    loss, grads = value_and_grad(lambda p: (packed_logits(model, p) * WEIGHTS).sum())(params)
    (expected * WEIGHTS).sum().backward()
    named = {n: p.grad for n, p in module.named_parameters()}
    torch.testing.assert_close(packed_logits(model, params), expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(padded_logits(model, params), expected.detach(), rtol=1e-10, atol=1e-12)
    assert loss == (packed_logits(model, params) * WEIGHTS).sum()
    scale = max(g.abs().max() for g in named.values())
    assert_grads_close({n: g / scale for n, g in grads.items()}, {n: g / scale for n, g in named.items()})
    assert all(g.abs().max() > 1e-9 * scale for n, g in grads.items() if "k_proj.bias" not in n)


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpointed_layers_change_no_bit(name):
    """Also where attention, be it one operation or several, is not computed again."""
    model, params = make(name, dtype=torch.float32)

    def run(how):
        own = attrs.evolve(model, checkpoint_layers=how)
        return value_and_grad(lambda p: (packed_logits(own, p) * WEIGHTS).sum())(params)

    expected = run(False)
    for how in (True, "selective"):
        torch.testing.assert_close(run(how), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_model_asks_of_attention_is_known_beforehand(name):
    model, params = make(name, dtype=torch.float32)
    asked = set()

    def attention(query, key, value, *, lengths, scale, **features):
        asked.update(feature for feature, given in features.items() if given is not None)
        return KERNELS.attention(query, key, value, lengths=lengths, scale=scale, **features)

    packed = KERNELS.unpad(TOKENS, MASK)
    attend = models.packed_attention(attention, packed.lengths)
    models.hidden_states(model, params, packed.tokens, packed.positions, attend=attend)
    assert models.attention_needs(model) == asked
