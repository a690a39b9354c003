"""Adapters of verl: policy losses, aggregations, value loss, GAE and group estimators of its `core_algos`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo import advantages, laws, losses
from fppo.studies.audit.report import Audited

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CLIP = 0.2  # verl's default clip_ratio
ESTIMATORS = (
    *("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("grpo_passk", "reinforce_plus_plus_baseline"),
)


def policy(core: Any, config: Any, name: str, mode: str) -> Callable[..., Tensor]:
    """Adapt a policy loss of a mini-batch as verl's `ppo_loss` computes it: with the totals of the global batch."""
    fn = core.get_policy_loss_fn(name)

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        config.global_batch_info.update(
            dp_size=1, batch_num_tokens=whole.sum().double(), global_batch_size=len(whole), loss_scale_factor=None
        )
        return fn(old, log_probs, advantages, mask, loss_agg_mode=mode, config=config)[0]

    return loss


def value(core: Any, mode: str) -> Callable[..., Tensor]:
    """Adapt the clipped value loss, with the totals of the global batch."""

    def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        return core.compute_value_loss(
            *(values, returns, old, mask, 0.5, mode),
            batch_num_tokens=whole.sum().double(),
            global_batch_size=len(whole),
        )[0]

    return loss


def gae(core: Any, rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE before whitening, as returns - values. Two rows of ones are added, because verl's whitening needs two
    tokens."""
    ones = torch.ones(2, mask.shape[1], dtype=rewards.dtype)
    more = [torch.cat([x, ones]) for x in (rewards, values, mask.to(rewards))]
    _, returns = core.compute_gae_advantage_return(*more, gamma, lam)
    return returns[:-2] - values, returns[:-2]


def grouped(core: Any, config: Any, name: str, scores: Tensor, mask: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Adapt a group estimator; each row's score is placed at its last token."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    rewards = scores[:, None].where(last, 0.0)
    estimate = core.get_adv_estimator_fn(name)
    return estimate(rewards, response_mask=mask.to(scores), index=groups.numpy(), config=config)


def _twin(name: str) -> Callable[..., Any] | None:
    """The loss of fppo that corresponds to verl's loss `name`, with keywords of the same meaning; None if there is
    none."""
    ours = {"vanilla": "ppo_clip", "geo_mean": "gmpo"}.get(name, name)
    settings = {"gspo": {"clip_low": CLIP, "clip_high": CLIP}, "dppo_tv": {"max_ratio": 3.0}}
    settings["dppo_kl"] = settings["dppo_tv"]
    settings["gmpo"] = settings["gspo"]
    return partial(getattr(losses, ours), **settings.get(ours, {})) if hasattr(losses, ours) else None


def adapters() -> tuple[Audited, ...]:
    """Adapters of all of verl's functions that have laws."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    workers = importlib.import_module("verl.workers.config")
    algorithm = importlib.import_module("verl.trainer.config").AlgoConfig()
    found: list[Audited] = []

    def config(name: str) -> Any:
        more = {"dro_beta": 0.1} if name == "dro" else {}
        chosen = workers.PolicyLossConfig(loss_mode=name, **more)
        return workers.ActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=chosen)

    for name in ("vanilla", "gspo", "sapo", "gpg", "cispo", "dro", "dppo_tv", "dppo_kl"):
        mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
        ours = _twin(name)
        reference = None if ours is None else laws.whole_loss(ours, mode)
        found.append(Audited(f"{name}, {mode}", "whole_loss", policy(core, config(name), name, mode), reference))
    for name in ("geo_mean", "kl_cov", "clip_cov"):
        found.append(Audited(f"{name}, token-mean", "whole_loss", policy(core, config(name), name, "token-mean")))
    for mode in MODES[1:]:
        ours = None if mode.endswith("norm") else laws.whole_loss(losses.ppo_clip, mode)
        found.append(Audited(f"vanilla, {mode}", "whole_loss", policy(core, config("vanilla"), "vanilla", mode), ours))
    ours = laws.whole_loss(losses.value_loss, "token-mean")
    found.append(Audited("value loss, token-mean", "whole_value_loss", value(core, "token-mean"), ours))
    found.append(Audited("gae, before whitening", "gae", partial(gae, core)))
    for name in ESTIMATORS:
        # in a group of one row verl keeps the score as its advantage or raises an error, and fppo gives 0
        tokens = 2 if name == "reinforce_plus_plus_baseline" else 0  # verl whitens no single token
        ours = getattr(advantages, name.removesuffix("_vectorized"))
        found.append(
            Audited(f"estimator {name}", "advantages", partial(grouped, core, algorithm, name), ours, 2, tokens)
        )
    return tuple(found)
