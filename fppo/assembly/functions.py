"""Functions of a run, as its settings name them: loss, value head, optimizer, estimator, rewards, correction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor

from fppo import losses
from fppo.advantages.columns import AdvantageFn, OfRows, by_token, reads
from fppo.data.curriculum import Curriculum
from fppo.fields import only
from fppo.losses import ValueHead
from fppo.pipeline.checks import SCREENED, Usage, screened
from fppo.rewards.functions import Reward, RewardFn, WeightedSum
from fppo.rewards.resolve import combine
from fppo.runtime.offload import Lane, offloaded_adamw
from fppo.settings import files
from fppo.settings.component import Component, bound, takes
from fppo.settings.learning import (
    AdvantageSettings,
    AlgorithmSettings,
    DistillSettings,
    LossSettings,
    OptimizerSettings,
)
from fppo.settings.reward import RewardSettings
from fppo.settings.tables import CORRECTIONS, CURRICULA, DIVERGENCES, ESTIMATORS, OPTIMIZERS, POLICY_LOSSES, VALUE_HEADS
from fppo.steps.actor import DistillTerm, LossFn, SelectiveLoss
from fppo.steps.optimizers import Optimizer, kept_on_host
from fppo.steps.outputs import Top
from fppo.steps.schedules import Schedule, schedule
from fppo_kernels.adamw import adamw_
from fppo_kernels.table import Kernels

Correct = Callable[[Tensor, Tensor, Tensor], losses.Correction]  # of old log-probs, the engine's, and the mask
Advantage = Callable[[Mapping[str, float]], AdvantageFn]  # from the reward functions' weights, by name


def policy_loss(part: Component) -> LossFn | SelectiveLoss:
    """The policy loss with its scalars bound, and its selection of tokens if it has one.

    Raises ValueError for a function of the user's that does not import.
    """
    functions = bound(part, POLICY_LOSSES, "actor.loss")
    return functions[0] if len(functions) == 1 else SelectiveLoss(*functions)


def distill_term(part: DistillSettings, top: Top | None) -> DistillTerm | None:
    """The divergence from a teacher's distributions over these tokens; None where there are none. Raises ValueError for
    a function of the user's that does not import."""
    if top is None:
        return None
    (divergence,) = bound(part, DIVERGENCES, "actor.distill")
    return DistillTerm(divergence=divergence, coef=part.coef, whole=top.whole)


def value_head_of(part: Component) -> ValueHead:
    """The meaning of the critic's outputs, and its loss. Raises ValueError for a function that makes no value head."""
    (make,) = bound(part, VALUE_HEADS, "critic.loss")
    head = make()
    if not isinstance(head, ValueHead):
        made = f"it returned a {type(head).__name__}, and must return an fppo.losses.ValueHead"
        raise ValueError(f"critic.loss.name = {part.name!r}: {made}")
    return head


def rate_of(section: OptimizerSettings, updates: int) -> Schedule:
    """The learning rate by an update's number, for a run of `updates` updates."""
    return schedule(
        section.schedule,
        section.lr,
        total_steps=updates,
        warmup_steps=section.warmup(updates),
        min_ratio=section.min_lr_ratio,
        num_cycles=section.num_cycles,
    )


def optimizer_of(
    section: OptimizerSettings,
    updates: int,
    *,
    setting: str,
    kernel: Callable[..., None] = adamw_,
    on_host: Lane | None = None,
) -> Optimizer:
    """The optimizer for a run of `updates` updates; AdamW uses the `kernel`. Its state is on the host if `on_host` is a
    lane.

    `setting` names the section in errors. Raises ValueError for a user's function that does not import or makes no
    optimizer, and whatever the function raises about its keywords.
    """
    rate = rate_of(section, updates)
    (make,) = bound(section, OPTIMIZERS, setting)
    if section.name == "adamw":
        return make(rate, kernel=kernel if on_host is None else offloaded_adamw(kernel, on_host))
    optimizer = make(rate)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{setting}.name = {section.name!r}: it returned a {type(optimizer).__name__}: called with a schedule, it "
            "must return an fppo.steps.optimizers.Optimizer; from_function makes one of a plain function"
        )
    return optimizer if on_host is None else kept_on_host(optimizer, on_host)


