"""The experts that routers choose while an engine generates, as a column of its rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class Fed(NamedTuple):
    """The experts of tokens that went through the model. The indices, of one shape or of shapes that broadcast to it,
    say where they stand: in which rows of the rollout, and in which columns from the first response token on, so that
    those of prompts are negative."""

    rows: Tensor  # [*M]
    columns: Tensor  # [*M]
    experts: Tensor  # [*M, L, k]


def of_prompts(experts: Tensor, index: Tensor, rows: Tensor, width: int) -> Fed:
    """The experts of packed prompts for the draws [P, n] of each: the first of [N, L, k] are at the flat places `index`
    [M] of prompts that are `width` wide."""
    columns = (index % width - width)[:, None]
    return Fed(rows[index // width], columns, experts[: len(index), None])


def column(fed: Sequence[Fed], rows: int, prompt: int, response: int) -> Tensor:
    """The experts of a rollout of so many rows, prompt and response positions: [B, P + T, L, k]."""
    first = fed[0].experts
    whole = first.new_zeros(rows, prompt + response, *first.shape[-2:])
    for part in fed:
        whole[part.rows, part.columns + prompt] = part.experts
    return whole


def continued(routed: Tensor, mask: Tensor, rows: Tensor, kept: Tensor, later: Tensor, later_mask: Tensor) -> Tensor:
    """The experts [B, S, L, k] of rows with this attention mask [B, S], of which `rows` [R] were gone on with: in each
    the tokens behind the first `kept` [R] have those of the `later` rollout [R, S', L, k], which has the same tokens.
    `routed` may have fewer positions than the mask."""
    whole = F.pad(routed, (0, 0, 0, 0, 0, mask.shape[1] - routed.shape[1]))
    row, source = later_mask.nonzero(as_tuple=True)
    own, target = mask[rows].nonzero(as_tuple=True)
    new = (later_mask.cumsum(1)[row, source] > kept[row]).nonzero()[:, 0]
    whole[rows[own[new]], target[new]] = later[row[new], source[new]]
    return whole


def completed(routed: Tensor, mask: Tensor) -> Tensor:
    """A rollout's experts [B, S, L, k] with zeros outside the attention mask [B, S]. The last token of a row, which no
    engine runs, has those of the token before it: no log-prob depends on them, and loads stay as they are."""
    last = mask & ~F.pad(mask, (0, 1))[:, 1:]
    whole = routed.where(~last[..., None, None], routed.roll(1, 1))
    return whole.where(mask[..., None, None], 0)
