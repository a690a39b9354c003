"""Configs of published checkpoints: what in them differs from the defaults of their types, but for the sizes.

Factors, windows, ropes, norms and biases are what a default config hides: Falcon-H1's `lm_head_multiplier` is 1 by
default and 0.039 in its checkpoints. Sizes follow from a check's small instance, so only their ratios stand here.
"""

from typing import Any, NamedTuple

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
_ROPE_1M = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


class Published(NamedTuple):
    """A checkpoint, and what its config has that differs from its type's default."""

    name: str
    changes: dict[str, Any]


def _part(factor: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}}


PUBLISHED: dict[str, Published] = {
    kind: Published(name, changes)
    for kind, (name, changes) in {
        "apertus": ("swiss-ai/Apertus-8B-Instruct-2509", {"num_key_value_heads": 8}),
        "bamba": ("ibm-ai-platform/Bamba-9B-v2", {"num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27]}),
        "cohere": ("CohereLabs/c4ai-command-r-v01", {"logit_scale": 0.0625, "use_qk_norm": False}),
        "cohere2": ("CohereLabs/c4ai-command-r7b-12-2024", {"logit_scale": 0.25, "sliding_window": 4096}),
        "deepseek_v3": (
            "deepseek-ai/DeepSeek-V3",
            {
                "routed_scaling_factor": 2.5,
                "n_group": 8,
                "topk_group": 4,
                "norm_topk_prob": True,
                "first_k_dense_replace": 3,
            },
        ),
        "ernie4_5": (
            "baidu/ERNIE-4.5-0.3B-PT",
            {"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
        ),
        "exaone4": ("LGAI-EXAONE/EXAONE-4.0-32B", {"sliding_window": 4096, "num_key_value_heads": 8}),
        "falcon_h1": (
            "tiiuae/Falcon-H1-1.5B-Instruct",
            {
                "embedding_multiplier": 5.656854249492381,
                "lm_head_multiplier": 0.0390625,
                "key_multiplier": 0.0625,
                "attention_in_multiplier": 1.0,
                "attention_out_multiplier": 0.234375,
                "ssm_in_multiplier": 0.625,
                "ssm_out_multiplier": 0.11785113019775793,
                "ssm_multipliers": [0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738],
                "mlp_multipliers": [0.4419417382415922, 0.2209708691207961],
                "mamba_rms_norm": False,
            },
        ),
        "gemma": ("google/gemma-2b-it", {"num_key_value_heads": 1, "head_dim": 256}),
        "gemma2": (
            "google/gemma-2-2b-it",
            {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        "gemma3_text": ("google/gemma-3-1b-it", {"query_pre_attn_scalar": 256, "sliding_window": 512, "head_dim": 256}),
        "glm4": ("zai-org/GLM-4-9B-0414", {"num_key_value_heads": 2, "attention_bias": True, "head_dim": 128}),
        "gpt2": ("openai-community/gpt2", {"n_inner": None, "activation_function": "gelu_new"}),
        "gpt_bigcode": (
            "bigcode/gpt_bigcode-santacoder",
            {"activation_function": "gelu_pytorch_tanh"},
        ),
        "gpt_neox": ("EleutherAI/pythia-160m", _part(0.25) | {"use_parallel_residual": True}),
        "gpt_oss": ("openai/gpt-oss-20b", {"sliding_window": 128, "num_key_value_heads": 8, "attention_bias": True}),
        "gptj": ("EleutherAI/gpt-j-6b", {"rotary_dim": 64, "activation_function": "gelu_new"}),
        "codegen": ("Salesforce/codegen-350M-mono", {"rotary_dim": 32, "activation_function": "gelu_new"}),
        "granite": (
            "ibm-granite/granite-3.3-2b-instruct",
            _GRANITE | {"attention_multiplier": 0.015625, "num_key_value_heads": 8, "tie_word_embeddings": True},
        ),
        "granitemoe": (
            "ibm-granite/granite-3.1-1b-a400m-instruct",
            _GRANITE | {"attention_multiplier": 0.015625, "logits_scaling": 6.0, "num_key_value_heads": 8},
        ),
        "granitemoehybrid": (
            "ibm-granite/granite-4.0-h-tiny",
            _GRANITE | {"attention_multiplier": 0.0078125, "logits_scaling": 6.0, "position_embedding_type": "nope"},
        ),
        "helium": ("kyutai/helium-1-2b", {"head_dim": 128}),
        "hunyuan_v1_dense": ("tencent/Hunyuan-1.8B-Instruct", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        "hyperclovax": (
            "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",
            {
                "logits_scaling": 0.125,
                "embedding_multiplier": 10.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": 0.0078125,
            },
        ),
        "jamba": ("ai21labs/AI21-Jamba-Mini-1.7", {"num_key_value_heads": 8, "num_experts": 16}),
        "lfm2": ("LiquidAI/LFM2-1.2B", {"conv_L_cache": 3, "num_key_value_heads": 8}),
        "llama": ("meta-llama/Llama-3.2-1B-Instruct", {"rope_parameters": _LLAMA3, "num_key_value_heads": 8}),
        "mamba2": ("mistralai/Mamba-Codestral-7B-v0.1", {"n_groups": 8, "tie_word_embeddings": False}),
        "mistral": ("mistralai/Mistral-7B-v0.1", {"sliding_window": 4096, "num_key_value_heads": 8}),
        "mixtral": ("mistralai/Mixtral-8x7B-Instruct-v0.1", _ROPE_1M | {"sliding_window": None}),
        "nemotron": ("nvidia/Minitron-4B-Base", _part(0.5) | {"num_key_value_heads": 8}),
        "olmo": ("allenai/OLMo-7B-hf", {"clip_qkv": None}),
        "olmo2": ("allenai/OLMo-2-0425-1B-Instruct", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        "olmoe": ("allenai/OLMoE-1B-7B-0924", {"clip_qkv": 8.0, "norm_topk_prob": False}),
        "phi": ("microsoft/phi-2", _part(0.4) | {"hidden_size": 2560, "intermediate_size": 10240}),
        "phi3": ("microsoft/Phi-3-mini-4k-instruct", {"sliding_window": 2047}),
        "qwen2": ("Qwen/Qwen2.5-0.5B-Instruct", _ROPE_1M | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        "qwen2_moe": ("Qwen/Qwen1.5-MoE-A2.7B", _ROPE_1M | {"num_experts": 60, "num_experts_per_tok": 4}),
        "qwen3": (
            "Qwen/Qwen3-0.6B",
            _ROPE_1M | {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
        ),
        "qwen3_moe": (
            "Qwen/Qwen3-30B-A3B",
            _ROPE_1M | {"num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True},
        ),
        "seed_oss": ("ByteDance-Seed/Seed-OSS-36B-Instruct", {"num_key_value_heads": 8, "attention_bias": True}),
        "smollm3": ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layer_interval": 4, "num_key_value_heads": 4}),
        "stablelm": ("stabilityai/stablelm-2-1_6b", _part(0.25) | {"use_qkv_bias": True}),
        "starcoder2": ("bigcode/starcoder2-3b", {"num_key_value_heads": 2, "sliding_window": 4096, "use_bias": True}),
    }.items()
}
