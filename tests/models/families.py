"""Tiny random models of many families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OlmoeConfig,
    OpenAIGPTConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    XGLMConfig,
)

from fppo import models
from fppo.key import Key
from fppo.models.model import HeadKind, Model, Params

COMMON: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN3_MOE: dict[str, Any] = COMMON | {"head_dim": 6}  # no parameter of its own

CONFIGS = {
    "llama": LlamaConfig(**COMMON, attention_bias=True, tie_word_embeddings=False, attention_dropout=0.1),
    "llama3-rope": LlamaConfig(
        **COMMON,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=6, tie_word_embeddings=False),
    "mistral": MistralConfig(**COMMON, sliding_window=3),
    "gemma2": Gemma2Config(**COMMON, head_dim=6, sliding_window=3, query_pre_attn_scalar=5),
    "gemma3": Gemma3TextConfig(
        **COMMON,
        head_dim=6,
        sliding_window=3,
        final_logit_softcapping=4.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": Phi3Config(**COMMON, resid_pdrop=0.1),
    "olmo2": Olmo2Config(**COMMON),
    "olmoe": OlmoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2),
    "smollm3": SmolLM3Config(**COMMON, no_rope_layers=[1, 0]),
    "gpt2": GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}),
    "opt": OPTConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=2,
        ffn_dim=24,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        dropout=0.1,
    ),
    "qwen3_moe": Qwen3MoeConfig(**QWEN3_MOE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "gpt_oss": GptOssConfig(
        **COMMON, head_dim=6, num_local_experts=4, num_experts_per_tok=2, sliding_window=3, rope_parameters=ROPE
    ),
    "cohere": CohereConfig(**COMMON, logit_scale=0.25),
    "granite": GraniteConfig(**COMMON, logits_scaling=3.0, embedding_multiplier=2.0),
}

GLM4_MOE: dict[str, Any] = COMMON | {"head_dim": 6, "partial_rotary_factor": 0.5}  # a dense layer, then one of experts

# mixtures of experts beside those above; in the last two a buffer holds the routers' biases
EXPERTS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": Qwen2MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=12
    ),
    "granitemoe": GraniteMoeConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": Glm4MoeConfig(
        **GLM4_MOE,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    ),
    "deepseek_v3": DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
    ),
}


# what makes a family's rope change with the length of a row
LONGROPE = Phi3Config(
    **COMMON | {"max_position_embeddings": 256},
    original_max_position_embeddings=12,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.0],
        "long_factor": [4.0, 9.0],
    },
)
DYNAMIC = LlamaConfig(
    **COMMON | {"max_position_embeddings": 12},
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
)

# families that compute attention in a way of their own
OWN: dict[str, PreTrainedConfig] = {
    "bloom": BloomConfig(vocab_size=31, hidden_size=16, n_layer=2, n_head=4),
    "xglm": XGLMConfig(vocab_size=31, d_model=16, num_layers=2, attention_heads=4, ffn_dim=24),
    "gpt_neo": GPTNeoConfig(
        vocab_size=31, hidden_size=16, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "openai-gpt": OpenAIGPTConfig(vocab_size=31, n_embd=16, n_layer=2, n_head=4, n_positions=64),
    "falcon": FalconConfig(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=4),
    "mpt": MptConfig(vocab_size=31, d_model=16, n_layers=2, n_heads=4, max_seq_len=64),
}


# types that compute attention in code of their own up to transformers 5.23, and through its interface since
CHANGED: dict[str, PreTrainedConfig] = {
    "gptj": GPTJConfig(vocab_size=31, n_embd=16, n_layer=2, n_head=4, rotary_dim=4, n_positions=64),
    "codegen": CodeGenConfig(vocab_size=31, n_embd=32, n_layer=2, n_head=8, rotary_dim=4, n_positions=64),
}


def skip_without_plan(name: str) -> None:
    """Skips a test with Granite's experts where this version of transformers does not say which parameters they are."""
    if name == "granitemoe" and not GraniteMoeConfig.base_model_ep_plan:
        pytest.skip("this version of transformers has no plan of Granite's experts")


def make(
    name: str,
    *,
    config: PreTrainedConfig | None = None,
    head: HeadKind = "lm",
    dtype: torch.dtype = torch.float64,
    **changes,
) -> tuple[Model, Params]:
    """The model with random parameters, large enough that attention patterns matter."""
    model = models.build((CONFIGS | EXPERTS)[name] if config is None else config, head, **changes)
    generator = Key(5).fold(name).generator()

    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.double() + 0.3 * torch.randn(x.shape, generator=generator, dtype=torch.float64)

    return model, {key: spread(x).to(dtype) for key, x in models.init_params(model, Key(3)).items()}


def plain(model: Model, params: Params):
    """transformers' own module with these parameters, in their dtype; eager attention."""
    dtype = next(iter(params.values())).dtype
    module = AutoModelForCausalLM.from_config(model.config, dtype=dtype, attn_implementation="eager").eval()
    module.config._experts_implementation = "eager"
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)  # of routers some are float32 whatever is asked for
    _, unexpected = module.load_state_dict(params, strict=False)
    assert not unexpected
    module.tie_weights()
    return module
