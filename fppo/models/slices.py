"""MLPs in slices of tokens, of which the backward pass computes each again.

Between the passes an MLP keeps its input alone, and within them the inner activations of one slice. Parameters are
bound to a skeleton for a pass only, so a slice that is computed again gets them as arguments. MLPs are modules inside
the layers that treat each token by itself; they are recognised by a trial on random numbers.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fppo.key import Key
from fppo.models.adapted import Adapted, Parts, Several
from fppo.models.inner import REGIONS, is_linear
from fppo.models.precision import KeepDouble
from fppo.models.quantised import Quantised, Stored
from fppo.models.recompute import saved_hooks
from fppo.models.seams import LayerSeam, take_place
from fppo_kernels.transforms import active

_ROWS, _FIRST = 5, 2  # tokens of a trial, and those of its first slice

# takes as many of the tensors as it needs, and makes a parameter of them
Form = Callable[[Iterator[Tensor]], Tensor]


class MlpSeam(nn.Module):
    """Replaces an MLP, and computes more than `tokens` tokens in slices of so many."""

    def __init__(self, module: nn.Module, tokens: int) -> None:
        super().__init__()
        take_place(self, module)
        self._inner, self._tokens = (module,), tokens  # in a tuple, it is no child

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (module,), tokens, (x,) = self._inner, self._tokens, (*args, *kwargs.values())
        if x.shape[:-1].numel() <= tokens or active():
            return module(x)
        named = dict(module.named_parameters(remove_duplicate=False))
        if any(map(_by_rows, named.values())):
            return module(x)
        if not torch.is_grad_enabled():
            return _joined(module, x, tokens)
        parts = {name: _apart(parameter) for name, parameter in named.items()}
        work = _SliceCall(module, tokens, {name: form for name, (_, form) in parts.items()})
        return _Slices.apply(work, x, *(tensor for tensors, _ in parts.values() for tensor in tensors))  # type: ignore[return-value]


def _by_rows(parameter: Tensor) -> bool:
    """Whether a weight has adapters of several users, who each have rows of the whole pass."""
    return isinstance(parameter, Adapted) and isinstance(parameter.parts, Several)


class _SliceCall(NamedTuple):
    """An MLP, the number of tokens of a slice, and how its parameters are made of tensors. It holds no tensors: these
    would escape the saved-tensor hooks of recomputed layers."""

    module: nn.Module
    tokens: int
    forms: dict[str, Form]

    def __call__(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The MLP's output for a slice, with parameters made of these tensors."""
        pieces = iter(tensors)
        named = {name: form(pieces) for name, form in self.forms.items()}
        return functional_call(self.module, named, (x,), tie_weights=False)


def _apart(parameter: Tensor) -> tuple[tuple[Tensor, ...], Form]:
    """The tensors of a parameter, which may be adapted or quantised, and the form that makes it of them."""
    if isinstance(parameter, Adapted):
        weight, a, b, scale, flipped = cast(Parts, parameter.parts)
        tensors, form = _apart(weight)
        return (*tensors, a, b), lambda own: Adapted.of(Parts(form(own), next(own), next(own), scale, flipped))
    if isinstance(parameter, Quantised):
        kind, codes, scales, shape, dtype, turned = parameter.stored
        return (codes, scales), lambda own: Quantised.of(Stored(kind, next(own), next(own), shape, dtype, turned))
    return (parameter,), next


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _joined(call: Callable[[Tensor], Tensor], x: Tensor, tokens: int) -> Tensor:
    """The outputs of `call` for slices of `x` [..., H], without gradients, in the place of its output for all."""
    rows, out = x.reshape(-1, x.shape[-1]), None
    for own in _slices(len(rows), tokens):
        part = call(rows[own])
        out = part.new_empty(len(rows), part.shape[-1]) if out is None else out
        out[own] = part
    assert out is not None
    return out.view(*x.shape[:-1], out.shape[-1])


