"""Annotated rows to experience: token rewards, advantages, returns, and the weights of an off-policy correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fppo import losses, metrics
from fppo.advantages import temporal
from fppo.advantages._common import Advantages
from fppo.advantages.columns import Estimator, of_rows
from fppo.advantages.whitening import whiten as whitened
from fppo.batch import Annotated, Experience, extend
from fppo.episodes import joined, layout_of
from fppo.losses import Correction, KLState
from fppo.metrics import Metrics
from fppo.tree import replace


def estimate(
    annotated: Annotated,
    kl: KLState,
    *,
    advantage_fn: Estimator,
    kl_in_reward: bool = False,
    kl_kind: str = "k1",
    update_kl: Callable[[KLState, Tensor, Tensor], KLState] | None = None,
    correct: Callable[[Tensor, Tensor, Tensor], Correction] | None = None,
    drop: Sequence[Callable[[Annotated], Tensor]] = (),
    whiten: bool = False,
) -> tuple[Experience, KLState, Metrics]:
    """Extend rows by token rewards, advantages and returns [B, T], and move the KL controller; with metrics.

    See `pipeline.Estimate`, the stage of a run, which also refuses penalties that are no KL's, for the arguments.
    Rows of one episode are joined first (`episodes.joined`), so that an episode counts once, whatever its rows. Raises
    ValueError for an estimator whose results are not [B, T].
    """
    rows, annotated = annotated, joined(annotated)
    mask = annotated.response_mask
    coef = kl.coef if kl_in_reward else 0.0
    penalty, kl, report = _reference_kl(annotated, kl, kl_kind, update_kl)
    if annotated.teacher_log_probs is not None:
        apart = annotated.old_log_probs - annotated.teacher_log_probs
        taught = mask if annotated.taught is None else mask & annotated.taught[:, None]
        report["actor/teacher_kl"] = metrics.masked_mean(apart, taught)
    mask = mask & annotated.has_score[:, None]
    rewards = temporal.token_rewards(annotated.scores, mask, turns=annotated.rewards_within, kl=penalty, kl_coef=coef)
    result = of_rows(advantage_fn)(replace(annotated, response_mask=mask), rewards)
    _check_shapes(result, mask)
    mask, weights, counts = _trained_on(annotated, mask, drop, correct)
    estimated = result.advantages.where(mask, 0.0)
    columns = {
        "response_mask": mask,
        "token_rewards": rewards,
        "advantages": whitened(estimated, mask) if whiten else estimated,
        "returns": result.returns.where(mask, 0.0),
        "correction_weights": weights,
    }
    if rows.episodes is not None:
        at = layout_of(rows)
        columns = {name: None if x is None else at.of_rows(x) for name, x in columns.items()}
    return extend(Experience, rows, **columns), kl, report | counts


def _reference_kl(
    annotated: Annotated,
    kl: KLState,
    kind: str,
    update: Callable[[KLState, Tensor, Tensor], KLState] | None,
) -> tuple[Tensor | None, KLState, Metrics]:
    """The KL estimate [B, T] of each token from the reference, by the estimator `kind`; the controller moved by it with
    `update`, if given; and metrics. Without a reference the estimate is None, the controller stays, and there are no
    metrics."""
    if annotated.ref_log_probs is None:
        return None, kl, {}
    mask = annotated.response_mask
    penalty = losses.kl_estimate(annotated.old_log_probs, annotated.ref_log_probs, kind, mask=mask)
    current = losses.sequence_kl(penalty, mask)
    report: Metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": metrics.mean(kl.coef)}
    if update is not None:
        kl = update(kl, current.total / current.count.clamp(min=1), current.count)
    return penalty, kl, report


def _trained_on(
    annotated: Annotated,
    mask: Tensor,
    drop: Sequence[Callable[[Annotated], Tensor]],
    correct: Callable[[Tensor, Tensor, Tensor], Correction] | None,
) -> tuple[Tensor, Tensor | None, Metrics]:
    """The mask [B, T] without the rows that functions in `drop` select and the tokens that `correct` leaves out; the
    weights [B, T] of that correction (None without `correct`); and metrics."""
    report: Metrics = {}
    if drop:
        gone = torch.stack([fn(annotated) for fn in drop]).any(0)[:, None].expand(mask.shape)
        report["rollout/dropped"], mask = metrics.masked_mean(gone, mask), mask & ~gone
    if correct is None:
        return mask, None, report
    correction = correct(annotated.old_log_probs, annotated.rollout_log_probs, mask)
    return correction.mask, correction.weights, report | correction.metrics


def _check_shapes(result: Advantages, mask: Tensor) -> None:
    for name, x in (("advantages", result.advantages), ("returns", result.returns)):
        if x.shape != mask.shape:
            raise ValueError(f"the estimator gave {name} {list(x.shape)}, expected [B, T] = {list(mask.shape)}")
