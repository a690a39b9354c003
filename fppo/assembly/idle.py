"""Lines on settings of a run that have no effect, given its other settings.

Whether a keyword of a loss has an effect is not known by its name but tried: the loss and its gradient are computed
with other values of the keyword, where old and new log-probs, or values, are equal and where they differ. So this works
for the user's own losses, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import attrs
import torch
from torch import Tensor

from fppo.assembly.functions import correction_of, policy_loss, value_head_of
from fppo.settings.component import Component, Functions, Keyword, signature_of, value_of
from fppo.settings.resolve import engine_is_apart, has_equal_log_probs
from fppo.settings.tables import POLICY_LOSSES, VALUE_HEADS
from fppo.settings.train import TrainSettings
from fppo.steps.actor import SelectiveLoss

_ROWS, _WIDTH = 6, 8
_SPREADS = (0.001, 0.01, 0.1, 1.0, 4.0)  # scales of the difference between old and new values
_ROUNDING = 1e-6  # the scale at which they are equal but for rounding
_SAME = 1e-3  # tolerance for loss and gradient: far above rounding
Loss = Callable[[Any, float], tuple[Tensor, Tensor]]  # from a part and a spread of old and new: loss, gradient


def idle_lines(settings: TrainSettings) -> list[str]:
    """Lines on the settings that change no update of the run, each with the reason."""
    s, size = settings, (settings.rollout.batch_size, settings.rollout.n)
    lines = []
    if has_equal_log_probs(s):
        found = list(_idle(s.actor.loss, POLICY_LOSSES, _of_policy))
        lines += _line("one update a step: the ratio is 1", "actor.loss", found)
    if s.algorithm.uses_critic and s.critic.updates(*size) == 1:
        found = list(_idle(s.critic.loss, VALUE_HEADS, _of_values))
        lines += _line("one update of the critic a step: values are the old ones", "critic.loss", found)
    if not engine_is_apart(s) and not _corrects(s.algorithm.correction):
        lines.append("the engine samples from the policy itself: algorithm.correction changes nothing")
    roles = {"actor": s.actor, "critic": s.critic} if s.algorithm.uses_critic else {"actor": s.actor}
    for role, section in roles.items():
        if section.draw_by == "prompt" and section.mini_batch(*size) == size[0]:
            lines.append(f"a batch is one mini-batch: {role}.draw_by changes nothing")
    return lines


def _line(why: str, path: str, names: Sequence[str]) -> list[str]:
    several = "change" if len(names) > 1 else "changes"
    return [f"{why}; {', '.join(f'{path}.{name}' for name in names)} {several} nothing"] if names else []


def _idle(part: Component, table: Functions, loss: Loss) -> Iterator[str]:
    """Names of keywords that change a part's loss only where old and new values differ, never where they are equal.

    `loss` computes the loss and gradient of a part at a given spread between old and new values.
    """
    signature = signature_of(part.name, table)
    own = [_value_and_gradient(part, spread, loss) for spread in (_ROUNDING, *_SPREADS)]
    for name, keyword in () if signature is None else signature.keywords.items():
        equal, apart = set[bool | None](), set[bool | None]()
        for value in _others(value_of(part, table, name), keyword):
            other = attrs.evolve(part, keywords={**part.keywords, name: value})
            near, *far = (
                _differ(one, _value_and_gradient(other, spread, loss))
                for one, spread in zip(own, (_ROUNDING, *_SPREADS), strict=True)
            )
            equal.add(near)
            apart |= set(far)
        if True in apart and True not in equal and False in equal:
            yield name


def _others(value: Any, keyword: Keyword) -> list[Any]:
    """Values other than `value` to try for a keyword, its default among them."""
    found = [] if keyword.default is attrs.NOTHING else [keyword.default]
    if isinstance(value, bool):
        found.append(not value)
    elif isinstance(value, int | float):
        found += [type(value)(value * 2 + (value == 0)), type(value)(value / 2)]
    elif get_origin(keyword.kind) is Literal:
        found += get_args(keyword.kind)
    return [x for x in found if x != value]


def _value_and_gradient(part: Component, spread: float, loss: Loss) -> tuple[Tensor, Tensor] | None:
    """Call `loss(part, spread)`, which returns loss and gradient, with the same random draws each time; None if it
    raises an error. `spread` is the scale of the differences between old and new values."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        try:
            return loss(part, spread)
        except Exception:  # a user's function may raise anything; invalid settings are reported elsewhere
            return None


def _differ(one: tuple[Tensor, Tensor] | None, two: tuple[Tensor, Tensor] | None) -> bool | None:
    if one is None or two is None:
        return None
    return not all(torch.allclose(x, y, rtol=_SAME, atol=_SAME) for x, y in zip(one, two, strict=True))


def _of_policy(part: Any, spread: float) -> tuple[Tensor, Tensor]:
    """Compute the policy loss `part` of each token [B, T] of random rows, and the gradient of its sum by the new
    log-probs. These are the old log-probs plus normal noise of scale `spread`."""
    loss_fn, mask = policy_loss(part), torch.ones(_ROWS, _WIDTH, dtype=torch.bool)
    old, moved, advantages = -torch.rand(_ROWS, _WIDTH), spread * torch.randn(_ROWS, _WIDTH), torch.randn(_ROWS, _WIDTH)
    given = ((old + moved).requires_grad_(), old, advantages, mask)
    if isinstance(loss_fn, SelectiveLoss):
        selected = loss_fn.select_fn(*given, noise=torch.rand(_ROWS, _WIDTH))
        values, _ = loss_fn.loss_fn(*given, selected=selected)
    else:
        values, _ = loss_fn(*given)
    return values.detach(), torch.autograd.grad(values.sum(), given[0])[0]


def _of_values(part: Any, spread: float) -> tuple[Tensor, Tensor]:
    """Compute the loss of the value head `part` for each token [B, T] of random rows, and the gradient of its sum by
    the head's outputs. Old values are the head's present values plus normal noise of scale `spread`."""
    head, mask = value_head_of(part), torch.ones(_ROWS, _WIDTH, dtype=torch.bool)
    outputs, returns = torch.randn(_ROWS, _WIDTH, head.outputs), torch.randn(_ROWS, _WIDTH)
    given = (outputs if head.outputs > 1 else outputs[..., 0]).requires_grad_()
    old = head.read(outputs).detach() + spread * torch.randn(_ROWS, _WIDTH)
    values, _ = head.loss_fn(given, old, returns, mask)
    return values.detach(), torch.autograd.grad(values.sum(), given)[0]


def _corrects(part: Component) -> bool:
    """Whether a correction weighs or rejects any token of rows that the policy itself sampled; True without a
    correction."""
    if (correct := correction_of(part)) is None:
        return True
    mask, old = torch.ones(_ROWS, _WIDTH, dtype=torch.bool), -torch.rand(_ROWS, _WIDTH)
    found = correct(old, old, mask)
    weights = torch.ones_like(old) if found.weights is None else found.weights
    return not (torch.equal(found.mask, mask) and torch.allclose(weights, torch.ones_like(old)))
