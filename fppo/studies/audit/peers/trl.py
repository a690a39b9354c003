"""Adapters of TRL: `GRPOTrainer._compute_loss` for each loss type, on a stand-in with what the method reads."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fppo import laws, losses
from fppo.studies.audit.report import Audited

LONGEST = 7  # TRL's max_completion_length


def whole(trainer: Any, kind: str, *, level: str = "token", entropy: float = 0.0) -> Callable[..., Tensor]:
    """Adapt the loss of one micro-batch out of `pieces` in an accumulation window, on one process."""

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        none = torch.zeros(len(mask), 0, dtype=torch.int64)
        inputs = {
            "prompt_ids": none,
            "prompt_mask": none,
            "completion_ids": mask.long(),
            "completion_mask": mask.long(),
            "num_items_in_batch": whole.sum(),
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": old,
        }
        return trainer._compute_loss(_stand_in(log_probs, pieces, kind, level, entropy), None, inputs)

    return loss


def _stand_in(log_probs: Tensor, pieces: int, kind: str, level: str, entropy: float) -> SimpleNamespace:
    """A stand-in for a trainer with default settings, as far as `_compute_loss` reads it. Entropies are -log_probs."""
    accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, **how: x)
    arguments = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=False,
        steps_per_generation=pieces,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *given, **more: (log_probs, -log_probs, None),
        accelerator=accelerator,
        args=arguments,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        loss_type=kind,
        importance_sampling_level=level,
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=5.0 if kind == "cispo" else 0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        use_adaptive_entropy=False,
        current_gradient_accumulation_steps=pieces,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=entropy != 0.0,
        entropy_coef=entropy,
    )


def entropy_bonus(trainer: Any, *tensors: Tensor, pieces: int, whole_mask: Tensor) -> Tensor:
    """The entropy bonus alone: the loss with the bonus minus the loss without it."""
    with_it, without = (whole(trainer, "dapo", entropy=x) for x in (1.0, 0.0))
    return with_it(*tensors, pieces=pieces, whole=whole_mask) - without(*tensors, pieces=pieces, whole=whole_mask)


def adapters() -> tuple[Audited, ...]:
    """Adapters of all of TRL's loss types that have laws for whole losses."""
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    plain = partial(losses.ppo_clip, dual_clip=None)
    capped = partial(losses.cispo, clip_low=1.0, clip_high=4.0)  # TRL clamps the ratio only from above, at 5
    norm = laws.whole_loss(plain, "seq-mean-token-sum-norm", horizon=LONGEST)
    references = {
        "grpo": laws.whole_loss(plain, "seq-mean-token-mean"),
        "bnpo": laws.whole_loss(plain, "token-mean"),
        "dr_grpo": norm,
        "dapo": laws.whole_loss(plain, "token-mean"),
        "cispo": laws.whole_loss(capped, "token-mean"),
        "sapo": laws.whole_loss(losses.sapo, "seq-mean-token-mean"),
    }
    found = [Audited(kind, "whole_loss", whole(trainer, kind), ours) for kind, ours in references.items()]
    found.append(Audited("grpo, sequence (GSPO)", "whole_loss", whole(trainer, "grpo", level="sequence")))
    found.append(Audited("luspo, sequence", "whole_loss", whole(trainer, "luspo", level="sequence")))

    def bonus(*tensors: Tensor, pieces: int, whole: Tensor) -> Tensor:
        return entropy_bonus(trainer, *tensors, pieces=pieces, whole_mask=whole)

    no_gradient = ("REINFORCE", "constants")  # the term is no policy gradient
    return (*found, Audited("entropy bonus", "whole_loss", bonus, leave_out=no_gradient))
