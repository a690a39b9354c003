"""The quickstarts' tasks: sums for a small model made here, and word problems for a real one.

In: a directory and a seed. Out: a tokenizer, a model and prompts, or the files and settings of a run.
Begin with `addition.prepare`; `word_problems` is the task of SmolLM2-135M-Instruct.
"""

from fppo.quickstart.addition import (
    CHARACTERS,
    MODEL,
    TEST,
    TRAIN,
    Addition,
    bpe_tokenizer,
    character_tokenizer,
    prepare,
    prompt_sets,
    settings,
    small_model,
    sums,
    warm_up,
    warmed_up,
)

__all__ = [
    "CHARACTERS",
    "MODEL",
    "TEST",
    "TRAIN",
    "Addition",
    "bpe_tokenizer",
    "character_tokenizer",
    "prepare",
    "prompt_sets",
    "settings",
    "small_model",
    "sums",
    "warm_up",
    "warmed_up",
]
