"""Digests of prompts, by which a run that goes on sees whether they are those that it began with."""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

from fppo.data.prompts import PromptSet

TOKENS, ROWS = "as tokens", "as rewards read them"


def digests_of(prompts: PromptSet) -> dict[str, str]:
    """128 bits, in hex, of the tokens of all prompts in their order, which files, tokenizer and chat template make, and
    of their ground truths, sources and other fields. Where the rows came from plays no role."""
    tokens, rows = (hashlib.blake2b(digest_size=16) for _ in range(2))
    for ids in prompts.tokens:
        tokens.update(array("q", (len(ids), *ids)).tobytes())
    for row in zip(prompts.ground_truths, prompts.sources, prompts.extras, strict=True):
        rows.update(json.dumps(row, sort_keys=True, default=_other).encode() + b"\n")
    return {TOKENS: tokens.hexdigest(), ROWS: rows.hexdigest()}


def _other(value: Any) -> str:
    """What stands for a value that is none of JSON, as sets of prompts made by scripts may hold."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
