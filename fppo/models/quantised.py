"""Frozen weights in 8 or 4 bits by bitsandbytes, as tensors that replace the weights.

"int8" is a row-wise absmax code (the weights of arXiv:2208.07339), "nf4" that of arXiv:2305.14314 in blocks of 64.
Activations are not quantised: a product dequantises the weight for as long as it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import attrs
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fppo_kernels.transforms import active

Kind = Literal["int8", "nf4"]
CODES, SCALES = ".codes", ".scales"  # suffixes of the weight's name
BLOCK = 64  # weights with one scale in nf4
_GAPS: Mapping[Kind, float] = {"int8": 0.51 / 127, "nf4": 0.153}  # largest error of a code, as a share of its scale
_DIRECT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that the library dequantises into


@attrs.frozen
class Form:
    """The form of a quantised weight of `shape` and `dtype`, [..., out, in] or, if `turned`, [..., in, out].

    int8 codes are [..., out, in] with scales [..., out]; pairs of nf4 codes are [..., out, in / 2] with scales
    [..., out, in / 64], or, where blocks cross the ends of rows, [..., blocks, 32] with scales [..., blocks], each
    matrix padded to whole blocks.
    """

    kind: Kind
    shape: torch.Size  # before any axis cuts it
    dtype: torch.dtype
    turned: bool

    @property
    def rows(self) -> torch.Size:
        """The shape [..., out, in]."""
        *stack, out, wide = self.shape
        return torch.Size((*stack, wide, out)) if self.turned else self.shape

    @property
    def by_rows(self) -> bool:
        """Whether no scale is shared between rows."""
        return self.kind == "int8" or self.rows[-1] % BLOCK == 0

    @property
    def shapes(self) -> tuple[torch.Size, torch.Size]:
        """The shapes of the codes and the scales of the whole weight."""
        *stack, out, wide = self.rows
        if self.kind == "int8":
            return self.rows, torch.Size((*stack, out))
        blocks = (out, wide // BLOCK) if self.by_rows else (-(-out * wide // BLOCK),)
        *many, last = blocks if self.by_rows else (*blocks, 1)
        return torch.Size((*stack, *many, last * BLOCK // 2)), torch.Size((*stack, *blocks))

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the codes and the scales."""
        return torch.int8 if self.kind == "int8" else torch.uint8, torch.float32

    def value(self, codes: Tensor, scales: Tensor, dtype: torch.dtype | None = None) -> Quantised:
        """The quantised weight of these codes and scales, or of a part of it, in the weight's dtype or another."""
        if self.by_rows:
            rows = torch.Size((*codes.shape[:-1], codes.shape[-1] * (1 if self.kind == "int8" else 2)))
        else:
            rows = torch.Size((*codes.shape[:-2], *self.rows[-2:]))
        return Quantised.of(Stored(self.kind, codes, scales, rows, dtype or self.dtype, self.turned))


class Stored(NamedTuple):
    """The stored codes and scales of a weight, in the shapes of `Form`."""

    kind: Kind
    codes: Tensor
    scales: Tensor
    shape: torch.Size  # [..., out, in]
    dtype: torch.dtype  # of the dequantised weight
    turned: bool  # used as [..., in, out]