class _Slices(torch.autograd.Function):
    """An MLP in slices, from its input and the tensors of its parameters."""

    @staticmethod
    def forward(ctx: Any, work: _SliceCall, x: Tensor, *tensors: Tensor) -> Tensor:  # torch's signature
        ctx.work, hooks = work, saved_hooks()
        if hooks is None:
            ctx.kept = None
            ctx.save_for_backward(x, *tensors)
        else:  # before the slices: a layer that is computed again stops here if it needs nothing behind
            pack, ctx.give = hooks
            ctx.kept = [pack(each) for each in (x, *tensors)]
        return _joined(work.module, x, work.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *tensors = ctx.saved_tensors if ctx.kept is None else map(ctx.give, ctx.kept)
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
            ctx.kept = ctx.give = None  # torch lets go only of what it has saved itself, and the rest holds the layer
        work, (_, needs_x, *needed) = ctx.work, ctx.needs_input_grad
        rows, grads = x.detach().reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        own = [each.detach().requires_grad_(needs) for each, needs in zip(tensors, needed, strict=True)]
        wanted = [each for each in own if each.requires_grad]
        # in 16 bits each sum would be rounded
        sums = [torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in wanted]
        d_x = torch.empty_like(rows) if needs_x else None
        for part in _slices(len(rows), work.tokens):
            piece = rows[part].requires_grad_(needs_x)
            with torch.enable_grad(), KeepDouble() if x.dtype == torch.float64 else nullcontext():
                out = work(piece, own)
            found = torch.autograd.grad(out, [piece, *wanted] if needs_x else wanted, grads[part])
            if d_x is not None:
                d_x[part], *found = found
            for total, each in zip(sums, found, strict=True):
                total += each
        results = (total.to(each.dtype) for total, each in zip(sums, wanted, strict=True))
        d_x = None if d_x is None else d_x.view(x.shape)
        return None, d_x, *(next(results) if needs else None for needs in needed)


def find_mlps(skeleton: PreTrainedModel) -> tuple[str, ...]:
    """The paths of the MLPs in the layers of a skeleton: modules that treat each token by itself, made of several
    linear layers and of functions without parameters. Raises ValueError if there are none."""
    found: list[str] = []
    for start, layer in skeleton.named_modules():
        if not isinstance(layer, LayerSeam):
            continue
        for path, module in layer.named_modules(prefix=start):
            if not any(path.startswith(f"{above}.") for above in found):
                inner = module._inner[0] if isinstance(module, REGIONS) else module
                found += [path] if _is_mlp(inner) else []
    if not found:
        raise ValueError(
            f"model type {skeleton.config.model_type!r}: its layers have no MLP that can be computed in slices of "
            "tokens; leave mlp_slice_tokens out"
        )
    return tuple(found)


def put_slices(skeleton: PreTrainedModel, paths: Sequence[str], tokens: int) -> None:
    """Replace the MLPs at these paths in a skeleton by seams that compute them in slices of so many tokens."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        modules = skeleton.get_submodule(parent)._modules
        module = modules[name]
        assert module is not None
        if isinstance(module, REGIONS):
            module._inner = (MlpSeam(module._inner[0], tokens),)
        else:
            modules[name] = MlpSeam(module, tokens)


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module on meta is an MLP, by a trial in which all of its widths are divided by one number."""
    linears = {path: child for path, child in module.named_modules() if path and is_linear(child)}
    own = {path.rpartition(".")[0] for path, _ in module.named_parameters()}
    if len(linears) < 2 or own != linears.keys() or list(module.buffers()):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    shapes = {path: _sizes(child) for path, child in linears.items()}
    common = math.gcd(*(size for sizes in shapes.values() for size in sizes))
    trial, generator = copy.deepcopy(module), Key(0).fold("mlp").generator()
    for path, child in linears.items():
        wide, out = (size // common for size in shapes[path])
        small = nn.Linear(wide, out, bias=child._parameters["bias"] is not None, device="meta", dtype=torch.float64)
        for name, parameter in small.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            small._parameters[name] = nn.Parameter(drawn, requires_grad=False)
        parent, _, name = path.rpartition(".")
        trial.get_submodule(parent)._modules[name] = small
    wide = next(iter(shapes.values()))[0] // common
    return _by_token(trial, torch.randn(_ROWS, wide, generator=generator, dtype=torch.float64))


def _sizes(linear: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear layer."""
    rows, columns = cast(Tensor, linear._parameters["weight"]).shape
    return (rows, columns) if type(linear) is Conv1D else (columns, rows)


@torch.no_grad()
def _by_token(call: Callable[[Tensor], Any], rows: Tensor) -> bool:
    """Whether `call` gives for slices of rows what it gives for all of them."""
    try:
        whole, parts = call(rows), [call(part) for part in rows.split(_FIRST)]
    except Exception:  # a module of another kind may raise any exception
        return False
    outputs = [whole, *parts]
    if not all(isinstance(out, Tensor) and out.dim() == 2 for out in outputs) or len(whole) != len(rows):
        return False
    return torch.allclose(torch.cat(parts), whole, rtol=1e-9, atol=1e-12)
