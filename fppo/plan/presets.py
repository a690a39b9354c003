"""Models by name, in the sizes of their published config.json; or from a directory that has one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from fppo._errors import did_you_mean
from fppo.models.load import read_config
from fppo.models.vision import takes_images


def _qwen(hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool) -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=tied,
    )


def _llama(hidden: int, inner: int, layers: int, heads: int) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=False,
    )


def _qwen_of_experts(hidden: int, inner: int, layers: int, heads: int) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,  # type: ignore[call-arg]
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )


def _quickstart() -> PreTrainedConfig:
    from fppo import quickstart

    return quickstart.small_model(len(quickstart.character_tokenizer())).config


PRESETS: Mapping[str, Callable[[], PreTrainedConfig]] = MappingProxyType(
    {
        "qwen2.5-0.5b": lambda: _qwen(896, 4864, 24, 14, 2, 151_936, True),
        "qwen2.5-1.5b": lambda: _qwen(1536, 8960, 28, 12, 2, 151_936, True),
        "qwen2.5-7b": lambda: _qwen(3584, 18_944, 28, 28, 4, 152_064, False),
        "qwen2.5-32b": lambda: _qwen(5120, 27_648, 64, 40, 8, 152_064, False),
        "qwen2.5-72b": lambda: _qwen(8192, 29_568, 80, 64, 8, 152_064, False),
        "llama-3.1-8b": lambda: _llama(4096, 14_336, 32, 32),
        "llama-3.1-70b": lambda: _llama(8192, 28_672, 80, 64),
        "llama-3.1-405b": lambda: _llama(16_384, 53_248, 126, 128),
        "qwen3-30b-a3b": lambda: _qwen_of_experts(2048, 768, 48, 32),
        "qwen3-235b-a22b": lambda: _qwen_of_experts(4096, 1536, 94, 64),
        "quickstart": _quickstart,
    }
)


def config_of(model: str, setting: str = "model.path") -> tuple[str, PreTrainedConfig]:
    """The name and config of a directory with a config.json, or of a name in PRESETS. Nothing is downloaded.

    An owner before the name and "-instruct" after it are left out. Raises ValueError where there is neither; `setting`
    is what named it.
    """
    directory = Path(model)
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise ValueError(f"--{setting}: {directory} has no config.json; give the directory of a Hugging Face model")
        config = read_config(directory)
        if takes_images(config):
            raise ValueError(
                f"--{setting}: fppo plan does not count vision towers yet; {directory} ({config.model_type}) has one"
            )
        return directory.name, config
    name = model.rpartition("/")[2].lower().removesuffix("-instruct").removeprefix("meta-")
    if name not in PRESETS:
        raise ValueError(
            f"--{setting} {model!r}: there is no such directory, and no model of that name is known here; "
            f"{did_you_mean(name, PRESETS, cutoff=0.5)}; or give the directory of a model"
        )
    return name, PRESETS[name]()


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The config of a model that has only the first `layers` layers."""
    config = copy.deepcopy(config)
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if vars(config).get("layer_types"):  # those of Mamba follow from the number of layers
        changes["layer_types"] = list(config.layer_types)[:layers]  # type: ignore[attr-defined]
    for key, value in changes.items():
        setattr(config, key, value)
    return config
