"""Small Llamas in GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from fppo import models
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.quickstart import bpe_tokenizer

TEXTS = [
    "1  2  3  4  5  6",
    "Lin has 12 apples and buys 30 more apples.",
    "What is 7 times 8?",
    "user assistant system",
]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = bpe_tokenizer(TEXTS, size=300, alone="<>")
# where blocks of these kinds have their factors in float16, of so many bytes; gguf only reads these kinds
FACTORS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def llama(width: int = 64, *, layers: int = 2, tied: bool = True, **changes: Any) -> tuple[Model, Params]:
    """A model and parameters far from uniform."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **{"max_position_embeddings": 512} | changes,
    )
    model = models.build(config)
    noise = Key(3).fold("noise").generator()
    params = models.init_params(model, Key(0))
    return model, {name: x + 0.1 * torch.randn(x.shape, generator=noise) for name, x in params.items()}


def stored_name(name: str) -> str:
    """A parameter's name in the file."""
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def rotated(name: str, rows: np.ndarray, *, heads: int, kv_heads: int) -> np.ndarray:
    """Rows as the file has them, in the order of transformers: numbers that rotary positions turn together are half a
    head apart there, and beside each other in the file."""
    count = heads if "q_proj" in name else kv_heads if "k_proj" in name else 0
    if not count:
        return rows
    own, size = np.empty_like(rows), len(rows) // count
    for head in range(count):
        for pair in range(size // 2):
            own[head * size + pair] = rows[head * size + 2 * pair]
            own[head * size + size // 2 + pair] = rows[head * size + 2 * pair + 1]
    return own


def unrotated(name: str, rows: np.ndarray, *, heads: int, kv_heads: int) -> np.ndarray:
    """Rows of transformers' order in that of the file."""
    place = rotated(name, np.arange(len(rows)), heads=heads, kv_heads=kv_heads)
    back = np.empty_like(rows)
    back[place] = rows
    return back


def quantised(rows: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """Bytes of a kind: of these numbers, or random ones with factors of that size where gguf does not quantise."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    if kind not in FACTORS:
        return quants.quantize(rows, GGMLQuantizationType[kind])
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    draws = np.random.default_rng(seed)
    blocks = draws.integers(0, 256, (rows.size // numbers, size), dtype=np.uint8)
    for place in FACTORS[kind]:
        factors = (draws.uniform(0.5, 1.0, len(blocks)) * 2e-4).astype("<f2")
        blocks[:, place : place + 2] = factors.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(len(rows), -1)


def write(
    file: Path,
    model: Model,
    params: Params,
    *,
    kind: str = "F32",
    template: str | None = TEMPLATE,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    architecture: str = "llama",
    tokenizer: bool = True,
    left_out: str = "",
) -> dict[str, np.ndarray]:
    """Write a model, its matrices in blocks of a `kind`; returns the bytes of each by its name in the file. `more` are
    other values of the header, and `tensors` are further ones in float32."""
    import gguf

    config: Any = model.whole_config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _write_tokenizer(writer, template)
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
    for key, value in (more or {}).items():
        writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value=value, type=kinds[type(value)])
    heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
    written = {}
    for seed, (name, x) in enumerate(params.items()):
        if name == left_out:
            continue
        rows = unrotated(name, x.float().numpy(), **heads)
        own = "F32" if rows.ndim == 1 else kind
        written[stored_name(name)] = quantised(np.ascontiguousarray(rows), own, seed)
        writer.add_tensor(stored_name(name), written[stored_name(name)], raw_dtype=gguf.GGMLQuantizationType[own])
    for name, x in (tensors or {}).items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _write_tokenizer(writer: Any, template: str | None) -> None:
    known = json.loads(WORDS.backend_tokenizer.to_str())["model"]
    tokens = sorted(known["vocab"], key=known["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number < 2 else 1 for number in range(len(tokens))])  # control, then normal ones
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in known["merges"]])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
