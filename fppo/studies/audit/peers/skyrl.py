"""Adapters of SkyRL: its policy losses, whose advantages have the weights of the mini-batch, value loss and
estimators."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fppo import advantages, laws, losses
from fppo.studies.audit.peers import without_init
from fppo.studies.audit.report import Audited

_INNER = ("backends", "backends.skyrl_train", "backends.skyrl_train.utils", "train")
_UNUSED = {"train.config": {"AlgorithmConfig": object}}  # named in annotations alone
_NO_CORRECTION = dict.fromkeys(
    (
        "tis_ratio_type",
        "sequence_mask_metric",
        "outlier_token_is_threshold_low",
        "outlier_token_is_threshold_high",
        "token_mask_is_threshold_low",
        "token_mask_is_threshold_high",
    )
)


def settings_of(loss: str) -> SimpleNamespace:
    """The settings that losses read, with the release's defaults; no correction for another sampler."""
    return SimpleNamespace(
        policy_loss_type=loss,
        loss_reduction="token_mean",
        eps_clip_low=0.2,
        eps_clip_high=0.2,
        clip_ratio_c=3.0,
        value_clip=0.5,
        off_policy_correction=SimpleNamespace(**_NO_CORRECTION),
        sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        cispo=SimpleNamespace(cispo_eps_clip_low=0.0, cispo_eps_clip_high=5.0),
        clip_cov=SimpleNamespace(clip_ratio=0.0002, clip_cov_lb=1.0, clip_cov_ub=5.0),
        kl_cov=SimpleNamespace(kl_cov_frac=0.2, ppo_kl_coef=1.0),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2),
    )


def policy(module: Any, fn: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    """Adapt a policy loss in the mode token_mean: the trainer divides advantages by the tokens of the mini-batch, and
    adds up micro-batches."""

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        scaled = module.apply_loss_reduction_to_advantages_minibatch(advantages, whole, "token_mean", 1, 0)
        return fn(log_probs, old, scaled, settings_of(name), loss_mask=mask.to(log_probs))[0]

    return loss


def value(module: Any) -> Callable[..., Tensor]:
    """Adapt the value loss; the trainer divides the gradients by the number of micro-batches."""

    def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        return module.ppo_critic_loss(values, old, returns, settings_of("regular"), mask.to(values))[0] / pieces

    return loss


def gae(module: Any, rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Any:
    """GAE before whitening, as returns - values. Two rows of ones are added, because the whitening needs two tokens."""
    ones = torch.ones(2, mask.shape[1], dtype=rewards.dtype)
    more = [torch.cat([x, ones]) for x in (rewards, values, mask.to(rewards))]
    _, returns = module.compute_gae_advantage_return(*more, gamma, lam)
    return returns[:-2] - values, returns[:-2]


def grouped(fn: Callable[..., Any], scores: Tensor, mask: Tensor, groups: Tensor) -> Any:
    """Adapt an estimator of groups; each row's score is placed at its last token."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return fn(scores[:, None].where(last, 0.0), mask.to(scores), groups.numpy())


def adapters() -> tuple[Audited, ...]:
    """Adapters of all of SkyRL's functions that have laws."""
    without_init("skyrl", _INNER, _UNUSED)
    module = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    ours: dict[str, Callable[..., Any] | None] = {
        "regular": partial(losses.ppo_clip, dual_clip=None),
        "dual_clip": losses.ppo_clip,
        "gspo": partial(losses.gspo, clip_low=0.2, clip_high=0.2),
        "cispo": partial(losses.cispo, clip_low=1e-15, clip_high=5.0),
        "sapo": losses.sapo,
        "clip_cov": None,
        "kl_cov": None,
        "dppo": None,
    }
    functions = {
        "regular": module.ppo_policy_loss,
        "dual_clip": module.ppo_policy_loss,
        "gspo": module.gspo_policy_loss,
        "cispo": module.compute_policy_loss_cispo,
        "sapo": module.sapo_policy_loss,
        "clip_cov": module.compute_policy_loss_clip_cov,
        "kl_cov": module.compute_policy_loss_kl_cov,
        "dppo": module.dppo_policy_loss,
    }
    found = [
        Audited(
            name,
            "whole_loss",
            policy(module, functions[name], name),
            None if twin is None else laws.whole_loss(twin, "token-mean"),
        )
        for name, twin in ours.items()
    ]
    found.append(Audited("value loss", "whole_value_loss", value(module)))
    found.append(Audited("gae, before whitening", "gae", partial(gae, module)))
    estimators = {
        "grpo": (module.compute_grpo_outcome_advantage, advantages.grpo),
        "rloo": (module.compute_rloo_outcome_advantage, advantages.rloo),
        "maxrl": (module.compute_maxrl_advantage, advantages.maxrl),
    }
    for name, (fn, twin) in estimators.items():
        found.append(Audited(f"estimator {name}", "advantages", partial(grouped, fn), twin, 2))
    return tuple(found)
