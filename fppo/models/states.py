"""The seams of mixers that carry states along a row: linear attention, gated delta rules, Mamba, short convolutions.

What such a mixer makes of a token depends on the tokens before it through a state, not by attention. A seam in its
place hands the tokens to whoever knows their rows (`rows.RowWise`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fppo.models.rows import RowWise
from fppo.models.seams import Attend, take_place

KINDS = frozenset({"linear_attention", "conv", "hybrid"})  # layers that transformers' configs say to have a state
WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "moe"})
ALONE = frozenset({"mlp", "moe"})  # layers in which no token meets another
_NO_STEP = 1e-9  # below which a limit changes nothing that float32 could tell
# what the sizes of a state are called: of gated delta rules, and of Mamba
_SIZES = (("num_v_heads", "head_k_dim", "head_v_dim"), ("intermediate_size", "ssm_state_size"))
_CUTTING = ("sequence", "context", "tensor")  # axes
_CACHES = ("cache_params", "past_key_values")  # what mixers call the cache of their states


class StateSeam(nn.Module):
    """Stands in a mixer's place; a `StatefulLayer` around it says who knows the rows."""

    def __init__(self, mixer: nn.Module, cache: str) -> None:
        super().__init__()
        take_place(self, mixer)
        self._inner = (mixer,)  # in a tuple, it is no child
        self._cache = cache
        self._rows: Attend | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        (mixer,), rows = self._inner, self._rows
        if not isinstance(rows, RowWise):
            raise ValueError(
                f"{type(mixer).__name__} carries states along rows, and `attend` does not know them: give one of "
                "models.packed_attention or models.padded_attention"
            )
        return rows.carry(lambda hidden, states: mixer(hidden, **{self._cache: states}), hidden_states)


class StatefulLayer(nn.Module):
    """Stands in a layer's place and tells its mixers the rows of the pass, also where that computes the layer again."""

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
    """Puts seams in the places of the mixers of `base`, and gives the numbers of the layers that have one.

    Raises ValueError for layers whose config says that they carry a state, and in which there is no mixer that keeps
    it in transformers' cache.
    """
    numbers, unknown = [], []
    kinds: list[str] = list(getattr(base.config.get_text_config(), "layer_types", None) or [""] * len(layers))
    for number, path in enumerate(layers):
        layer = base.get_submodule(path)
        mixers = [_seam(layer, name, cache) for name, cache in _mixers(layer)]
        if mixers:
            parent, _, child = path.rpartition(".")
            cast(nn.Module, base.get_submodule(parent))._modules[child] = StatefulLayer(layer, mixers)
            numbers.append(number)
        elif kinds[number] in KINDS:
            unknown.append(number)
    if unknown:
        raise ValueError(
            f"model type {base.config.model_type!r}: its layers {unknown} are {sorted({kinds[i] for i in unknown})}, "
            "and their code does not keep its states in transformers' cache: fppo cannot keep those of rows apart; "
            "take a model of another family"
        )
    return tuple(numbers)


def _mixers(layer: nn.Module) -> list[tuple[str, str]]:
    """The paths of the mixers in a layer, and what each calls the cache: modules with a convolution over time."""
    found = []
    for name, module in layer.named_modules():
        cache = next((x for x in _CACHES if x in inspect.signature(module.forward).parameters), None)
        if name and cache is not None and any(isinstance(child, nn.Conv1d) for child in module.children()):
            found.append((name, cache))
    return found


def _seam(layer: nn.Module, name: str, cache: str) -> StateSeam:
    parent, _, child = name.rpartition(".")
    modules = layer.get_submodule(parent)._modules
    seam = StateSeam(cast(nn.Module, modules[child]), cache)
    modules[child] = seam
    return seam


def state_sizes(skeleton: PreTrainedModel) -> list[int]:
    """How many numbers the recurrent state of a mixer has, of those mixers whose form is known."""
    mixers = [x for x in skeleton.modules() if isinstance(x, StateSeam)]
    sizes = [[getattr(mixer, name, 0) for name in names] for mixer in mixers for names in _SIZES]
    return [math.prod(size) for size in sizes]


def check_decodes(skeleton: PreTrainedModel) -> None:
    """Raises ValueError for mixers that transformers' code computes otherwise for one more token than for a row."""
    for mixer in skeleton.modules():
        low, high = getattr(mixer, "time_step_limit", None) or (0.0, math.inf)
        if isinstance(mixer, StateSeam) and (low > _NO_STEP or high < math.inf):
            raise ValueError(
                f"model type {skeleton.config.model_type!r} keeps the time steps of its states within [{low}, {high}] "
                "in a pass over rows, and not in transformers' code of one more token: the embedded engine would "
                "sample from another model; take the vLLM engine, or a config without the limit (time_step_min = "
                f"{_NO_STEP} in nemotron_h, time_step_limit = [0, inf] in others)"
            )


def stateful_layers(config: PreTrainedConfig) -> list[int]:
    """The numbers of the layers that carry a state along a row, as the config says."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return [number for number, kind in enumerate(kinds) if kind in KINDS]


def check_rows_whole(config: PreTrainedConfig, sizes: Mapping[str, int]) -> None:
    """Raises ValueError for a model whose layers carry states, on axes of these sizes that cut rows or heads."""
    axes = [f"a {name} axis of {sizes[name]} ranks" for name in _CUTTING if sizes.get(name, 1) > 1]
    if axes and (layers := stateful_layers(config)):
        raise ValueError(
            f"fppo cannot run model type {config.model_type!r} on {' and '.join(axes)}: its layers {layers} carry "
            "states along rows, and fppo keeps these whole; give the ranks to shard or replicate"
        )


def has_attention(config: PreTrainedConfig) -> bool:
    """Whether any layer has attention, as the config says."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or not set(kinds) <= WITHOUT_ATTENTION


def without_tokens(config: PreTrainedConfig) -> set[int]:
    """The numbers of the layers in which no token meets another."""
    kinds = getattr(config, "layer_types", None) or ()
    return {number for number, kind in enumerate(kinds) if kind in ALONE}
