import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fppo.advantages import whiten
from tests.advantages._data import cases, close, spoil


def kept(case):
    return case.tokens[0][case.mask]


@given(cases())
def test_mean_zero_variance_one(case):
    assume(case.mask.sum() > 1)
    result = whiten(case.tokens[0], case.mask)[case.mask]
    close(result.mean(), torch.zeros_like(result.mean()))
    close(result.var(), torch.ones_like(result.var()))
    close(result, (kept(case) - kept(case).mean()) / kept(case).std())


@given(cases(), st.floats(-1e3, 1e3), st.sampled_from([1e-180, 1e-6, 1.0, 3.0, 1e6, 1e180]))
def test_shift_and_scale_invariant(case, shift, scale):
    x, mask = case.tokens[0], case.mask
    plain = whiten(x, mask)
    close(whiten(x + shift, mask), plain, 1e-8)
    close(whiten(x * scale, mask), plain)
    close(whiten(-x, mask), -plain)


@given(cases(), st.floats(-5, 5))
def test_without_shift_the_mean_stays(case, shift):
    x = case.tokens[0] + shift
    assume(case.mask.any())
    mean = x[case.mask].mean()
    expected = (whiten(x, case.mask) + mean).where(case.mask, 0.0)
    close(whiten(x, case.mask, shift_mean=False), expected)


@given(cases())
def test_masked_garbage_row_order_and_padding_change_nothing(case):
    x, mask = case.tokens[0], case.mask
    plain = whiten(x, mask)
    assert not plain[~mask].any()
    assert torch.equal(plain, whiten(spoil(x, ~mask, case.generator), mask))
    order = torch.randperm(len(x), generator=case.generator)
    close(whiten(x[order], mask[order]), plain[order])
    wide = torch.nn.functional.pad(mask, (2, 1))
    close(whiten(torch.nn.functional.pad(x, (2, 1)), wide)[:, 2:-1], plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(value=st.floats(-1e6, 1e6), count=st.integers(0, 9))
def test_equal_numbers_and_single_tokens_give_exactly_zero(dtype, value, count):
    x = torch.full((3, 3), value, dtype=dtype)
    mask = (torch.arange(9) < count).view(3, 3)
    result = whiten(x, mask)
    assert result.dtype == dtype
    assert not result.any()
    close(whiten(x, mask, shift_mean=False), x.where(mask, 0.0))


def test_rounding_is_not_amplified():
    x = torch.tensor([[1.0, 1.0 + 2**-22, 1.0 - 2**-23]])
    assert not whiten(x, torch.ones(1, 3, dtype=torch.bool)).any()


@pytest.mark.usefixtures("unhooked")
def test_no_gradient_and_shape_errors():
    x = torch.randn(2, 3, requires_grad=True)
    assert not whiten(x, torch.ones(2, 3, dtype=torch.bool)).requires_grad
    with pytest.raises(ValueError, match="x must be floating"):
        whiten(x, torch.ones(2, 4, dtype=torch.bool))
