"""Prompts: read from files and data sets, encoded, and drawn in batches that resume exactly."""

from fppo.data.cursor import DataCursor, batches, epoch_order, next_batch, next_indices
from fppo.data.encode import Fields, encode_rows, load_prompts
from fppo.data.prompt_set import PromptSet, check_tokens, collate, prompt_set, select
from fppo.data.read import Row, read_rows
from fppo.data.tokenizers import (
    SpecialTokens,
    check_chat_template,
    check_tokenizer,
    check_vocabulary,
    stop_tokens,
    vocabulary_size,
)

__all__ = [
    "DataCursor",
    "Fields",
    "PromptSet",
    "Row",
    "SpecialTokens",
    "batches",
    "check_chat_template",
    "check_tokenizer",
    "check_tokens",
    "check_vocabulary",
    "collate",
    "encode_rows",
    "epoch_order",
    "load_prompts",
    "next_batch",
    "next_indices",
    "prompt_set",
    "read_rows",
    "select",
    "stop_tokens",
    "vocabulary_size",
]
