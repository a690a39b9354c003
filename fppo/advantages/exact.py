"""Values that are known: those of tasks in which one response is right, and of games that are small."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fppo.losses._common import check_mask, check_tokens
from fppo.shapes import Mask, Tokens
from fppo_kernels.shapes import Bool, Float, Int


def exact_values(
    log_probs: Float[Tensor, "b a"],
    answers: Int[Tensor, "b a"],
    answer_mask: Bool[Tensor, "b a"],
    responses: Int[Tensor, "b t"],
    mask: Mask,
    *,
    gamma: float = 1.0,
) -> Tokens:
    """The expected reward before each token of `responses`, where the answer is worth 1 and all else 0; [B, T].

    `log_probs` [B, A] are the policy's, of the tokens of the right `answers` [B, A], the end of the response among
    them. If the tokens of a response [B, T] before t are the answer's, the policy goes on to the whole answer with the
    probability of its tokens from t on; else it cannot. The reward comes with the last token, and `gamma` discounts it
    once for each token before that. The masks are True at the first tokens of each row; the result is in the dtype of
    `log_probs`, 0 outside `mask`. Raises ValueError for other shapes or dtypes.
    """
    check_mask(mask)
    check_tokens(answer_mask, log_probs=log_probs)
    if answers.shape != answer_mask.shape or responses.shape != mask.shape or len(mask) != len(answer_mask):
        shapes = {"answers": answers, "answer_mask": answer_mask, "responses": responses, "mask": mask}
        raise ValueError(f"the shapes do not fit: { {name: list(x.shape) for name, x in shapes.items()} }")
    wider = (0, max(mask.shape[1] - answer_mask.shape[1], 0))  # longer responses than any answer have no value
    width = mask.shape[1]
    left = pad(_to_go(answer_mask.double()), wider)[:, :width]
    completed = pad(_to_go(log_probs.detach().double().where(answer_mask, 0.0)), wider)[:, :width].exp()
    same = (pad(answers, wider)[:, :width] == responses) & (left > 0)
    follows = pad(same.long().cumprod(1), (1, 0), value=1)[:, :width].bool() & (left > 0) & mask
    return (completed * gamma ** (left - 1).clamp(min=0)).where(follows, 0.0).to(log_probs.dtype)


class GameTree(NamedTuple):
    """A game as what its player can do: P places at which a token is due, E tokens that go on, L ways they lead on.

    Token e is said at place `at[e]`. Then the game is over with some probability, and `ends[e]` is that times the score
    expected then; or with probability `chance[l]`, for the l whose `by[l]` is e, the place `to[l]` is next. No place is
    more than `height` tokens from where nothing follows. All other tokens end the game with 0.
    """

    at: Int[Tensor, " e"]
    ends: Float[Tensor, " e"]
    by: Int[Tensor, " l"]
    to: Int[Tensor, " l"]
    chance: Float[Tensor, " l"]
    places: int
    height: int


class GameValues(NamedTuple):
    """The expected score at each place [P], and once each token has been said [E]; float64."""

    values: Float[Tensor, " p"]
    said: Float[Tensor, " e"]


def game_values(probs: Float[Tensor, " e"], tree: GameTree, *, gamma: float = 1.0) -> GameValues:
    """The values of a game whose player says each of the tree's tokens with the probability `probs` [E].

    They are those of dynamic programming: said = ends + gamma * (the expected value of the next place), and value =
    sum over a place's tokens of probability times said. Raises ValueError for other shapes.
    """
    if probs.shape != tree.at.shape:
        raise ValueError(f"probs must be [{len(tree.at)}], one for each of the tree's tokens, got {list(probs.shape)}")
    p, ends, chance = (x.detach().double() for x in (probs, tree.ends, tree.chance))
    values, said = ends.new_zeros(tree.places), ends
    for _ in range(tree.height):
        said = ends + gamma * torch.zeros_like(ends).index_add(0, tree.by, chance * values[tree.to])
        values = torch.zeros_like(values).index_add(0, tree.at, p * said)
    return GameValues(values, said)


def _to_go(x: Tensor) -> Tensor:
    return x.flip(1).cumsum(1).flip(1)
