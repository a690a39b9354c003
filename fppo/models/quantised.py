"""Frozen weights kept in 8 or 4 bits, as values that stand in the weights' places, by bitsandbytes.

"int8" is a row-wise absmax code (the weights of arXiv:2208.07339), "nf4" that of arXiv:2305.14314 in blocks of 64. What
is passed through them is not quantised: a product is that with the dequantised weight, which lives no longer than it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils import _pytree as pytree

Kind = Literal["int8", "nf4"]
_BLOCK = 64  # weights that have a scale of their own in nf4
_GAPS: Mapping[Kind, float] = {"int8": 0.51 / 127, "nf4": 0.153}  # how far a weight may be from its code, in scales
_DIRECT = (torch.float32, torch.bfloat16, torch.float16)  # into which the library dequantises


class Stored(NamedTuple):
    """What is kept of a weight [..., out, in]: int8 codes [out, in] with scales [out], or pairs of nf4 codes [n / 2]
    with scales [n / 64], n filled up to whole blocks."""

    kind: Kind
    codes: Tensor
    scales: Tensor
    shape: torch.Size  # [out, in]
    dtype: torch.dtype  # of the dequantised weight
    turned: bool  # it is used as [in, out]


class Quantised(Tensor):
    """A weight [out, in], or [in, out], that stands for what its codes say, in a dtype of its own.

    Products with it save codes for their backward pass, and have a gradient for what goes in, none for the weight. Any
    other use sees the dequantised weight; one that would write to it raises RuntimeError.
    """

    stored: Stored

    @staticmethod
    def of(stored: Stored) -> Quantised:
        """The value that stands in the weight's place."""
        shape = stored.shape[::-1] if stored.turned else stored.shape
        strides = (1, stored.shape[1]) if stored.turned else (stored.shape[1], 1)
        where = stored.codes.device
        value = Tensor._make_wrapper_subclass(Quantised, shape, strides, dtype=stored.dtype, device=where)
        value.stored = stored
        return value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The rule of a product or a move; what a plain weight says of its shape and place; else of the numbers."""
        if func in _RULES:
            return _RULES[func](*args, **(kwargs or {}))
        if func in _SAID:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
            raise RuntimeError(f"{name} of a quantised weight: nothing changes the base of an adapter")
        return func(
            *pytree.tree_map_only(Quantised, plain, args), **pytree.tree_map_only(Quantised, plain, kwargs or {})
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyright: ignore
        """RuntimeError: nothing comes here but what does not ask `__torch_function__`."""
        raise RuntimeError(f"{func} of a quantised weight, whose numbers it would not see")

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Quantised({list(self.shape)}, {self.stored.kind}, {self.dtype})"


def quantised_weight(weight: Tensor, kind: Kind, *, turned: bool = False) -> Quantised:
    """A weight [out, in] in codes, on its device; one [in, out] if `turned`. It is coded on the CPU, so that codes are
    the same on every device.

    Raises ValueError without bitsandbytes, for another kind, for numbers that are not finite, and for a library whose
    codes are further from the weight than theirs may be.
    """
    library_needed(kind)
    whole = weight.detach().to("cpu", torch.float32)
    rows = (whole.mT if turned else whole).contiguous()
    if not rows.isfinite().all():
        raise ValueError(f"a weight {list(weight.shape)} has numbers that are not finite: {kind} has no codes for them")
    if kind == "int8":
        codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(rows, 0.0)
    else:
        blocks = F.pad(rows.flatten(), (0, -rows.numel() % _BLOCK)).view(-1, _BLOCK)
        codes, scales = torch.ops.bitsandbytes.quantize_4bit(blocks, _BLOCK, kind, torch.uint8)
        codes = codes.flatten()
    stored = Stored(kind, codes, scales, rows.shape, torch.float32, False)
    _check(rows, stored)
    codes, scales = codes.to(weight.device), scales.to(weight.device)
    return Quantised.of(stored._replace(codes=codes, scales=scales, dtype=weight.dtype, turned=turned))


def blank(shape: torch.Size, kind: Kind, *, dtype: torch.dtype, turned: bool = False) -> Quantised:
    """One without numbers, on the default device, of a weight of this shape."""
    out, wide = shape[::-1] if turned else shape
    rows = torch.Size((out, wide))
    blocks = -(-rows.numel() // _BLOCK)
    codes = torch.empty(rows if kind == "int8" else (blocks * _BLOCK // 2,), dtype=_code_dtype(kind))
    scales = torch.empty(out if kind == "int8" else blocks, dtype=torch.float32)
    return Quantised.of(Stored(kind, codes, scales, rows, dtype, turned))


def library_needed(kind: Kind) -> None:
    """Raises ValueError where the library is not installed, and for a kind that fppo does not know."""
    if kind not in _GAPS:
        raise ValueError(f"quantised weights: unknown kind {kind!r}; there are {list(_GAPS)}")
    try:
        # its operations are then torch.ops.bitsandbytes
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"model.lora.base = {kind!r} needs bitsandbytes ({error}): pip install 'fppo[quantised]'"
        ) from error


def plain(weight: Tensor) -> Tensor:
    """The dequantised weight, in its dtype; one that is not quantised as it is."""
    if not isinstance(weight, Quantised):
        return weight
    rows = _rows(weight.stored)
    return rows.mT if weight.stored.turned else rows


def tensors_of(weight: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a weight takes memory for."""
    return (weight.stored.codes, weight.stored.scales) if isinstance(weight, Quantised) else (weight,)