class Quantised(Tensor):
    """A quantised weight [..., out, in], or [..., in, out], that acts as its dequantised value in `dtype`.

    Products with it save codes for their backward pass, and have gradients for their input, none for the weight. Any
    other use sees the dequantised weight; writing to it raises RuntimeError.
    """

    stored: Stored

    @staticmethod
    def of(stored: Stored) -> Quantised:
        """Wrap stored codes as a tensor with the weight's shape and dtype."""
        shape, strides = (
            list(stored.shape),
            [math.prod(stored.shape[place + 1 :]) for place in range(len(stored.shape))],
        )
        if stored.turned:
            shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
        where = stored.codes.device
        value = Tensor._make_wrapper_subclass(Quantised, shape, strides, dtype=stored.dtype, device=where)
        value.stored = stored
        return value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dispatch products and moves to their rules and queries of shape or device; else dequantise the weight."""
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
        """Raise RuntimeError for calls that bypass `__torch_function__`."""
        raise RuntimeError(f"{func} of a quantised weight, whose numbers it would not see")

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Quantised({list(self.shape)}, {self.stored.kind}, {self.dtype})"


def quantised_weight(weight: Tensor, kind: Kind, *, turned: bool = False) -> Quantised:
    """Quantise a weight [..., out, in], or [..., in, out] if `turned`, on its device. Codes are computed on the CPU, so
    that they are equal for every device.

    Raises ValueError without bitsandbytes, for another kind, for numbers that are not finite, and for a library whose
    codes are too far from the weight.
    """
    library_needed(kind)
    form, whole = Form(kind, weight.shape, weight.dtype, turned), weight.detach().to("cpu", torch.float32)
    rows = (whole.mT if turned else whole).contiguous()
    if not rows.isfinite().all():
        raise ValueError(f"a weight {list(weight.shape)} has numbers that are not finite: {kind} has no codes for them")
    if not rows.numel():
        codes, scales = (torch.empty(0, dtype=dtype) for dtype in form.dtypes)
    elif kind == "int8":
        codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(rows.flatten(0, -2), 0.0)
    else:
        codes, scales = torch.ops.bitsandbytes.quantize_4bit(_blocks(rows).flatten(0, -2), BLOCK, kind, torch.uint8)
    codes, scales = (x.view(shape) for x, shape in zip((codes, scales), form.shapes, strict=True))
    _check(rows, Stored(kind, codes, scales, rows.shape, torch.float32, False))
    return form.value(codes.to(weight.device), scales.to(weight.device))


def library_needed(kind: Kind) -> None:
    """Raise ValueError if bitsandbytes is not installed, and for an unknown kind."""
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
    """Dequantise a weight, in its dtype; a plain weight is returned as it is."""
    if not isinstance(weight, Quantised):
        return weight
    rows = _rows(weight.stored)
    return rows.mT if weight.stored.turned else rows


def taking_quantised(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Extend a kernel for linear layers to quantised weights, which it gets dequantised."""

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, Quantised):
            return linear(x, weight, bias)
        return _product(x, weight, bias, forth=linear, back=lambda grad, weight: linear(grad, weight.t()))

    return call


def _product(
    x: Tensor,
    weight: Quantised,
    bias: Tensor | None,
    *beside: Tensor,
    forth: Callable[..., Tensor],
    back: Callable[..., Tensor],
) -> Tensor:
    """A product `forth(x, W, bias, *beside)` with a quantised W, and gradient `back(grad, W, *beside)` for x."""
    stored = weight.stored
    if active():
        return forth(x, plain(Quantised.of(stored)), bias, *beside)
    return _Product.apply(x, stored.codes, stored.scales, bias, stored, forth, back, *beside)  # type: ignore[return-value]


class _Product(torch.autograd.Function):
    """A product with a quantised weight, which is dequantised again in the backward pass."""

    @staticmethod
    def forward(  # torch's signature
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        stored: Stored,
        forth: Callable[..., Tensor],
        back: Callable[..., Tensor],
        *beside: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, *beside)
        # no tensors here: they would escape the saved-tensor hooks of recomputed layers
        ctx.form, ctx.back = (stored.kind, *stored[3:]), back
        return forth(x, plain(Quantised.of(stored)), bias, *beside)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (codes, scales, *beside), (kind, *form) = ctx.saved_tensors, ctx.form
        weight = plain(Quantised.of(Stored(kind, codes, scales, *form)))
        d_x = ctx.back(grad.contiguous(), weight, *beside) if ctx.needs_input_grad[0] else None
        d_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return d_x, None, None, d_bias, None, None, None, *(None for _ in beside)


def _rows(stored: Stored) -> Tensor:
    """The dequantised weight [..., out, in]."""
    kind, codes, scales, shape, dtype, _ = stored
    if codes.is_meta or isinstance(codes, FakeTensor):  # without the library, for plans
        return codes.new_ones(shape, dtype=dtype)
    if kind == "int8":
        return (codes * (scales / 127)[..., None]).to(dtype)
    # in rows of one block: the library's CPU code (0.50) is wrong where blocks cross the ends of rows
    direct, blocks = dtype if dtype in _DIRECT else torch.float32, (scales.numel(), BLOCK)
    flat, scales = codes.reshape(-1, 1), scales.reshape(-1)
    rows = torch.ops.bitsandbytes.dequantize_4bit(flat, scales, BLOCK, kind, blocks, direct)
    *stack, out, wide = shape
    return rows.view(*stack, -1)[..., : out * wide].unflatten(-1, (out, wide)).to(dtype)


