"""The comparison with Liger hands its arguments on, and refuses what Liger lacks."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fppo import laws
from fppo_kernels import layer_norm, table
from fppo_kernels.collectives import Axis
from fppo_kernels.glu.eager import eager as glu
from fppo_kernels.log_probs.reference import LogProbs, reference
from fppo_kernels.rms_norm.eager import add_eager as add_rms_norm
from fppo_kernels.rms_norm.eager import eager as rms_norm
from fppo_kernels.rotary.eager import eager as rotary

NAME = "liger_kernel.ops.fused_linear_scaled_cross_entropy"


def stand_in(hidden, weight, labels, *, temperature, return_entropy):
    """What Liger is documented to compute."""
    assert len(hidden)
    out = reference(hidden, weight, labels, temperature=temperature, entropy=return_entropy)
    return -out.log_probs if out.entropy is None else (-out.log_probs, out.entropy.to(hidden.dtype))


@pytest.fixture
def liger(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = SimpleNamespace(LigerFusedLinearScaledCrossEntropyFunction=SimpleNamespace(apply=stand_in))
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.delitem(sys.modules, "fppo_kernels.log_probs.liger", raising=False)
    yield table.BUILTIN["log_probs"]["liger"].load()
    sys.modules.pop("fppo_kernels.log_probs.liger", None)  # it holds the stand-in


def sum_of(out: LogProbs) -> torch.Tensor:
    assert out.entropy is not None
    return (out.log_probs + out.entropy).sum()


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor(0.7)])
def test_equals_the_reference(liger, tokens, temperature):
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    labels = torch.randint(7, (tokens,))
    found, expected = (
        fn(hidden, weight, labels, temperature=temperature, scale=0.5, entropy=True) for fn in (liger, reference)
    )
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    torch.testing.assert_close(found.entropy, expected.entropy)
    grads = [torch.autograd.grad(sum_of(x), [hidden, weight]) for x in (found, expected)]
    torch.testing.assert_close(*grads)
    assert liger(hidden, weight, labels).entropy is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"bias": torch.zeros(2)}, "no bias"),
        ({"softcap": 1.0, "sum_squared": True}, "no softcap and no sum_squared"),
        ({"axis": Axis(2)}, "no axis"),
        ({"temperature": torch.ones(1)}, "no temperature per token"),
    ],
)
def test_what_it_lacks_is_refused(liger, asked, words):
    with pytest.raises(ValueError, match=f"log_probs/liger has {words}; log_probs/chunked has"):
        liger(torch.ones(1, 1), torch.ones(2, 1), torch.zeros(1, dtype=torch.int64), **asked)


LAYERS = ("rms_norm", "add_rms_norm", "layer_norm", "rotary", "glu")


def norm_stand_in(x, weight, eps, offset, casting, in_place):
    """What Liger is documented to compute; it would write the gradient over the result's."""
    assert casting == ("gemma" if offset else "llama")
    assert not in_place
    return rms_norm(x, weight, eps=eps, offset=offset)


def add_norm_stand_in(x, residual, weight, eps, offset, casting, in_place):
    assert casting == ("gemma" if offset else "llama")
    assert not in_place
    return add_rms_norm(x, residual, weight, eps=eps, offset=offset)


def layer_norm_stand_in(x, weight, bias, eps):
    """Liger takes a bias always."""
    return layer_norm.eager(x, weight, bias, eps=eps)


def rope_stand_in(query, key, cos, sin):
    """Liger takes [1, heads, N, D], and turns the heads where they lie."""
    assert query.dim() == key.dim() == 4
    assert cos.shape == sin.shape == (1, query.shape[2], query.shape[3])
    turned = rotary(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    for x, y in zip((query, key), turned, strict=True):
        x.data.copy_(y.transpose(1, 2))
    return tuple(x.transpose(1, 2) for x in turned)


class _WritesOver(torch.autograd.Function):
    """Liger's gated activations write their gradients over what they were called with."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return glu(gate, up)

    @staticmethod
    def backward(ctx, *grads):
        with torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_() for x in ctx.saved_tensors]
            slopes = torch.autograd.grad(glu(*leaves), leaves, grads)
        for x, slope in zip(ctx.saved_tensors, slopes, strict=True):
            x.data.copy_(slope)
        return ctx.saved_tensors


@pytest.fixture
def liger_layers(monkeypatch):
    functions = {
        "rms_norm": {"LigerRMSNormFunction": norm_stand_in},
        "fused_add_rms_norm": {"LigerFusedAddRMSNormFunction": add_norm_stand_in},
        "layer_norm": {"LigerLayerNormFunction": layer_norm_stand_in},
        "rope": {"LigerRopeFunction": rope_stand_in},
        "swiglu": {"LigerSiLUMulFunction": _WritesOver.apply},
        "geglu": {"LigerGELUMulFunction": lambda gate, up: glu(gate, up, activation="gelu_tanh")},
    }
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, apply in functions.items():
        module = SimpleNamespace(**{key: SimpleNamespace(apply=fn) for key, fn in apply.items()})
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{name}", module)
    places = [f"fppo_kernels.{op}.liger" for op in ("rms_norm", "glu", "rotary")]
    for place in places:
        monkeypatch.delitem(sys.modules, place, raising=False)
    yield [table.BUILTIN[op]["liger"].load() for op in LAYERS]
    for place in places:
        sys.modules.pop(place, None)


@pytest.mark.slow
def test_norms_and_gated_activations_keep_the_laws(liger_layers):
    for op, kernel in zip(LAYERS, liger_layers, strict=True):
        laws.check_kernel(op, kernel, lacks=table.BUILTIN[op]["liger"].lacks, dtypes=(torch.float32,))
    gated = liger_layers[-1]
    with pytest.raises(ValueError, match="no gelu, only its approximation"):
        gated(torch.ones(1, 1), torch.ones(1, 1), activation="gelu")
