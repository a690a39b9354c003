"""Prompts: read from files and data sets, encoded, and drawn in batches that resume exactly.

In: files or rows, a tokenizer, fields and limits. Out: a `PromptSet`, and batches `Prompts` [N, P] with a cursor, which
is state. One error names every faulty row. Names are imported at their first use, so that checks of rows before a run
load no torch. Begin with `encode.load_prompts` and `cursor.next_batch`.
"""

from typing import TYPE_CHECKING

from fppo._lazy import lazily

if TYPE_CHECKING:
    from fppo.data.chat import ChatOptions, check_chat_template, encode_chat, end_of_turn, render_chat
    from fppo.data.conversations import DemonstrationSet, Imitated, encode_demonstrations, imitated_conversation
    from fppo.data.curriculum import (
        Course,
        Curriculum,
        draw_by_weights,
        easy_to_hard,
        learnability,
        mixture,
        systematic,
    )
    from fppo.data.cursor import (
        DataCursor,
        KeepResponses,
        Learn,
        at_step,
        batches,
        begin_course,
        checked_order,
        chosen_indices,
        epoch_order,
        next_batch,
        next_indices,
    )
    from fppo.data.encode import encode_rows, load_prompts
    from fppo.data.examples import Fields
    from fppo.data.images import ImageReader
    from fppo.data.privileged import truth_signs, with_teacher_prompt, with_truth
    from fppo.data.problems import Problems
    from fppo.data.prompts import PromptSet, check_tokens, collate, digests_of, prompt_set, select
    from fppo.data.read import Row, read_rows, rows_of
    from fppo.data.stops import StopReader, StopTexts, stop_texts
    from fppo.data.tokenizers import SpecialTokens, check_tokenizer, check_vocabulary, stop_tokens, vocabulary_size

__all__ = [
    "ChatOptions",
    "Course",
    "Curriculum",
    "DataCursor",
    "DemonstrationSet",
    "Fields",
    "ImageReader",
    "Imitated",
    "KeepResponses",
    "Learn",
    "Problems",
    "PromptSet",
    "Row",
    "SpecialTokens",
    "StopReader",
    "StopTexts",
    "at_step",
    "batches",
    "begin_course",
    "check_chat_template",
    "check_tokenizer",
    "check_tokens",
    "check_vocabulary",
    "checked_order",
    "chosen_indices",
    "collate",
    "digests_of",
    "draw_by_weights",
    "easy_to_hard",
    "encode_chat",
    "encode_demonstrations",
    "encode_rows",
    "end_of_turn",
    "epoch_order",
    "imitated_conversation",
    "learnability",
    "load_prompts",
    "mixture",
    "next_batch",
    "next_indices",
    "prompt_set",
    "read_rows",
    "render_chat",
    "rows_of",
    "select",
    "stop_texts",
    "stop_tokens",
    "systematic",
    "truth_signs",
    "vocabulary_size",
    "with_teacher_prompt",
    "with_truth",
]

__getattr__ = lazily(__name__, __file__)
