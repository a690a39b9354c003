"""Adapted weights as tensors that act as W + scale * B @ A (arXiv:2106.09685) without forming the sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo.models.quantised import taking_quantised
from fppo_kernels.transforms import active

Scaling = Literal["standard", "rslora"]
FACTORS = (".lora_A", ".lora_B")  # suffixes of the adapted weight's name
_ALIGNED = 16  # bytes, the alignment of rows in grouped products on GPUs


@attrs.frozen
class Lora:
    """Low-rank adapters of a model: their rank, the scale of B @ A, and the weights with adapters.

    A target is "all-linear" (linear layers and stacks of experts inside the model, without routers of experts,
    embeddings and vocabulary head), the end of a parameter's path, as "q_proj" or "mlp.down_proj", or a pattern of
    whole paths, as "model.layers.1?.*". Weights that `exclude` names in these ways have no adapter. The scale is
    alpha / rank ("standard") or alpha / sqrt(rank) ("rslora", arXiv:2312.03732). Raises ValueError for a rank below 1,
    no targets, or another scaling.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("all-linear",)
    scaling: Scaling = "standard"
    exclude: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: give 1 or more")
        if not self.targets or isinstance(self.targets, str):
            raise ValueError(f"targets={self.targets!r}: give a tuple of names, as ('all-linear',)")
        if self.scaling not in ("standard", "rslora"):
            raise ValueError(f"scaling={self.scaling!r}: give 'standard' or 'rslora'")

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)


@attrs.frozen(eq=False, kw_only=True)
class Frozen:
    """The frozen base of an adapted model: weights without updates, this rank's parts on a mesh that cuts parameters.
    `places` names the adapted weights of all ranks."""

    params: Mapping[str, Tensor] = attrs.field(repr=False)
    shapes: Mapping[str, torch.Size]  # of this rank's stage, after tensor and expert cuts, before the shard axis's
    digest: str  # of all whole weights, equal on every layout
    lora: Lora
    places: Mapping[str, bool] = attrs.field(repr=False)  # the weights with factors; True: stored [in, out]


class Parts(NamedTuple):
    """A weight [..., out, in], or [..., in, out] if `flipped`, and its factors A [..., r, in], B [..., out, r]."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float
    flipped: bool


class Factors(NamedTuple):
    """The factors A [r, in], B [out, r] and the scale of one adapter's change of a weight."""

    a: Tensor
    b: Tensor
    scale: float

    def change_of(self, x: Tensor) -> Tensor:
        """Compute x @ (B @ A).T for x [N, in], without the scale."""
        return (x @ self.a.t()) @ self.b.t()


class Several(NamedTuple):
    """A weight [out, in], or [in, out] if `flipped`, and several adapters' factors with the rows of a pass that use
    them (`own`). Rows without an adapter use the weight alone."""

    weight: Tensor
    own: Sequence[tuple[slice | Tensor, Factors]]
    flipped: bool


class Adapted(Tensor):
    """A weight in a module that acts as W + scale * B @ A, by one adapter for all rows, or by several for their own.

    It implements the products in which transformers' code uses weights. Any other use raises RuntimeError: it would
    see the weight without its factors.
    """

    parts: Parts | Several

    @staticmethod
    def of(parts: Parts | Several) -> Adapted:
        """Wrap a weight and its factors as a tensor without memory of its own."""
        w = parts.weight
        value = Tensor._make_wrapper_subclass(Adapted, w.shape, w.stride(), dtype=w.dtype, device=w.device)
        value.parts = parts
        return value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dispatch products to their rules and queries of shape or device to W; else raise RuntimeError."""
        if func in _RULES:
            return _RULES[func](*args, **(kwargs or {}))
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*(x.parts.weight if isinstance(x, Adapted) else x for x in args), **(kwargs or {}))
        return _refused(getattr(func, "__name__", str(func)))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyright: ignore
        """Raise RuntimeError for calls that bypass `__torch_function__`."""
        return _refused(str(func))

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        shape = list(self.parts.weight.shape)
        if isinstance(self.parts, Several):
            return f"Adapted({shape}, by {len(self.parts.own)} adapters)"
        return f"Adapted({shape}, rank {self.parts.a.shape[-2]}, scale {self.parts.scale})"


def merged_weight(parts: Parts) -> Tensor:
    """W + scale * B @ A, added up in float32 or wider, in W's dtype."""
    weight, a, b, scale, flipped = parts
    wide = torch.promote_types(a.dtype, torch.float32)
    change = scale * (b.to(wide) @ a.to(wide))
    return (weight.to(wide) + (change.mT if flipped else change)).to(weight.dtype)


