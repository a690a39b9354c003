"""Seams of mixers with recurrent states: linear attention, gated delta rules, Mamba, short convolutions.

Such a mixer's output for a token depends on earlier tokens through a state, not by attention. A seam passes the tokens
to the function that knows their rows (`rows.RowWise`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from fppo.models.rows import RowWise
from fppo.models.seams import Attend, take_place

WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "moe"})  # in the configs' layer_types
ALONE = frozenset({"mlp", "moe"})  # layers without mixing between tokens
_NO_STEP = 1e-9  # a limit below this makes no difference in float32
KEPT = ("conv_states", "recurrent_states")  # the states in transformers' cache of such a layer
_CUTTING = ("sequence", "context", "tensor")  # axes that cut rows or heads
_TOKENS = 2  # in the trial of a mixer


class Found(NamedTuple):
    """How a module used a cache in a trial: the argument that takes it, and the size of its recurrent state."""

    cache: str
    numbers: int


class StateSeam(nn.Module):
    """Replaces a mixer; the `StatefulLayer` around it supplies the rows."""

    def __init__(self, mixer: nn.Module, found: Found) -> None:
        super().__init__()
        take_place(self, mixer)
        self._inner = (mixer,)  # in a tuple, it is no child
        self._found = found
        self._rows: Attend | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        (mixer,), rows = self._inner, self._rows
        if not isinstance(rows, RowWise):
            raise ValueError(
                f"{type(mixer).__name__} carries states along rows, which `attend` does not know: give one of "
                "models.packed_attention or models.padded_attention"
            )
        return rows.carry(lambda hidden, states: mixer(hidden, **{self._found.cache: states}), hidden_states)


class StatefulLayer(nn.Module):
    """Replaces a layer and gives its mixers the rows of the pass, in recomputation too."""

    def __init__(self, layer: nn.Module, mixers: Sequence[StateSeam]) -> None:
        super().__init__()
        take_place(self, layer)
        self._layer = (layer, tuple(mixers))

    def forward(self, *args: Any, attend: Attend | None = None, **kwargs: Any) -> Any:
        layer, mixers = self._layer
        for mixer in mixers:
            mixer._rows = attend
        try:
            return layer(*args, attend=attend, **kwargs)
        finally:
            for mixer in mixers:
                mixer._rows = None


def put_mixers(base: PreTrainedModel, layers: Sequence[str]) -> tuple[int, ...]:
    """Replace the mixers of `base` by seams, and return the indices of the layers with one.

    A mixer is a module that fills an empty cache with states in a trial. Raises ValueError for layers that have states
    according to the config, but no such module.
    """
    config = base.config.get_text_config()
    numbers = stateful_layers(config)
    kinds = list(getattr(config, "layer_types", None) or [""] * len(layers))
    seen: dict[tuple[str, type[nn.Module]], Found | None] = {}  # by kind of layer and class
    unknown = []
    for number in numbers:
        path = layers[number]
        layer = base.get_submodule(path)
        for name, module in layer.named_modules():
            if name and (kinds[number], type(module)) not in seen:
                seen[kinds[number], type(module)] = _found(module, config, number)
        found = {name: seen[kinds[number], type(module)] for name, module in layer.named_modules() if name}
        if mixers := _put_seams(layer, {name: x for name, x in found.items() if x is not None}):
            parent, _, child = path.rpartition(".")
            cast(nn.Module, base.get_submodule(parent))._modules[child] = StatefulLayer(layer, mixers)
        else:
            unknown.append(number)
    if unknown:
        raise ValueError(
            f"model type {base.config.model_type!r}: its layers {unknown} are {sorted({kinds[i] for i in unknown})}, "
            "and none of their modules fills transformers' cache with states: fppo cannot keep the states of rows "
            "separate; take a model of another family"
        )
    return tuple(numbers)


def _put_seams(layer: nn.Module, found: Mapping[str, Found]) -> list[StateSeam]:
    """Replace by seams the innermost of a layer's modules that fill a cache; `found` has all of them, by path."""
    seams = []
    for name, each in found.items():
        if not any(other.startswith(f"{name}.") for other in found):
            parent, _, child = name.rpartition(".")
            modules = layer.get_submodule(parent)._modules
            seam = modules[child] = StateSeam(cast(nn.Module, modules[child]), each)
            seams.append(seam)
    return seams


