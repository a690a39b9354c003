"""Names of what an ablation runs: operations, implementations, dtypes, and sizes, also those of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch

from fppo._errors import did_you_mean, json_of
from fppo.laws._kernels import words
from fppo.runtime.gguf_files import gguf_of, read_header
from fppo_kernels import table as tables
from fppo_kernels.operation import Operation, Shape, operation_of
from fppo_kernels.table import Implementation, Kernels, Table

NAMES = tuple(field.name for field in attrs.fields(Kernels))
DTYPES = MappingProxyType({words(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float64)})


def case_of(op: str | Operation) -> Operation:
    """The operation of that name. Raises ValueError if there is none."""
    if not isinstance(op, Operation) and op not in NAMES:
        raise ValueError(f"there is no operation {op!r}; {did_you_mean(op, NAMES)}")
    return op if isinstance(op, Operation) else operation_of(op)


def extended(cases: Sequence[Operation], implementations: Any, table: Table) -> Table:
    """Add the implementations of a mapping to the table, for the only operation in `cases`."""
    if not isinstance(implementations, Mapping):
        return table
    if len(cases) != 1:
        raise ValueError("implementations of your own belong to one operation: ablate one at a time, or pass a table")
    for name, fn in implementations.items():
        implementation = fn if isinstance(fn, Implementation) else tables.own(cases[0].name, fn)
        table = tables.register(cases[0].name, name, implementation, table=table)
    return table


def names_of(op: str, implementations: Any, table: Table) -> list[str]:
    """The implementations to run: those that are named, else all of the table. Raises ValueError for unknown ones."""
    known = list(table[op])
    if implementations is None or isinstance(implementations, Mapping):
        return known
    for name in implementations:
        if name not in known:
            raise ValueError(f"there is no kernel {op}/{name}; {did_you_mean(name, known)}")
    return list(implementations)


def dtypes_of(case: Operation, dtypes: Sequence[str | torch.dtype], *, one: bool) -> list[torch.dtype]:
    """Select the dtypes that the operation is made for; none of them is an error if it is the only operation."""
    chosen = []
    for dtype in dtypes:
        name = dtype if isinstance(dtype, str) else words(dtype)
        if name not in DTYPES:
            raise ValueError(f"there is no dtype {name!r} to ablate in; {did_you_mean(name, DTYPES)}")
        chosen.append(DTYPES[name])
    kept = [dtype for dtype in dict.fromkeys(chosen) if dtype in case.dtypes]
    if one and not kept:
        raise ValueError(f"{case.name} is ablated in {', '.join(words(d) for d in case.dtypes)}, not in {list(dtypes)}")
    return kept


def shapes_of(case: Operation, shapes: Sequence[Shape] | None, cases: Sequence[Operation]) -> list[dict[str, int]]:
    """Complete the shapes of an operation; sizes that only other `cases` have are ignored. Raises ValueError for
    unknown ones."""
    known = {name for other in cases for name in other.shape}
    chosen = []
    for shape in shapes or [{}]:
        for name, size in shape.items():
            if name not in known:
                there = "; ".join(f"{other.name} has {', '.join(other.shape)}" for other in cases)
                raise ValueError(f"there is no size {name!r}; {there}")
            if size < 1:
                raise ValueError(f"a size must be 1 or more, got {name} = {size}")
        sizes = {name: shape.get(name, size) for name, size in case.shape.items()}
        for name, by in case.multiples.items():
            if sizes[name] % (sizes[by] if isinstance(by, str) else by):
                unit = f"{by} = {sizes[by]}" if isinstance(by, str) else by
                raise ValueError(f"{case.name}: {name} must be a multiple of {unit}, got {name} = {sizes[name]}")
        if sizes not in chosen:
            chosen.append(sizes)
    return chosen


def default_of(op: str, table: Table, defaults: Kernels | None) -> str | None:
    """The name in `table` of a run's default implementation of an operation, from `defaults` or, without these, from
    fppo's; None if it is not in the table."""
    fn = getattr(Kernels.named() if defaults is None else defaults, op)
    return next((name for name, implementation in table[op].items() if implementation.is_of(fn)), None)


MODEL_SIZES = ("H", "V", "heads", "kv_heads", "head_dim")
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
    """H, V, heads, kv_heads and head_dim of a directory with a config.json, of a GGUF file, or of a name in PRESETS.

    An owner before the name and "-instruct" after it are ignored. Raises ValueError if `model` is none of these.
    """
    directory = Path(model)
    if (file := gguf_of(model)) is not None:
        return dict(zip(MODEL_SIZES, _of_gguf(file), strict=True))
    if directory.is_dir():
        return dict(zip(MODEL_SIZES, _read(directory / "config.json"), strict=True))
    name = model.rpartition("/")[2].lower().removesuffix("-instruct")
    if name not in PRESETS:
        raise ValueError(
            f"there is no directory {model!r}, and no model of that name is known here; "
            f"{did_you_mean(name, PRESETS)}; or give the directory of a model, or its sizes by --shapes"
        )
    return dict(zip(MODEL_SIZES, PRESETS[name], strict=True))


def _of_gguf(file: Path) -> tuple[int, int, int, int, int]:
    header = read_header(file)
    hidden, heads = header.own("embedding_length"), header.own("attention.head_count")
    vocabulary = header.own("vocab_size") or header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(hidden, int) or not isinstance(heads, int) or not heads or not isinstance(vocabulary, int):
        raise ValueError(f"{file}: its header does not say the sizes of the model; give them by --shapes")
    kv_heads = header.own("attention.head_count_kv") or heads
    return hidden, vocabulary, heads, kv_heads, header.own("attention.key_length") or hidden // heads


def _read(path: Path) -> tuple[int, int, int, int, int]:
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; give the directory of a Hugging Face model")
    try:
        config = json_of(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    config = config.get("text_config") or config  # of models that take images

    def get(*names: str) -> int | None:
        return next((config[name] for name in names if config.get(name) is not None), None)

    hidden, vocabulary = get("hidden_size", "n_embd"), get("vocab_size")
    heads = get("num_attention_heads", "n_head")
    if hidden is None or vocabulary is None or heads is None:
        raise ValueError(f"{path}: it does not say hidden_size, vocab_size and num_attention_heads")
    kv_heads = get("num_key_value_heads") or heads
    return hidden, vocabulary, heads, kv_heads, get("head_dim") or hidden // heads
