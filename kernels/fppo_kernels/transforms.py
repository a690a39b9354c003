"""Queries about running transforms of torch.func, and operations of two hand-written passes that support them.

torch has no public way to query running transforms: the few private functions for it are called here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import attrs
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.func import jvp, vjp
from torch.utils import _pytree as pytree

_torch: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_levels: Any = _torch._functorch
_forward: Any = forward_ad
T = TypeVar("T")
Tensors = tuple[Tensor | None, ...]


def active() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is running."""
    return bool(_torch._are_functorch_transforms_active()) or _forwards()


def _forwards() -> bool:
    return _forward._current_level >= 0


def stacked() -> bool:
    """Whether more than a single reverse pass is running: vmap, a forward-mode derivative, or nested transforms.

    torch's operations with only first derivatives fail there.
    """
    running: list[Any] = _levels.get_interpreter_stack() or []
    return _forwards() or len(running) > 1 or any("Vmap" in str(x.key()) for x in running)


def is_mapped(x: Tensor) -> bool:
    """Whether a running vmap maps over `x`, so that its numbers cannot be read."""
    while _levels.is_functorch_wrapped_tensor(x):
        if _levels.is_batchedtensor(x):
            return True
        x = _levels.get_unwrapped(x)
    return False


def bare(tree: T) -> T:
    """Unwrap the tensors of a tree from transforms. Raises ValueError for a tensor that vmap maps over."""

    def unwrapped(x: Tensor) -> Tensor:
        if is_mapped(x):
            raise ValueError(
                f"the numbers of a tensor {list(x.shape)} are needed, and vmap maps over it: leave it out of vmap's "
                "in_dims, so that all of the map share it"
            )
        while _levels.is_functorch_wrapped_tensor(x):
            x = _levels.get_unwrapped(x)
        return x

    return pytree.tree_map_only(Tensor, unwrapped, tree)


def outside(fn: Callable[..., T], *arguments: Any) -> T:
    """Run `fn(*arguments)` outside all transforms, which do not see its work: for bookkeeping without gradients.

    Raises ValueError for arguments with a tensor that vmap maps over.
    """
    if not active():
        return fn(*arguments)
    plain = bare(arguments)
    with temporarily_clear_interpreter_stack(), torch.no_grad():
        return fn(*plain)


@attrs.frozen(kw_only=True)
class TwoPass:
    """An operation computed by two hand-written passes, with its definition in torch's operations.

    `forward(options, *tensors)` returns the outputs, and new tensors to save for the backward pass, none of them an
    output. `backward(options, tensors, kept, grads, needed)` returns the gradients by the tensors, None for those not
    needed; `kept` has the outputs with indices in `reads`, then the saved tensors. `definition(options, *tensors)`
    returns the outputs; forward-mode and higher derivatives are taken of it. Tensors may be None, and gradients of
    unused outputs are None. Tensors and gradients have any layout.

    Where `rows` says which tensors have one entry for each row of the outputs, derivatives of the definition are
    computed for `piece` rows at a time, which bounds their memory.
    """

    forward: Callable[..., tuple[Tensors, tuple[Tensor, ...]]]
    backward: Callable[..., Tensors]
    definition: Callable[..., tuple[Tensor, ...]]
    outputs: int = 1
    reads: tuple[int, ...] = ()
    rows: tuple[bool, ...] | None = None
    piece: int = 0


