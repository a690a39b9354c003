"""Kernels inside the layers: linear layers, root-mean-square norms, gated activations, rotary positions.

A skeleton with kernels other than the model's own code has seams, modules that call them, in place of such modules.
Modules are recognised by their structure and by their results on random numbers; unrecognised ones keep their own code.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fppo.key import Key
from fppo.models.adapted import taking_adapted
from fppo.models.known import know_layers, known_layers
from fppo.models.regions import BlockSeam, EmbeddingSeam, WidthSeam
from fppo.models.seams import ATTENTION, LayerSeam, attention_seam, take_place
from fppo_kernels import layer_norm, table
from fppo_kernels.glu import eager as glus
from fppo_kernels.rms_norm import eager as norms
from fppo_kernels.table import Kernels, needs_compiler

REGIONS = (BlockSeam, EmbeddingSeam, WidthSeam)  # seams around a module, which is replaced inside them
APART = f"{ATTENTION}-apart"
PROGRAMS = (
    64  # compiled variants of a layer at most (dtypes, kinds of layers, gradients or none); others run uncompiled
)
_ROWS, _WIDTH, _INNER = 3, 5, 4  # sizes of a module's trial
_LARGEST_EPS = 0.1


Inner = Mapping[str, Callable[..., Any]]  # the kernels inside the layers, by operation
OWN: Inner = MappingProxyType({op: table.get(op, table.DEFAULTS[op]) for op in table.INSIDE})  # models' own code


def inner_of(kernels: Kernels) -> Inner:
    """The kernels inside layers."""
    return {op: getattr(kernels, op) for op in OWN}


class LinearForm(NamedTuple):
    """A linear layer, and whether its weight is stored as [in, out]."""

    transposed: bool


class NormForm(NamedTuple):
    """A root-mean-square norm: x / sqrt(mean(x^2) + eps) * (weight + offset)."""

    eps: float
    offset: float


class LayerNormForm(NamedTuple):
    """A norm by mean and variance: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, or without a bias."""

    eps: float


class GluForm(NamedTuple):
    """A block down(activation(gate(x)) * up(x)), by the names of its linear layers; `up` is None if one layer computes
    gate and up, as halves of its output."""

    gate: str
    up: str | None
    down: str
    activation: str


class LinearSeam(nn.Module):
    """Replaces a linear layer and calls a kernel for its product."""

    def __init__(self, module: nn.Module, form: LinearForm, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        take_place(self, module)
        self._kernel, self._transposed = taking_adapted(kernel), form.transposed

    def forward(self, input: Tensor) -> Tensor:  # torch's name of the argument
        weight = cast(Tensor, self._parameters["weight"])
        return self._kernel(input, weight.t() if self._transposed else weight, self._parameters["bias"])


class NormSeam(nn.Module):
    """Replaces a root-mean-square norm and calls a kernel for it."""

    def __init__(self, module: nn.Module, form: NormForm, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        take_place(self, module)
        self._kernel, self._form = kernel, form

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = cast(Tensor, self._parameters["weight"])
        return self._kernel(hidden_states, weight, eps=self._form.eps, offset=self._form.offset)


class LayerNormSeam(nn.Module):
    """A layer norm that a kernel computes: takes the place of `module`, a norm of this form, with its parameters."""

    def __init__(self, module: nn.Module, form: LayerNormForm, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        take_place(self, module)
        self._kernel, self._form = kernel, form

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = cast(Tensor, self._parameters["weight"])
        return self._kernel(hidden_states, weight, self._parameters.get("bias"), eps=self._form.eps)


class GluSeam(nn.Module):
    """Replaces a block with a gated activation and calls a kernel for activation(gate) * up."""

    def __init__(self, module: nn.Module, form: GluForm, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        take_place(self, module)
        self._kernel, self._form = kernel, form

    def forward(self, hidden_states: Tensor) -> Tensor:
        form, children = self._form, cast(dict[str, nn.Module], self._modules)
        gate = children[form.gate](hidden_states)
        gate, up = gate.chunk(2, -1) if form.up is None else (gate, children[form.up](hidden_states))
        return children[form.down](self._kernel(gate, up, activation=form.activation))


class CompiledLayer(nn.Module):
    """Replaces a decoder layer and runs it as programs of torch.compile; in float64 uncompiled."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        take_place(self, layer)
        self._layer = (layer,)  # in a tuple, the layer is no child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (layer,) = self._layer
        if any(x.dtype == torch.float64 for x in layer.parameters()):
            return layer(*args, **kwargs)
        with torch._dynamo.config.patch(recompile_limit=PROGRAMS):  # type: ignore[attr-defined]
            return compiled_call()(layer, args, kwargs)