def product(x: Tensor, parts: Parts | Several, bias: Tensor | None, linear: Callable[..., Tensor] = F.linear) -> Tensor:
    """x @ (W + scale * B @ A).T + bias for `x` [..., in]; the kernel `linear` computes the product with W. Several
    adapters each change their own rows."""
    weight, flipped = parts.weight, parts.flipped
    rows = x.reshape(-1, x.shape[-1])
    if not flipped:
        out = linear(rows, weight, bias)
    else:
        out = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    if isinstance(parts, Several):
        added = _with_own if torch.is_grad_enabled() else add_own_
        return added(out, rows, parts.own).view(*x.shape[:-1], out.shape[-1])
    _, a, b, scale, _ = parts
    inner = rows @ a.t()
    if linear is F.linear and not active():  # in new memory, which no backward pass reads
        out = out.addmm_(inner, b.t(), alpha=scale)
    else:
        out = torch.addmm(out, inner, b.t(), alpha=scale)
    return out.view(*x.shape[:-1], out.shape[-1])


def add_own_(out: Tensor, x: Tensor, own: Sequence[tuple[slice | Tensor, Factors]]) -> Tensor:
    """Add to `out` [N, out], in place and without gradients, each adapter's change for its rows of `x` [N, in]."""
    for rows, factors in own:
        if isinstance(rows, slice):
            out[rows].addmm_(x[rows] @ factors.a.t(), factors.b.t(), alpha=factors.scale)
        else:
            out.index_add_(0, rows, factors.change_of(x[rows]), alpha=factors.scale)
    return out


def _with_own(out: Tensor, x: Tensor, own: Sequence[tuple[slice | Tensor, Factors]]) -> Tensor:
    """`add_own_` with gradients: one sum for all adapters, and one gather unless their rows are all rows in order."""
    slices = [rows for rows, _ in own if isinstance(rows, slice)]
    edges = [0, *(rows.stop for rows in slices)]
    in_order = len(slices) == len(own) and [rows.start for rows in slices] == edges[:-1] and edges[-1] == len(x)
    if in_order:
        index, parts = None, x.split([rows.stop - rows.start for rows in slices])
    else:
        places = torch.arange(len(x), device=x.device)
        numbers = [places[rows] if isinstance(rows, slice) else rows for rows, _ in own]
        index = torch.cat(numbers)
        parts = x[index].split([len(each) for each in numbers])
    change = torch.cat([factors.scale * factors.change_of(part) for part, (_, factors) in zip(parts, own, strict=True)])
    return out + change if index is None else out.index_add(0, index, change)


