"""The update of the actor. What it computes does not depend on the split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Literal

import attrs
import torch
from torch import Tensor

from fppo import batch as batches
from fppo import losses, metrics
from fppo.batch import Experience
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.runtime.mesh import DATA_AXES, place_on
from fppo.shapes import Mask, Tokens
from fppo.steps.experts import RouterLosses, check_routers, outputs_of, router_terms
from fppo.steps.forward import Forward, forward_micro_batch, run_passes
from fppo.steps.loop import Loop, Mark, MiniBatch, Objective, WithRouters, update, weighted_sum
from fppo.steps.optimizers import Optimizer
from fppo.steps.packed import blank_masks, indexed
from fppo.steps.ranks import blank, collect
from fppo.steps.sharded import Gathered
from fppo.steps.train_state import Params, TrainState
from fppo_kernels.padding import sent

LossFn = Callable[..., tuple[Tensor, Metrics]]
OldLogProbs = Literal["pass", "engine", "update", "auto"]


@attrs.frozen
class SelectiveLoss:
    """A policy loss that depends on tokens selected over a whole mini-batch, and the function that selects them.

    `loss_fn` takes them as `selected`, bool [B, T], beside what every policy loss takes;
    `select_fn(log_probs, old_log_probs, advantages, mask, *, noise)` gives them, from all rows of the mini-batch.
    """

    loss_fn: LossFn
    select_fn: Callable[..., Tensor]


@attrs.frozen(kw_only=True)
class PolicyTerms:
    """The scalars of the actor's objective: the temperature that log-probs are under, the factor of the entropy bonus,
    the factor and kind (`losses.kl_term`) of the KL term to the reference, the factor of the negative
    log-likelihood of responses with a positive outcome (`losses.positive_weights`), and the factors of the losses that
    balance the loads of experts and keep their routers' logits small (`experts.RouterLosses`)."""

    temperature: float = 1.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    nll_coef: float = 0.0
    balance_coef: float = 0.0
    router_z_coef: float = 0.0


PLAIN = PolicyTerms()


def update_actor(
    state: TrainState,
    batch: Experience,
    *,
    forward: Forward,
    loss_fn: LossFn | SelectiveLoss,
    loop: Loop,
    optimizer: Optimizer,
    terms: PolicyTerms = PLAIN,
    old_log_probs: OldLogProbs = "pass",
    key: Key | None = None,
    donate: bool = False,
) -> tuple[TrainState, Metrics]:
    """The policy after `loop.epochs` passes over `batch`, all of which every data rank has.

    The objective of a mini-batch is sum(weights * (policy loss * correction - entropy_coef * entropy + kl_coef * KL
    to the reference)), with weights [B, T] from `losses.loss_weights` over the whole mini-batch, and nll_coef * the
    mean of -log-prob over the tokens of responses with a positive outcome (VAPO, arXiv:2504.05118). Tokens outside the
    batch's `entropy_mask` have no entropy bonus, and those in it no greater one.
    `loss_fn(log_probs, old_log_probs, advantages, mask)` is a policy loss with its scalars bound.

    `old_log_probs` says where those come from. "pass": the batch's are those of a pass before the update. "engine": the
    batch's are the engine's, and `rollout_gap` of the policy being updated is reported. "update": they are taken from
    the same pass as the new ones, and the gap is reported: right when one mini-batch and one epoch make the ratio 1.
    "auto": the batch's are either, and who chose between them has looked at the gap (`pipeline.stages.annotate`).

    Of a model with experts, the loads of these are reported, and with `forward.replay` those are chosen that the batch
    says; `terms.balance_coef` needs that.

    Mini-batches are drawn by `key`, or taken in order without one. `donate` gives up the memory of `state`. Raises
    ValueError for "update" with several updates, whose ratios would all be 1, and for terms that the model or the
    forward lacks something for.
    """
    _check_router_terms(terms, forward)
    if old_log_probs == "update" and (loop.epochs > 1 or loop.mini_batch_size < len(batch.row_ids)):
        raise ValueError(
            f"old_log_probs='update' with epochs={loop.epochs}, mini_batch_size={loop.mini_batch_size} of "
            f"{len(batch.row_ids)} rows: in all but the first of these updates the ratio is not 1; give 'pass'"
        )
    marks: list[Mark] = [] if terms.nll_coef == 0 else [_mark_positive]
    if isinstance(loss_fn, SelectiveLoss):
        marks.append(partial(_select, select_fn=loss_fn.select_fn, temperature=terms.temperature))
        loss_fn = loss_fn.loss_fn
    objective: Objective | WithRouters = partial(
        policy_objective, loss_fn=loss_fn, terms=terms, old_log_probs=old_log_probs
    )
    if terms.balance_coef or terms.router_z_coef:
        objective = WithRouters(objective, terms.balance_coef, terms.router_z_coef)
    return update(
        state,
        batch,
        forward=forward,
        objective=objective,
        loop=loop,
        optimizer=optimizer,
        prefix="actor",
        mark=partial(_mark, marks=marks) if marks else None,
        key=key,
        donate=donate,
    )


