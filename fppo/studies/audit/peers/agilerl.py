"""Adapters of AgileRL: the losses of its language models' trainers, GAE and advantages of groups, on a stand-in with
what the methods read."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fppo import advantages, laws, losses
from fppo.studies.audit.peers import without_init
from fppo.studies.audit.report import Audited

T = TypeVar("T")


class LLMAlgorithm(Generic[T]):
    """A base of AgileRL's trainers, of which the audited methods read nothing."""


# what the modules import and the audited methods do not use
_UNUSED = {
    "algorithms.core.llm_ops.fused_logprobs": "scored_position_index",
    "algorithms.core.optimizer_wrapper": "REPLICATED_GROUP_SUFFIX",
    "algorithms.core.registry": "HyperparameterConfig NetworkGroup",
    "architectures": "family_runtime install_family_patches pretrained_model_type",
    "architectures.flex_attention": "patch_flex_attention_kernel_options",
    "architectures.vllm_language": "apply_multimodal_engine_kwargs apply_tower_connector_lora_engine_kwargs "
    "nested_language_config",
    "arena.models.profiling": "ProfilingConfig",
    "components.llm_rollout_data": "EpisodeSegments",
    "distributed": "FSDPConfig aggregate_metrics_dict allreduce_minmax_int barrier get_world_size "
    "reshard_fsdp_modules resolve_device",
    "distributed.fsdp": "CPUOffloadOptimizer canonical_fsdp_param_fqn",
    "distributed.process": "allreduce_minmax_int barrier is_main_process resolve_device",
    "distributed.runtime": "OptimizerStep",
    "lora.fused": "set_fused_adapter_routing unset_fused_adapter_routing",
    "protocols": "GenerationConfigProtocol PeftModelProtocol PreTrainedModelProtocol",
    "typing": "JSONValue LLMObsType LLMRolloutExperiences PopulationType PreferencePrompts RolloutPrompt SFTPrompts",
    "utils.algo_utils": "CosineLRScheduleConfig VLLMConfig create_warmup_cosine_scheduler get_experiences_samples "
    "stack_and_pad_experiences",
    "utils.llm_packing": "unpack_hidden_states unpack_values",
    "utils.segment_rows": "SegmentRows filler_stand_in pad_row_values split_episode_segments",
    "utils.vision_rows": "VisionRows",
}


def modules() -> tuple[Any, Any]:
    """The modules of the trainers of GRPO and PPO."""
    stand_ins = {name: dict.fromkeys(names.split(), object) for name, names in _UNUSED.items()}
    core = {"ActionResult": object, "LLMAlgorithm": LLMAlgorithm}
    without_init("agilerl", ("algorithms",), MappingProxyType({"algorithms.core": core, **stand_ins}))
    grpo, ppo = (importlib.import_module(f"agilerl.algorithms.{name}") for name in ("grpo", "ppo_llm"))
    return grpo, ppo


def bound(trainer: type, **settings: Any) -> Any:
    """A trainer without its __init__, with the settings that its methods read."""
    return type(trainer.__name__, (trainer,), {**settings, "__init__": lambda self: None})()


def of_groups(module: Any, level: str = "token", kind: str = "grpo", norm: str = "accumulation_window") -> Any:
    """Adapt a loss of GRPO's family with the release's defaults, but for its terms of KL and of another sampler; the
    trainer divides by the number of micro-batches."""

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        trainer = bound(
            module.GRPO,
            beta=0.0,
            kl_clamp=None,
            use_kl_advantage_shaping=False,
            use_bias_correction_kl=False,
            off_policy_token_mask_bounds=None,
            off_policy_sequence_mask_threshold=None,
            clip_coef_min=0.8,
            clip_coef_max=1.2,
            loss_norm=norm,
            gradient_accumulation_steps=pieces,
            _segment_accumulation_steps=None,
            _window_action_tokens=whole.sum().double().clamp(min=1),
        )
        given = mask, log_probs, old, old, advantages, None
        return trainer._compute_policy_loss(*given, level=level, objective=kind)[0] / pieces

    return loss


