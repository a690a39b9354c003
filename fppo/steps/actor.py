"""The update of the actor. Results do not depend on the split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import attrs
import torch
from torch import Tensor

from fppo import losses, metrics
from fppo.batch import Experience, extend
from fppo.episodes import num_episodes
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.runtime.mesh import DATA_AXES, place_on
from fppo.shapes import Mask, Tokens
from fppo.steps.experts import check_routers, reports_loads
from fppo.steps.forward import forward_micro_batch, run_passes
from fppo.steps.loop import Loop, MiniBatch, Objective, micro_batches, update, weighted_sum
from fppo.steps.optimizers import Optimizer
from fppo.steps.outputs import Forward, TokenOutputs
from fppo.steps.packed import MicroBatch
from fppo.steps.ranks import collect
from fppo.steps.recorded import Recorder
from fppo.steps.train_state import Params, TrainState
from fppo.tree import state
from fppo_kernels.padding import sent

LossFn = Callable[..., tuple[Tensor, Metrics]]
OldLogProbs = Literal["pass", "engine", "update", "auto"]


@attrs.frozen
class SelectiveLoss:
    """A policy loss that depends on tokens selected over a whole mini-batch, with the function that selects them.

    `loss_fn` takes the tokens as `selected`, bool [B, T], besides the arguments of every policy loss;
    `select_fn(log_probs, old_log_probs, advantages, mask, *, noise)` returns them, given all rows of the mini-batch.
    """

    loss_fn: LossFn
    select_fn: Callable[..., Tensor]


@attrs.frozen(kw_only=True)
class PolicyTerms:
    """The scalars of the actor's objective.

    `temperature` is the sampling temperature that log-probs are computed under. `entropy_coef` weighs the entropy
    bonus; `kl_coef` and `kl_kind` (`losses.kl_term`) the KL term to the reference; `nll_coef` the negative
    log-likelihood of responses with a positive outcome (`losses.positive_weights`). `balance_coef` weighs the loss for
    equal loads of experts, `router_z_coef` the loss for small router logits (`experts.RouterLosses`).
    `top_entropy_share` is the share of a mini-batch's tokens that have a policy loss (`losses.select_entropy`). With
    `entropy_quantiles` those of each mini-batch's entropies are reported.
    """

    temperature: float = 1.0
    entropy_coef: float = 0.0
    top_entropy_share: float = 1.0
    entropy_quantiles: bool = False
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    nll_coef: float = 0.0
    balance_coef: float = 0.0
    router_z_coef: float = 0.0


PLAIN = PolicyTerms()


@attrs.frozen(kw_only=True)
class DistillTerm:
    """The term `coef` * divergence of the policy from a teacher at each token, which reads no advantages.

    `divergence(log_probs, teacher_log_probs, mask)` is one of `losses.DIVERGENCES`, of [B, T, K] and the mask [B, T].
    The tokens are those of the rows' `teacher_top_ids`; if these are not the `whole` vocabulary, all others are one
    bucket.
    """

    divergence: Callable[[Tensor, Tensor, Tensor], Tensor]
    coef: float = 1.0
    whole: bool = False

    def __call__(self, log_probs: Tensor, rows: Experience) -> Tensor:
        """The term [B, T] for log-probs [B, T, K] of the policy; 0 in rows that the teacher says nothing about."""
        if rows.teacher_top_log_probs is None:
            raise ValueError("a divergence from a teacher needs teacher_top_log_probs in the batch: give a teacher")
        own, theirs = log_probs, rows.teacher_top_log_probs.to(log_probs)
        own, theirs = (own, theirs) if self.whole else (losses.with_tail(own), losses.with_tail(theirs))
        mask = rows.response_mask if rows.taught is None else rows.response_mask & rows.taught[:, None]
        return self.coef * self.divergence(own, theirs, mask)


@state
class PreparedRows(Experience):
    """Rows with what the objective computed from the whole mini-batch: the tokens of a selective loss (`selected`), the
    tokens that have a policy loss (`learned`), and the weights of the negative log-likelihood (`positive`)."""

    selected: Tensor | None = None  # [B, T] bool: the tokens of a `SelectiveLoss`
    learned: Tensor | None = None  # [B, T] bool: those of highest entropy; None: all
    positive: Tensor | None = None  # [B, T]: the weights of the negative log-likelihood


@attrs.frozen(kw_only=True)
class PolicyObjective:
    """The objective that updates of the policy minimise, per mini-batch; `UpdateActor` has its formula."""

    loss_fn: LossFn | SelectiveLoss
    terms: PolicyTerms = PLAIN
    old_log_probs: OldLogProbs = "pass"
    distill: DistillTerm | None = None

    def __call__(self, out: TokenOutputs, rows: Experience, weights: Tensor) -> tuple[Tensor, Metrics]:
        """Compute the objective, 0-d, and metrics for some rows of a mini-batch, from a pass over them and their
        weights [b, T].

        For `PreparedRows`, a selective loss gets the tokens `selected`, tokens that are not `learned` have no policy
        loss, and `positive` weighs the negative log-likelihood.
        """
        assert out.log_probs is not None
        assert out.entropy is not None
        terms, mask = self.terms, rows.response_mask
        old = out.log_probs.detach() if self.old_log_probs == "update" else rows.old_log_probs
        given, loss_fn = (out.log_probs, old, rows.advantages, mask), self.loss_fn
        if isinstance(loss_fn, SelectiveLoss):
            assert isinstance(rows, PreparedRows)
            policy, report = loss_fn.loss_fn(*given, selected=rows.selected)
        else:
            policy, report = loss_fn(*given)
        if policy.shape != mask.shape:
            text = f"the policy loss is {list(policy.shape)}, expected [B, T] = {list(mask.shape)}: sum nothing"
            raise ValueError(text)
        if isinstance(rows, PreparedRows) and rows.learned is not None:
            policy = policy.where(rows.learned, 0.0)
        if rows.correction_weights is not None:
            policy = policy * rows.correction_weights.where(mask, 0.0)
        summed = {"actor/pg_loss": policy}
        if terms.entropy_coef or rows.entropy_coef is not None:
            explored = out.entropy if rows.entropy_mask is None else out.entropy.where(rows.entropy_mask, 0.0)
            coef = terms.entropy_coef if rows.entropy_coef is None else rows.entropy_coef[:, None].to(explored)
            summed["actor/entropy_loss"] = -coef * explored
        if terms.kl_coef:
            assert rows.ref_log_probs is not None
            correction = rows.correction_weights
            kl = losses.kl_term(out.log_probs, old, rows.ref_log_probs, terms.kl_kind, mask=mask, correction=correction)
            summed["actor/kl_loss"] = terms.kl_coef * kl
        if self.distill is not None:
            assert out.listed_log_probs is not None
            summed["actor/distill_loss"] = self.distill(out.listed_log_probs, rows)
        report = report | {"actor/entropy": metrics.masked_mean(out.entropy, mask)}
        if terms.entropy_quantiles:
            report |= losses.entropy_counts(out.entropy, mask, "actor/entropy")
        loss, sums = weighted_sum(summed, weights)
        if terms.nll_coef:
            assert isinstance(rows, PreparedRows)
            assert rows.positive is not None
            nll, known = weighted_sum({"actor/nll_loss": -terms.nll_coef * out.log_probs}, rows.positive)
            loss, sums = loss + nll, sums | known
        return loss, report | sums


@attrs.frozen(kw_only=True)
class UpdateActor:
    """A stage that updates the policy in `loop.epochs` passes over a batch, which every data rank holds whole.

    A mini-batch's objective is sum(weights * (policy loss * correction - entropy_coef * entropy + kl_coef * KL to the
    reference)), with weights [B, T] from `losses.loss_weights` over the whole mini-batch, plus nll_coef * the mean of
    -log-prob over tokens of responses with a positive outcome (VAPO, arXiv:2504.05118). The KL term has its tokens'
    importance weights, and those of the rows' correction (`losses.kl_term`). A batch's own `entropy_coef` takes the
    place of the terms'. Tokens outside the batch's `entropy_mask` have no entropy bonus, and those outside the
    `top_entropy_share` no policy loss; that of the others is not raised in return.
    `loss_fn(log_probs, old_log_probs, advantages, mask)` is a policy loss with its scalars bound.

    `old_log_probs` is the source of the old log-probs. "pass": those of a pass before the update. "engine": the
    engine's; `rollout_gap` is then reported for the first mini-batch, whose pass runs the policy before the update.
    "update": those of the update's own pass, and the gap is reported; right for a single mini-batch and epoch, where
    the ratio is 1. "auto": "engine" if the engine's are found to be the policy's own, else "pass"
    (`pipeline.stages.Annotate`).

    `distill` adds a divergence from a teacher's distributions, beside the policy loss.

    For a model with experts their loads are reported. With `forward.replay` routers choose the batch's experts, which
    `terms.balance_coef` needs. `record` replays passes of few tokens on a GPU by one launch each.
    """

    forward: Forward
    loss_fn: LossFn | SelectiveLoss
    loop: Loop
    optimizer: Optimizer
    terms: PolicyTerms = PLAIN
    old_log_probs: OldLogProbs = "pass"
    record: Recorder | None = None
    distill: DistillTerm | None = None

    def __call__(
        self, state: TrainState, batch: Experience, *, key: Key | None = None, donate: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Update the policy; return the new state and the metrics. With `key` mini-batches are drawn, else taken in
        order. `donate` gives up the memory of `state`.

        Raises ValueError for "update" with several updates, whose ratios would all be 1; for terms that the model, the
        forward or the batch does not support; for a KL term of the kind "k1"; and for a policy loss that is not [B, T].
        """
        self._check(batch)
        return update(
            state,
            batch,
            forward=self.forward,
            objective=self.objective(),
            loop=self.loop,
            optimizer=self.optimizer,
            prefix="actor",
            record=self.record,
            key=key,
            donate=donate,
        )

    def objective(self) -> Objective:
        """The objective that this stage's updates minimise."""
        terms = self.terms
        prepares = terms.nll_coef != 0 or terms.top_entropy_share < 1 or isinstance(self.loss_fn, SelectiveLoss)
        return Objective(
            loss=PolicyObjective(
                loss_fn=self.loss_fn, terms=terms, old_log_probs=self.old_log_probs, distill=self.distill
            ),
            outputs=(
                *("log_probs", "entropy"),
                *(("listed_log_probs",) if self.distill is not None else ()),
                *(("loads",) if reports_loads(self.forward.model) else ()),
            ),
            temperature=terms.temperature,
            prepare=self._prepared if prepares else None,
            settle=partial(losses.entropy_quantiles, name="actor/entropy") if terms.entropy_quantiles else None,
            balance_coef=terms.balance_coef,
            router_z_coef=terms.router_z_coef,
            first=_gap_of if self.old_log_probs in ("engine", "update") else None,
        )

    def _check(self, batch: Experience) -> None:
        terms, loop, forward = self.terms, self.loop, self.forward
        if terms.balance_coef or terms.router_z_coef:
            check_routers(forward.model, "leave out balance_coef and router_z_coef (in settings actor.experts)")
        if terms.balance_coef and not forward.replay:
            raise ValueError(
                f"balance_coef={terms.balance_coef} needs the experts of a whole mini-batch before its first pass: "
                "give a forward with replay=True, and rows with `routed`"
            )
        if self.old_log_probs == "update" and (loop.epochs > 1 or loop.mini_batch_size < num_episodes(batch)):
            raise ValueError(
                f"old_log_probs='update' with epochs={loop.epochs}, mini_batch_size={loop.mini_batch_size} of "
                f"{num_episodes(batch)} rows: in all but the first of these updates the ratio is not 1; give 'pass'"
            )
        if terms.kl_coef and batch.ref_log_probs is None:
            raise ValueError(f"kl_coef={terms.kl_coef} needs ref_log_probs in the batch: give a reference policy")

    def _prepared(self, params: Params, mini: MiniBatch, *, forward: Forward) -> PreparedRows:
        """This rank's rows, with the tokens that a loss selects, those that are learned from, and the weights of the
        negative log-likelihood."""
        rows, selected, learned, positive = mini.rows, None, None, None
        noise = partial(mini.key.uniform, rows.row_ids, rows.response_mask.shape[1])
        read = partial(_read, params, mini, forward=forward, temperature=self.terms.temperature)
        if self.terms.nll_coef:
            positive = losses.positive_weights(rows.outcome, rows.response_mask)
        if self.terms.top_entropy_share < 1:
            share = self.terms.top_entropy_share
            learned = losses.select_entropy(read("entropy"), rows.response_mask, noise=noise(), share=share)
        if isinstance(self.loss_fn, SelectiveLoss):
            log_probs = read("log_probs")
            old = log_probs if self.old_log_probs == "update" else rows.old_log_probs
            columns = (log_probs, old, rows.advantages, rows.response_mask)
            selected = self.loss_fn.select_fn(*columns, noise=noise())
        columns = {"selected": selected, "learned": learned, "positive": positive}
        if len(mini.shares) > 1:
            own = _own_rows(mini, forward)
            columns = {name: None if x is None else x[own] for name, x in columns.items()}
        return extend(PreparedRows, mini.own, **columns)


