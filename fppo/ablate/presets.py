"""The sizes of models: by the name of an architecture, or from a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from fppo._errors import did_you_mean, json_of

NAMES = ("H", "V", "heads", "kv_heads", "head_dim")
# hidden size, vocabulary, query heads, key heads, size of a head: from each model's published config.json
PRESETS: Mapping[str, tuple[int, int, int, int, int]] = MappingProxyType(
    {
        "qwen2.5-0.5b": (896, 151_936, 14, 2, 64),
        "qwen2.5-1.5b": (1536, 151_936, 12, 2, 128),
        "qwen2.5-3b": (2048, 151_936, 16, 2, 128),
        "qwen2.5-7b": (3584, 152_064, 28, 4, 128),
        "qwen3-0.6b": (1024, 151_936, 16, 8, 128),
        "qwen3-8b": (4096, 151_936, 32, 8, 128),
        "llama-3.2-1b": (2048, 128_256, 32, 8, 64),
        "llama-3.1-8b": (4096, 128_256, 32, 8, 128),
        "gemma-2-2b": (2304, 256_000, 8, 4, 256),
        "gpt2": (768, 50_257, 12, 12, 64),
    }
)


def sizes_of(model: str) -> dict[str, int]:
    """H, V, heads, kv_heads and head_dim of a directory with a config.json, or of a name in PRESETS.

    An owner before the name and "-instruct" after it are left out. Raises ValueError where there is neither.
    """
    directory = Path(model)
    if directory.is_dir():
        return dict(zip(NAMES, _read(directory / "config.json"), strict=True))
    name = model.rpartition("/")[2].lower().removesuffix("-instruct")
    if name not in PRESETS:
        raise ValueError(
            f"there is no directory {model!r}, and no model of that name is known here; "
            f"{did_you_mean(name, PRESETS)}; or give the directory of a model, or its sizes by --shapes"
        )
    return dict(zip(NAMES, PRESETS[name], strict=True))


def _read(path: Path) -> tuple[int, int, int, int, int]:
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; give the directory of a Hugging Face model")
    try:
        config = json_of(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    config = config.get("text_config") or config  # of models that see

    def get(*names: str) -> int | None:
        return next((config[name] for name in names if config.get(name) is not None), None)

    hidden, vocabulary = get("hidden_size", "n_embd"), get("vocab_size")
    heads = get("num_attention_heads", "n_head")
    if hidden is None or vocabulary is None or heads is None:
        raise ValueError(f"{path}: it does not say hidden_size, vocab_size and num_attention_heads")
    kv_heads = get("num_key_value_heads") or heads
    return hidden, vocabulary, heads, kv_heads, get("head_dim") or hidden // heads
