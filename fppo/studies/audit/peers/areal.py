"""Adapters of AReaL: its policy losses, weighted as its engines weight a micro-batch. Its value loss takes float32
alone, where the laws cannot tell rounding from a fault."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from fppo import laws, losses
from fppo.studies.audit.peers import without_init
from fppo.studies.audit.report import Audited

_INNER = ("api", "utils", "utils.functional")
# what the audited functions name in annotations, or for rejection sampling alone
_UNUSED = {"api.cli_args": {"RejectionSamplingConfig": object}, "utils.data": {"KLEstimator": object}}


def policy(fn: Callable[..., Any], **settings: Any) -> Callable[..., Tensor]:
    """Adapt a policy loss; an engine weights it by the micro-batch's share of all tokens."""

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        given = {"logprobs": log_probs, "old_logprobs": old, "advantages": advantages, "loss_mask": mask}
        if "eps_clip" in settings:
            given["proximal_logprobs"] = old
        return fn(**given, **settings)[0] * (mask.sum().double() / whole.sum())

    return loss


def adapters() -> tuple[Audited, ...]:
    """Adapters of AReaL's policy losses."""
    without_init("areal", _INNER, _UNUSED)
    module = importlib.import_module("areal.utils.functional.functional")
    ppo = partial(policy, module.ppo_actor_loss_fn, eps_clip=0.2)
    plain = partial(losses.ppo_clip, dual_clip=None)
    tokens = partial(laws.whole_loss, mode="token-mean")
    sapo = policy(module.sapo_loss_fn, tau_pos=1.0, tau_neg=1.05)
    return (
        Audited("ppo", "whole_loss", ppo(), tokens(plain)),
        Audited("ppo, dual clip 3", "whole_loss", ppo(c_clip=3.0), tokens(losses.ppo_clip)),
        Audited("ppo, sequence (GSPO)", "whole_loss", ppo(importance_sampling_level="sequence")),
        Audited("sapo", "whole_loss", sapo, tokens(losses.sapo)),
    )
