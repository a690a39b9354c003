"""Digests of prompts, by which a resumed run checks that its data are unchanged."""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

from fppo.data.prompts import PromptSet

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
    """The name of a value's type, digested in place of values that JSON lacks, as prompt sets of scripts may hold."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