def of_tokens(module: Any, **settings: Any) -> Any:
    """A trainer of PPO with the release's defaults, by the token, without its term of KL and before whitening."""
    given = {"beta": 0.0, "kl_clamp": None, "clip_coef": 0.2, "vf_coef": 0.5, "whiten_advantages": False}
    given |= {"importance_sampling_level": "auto", "turn_level_clip": True, "turn_ratio_pooling": "sum"}
    return bound(module.PPO, **given, **settings)


def policy(module: Any) -> Callable[..., Tensor]:
    """Adapt PPO's policy loss; the trainer sets old log-probs to 1 outside the mask, and divides by the number of
    micro-batches."""

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        old = old.masked_fill(~mask, 1.0)
        turns = mask.long() - 1
        given = log_probs, mask, old, old, advantages, turns, 1, "token"
        return of_tokens(module)._ppo_policy_loss(*given)[0] / pieces

    return loss


def value(module: Any) -> Callable[..., Tensor]:
    """Adapt PPO's value loss; the trainer divides by the number of micro-batches."""

    def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, pieces: int, whole: Tensor) -> Tensor:
        old, turns = old.masked_fill(~mask, 0.0), mask.long() - 1
        return of_tokens(module)._ppo_value_loss(values, old, returns, mask, turns, 1, "token") / pieces

    return loss


def gae(module: Any, rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Any:
    """GAE by the token, before whitening; the trainer sets values to 0 outside the mask."""
    values = values.masked_fill(~mask, 0.0)
    returns, found = of_tokens(module, gamma=gamma)._compute_gae_returns_token(rewards, values, mask, lam)
    return found, returns


def returns_of(module: Any, scores: Tensor, mask: Tensor, groups: Tensor) -> Any:
    """The returns of responses of one turn, with values of 0, gamma 1 and lambda 1."""
    trainer, scores = of_tokens(module, gamma=1.0), scores.where(mask.any(1), 0.0)
    rewards = trainer._compute_token_rewards(mask, scores[:, None], mask.long() - 1).to(scores)
    return trainer._compute_gae_returns_token(rewards, torch.zeros_like(rewards), mask, 1.0)


def grouped(module: Any, norm: str, scores: Tensor, mask: Tensor, groups: Tensor) -> Any:
    """Adapt the advantages of groups, one group at a time, since the trainer's have one size."""
    found, scores = torch.zeros_like(scores), scores.where(mask.any(1), 0.0)
    for group in groups.unique():
        rows = groups == group
        trainer = bound(module.GRPO, group_size=int(rows.sum()), adv_norm=norm)
        found[rows] = trainer._calculate_advantage(scores[rows])[:, 0]
    each = found[:, None] * mask
    return each, each


def adapters() -> tuple[Audited, ...]:
    """Adapters of all of AgileRL's functions of language models that have laws."""
    grpo, ppo = modules()
    plain = partial(losses.ppo_clip, dual_clip=None)
    tokens, rows = (partial(laws.whole_loss, mode=mode) for mode in ("token-mean", "seq-mean-token-mean"))
    capped = partial(losses.cispo, clip_low=1.0, clip_high=0.2)  # clamped only from above
    single = partial(Audited, kind="whole_loss", dtype=torch.float32)  # their weights of tokens are float32
    return (
        single("grpo", fn=of_groups(grpo), reference=tokens(plain)),
        single("grpo, micro_batch", fn=of_groups(grpo, norm="micro_batch"), reference=rows(plain)),
        single("gspo", fn=of_groups(grpo, "trajectory")),
        single("cispo", fn=of_groups(grpo, kind="cispo"), reference=tokens(capped)),
        Audited("ppo", "whole_loss", policy(ppo), tokens(plain)),
        Audited("value loss", "whole_value_loss", value(ppo)),
        Audited("gae, before whitening", "gae", partial(gae, ppo)),
        Audited("returns of one turn", "advantages", partial(returns_of, ppo), leave_out=("equal rewards",)),
        Audited("advantages, mean_only", "advantages", partial(grouped, grpo, "mean_only"), None, 2),
        Audited("advantages, mean_std", "advantages", partial(grouped, grpo, "mean_std"), advantages.grpo, 2),
    )
