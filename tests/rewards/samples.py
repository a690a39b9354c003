"""Samples and rollouts for the tests of rewards."""

from __future__ import annotations

import math

import pytest
import torch

from fppo.batch import Column, Rollout
from fppo.rewards import Sample

NONE = pytest.approx(math.nan, nan_ok=True)  # no score


def sample(response: str = "", truth=None, *, tokens: int = 0, **extras) -> Sample:
    return Sample(
        prompt="?",
        response=response,
        ground_truth=truth,
        source="test",
        extras=extras,
        prompt_tokens=(1,),
        response_tokens=(1,) * tokens,
        finish="stop",
    )


def samples(*responses: str) -> list[Sample]:
    return [sample(response) for response in responses]


class Letters:
    """A tokenizer with ids 1 .. 26 for a .. z, 0 for padding and 27 for the end."""

    def decode(self, ids, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        kept = [i for i in ids if 1 <= i <= 26 or not skip_special_tokens]
        return "".join(chr(96 + i) for i in kept)


def rollout(prompts: list[str], responses: list[str], truths: list, *, n: int = 1) -> Rollout:
    """Words as a rollout, with the end token behind each response."""
    rows, p, t = len(prompts), max(map(len, prompts)), max(map(len, responses)) + 1
    tokens = torch.zeros(rows, p + t, dtype=torch.int64)
    attention = torch.zeros(rows, p + t, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = [ord(c) - 96 for c in prompt + response] + [27]
        start = p - len(prompt)
        tokens[row, start : start + len(ids)] = torch.tensor(ids)
        attention[row, start : start + len(ids)] = True
    zeros = torch.zeros(rows, t)
    return Rollout(
        tokens=tokens,
        attention_mask=attention,
        response_mask=attention[:, p:],
        rollout_log_probs=zeros,
        sampling_log_probs=zeros,
        row_ids=torch.arange(rows),
        groups=torch.arange(rows) // n,
        versions=torch.zeros(rows, dtype=torch.int64),
        finish=Column(["stop"] * rows),
        ids=Column([str(i) for i in range(rows)]),
        ground_truth=Column(truths),
        source=Column(["letters"] * rows),
        extras=Column([{"row": i} for i in range(rows)]),
    )