@torch.no_grad()
def _found(module: nn.Module, config: PreTrainedConfig, number: int) -> Found | None:
    """How a module on meta uses a model's cache of layer `number`: the argument that takes the cache, found by passing
    one as each argument in turn, and the size of the recurrent state that it gets. None for a module that leaves every
    cache empty."""
    for name in list(inspect.signature(module.forward).parameters)[1:]:  # its wrappers may know older names
        cache = DynamicCache(config=config)
        hidden = torch.zeros(1, _TOKENS, config.hidden_size, device="meta")
        try:
            module(hidden, **{name: cache})
        except Exception:  # a module may raise any exception for a cache as another argument
            continue
        conv, recurrent = (list(getattr(cache.layers[number], kept).values()) for kept in KEPT)
        if any(x is not None for x in (*conv, *recurrent)):
            return Found(name, sum(x.numel() for x in recurrent if x is not None))
    return None


def state_sizes(skeleton: PreTrainedModel) -> list[int]:
    """The size of each mixer's recurrent states for one row, in numbers."""
    return [x._found.numbers for x in skeleton.modules() if isinstance(x, StateSeam)]


def check_decodes(skeleton: PreTrainedModel) -> None:
    """Raise ValueError for mixers whose transformers code for one more token differs from that for a whole row."""
    for mixer in skeleton.modules():
        low, high = getattr(mixer, "time_step_limit", None) or (0.0, math.inf)
        if isinstance(mixer, StateSeam) and (low > _NO_STEP or high < math.inf):
            raise ValueError(
                f"model type {skeleton.config.model_type!r} keeps the time steps of its states within [{low}, {high}] "
                "in a pass over rows, but not in transformers' code for one more token: the embedded engine would "
                "sample from another model; take the vLLM engine, or a config without the limit (time_step_min = "
                f"{_NO_STEP} in nemotron_h, time_step_limit = [0, inf] in others)"
            )


def stateful_layers(config: PreTrainedConfig) -> list[int]:
    """The indices of the layers for which transformers' cache of a model keeps recurrent states.

    Raises ValueError for a model with kinds of layers unknown to the cache.
    """
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as error:
        raise ValueError(
            f"model type {config.model_type!r} has layers of kind {error}, which transformers' cache does not know"
        ) from error
    return [number for number, layer in enumerate(layers) if all(hasattr(layer, kept) for kept in KEPT)]


def check_rows_whole(config: PreTrainedConfig, sizes: Mapping[str, int]) -> None:
    """Raise ValueError for a model with recurrent states on axes that cut rows or heads; `sizes` by axis."""
    axes = [f"a {name} axis of {sizes[name]} ranks" for name in _CUTTING if sizes.get(name, 1) > 1]
    if axes and (layers := stateful_layers(config)):
        raise ValueError(
            f"fppo cannot run model type {config.model_type!r} on {' and '.join(axes)}: its layers {layers} carry "
            "states along rows, and fppo keeps these whole; give the ranks to shard or replicate"
        )


def has_attention(config: PreTrainedConfig) -> bool:
    """Whether any layer has attention, according to the config."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or not set(kinds) <= WITHOUT_ATTENTION


def slides_along(kind: str) -> bool:
    """Whether the attention of a layer of this kind has a sliding window."""
    return kind in ("sliding_attention", "hybrid_sliding")


def without_tokens(config: PreTrainedConfig) -> set[int]:
    """The indices of the layers in which tokens do not affect each other, by attention or by a recurrent state."""
    kinds = getattr(config, "layer_types", None) or ()
    return {number for number, kind in enumerate(kinds) if kind in ALONE}
