"""Steps around sampling that all engines share: the prompts' checks, and the record of the responses."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo.batch import Column, Rollout, extend, repeat
from fppo.data.stops import StopTexts
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.routed import completed
from fppo.tree import replace

R = TypeVar("R", bound=Rollout)


def check_prompts(mask: Tensor) -> list[int]:
    """The lengths of the prompts. Raises ValueError for none, empty ones, or ones not padded on the left."""
    lengths = mask.sum(1).tolist()
    empty = [i for i, length in enumerate(lengths) if not length]
    if empty or not lengths:
        raise ValueError(f"no tokens in prompts {empty[:10]} of {len(lengths)}: leave empty prompts out")
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("prompts have padding after or between their tokens: pad them on the left")
    return lengths


def response_limits(ask: Ask) -> list[int]:
    """The most tokens of the responses to each prompt. Raises ValueError if `ask.limits` leave one none."""
    count, most = len(ask.prompts.tokens), ask.sampling.max_tokens
    if ask.limits is None:
        return [most] * count
    limits = [min(limit, most) for limit in ask.limits.tolist()]
    if len(limits) != count or min(limits) < 1:
        raise ValueError(f"limits = {limits}: give 1 or more tokens for each of {count} prompts")
    return limits


def check_stops(sampling: Sampling, size: int) -> None:
    """Raises ValueError for stop tokens that a vocabulary of `size` tokens does not have."""
    wrong = [token for token in sampling.stop_token_ids if token >= size]
    if wrong:
        raise ValueError(f"stop_token_ids {wrong} are beyond the model's vocabulary of {size} tokens")


def number_rows(ask: Ask, device: torch.device) -> Tensor:
    """The row ids of the n responses to each prompt: row j of the prompt with row id i has i * n + j."""
    n = ask.sampling.n
    return (ask.prompts.row_ids.to(device)[:, None] * n + torch.arange(n, device=device)).flatten()


def rollout_of(
    ask: Ask,
    tokens: Tensor,
    drawn: Tensor,
    log_probs: Tensor,
    sampling_log_probs: Tensor,
    *,
    row_ids: Tensor,
    pad_token_id: int,
    routed: Tensor | None = None,
) -> Rollout:
    """The rollout whose responses are `tokens` [B, T] where `drawn`, up to and with the token that stops them; `routed`
    [B, S, L, k] are the experts of all tokens that the engine ran."""
    stops = drawn & torch.isin(tokens, tokens.new_tensor(ask.sampling.stop_token_ids))
    if ask.sampling.stop_texts is not None:
        stops |= _text_stops(tokens, drawn, ask.sampling.stop_texts)
    mask = drawn & (stops.cumsum(1) - stops.long() == 0)
    rows = repeat(ask.prompts, ask.sampling.n)
    device = tokens.device
    whole = torch.cat([rows.attention_mask.to(device).bool(), mask], 1)
    return extend(
        Rollout,
        rows,
        tokens=torch.cat([rows.tokens.to(device), tokens.where(mask, pad_token_id)], 1),
        attention_mask=whole,
        response_mask=mask,
        rollout_log_probs=log_probs.where(mask, 0.0),
        sampling_log_probs=sampling_log_probs.where(mask, 0.0),
        row_ids=row_ids,
        groups=rows.row_ids.to(device),
        versions=torch.full_like(row_ids, ask.version),
        finish=Column("stop" if ended else "length" for ended in (stops & mask).any(1).tolist()),
        routed=None if routed is None else completed(routed, whole),
    )


def widened(record: R, prompt: int, response: int, pad_token_id: int) -> R:
    """The rollout with so many prompt and response positions, in place of the fewer that it has."""
    width = record.response_mask.shape[1]
    left, right = prompt - (record.tokens.shape[1] - width), response - width
    per_token = ["response_mask", "rollout_log_probs", "sampling_log_probs"]
    per_token += [name for name in ("token_versions", "turn_rewards") if getattr(record, name) is not None]
    return replace(
        record,
        tokens=F.pad(record.tokens, (left, right), value=pad_token_id),
        attention_mask=F.pad(record.attention_mask, (left, right)),
        routed=None if record.routed is None else F.pad(record.routed, (0, 0, 0, 0, left, right)),
        turn_ids=None if record.turn_ids is None else F.pad(record.turn_ids, (0, right), value=-1),
        **{name: F.pad(getattr(record, name), (0, right)) for name in per_token},
    )


def _text_stops(tokens: Tensor, drawn: Tensor, texts: StopTexts) -> Tensor:
    """bool [B, T], True at each row's first token that completes one of the texts."""
    counts = drawn.sum(1).tolist()
    ends = [texts.end(row[:count]) for row, count in zip(tokens.tolist(), counts, strict=True)]
    places = torch.tensor([-1 if end is None else end[0] - 1 for end in ends], device=tokens.device)
    return torch.arange(tokens.shape[1], device=tokens.device) == places[:, None]
