"""Adapters of OpenRLHF: its policy loss, value loss and GAE."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from fppo import laws, losses
from fppo.studies.audit.peers import without_init
from fppo.studies.audit.report import Audited

# their __init__ imports flash-attn or vLLM, which have no build for machines without a GPU
_HEAVY = ("models", "trainer", "trainer.ppo_utils", "trainer.ray", "utils")


def _modules() -> tuple[Any, Any]:
    """Import OpenRLHF's modules of losses and of experience."""
    unused = {"RayActorGroup": object}  # the experience maker names it only in annotations
    without_init("openrlhf", _HEAVY, {"trainer.ray.launcher": unused})
    maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
    return importlib.import_module("openrlhf.models.loss"), maker


def _totals(whole: Tensor) -> dict[str, Any]:
    return {"batch_num_tokens": whole.sum().double(), "global_batch_size": float(len(whole))}


def policy(module: Any, **settings: Any) -> Callable[..., Tensor]:
    """Adapt a `PolicyLoss` with the totals of the global batch."""
    fn = module.PolicyLoss(**settings)

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        return fn(log_probs, old, advantages, action_mask=mask.to(log_probs), **_totals(whole))[0]

    return loss


def value(module: Any) -> Callable[..., Tensor]:
    """Adapt a `ValueLoss` with the totals of the global batch."""

    def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        return module.ValueLoss(clip_eps=0.5)(values, old, returns, action_mask=mask.to(values), **_totals(whole))

    return loss


def gae(maker: Any, rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Any:
    """Compute GAE as OpenRLHF's experience maker does; the method reads nothing of its object."""
    makers = [x for x in vars(maker).values() if hasattr(x, "get_advantages_and_returns")]
    return makers[0].get_advantages_and_returns(None, values, rewards, mask, gamma, lam)


def adapters() -> tuple[Audited, ...]:
    """Adapters of all of OpenRLHF's functions that have laws."""
    loss, maker = _modules()

    def ours(mode: str, fn: Callable[..., Any] = losses.ppo_clip) -> Callable[..., Tensor]:
        return laws.whole_loss(fn, mode)

    plain = partial(losses.ppo_clip, dual_clip=None)
    rows = "seq-mean-token-mean"
    return (
        Audited("PolicyLoss, tokens", "whole_loss", policy(loss), ours("token-mean", plain)),
        Audited("PolicyLoss, rows", "whole_loss", policy(loss, token_level_loss=False), ours(rows, plain)),
        Audited("PolicyLoss, dual clip 3", "whole_loss", policy(loss, dual_clip=3.0), ours("token-mean")),
        Audited("PolicyLoss, gspo", "whole_loss", policy(loss, policy_loss_type="gspo")),
        Audited("ValueLoss", "whole_value_loss", value(loss), ours("token-mean", losses.value_loss)),
        Audited("gae", "gae", partial(gae, maker)),
    )
