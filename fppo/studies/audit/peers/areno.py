"""Adapters of AReno: its losses of packed batches, on CUDA's side plain functions of torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo import laws, losses
from fppo.studies.audit.report import Audited


def policy(fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """Adapt a loss of one pack out of `pieces`, which the trainer divides the sum of all by."""

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        rows, width = mask.shape
        pack = {
            "packed_response_mask": mask.flatten(),
            "packed_logprobs": old.flatten(),
            "packed_advantages": advantages.flatten(),
            "packed_seq_ids": torch.arange(rows).repeat_interleave(width),
            "packed_num_sequences": rows,
        }
        return fn(pack, log_probs.flatten())[0] / pieces

    return loss


def adapters() -> tuple[Audited, ...]:
    """Adapters of AReno's policy losses."""
    module = importlib.import_module("areno.api.backend.cuda.losses")
    plain = partial(losses.ppo_clip, dual_clip=None)
    gspo = partial(losses.gspo, clip_low=3e-4, clip_high=3e-4)
    return (
        Audited("grpo", "whole_loss", policy(module.grpo_loss_fn), laws.whole_loss(plain, "token-mean")),
        Audited("gspo", "whole_loss", policy(module.gspo_loss_fn), laws.whole_loss(gspo, "seq-mean-token-mean")),
        Audited("ppo", "whole_loss", policy(module.ppo_loss_fn), laws.whole_loss(losses.ppo_clip, "token-mean")),
    )
