"""Laws of token weights: those of a mini-batch's loss, and those of an off-policy correction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fppo.laws._rows import BatchOutcome, outcomes_differ, reference_differs
from fppo.laws._search import Breach, Law, LawExample, changed, check, differ, draw_mask, normal, short, spoil
from fppo.laws.references.losses import mini_batch_loss
from fppo.losses import MODES, Correction, count_totals

HORIZON = 7.0


def _horizon(mode: str) -> dict[str, float]:
    return {"horizon": HORIZON} if mode == "seq-mean-token-sum-norm" else {}


def _weights_example(rows: int, width: int, seed: int) -> LawExample:
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    mask = draw_mask(rows, width, seed, generator)
    return LawExample({"per_token": short(normal(generator, rows, width)), "mask": mask}, {}, mask.double())


def _definition(mode: str, fn: Callable[..., Tensor], example: LawExample, generator: torch.Generator) -> str | None:
    per_token, mask = example.inputs["per_token"], example.mask
    expected = mini_batch_loss(per_token, mask, mode, **_horizon(mode))
    for size in sorted({1, (len(mask) + 1) // 2, len(mask)}):
        found = torch.zeros((), dtype=torch.float64)
        for i in range(0, len(mask), size):
            own = slice(i, i + size)
            weights = fn(mask[own], mode, totals=count_totals(mask), **_horizon(mode))
            if reason := differ("a weight outside the mask", torch.zeros_like(weights), weights.where(~mask[own], 0.0)):
                return reason
            found = found + (weights * per_token[own]).sum()
        if reason := differ("sum(weights * per_token)", expected, found):
            return f'in the mode "{mode}", rows in parts of {size}: {reason}, as by the mode\'s definition'
    return None


def check_weights(loss_weights: Callable[..., Tensor], *, modes: tuple[str, ...] = MODES) -> None:
    """Check a function like `losses.loss_weights`: `laws.check_weights(my_weights)`.

    `loss_weights(mask, mode, *, totals, horizon)` gives the weights [B, T] of some rows of a mini-batch. For each of
    the `modes`, in any split of the rows, sum(weights * per_token) must be the mode's definition over the whole
    mini-batch (`references.losses.mini_batch_loss`), and weights outside the mask must be 0. Raises LawViolation for
    the first broken law.
    """
    text = "in any split, sum(weights * per_token) is the definition over the mini-batch"
    laws = [Law(f"weights, {mode}", text, partial(_definition, mode)) for mode in modes]
    check(loss_weights, laws, _weights_example)


def _correction_example(rows: int, width: int, seed: int) -> LawExample:
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    mask = draw_mask(rows, width, seed, generator)
    old = short(-normal(generator, rows, width).abs() - 0.1)
    inputs = {
        "old_log_probs": old,
        "rollout_log_probs": short(old + 0.5 * normal(generator, rows, width)),
        "mask": mask,
    }
    return LawExample(inputs, {}, mask.double())


def _outcome(weights: Tensor, mask: Tensor) -> BatchOutcome:
    return BatchOutcome({"the weight": weights, "the mask": mask}, tolerance=1e-9)


def _corrected(fn: Callable[..., Correction], example: LawExample) -> BatchOutcome:
    """The weights (1 in the mask if there are none) and the mask, both as numbers."""
    found = fn(*example.inputs.values())
    weights = found.mask.double() if found.weights is None else found.weights
    return _outcome(weights, found.mask.double())


def _garbage(fn: Callable[..., Correction], example: LawExample, generator: torch.Generator) -> Breach | None:
    names = ("old_log_probs", "rollout_log_probs")
    dirty = example.put(**{name: spoil(example.inputs[name], ~example.mask, generator) for name in names})
    reason = outcomes_differ(_corrected(fn, example), _corrected(fn, dirty))
    return changed(reason, "with NaN, inf or 1e300 where the mask is False, ", dirty)


def _inside(fn: Callable[..., Correction], example: LawExample, generator: torch.Generator) -> str | None:
    weights, kept = _corrected(fn, example).rows.values()
    outside = (kept > 0) & ~example.mask
    if outside.any():
        return "it keeps a token that is not in the mask"
    return differ("a weight outside of what it keeps", torch.zeros_like(weights), weights.where(kept == 0, 0.0))


def _equal_policies(fn: Callable[..., Correction], example: LawExample, generator: torch.Generator) -> Breach | None:
    same = example.put(rollout_log_probs=example.inputs["old_log_probs"].clone())
    ones = example.mask.double()
    return changed(outcomes_differ(_outcome(ones, ones), _corrected(fn, same)), "of equal policies ", same)


def check_correction(correct: Callable[..., Correction], *, reference: Callable[..., Correction] | None = None) -> None:
    """Check an off-policy correction: `laws.check_correction(my_correction)`.

    `correct(old_log_probs, rollout_log_probs, mask)`, with tensors [B, T], returns a `losses.Correction`. The laws:
    values outside the mask have no effect; weights are 0 outside the corrected mask; equal policies have weights of 1
    and lose no token. With a `reference`, as `references.losses.rollout_correction`, weights and mask must equal its
    own. Raises LawViolation for the first broken law.
    """
    laws = (
        Law("masked garbage", "what stands where the mask is False changes nothing", _garbage),
        Law("inside", "weights are 0 outside of what it keeps, which is in the mask", _inside),
        Law("equal policies", "equal policies have weights of 1, and lose no token", _equal_policies),
    )
    if reference is not None:
        breach = partial(reference_differs, _corrected, reference)
        laws += (Law("reference", "weights and mask are those of the reference", breach),)
    check(correct, laws, _correction_example)
