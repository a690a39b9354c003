"""Prompts: read from files and data sets, encoded, and drawn in batches that resume exactly."""

from fppo.data.chat import ChatOptions, check_chat_template, encode_chat, end_of_turn, render_chat
from fppo.data.cursor import DataCursor, batches, checked_order, epoch_order, next_batch, next_indices
from fppo.data.encode import Fields, encode_rows, load_prompts
from fppo.data.problems import Problems
from fppo.data.prompt_set import PromptSet, check_tokens, collate, prompt_set, select
from fppo.data.read import Row, read_rows, rows_of
from fppo.data.stops import StopReader, StopTexts, stop_texts
from fppo.data.tokenizers import (
    SpecialTokens,
    check_tokenizer,
    check_vocabulary,
    stop_tokens,
    vocabulary_size,
)

__all__ = [
    "ChatOptions",
    "DataCursor",
    "Fields",
    "Problems",
    "PromptSet",
    "Row",
    "SpecialTokens",
    "StopReader",
    "StopTexts",
    "batches",
    "check_chat_template",
    "check_tokenizer",
    "check_tokens",
    "check_vocabulary",
    "checked_order",
    "collate",
    "encode_chat",
    "encode_rows",
    "end_of_turn",
    "epoch_order",
    "load_prompts",
    "next_batch",
    "next_indices",
    "prompt_set",
    "read_rows",
    "render_chat",
    "rows_of",
    "select",
    "stop_texts",
    "stop_tokens",
    "vocabulary_size",
]
