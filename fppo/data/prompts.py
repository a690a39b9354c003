"""Prompts as one immutable value, the records made of them, and their digests."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from fppo.batch import Column, Prompts, RowInputs
from fppo.data.images import ReadInputs
from fppo.data.problems import Problems, Strings, fail
from fppo.data.tokenizers import begun_once


@attrs.frozen(kw_only=True)
class PromptSet:
    """Encoded prompts with the rewards' data: ground truth, source, extras. All columns have one entry per prompt."""

    tokens: tuple[tuple[int, ...], ...]
    ids: tuple[str, ...]  # origin of each prompt, such as "train.jsonl:17"
    ground_truths: tuple[Any, ...]
    sources: tuple[str, ...]
    extras: tuple[dict[str, Any], ...]
    pad_token_id: int
    num_dropped: int = 0  # prompts that were too long
    num_truncated: int = 0
    inputs: ReadInputs | tuple[RowInputs | None, ...] | None = None  # of prompts with images
    left_out: tuple[str, ...] = ()  # fields of the rows that do not fit JSON, hidden from rewards

    def __len__(self) -> int:
        return len(self.tokens)


def check_prompt_set(prompts: PromptSet) -> PromptSet:
    """Check a prompt set and return it. Raises ValueError if it or a prompt is empty, or its columns are unequal."""
    columns = {name: len(getattr(prompts, name)) for name in ("tokens", "ids", "ground_truths", "sources", "extras")}
    columns |= {} if prompts.inputs is None else {"inputs": len(prompts.inputs)}
    if len(set(columns.values())) > 1:
        raise ValueError(f"the columns of a prompt set differ in length: {columns}")
    if not prompts.tokens:
        dropped = f": all {prompts.num_dropped} were too long and dropped" if prompts.num_dropped else ""
        raise ValueError(f"the data set holds no prompts{dropped}")
    empty = [name for name, tokens in zip(prompts.ids, prompts.tokens) if not tokens]
    if empty:
        fail([f"{name}: the prompt has no tokens" for name in empty], "prompts")
    return prompts


def share(token_ids: Iterable[int], shared: dict[int, int]) -> tuple[int, ...]:
    """Intern token ids: a tuple with the integers of `shared`, which gains new ones; 8 bytes per token, not 36."""
    return tuple(shared.setdefault(i, i) for i in token_ids)


def prompt_set(
    prompts: Strings | Sequence[Sequence[int]],
    tokenizer: Any = None,
    *,
    ground_truths: Sequence[Any] | None = None,
    sources: str | Strings = "prompts",
    extras: Sequence[dict[str, Any]] | None = None,
    ids: Strings | None = None,
    pad_token_id: int | None = None,
) -> PromptSet:
    """A prompt set from texts, which need a tokenizer, or from token ids.

    `sources` is one name for all or one per prompt; `ids` are numbers by default. `pad_token_id` defaults to the
    tokenizer's. Raises ValueError without a padding token, and as `check_prompt_set`.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts is one string; give a list of them")
    if pad_token_id is None:
        pad_token_id = getattr(tokenizer, "pad_token_id", None)
    if pad_token_id is None:
        raise ValueError("no padding token: give pad_token_id, or a tokenizer that has one")
    if any(isinstance(p, str) for p in prompts) and tokenizer is None:
        raise ValueError("prompts as text need a tokenizer")
    shared: dict[int, int] = {}
    encoded = [begun_once(tokenizer, p, tokenizer.encode(p)) if isinstance(p, str) else p for p in prompts]
    count = len(encoded)
    return check_prompt_set(
        PromptSet(
            tokens=tuple(share(map(int, tokens), shared) for tokens in encoded),
            ids=tuple(ids) if ids is not None else tuple(str(i) for i in range(count)),
            ground_truths=tuple(ground_truths) if ground_truths is not None else (None,) * count,
            sources=(sources,) * count if isinstance(sources, str) else tuple(sources),
            extras=tuple(extras) if extras is not None else tuple({} for _ in range(count)),
            pad_token_id=pad_token_id,
        )
    )


def select(prompts: PromptSet, indices: Iterable[int]) -> PromptSet:
    """The prompts at `indices`, in that order."""
    chosen = list(indices)
    columns = ("tokens", "ids", "ground_truths", "sources", "extras")
    taken = {name: tuple(getattr(prompts, name)[i] for i in chosen) for name in columns}
    inputs = prompts.inputs
    if inputs is not None:
        inputs = inputs.select(chosen) if isinstance(inputs, ReadInputs) else tuple(inputs[i] for i in chosen)
    return check_prompt_set(attrs.evolve(prompts, inputs=inputs, **taken))


def collate(prompts: PromptSet, indices: Sequence[int], *, width: int | None = None, row_offset: int = 0) -> Prompts:
    """The prompts at `indices` as a record: tokens [B, P] int64, padded on the left.

    P is the longest of them, or `width`; row_ids are row_offset, row_offset + 1, ... Raises ValueError for a prompt
    longer than `width`.
    """
    tokens = [prompts.tokens[i] for i in indices]
    longest = max(map(len, tokens), default=0)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a prompt of {longest} tokens does not fit the width of {width}")
    padding = [width - len(t) for t in tokens]
    pad = prompts.pad_token_id
    filled = [[*([pad] * gap), *row] for gap, row in zip(padding, tokens)]
    return Prompts(
        tokens=torch.tensor(filled, dtype=torch.int64).reshape(len(tokens), width),
        attention_mask=torch.arange(width) >= torch.tensor(padding, dtype=torch.int64)[:, None],
        row_ids=torch.arange(row_offset, row_offset + len(tokens)),
        ids=Column(prompts.ids[i] for i in indices),
        ground_truth=Column(prompts.ground_truths[i] for i in indices),
        source=Column(prompts.sources[i] for i in indices),
        extras=Column(prompts.extras[i] for i in indices),
        inputs=None if prompts.inputs is None else Column(prompts.inputs[i] for i in indices),
    )


def check_tokens(prompts: PromptSet, vocabulary_size: int) -> None:
    """Raise ValueError for token ids, padding included, not below `vocabulary_size`, the rows of a model's
    embedding."""
    problems = Problems()
    if not 0 <= (pad := prompts.pad_token_id) < vocabulary_size:
        text = f"the padding token {pad} is outside the model's vocabulary of {vocabulary_size}"
        problems.add(f"{text}; name another token (data.pad_token)")
    for name, tokens in zip(prompts.ids, prompts.tokens):
        wrong = [i for i in tokens if not 0 <= i < vocabulary_size]
        if wrong:
            problems.add(f"token id {wrong[0]} is outside the model's vocabulary of {vocabulary_size}", at=name)
    problems.check("prompts")


TOKENS, ROWS = "as tokens", "as rewards read them"


def digests_of(prompts: PromptSet) -> dict[str, str]:
    """Two 128-bit hex digests: of all prompts' tokens in order (files, tokenizer and chat template determine them), and
    of their ground truths, sources and other fields. The paths of the rows do not enter."""
    tokens, rows = (hashlib.blake2b(digest_size=16) for _ in range(2))
    for ids in prompts.tokens:
        tokens.update(array("q", (len(ids), *ids)).tobytes())
    for row in zip(prompts.ground_truths, prompts.sources, prompts.extras, strict=True):
        rows.update(json.dumps(row, sort_keys=True, default=_other).encode() + b"\n")
    return {TOKENS: tokens.hexdigest(), ROWS: rows.hexdigest()}


def _other(value: Any) -> str:
    """The name of a value's type. It is digested in place of a value that JSON cannot hold, such as scripts put into
    prompt sets."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