def taking_quantised(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel for linear layers that takes quantised weights, too, and computes with the dequantised ones."""

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, Quantised):
            return linear(x, weight, bias)
        return _Product.apply(x, weight.stored.codes, weight.stored.scales, bias, weight.stored, linear)

    return call


class _Product(torch.autograd.Function):
    """linear(x, W, bias) of the weight in codes, which is dequantised again in the backward pass."""

    @staticmethod
    def forward(  # torch's signature
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, stored: Stored, linear: Any
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        # without tensors, which would outlive the hooks of recomputed layers
        ctx.form, ctx.linear = (stored.kind, *stored[3:]), linear
        return linear(x, plain(Quantised.of(stored)), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kind, *form = ctx.form
        weight = plain(Quantised.of(Stored(kind, *ctx.saved_tensors, *form)))
        d_x = ctx.linear(grad.contiguous(), weight.t()) if ctx.needs_input_grad[0] else None
        return d_x, None, None, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None, None, None


def _rows(stored: Stored) -> Tensor:
    """The dequantised weight [out, in]."""
    kind, codes, scales, shape, dtype, _ = stored
    if codes.is_meta or isinstance(codes, FakeTensor):  # without the library, for plans
        return codes.new_ones(shape, dtype=dtype)
    if kind == "int8":
        return (codes * (scales / 127)[:, None]).to(dtype)
    # in rows of one block: the library's CPU code (0.50) is wrong where blocks run over the ends of rows
    direct, blocks = dtype if dtype in _DIRECT else torch.float32, (len(scales), _BLOCK)
    rows = torch.ops.bitsandbytes.dequantize_4bit(codes[:, None], scales, _BLOCK, kind, blocks, direct)
    return rows.flatten()[: shape.numel()].view(shape).to(dtype)


def _check(rows: Tensor, stored: Stored) -> None:
    """Raises ValueError if what is stored of a weight on the CPU is not near it."""
    away = (_rows(stored) - rows).abs()
    if stored.kind == "nf4":
        away = F.pad(away.flatten(), (0, -away.numel() % _BLOCK)).view(-1, _BLOCK)
    if bool((away.amax(1) > _GAPS[stored.kind] * stored.scales).any()):
        raise ValueError(
            f"bitsandbytes dequantises a weight {list(stored.shape)} in {stored.kind} to numbers that are not near it "
            "on this machine: install another version, or leave model.lora.base out"
        )


def _code_dtype(kind: Kind) -> torch.dtype:
    return torch.int8 if kind == "int8" else torch.uint8


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # torch's names
    if isinstance(input, Quantised):
        return F.linear(plain(input), weight, bias)
    return taking_quantised(F.linear)(input, weight, bias)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(mat2, Quantised) and beta == alpha == 1 and input.dim() == 1:
        return _linear(mat1, mat2.t(), input)
    return torch.addmm(plain(input), plain(mat1), plain(mat2), beta=beta, alpha=alpha)


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(x, Quantised):
        return plain(x) @ weight
    return _linear(x, weight.t())


def _turned(weight: Quantised, *dims: int) -> Tensor:
    if dims and sorted(dim % 2 for dim in dims) != [0, 1]:
        return plain(weight).transpose(*dims)
    return Quantised.of(weight.stored._replace(turned=not weight.stored.turned))


def _to(weight: Quantised, *args: Any, **kwargs: Any) -> Quantised:
    """The same codes, on another device or for another dtype."""
    kwargs.pop("copy", None)
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
    stored = weight.stored
    device, dtype = device or weight.device, dtype or stored.dtype
    if device == weight.device and dtype == stored.dtype:
        return weight
    codes, scales = (x.to(device, non_blocking=non_blocking) for x in (stored.codes, stored.scales))
    return Quantised.of(stored._replace(codes=codes, scales=scales, dtype=dtype))


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


_RULES: Mapping[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.t, *_getters("T", "mT")), _turned),
    Tensor.to: _to,
    Tensor.float: lambda weight: _to(weight, torch.float32),
    Tensor.detach: lambda weight: weight,
}
_SAID: frozenset[Any] = frozenset(
    _getters("shape", "ndim", "dtype", "device", "requires_grad", "is_meta", "is_leaf", "is_cuda", "is_cpu", "layout")
) | {
    *(Tensor.__len__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.stride),
    *(Tensor.is_contiguous, Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex),
}
