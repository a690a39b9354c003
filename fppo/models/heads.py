"""Output heads: from hidden states to logits or values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fppo.models.adapted import FACTORS, Parts, merged_weight
from fppo.models.logits import LogitForm
from fppo.models.model import SCORE_BIAS, SCORE_WEIGHT, Model, Params, pass_dtype
from fppo_kernels.linear.plain import plain

VOCABULARY_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


class Head(NamedTuple):
    """logits = softcap * tanh((hidden @ weight.T + bias) * scale / softcap), without the tanh if softcap is None."""

    weight: Tensor  # [V, H], or [K, H] of a value head
    bias: Tensor | None = None  # [V] or [K]
    softcap: float | None = None
    scale: float = 1.0


def output_head(model: Model, params: Params) -> Head:
    """The model's head in `params`: the vocabulary head (tied to the embeddings or not) or the value head.

    The vocabulary head's weight is cast to the compute dtype, and an adapted one merged, since the kernels of log-probs
    take one tensor; the value head keeps its dtype.
    """
    params = model.joined(params)
    if model.head == "value":
        return Head(params[SCORE_WEIGHT], params[SCORE_BIAS])
    name, bias = vocabulary_head(model)
    weight, offset = params[name], params.get(bias)
    if model.frozen is not None and name in model.frozen.places:
        a, b = (params[name + factor] for factor in FACTORS)
        weight = merged_weight(Parts(weight, a, b, model.frozen.lora.scale, model.frozen.places[name]))
    return Head(weight.to(pass_dtype(model, name, weight.dtype)), offset, *model.logit_form)


def vocabulary_head(model: Model) -> tuple[str, str]:
    """The names of the vocabulary head's weight (the embeddings if tied), and of its bias, which may not exist."""
    name = next((n for n in VOCABULARY_HEADS if n in model.all_shapes), None)
    name = name or embedding_name(model)
    return name, name.replace("weight", "bias")


def hidden_width(model: Model) -> int:
    """The width H of the hidden states that the vocabulary head reads, before any axis cuts it."""
    name = next((n for n in VOCABULARY_HEADS if n in model.whole_shapes), None)
    return model.whole_shapes[name or embedding_name(model)][1]


def embedding_name(model: Model) -> str:
    """The parameter name of the token embeddings."""
    embeddings = model.skeleton.get_input_embeddings()
    path = next(path for path, module in model.skeleton.named_modules() if module is embeddings)
    return f"{model.prefix}{path}.weight"


def logits_of(head: Head, hidden: Tensor, linear: Callable[..., Tensor] = plain) -> Tensor:
    """The logits [..., V] of hidden states [..., H], in the head's dtype, by a kernel for linear layers."""
    products = linear(hidden.to(head.weight.dtype), head.weight, head.bias)
    return LogitForm(head.softcap, head.scale)(products)