def _blocks(rows: Tensor) -> Tensor:
    """Matrices [..., out, in] as blocks [..., n, 64], each matrix padded with zeros."""
    flat = rows.flatten(-2)
    return F.pad(flat, (0, -flat.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _check(rows: Tensor, stored: Stored) -> None:
    """Raise ValueError if stored codes, dequantised on the CPU, are not near their weight."""
    if not rows.numel():
        return
    away = (_rows(stored) - rows).abs()
    away = _blocks(away) if stored.kind == "nf4" else away
    if bool((away.amax(-1).flatten() > _GAPS[stored.kind] * stored.scales.flatten()).any()):
        raise ValueError(
            f"bitsandbytes dequantises a weight {list(stored.shape)} in {stored.kind} to wrong numbers on this "
            "machine: install another version, or leave model.lora.base out"
        )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # torch's names
    if isinstance(input, Quantised):
        return F.linear(plain(input), weight, bias)
    return taking_quantised(F.linear)(input, weight, bias)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(mat2, Quantised) and beta == alpha == 1 and input.dim() == 1:
        return _linear(mat1, mat2.t(), input)
    return torch.addmm(plain(input), plain(mat1), plain(mat2), beta=beta, alpha=alpha)


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(weight, Quantised) and weight.dim() == 3 and x.dim() == 3:
        return _bmm(x, weight)
    if isinstance(x, Quantised) or weight.dim() != 2:
        return plain(x) @ plain(weight)
    return _linear(x, weight.t())


def _bmm(input: Tensor, mat2: Tensor) -> Tensor:
    if isinstance(mat2, Quantised):
        return _product(plain(input), mat2, None, forth=lambda x, w, _: x.bmm(w), back=lambda grad, w: grad.bmm(w.mT))
    return _bmm(mat2.mT, input.mT).mT


def _grouped(input: Tensor, mat2: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None) -> Tensor:
    if not isinstance(mat2, Quantised) or mat2.dim() != 3 or bias is not None or out_dtype is not None:
        return F.grouped_mm(plain(input), plain(mat2), offs=offs, bias=bias, out_dtype=out_dtype)
    return _product(
        input,
        mat2,
        None,
        offs,
        forth=lambda x, w, _, offs: F.grouped_mm(x, w, offs=offs),
        back=lambda grad, w, offs: F.grouped_mm(grad, w.mT, offs=offs),
    )


def _item(weight: Quantised, index: Any) -> Tensor:
    """Select one expert, or some, of a quantised stack, still quantised."""
    stored = weight.stored
    if weight.dim() != 3 or not (isinstance(index, int) or (isinstance(index, Tensor) and index.dtype != torch.bool)):
        return plain(weight)[index]
    codes, scales = stored.codes[index], stored.scales[index]
    rows = torch.Size((*codes.shape[: codes.dim() - stored.codes.dim() + 1], *stored.shape[1:]))
    return Quantised.of(stored._replace(codes=codes, scales=scales, shape=rows))


def _unbound(weight: Quantised, dim: int = 0) -> tuple[Tensor, ...]:
    if dim != 0 or weight.dim() != 3:
        return plain(weight).unbind(dim)
    return tuple(_item(weight, number) for number in range(len(weight)))


def _turned(weight: Quantised, *dims: int) -> Tensor:
    last = [weight.dim() - 2, weight.dim() - 1]
    if dims and sorted(dim % weight.dim() for dim in dims) != last:
        return plain(weight).transpose(*dims)
    return Quantised.of(weight.stored._replace(turned=not weight.stored.turned))


def _to(weight: Quantised, *args: Any, **kwargs: Any) -> Quantised:
    """Move codes to another device, or change the dtype of their dequantised value."""
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
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
    **dict.fromkeys((F.grouped_mm, torch._grouped_mm), _grouped),  # pyright: ignore[reportPrivateImportUsage]
    Tensor.__getitem__: _item,
    Tensor.unbind: _unbound,
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
