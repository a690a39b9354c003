"""oneDNN's linear layer: it is the one called, for what it is made for, and torch's for everything else."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from fppo_kernels.linear import onednn as module

onednn = module.onednn


@pytest.fixture
def calls(monkeypatch):
    found, product = [], module.product
    monkeypatch.setattr(module, "product", lambda *args: found.append(args) or product(*args))
    return found


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def test_forward_and_backward_are_onednns(calls):
    x, weight, bias = leaves((2, 3, 4), (5, 4), (5,))
    onednn(x, weight, bias).sum().backward()
    assert len(calls) == 3


@pytest.mark.parametrize("out", [2, 9])
def test_gradients_lie_in_memory_as_their_parameters(out):
    x, weight = leaves((7, 4), (out, 4))
    grads = torch.autograd.grad(onednn(x, weight).expand(7, out).sum(), [x, weight])
    assert all(grad.is_contiguous() for grad in grads)


def test_any_layout_of_the_operands_is_taken(calls):
    x, weight, grad = leaves((4, 8), (12, 10), (8, 6))
    for w in (weight[::2, 1:9:2], weight[:6, :4], weight.t()[:4, :6].t()):
        actual, expected = (torch.autograd.grad(fn(x.t(), w), [x, weight], grad.t().t()) for fn in (onednn, F.linear))
        torch.testing.assert_close(actual, expected)
    assert len(calls) == 9


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (((3, 4), (5, 4)), torch.float64),
        (((3, 4), (5, 4)), torch.float16),
        (((0, 4), (5, 4)), torch.float32),
        (((3, 0), (5, 0)), torch.float32),
        (((4,), (5, 4)), torch.float32),
    ],
)
def test_what_onednn_has_no_product_for_goes_to_torch(calls, shapes, dtype):
    x, weight = leaves(*shapes, dtype=dtype)
    assert torch.equal(onednn(x, weight), F.linear(x, weight))
    assert not calls


def test_tensors_without_numbers_go_to_torch(calls):
    meta = onednn(torch.ones(3, 4, device="meta"), torch.ones(5, 4, device="meta"))
    assert meta.shape == (3, 5)
    with FakeTensorMode():
        assert onednn(torch.ones(3, 4), torch.ones(5, 4)).shape == (3, 5)
    assert not calls


def test_there_are_no_second_derivatives():
    x, weight = leaves((3, 4), (5, 4))
    (grad,) = torch.autograd.grad(onednn(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
