"""Small worlds: a tabular policy, all of its responses, their scores and exact values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

END = 0  # the token that ends a response
OUTSIDE = 7.0  # the value outside masks, which nothing may read

Divergence = Literal["sequence", "token", "reverse", "variation"]
DIVERGENCES: tuple[Divergence, ...] = ("sequence", "token", "reverse", "variation")


@attrs.frozen(kw_only=True, eq=False)
class SmallWorld:
    """A policy, a reference, a sampling policy, and a score for every response; all float64.

    A response [W] is tokens up to the first `END`, or `horizon` of them. Each token is drawn from logits [V] that
    depend on the prompt and the tokens before it, its place. There are P prompts, S responses to each, and N places.
    """

    logits: Tensor  # [P, N, V]
    ref_logits: Tensor  # [P, N, V]
    sampler_logits: Tensor  # [P, N, V], equal to the policy's unless it lags
    scores: Tensor  # [P, S]
    value_errors: Tensor  # [P, N], the critic's errors
    tokens: Tensor  # [S, W] int64
    places: Tensor  # [S, W] int64
    mask: Tensor  # [S, W] bool
    horizon: int
    made: str  # the call that made it

    def log_probs(self, logits: Tensor) -> Tensor:
        """The log-prob of every token under these logits, [P, S, W]; 0 outside the mask."""
        every = logits.log_softmax(-1)[:, self.places]
        return every.gather(3, self.tokens.expand(len(logits), -1, -1)[..., None])[..., 0].where(self.mask, 0.0)

    def values(self, kl_coef: float = 0.0) -> Tensor:
        """The critic's value before each token, [P, S, W]: the expectation of the score minus kl_coef * the KL
        estimates k1 of the tokens from it on, plus the place's error; 0 outside the mask."""
        log_p = self.log_probs(self.logits)
        away = (log_p - self.log_probs(self.ref_logits)).flip(-1).cumsum(-1).flip(-1)
        to_go = self.scores[..., None] - kl_coef * away
        chance = log_p.sum(-1).exp()[..., None].where(self.mask, 0.0)
        place = self.places.expand(len(log_p), -1, -1).flatten(1)
        totals = [
            torch.zeros_like(self.value_errors).scatter_add(1, place, x.flatten(1)) for x in (chance * to_go, chance)
        ]
        exact = totals[0] / totals[1].where(totals[1] > 0, 1.0)
        return (exact + self.value_errors).gather(1, place).view_as(log_p).where(self.mask, 0.0)

    def baselines(self) -> Tensor:
        """The score of each prompt's greedy response, [P]."""
        likeliest = self.logits.argmax(-1)[:, self.places]
        chosen = ((likeliest == self.tokens) | ~self.mask).all(-1)
        return (chosen * self.scores).sum(-1)

    def squares(self) -> Tensor:
        """The sum of squared probabilities at each token's place, [P, S, W]."""
        return self.logits.softmax(-1).square().sum(-1)[:, self.places]

    def slopes(self) -> Tensor:
        """The gradient of each token's log-prob by all logits, [P, S, W, P * N * V]: 1 at its own logit, minus the
        probabilities of its place; 0 outside the mask."""
        p, (prompts, places, words) = self.logits.softmax(-1), self.logits.shape
        ones = torch.eye(words, dtype=p.dtype)
        own = (ones[self.tokens] - p[:, self.places]) * self.mask[..., None]  # [P, S, W, V]
        at = torch.eye(places, dtype=p.dtype)[self.places]  # [S, W, N]
        inner = torch.einsum("pswv,swn->pswnv", own, at)
        return torch.einsum("pswnv,pq->pswqnv", inner, torch.eye(prompts, dtype=p.dtype)).flatten(3)

    def objective(self, logits: Tensor, kl_coef: float = 0.0, of: Divergence = "sequence") -> Tensor:
        """The mean over prompts of E[score] - kl_coef * a divergence from the reference, 0-d; it is maximised.

        "sequence" is KL(policy || reference) of whole responses. The others are sums over tokens of a divergence
        between the distributions at the token's place, under the places that the policy visits, held constant: "token"
        KL(policy || reference), "reverse" KL(reference || policy), "variation" twice the total variation.
        """
        log_p = self.log_probs(logits).sum(-1)
        reward = (log_p.exp() * self.scores).sum(-1)
        if of == "sequence":
            away = (log_p.exp() * (log_p - self.log_probs(self.ref_logits).sum(-1))).sum(-1)
            return (reward - kl_coef * away).mean()
        log_own, log_ref = logits.log_softmax(-1), self.ref_logits.log_softmax(-1)
        at_place = {
            "token": log_own.exp() * (log_own - log_ref),
            "reverse": log_ref.exp() * (log_ref - log_own),
            "variation": (log_own.exp() - log_ref.exp()).abs(),
        }[of].sum(-1)
        visited = log_p.detach().exp()[..., None].where(self.mask, 0.0)
        return (reward - kl_coef * (visited * at_place[:, self.places]).sum((1, 2))).mean()

    def gradient(self, kl_coef: float = 0.0, of: Divergence = "sequence") -> Tensor:
        """The gradient of -objective, which a step minimises, by all logits, flat."""
        leaf = self.logits.clone().requires_grad_()
        return torch.autograd.grad(-self.objective(leaf, kl_coef, of), leaf)[0].flatten()