def advantage_of(algorithm: AlgorithmSettings, kernels: Kernels) -> Advantage:
    """A function that makes the settings' advantage estimator, given the weights of the reward functions by name.

    Raises ValueError if no such estimator exists, and for one that reads a critic's values but does not show it in its
    source.
    """
    part = algorithm.advantage
    (fn,) = bound(part, ESTIMATORS, "algorithm.advantage")
    if takes(fn, "kernel"):
        fn = partial(fn, kernel=kernels.gae)
    if reads(fn, "values") and not algorithm.uses_critic:
        text = "it reads values, of a critic, and its source does not say so: define it with def in its module"
        raise ValueError(f"algorithm.advantage.name = {part.name!r}: {text}")
    correct = correction_of(algorithm.correction) or by_token
    weighs = takes(fn, "weights") and "weights" not in part.keywords
    by_turn = algorithm.group_by == "turn"
    return lambda weights: OfRows(partial(fn, weights=weights) if weighs else fn, correct, by_turn)


def curriculum_of(part: Component) -> Curriculum | None:
    """The curriculum that the settings name; None if they name none.

    Raises ValueError for a user's function that does not import or makes no curriculum, and whatever the function
    raises about its keywords.
    """
    found = bound(part, CURRICULA, "data.curriculum")
    if not found:
        return None
    curriculum = found[0]()
    if not isinstance(curriculum, Curriculum):
        made = f"it returned a {type(curriculum).__name__}, and must return an fppo.data.Curriculum"
        raise ValueError(f"data.curriculum.name = {part.name!r}: {made}")
    return curriculum


def reward_of(
    section: RewardSettings,
    extra: Mapping[str, tuple[RewardFn, float]],
    *,
    max_tokens: int,
    own: Mapping[str, Reward] = MappingProxyType({}),
) -> WeightedSum:
    """The sum of the settings' reward functions and of `extra` ones, by name with their weights, for responses of at
    most `max_tokens` tokens. `own` has functions that are not imported by their names."""
    return combine(
        section.functions,
        section.weights,
        **only(section, "arguments", "overlong_buffer"),
        max_tokens=max_tokens,
        overlong_penalty=1.0 if section.overlong_penalty is None else section.overlong_penalty,
        extra=extra,
        own=own,
    )


def correction_of(part: Component) -> Correct | None:
    """The off-policy correction of the settings; None if nothing is to be corrected."""
    found = bound(part, CORRECTIONS, "algorithm.correction")
    return found[0] if found else None


def loss_correction(part: Component, loss: LossSettings) -> Correct | None:
    """The off-policy correction of the policy loss; with one weight per row for gmpo, whose loss is per row."""
    correct = correction_of(part)
    return correct if correct is None or loss.name != "gmpo" else _by_row(correct)


def _by_row(correct: Correct) -> Correct:
    """The correction with one weight per row, for gmpo, whose loss is per row."""

    def by_row(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> losses.Correction:
        correction = correct(old_log_probs, rollout_log_probs, mask)
        if correction.weights is None:
            return correction
        return correction._replace(weights=losses.geometric_mean(correction.weights, correction.mask))

    return by_row


def check_laws(
    loss: LossSettings,
    estimator: AdvantageSettings,
    advantage: Advantage,
    names: Mapping[str, str],
    kernels: Kernels,
    usage: Usage,
) -> None:
    """Check the user's own policy loss, estimator and kernels (named as module:function) against the laws that are
    quick to check. `names` has each kernel's name by setting. Raises SettingsError naming each function that breaks a
    law."""
    own = {"loss_fn": ("actor.loss.name", loss.name), "advantage_fn": ("algorithm.advantage.name", estimator.name)}
    wrong = screened(
        loss_fn=policy_loss(loss),
        advantage_fn=advantage({}) if ":" in estimator.name else None,
        kernels={op: getattr(kernels, op) for op in (*SCREENED, "gae")},
        usage=usage,
    )
    _refuse(wrong, own | _settings_of(names))


def check_own_kernels(names: Mapping[str, str], kernels: Kernels, usage: Usage) -> None:
    """Check the user's own kernels (named as module:function) against the laws that are quick to check; `names` has
    each kernel's name by setting. Raises SettingsError naming each kernel that breaks a law."""
    _refuse(screened(kernels={op: getattr(kernels, op) for op in SCREENED}, usage=usage), _settings_of(names))


def _settings_of(names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The setting that chooses each operation's kernel, and the kernel's name, by operation."""
    return {setting.rpartition(".")[2]: (setting, name) for setting, name in names.items()}


def _refuse(wrong: Mapping[str, Exception], named: Mapping[str, tuple[str, str]]) -> None:
    if wrong:
        hint = "\n  --no-check, or check = false at the top of the file, starts all the same"
        raise files.SettingsError([f"{named[key][0]} = {named[key][1]!r}: {text}{hint}" for key, text in wrong.items()])