def run(passes: TwoPass, options: Any, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Compute the outputs of an operation; `options` are its non-tensor arguments."""
    if active():
        return _Forward.apply(passes, options, *tensors)[: passes.outputs]  # pyright: ignore[reportReturnType]
    if torch.is_grad_enabled():
        return _Plain.apply(passes, options, *tensors)[: passes.outputs]  # pyright: ignore[reportReturnType]
    return cast(tuple[Tensor, ...], passes.forward(options, *tensors)[0])


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(passes: TwoPass, options: Any, *tensors: Tensor | None) -> Tensors:
        outputs, kept = passes.forward(options, *tensors)
        return *outputs, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.passes, ctx.options, *tensors = inputs
        kept, ctx.count = output[ctx.passes.outputs :], len(tensors)
        ctx.kept = len(kept)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(output[number] for number in ctx.passes.reads), *kept)
        if _forwards():  # at other times it would hold tensors that hooks move off the device
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        needed, passes = ctx.needs_input_grad[2:], ctx.passes
        found: list[Tensor | None] = [None] * ctx.count
        if any(needed) and any(x is not None for x in grads[: passes.outputs]):
            arguments = passes, ctx.options, needed, ctx.count, *ctx.saved_tensors, *grads[: passes.outputs]
            differentiated = torch.is_grad_enabled() or active()
            results = (_Backward.apply if differentiated else _Backward.forward)(*arguments)
            for place, x in zip(_places(needed), cast(tuple[Tensor, ...], results), strict=True):
                found[place] = x
        return None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        passes, tensors = ctx.passes, ctx.saved_tensors
        fn = partial(_pushed, partial(passes.definition, ctx.options))
        outputs = (True,) * passes.outputs
        return *_by_rows(passes, fn, (*tensors, *tangents[2:]), (passes.rows or ()) * 2, outputs), *[None] * ctx.kept

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _one_by_one(_Forward, info.batch_size, in_dims, arguments)


class _Plain(torch.autograd.Function):
    """`_Forward` for when no transform is running: torch inspects the signature of a function with a `setup_context` in
    every call, which takes longer than a small norm."""

    @staticmethod
    def forward(ctx: Any, passes: TwoPass, options: Any, *tensors: Tensor | None) -> Tensors:
        results = _Forward.forward(passes, options, *tensors)
        _Forward.setup_context(ctx, (passes, options, *tensors), cast(tuple[Tensor, ...], results))
        return results

    backward = _Forward.backward


class _Backward(torch.autograd.Function):
    """The backward pass as a differentiable operation: the needed gradients in the order of the tensors."""

    @staticmethod
    def forward(passes: TwoPass, options: Any, needed: tuple[bool, ...], count: int, *saved: Any) -> tuple[Tensor, ...]:
        end = len(saved) - passes.outputs
        grads = passes.backward(options, saved[:count], saved[count:end], saved[end:], needed)
        return tuple(cast(Tensor, grads[place]) for place in _places(needed))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.passes, ctx.options, ctx.needed, ctx.count, *saved = inputs
        ctx.kept = len(saved) - ctx.count - ctx.passes.outputs
        own = (*saved[: ctx.count], *saved[ctx.count + ctx.kept :])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*own)
        if _forwards():
            ctx.save_for_forward(*own)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        wanted = (*ctx.needs_input_grad[4 : 4 + ctx.count], *ctx.needs_input_grad[4 + ctx.count + ctx.kept :])
        grads: list[Tensor | None] = [None] * len(wanted)
        if not any(wanted) or all(x is None for x in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        fn, inner, outer = _gradients_of(ctx)
        flags = (*inner, *outer), tuple(flag for flag, each in zip(inner, wanted, strict=True) if each)
        found = _by_rows(ctx.passes, partial(_pulled, fn, wanted), (*ctx.saved_tensors, *cotangents), *flags)
        for place, x in zip(_places(wanted), found, strict=True):
            grads[place] = x
        return *[None] * 4, *grads[: ctx.count], *[None] * ctx.kept, *grads[ctx.count :]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        fn, inner, outer = _gradients_of(ctx)
        own = (*tangents[4 : 4 + ctx.count], *tangents[4 + ctx.count + ctx.kept :])
        return _by_rows(ctx.passes, partial(_pushed, fn), (*ctx.saved_tensors, *own), inner * 2, outer)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _one_by_one(_Backward, info.batch_size, in_dims, arguments)


def _gradients_of(ctx: Any) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[bool, ...], tuple[bool, ...]]:
    """The gradients that the definition has, as a function of the tensors and of the outputs' gradients; and for each
    argument and each result of that function, whether it has rows."""
    passes, count, needed = ctx.passes, ctx.count, ctx.needed

    def gradients(*arguments: Tensor | None) -> tuple[Tensor, ...]:
        return _pulled(partial(passes.definition, ctx.options), needed, *arguments)

    rows = passes.rows or (False,) * count
    return gradients, (*rows, *(True,) * passes.outputs), tuple(rows[place] for place in _places(needed))


def refuse(kernel: str, way_out: str) -> None:
    """Raise ValueError if a transform of torch.func runs, for a kernel that supports none; its text ends with
    `way_out`."""
    if active():
        raise ValueError(f"{kernel} has no derivatives under torch.func: {way_out}")


def _places(flags: Sequence[bool]) -> list[int]:
    return [number for number, flag in enumerate(flags) if flag]


def _of_some(
    fn: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor | None], places: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]]:
    """Turn `fn(*tensors)` into a function of the tensors at the indices `places`; all others keep their values."""

    def of(*some: Tensor) -> tuple[Tensor, ...]:
        arguments = list(tensors)
        for place, x in zip(places, some, strict=True):
            arguments[place] = x
        return fn(*arguments)

    return of


def _pushed(fn: Callable[..., tuple[Tensor, ...]], *arguments: Tensor | None) -> tuple[Tensor, ...]:
    """Compute tangents of `fn`: the first half of the arguments are its inputs, the second half their tangents."""
    tensors, tangents = arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]
    places = [number for number, x in enumerate(tangents) if x is not None]
    primals = tuple(_forward.unpack_dual(tensors[place]).primal for place in places)
    along, some = tuple(x for x in tangents if x is not None), _of_some(fn, tensors, places)
    if _levels.get_interpreter_stack():
        return jvp(some, primals, along)[1]
    with _forward._set_fwd_grad_enabled(True):  # at torch's own level, which exists once
        results = [_forward.unpack_dual(x) for x in some(*map(_forward.make_dual, primals, along))]
    return tuple(torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in results)


def _pulled(
    fn: Callable[..., tuple[Tensor, ...]], needed: Sequence[bool], *arguments: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the `needed` gradients by the first arguments of `fn`; the other arguments are the gradients of its
    results."""
    tensors, grads = arguments[: len(needed)], arguments[len(needed) :]
    places, used = _places(needed), [number for number, x in enumerate(grads) if x is not None]

    def chosen(*some: Tensor) -> tuple[Tensor, ...]:
        results = _of_some(fn, tensors, places)(*some)
        return tuple(results[number] for number in used)

    pull = vjp(chosen, *(cast(Tensor, tensors[place]) for place in places))[1]
    return pull(tuple(x for x in grads if x is not None))


def _by_rows(
    passes: TwoPass,
    fn: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    cut: Sequence[bool],
    joined: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Run `fn` on some rows at a time of the tensors that are `cut`. Results that have rows (`joined`) are
    concatenated, all others are summed."""
    if passes.rows is None:
        return fn(*tensors)
    count = next(len(x) for x, flag in zip(tensors, cut, strict=True) if flag and x is not None)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, max(count, 1), passes.piece):
        rows = slice(start, start + passes.piece)
        some = (x if x is None or not flag else x[rows] for x, flag in zip(tensors, cut, strict=True))
        parts.append(fn(*some))
    columns = zip(*parts, strict=True)
    return tuple(
        column[0] if len(parts) == 1 else torch.cat(column) if flag else torch.stack(column).sum(0)
        for column, flag in zip(columns, joined, strict=True)
    )


def _one_by_one(
    function: type[torch.autograd.Function], count: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Apply a `function` to each of the `count` entries of mapped tensors, the `arguments` with a dimension in
    `in_dims`, in turn, as the vmap rule of a program that accepts no further dimension. Returns the stacked results,
    and the dimension (0) along which each is stacked."""

    def entry(number: int) -> list[Any]:
        pairs = zip(arguments, in_dims, strict=True)
        return [x.select(dim, number) if isinstance(x, Tensor) and dim is not None else x for x, dim in pairs]

    results = [cast(tuple[Tensor, ...], function.apply(*entry(number))) for number in range(count)]
    stacked_results = tuple(torch.stack(column) for column in zip(*results, strict=True))
    return stacked_results, (0,) * len(stacked_results)
