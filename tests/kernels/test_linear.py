"""oneDNN's linear layer: it is the one called, for what it is made for, and torch's for everything else."""

import platform
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fppo_kernels.linear import onednn as module

onednn = module.onednn


class Products(TorchDispatchMode):
    """How often oneDNN's product was called."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "mkldnn"
        return func(*args, **(kwargs or {}))


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def test_forward_and_backward_are_onednns():
    x, weight, bias = leaves((2, 3, 4), (5, 4), (5,))
    with Products() as products:
        onednn(x, weight, bias).sum().backward()
    assert products.count == 3


@pytest.mark.parametrize("out", [2, 9])
def test_gradients_lie_in_memory_as_their_parameters(out):
    x, weight = leaves((7, 4), (out, 4))
    grads = torch.autograd.grad(onednn(x, weight).expand(7, out).sum(), [x, weight])
    assert all(grad.is_contiguous() for grad in grads)


def test_any_layout_of_the_operands_is_taken():
    x, weight, grad = leaves((4, 8), (12, 10), (8, 6))
    for w in (weight[::2, 1:9:2], weight[:6, :4], weight.t()[:4, :6].t()):
        actual, expected = (torch.autograd.grad(fn(x.t(), w), [x, weight], grad.t().t()) for fn in (onednn, F.linear))
        torch.testing.assert_close(actual, expected)


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
def test_what_onednn_has_no_product_for_goes_to_torch(shapes, dtype):
    x, weight = leaves(*shapes, dtype=dtype)
    assert torch.equal(onednn(x, weight), F.linear(x, weight))


def test_tensors_without_numbers_go_to_torch():
    meta = onednn(torch.ones(3, 4, device="meta"), torch.ones(5, 4, device="meta"))
    assert meta.shape == (3, 5)
    with FakeTensorMode():
        assert onednn(torch.ones(3, 4), torch.ones(5, 4)).shape == (3, 5)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 200])
@pytest.mark.parametrize(("width", "out"), [(64, 192), (96, 320), (33, 70)])
def test_a_packed_weight_gives_the_same_products(rows, width, out):
    x, weight, bias = (each.detach() for each in leaves((rows, width), (out, width), (out,)))
    for w in (weight, weight.t().contiguous().t()):
        copied = module.packed(w)
        assert copied.layout is torch._mkldnn
        assert copied.shape == w.shape
        for b in (None, bias):
            torch.testing.assert_close(onednn(x, copied, b), onednn(x, w, b))
    weight.zero_()
    assert onednn(x, module.packed(weight)).count_nonzero() == 0
    assert onednn(x, copied).count_nonzero()


def test_what_onednn_has_no_product_for_is_not_packed():
    class Other(torch.Tensor):
        pass

    wide, empty, other = torch.ones(5, 4, dtype=torch.float64), torch.ones(0, 4), torch.ones(5, 4).as_subclass(Other)
    for weight in (wide, empty, other, torch.ones(5, 4, device="meta")):
        assert module.packed(weight) is weight


@pytest.mark.parametrize(
    ("file", "processor", "fast"),
    [
        ("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n", "", True),
        ("vendor_id\t: GenuineIntel\n", "AuthenticAMD", False),
        (None, "AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD", True),
        (None, "Intel64 Family 6 Model 154 Stepping 3, GenuineIntel", False),
        (None, "arm", False),
    ],
)
def test_onednn_is_the_faster_one_on_amds_processors_with_avx512(monkeypatch, file, processor, fast):
    def read_text(path, errors):
        assert (str(path), errors) == ("/proc/cpuinfo", "replace")
        if file is None:
            raise FileNotFoundError
        return file

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(platform, "processor", lambda: processor)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    capability = ["AVX512"]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability[-1])
    assert module.fast_on_this_processor() is fast
    capability.append("AVX2")
    assert module.fast_on_this_processor() is False
    capability.pop()
    for backend in (torch.backends.mkldnn, torch.backends.mkl):
        with monkeypatch.context() as patch:
            patch.setattr(backend, "is_available", lambda: False)
            assert module.fast_on_this_processor() is False


def test_there_are_no_second_derivatives():
    x, weight = leaves((3, 4), (5, 4))
    (grad,) = torch.autograd.grad(onednn(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
