"""The narrower model of the same family that one rank of a tensor axis runs, found without a sharding plan.

Heads and inner widths are divided in the config. A parameter is cut along the dimension in which the narrower model's
is smaller.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from typing import Any, cast

import attrs
import torch
from torch import nn
from transformers import PreTrainedConfig

from fppo.models.model import Model
from fppo.models.vision import takes_images
from fppo.runtime.layout import Cut

_INNER = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "dense_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "ffn_hidden_size",
)
_PROJECTIONS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}  # the weights' dimension of heads
_QKV = re.compile(r"\bqkv_proj\.(weight|bias)$")
_GATE_UP = re.compile(r"\bgate_up_proj(\.weight|\.bias|_bias)?$")
_INTERLEAVED = ("gpt_oss",)  # whose gate and up projections alternate


def narrow(whole: PreTrainedConfig, ranks: int) -> PreTrainedConfig:
    """The config of the model that one of `ranks` tensor ranks runs; of a model of images and text only the text model
    is narrower. Raises ValueError naming all sizes that the ranks do not divide, and the numbers of ranks that fit."""
    whole = copy.deepcopy(whole)
    config = whole.get_text_config(decoder=True) if takes_images(whole) else whole
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = {name: getattr(config, name, None) for name in ("num_attention_heads", *_INNER)}
    counts = {name: size for name, size in sizes.items() if type(size) is int}
    wrong = [f"{name} = {size}" for name, size in counts.items() if size % ranks]
    if key_heads % ranks and ranks % key_heads:
        wrong.append(f"num_key_value_heads = {key_heads} (which may also divide the ranks)")
    if wrong:
        divided = math.gcd(*counts.values())
        fitting = [n for n in range(1, heads + 1) if divided % n == 0 and 0 in (key_heads % n, n % key_heads)]
        raise ValueError(
            f"a tensor axis of {ranks} ranks does not divide the model's {', '.join(wrong)}; give one of {fitting}"
        )
    for name, size in counts.items():
        setattr(config, name, size // ranks)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = max(1, key_heads // ranks)
    return whole


def with_whole_heads(narrower: Model, model: Model) -> Model:
    """A narrower model with heads as wide as the whole model's, also where attention's code ignores the config and
    divides the hidden size by the number of heads, as Qwen2-VL's does."""
    shapes = dict(narrower.shapes)
    for layer in model.layers:
        for path, module in narrower.skeleton.get_submodule(layer).named_modules(prefix=layer):
            block, whole = cast(Any, module), cast(Any, model.skeleton.get_submodule(path))
            wrong, width = getattr(block, "head_dim", None), getattr(whole, "head_dim", None)
            if wrong == width or not all(isinstance(getattr(block, name, None), nn.Linear) for name in _PROJECTIONS):
                continue
            block.head_dim, block.scaling = width, whole.scaling
            for name, dim in _PROJECTIONS.items():
                linear = getattr(block, name)
                for of, x in list(linear.named_parameters()):
                    shape = list(x.shape)
                    if dim < len(shape):
                        shape[dim] = shape[dim] // wrong * width
                    setattr(linear, of, nn.Parameter(x.new_empty(shape), requires_grad=False))
                    shapes[f"{narrower.prefix}{path}.{name}.{of}"] = torch.Size(shape)
                linear.out_features, linear.in_features = linear.weight.shape
    return attrs.evolve(narrower, shapes=shapes)


def find_cuts(
    whole: Mapping[str, torch.Size], narrower: Mapping[str, torch.Size], config: PreTrainedConfig
) -> dict[str, Cut]:
    """The cut of each parameter, from its shape in the whole model (of `config`) and in the narrower one.

    Raises ValueError for a parameter that is not cut into equal parts of one dimension.
    """
    cuts = {}
    for name, shape in whole.items():
        other = narrower.get(name)
        if other is None or len(other) != len(shape):
            raise ValueError(f"{name} is no parameter of the narrower model, or has other dimensions there")
        dims = [d for d in range(len(shape)) if shape[d] != other[d]]
        if len(dims) > 1 or any(shape[d] % other[d] for d in dims):
            raise ValueError(f"{name} of {list(shape)} is {list(other)} in the narrower model, which is no equal part")
        if dims:
            (dim,) = dims
            cuts[name] = Cut(dim, shape[dim] // other[dim], _segments(name, shape[dim], config))
    return cuts


def _segments(name: str, size: int, config: PreTrainedConfig) -> tuple[int, ...]:
    """The sizes of the parts of a dimension of `size` in which a parameter merges several projections (queries, keys
    and values; gate and up); one part if it merges none."""
    if _QKV.search(name):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries = config.num_attention_heads * width
        return (queries, (size - queries) // 2, (size - queries) // 2)
    if _GATE_UP.search(name) and config.model_type not in _INTERLEAVED:
        return (size // 2, size // 2)
    return (size,)
