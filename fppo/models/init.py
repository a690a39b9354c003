"""Initialise parameters."""

from __future__ import annotations

from functools import partial

import attrs
import torch

from fppo.key import Key
from fppo.models.model import (
    BUILDING,
    SCORE_BIAS,
    SCORE_WEIGHT,
    Model,
    Params,
    build,
    causal_lm,
    named_state,
    state_dtype,
)


def init_params(model: Model, key: Key, dtype: torch.dtype = torch.float32) -> Params:
    """Parameters as transformers initialises this model, on the CPU, drawn from `key` alone; those of a value head as
    `init_value_head` draws them."""
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(key.fold("init").seed & ((1 << 63) - 1))
        module = causal_lm(model.whole_config, "cpu", trust_remote_code=model.trust_remote_code)
    named, kind = named_state(module), partial(state_dtype, model, dtype=dtype)
    params = {name: named[name].detach().to(kind(name)) for name in model.whole_shapes if name in named}
    return params | (init_value_head(model, key, dtype) if model.head == "value" else {})


def init_value_head(model: Model, key: Key, dtype: torch.dtype = torch.float32) -> Params:
    """A value head: weight [K, H] normal with the config's initializer_range, bias [K] zero."""
    shape = model.whole_shapes[SCORE_WEIGHT]
    std = getattr(model.config, "initializer_range", None) or 0.02
    weight = torch.randn(shape, generator=key.fold("score").generator(), dtype=torch.float64) * std
    return {SCORE_WEIGHT: weight.to(dtype), SCORE_BIAS: torch.zeros(model.whole_shapes[SCORE_BIAS], dtype=dtype)}


def as_critic(model: Model, params: Params, key: Key, *, outputs: int = 1) -> tuple[Model, Params]:
    """A critic from a language model: a copy of its layers with a fresh value head of `outputs` numbers."""
    critic = build(
        model.whole_config,
        "value",
        outputs=outputs,
        compute_dtype=model.compute_dtype,
        checkpoint_layers=model.checkpoint_layers,
        trust_remote_code=model.trust_remote_code,
    )
    how = {"compile_layers": model.compile_layers, "mlp_slice_tokens": model.mlp_slice_tokens}
    critic = attrs.evolve(critic, **how, vision=model.vision)
    copied = {name: params[name].clone() for name in critic.shapes if name in params}
    return critic, copied | init_value_head(critic, key, next(iter(params.values())).dtype)
