"""The controller of the entropy bonus, and quantiles of entropies from counts that add up over any split of the rows.

In: entropies in nats, [B, T] or a step's mean. Out: the controller's next state, or metrics.
Begin with `update_entropy`; `entropy_counts` and `entropy_quantiles` are the two halves of a mini-batch's quantiles.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from fppo.losses._common import check_tokens, positive, unknown
from fppo.metrics import Mean, Metrics, Sum
from fppo.shapes import Mask, Number, Tokens
from fppo.tree import state

UNITS = ("nats", "start")
QUANTILES = (10, 50, 90)
_LINEAR = 0.003  # a bonus above it is moved by a part of itself, one below it by a part of this
_LEAST, _MOST, _PER_OCTAVE = 2.0**-20, 2.0**5, 64  # bounds of the counted entropies in nats, and bins from x to 2 x
_BINS = round(math.log2(_MOST / _LEAST)) * _PER_OCTAVE + 1


def _float64(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _unknown() -> Tensor:
    return _float64(math.nan)


@state
class EntropyState:
    """The controller of the entropy bonus: leaves, 0-d float64, so that checkpoints store it exactly."""

    coef: Tensor = attrs.field(converter=_float64)  # the factor of the bonus in the next step
    level: Tensor = attrs.field(factory=_unknown)  # asinh(coef / 0.003) without the last error; NaN before a step
    start: Tensor = attrs.field(factory=_unknown)  # the entropy of the first step; NaN before it


def entropy_target(state: EntropyState, *, target: float, unit: str = "nats") -> Number:
    """The entropy that the controller steers to, in nats per token: `target`, or with `unit` "start" this part of the
    first step's, NaN before it. 0-d float64. Raises ValueError for another unit."""
    if unit not in UNITS:
        unknown("unit of an entropy", unit, UNITS)
    return target * (state.start if unit == "start" else torch.ones_like(state.start))


def update_entropy(
    state: EntropyState,
    entropy: Mean,
    *,
    target: float,
    unit: str = "nats",
    rate: float = 0.2,
    damping: float = 20.0,
    low: float = 0.0,
    high: float = 1.0,
) -> EntropyState:
    """The next state of the controller after a step with this mean `entropy` per token, in nats.

    A PI controller. With the error e = log(target / entropy), clipped to +-1, its integral is level + rate * e, kept
    within asinh(low / 0.003) and asinh(high / 0.003), and the factor of the bonus becomes
    clip(0.003 * sinh(level + damping * rate * e), low, high). So a factor above 0.003 moves by a part of itself, and
    one `rate` does for policies that need 0.001 and for those that need 0.5. Without `damping` the entropy swings about
    the target, since the factor moves its slope. See `entropy_target` for `unit`. Without tokens, or if the entropy is
    not finite, the state stays. Raises ValueError for another unit, a target or rate that is not above 0, and for
    low >= high.
    """
    positive("target", target)
    positive("rate", rate)
    if not low < high:
        raise ValueError(f"low={low}, high={high}: low must be less than high")
    now = entropy.total.to(state.coef) / entropy.count.to(state.coef).clamp(min=1)
    known = (entropy.count.to(state.coef) > 0) & now.isfinite()
    start = torch.where(state.start.isnan() & known, now, state.start)
    goal = entropy_target(attrs.evolve(state, start=start), target=target, unit=unit)
    error = (goal.clamp(min=1e-9) / now.clamp(min=1e-9)).log().clamp(-1.0, 1.0)
    least, most = (math.asinh(bound / _LINEAR) for bound in (low, high))
    before = torch.where(state.level.isnan(), (state.coef / _LINEAR).asinh(), state.level)
    level = (before + rate * error).clamp(least, most)
    coef = (_LINEAR * (level + damping * rate * error).clamp(least, most).sinh()).clamp(low, high)
    return EntropyState(
        coef=torch.where(known, coef, state.coef), level=torch.where(known, level, state.level), start=start
    )


def entropy_counts(entropy: Tokens, mask: Mask, name: str) -> Metrics:
    """A metric of the number of tokens of the mask in each of 1601 bins of `entropy` [B, T], int64, for
    `entropy_quantiles` of this name: it adds up over micro-batches and ranks.

    There are 64 bins of equal ratio from any entropy to twice that, from 2^-20 to 32 nats, after one for less.

    Raises ValueError unless `entropy` is floating and `mask` bool, both [B, T].
    """
    check_tokens(mask, entropy=entropy)
    seen = entropy.detach().double().where(mask, 0.0)
    places = ((seen.clamp(min=_LEAST) / _LEAST).log2() * _PER_OCTAVE).long().clamp(max=_BINS - 2) + 1
    places = places.where(seen >= _LEAST, 0).flatten()
    none = torch.zeros(_BINS, dtype=torch.int64, device=places.device)
    return {f"{name}/counts": Sum(none.scatter_add(0, places, mask.flatten().long()))}


def entropy_quantiles(report: Metrics, name: str) -> Metrics:
    """The metrics with `entropy_counts` of this name replaced by `name`/p10, p50 and p90, of all tokens counted.

    Each is the entropy that such a part of the tokens does not exceed, to within 0.6 %; 0 below 2^-20 nats.
    """
    counts = report.get(f"{name}/counts")
    if not isinstance(counts, Sum):
        return report
    upto = counts.value.cumsum(0)
    there = (upto[-1:] > 0).to(torch.float64)[0]
    found: Metrics = {}
    for percent in QUANTILES:
        rank = (upto[-1] * percent + 99) // 100  # the first token by entropy that is not below the quantile
        place = (upto < rank.clamp(min=1)).sum().clamp(max=_BINS - 1)
        value = _LEAST * 2 ** ((place.to(torch.float64) - 0.5) / _PER_OCTAVE)
        found[f"{name}/p{percent}"] = Mean(torch.where(place > 0, value, 0.0) * there, there)
    return {key: metric for key, metric in report.items() if key != f"{name}/counts"} | found
