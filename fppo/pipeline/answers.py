"""The right responses to prompts, as tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fppo.batch import Prompts
from fppo.rollout.engine import Sampling


def right_answers(prompts: Prompts, *, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The ground truths as responses, int64 [B, A], and their mask: each with the end that stops it, if there is room.

    A ground truth that is longer than responses can be has no response, and an empty row. Raises ValueError unless one
    token alone ends a response: else there are several right ones.
    """
    if len(sampling.stop_token_ids) != 1 or sampling.stop_texts is not None:
        text = "responses end in several ways, so that several are right"
        raise ValueError(f"eval.exact_values = True: {text}: {list(sampling.stop_token_ids)}, {sampling.stop_texts}")
    rows: list[list[int]] = []
    for truth in prompts.ground_truth:
        ids = tokenizer.encode(str(truth).strip(), add_special_tokens=False)
        ids = [*ids, *sampling.stop_token_ids][: sampling.max_tokens] if len(ids) <= sampling.max_tokens else []
        rows.append(ids)
    width = max(1, *map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    return tokens.to(prompts.tokens.device), mask.to(prompts.tokens.device)