def _own_rows(mini: MiniBatch, forward: Forward) -> list[int]:
    """The indices of this rank's rows in a mini-batch."""
    return mini.shares[place_on(forward.mesh, DATA_AXES)]


def _read(params: Params, mini: MiniBatch, name: str, *, forward: Forward, temperature: float) -> Tokens:
    """The output of this name [B, T] for all rows of a mini-batch, from passes over this rank's micro-batches without
    gradients."""

    def run(params: Params, micro: MicroBatch, *, forward: Forward, received: Tensor | None) -> Tensor:
        given = {"temperature": temperature, "indices": micro.indices, "received": received}
        return getattr(forward_micro_batch(params, micro.rows, forward=forward, outputs=(name,), **given), name)

    every = [micro for micro, _ in micro_batches(mini, forward)]
    with torch.no_grad():
        results = run_passes(run, params, every, forward=forward, shape=lambda rows: rows.response_mask.shape)
    found = torch.zeros_like(mini.own.old_log_probs)
    for numbers, new in zip(mini.micro_batches, results, strict=False):
        found = found.index_copy(0, sent(torch.tensor(numbers), found.device), new.to(found))
    return collect(found, mini.shares, forward.mesh)


def _gap_of(out: TokenOutputs, rows: Experience) -> Metrics:
    assert out.log_probs is not None
    return rollout_gap(out.log_probs, rows.rollout_log_probs, rows.response_mask)


def rollout_gap(log_probs: Tokens, rollout_log_probs: Tokens, mask: Mask) -> Metrics:
    """Metrics of the gap between the engine's and the trainer's log-probs, both [B, T], over the mask.

    The gap is zero if both compute the same numbers with the same weights. rollout_corr/... are
    `losses.off_policy_metrics`; training/rollout_equal is the fraction of tokens whose log-probs are bit-equal.
    """
    gap = (log_probs.detach().exp() - rollout_log_probs.exp()).abs()
    ratio = (log_probs.detach() - rollout_log_probs).where(mask, 0.0).exp()
    return {
        "training/rollout_probs_diff_mean": metrics.masked_mean(gap, mask),
        "training/rollout_probs_diff_max": metrics.masked_max(gap, mask),
        "training/rollout_ratio_mean": metrics.masked_mean(ratio, mask),
        "training/rollout_ratio_max": metrics.masked_max(ratio, mask),
        "training/rollout_equal": metrics.masked_mean(log_probs.detach() == rollout_log_probs, mask),
        **losses.off_policy_metrics(log_probs, rollout_log_probs, mask),
    }
