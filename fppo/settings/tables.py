"""The functions that settings name: by kind and name, where each is. A part takes one line here.

The names are those of files and the command line; a user's own function needs no line, it is named as module:function.
"""

from __future__ import annotations

from fppo.rewards.builtin import builtins
from fppo.settings.component import Functions

_LOSSES, _SELECTION = "fppo.losses.policy", "fppo.losses.selection"

POLICY_LOSSES: Functions = {  # the loss, and what selects tokens from a mini-batch for it
    **{name: (f"{_LOSSES}:{name}",) for name in ("ppo_clip", "gspo", "sapo", "gpg", "cispo", "gmpo")},
    **{name: (f"{_SELECTION}:{name}", f"{_SELECTION}:select_{name}") for name in ("clip_cov", "kl_cov", "m2po")},
    **{name: (f"{_LOSSES}:{name}",) for name in ("dppo_tv", "dppo_kl", "dro", "vespo", "dcpo", "ce_gppo")},
    **{name: (f"{_LOSSES}:{name}",) for name in ("aspo", "drpo", "opsm", "topr")},
}
DIVERGENCES: Functions = {  # of log-probs of the policy and a teacher, and the mask
    "none": (),
    **{name: (f"fppo.losses.divergences:{name}",) for name in ("reverse_kl", "forward_kl", "jensen_shannon")},
}
_GROUPED, _TEMPORAL = (f"fppo.advantages.{module}" for module in ("grouped", "temporal"))
ESTIMATORS: Functions = {  # of columns of the batch, by their names
    "gae": (f"{_TEMPORAL}:gae",),
    **{name: (f"{_TEMPORAL}:{name}",) for name in ("turn_gae", "td", "vtrace")},
    **{name: (f"{_GROUPED}:{name}",) for name in ("grpo", "maxrl", "rloo", "opo", "gpg", "grpo_passk", "gdpo")},
    **{name: (f"{_GROUPED}:{name}",) for name in ("pkpo", "qae", "lite_ppo")},
    "grpo_process": ("fppo.advantages.process:grpo_process",),
    "reinforce_plus_plus_baseline": (f"{_GROUPED}:reinforce_plus_plus_baseline",),
    "optimal_token_baseline": ("fppo.advantages.token_baseline:optimal_token_baseline",),
    **{name: (f"{_TEMPORAL}:{name}",) for name in ("remax", "reinforce_plus_plus")},
    "distill": ("fppo.advantages.distillation:reverse_kl",),
}
VALUE_HEADS: Functions = {
    **{name: (f"fppo.losses.value:{name}_head",) for name in ("mse", "huber", "hl_gauss", "two_hot", "quantile")},
}
OPTIMIZERS: Functions = {  # called with a schedule
    "adamw": ("fppo.steps.optimizers:adamw",),
    "adamw_8bit": ("fppo.steps.adamw_8bit:adamw_8bit",),
    "sgd": ("fppo.steps.optimizers:sgd",),
    "lion": ("fppo.steps.optimizers:lion",),
    "muon": ("fppo.steps.muon:muon",),
}
CORRECTIONS: Functions = {  # of old log-probs, the engine's log-probs and the mask
    "none": (),
    "rollout": ("fppo.losses.correction:rollout_correction",),
}
_CURRICULUM = "fppo.data.curriculum"
CURRICULA: Functions = {  # called with keywords alone, to make a curriculum
    "none": (),
    **{name: (f"{_CURRICULUM}:{name}",) for name in ("learnability", "easy_to_hard", "mixture")},
}
_ADAPTERS = "fppo.environments.adapters"
AGENT = "agent"  # no environment, but a program that plays episodes of its own
ENVIRONMENTS: Functions = {  # called with keywords alone, to make an environment
    "none": (),
    "reasoning_gym": (f"{_ADAPTERS}.reasoning:ReasoningGym",),
    "textarena": (f"{_ADAPTERS}.arena:TextArena",),
    "gym": (f"{_ADAPTERS}.objects:Gym",),
    "tools": (f"{_ADAPTERS}.tool_classes:ToolClass",),
    "openenv": (f"{_ADAPTERS}.open_env:OpenEnv",),
    "verifiers": (f"{_ADAPTERS}.verifiers_01:Verifiers",),
    AGENT: ("fppo.serve.agents:Agent",),
}
REWARDS: Functions = {name: (f"{fn.__module__}:{fn.__name__}",) for name, fn in builtins().items()}  # of a sample
