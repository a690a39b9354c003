"""The entropy bonus of a step by its controller: into the actor's batch, and the controller's next state after it."""

from __future__ import annotations

from collections.abc import Callable

from fppo import metrics
from fppo.batch import Experience
from fppo.losses import EntropyState
from fppo.metrics import Mean, Metrics
from fppo.tree import replace


def with_bonus(experience: Experience, state: EntropyState | None) -> Experience:
    """The batch with the controller's factor of the entropy bonus; as it is without a controller."""
    if state is None:
        return experience
    mask = experience.response_mask
    return replace(experience, entropy_coef=state.coef.to(mask.device).expand(len(mask)).clone())


def explored(
    state: EntropyState | None, update: Metrics | None, *, rule: Callable[[EntropyState, Mean], EntropyState] | None
) -> tuple[EntropyState | None, Metrics]:
    """The controller's state after the actor's `update` with these metrics, and its own metrics. Without a controller
    or an update it stays."""
    if state is None or update is None or rule is None:
        return state, {}
    entropy = update["actor/entropy"]
    assert isinstance(entropy, Mean)
    return rule(state, entropy), {"actor/entropy_coef": metrics.mean(state.coef)}
