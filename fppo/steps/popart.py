"""PopArt: a critic that learns returns normalised by their running mean and deviation."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch
from torch import Tensor

from fppo import metrics, tree
from fppo.batch import Experience
from fppo.key import Key
from fppo.metrics import Mean, Metrics
from fppo.models.model import SCORE_BIAS, SCORE_WEIGHT, Params
from fppo.shapes import Mask, Tokens
from fppo.steps.train_state import Scale, TrainState

_LEAST = 1e-4  # smaller deviations count as this: equal returns have none


class UpdateFn(Protocol):
    """Protocol of an update of a critic, such as `UpdateCritic`."""

    def __call__(
        self, state: TrainState, batch: Experience, *, key: Key, donate: bool
    ) -> tuple[TrainState, Metrics]: ...


def moved(scale: Scale, returns: Tokens, mask: Mask, *, rate: float) -> Scale:
    """Update the statistics with a batch, whose weight is `rate`: after n batches, batch i has the weight
    rate * (1 - rate)^(n - i). A batch without tokens changes nothing."""
    if not mask.any():
        return scale
    own = returns.detach()[mask].double()
    sums = {"mean": own.mean(), "square": own.square().mean(), "weight": torch.ones_like(own[0])}
    return Scale(**{name: (1 - rate) * getattr(scale, name).to(x) + rate * x for name, x in sums.items()})


def statistics(scale: Scale) -> tuple[Tensor, Tensor]:
    """The running mean and deviation, 0-d float64; 0 and 1 before the first batch."""
    some = scale.weight > 0
    weight = scale.weight.where(some, 1.0)
    mean = scale.mean / weight
    deviation = (scale.square / weight - mean.square()).clamp(min=0.0).sqrt().clamp(min=_LEAST)
    return mean, deviation.where(some, 1.0)


@attrs.frozen(kw_only=True)
class UpdatePopart:
    """Update a critic in normalised units: values and returns minus the running mean m, divided by the running
    deviation s.

    The batch first moves m and s by its weight `rate`. For the inner update `stage` the head's weight W and bias b
    become W / s and (b - m) / s, and are converted back afterwards. So a change of m and s changes no value
    ("preserving outputs precisely"), the critic gives values in the usual units, and clipping of values counts in units
    of s. van Hasselt et al., arXiv:1602.07714, algorithm 1.
    """

    stage: UpdateFn
    rate: float

    def __call__(
        self, state: TrainState, batch: Experience, *, key: Key, donate: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Update the critic; return the new state and the metrics. Raises ValueError for a state without a `Scale`, a
        batch without values, and a rate outside (0, 1]."""
        if state.scale is None or batch.values is None or not 0 < self.rate <= 1:
            got = f"scale={state.scale}, rate={self.rate}, values={'none' if batch.values is None else 'there'}"
            text = "PopArt needs TrainState.scale, a rate above 0 and at most 1, and a batch with values: "
            raise ValueError(text + got)
        mask = batch.response_mask
        scale = moved(state.scale, batch.returns, mask, rate=self.rate)
        mean, deviation = statistics(scale)

        def units(x: Tensor) -> Tensor:
            return ((x.double() - mean) / deviation).where(mask, 0.0).to(x.dtype)

        inside = tree.replace(state, params=_head(state.params, 1 / deviation, -mean / deviation))
        rows = tree.replace(batch, values=units(batch.values), returns=units(batch.returns))
        after, report = self.stage(inside, rows, key=key, donate=donate)
        if isinstance(mean_of := report.get("critic/vpred_mean"), Mean):
            total = mean_of.total * deviation + mean_of.count * mean
            report = report | {"critic/vpred_mean": Mean(total.to(mean_of.total), mean_of.count)}
        said = {"critic/popart/mean": metrics.mean(mean), "critic/popart/std": metrics.mean(deviation)}
        return tree.replace(after, params=_head(after.params, deviation, mean), scale=scale), report | said


def _head(params: Params, factor: Tensor, shift: Tensor) -> Params:
    """Rescale the value head: its new outputs are `factor` times the old ones, plus `shift`."""
    there = {name: x for name, x in params.items() if name in (SCORE_WEIGHT, SCORE_BIAS)}  # on the last stage

    def changed(name: str, x: Tensor) -> Tensor:
        more = shift.to(x.device) if name == SCORE_BIAS else 0.0
        return (x.double() * factor.to(x.device) + more).to(x.dtype)

    return {**params, **{name: changed(name, x) for name, x in there.items()}}