def _check_router_terms(terms: PolicyTerms, forward: Forward) -> None:
    if terms.balance_coef or terms.router_z_coef:
        check_routers(forward.model, "leave out balance_coef and router_z_coef (in settings actor.experts)")
    if terms.balance_coef and not forward.replay:
        raise ValueError(
            f"balance_coef={terms.balance_coef} needs the experts of a whole mini-batch before its first pass: give a "
            "forward with replay=True, and rows with `routed`"
        )


def policy_objective(
    params: Params | Gathered,
    rows: Experience,
    weights: Tensor,
    *,
    forward: Forward,
    loss_fn: LossFn,
    terms: PolicyTerms = PLAIN,
    old_log_probs: OldLogProbs = "pass",
    marks: Mapping[str, Tensor] = MappingProxyType({}),
    routers: RouterLosses | None = None,
) -> tuple[Tensor, Metrics]:
    """`update_actor`'s objective on some rows of a mini-batch, with their weights [B, T], and its metrics.

    Of `marks` [B, T] a selective loss takes the tokens "selected"; "positive" weighs the negative log-likelihood. The
    losses of `routers` are added.

    The KL term has the importance weights of its tokens, those of the rows' correction too (`losses.kl_term`).

    Raises ValueError for a KL term without reference log-probs in the rows or of the kind "k1", and for a policy loss
    of another shape.
    """
    tells = outputs_of(forward.model, routers)
    out = forward_micro_batch(
        params, rows, forward=forward, outputs=("log_probs", "entropy", *tells), temperature=terms.temperature
    )
    assert out.log_probs is not None
    assert out.entropy is not None
    mask = rows.response_mask
    old = out.log_probs.detach() if old_log_probs == "update" else rows.old_log_probs
    policy_loss = partial(loss_fn, selected=marks["selected"]) if "selected" in marks else loss_fn
    policy, report = policy_loss(out.log_probs, old, rows.advantages, mask)
    if policy.shape != mask.shape:
        raise ValueError(f"the policy loss is {list(policy.shape)}, expected [B, T] = {list(mask.shape)}: sum nothing")
    if rows.correction_weights is not None:
        policy = policy * rows.correction_weights.where(mask, 0.0)
    summed = {"actor/pg_loss": policy}
    if terms.entropy_coef:
        explored = out.entropy if rows.entropy_mask is None else out.entropy.where(rows.entropy_mask, 0.0)
        summed["actor/entropy_loss"] = -terms.entropy_coef * explored
    if terms.kl_coef:
        if rows.ref_log_probs is None:
            raise ValueError(f"kl_coef={terms.kl_coef} needs ref_log_probs in the batch: give a reference policy")
        kl = losses.kl_term(
            out.log_probs, old, rows.ref_log_probs, terms.kl_kind, mask=mask, correction=rows.correction_weights
        )
        summed["actor/kl_loss"] = terms.kl_coef * kl
    report = report | {"actor/entropy": metrics.masked_mean(out.entropy, mask)}
    if old_log_probs in ("engine", "update"):
        report = report | rollout_gap(out.log_probs, rows.rollout_log_probs, mask)
    loss, sums = weighted_sum(summed, weights)
    if terms.nll_coef:
        nll, known = weighted_sum({"actor/nll_loss": -terms.nll_coef * out.log_probs}, marks["positive"])
        loss, sums = loss + nll, sums | known
    added, of_routers = router_terms(out.loads, out.router_sums, routers, "actor")
    if added:
        loss = torch.stack([loss, *(x.to(loss) for x in added)]).sum()
    if not loss.requires_grad:  # a loss without a token: the backward pass is still there, for its collectives
        loss = loss + 0.0 * out.log_probs.sum()
    return loss, report | of_routers | sums


