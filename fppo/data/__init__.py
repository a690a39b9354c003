"""Prompts: read from files and data sets, encoded, and drawn in batches that resume exactly.

In: files or rows, a tokenizer, fields and limits. Out: a `PromptSet`, and batches `Prompts` [N, P] with a cursor, which
is state. One error names every faulty row. Names are imported at their first use, so that checks of rows before a run
load no torch. Begin with `encode.load_prompts` and `cursor.next_batch`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fppo.data.chat import ChatOptions as ChatOptions
    from fppo.data.chat import check_chat_template as check_chat_template
    from fppo.data.chat import encode_chat as encode_chat
    from fppo.data.chat import end_of_turn as end_of_turn
    from fppo.data.chat import render_chat as render_chat
    from fppo.data.cursor import DataCursor as DataCursor
    from fppo.data.cursor import batches as batches
    from fppo.data.cursor import checked_order as checked_order
    from fppo.data.cursor import epoch_order as epoch_order
    from fppo.data.cursor import next_batch as next_batch
    from fppo.data.cursor import next_indices as next_indices
    from fppo.data.encode import encode_rows as encode_rows
    from fppo.data.encode import load_prompts as load_prompts
    from fppo.data.examples import Fields as Fields
    from fppo.data.images import ImageReader as ImageReader
    from fppo.data.privileged import truth_signs as truth_signs
    from fppo.data.privileged import with_truth as with_truth
    from fppo.data.problems import Problems as Problems
    from fppo.data.prompts import PromptSet as PromptSet
    from fppo.data.prompts import check_tokens as check_tokens
    from fppo.data.prompts import collate as collate
    from fppo.data.prompts import digests_of as digests_of
    from fppo.data.prompts import prompt_set as prompt_set
    from fppo.data.prompts import select as select
    from fppo.data.read import Row as Row
    from fppo.data.read import read_rows as read_rows
    from fppo.data.read import rows_of as rows_of
    from fppo.data.stops import StopReader as StopReader
    from fppo.data.stops import StopTexts as StopTexts
    from fppo.data.stops import stop_texts as stop_texts
    from fppo.data.tokenizers import SpecialTokens as SpecialTokens
    from fppo.data.tokenizers import check_tokenizer as check_tokenizer
    from fppo.data.tokenizers import check_vocabulary as check_vocabulary
    from fppo.data.tokenizers import stop_tokens as stop_tokens
    from fppo.data.tokenizers import vocabulary_size as vocabulary_size

__all__ = [
    "ChatOptions",
    "DataCursor",
    "Fields",
    "ImageReader",
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
    "digests_of",
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
    "truth_signs",
    "vocabulary_size",
    "with_truth",
]
_HOMES = {
    "chat": (
        "ChatOptions",
        "check_chat_template",
        "encode_chat",
        "end_of_turn",
        "render_chat",
    ),
    "cursor": (
        "DataCursor",
        "batches",
        "checked_order",
        "epoch_order",
        "next_batch",
        "next_indices",
    ),
    "encode": (
        "encode_rows",
        "load_prompts",
    ),
    "examples": ("Fields",),
    "images": ("ImageReader",),
    "privileged": ("truth_signs", "with_truth"),
    "problems": ("Problems",),
    "prompts": (
        "PromptSet",
        "check_tokens",
        "collate",
        "digests_of",
        "prompt_set",
        "select",
    ),
    "read": (
        "Row",
        "read_rows",
        "rows_of",
    ),
    "stops": (
        "StopReader",
        "StopTexts",
        "stop_texts",
    ),
    "tokenizers": (
        "SpecialTokens",
        "check_tokenizer",
        "check_vocabulary",
        "stop_tokens",
        "vocabulary_size",
    ),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
