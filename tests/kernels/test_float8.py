"""The 8-bit linear layer: its definition in float64, scales and their ends, what a cut of the weights changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from fppo import laws
from fppo_kernels import table
from fppo_kernels.linear import float8 as module
from fppo_kernels.linear.float8_reference import reference, rounded

float8, coded = module.float8, module.coded


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def said(x):
    """What codes say, in float64."""
    return x.codes.double() * x.unit.double()


@pytest.mark.slow
def test_it_keeps_the_laws_of_its_definition():
    laws.check_kernel("linear", float8, dtypes=(torch.float32, torch.bfloat16), reference=reference)


def test_it_is_no_plain_product():
    with pytest.raises(laws.LawViolation, match="values"):
        laws.check_kernel("linear", float8, dtypes=(torch.float32,))


@given(st.integers(0, 99), st.integers(-140, 120), st.booleans())
def test_codes_are_those_of_the_definition(seed, power, by_row):
    """Numbers of all sizes, with ties, down to the least that float32 has and up to the largest."""
    x = drawn(4, 6, seed=seed) * 2.0 ** torch.randint(-20, 3, (4, 6), generator=torch.Generator().manual_seed(seed))
    x = torch.ldexp(torch.where(x.abs() > 0.5, (x * 16).round() / 16, x), torch.tensor(power))
    code = coded(x, by_row=by_row)
    small = x.abs().amax(-1 if by_row else (0, 1), keepdim=True) < 2.0**-110  # it runs out of scales
    off = (said(code) - rounded(x.double(), by_row=by_row)).abs()
    assert off.where(~small, 0.0).eq(0).all()
    assert code.codes.float().isfinite().all()
    assert (off <= 2.0**-135).all()


@pytest.mark.parametrize("dtype", module.DTYPES)
def test_the_largest_number_of_a_row_uses_the_codes_up(dtype):
    x = torch.tensor([[448.0], [449.0], [1.75], [1.7578125], [-6e-8], [3e4]]).to(dtype)
    codes, unit = coded(x)
    torch.testing.assert_close(said(coded(x)), x.double(), rtol=2**-4, atol=0)
    assert codes.float().abs().ge(224).all()
    assert codes.float().abs().le(448).all()
    assert unit.log2().frac().eq(0).all()


def test_rows_of_zeros_are_zeros_and_rows_that_are_not_finite_spoil_themselves_alone():
    x, weight = drawn(5, 32), drawn(16, 32, seed=1)
    spoiled = x.clone()
    spoiled[0], spoiled[2, 3], spoiled[4, 5] = 0, float("inf"), float("nan")
    y = float8(spoiled, weight * 1e-30)
    assert torch.equal(y[0], torch.zeros(16))
    assert y[[2, 4]].isnan().all()
    assert torch.equal(y[[1, 3]], float8(x, weight * 1e-30)[[1, 3]])
    assert float8(x, weight.put(torch.tensor([7]), torch.tensor([float("inf")])))[:, 0].isnan().all()


def test_a_small_row_beside_large_ones_keeps_its_bits():
    """Of results and of the gradients that are handed on."""
    sizes, weight = 2.0 ** torch.tensor([[0], [-30], [12], [-9]]), drawn(16, 32, seed=1)
    x, grad = drawn(4, 32) * sizes, drawn(4, 16, seed=2) * sizes
    for row in range(4):
        small = [a[row].expand(4, -1).clone().requires_grad_() for a in (x, grad)]
        all_x = x.clone().requires_grad_()
        y, alone = float8(all_x, weight), float8(small[0], weight)
        assert torch.equal(y[row], alone[0])
        ours, theirs = torch.autograd.grad(y, all_x, grad)[0], torch.autograd.grad(alone, small[0], small[1])[0]
        assert torch.equal(ours[row], theirs[0])


def test_gradients_that_are_not_finite_stay_so():
    x, weight = drawn(3, 16).requires_grad_(), drawn(16, 16, seed=1)
    grad = torch.zeros(3, 16).index_put((torch.tensor([1]), torch.tensor([2])), torch.tensor(float("inf")))
    (d_x,) = torch.autograd.grad(float8(x, weight), x, grad)
    assert d_x[1].isnan().all()
    assert d_x[[0, 2]].eq(0).all()


def test_it_is_never_in_float64():
    with pytest.raises(ValueError, match="take linear/torch"):
        float8(torch.ones(2, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="has no float64"):
        table.get("linear", "float8", needs={"float64"})


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((7, 5), False)])
def test_gpus_without_8_bit_products_are_refused_by_name(monkeypatch, capability, runs):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = table.available("linear")["float8"]
    assert (reason is None) == runs
    assert runs or "8.9" in reason


@pytest.mark.parametrize("shape", [(16, 32, 48), (5, 7, 3)])
def test_products_with_scales_inside_have_the_bits_of_those_with_scales_after(shape):
    """What runs on GPUs in bfloat16, where this torch's CPU has it too."""
    n, h, m = shape
    a, b = coded(drawn(n, h, dtype=torch.bfloat16)), coded(drawn(m, h, seed=1, dtype=torch.bfloat16) * 1e-3)
    own, other = a._replace(codes=module._filled(a.codes)), b._replace(codes=module._filled(b.codes, rows=True))
    try:
        inside = module._scaled(own, other, torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"this CPU has no such product: {error}")
    assert torch.equal(inside, module._scaled_after(own, other, torch.bfloat16))


def test_tensors_without_numbers_have_shapes():
    with FakeTensorMode():
        x, weight = torch.ones(2, 5, 7).requires_grad_(), torch.ones(3, 7).requires_grad_()
        y = float8(x, weight)
        assert y.shape == (2, 5, 3)
        assert [g.shape for g in torch.autograd.grad(y.sum(), [x, weight])] == [x.shape, weight.shape]


@given(st.integers(0, 20), st.sampled_from([0, 8]))
def test_ranks_that_hold_columns_or_rows_of_a_weight_round_alike(seed, spread):
    """Numbers within 2**13 of their row's largest are the same codes times units of any part of the row; smaller ones
    are apart by the least step of the larger scale."""
    generator = torch.Generator().manual_seed(seed)
    x = drawn(4, 64, seed=seed) * 2.0 ** torch.randint(-spread, spread + 1, (4, 64), generator=generator)
    whole, parts = said(coded(x)), torch.cat([said(coded(part)) for part in x.chunk(2, 1)], 1)
    top = x.abs().amax(1, keepdim=True).double()
    assert (whole - parts)[x.abs() > top * 2.0**-13].eq(0).all()
    assert ((whole - parts).abs() <= top * 2.0**-17).all()


def test_a_layer_that_is_cut_over_ranks_is_the_whole_one():
    x, weight, grad = drawn(6, 32), drawn(16, 32, seed=1) / 32**0.5, drawn(6, 16, seed=2)

    def slopes(x, weight, grad):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = float8(x, weight)
        return (y, *torch.autograd.grad(y, [x, weight], grad))

    y, d_x, d_weight = slopes(x, weight, grad)
    own = [slopes(x, w, g) for w, g in zip(weight.chunk(2), grad.chunk(2, 1), strict=True)]
    assert torch.equal(torch.cat([part[0] for part in own], 1), y)
    torch.testing.assert_close(own[0][1] + own[1][1], d_x, rtol=1e-5, atol=1e-5)
    own = [slopes(part, w, grad) for part, w in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
    torch.testing.assert_close(own[0][0] + own[1][0], y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([part[1] for part in own], 1), d_x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([part[2] for part in own], 1), d_weight, rtol=1e-5, atol=1e-6)
