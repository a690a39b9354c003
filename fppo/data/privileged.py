"""Privileged inputs: the ground truth for a critic, in front of the prompt or as features of the response; and a
teacher's own prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fppo import tree
from fppo.batch import Column
from fppo_kernels.padding import sent
from fppo_kernels.shapes import Bool, Float, Int

Encode = Callable[[str], Sequence[int]]
TRUTH_SIGNS = 2  # features of the agreement of a response with the ground truth
TEACHER_PROMPT = "teacher_prompt_ids"  # the key under which extras hold the tokens that a teacher reads as the prompt


class Judged(Protocol):
    """The columns that `with_truth` reads of a record."""

    @property
    def tokens(self) -> Tensor: ...  # [B, S] int64
    @property
    def attention_mask(self) -> Tensor: ...  # [B, S] bool
    @property
    def ground_truth(self) -> Column: ...


class Answered(Protocol):
    """The columns that `truth_signs` reads of a record."""

    @property
    def tokens(self) -> Tensor: ...  # [B, P + T] int64
    @property
    def response_mask(self) -> Tensor: ...  # [B, T] bool
    @property
    def ground_truth(self) -> Column: ...


class Prompted(Protocol):
    """The columns that `with_teacher_prompt` reads of a record."""

    @property
    def tokens(self) -> Tensor: ...  # [B, P + T] int64
    @property
    def attention_mask(self) -> Tensor: ...  # [B, P + T] bool
    @property
    def response_mask(self) -> Tensor: ...  # [B, T] bool
    @property
    def extras(self) -> Column: ...


R = TypeVar("R", bound=Judged)
Q = TypeVar("Q", bound=Prompted)


def with_truth(rows: R, *, encode: Encode, limit: int) -> R:
    """The rows with the tokens of their ground truth in front of the prompt, at most the first `limit` of them.

    `tokens` and `attention_mask` [B, S] become [B, G + S], padded on the left; the other columns stay, so that values
    of the rows belong to the same response tokens [B, T]. A ground truth that is not text is encoded as JSON. For the
    critic of an asymmetric pair (Pinto et al., arXiv:1710.06542): its extra input does not depend on the policy's
    actions, so the policy gradient is unchanged.
    """
    tokens, seen = _padded(_truths(rows.ground_truth, encode, limit), like=rows)
    return tree.replace(
        rows,
        tokens=torch.cat([tokens, rows.tokens], 1),
        attention_mask=torch.cat([seen, rows.attention_mask], 1),
    )


def with_teacher_prompt(rows: Q) -> Q:
    """The rows with the prompts that their extras hold for a teacher, in front of the same responses.

    `tokens` and `attention_mask` [B, P + T] become [B, G + T], padded on the left. So a teacher may know what the
    policy does not: instructions, examples, the right answer. Raises ValueError for rows without such prompts.
    """
    if not all(TEACHER_PROMPT in extra for extra in rows.extras):
        raise ValueError("rows lack a teacher's prompts: they were drawn without data.teacher_prompt")
    responses = rows.tokens.shape[1] - rows.response_mask.shape[1]
    tokens, seen = _padded([extra[TEACHER_PROMPT] for extra in rows.extras], like=rows)
    return tree.replace(
        rows,
        tokens=torch.cat([tokens, rows.tokens[:, responses:]], 1),
        attention_mask=torch.cat([seen, rows.attention_mask[:, responses:]], 1),
    )


def truth_signs(rows: Answered, *, encode: Encode, limit: int) -> Float[Tensor, "b t f"]:
    """Agreement of the response before each token with the ground truth, float32 [B, T, TRUTH_SIGNS].

    Tokens are compared: at most the first `limit` of the truth, and those of the response in the mask. The first
    feature is 1 where the response so far is a prefix of the truth, the second where it contains the truth as a run of
    tokens; else, and outside the mask, they are 0. A ground truth that is not text is encoded as JSON. Features at t do
    not depend on token t, so a value computed from them leaves the policy gradient unchanged.
    """
    mask = rows.response_mask
    truths = _truths(rows.ground_truth, encode, limit)
    width = max(1, *map(len, truths)) if truths else 1
    truth = sent(torch.tensor([ids + [-1] * (width - len(ids)) for ids in truths]).view(-1, width), mask.device)
    order = mask.long().argsort(dim=1, descending=True, stable=True)  # the policy's own tokens, then the others
    said = rows.tokens[:, -mask.shape[1] :].gather(1, order).where(mask.gather(1, order), -2)
    before = pad(mask, (1, 0))[:, :-1].cumsum(1)  # number of the policy's tokens before each
    agrees = torch.stack([_begins(said, truth), _has_within(said, truth)], -1)
    agrees = agrees.gather(1, before[..., None].expand(-1, -1, TRUTH_SIGNS))
    return (agrees & mask[..., None]).float()


def _padded(texts: Sequence[Sequence[int]], *, like: Judged | Prompted) -> tuple[Tensor, Tensor]:
    """Pad lists of token ids on the left; return tokens and attention mask, in the dtypes of `like`."""
    width = max(map(len, texts), default=0)
    tokens = like.tokens.new_tensor([[0] * (width - len(ids)) + [*ids] for ids in texts]).view(len(texts), width)
    gaps = torch.tensor([width - len(ids) for ids in texts], dtype=torch.int64)
    return tokens, (torch.arange(width) >= gaps[:, None]).to(like.attention_mask)


def _begins(response: Int[Tensor, "b t"], truth: Int[Tensor, "b g"]) -> Bool[Tensor, "b n"]:
    """Whether the first n tokens of a response are a prefix of the truth, for n from 0 to T; bool [B, T + 1]."""
    width = response.shape[1]
    same = response == pad(truth, (0, max(width - truth.shape[1], 0)), value=-1)[:, :width]
    return pad(same.cumprod(1), (1, 0), value=1).bool()


def _has_within(response: Int[Tensor, "b t"], truth: Int[Tensor, "b g"]) -> Bool[Tensor, "b n"]:
    """Whether the first n tokens of a response contain the truth as a run, for n from 0 to T; bool [B, T + 1]. False
    for an empty truth."""
    width, sizes = response.shape[1], (truth >= 0).sum(1, keepdim=True)
    wide = pad(response, (0, truth.shape[1]), value=-2)
    here = (sizes > 0).expand_as(response)  # positions at which the truth starts
    for place in range(truth.shape[1]):
        here = here & ((wide[:, place : place + width] == truth[:, place, None]) | (place >= sizes))
    ends = torch.arange(width, device=response.device) + sizes
    within = pad(torch.zeros_like(response), (0, 1 + truth.shape[1])).scatter_add(1, ends, here.long())
    return within.cumsum(1)[:, : width + 1] > 0


def _truths(truths: Column, encode: Encode, limit: int) -> list[list[int]]:
    """The first `limit` tokens of each ground truth; every text is encoded once."""
    texts = [truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False) for truth in truths]
    known = {text: list(encode(text))[:limit] for text in dict.fromkeys(texts)}
    return [known[text] for text in texts]
