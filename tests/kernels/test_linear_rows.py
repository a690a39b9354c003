"""Linear layers of few rows in C++: products as in float64, in any layout, and by other kernels where those have to."""

import pytest
import torch
from torch.nn import functional as F

from fppo_kernels.linear.cpp import FEW, Joined, cpp, joined
from fppo_kernels.linear.onednn import onednn
from fppo_kernels.table import get, needs_cpp

pytestmark = pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
FLOATS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3}


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def close(found, x, weight, bias):
    wide = [None if each is None else each.double() for each in (x, weight, bias)]
    error = FLOATS[found.dtype]
    scale = x.shape[-1] ** 0.5
    torch.testing.assert_close(found.double(), F.linear(*wide), rtol=error, atol=error * scale)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, FEW, FEW + 1])
@pytest.mark.parametrize(("width", "outs"), [(64, 48), (33, 7), (5, 1), (1, 4), (136, 3)])
def test_products_of_few_rows_are_those_of_float64(rows, width, outs, dtype):
    x, weight, bias = drawn((rows, width), (outs, width), (outs,), dtype=dtype)
    for own in (None, bias):
        close(cpp(x, weight, own), x, weight, own)


def test_operands_have_any_layout_and_rows_any_shape():
    x, weight, bias = drawn((4, 9, 2), (9, 10), (14,))
    views = [(x[..., 0], weight.t()[:7, :9], bias[::2]), (x.permute(2, 0, 1), weight[:, :9], bias[:9])]
    views += [(x[0, :, 1], weight[:5, 1:], None), (x[:1, None, :, 0], weight[:, 1:].contiguous(), None)]
    for own, matrix, shift in views:
        found = cpp(own, matrix, shift)
        assert found.shape == (*own.shape[:-1], len(matrix))
        close(found, own, matrix, shift)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("shape", [(6,), (1,), (1, 7)])
def test_a_bias_of_another_size_is_refused(shape):
    x, weight, bias = drawn((2, 16), (7, 16), shape)
    for own in (weight, joined(weight[:3], weight[3:])):
        with pytest.raises(RuntimeError):
            cpp(x, own, bias)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 2, FEW, FEW + 1, 40])
def test_joined_weights_give_their_products_side_by_side(rows, dtype):
    x, *weights, bias = drawn((rows, 24), (40, 24), (8, 24), (9, 24), (57,), dtype=dtype)
    for some, shift in ((weights, bias), (weights, None), (weights[:1], bias[:40])):
        own = joined(*some)
        assert isinstance(own, Joined)
        close(cpp(x, own, shift), x, torch.cat(some), shift)


def test_threads_share_the_weight_and_change_no_bit():
    x, weight = drawn((3, 20), (1001, 20))
    whole = cpp(x, weight)
    torch.set_num_threads(3)
    try:
        assert torch.equal(cpp(x, weight), whole)
    finally:
        torch.set_num_threads(1)


def test_with_gradients_and_under_transforms_the_product_is_onednns():
    x, weight, bias = drawn((2, 12), (5, 12), (5,))
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    found, expected = (fn(*leaves) for fn in (cpp, onednn))
    assert torch.equal(found, expected)
    slopes = [torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected)]
    for own, other in zip(*slopes, strict=True):
        assert torch.equal(own, other)
    tangents = torch.func.jvp(lambda own: cpp(own, weight), (x.detach(),), (x.detach(),))
    torch.testing.assert_close(tangents[0], tangents[1])


def test_what_is_not_multiplied_in_cpp_is_as_by_torch():
    half, empty, meta = torch.ones(2, 4, dtype=torch.float16), torch.ones(0, 4), torch.ones(2, 4, device="meta")
    for x in (half, empty, meta):
        assert cpp(x, torch.ones(3, 4, dtype=x.dtype, device=x.device)).shape == (len(x), 3)
    assert torch.equal(cpp(half, half), F.linear(half, half))
    with pytest.raises(RuntimeError):
        cpp(torch.ones(2, 4), torch.ones(3, 5))
    assert get("linear", "cpp") is cpp


def test_only_plain_weights_are_joined():
    class Other(torch.Tensor):
        pass

    other = torch.ones(3, 4).as_subclass(Other)
    assert joined(other) is other
