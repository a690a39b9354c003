"""Our kernels for what stands inside layers keep the laws, and each mistake in one breaks the law it is there for."""

import pytest
import torch

from fppo import laws
from fppo.laws.kernels import laws_of
from fppo_kernels import layer_norm, table
from fppo_kernels.glu.eager import eager as glu
from fppo_kernels.linear.plain import plain as linear
from fppo_kernels.operation import operation_of
from fppo_kernels.rms_norm.eager import add_eager as add_rms_norm
from fppo_kernels.rms_norm.eager import eager as rms_norm
from fppo_kernels.rotary.eager import eager as rotary

KERNELS = [(op, name) for op in table.INSIDE for name, reason in table.available(op).items() if reason is None]


ROUNDED = ("triton", "liger", "float8", "bfloat16")  # which have tests of their own


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name"), [pair for pair in KERNELS if pair[1] not in ROUNDED])
def test_kernels_keep_the_laws(op, name):
    laws.check_kernel(op, table.get(op, name))


def transposed(x, weight, bias=None):
    return linear(x, weight, bias).mT


def rounded(x, weight, bias=None):
    return linear(x, weight.bfloat16().to(weight.dtype), bias)


def doubles_its_argument(x, weight, *, eps, offset=0.0):
    out = rms_norm(x, weight, eps=eps, offset=offset)
    x.data.mul_(2.0)
    return out


def centred(x, weight, bias=None):
    return linear(x - x.sum(-2, keepdim=True), weight, bias)


def detached(gate, up, *, activation):
    return glu(gate.detach(), up, activation=activation)


def no_offset_in_the_slope(x, weight, *, eps, offset=0.0):
    out = rms_norm(x, weight, eps=eps, offset=offset)
    return out if not offset else out.detach() + (x - x.detach()) * weight


def all_or_none(x, weight, bias=None):
    return linear(x if weight.requires_grad else x.detach(), weight, bias)


def no_eps(x, weight, *, eps, offset=0.0):
    return rms_norm(x, weight, eps=1e-12, offset=offset)


def sum_without_gradient(x, residual, weight, *, eps, offset=0.0):
    normed, total = add_rms_norm(x, residual, weight, eps=eps, offset=offset)
    return normed, total.detach()


def norm_of_one_part(x, residual, weight, *, eps, offset=0.0):
    return rms_norm(x, weight, eps=eps, offset=offset), x + residual


def turned_back(query, key, cos, sin):
    return rotary(query, key, cos, -sin)


def keys_as_they_are(query, key, cos, sin):
    return rotary(query, key, cos, sin)[0], key


def another_activation(gate, up, *, activation):
    return glu(gate, up, activation="gelu" if activation == "gelu_tanh" else activation)


def another_epsilon(x, weight, bias=None, *, eps):
    return layer_norm.eager(x, weight, bias, eps=eps * 1.01)


def gradient_of_the_mean_apart(x, weight, bias=None, *, eps):
    mean = x.mean(-1, keepdim=True)
    return layer_norm.eager(x, weight, bias, eps=eps) + (mean - mean.detach())


MISTAKES = [
    ("linear", transposed, "shape", "expected float64"),
    ("rms_norm", doubles_its_argument, "purity", "it changed its argument x"),
    ("linear", centred, "rows apart", "rows before row 1 see those"),
    ("linear", rounded, "values", "the result"),
    ("rms_norm", no_eps, "values", "the result"),
    ("glu", another_activation, "values", "activation *= 1"),
    ("glu", detached, "gradients", "the gradient by gate"),
    ("rms_norm", no_offset_in_the_slope, "gradients", "the gradient by"),
    ("add_rms_norm", sum_without_gradient, "gradients", "the gradient by"),
    ("add_rms_norm", norm_of_one_part, "values", "the result"),
    ("rotary", turned_back, "values", "the result"),
    ("rotary", keys_as_they_are, "values", "the result"),
    ("layer_norm", another_epsilon, "values", "the result"),
    ("layer_norm", gradient_of_the_mean_apart, "gradients", "the gradient by x"),
    ("linear", all_or_none, "frozen", "the gradient by x alone"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "mistake", "law", "words"), MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_breaks_its_law(op, mistake, law, words):
    with pytest.raises(laws.LawViolation, match=words) as caught:
        laws.check_kernel(op, mistake)
    assert caught.value.law == law


def test_every_law_is_broken_by_a_mistake():
    assert all(
        {law.name for law in laws_of(op)} == {law for _, _, law, _ in MISTAKES}
        for op in map(operation_of, table.INSIDE)
    )


def test_activations_and_dtypes_that_a_kernel_lacks_are_left_out():
    def silu(gate, up, *, activation):
        assert activation == "silu"
        assert gate.dtype == torch.float32
        return glu(gate, up, activation=activation)

    laws.check_kernel("glu", silu, lacks=["gelu_tanh", "gelu"], dtypes=[torch.float32])


def test_the_norm_that_others_are_held_to_rounds_once():
    """In 16 bits it is the number nearest to the definition's, but where float32 rounds over a tie."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator).bfloat16() for size in ((200, 64), (64,)))
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + 1.0)
    found = rms_norm(x, weight, eps=1e-6, offset=1.0)
    assert found.dtype == torch.bfloat16
    assert (found == exact.bfloat16()).double().mean() > 0.999
