"""Rewards of steps on the tokens of a rollout. Torch is imported inside functions, as in `scoring`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fppo.data.pieces import pieces_of
from fppo.rewards.functions import RewardTerm
from fppo.workers.sample import Sample, StepRewards

if TYPE_CHECKING:
    from torch import Tensor

    from fppo.batch import Rollout


def rewards_of_tokens(
    name: str, steps: Sequence[StepRewards | None], samples: Sequence[Sample], rollout: Rollout, tokenizer: Any
) -> Tensor:
    """The steps that a function (`name`) gave for each sample, at their last tokens, [B, T] float64; nan elsewhere.

    Raises ValueError for a response whose tokens do not spell its text one by one, if steps end at characters.
    """
    import torch

    spelled = [number for number, own in enumerate(steps) if own is not None and own.ends is not None]
    texts = _text_ends([samples[number] for number in spelled], tokenizer) if spelled else []
    ends = dict(zip(spelled, texts, strict=True))
    entries: list[float | None] = []
    for number, (own, sample) in enumerate(zip(steps, samples, strict=True)):
        row: list[float | None] = [None] * len(sample.response_tokens)
        if own is not None and own.ends is None:
            row = [*own.rewards]
        elif own is not None and own.ends and row:
            if ends[number][-1] != len(sample.response):
                raise ValueError(
                    f"the reward {name!r} returned steps that end at characters, and the tokens of sample {number} do "
                    "not spell its response one by one: return a list of one number for each response token"
                )
            for end, reward in zip(own.ends, own.rewards, strict=True):
                place = bisect_left(ends[number], end) if end < len(sample.response) else len(row) - 1
                row[place] = (row[place] or 0.0) + (reward or 0.0)
        entries += row
    width = rollout.response_mask.shape[1]
    present = rollout.attention_mask[:, -width:].cpu().bool()
    placed = torch.full(present.shape, torch.nan, dtype=torch.float64)
    placed[present] = torch.tensor([torch.nan if x is None else x for x in entries], dtype=torch.float64)
    return placed


def _text_ends(samples: Sequence[Sample], tokenizer: Any) -> list[list[int]]:
    """The characters of each sample's response up to the end of each of its tokens; special tokens add none."""

    def decoded(token: int, *, special: bool) -> str:
        return tokenizer.decode([token], skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    distinct = {token for sample in samples for token in sample.response_tokens}
    hidden = {x for x in distinct if not decoded(x, special=False) and decoded(x, special=True)}
    shown = [[token for token in sample.response_tokens if token not in hidden] for sample in samples]
    pieces = pieces_of(tokenizer, shown, [sample.response for sample in samples])
    result = []
    for sample, own in zip(samples, pieces, strict=True):
        rest = iter(own)
        result.append([*accumulate(0 if x in hidden else len(next(rest)) for x in sample.response_tokens)])
    return result


def process_rewards(
    terms: Sequence[RewardTerm], scores: Mapping[str, Tensor], steps: Mapping[str, Tensor], rollout: Rollout
) -> Tensor:
    """The weighted sum of all terms by tokens, [B, T] float32: the rewards of steps at their last tokens, and other
    scores, which are steps of their own, at the rows' last tokens; nan where no step ends.

    `scores` [B] are those of each term, and `steps` [B, T] those of terms that gave some. A step that ends at a token
    which the policy did not choose, such as a tool's, counts at the policy's last token before it, or else at its
    first. Rewards of an environment's turns stay at their tokens, out of the score at the last one.
    """
    import torch

    from fppo import batch

    mask = rollout.response_mask.cpu()
    last = batch.last_tokens(mask)
    total, ends = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros_like(mask)
    for term in terms:
        if term.weight:
            own = scores[term.name].cpu()[:, None].where(last, torch.nan)
            if term.name in steps:
                given = steps[term.name]
                own = _on_chosen(given, mask).where(~given.isnan().all(1, keepdim=True), own)
            total, ends = total + term.weight * own.nan_to_num(nan=0.0), ends | ~own.isnan()
    if rollout.turn_rewards is not None:
        turns = rollout.turn_rewards.cpu().double().nan_to_num(nan=0.0).where(mask, 0.0)
        total = total + turns - turns.sum(1, keepdim=True).where(last, 0.0)
        ids = None if rollout.turn_ids is None else rollout.turn_ids.cpu()
        ends = ends | batch.turn_bounds(mask, ids)[0]
    return total.where(ends, torch.nan).float().to(rollout.tokens.device)


def _on_chosen(rewards: Tensor, mask: Tensor) -> Tensor:
    """Move rewards [B, T] to tokens that the policy chose; nan where there is none."""
    import torch

    if not mask.numel():
        return rewards
    before = torch.arange(mask.shape[1]).expand_as(mask).where(mask, -1).cummax(1).values
    place = before.where(before >= 0, mask.long().argmax(1, keepdim=True))
    there = ~rewards.isnan() & mask.any(1, keepdim=True)
    moved = torch.zeros_like(rewards).scatter_add(1, place, rewards.where(there, 0.0))
    return moved.where(torch.zeros_like(rewards).scatter_add(1, place, there.double()) > 0, torch.nan)
