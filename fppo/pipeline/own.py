"""What the stages of a program call that is not this library's, put through the laws that take no time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fppo import laws
from fppo.laws import LawViolation
from fppo.laws._search import fn_name
from fppo.models.probe import check_model
from fppo.pipeline.estimators import of_rows
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.steps.actor import SelectiveLoss
from fppo.steps.forward import Forward
from fppo_kernels.adamw import adamw_
from fppo_kernels.table import INSIDE

LIBRARY = ("fppo", "fppo_kernels")
# the kernels of a forward pass and of decoding that are looked at
SCREENED = ("attention", "decode_attention", "log_probs", *INSIDE)


def is_own(fn: Any) -> bool:
    """Whether a function, whatever is bound to it or wrapped around it, is none of this library's."""
    while isinstance(fn, partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return (getattr(fn, "__module__", None) or type(fn).__module__).partition(".")[0] not in LIBRARY


def screened(
    *,
    loss_fn: Any = None,
    advantage_fn: Any = None,
    kernels: Mapping[str, Callable[..., Any]],
    group: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, LawViolation]:
    """What is wrong, by the names of the arguments and of the kernels, with those of them that are not this library's.

    `group` is the number of responses to a prompt; `dtype` and `device` are what kernels run in and on.
    """
    checks: dict[str, Callable[[], None]] = {}
    if isinstance(loss_fn, SelectiveLoss) and is_own(loss_fn.loss_fn):
        checks["loss_fn"] = partial(laws.screen_policy_loss, loss_fn.loss_fn, selective=True)
    elif loss_fn is not None and not isinstance(loss_fn, SelectiveLoss) and is_own(loss_fn):
        checks["loss_fn"] = partial(laws.screen_policy_loss, loss_fn)
    if advantage_fn is not None and is_own(plain := getattr(advantage_fn, "fn", advantage_fn)):
        name = fn_name(plain)
        checks["advantage_fn"] = partial(laws.screen_estimator, of_rows(advantage_fn), group=group, name=name)
    for op, kernel in kernels.items():
        if is_own(kernel):
            checks[op] = partial(laws.screen_kernel, op, kernel, dtype=dtype, device=device)
    wrong: dict[str, LawViolation] = {}
    for name, check in checks.items():
        try:
            check()
        except LawViolation as violation:
            wrong[name] = violation
    return wrong


def bound(stage: Any, name: str) -> Any:
    """What is bound to a stage as the keyword `name`, by functools.partial and under wrappers; None if nothing is."""
    while stage is not None:
        if isinstance(stage, partial):
            if name in stage.keywords:
                return stage.keywords[name]
            stage = stage.func
        else:
            stage = getattr(stage, "__wrapped__", None)
    return None


def _check_models(policy: Any, critic: Any, engine: Any) -> None:
    """Raises ValueError for a model of another function; it takes some hundredths of a second."""
    if policy is not None:
        check_model(policy.model)
    if isinstance(critic, Forward) and (policy is None or critic.model.config != policy.model.config):
        check_model(critic.model)
    if isinstance(engine, EmbeddedEngine):
        check_engine(engine.model)


def _kernels(forward: Any, advantage_fn: Any, updates: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """The kernels that a program calls, as far as they are to be seen; of AdamW's the first that is one's own."""
    kernels = {} if forward is None else {op: getattr(forward.kernels, op) for op in SCREENED}
    if (gae := bound(getattr(advantage_fn, "fn", advantage_fn), "kernel")) is not None:
        kernels["gae"] = gae
    for update in updates:
        optimizer = bound(update, "optimizer")
        write = None if optimizer is None else bound(optimizer.update, "write_")
        adamw = bound(write, "kernel")
        if adamw is not None and not is_own(kernels.get("adamw", adamw_)):
            kernels["adamw"] = adamw
    return kernels


def check_stages(*, rollout: Any, annotate: Any, estimate: Any, update_actor: Any, update_critic: Any = None) -> None:
    """Raises LawViolation for an own loss, estimator or kernel among what is bound to a program's stages, and
    ValueError for a model that fppo computes otherwise than transformers does: one that was built, and not loaded, has
    not been looked at yet.

    A stage that is a plain function hides what it calls; that is not looked at. Kernels run where training would: on
    the GPU if there is one.
    """
    passes, sampling = bound(annotate, "passes"), bound(rollout, "sampling")
    forward, critic = bound(annotate, "forward"), bound(annotate, "critic")
    if passes is not None:
        forward, critic = bound(passes.policy, "forward"), bound(passes.values, "forward")
    advantage_fn = bound(estimate, "advantage_fn")
    _check_models(forward, critic, bound(rollout, "engine"))
    wrong = screened(
        loss_fn=bound(update_actor, "loss_fn"),
        advantage_fn=advantage_fn,
        kernels=_kernels(forward, advantage_fn, (update_actor, update_critic)),
        group=4 if sampling is None else sampling.n,
        dtype=torch.float32 if forward is None else forward.model.compute_dtype or torch.float32,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    if wrong:
        first = next(iter(wrong.values()))
        texts = [f"{name}: {violation}" for name, violation in wrong.items()]
        raise LawViolation("\n".join([*texts, "Program(check=False) starts all the same."]), first.law, first.example)
