"""What turns hidden states into logits or values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fppo.models.model import SCORE_BIAS, SCORE_WEIGHT, Model, Params, causal_lm
from fppo.models.run import hidden_states
from fppo.models.seams import padded_attention


class Head(NamedTuple):
    """logits = softcap * tanh((hidden @ weight.T + bias) * scale / softcap), without the tanh if softcap is None."""

    weight: Tensor  # [V, H], or [1, H] of a value head
    bias: Tensor | None = None  # [V] or [1]
    softcap: float | None = None
    scale: float = 1.0


def output_head(model: Model, params: Params) -> Head:
    """The model's head in `params`: the vocabulary head (tied to the embeddings or not) or the value head.

    The vocabulary head's weight is in the compute dtype, the value head stays as it is.
    """
    if model.head == "value":
        return Head(params[SCORE_WEIGHT], params[SCORE_BIAS])
    name = next((n for n in ("lm_head.weight", "embed_out.weight", "output.weight") if n in model.shapes), None)
    if name is None:
        name = embedding_name(model)
    bias = name.replace("weight", "bias")
    config = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    weight, offset = params[name], params.get(bias)
    if model.compute_dtype is not None:
        weight = weight.to(model.compute_dtype)
    return Head(weight, offset, getattr(config, "final_logit_softcapping", None), scale)


def embedding_name(model: Model) -> str:
    """The parameter name of the token embeddings."""
    embeddings = model.skeleton.get_input_embeddings()
    path = next(path for path, module in model.skeleton.named_modules() if module is embeddings)
    return f"{model.prefix}{path}.weight"


@torch.no_grad()
def check_head(model: Model, params: Params, *, tokens: int = 4) -> None:
    """Holds hidden states and head against the plain Hugging Face forward on a few tokens of float32 parameters.

    Raises ValueError, naming the model type, if the logits differ. Nothing is copied. A value head
    has nothing to be held against.
    """
    if model.head == "value":
        return
    device = next(iter(params.values())).device
    full = {name: x.detach() for name, x in params.items()}
    row = torch.arange(1, tokens + 1, device=device)[None] % model.config.vocab_size
    attend = padded_attention(torch.ones_like(row, dtype=torch.bool))
    positions = torch.arange(tokens, device=device)[None]
    head = output_head(model, full)
    hidden = hidden_states(model, full, row, positions, attend=attend).to(head.weight.dtype)
    logits = (
        hidden @ head.weight.T * head.scale if head.bias is None else (hidden @ head.weight.T + head.bias) * head.scale
    )
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    module = causal_lm(model.config, "meta", trust_remote_code=model.trust_remote_code)
    module.config._attn_implementation = "eager"
    buffers = {model.prefix + name: x.to(device) for name, x in model.constants.items()}
    expected = torch.func.functional_call(
        module, {**full, **buffers}, (), {"input_ids": row, "use_cache": False}, tie_weights=True
    ).logits
    difference = (logits - expected).abs().max().item()
    if not difference <= 1e-3 * max(1.0, expected.abs().max().item()):
        raise ValueError(
            f"model type {model.config.model_type!r}: fppo's logits differ from transformers' by {difference:.2g}; "
            "its head or attention does something fppo does not know"
        )
