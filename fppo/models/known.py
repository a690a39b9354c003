"""Decoder layers of Llama's kind, whose known code runs on other kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fppo.models.regions import BlockSeam
from fppo.models.seams import LayerSeam, attention_seam, take_place

# x + attention(norm(x)), then x + mlp(norm(x)), with rotary positions; other classes keep their own code
KINDS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3"))


class KnownLayer(nn.Module):
    """Replaces a layer and computes the same with kernels: `rotary` rotates the heads, and `add_rms_norm` (None: the
    layer's own code) adds the residual after attention and normalises the sum."""

    def __init__(
        self,
        layer: nn.Module,
        rotary: Callable[..., tuple[Tensor, Tensor]],
        add_rms_norm: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> None:
        super().__init__()
        take_place(self, layer)
        self._rotary, self._add_rms_norm = rotary, add_rms_norm

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:  # transformers' call
        layer: Any = self
        block, norm = layer.self_attn, layer.post_attention_layernorm
        normed = layer.input_layernorm(hidden_states)
        region = block.region if isinstance(block, BlockSeam) else None
        mixed = self._attention(block, normed if region is None else region.enter(normed), position_embeddings, kwargs)
        mixed = mixed if region is None else region.leave(mixed)
        if self._add_rms_norm is None:
            total = hidden_states + mixed
            normed = norm(total)
        else:
            normed, total = self._add_rms_norm(mixed, hidden_states, norm.weight, eps=norm.variance_epsilon)
        return total + layer.mlp(normed)

    def _attention(self, block: Any, x: Tensor, angles: tuple[Tensor, Tensor], kwargs: dict[str, Any]) -> Tensor:
        attention: Any = block._inner[0] if isinstance(block, BlockSeam) else block
        query, key, value = (fn(x).unflatten(-1, (-1, attention.head_dim)) for fn in _products(attention))
        query, key = self._rotary(_normed(attention, "q_norm", query), _normed(attention, "k_norm", key), *angles)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, attention_seam)
        out, _ = attend(
            attention,
            *(heads.transpose(1, 2) for heads in (query, key, value)),
            None,
            scaling=attention.scaling,
            sliding_window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
            attend=kwargs.get("attend"),
        )
        return attention.o_proj(out.flatten(-2))


def _products(attention: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _normed(attention: Any, name: str, heads: Tensor) -> Tensor:
    norm = getattr(attention, name, None)
    return heads if norm is None else norm(heads)


def know_layers(
    skeleton: PreTrainedModel,
    rotary: Callable[..., tuple[Tensor, Tensor]],
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] | None,
) -> int:
    """Run the layers of Llama's kind in a skeleton with these kernels, and count them."""
    known = known_layers(skeleton)
    for seam in known:
        index, layer = seam._seam
        seam._seam = index, KnownLayer(layer, rotary, add_rms_norm)
    return len(known)


def known_layers(skeleton: PreTrainedModel) -> list[LayerSeam]:
    """The seams of those layers of a skeleton that are of Llama's kind."""
    seams = [module for module in skeleton.modules() if isinstance(module, LayerSeam)]
    return [seam for seam in seams if type(seam._seam[1]).__module__ in KINDS]
