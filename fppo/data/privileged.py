"""What a critic may know and the policy must not: the ground truth, in front of the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fppo import tree
from fppo.batch import Column


class Judged(Protocol):
    """What is read of a record."""

    @property
    def tokens(self) -> Tensor: ...  # [B, S] int64
    @property
    def attention_mask(self) -> Tensor: ...  # [B, S] bool
    @property
    def ground_truth(self) -> Column: ...


R = TypeVar("R", bound=Judged)


def with_truth(rows: R, *, encode: Callable[[str], Sequence[int]], limit: int) -> R:
    """The rows with the tokens of their ground truth in front of the prompt, at most the first `limit` of them.

    `tokens` and `attention_mask` [B, S] become [B, G + S], padded on the left; all else stays, so that values of these
    rows are those of the same response tokens [B, T]. A ground truth that is no text is encoded as JSON. The critic of
    an asymmetric pair (Pinto et al., arXiv:1710.06542): what it knows beyond the policy is no action of the policy's,
    so the policy gradient stays what it was.
    """
    texts = [truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False) for truth in rows.ground_truth]
    known = [list(encode(text))[:limit] for text in texts]
    width = max(map(len, known), default=0)
    tokens = rows.tokens.new_tensor([[0] * (width - len(ids)) + ids for ids in known]).view(len(known), width)
    gaps = torch.tensor([width - len(ids) for ids in known], dtype=torch.int64)
    seen = (torch.arange(width) >= gaps[:, None]).to(rows.attention_mask)
    return tree.replace(
        rows,
        tokens=torch.cat([tokens, rows.tokens], 1),
        attention_mask=torch.cat([seen, rows.attention_mask], 1),
    )