def _call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer(*args, **kwargs)


@functools.cache
def compiled_call() -> Callable[..., Any]:
    """A compiled call of a layer, for dynamic shapes; its programs are shared by all models and threads."""
    return torch.compile(_call, dynamic=True)


def compile_layers(skeleton: PreTrainedModel) -> None:
    """Compile a skeleton's layers, but not their attention. Raises ValueError without a compiler."""
    if reason := needs_compiler():
        raise ValueError(f"layers cannot be compiled here: {reason}")
    for seam in [module for module in skeleton.modules() if isinstance(module, LayerSeam)]:
        index, layer = seam._seam
        seam._seam = index, CompiledLayer(layer)
    AttentionInterface.register(APART, torch.compiler.disable(attention_seam))
    skeleton.config._attn_implementation = APART


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of torch or of GPT-2."""
    return type(module) is Conv1D or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)


def linear_form(module: nn.Module) -> LinearForm | None:
    """The form of a linear layer; None for other modules."""
    return LinearForm(type(module) is Conv1D) if is_linear(module) else None


def norm_form(module: nn.Module) -> NormForm | None:
    """Recognise a root-mean-square norm in a module on meta; None for other modules."""
    if len(module._parameters) > 1:
        return None
    forms, kernel = itertools.starmap(NormForm, itertools.product(_small(module), (0.0, 1.0))), norms.eager
    return _form_of_rows(module, {form: functools.partial(kernel, **form._asdict()) for form in forms})


def layer_norm_form(module: nn.Module) -> LayerNormForm | None:
    """Recognise a norm by mean and variance in a module on meta; None for other modules."""
    if list(module._parameters) not in (["weight"], ["weight", "bias"]):
        return None
    forms = map(LayerNormForm, _small(module))
    return _form_of_rows(module, {form: functools.partial(layer_norm.eager, eps=form.eps) for form in forms})


def _small(module: nn.Module) -> list[float]:
    """The module's attributes that may be an epsilon: small numbers of at least 0, ascending."""
    return sorted({x for x in vars(module).values() if isinstance(x, float) and 0 <= x < _LARGEST_EPS})


def _form_of_rows(module: nn.Module, forms: Mapping[Any, Callable[..., Tensor]]) -> Any:
    """Recognise a norm in a module on meta: the first of `forms` whose function(rows, *parameters) gives the module's
    results on random rows; None if none does."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or _others(module) or not _one(module):
        return None
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = Key(0).fold("norm").generator()
    for name, x in module._parameters.items():
        if x is not None:
            trial._parameters[name] = nn.Parameter(torch.randn(x.shape, generator=generator), requires_grad=False)
    rows = torch.randn(1, _ROWS, len(weight), generator=generator) * torch.tensor([[1.0], [1e-3], [30.0]])
    actual = _result(trial, rows)
    near = (form for form, fn in forms.items() if _near(actual, fn(rows, *trial._parameters.values())))
    return None if actual is None else next(near, None)


def glu_form(module: nn.Module) -> GluForm | None:
    """Recognise a block with a gated activation in a module, by a trial with narrow linear layers; None for others."""
    children = {name: x for name, x in module._modules.items() if x is not None and is_linear(x)}
    if len(children) not in (2, 3) or module._parameters or module._buffers or not _one(module):
        return None
    generator = Key(0).fold("glu").generator()
    rows = torch.randn(_ROWS, _WIDTH, generator=generator, dtype=torch.float64)
    for names in itertools.permutations(children):
        gate, up, down = names if len(names) == 3 else (names[0], None, names[1])
        trial = copy.deepcopy(module)  # on meta
        for name in names:
            inner = 2 * _INNER if up is None else _INNER
            shape = (_INNER, _WIDTH) if name == down else (_WIDTH, inner)
            biased = children[name]._parameters["bias"] is not None
            trial._modules[name] = _random_linear(*shape, bias=biased, generator=generator)
        actual = None if any(x.is_meta for x in trial.parameters()) else _result(trial, rows)
        for activation in glus.ACTIVATIONS:
            form = GluForm(gate, up, down, activation)
            if actual is not None and _near(actual, cast(Tensor, _result(GluSeam(trial, form, glus.eager), rows))):
                return form
    return None


def _others(module: nn.Module) -> bool:
    return bool(module._modules or module._buffers)


def _one(module: nn.Module) -> bool:
    """Whether a module's forward takes exactly one argument."""
    return len(inspect.signature(module.forward).parameters) == 1