def _mark(params: Params, mini: MiniBatch, key: Key, *, forward: Forward, marks: Sequence[Mark]) -> dict[str, Tensor]:
    """All marks of this rank's rows."""
    return {name: x for mark in marks for name, x in mark(params, mini, key, forward=forward).items()}


def _mark_positive(params: Params, mini: MiniBatch, key: Key, *, forward: Forward) -> dict[str, Tensor]:
    """The weights of the negative log-likelihood of this rank's rows."""
    del params, key
    rows = mini.rows
    return {"positive": _own(losses.positive_weights(rows.outcome, rows.response_mask), mini, forward)}


def _own(x: Tensor, mini: MiniBatch, forward: Forward) -> Tensor:
    """This rank's rows of what is known of all."""
    return x if len(mini.shares) == 1 else x[mini.shares[place_on(forward.mesh, DATA_AXES)]]


def _select(
    params: Params,
    mini: MiniBatch,
    key: Key,
    *,
    forward: Forward,
    select_fn: Callable[..., Tensor],
    temperature: float,
) -> dict[str, Tensor]:
    """The tokens [b, T] of this rank's rows that `select_fn` chooses in a mini-batch, by the log-probs of a pass
    without gradients."""

    def run(params: Params, rows: Experience, *, forward: Forward) -> Tensor:
        new = forward_micro_batch(params, rows, forward=forward, temperature=temperature).log_probs
        assert new is not None
        return new

    groups = [*mini.micro_batches, *([[]] * (mini.passes - len(mini.micro_batches)))]
    every = [
        indexed(*batches.rows((mini.own, mini.masks), numbers), forward)
        if numbers
        else indexed(blank(mini.own), blank_masks(mini.masks), forward)
        for numbers in groups
    ]
    with torch.no_grad():
        results = run_passes(run, params, every, forward=forward, shape=lambda rows: rows.response_mask.shape)
    log_probs = torch.zeros_like(mini.own.old_log_probs)
    for numbers, new in zip(mini.micro_batches, results, strict=False):
        log_probs = log_probs.index_copy(0, sent(torch.tensor(numbers), log_probs.device), new.to(log_probs))
    log_probs = collect(log_probs, mini.shares, forward.mesh)
    rows = mini.rows
    noise = key.uniform(rows.row_ids, rows.response_mask.shape[1])
    selected = select_fn(log_probs, rows.old_log_probs, rows.advantages, rows.response_mask, noise=noise)
    return {"selected": _own(selected, mini, forward)}


def rollout_gap(log_probs: Tokens, rollout_log_probs: Tokens, mask: Mask) -> Metrics:
    """How far the engine's probabilities are from the trainer's, both [B, T], over the mask: the gap is zero if they
    run the same numbers with the same weights. rollout_corr/... are `losses.off_policy_metrics`.
    """
    gap = (log_probs.detach().exp() - rollout_log_probs.exp()).abs()
    ratio = (log_probs.detach() - rollout_log_probs).where(mask, 0.0).exp()
    return {
        "training/rollout_probs_diff_mean": metrics.masked_mean(gap, mask),
        "training/rollout_probs_diff_max": metrics.masked_max(gap, mask),
        "training/rollout_ratio_mean": metrics.masked_mean(ratio, mask),
        "training/rollout_ratio_max": metrics.masked_max(ratio, mask),
        **losses.off_policy_metrics(log_probs, rollout_log_probs, mask),
    }