def taking_adapted(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Extend a kernel for linear layers to adapted and quantised weights."""
    inner = linear if linear is F.linear else taking_quantised(linear)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, weight.parts, bias, inner) if isinstance(weight, Adapted) else inner(x, weight, bias)

    return call


def _refused(operation: str) -> NoReturn:
    raise RuntimeError(  # Python replaces a TypeError by one of its own
        f"{operation} of an adapted weight: the model's code uses it otherwise than in a product that fppo knows; "
        "leave that weight out of the adapter's targets"
    )


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:  # torch's names
    return product(input, weight.parts, bias)


def _addmm(input: Tensor, mat1: Tensor, mat2: Any) -> Tensor:
    return product(mat1, mat2.parts, input) if isinstance(mat2, Adapted) else _refused("addmm")


def _one(weight: Adapted) -> Parts:
    """The parts of a weight with one adapter."""
    return _refused("a use by rows of several adapters") if isinstance(weight.parts, Several) else weight.parts


def _matmul(x: Tensor, weight: Any) -> Tensor:
    if not isinstance(weight, Adapted):
        _refused("a product from the left")
    if not weight.parts.flipped:
        _refused("a product from the right, of a weight stored [out, in],")
    if weight.parts.weight.dim() == 2:
        return product(x, weight.parts, None)
    w, a, b, scale, _ = _one(weight)
    return torch.baddbmm(x @ w, x @ a.mT, b.mT, alpha=scale)


def _bmm(input: Any, mat2: Any) -> Tensor:
    if not isinstance(input, Adapted):
        return _matmul(input, mat2)
    w, a, b, scale, flipped = _one(input)  # W [S, out, in] @ x [S, in, n]
    if flipped:
        _refused("a product from the left, of a stack stored [in, out],")
    return torch.baddbmm(torch.bmm(w, mat2), b, torch.bmm(a, mat2), alpha=scale)


def _grouped(input: Tensor, mat2: Any, offs: Tensor, bias: None = None, out_dtype: Any = None) -> Tensor:
    """A grouped product of rows [S, in] with a weight [E, in, out], rows up to `offs[e]` with expert e, as torch's
    grouped_mm. Ranks of adapters are padded to the kernel's alignment."""
    if not isinstance(mat2, Adapted) or not mat2.parts.flipped or bias is not None or out_dtype is not None:
        _refused("a grouped product")
    w, a, b, scale, _ = _one(mat2)
    if wide := -a.shape[1] % (_ALIGNED // a.dtype.itemsize):
        a, b = F.pad(a, (0, 0, 0, wide)), F.pad(b, (0, wide))
    inner = F.grouped_mm(input, a.mT, offs=offs)
    return torch.add(F.grouped_mm(input, w, offs=offs), F.grouped_mm(inner, b.mT, offs=offs), alpha=scale)


def _item(weight: Any, index: Any) -> Any:
    """Select one expert, or some, of a stack of adapted weights."""
    w, a, b, scale, flipped = _one(weight)
    if w.dim() != 3 or not (isinstance(index, int) or (isinstance(index, Tensor) and index.dtype != torch.bool)):
        _refused("a piece")
    return Adapted.of(Parts(w[index], a[index], b[index], scale, flipped))


def _unbound(weight: Any, dim: int = 0) -> Any:
    """Unbind a stack into its experts."""
    if dim != 0:
        _refused("pieces along another dimension than the experts'")
    return tuple(_item(weight, number) for number in range(len(weight.parts.weight)))


def _transposed(weight: Any, *dims: int) -> Any:
    w = weight.parts.weight
    if dims and sorted(dim % w.dim() for dim in dims) != [w.dim() - 2, w.dim() - 1]:
        _refused("an exchange of other dimensions than the last two")
    return Adapted.of(weight.parts._replace(weight=w.mT, flipped=not weight.parts.flipped))


def _to(weight: Any, *args: Any, **kwargs: Any) -> Any:
    def to(x: Tensor) -> Tensor:
        return x.to(*args, **kwargs)

    parts = weight.parts
    if isinstance(parts, Several):
        own = [(rows, Factors(to(x.a), to(x.b), x.scale)) for rows, x in parts.own]
        return Adapted.of(parts._replace(weight=to(parts.weight), own=own))
    return Adapted.of(parts._replace(weight=to(parts.weight), a=to(parts.a), b=to(parts.b)))


def _embedding(  # torch's signature
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of W [V, H] + scale * B [V, r] @ A [r, H]."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        _refused("an embedding with more than rows")
    del norm_type
    parts = weight.parts
    if isinstance(parts, Several):
        tokens = input.flatten()
        out = F.embedding(tokens, parts.weight, padding_idx)
        for rows, (a, b, scale) in parts.own:
            out[rows] += scale * _change(tokens[rows], a, b, padding_idx)
        return out.view(*input.shape, -1)
    w, a, b, scale, _ = parts
    return torch.add(F.embedding(input, w, padding_idx), _change(input, a, b, padding_idx), alpha=scale)


def _change(tokens: Tensor, a: Tensor, b: Tensor, padding_idx: int | None) -> Tensor:
    """Rows of B [V, r] @ A [r, H]; that of the padding token without a gradient, as torch has it for a weight."""
    change = F.embedding(tokens, b) @ a
    return change if padding_idx is None else torch.where((tokens == padding_idx)[..., None], change.detach(), change)


_TRANSPOSES: tuple[Any, ...] = (Tensor.transpose, torch.transpose, Tensor.t)
_TRANSPOSES += tuple(getattr(Tensor, name).__get__ for name in ("T", "mT"))
_RULES: Mapping[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    torch.bmm: _bmm,
    **dict.fromkeys((F.grouped_mm, torch._grouped_mm), _grouped),  # pyright: ignore[reportPrivateImportUsage]
    F.embedding: _embedding,
    Tensor.__getitem__: _item,
    Tensor.unbind: _unbound,
    **dict.fromkeys(_TRANSPOSES, _transposed),
    Tensor.to: _to,
}
_SAID = ("shape", "ndim", "dtype", "device", "requires_grad", "is_meta", "is_leaf", "is_cuda", "is_cpu", "layout")
_PLAIN: frozenset[Any] = frozenset(getattr(Tensor, name).__get__ for name in _SAID) | {
    Tensor.__len__,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.is_complex,
    Tensor.data_ptr,
}
