"""Tiny random models whose layers are not all attention."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.models.families import COMMON

KINDS = ["linear_attention", "full_attention"]
DELTA: dict[str, Any] = COMMON | {
    "head_dim": 8,
    "layer_types": KINDS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 5,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
PURE: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 5, "conv_kernel": 3}

HYBRIDS: dict[str, PreTrainedConfig] = {
    "qwen3_5_text": Qwen3_5TextConfig(**DELTA, tie_word_embeddings=False),
    "qwen3_next": Qwen3NextConfig(
        **DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=12
    ),
    "olmo_hybrid": OlmoHybridConfig(**DELTA),
    "bamba": BambaConfig(**COMMON | MAMBA, attn_layer_indices=[1], mamba_proj_bias=True),
    "falcon_h1": FalconH1Config(**COMMON | MAMBA, mamba_d_ssm=32, head_dim=4),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **COMMON | MAMBA,
        layer_types=KINDS,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=12,
        position_embedding_type="rope",
        logits_scaling=3.0,
    ),
    "nemotron_h": NemotronHConfig(
        **COMMON | {"num_hidden_layers": 3},
        layers_block_type=["mamba", "moe", "attention"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=5,
        n_groups=2,
        conv_kernel=3,
        chunk_size=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=8,
        time_step_min=1e-12,  # else transformers decodes another model
    ),
    "jamba": JambaConfig(
        **COMMON,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=5,
        mamba_d_conv=3,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "lfm2": Lfm2Config(
        **COMMON, layer_types=["conv", "full_attention"], conv_L_cache=3, block_auto_adjust_ff_dim=False
    ),
    "mamba2": Mamba2Config(**PURE, num_heads=4, head_dim=8, n_groups=2, chunk_size=4),
    "mamba": MambaConfig(**PURE, time_step_rank=3),
    "falcon_mamba": FalconMambaConfig(**PURE, time_step_rank=3),
}

FAST = ("qwen3_5_text", "bamba", "lfm2")  # a gated delta rule, Mamba 2 beside attention, and short convolutions
# in float64 to the last digits; the rope of olmo_hybrid is in float32
EXACT = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in HYBRIDS if name != "olmo_hybrid"
]