def world(
    *,
    prompts: int = 1,
    vocabulary: int = 3,
    horizon: int = 3,
    seed: int = 0,
    binary: bool = False,
    lag: float = 0.0,
    critic_error: float = 0.0,
    gap: bool = False,
) -> SmallWorld:
    """Draw a world: normal logits, a reference close to them, and normal scores, or scores of 0 and 1 (`binary`).

    `lag` is the standard deviation of the sampling policy's logits from the policy's, and `critic_error` the standard
    deviation of a critic's values from the exact ones. With a `gap` an environment's token, outside the mask, follows
    the first token of longer responses. Raises ValueError for sizes below 1, and a vocabulary below 2.
    """
    if min(prompts, horizon) < 1 or vocabulary < 2:
        raise ValueError(f"prompts={prompts}, vocabulary={vocabulary}, horizon={horizon}: give 1, 2 and 1 or more")
    responses = all_responses(vocabulary, horizon)
    heads = sorted({s[:t] for s in responses for t in range(len(s))}, key=lambda head: (len(head), head))
    tokens, places, mask = _in_columns(responses, heads, [0, *range(1 + gap, horizon + gap)])
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    sizes = (prompts, len(heads), vocabulary)
    logits, away, moved = (draw(*sizes) for _ in range(3))
    scores = draw(prompts, len(responses))
    scores = (scores > scores.median(1, keepdim=True).values).double() if binary else scores
    given = {"prompts": prompts, "vocabulary": vocabulary, "horizon": horizon, "seed": seed, "binary": binary}
    given |= {"lag": lag, "critic_error": critic_error, "gap": gap}
    return SmallWorld(
        logits=logits,
        ref_logits=logits + 0.5 * away,
        sampler_logits=logits + lag * moved,
        scores=scores,
        value_errors=critic_error * draw(prompts, len(heads)),
        tokens=tokens,
        places=places,
        mask=mask,
        horizon=horizon,
        made=f"laws.world({', '.join(f'{name}={value}' for name, value in given.items() if value)})",
    )


def all_responses(vocabulary: int, horizon: int, *, end: int = END) -> tuple[tuple[int, ...], ...]:
    """All responses: tokens up to the first `end`, or `horizon` of them."""
    others = [token for token in range(vocabulary) if token != end]
    return tuple(
        (*head, last)
        for length in range(1, horizon + 1)
        for head in itertools.product(others, repeat=length - 1)
        for last in (range(vocabulary) if length == horizon else (end,))
    )


def _in_columns(
    responses: Sequence[tuple[int, ...]], heads: Sequence[tuple[int, ...]], columns: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Place responses in columns: token t of a response is in column `columns[t]`. Returns the tokens, the index in
    `heads` of the tokens before each token, and the mask; all [S, W]."""
    shape = (len(responses), columns[-1] + 1)
    tokens, places = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, response in enumerate(responses):
        for t, token in enumerate(response):
            tokens[row, columns[t]], places[row, columns[t]] = token, heads.index(response[:t])
            mask[row, columns[t]] = True
    return tokens, places, mask


def worlds(*, binary: bool = False, lag: float = 0.0, critic_error: float = 0.0) -> tuple[SmallWorld, ...]:
    """Worlds, drawn as by `world`, of growing sizes, from one prompt and one step to three steps with a gap; the
    default of `check_gradient`."""
    sizes = ((1, 2, 1, False), (1, 2, 2, False), (1, 3, 2, False), (2, 2, 2, True), (1, 3, 3, True))
    return tuple(
        world(
            prompts=prompts,
            vocabulary=vocabulary,
            horizon=horizon,
            seed=seed,
            binary=binary,
            lag=lag,
            critic_error=critic_error,
            gap=gap,
        )
        for seed, (prompts, vocabulary, horizon, gap) in enumerate(sizes)
    )


@attrs.frozen(kw_only=True, eq=False)
class Batches:
    """All batches of n responses to each prompt, as R stacked rows, each with its batch's index (`numbers`)."""

    prompts: Tensor  # [R] int64: the index of each row's prompt
    responses: Tensor  # [R] int64: the index of each row's response
    numbers: Tensor  # [R] int64: the index of each row's batch
    chances: Tensor  # [count] float64: the probability of each batch
    count: int

    @property
    def rows(self) -> int:
        """The number of rows in each batch."""
        return len(self.numbers) // self.count


def all_batches(of: SmallWorld, n: int) -> Batches:
    """List the batches that a world's sampling policy can draw: for each prompt all multisets of n responses."""
    log_p = of.log_probs(of.sampler_logits).sum(-1)
    every = list(itertools.combinations_with_replacement(range(len(of.tokens)), n))
    orders = [math.factorial(n) / math.prod(math.factorial(s.count(x)) for x in set(s)) for s in every]
    sets = torch.tensor(every)
    own = torch.tensor(orders, dtype=torch.float64) * log_p[:, sets].sum(-1).exp()  # [P, sets]
    prompts = len(log_p)
    picks = torch.cartesian_prod(*[torch.arange(len(sets))] * prompts).view(-1, prompts)
    shape = (len(picks), prompts, n)
    return Batches(
        prompts=torch.arange(prompts)[None, :, None].expand(shape).flatten(),
        responses=sets[picks].flatten(),
        numbers=torch.arange(len(picks))[:, None, None].expand(shape).flatten(),
        chances=torch.stack([own[p, picks[:, p]] for p in range(prompts)]).prod(0),
        count=len(picks),
    )
