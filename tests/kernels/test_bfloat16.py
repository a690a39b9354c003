"""The linear layer with products in bfloat16: its law, its dtypes, and where it may run."""

import attrs
import pytest
import torch
from torch.nn import functional as F

from fppo import laws
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.micro_batching import MicroBatching
from fppo_kernels import table
from fppo_kernels.linear import bfloat16 as module
from fppo_kernels.table import Kernels
from tests.models.families import make
from tests.rollout.test_embedded import engine_of, make_prompts

bfloat16 = module.bfloat16


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def allowed(monkeypatch):
    """A processor that has such products."""
    monkeypatch.setattr(module, "multiplies", lambda: True)


def test_it_keeps_the_laws_of_a_linear_layer_to_the_tolerance_of_bfloat16():
    rounds = table.BUILTIN["linear"]["bfloat16"].tolerance
    laws.check_kernel("linear", bfloat16, dtypes=module.DTYPES, tolerance=getattr(torch, rounds))
    off = lambda x, weight, bias=None: 1.1 * bfloat16(x, weight, bias)  # noqa: E731
    with pytest.raises(laws.LawViolation, match=r"values(.|\n)*in bfloat16"):
        laws.check_kernel("linear", off, dtypes=(torch.float32,), tolerance=torch.bfloat16)
    with pytest.raises(laws.LawViolation, match="values"):
        laws.check_kernel("linear", bfloat16, dtypes=(torch.float32,))


def test_operands_are_rounded_and_sums_are_not():
    """A sum of 4,096 numbers in bfloat16 would stay at 256."""
    x, weight, grad = drawn(2, 3, 64).requires_grad_(), drawn(5, 64, seed=1).requires_grad_(), drawn(2, 3, 5, seed=2)
    y = bfloat16(x, weight)
    exact = [a.detach().bfloat16().double() for a in (x, weight, grad)]
    expected = [F.linear(*exact[:2]), exact[2] @ exact[1], exact[2].flatten(0, 1).T @ exact[0].flatten(0, 1)]
    for found, wide in zip((y, *torch.autograd.grad(y, [x, weight], grad)), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wide.float(), rtol=2**-7.9, atol=1e-5)
    assert bfloat16(torch.ones(1, 4096), torch.ones(1, 4096)).item() == 4096
    half = y.detach() + drawn(5)
    torch.testing.assert_close(bfloat16(x.detach(), module.rounded(weight), drawn(5)), half, rtol=0, atol=0)


def test_one_row_without_a_dimension_of_rows_has_gradients():
    x, weight = drawn(8).requires_grad_(), drawn(5, 8, seed=1).requires_grad_()
    one, many = (torch.autograd.grad(bfloat16(each, weight).sum(), [x, weight]) for each in (x, x[None]))
    assert all(map(torch.equal, one, many))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_refused(dtype, allowed):
    with pytest.raises(ValueError, match="take linear/torch"):
        bfloat16(torch.ones(2, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype))
    with pytest.raises(ValueError, match="has no"):
        table.get("linear", "bfloat16", needs={str(dtype).removeprefix("torch.")})


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_a_processor_without_such_products_is_refused_by_name(avx512, amx, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    if avx512 or amx:
        assert table.get("linear", "bfloat16") is bfloat16
        return
    with pytest.raises(ValueError, match=r"linear/bfloat16 cannot run here: .*AMX.*there are .*'onednn', 'torch'"):
        Kernels.named(linear="bfloat16")


def test_an_engine_decodes_as_the_trainer_computes(allowed):
    """Weights are rounded once for all steps; the head is not rounded."""
    model, params = make("llama", dtype=torch.float32)
    kernels = attrs.evolve(Kernels.named(), linear=bfloat16)
    ask = Ask(make_prompts(), Sampling(n=2, max_tokens=6), Key(2))
    rollout = attrs.evolve(engine_of(model), kernels=kernels).generate(params, ask)
    plain = engine_of(model).generate(params, ask)
    gap = (rollout.rollout_log_probs - plain.rollout_log_probs).abs()[rollout.tokens[:, -6:] == plain.tokens[:, -6:]]
    assert 1e-5 < gap.max() < 0.1
    forward = Forward(model, kernels=kernels)
    trained = compute_log_probs(params, rollout, forward=forward, micro_batching=MicroBatching(size=4))
    torch.testing.assert_close(rollout.rollout_log_probs, trained, rtol=0, atol=0.02)
    assert (rollout.rollout_log_probs - trained).abs().median() < 1e-4  # 3e-3 with a rounded head
