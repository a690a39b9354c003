"""Exact values: of tasks with a single right response, and of small games by dynamic programming."""

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

    `log_probs` [B, A] are the policy's log-probs of the right `answers` [B, A], end-of-sequence token included. If the
    tokens of a response [B, T] before t match the answer, the policy completes it with the probability of the answer's
    tokens from t on; else with probability 0. The reward comes with the last token, and `gamma` discounts it once for
    each token before. The masks are True at the first tokens of each row; the result is in the dtype of `log_probs`,
    0 outside `mask`. Raises ValueError for other shapes or dtypes.
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
    """A Markov decision process as edge lists: P states with a token to choose, E actions (tokens), L transitions.

    Action e is taken in state `at[e]`. It ends the game with some probability, and `ends[e]` is that probability times
    the expected final score; or it leads to state `to[l]` with probability `chance[l]`, for every l with `by[l]` = e.
    No state is more than `height` actions away from the end. All other tokens end the game with score 0.
    """

    at: Int[Tensor, " e"]
    ends: Float[Tensor, " e"]
    by: Int[Tensor, " l"]
    to: Int[Tensor, " l"]
    chance: Float[Tensor, " l"]
    places: int
    height: int


class GameValues(NamedTuple):
    """State values [P] and action values [E] of a game, float64."""

    values: Float[Tensor, " p"]
    action_values: Float[Tensor, " e"]


def game_values(probs: Float[Tensor, " e"], tree: GameTree, *, gamma: float = 1.0) -> GameValues:
    """The values of a game under the policy that takes the tree's actions with probabilities `probs` [E].

    Computed by dynamic programming: action value = ends + gamma * (the expected value of the next state), and value =
    sum over a state's actions of probability * action value. Raises ValueError for other shapes.
    """
    if probs.shape != tree.at.shape:
        raise ValueError(f"probs must be [{len(tree.at)}], one for each of the tree's tokens, got {list(probs.shape)}")
    p, ends, chance = (x.detach().double() for x in (probs, tree.ends, tree.chance))
    values, action_values = ends.new_zeros(tree.places), ends
    for _ in range(tree.height):
        action_values = ends + gamma * torch.zeros_like(ends).index_add(0, tree.by, chance * values[tree.to])
        values = torch.zeros_like(values).index_add(0, tree.at, p * action_values)
    return GameValues(values, action_values)


def _to_go(x: Tensor) -> Tensor:
    return x.flip(1).cumsum(1).flip(1)
