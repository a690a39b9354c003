"""Learning rates as functions of the number of updates so far. The warm-up starts at a non-zero rate.

In a run that knows its remaining steps (`steps.clock`) that number may have a fraction.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[float], float]
KINDS = ("constant", "linear", "cosine", "exponential", "wsd")


def schedule(
    kind: str,
    peak: float,
    *,
    total_steps: int | None = None,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    decay_ratio: float = 0.2,
    num_cycles: int = 1,
) -> Schedule:
    """Make a schedule: update `step` (from 0) of the warm-up has (step + 1) / (warmup_steps + 1) of the peak.

    Then, constant: the peak; linear: down to `min_ratio * peak` at `total_steps`; cosine: half a cosine to there,
    `num_cycles` times from the peak (warm restarts: Loshchilov and Hutter, 2017, arXiv:1608.03983, equation 5, cycles
    of equal length); exponential: to there by the same factor each step; wsd: the peak until the last `decay_ratio` of
    all steps, the warm-up included, then linear (warm-up, stable, decay: Hu et al., 2024, arXiv:2404.06395). Raises
    ValueError for an unknown kind, a decaying one without `total_steps`, an exponential one without a `min_ratio` above
    0, and fewer than 1 cycle.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown schedule {kind!r}; there are {list(KINDS)}")
    if kind != "constant" and total_steps is None:
        raise ValueError(f"a {kind} schedule needs total_steps")
    if kind == "exponential" and min_ratio <= 0:
        raise ValueError(f"an exponential schedule needs a min_ratio above 0, got {min_ratio}")
    if num_cycles < 1:
        raise ValueError(f"num_cycles must be 1 or more, got {num_cycles}")
    total = max(total_steps or 0, warmup_steps + 1)

    decays = min(decay_ratio, 1.0 - warmup_steps / total)  # the fraction of all updates in which wsd's rate falls

    def rate(step: float) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / (warmup_steps + 1)
        span = total - warmup_steps
        progress = min((step - warmup_steps) / span, 1.0)
        match kind:
            case "linear":
                ratio = 1.0 - progress
            case "cosine":
                cycles = (step - warmup_steps) * num_cycles / span  # one division, so that a cycle begins at a number
                ratio = 0.5 * (1.0 + math.cos(math.pi * (cycles % 1.0 if progress < 1.0 else 1.0)))
            case "exponential":
                return peak * min_ratio**progress
            case "wsd":
                ratio = min(max(1.0 - step / total, 0.0) / decays, 1.0)
            case _:
                return peak
        return peak * (min_ratio + (1.0 - min_ratio) * ratio)

    return rate
