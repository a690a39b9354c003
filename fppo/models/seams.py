"""The two seams of a skeleton, which stand in for the model's code: the application of a layer, and attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

ATTENTION = "fppo"


class AttentionLayer(NamedTuple):
    """The layer's number, and its attention's arguments besides query, key and value; `window` in tokens, `sinks`
    [Hq]."""

    number: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def numbers(self) -> dict[str, Any]:
        """The keywords of a kernel for attention in decoding."""
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}


class Attend(Protocol):
    """Attention [B, S, Hq, Dv] of query [B, S, Hq, D], key [B, S, Hkv, D] and value [B, S, Hkv, Dv].

    The inputs are the projections of this call's tokens, after rotation; a packed row has B = 1. The function itself
    holds the visibility of tokens: packed lengths, a padding mask, or its own cache of keys and values. With the
    layer's `window` w a token attends to itself and the w - 1 before it.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor: ...


class Through(Protocol):
    """Wrap layers for one pass, as `routing.Routes` does."""

    def through(self, layer: nn.Module) -> nn.Module: ...


class ApplyLayer(Protocol):
    """Apply layer `index` of a model. The simplest implementation returns `layer(*args, **kwargs)`."""

    def __call__(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...


def take_place(seam: nn.Module, module: nn.Module) -> None:
    """Give a seam the attributes, parameters and children of the module that it replaces."""
    for name, value in vars(module).items():  # a model's loop reads attention_type and the like from its layers
        if not name.startswith("_") and name not in vars(seam):
            setattr(seam, name, value)
    seam._modules, seam._parameters, seam._buffers = module._modules, module._parameters, module._buffers
    seam._non_persistent_buffers_set = module._non_persistent_buffers_set


class Handed:
    """A pass's keywords for the layers of a skeleton whose model does not pass keywords on to them."""

    def __init__(self) -> None:
        self.keywords: dict[str, Any] = {}

    @contextmanager
    def over(self, keywords: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A context in which the layers' seams read `keywords` from here. It yields {}, the keywords with which to call
        the model, so that the layers do not get the same ones twice."""
        before, self.keywords = self.keywords, keywords
        try:
            yield {}
        finally:
            self.keywords = before


class LayerSeam(nn.Module):
    """Replaces a decoder layer under its parameter names, and lets the caller apply the layer."""

    def __init__(self, index: int, layer: nn.Module, handed: Handed | None = None) -> None:
        super().__init__()
        take_place(self, layer)
        self._seam = (index, layer)  # in a tuple, the layer is no child
        self.handed = handed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._applied(*args, **({} if self.handed is None else self.handed.keywords), **kwargs)

    def _applied(
        self, *args: Any, apply_layer: ApplyLayer | None = None, routes: Through | None = None, **kwargs: Any
    ) -> Any:
        index, layer = self._seam
        layer = layer if routes is None else routes.through(layer)
        return layer(*args, **kwargs) if apply_layer is None else apply_layer(index, layer, args, kwargs)


def attention_seam(  # called by transformers  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    attend: Attend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with transformers' signature, for query [B, Hq, S, D], computed by `attend`."""
    name = type(module).__name__
    if attend is None:
        raise ValueError(f"{name} does not pass keyword arguments on to its attention: fppo cannot run this model")
    if position_bias is not None or attention_mask is not None or not getattr(module, "is_causal", True):
        raise ValueError(f"{name} is not plain causal self-attention (position bias, own mask): fppo cannot run it")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = AttentionLayer(module.layer_idx, scale, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    return attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), layer), None


# Registered without a mask function, so transformers builds no masks and does not look for packed sequences.
AttentionInterface.register(ATTENTION, attention_seam)


def find_layers(base: PreTrainedModel) -> tuple[str, ...]:
    """The paths of the decoder layers in `base`, in order. Raises ValueError unless it has exactly one list of them."""
    count = base.config.num_hidden_layers
    lists = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and not any(part.isdigit() for part in name.split("."))
    ]
    if len(lists) != 1:
        raise ValueError(
            f"model type {base.config.model_type!r}: expected one list of {count} decoder layers in "
            f"{type(base).__name__}, found {lists}; fppo runs decoder-only language models"
        )
    return tuple(f"{lists[0]}.{i}" for i in range(count))


def put_seams(base: PreTrainedModel, layers: tuple[str, ...], *, handing: bool = False) -> None:
    """Replace each of `layers` in `base` by a seam. With `handing` the seams read a pass's keywords from a `Handed`, as
    the model may not pass them on to its layers."""
    handed = Handed() if handing else None
    parent = base.get_submodule(layers[0].rpartition(".")[0])
    for i, layer in enumerate(list(parent.children())):
        parent[i] = LayerSeam(i, layer, handed)  # type: ignore[index]
