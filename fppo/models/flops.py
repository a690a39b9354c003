"""Floating-point operations of a pass, computed from shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from fppo.models.heads import embedding_name
from fppo.models.model import SCORE_WEIGHT, Model
from fppo.models.states import WITHOUT_ATTENTION, slides_along, state_sizes

STATE = 6.0  # FLOPs per number of a recurrent state and token: decay, add, read

# dense bfloat16 peaks in FLOP/s, from the makers' data sheets
PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "H200": 9.89e14,
    "GH200": 9.89e14,
    "H800": 9.89e14,
    "H20": 1.48e14,
    "A100": 3.12e14,
    "A800": 3.12e14,
    "A40": 1.497e14,
    "A10G": 7.0e13,
    "A10": 1.25e14,
    "L40S": 3.62e14,
    "L40": 1.81e14,
    "L20": 1.195e14,
    "L4": 1.21e14,
    "MI300X": 1.307e15,
}


def forward_flops(
    model: Model, lengths: Sequence[int], *, head_tokens: int | None = None, shared: Sequence[int] = ()
) -> float:
    """FLOPs of one forward pass over packed sequences of these lengths, 2 for each multiply-add.

    Counted are matrix products of every token with the layers' weights, of `head_tokens` tokens (all by default) with
    the head, and the scores and sums of causal attention on visible pairs. Only active experts count. Updates of
    recurrent states are estimated as `STATE` per number of a state; chunked code needs more. `shared` are the lengths
    of prefixes that are computed for another sequence: only the tokens after them count.
    """
    tokens = sum(lengths) - sum(shared)
    head_tokens = tokens if head_tokens is None else head_tokens
    return (
        2.0 * sum(layer_weights(model)) * tokens
        + 2.0 * head_weights(model) * head_tokens
        + attention_flops(model, lengths)
        - attention_flops(model, shared)
        + STATE * sum(state_sizes(model.skeleton)) * tokens
    )


def attention_flops(model: Model, lengths: Sequence[int]) -> float:
    """FLOPs of attention's scores and sums in one forward pass over packed sequences of these lengths."""
    return sum(_attention(model, layer, lengths) for layer in range(len(model.layers)))


def train_flops(
    model: Model, lengths: Sequence[int], *, head_tokens: int | None = None, shared: Sequence[int] = ()
) -> float:
    """FLOPs of forward and backward pass, with `forward_flops`'s arguments: three times the forward's, without the
    gradients of frozen weights. Recomputation does not count as model FLOPs."""
    every = 3.0 * forward_flops(model, lengths, head_tokens=head_tokens, shared=shared)
    tokens = sum(lengths) - sum(shared)
    if model.frozen is None:
        return every
    head = 0 if model.head == "value" else head_weights(model) * (tokens if head_tokens is None else head_tokens)
    return every - 2.0 * (sum(layer_weights(model.plain)) * tokens + head)


def peak_flops(device: str | torch.device) -> float | None:
    """The dense bfloat16 peak of a device, or of a name as torch.cuda.get_device_name gives it; None if unknown."""
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return None
        device = torch.cuda.get_device_name(device)
    for name, peak in PEAKS.items():
        words = ".*".join(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])" for word in name.split())
        if re.search(words, device, re.IGNORECASE):
            return peak
    return None


def mfu(flops: float, seconds: float, device: str | torch.device, *, devices: int = 1) -> float | None:
    """Model FLOPs utilisation: `flops` in `seconds` as a share of the devices' peak; None if the peak is unknown."""
    peak = peak_flops(device)
    return None if peak is None else flops / (seconds * peak * devices)


def layer_weights(model: Model) -> list[float]:
    """The number of weights multiplied with each token, by layer."""
    config = model.config
    experts = next((n for k in ("num_experts", "num_local_experts") if (n := getattr(config, k, None))), 0)
    active = getattr(config, "num_experts_per_tok", None) or experts
    totals = [0.0] * len(model.layers)
    for name, shape in model.whole_shapes.items():
        number = model.layer_of(name)
        if number is not None and len(shape) > 1 and not name.endswith(("bias", "A_log")):
            routed = len(shape) == 3 and shape[0] == experts
            totals[number] += shape.numel() * (active / experts if routed else 1.0)
    return totals


def head_weights(model: Model) -> int:
    """The number of weights multiplied with each token in the head."""
    name = SCORE_WEIGHT if model.head == "value" else embedding_name(model)  # the vocabulary head has that shape too
    return model.whole_shapes[name].numel()


def _attention(model: Model, layer: int, lengths: Sequence[int]) -> float:
    """FLOPs of a layer's attention scores and weighted sums: for each, 2 per feature and visible (query, key) pair."""
    config, kinds = model.config, getattr(model.config, "layer_types", None)
    if kinds is not None and kinds[layer] in WITHOUT_ATTENTION:
        return 0.0
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 4.0 * width * sum(_visible(n, _window(model, layer)) for n in lengths)


def _window(model: Model, layer: int) -> int | None:
    """The attention window of a layer in tokens; None: all tokens before."""
    kinds = getattr(model.config, "layer_types", None)
    slides = kinds is None or slides_along(kinds[layer])
    return getattr(model.config, "sliding_window", None) if slides else None


def window_of_all(model: Model) -> int | None:
    """The common window of all layers, in tokens; None if some layers have none, or windows differ."""
    windows = {_window(model, layer) for layer in range(len(model.layers))}
    return windows.pop() if len(windows) == 1 else None


def _visible(length: int, window: int | None) -> float:
    """The number of visible (query, key) pairs in a causal sequence."""
    if window is None or window >= length:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + (length - window) * window