def _random_linear(width: int, out: int, *, bias: bool, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(width, out, bias=bias, dtype=torch.float64).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return linear


@torch.no_grad()
def _result(module: nn.Module, rows: Tensor) -> Tensor | None:
    try:
        return module(rows)
    except Exception:  # a module of another kind may raise any exception
        return None


def _near(actual: Any, expected: Tensor) -> bool:
    alike = isinstance(actual, Tensor) and actual.shape == expected.shape and actual.dtype == expected.dtype
    return alike and torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)


class KernelPlace(NamedTuple):
    """How an operation's modules, called `noun` in errors, are replaced: `form(module)` describes one (None: another
    module), and `seam(module, form, kernel)` makes the module that calls the kernel."""

    noun: str
    form: Callable[[nn.Module], Any]
    seam: Callable[[nn.Module, Any, Callable[..., Any]], nn.Module]

    def seam_of(self, kernel: Callable[..., Any], module: nn.Module) -> nn.Module | None:
        """A module that calls `kernel` in a module's place; None for a module of another kind."""
        form = self.form(module)
        return None if form is None else self.seam(module, form, kernel)


# by operation, in the order in which modules are replaced; other operations have places in layers of Llama's kind
PLACES: Mapping[str, KernelPlace] = MappingProxyType(
    {
        "glu": KernelPlace("gated activation", glu_form, GluSeam),
        "rms_norm": KernelPlace("RMSNorm", norm_form, NormSeam),
        "layer_norm": KernelPlace("LayerNorm", layer_norm_form, LayerNormSeam),
        "linear": KernelPlace("linear layer", linear_form, LinearSeam),
    }
)


def put_kernels(skeleton: PreTrainedModel, inner: Inner) -> None:
    """Replace modules of a skeleton by seams that call the chosen kernels.

    Raises ValueError for a chosen kernel without a module to replace.
    """
    chosen = [op for op, kernel in inner.items() if kernel is not OWN[op]]
    for op, place in PLACES.items():
        if op in chosen and not _replace(skeleton, functools.partial(place.seam_of, inner[op])):
            raise _no_place(skeleton, op, place.noun)
    added = None if inner["add_rms_norm"] is OWN["add_rms_norm"] else inner["add_rms_norm"]
    others = [op for op in chosen if op not in PLACES]
    if others and not know_layers(skeleton, inner["rotary"], added):
        raise _no_place(skeleton, " and ".join(others), "layer of Llama's kind")


def has_place(skeleton: PreTrainedModel, op: str) -> bool:
    """Whether a model has modules that kernels of `op`, an operation inside layers, can replace."""
    if op in PLACES:
        return any(PLACES[op].form(module) is not None for module in skeleton.modules())
    return bool(known_layers(skeleton))


def _no_place(skeleton: PreTrainedModel, op: str, noun: str) -> ValueError:
    return ValueError(
        f"model type {skeleton.config.model_type!r}: fppo knows no {noun} in {type(skeleton).__name__} for the "
        f"kernel of {op}; leave {op} as it is by default"
    )


def _replace(skeleton: nn.Module, seam_of: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace each module for which `seam_of` makes another, a shared one by a shared one, and count those replaced."""
    seams: dict[nn.Module, nn.Module | None] = {}
    parents: Sequence[nn.Module] = list(skeleton.modules())
    for parent in parents:
        for name, child in parent._modules.items():
            if child is None:
                continue
            module = child._inner[0] if isinstance(child, REGIONS) else child
            if module not in seams:
                seams[module] = seam_of(module)
            seam = seams[module]
            if seam is not None and isinstance(child, REGIONS):
                child._inner = (seam,)
            elif seam is not None:
                parent._modules[name] = seam
    return sum(seam is not None for seam in seams.values())
