"""What every engine does around its sampling: the prompts' checks, and the record of the responses."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.batch import Column, Prompts, Rollout, extend, repeat
from fppo.rollout.engine import Sampling


def check_prompts(mask: Tensor) -> list[int]:
    """The lengths of the prompts. Raises ValueError for none, empty ones, or ones not padded on the left."""
    lengths = mask.sum(1).tolist()
    empty = [i for i, length in enumerate(lengths) if not length]
    if empty or not lengths:
        raise ValueError(f"no tokens in prompts {empty[:10]} of {len(lengths)}: leave empty prompts out")
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("prompts have padding after or between their tokens: pad them on the left")
    return lengths


def response_limits(limits: Tensor | None, count: int, sampling: Sampling) -> list[int]:
    """The most tokens of the responses to each of `count` prompts. Raises ValueError if `limits` leave one none."""
    if limits is None:
        return [sampling.max_tokens] * count
    found = [min(limit, sampling.max_tokens) for limit in limits.tolist()]
    if len(found) != count or min(found) < 1:
        raise ValueError(f"limits = {found}: give 1 or more tokens for each of {count} prompts")
    return found


def check_stops(sampling: Sampling, size: int) -> None:
    """Raises ValueError for stop tokens that a vocabulary of `size` tokens does not have."""
    wrong = [token for token in sampling.stop_token_ids if token >= size]
    if wrong:
        raise ValueError(f"stop_token_ids {wrong} are beyond the model's vocabulary of {size} tokens")


def number_rows(prompts: Prompts, n: int, device: torch.device) -> Tensor:
    """The row ids of `n` responses to each prompt: row j of the prompt with row id i has i * n + j."""
    return (prompts.row_ids.to(device)[:, None] * n + torch.arange(n, device=device)).flatten()


def rollout_of(
    prompts: Prompts,
    tokens: Tensor,
    drawn: Tensor,
    log_probs: Tensor,
    sampling_log_probs: Tensor,
    *,
    row_ids: Tensor,
    sampling: Sampling,
    pad_token_id: int,
    version: int,
) -> Rollout:
    """The rollout whose responses are `tokens` [B, T] where `drawn`, up to and with the first stop token."""
    stops = drawn & torch.isin(tokens, tokens.new_tensor(sampling.stop_token_ids))
    mask = drawn & (stops.cumsum(1) - stops.long() == 0)
    rows = repeat(prompts, sampling.n)
    device = tokens.device
    return extend(
        Rollout,
        rows,
        tokens=torch.cat([rows.tokens.to(device), tokens.where(mask, pad_token_id)], 1),
        attention_mask=torch.cat([rows.attention_mask.to(device).bool(), mask], 1),
        response_mask=mask,
        rollout_log_probs=log_probs.where(mask, 0.0),
        sampling_log_probs=sampling_log_probs.where(mask, 0.0),
        row_ids=row_ids,
        groups=rows.row_ids.to(device),
        versions=torch.full_like(row_ids, version),
        finish=Column("stop" if ended else "length" for ended in (stops & mask).any(1).tolist()),
    )
