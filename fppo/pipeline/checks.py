"""Checks of a program before it runs: of user-defined functions by the laws that take no time, and of stages against
each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from fppo import devices, laws
from fppo.advantages.columns import of_rows
from fppo.laws import LawViolation
from fppo.laws._search import fn_name
from fppo.laws.calls import screen_calls
from fppo.models.model import Model
from fppo.models.probe import check_model
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.steps.actor import SelectiveLoss
from fppo.steps.forward import Forward
from fppo_kernels.table import INSIDE

LIBRARY = ("fppo", "fppo_kernels")
# the kernels of forward passes and of decoding that are checked
SCREENED = ("attention", "decode_attention", "log_probs", *INSIDE)


def is_own(fn: Any) -> bool:
    """Whether a function, without partials and wrappers around it, is user-defined and not this library's."""
    while isinstance(fn, partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return (getattr(fn, "__module__", None) or type(fn).__module__).partition(".")[0] not in LIBRARY


@attrs.frozen(kw_only=True)
class Usage:
    """How a run uses its functions: `group` responses to a prompt, sampled at `temperature`; kernels in `dtype` on
    `device`, called by the `models` on rows of at most `longest` tokens (None: unknown)."""

    group: int
    dtype: torch.dtype
    device: torch.device | str
    models: Callable[[], Sequence[Model]] = tuple
    temperature: float = 1.0
    longest: int | None = None


def screened(
    *,
    loss_fn: Any = None,
    advantage_fn: Any = None,
    kernels: Mapping[str, Callable[..., Any]],
    usage: Usage,
) -> dict[str, LawViolation]:
    """Check user-defined functions; return their violations of laws by the names of the arguments and kernels. The
    models are built only to check a kernel that they call."""
    checks: dict[str, Callable[[], None]] = {}
    if isinstance(loss_fn, SelectiveLoss) and is_own(loss_fn.loss_fn):
        checks["loss_fn"] = partial(laws.screen_policy_loss, loss_fn.loss_fn, selective=True)
    elif loss_fn is not None and not isinstance(loss_fn, SelectiveLoss) and is_own(loss_fn):
        checks["loss_fn"] = partial(laws.screen_policy_loss, loss_fn)
    plain = getattr(advantage_fn, "fn", advantage_fn)
    if plain is not None and is_own(plain):
        name = fn_name(plain)
        checks["advantage_fn"] = partial(laws.screen_estimator, of_rows(advantage_fn), group=usage.group, name=name)
    for op, kernel in kernels.items():
        if is_own(kernel):
            checks[op] = partial(_screen_kernel, op, kernel, usage)
    wrong: dict[str, LawViolation] = {}
    for name, check in checks.items():
        try:
            check()
        except LawViolation as violation:
            wrong[name] = violation
    return wrong


def _screen_kernel(op: str, kernel: Callable[..., Any], usage: Usage) -> None:
    """Check a kernel on a small batch, and on the calls that each kind of model makes. Raises LawViolation."""
    place: dict[str, Any] = {"dtype": usage.dtype, "device": usage.device}
    laws.screen_kernel(op, kernel, **place)
    kinds = {str(model.whole_config): model for model in (usage.models() if op in SCREENED else ())}
    for model in kinds.values():
        screen_calls(op, kernel, model, temperature=usage.temperature, longest=usage.longest, **place)


def innermost(stage: Any) -> Any:
    """The innermost of stages that wrap each other as their field `stage`."""
    while (inner := getattr(stage, "stage", None)) is not None:
        stage = inner
    return stage


def field(stage: Any, name: str) -> Any:
    """A field of a stage, or else of the stage that it wraps as its field `stage`; None if no stage has it."""
    while stage is not None:
        if hasattr(stage, name):
            return getattr(stage, name)
        stage = getattr(stage, "stage", None)
    return None


def _check_models(policy: Any, critic: Any, engine: Any) -> None:
    """Raise ValueError for a model that fppo computes otherwise than transformers does; takes some hundredths of a
    second."""
    if policy is not None:
        check_model(policy.model)
    if isinstance(critic, Forward) and (policy is None or critic.model.config != policy.model.config):
        check_model(critic.model)
    if isinstance(engine, EmbeddedEngine):
        check_engine(engine.model)


def _kernels(forward: Any, advantage_fn: Any, updates: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """The kernels of passes, the estimator's (its keyword `kernel`), and the first user-defined AdamW kernel."""
    kernels = {} if forward is None else {op: getattr(forward.kernels, op) for op in SCREENED}
    of_estimator = getattr(getattr(advantage_fn, "fn", advantage_fn), "keywords", {}).get("kernel")
    kernels |= {} if of_estimator is None else {"gae": of_estimator}
    of_updates = [field(field(update, "optimizer"), "kernel") for update in updates]
    own = [kernel for kernel in of_updates if kernel is not None and is_own(kernel)]
    return kernels | ({"adamw": own[0]} if own else {})


def check_stages(*, rollout: Any, annotate: Any, estimate: Any, update_actor: Any, update_critic: Any = None) -> None:
    """Raise LawViolation if a user-defined loss, estimator or kernel among the fields of a program's stages violates a
    law, and ValueError for a model that fppo computes otherwise than transformers does. Loaded models have been checked
    before; built ones have not.

    A stage that is a plain function hides its calls, which are not checked. Kernels run where training would: on the
    GPU if there is one.
    """
    passes, sampling = field(annotate, "passes"), field(rollout, "sampling")
    forward, critic = (field(field(passes, name), "forward") for name in ("policy", "values"))
    _check_models(forward, critic, field(rollout, "engine"))
    wrong = screened(
        loss_fn=field(update_actor, "loss_fn"),
        advantage_fn=(advantage_fn := field(estimate, "advantage_fn")),
        kernels=_kernels(forward, advantage_fn, (update_actor, update_critic)),
        usage=Usage(
            group=4 if sampling is None else sampling.n,
            dtype=torch.float32 if forward is None else forward.model.compute_dtype or torch.float32,
            device=devices.home_of(devices.named("auto", "device")),
            models=lambda: [each.model for each in (forward, critic) if isinstance(each, Forward)],
            temperature=1.0 if sampling is None or sampling.greedy else sampling.temperature,
        ),
    )
    if wrong:
        first = next(iter(wrong.values()))
        texts = [f"{name}: {violation}" for name, violation in wrong.items()]
        raise LawViolation("\n".join([*texts, "Program(check=False) starts all the same."]), first.law, first.example)


def disagreements(*, rollout: Any, annotate: Any, estimate: Any, update_actor: Any) -> list[str]:
    """Describe fields of stages that contradict each other, one line each: a script can give a setting to one stage and
    forget it for another."""
    sampling, terms, correct = field(rollout, "sampling"), field(update_actor, "terms"), field(estimate, "correct")
    temperatures = {
        # a correction may make up for another sampling temperature, but nothing for the other two
        "rollout (Sampling)": sampling.temperature if sampling is not None and correct is None else None,
        "annotate": field(field(field(annotate, "passes"), "policy"), "temperature"),
        "UpdateActor (PolicyTerms)": None if terms is None else terms.temperature,
    }
    known, lines = {name: x for name, x in temperatures.items() if x is not None}, []
    if len(set(known.values())) > 1:
        text = ", ".join(f"{value} in {name}" for name, value in known.items())
        lines.append(f"temperature = {text}: log-probs would be of different distributions; give all the same")
    source, updated = field(annotate, "old_log_probs"), field(update_actor, "old_log_probs")
    if None not in (source, updated) and (source == "update") != (updated == "update"):
        lines.append(f"old_log_probs = {source!r} in annotate, {updated!r} in UpdateActor: give both the same")
    if source in (None, "pass"):
        return lines
    if correct is not None:
        text = "correct in estimate would compare the engine's with themselves; give 'pass', or leave it out"
        lines.append(f"old_log_probs = {source!r} in annotate: {text}")
    if source == "update" and field(estimate, "kl_in_reward"):
        text = "kl_in_reward in estimate needs them before the update; give 'pass'"
        lines.append(f"old_log_probs = {source!r} in annotate: {text}")
    return lines
