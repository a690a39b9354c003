"""Names of metrics that a run with given settings will log, as far as settings tell; no torch."""

from __future__ import annotations

import re

from fppo._errors import nearest
from fppo.settings.modules import own_functions
from fppo.settings.train import TrainSettings

HELD_OUT = re.compile(r"val-(core|aux)/(.+)/(mean|best|maj)@(\d+)(/mean)?")
FAMILIES = (
    *("actor", "critic", "curriculum", "perf", "prompt_length", "response_length", "reward", "rollout", "rollout_corr"),
    *("teacher", "timing_s", "training", "val-aux", "val-core"),
)
_SPREAD = ("mean", "max", "min")
NAMES = (
    *(f"actor/{x}" for x in ("entropy", "entropy_loss", "grad_norm", "kl_loss", "loss_scale", "nll_loss", "pg_loss")),
    *(f"actor/{x}" for x in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "reward_kl_penalty", "skipped")),
    *(f"perf/{x}/{role}" for x in ("shared_tokens", "shared_flops") for role in ("actor", "critic")),
    *("actor/reward_kl_penalty_coeff", "actor/teacher_kl", "actor/entropy_coef"),
    *("actor/distill_loss", "teacher/taught", "teacher/over_long"),
    *(f"actor/entropy/p{percent}" for percent in (10, 50, 90)),
    *("actor/balance_loss", "actor/router_z_loss", "actor/expert_load/max"),
    *(f"critic/{x}/{of}" for x in ("score", "rewards", "advantages", "returns", "values") for of in _SPREAD),
    *(f"critic/{x}" for x in ("vf_loss", "vf_clipfrac", "vf_explained_var", "vpred_mean", "grad_norm", "skipped")),
    *(f"curriculum/{x}" for x in ("seen", "success_rate", "target")),
    *(f"critic/true/{x}" for x in ("r2", "cosine", "sign")),
    *(f"{x}/{of}" for x in ("prompt_length", "response_length") for of in _SPREAD),
    *(f"response_length/{x}" for x in ("clip_ratio", "limit")),
    *(f"perf/{x}" for x in ("throughput", "time_per_step", "total_num_tokens", "cpu_memory_used_gb", "imbalance")),
    *(f"reward/{x}" for x in ("errors", "timeouts", "judge_unparsed", "judge_truncated")),
    *(f"reward/{x}" for x in ("model_truncated", "reverse_kl")),
    *(f"rollout/{x}" for x in ("turns/mean", "turns/max", "tool_failures", "observation_tokens/mean", "lag/max")),
    *("rollout/repeated", "rollout/groups/alike"),
    "environment/failures",
    *(f"timing_s/{x}" for x in ("step", "outside", "gen", "reward", "teacher", "old_log_prob", "ref", "values", "adv")),
    *(f"timing_s/{x}" for x in ("testing", "update_actor", "update_critic", "save_checkpoint", "digests")),
    *(f"training/{x}" for x in ("global_step", "rollout_probs_diff_mean", "rollout_probs_diff_max")),
    *(f"training/{x}" for x in ("rollout_ratio_mean", "rollout_ratio_max", "rollout_equal")),
)  # those that are looked for when a name is not known; runs log others too
_OF_CRITICS = re.compile(r"critic/(vf_|vpred|values|grad_norm|skipped|loss_scale|popart|ensemble|pretrain|true/)")


def missing(settings: TrainSettings, name: str) -> str | None:
    """The reason why no run with these settings can log a metric of this name; None if one may.

    Functions of the user's own may add metrics of any name, and losses and rewards name some themselves: such a name is
    only refused if it is nearly one of `NAMES`.
    """
    if name.startswith("val"):
        return _held_out_missing(settings, name)
    if _OF_CRITICS.match(name) and not settings.algorithm.uses_critic:
        return f"no critic is trained with algorithm.advantage = {settings.algorithm.advantage.name!r}"
    if name.startswith("critic/true/") and not settings.eval.exact_values:
        return "exact values are not computed; give eval.exact_values = true"
    if name in NAMES:
        return None
    if near := nearest(name, NAMES, cutoff=0.85):
        return f"there is no such metric; did you mean {near}?"
    family = name.partition("/")[0]
    if family in FAMILIES or own_functions(settings):
        return None
    return f"there is no such metric; names begin with {'/, '.join(FAMILIES)}/"


def _held_out_missing(settings: TrainSettings, name: str) -> str | None:
    n = settings.eval.n
    if not settings.has_held_out:
        return "there are no held-out prompts; give data.eval_path"
    if name in ("val-aux/errors", "val-aux/timeouts"):
        return None
    match = HELD_OUT.fullmatch(name)
    if match is None:
        return f"a held-out metric is val-core/SOURCE/reward/mean@{n}, or val-aux/SOURCE/NAME/mean@{n}"
    level, place, of, k, end = match[1], match[2], match[3], int(match[4]), match[5] or ""
    if k > n or (of == "mean" and k != n) or (end != ("" if of == "mean" else "/mean")):
        return f"with eval.n = {n} there are mean@{n}, and best@k/mean and maj@k/mean of k up to {n}"
    core = place.endswith("/reward") and k == n
    right = "core" if core else "aux"
    return None if level == right else f"it is called val-{right}/{name.partition('/')[2]}"
