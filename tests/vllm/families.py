"""Tiny random models that vLLM's CPU kernels run: heads are 32 wide."""

from __future__ import annotations

from typing import Any

import torch
from transformers import FalconH1Config, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from fppo import models
from fppo.key import Key
from fppo.models.model import Model, Params

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE: dict[str, Any] = COMMON | {"head_dim": 32}  # where it is no parameter of its own

CONFIGS = {
    "llama": LlamaConfig(**COMMON, attention_bias=True, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **WIDE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "falcon_h1": FalconH1Config(
        **WIDE,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=16,
    ),
    "gpt2": GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2),
}


def make(name: str, *, seed: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Model, Params]:
    """The model with random parameters, so spread that a wrong one shows."""
    model = models.build(CONFIGS[name])
    generator = Key(seed).fold(name).generator()
    params = models.init_params(model, Key(seed))
    return model, {key: (x + 0.1 * torch.randn(x.shape, generator=generator)).to(dtype) for key, x in params.items()}
