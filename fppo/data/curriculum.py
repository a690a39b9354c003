"""Curricula: the choice of the next prompts by earlier scores or by sources, as pure functions over a state.

A curriculum is a record of functions, as an optimizer is. Its state is an immutable tree that a run saves, so a run
that goes on from a checkpoint draws the same prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo._errors import did_you_mean
from fppo.data.prompts import PromptSet
from fppo.key import Key
from fppo.tree import replace, state, static


def nothing_to_report(counts: Any, step: int) -> Mapping[str, float]:
    """Report no numbers."""
    del counts, step
    return {}


class Curriculum(NamedTuple):
    """A way to choose prompts. All four are pure functions; states are trees of tensors, numbers and `@state` records.

    `choose` returns int64 [size], indices of prompts, and reads nothing but its arguments: `step` is the number of the
    run's step, from 0, and `key` differs for every draw. `update` gets one index and one score for each response, int64
    [B] and float64 [B], in which nan is a missing score. A score is the reward without terms that shape it, such as a
    penalty for length.
    """

    init: Callable[[PromptSet], Any]  # prompts -> state
    choose: Callable[[Any, Key, int, int], Tensor]  # state, key, step, size -> indices
    update: Callable[[Any, Tensor, Tensor], Any]  # state, indices, scores -> state
    report: Callable[[Any, int], Mapping[str, float]] = nothing_to_report  # state, step -> numbers for the metrics


@state
class Course:
    """The state of a curriculum in a run (`known`), and the step that it is at."""

    known: Any
    step: int = 0


def systematic(weights: Tensor, start: float, size: int) -> Tensor:
    """Draw `size` indices of `weights` [N] by systematic sampling; int64 [size], ascending.

    The line from 0 to `size` is divided into N parts of the lengths size * w_i / sum(w). Index i comes once for each of
    the points start, start + 1, ... inside of its part. With `start` uniform in [0, 1) the expected number of draws of
    i is exactly size * w_i / sum(w), and each actual number is that one rounded down or up (W. G. Madow, 1949, Annals
    of Mathematical Statistics 20). Raises ValueError for weights that are negative, not finite, or all 0.
    """
    weights = weights.double()
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool(weights.sum() > 0):
        raise ValueError("the weights of prompts must be finite, none negative, and not all 0")
    ends = weights.cumsum(0)
    ends = ends / ends[-1] * size  # the last one is `size` itself
    points = (torch.arange(size, dtype=torch.float64) + start).clamp(max=math.nextafter(size, 0.0))
    return torch.searchsorted(ends, points, right=True)


def draw_by_weights(weights: Tensor, key: Key, size: int, *, strata: Tensor | None = None) -> Tensor:
    """Draw `size` prompts, each as often as its weight [N] says, int64 [size] in random order.

    This is `systematic` sampling of the prompts in a random order. With `strata`, int64 [N], the prompts of one stratum
    are adjacent, so that its number of draws is the expected one, rounded down or up.
    """
    order = key.fold("order").uniform(torch.arange(len(weights)), 1)[:, 0].argsort(stable=True)
    if strata is not None:
        order = order[strata[order].argsort(stable=True)]
    start = float(key.fold("start").uniform(torch.zeros(1, dtype=torch.int64), 1))
    drawn = order[systematic(weights[order], start, size)]
    return drawn[key.fold("places").uniform(torch.arange(size), 1)[:, 0].argsort(stable=True)]


@state
class SuccessRates:
    """Counts of successes and failures of each prompt, of which earlier ones count less."""

    successes: Tensor  # [N] float64
    failures: Tensor  # [N] float64
    sources: Tensor | None = None  # [N] int64: numbers of the prompts' sources


def _count(
    counts: SuccessRates, indices: Tensor, scores: Tensor, low: float, high: float, decay: float
) -> SuccessRates:
    """Add scores to the counts of the prompts at `indices`, whose earlier counts are multiplied by `decay`.

    A score counts as (score - low) / (high - low) of a success, at least 0 and at most 1.
    """
    scored = ~scores.isnan()
    indices, rates = indices[scored], ((scores[scored] - low) / (high - low)).clamp(0.0, 1.0)
    none = torch.zeros_like(counts.successes)
    gained, lost = none.index_add(0, indices, rates), none.index_add(0, indices, 1.0 - rates)
    kept = torch.where(none.index_add(0, indices, torch.ones_like(rates)) > 0, decay, 1.0)
    return replace(counts, successes=counts.successes * kept + gained, failures=counts.failures * kept + lost)


def _rates(counts: SuccessRates, prior: float) -> Tensor:
    """Estimate the success rate of each prompt, [N]: the mean of Beta(prior + successes, prior + failures)."""
    wins, losses = counts.successes + prior, counts.failures + prior
    return wins / (wins + losses)


def _report(counts: SuccessRates, prior: float) -> dict[str, float]:
    seen = counts.successes + counts.failures > 0
    rates = _rates(counts, prior)[seen]
    numbers = {"curriculum/seen": float(seen.double().mean())}
    return numbers | ({"curriculum/success_rate": float(rates.mean())} if len(rates) else {})


def _with_uniform(weights: Tensor, explore: float, counts: SuccessRates) -> Tensor:
    """Mix weights [N] with a share `explore` of uniform ones; known sources each keep their share of the prompts."""

    def normed(x: Tensor) -> Tensor:
        if counts.sources is None:
            return x / x.sum()
        sizes = torch.bincount(counts.sources).double()
        sums = torch.zeros_like(sizes).index_add(0, counts.sources, x)
        return x / sums[counts.sources] * (sizes / sizes.sum())[counts.sources]

    return (1 - explore) * normed(weights) + explore * normed(torch.ones_like(weights))


def _numbers_of(names: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """The index of each name among the sorted distinct names, int64 [N], and the distinct names."""
    distinct = tuple(sorted(set(names)))
    numbers = {name: number for number, name in enumerate(distinct)}
    return torch.tensor([numbers[name] for name in names]), distinct


def _unseen(prompts: PromptSet, keep_sources: bool) -> SuccessRates:
    zeros = torch.zeros(len(prompts), dtype=torch.float64)
    sources = _numbers_of(prompts.sources)[0] if keep_sources else None
    return SuccessRates(successes=zeros, failures=zeros.clone(), sources=sources)


def _check(**bounds: tuple[float, float, float]) -> None:
    """Raise ValueError for a keyword outside its bounds, given as (value, least, most)."""
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise ValueError(f"{name} = {value}: must be {least:g} to {most:g}")


def _check_scores(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"high = {high}: must be more than low = {low}, the score of a failure")


_LEAST = 1e-9


def learnability(
    *,
    decay: float = 0.5,
    prior: float = 1.0,
    explore: float = 0.1,
    low: float = 0.0,
    high: float = 1.0,
    keep_sources: bool = False,
) -> Curriculum:
    """Prefer prompts that are solved sometimes: the weight of a prompt is the expected variance of its success.

    With s successes and f failures of a prompt, a = s + prior and b = f + prior, the weight is E[p (1 - p)] of
    p ~ Beta(a, b), which is a b / ((a + b) (a + b + 1)); a prompt never seen has nearly the largest. p (1 - p) is the
    learnability of Rutherford et al., 2024 (arXiv:2408.15099), for language models Foster et al., 2025
    (arXiv:2502.12272). A group of equal scores, p = 0 or 1, has no advantage to learn from.

    decay: the factor of a prompt's earlier counts whenever it is seen again, since the policy has changed.
    explore: the share of draws that is uniform over all prompts.
    low, high: the scores of a failure and of a success; those between count in part.
    keep_sources: draw from each source in proportion to its prompts; prompts are preferred only within a source.
    """
    _check(decay=(decay, 0.0, 1.0), prior=(prior, _LEAST, math.inf), explore=(explore, 0.0, 1.0))
    _check_scores(low, high)

    def choose(known: SuccessRates, key: Key, step: int, size: int) -> Tensor:
        del step
        a, b = known.successes + prior, known.failures + prior
        weights = a * b / ((a + b) * (a + b + 1))
        return draw_by_weights(_with_uniform(weights, explore, known), key, size, strata=known.sources)

    return Curriculum(
        init=lambda prompts: _unseen(prompts, keep_sources),
        choose=choose,
        update=lambda known, indices, scores: _count(known, indices, scores, low, high, decay),
        report=lambda known, step: _report(known, prior),
    )


def easy_to_hard(
    *,
    steps: int,
    begin: float = 0.9,
    end: float = 0.3,
    width: float = 0.2,
    decay: float = 0.5,
    prior: float = 1.0,
    explore: float = 0.1,
    low: float = 0.0,
    high: float = 1.0,
    keep_sources: bool = False,
) -> Curriculum:
    """Prefer prompts whose success rate, as seen so far, is near a target that falls.

    The target goes from `begin` to `end` along a line over `steps` steps, and stays there. The weight of a prompt whose
    rate is estimated as p, the mean of Beta(s + prior, f + prior), is exp(-(p - target)^2 / (2 width^2)). Gaussian
    weights around a moving difficulty: Parashar et al., 2025 (arXiv:2506.06632), who are given the difficulty; by pass
    rates, with shares of sources kept: NVIDIA, 2025 (arXiv:2512.20848). The other keywords are those of `learnability`.
    """
    _check(decay=(decay, 0.0, 1.0), prior=(prior, _LEAST, math.inf), explore=(explore, 0.0, 1.0))
    _check(steps=(steps, 1, math.inf), begin=(begin, 0.0, 1.0), end=(end, 0.0, 1.0), width=(width, _LEAST, math.inf))
    _check_scores(low, high)

    def target(step: int) -> float:
        return begin + (end - begin) * min(step / steps, 1.0)

    def choose(known: SuccessRates, key: Key, step: int, size: int) -> Tensor:
        exponents = -((_rates(known, prior) - target(step)) ** 2) / (2 * width**2)
        weights = (exponents - exponents.max()).exp().clamp(min=1e-12)  # a source far from the target has weights, too
        return draw_by_weights(_with_uniform(weights, explore, known), key, size, strata=known.sources)

    return Curriculum(
        init=lambda prompts: _unseen(prompts, keep_sources),
        choose=choose,
        update=lambda known, indices, scores: _count(known, indices, scores, low, high, decay),
        report=lambda known, step: _report(known, prior) | {"curriculum/target": target(step)},
    )


@state
class SourceCounts:
    """The source of each prompt, and the number of responses that each source has had."""

    numbers: Tensor  # [N] int64
    responses: Tensor  # [S] int64
    names: tuple[str, ...] = static()  # of the sources, sorted


def mixture(
    *,
    begin: Mapping[str, float] | None = None,
    end: Mapping[str, float] | None = None,
    steps: int = 1,
    power: float = 1.0,
) -> Curriculum:
    """Draw from each source by a weight, which may change over the steps of the run.

    The share of source k is (1 - x) begin_k / sum(begin) + x end_k / sum(end) with x = min(step / steps, 1), divided
    equally among its prompts. A source that is not named has weight 0. Without `begin` the weight of a source of n_k
    prompts is n_k^power: power 1 draws all prompts alike, 0 all sources alike, and values between favour small sources
    (Conneau and Lample, 2019, arXiv:1901.07291, 3.1). Without `end` the weights stay.
    """
    _check(steps=(steps, 1, math.inf), power=(power, 0.0, math.inf))
    for name, weights in (("begin", begin), ("end", end)):
        _check_shares(name, weights)

    def shares(known: SourceCounts, step: int) -> Tensor:
        sizes = torch.bincount(known.numbers, minlength=len(known.names)).double()
        first = sizes**power if begin is None else _named(begin, known.names)
        last = first if end is None else _named(end, known.names)
        x = min(step / steps, 1.0)
        return (1 - x) * first / first.sum() + x * last / last.sum()

    def init(prompts: PromptSet) -> SourceCounts:
        numbers, names = _numbers_of(prompts.sources)
        for setting, weights in (("begin", begin), ("end", end)):
            for source in weights or {}:
                if source not in names:
                    raise ValueError(f"{setting}: no prompt is of source {source!r}; {did_you_mean(source, names)}")
        return SourceCounts(numbers=numbers, responses=torch.zeros(len(names), dtype=torch.int64), names=names)

    def choose(known: SourceCounts, key: Key, step: int, size: int) -> Tensor:
        sizes = torch.bincount(known.numbers, minlength=len(known.names)).double()
        return draw_by_weights((shares(known, step) / sizes)[known.numbers], key, size, strata=known.numbers)

    def update(known: SourceCounts, indices: Tensor, scores: Tensor) -> SourceCounts:
        del scores
        counts = torch.bincount(known.numbers[indices], minlength=len(known.names))
        return replace(known, responses=known.responses + counts)

    def report(known: SourceCounts, step: int) -> dict[str, float]:
        del step
        drawn = known.responses.double() / max(int(known.responses.sum()), 1)
        return {f"curriculum/drawn/{name}": share for name, share in zip(known.names, drawn.tolist(), strict=True)}

    return Curriculum(init=init, choose=choose, update=update, report=report)


def _check_shares(name: str, weights: Mapping[str, float] | None) -> None:
    """Raise ValueError unless the weights of sources are a table of finite numbers of 0 or more, with one above 0."""
    if weights is None:
        return
    numbers = isinstance(weights, Mapping) and all(
        isinstance(x, int | float) and not isinstance(x, bool) for x in weights.values()
    )
    if not numbers or not all(0 <= x < math.inf for x in weights.values()) or not sum(weights.values()) > 0:
        text = "must be a table of sources with weights of 0 or more, as {gsm8k = 1.0, math = 0.5}, one above 0"
        raise ValueError(f"{name} = {weights!r}: {text}")


def _named(weights: Mapping[str, float], names: tuple[str, ...]) -> Tensor:
    return torch.tensor([float(weights.get(name, 0.0)) for name in names], dtype=torch.float64)
