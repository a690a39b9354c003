"""What is wrong with the settings of the critic, in a run that has one."""

from __future__ import annotations

from fppo.settings.component import signature_of
from fppo.settings.problems import Problems, problem, unread
from fppo.settings.tables import VALUE_HEADS
from fppo.settings.train import TrainSettings


def critic_problems(s: TrainSettings) -> Problems:
    """What does not go together in how the critic learns."""
    critic, default = s.critic, type(s.critic)()
    signature = signature_of(critic.loss.name, VALUE_HEADS)
    if signature is not None and "bins" in signature.keywords:
        yield from unread("critic.popart", critic.popart, 0.0, "heads of one output, as critic.loss = mse or huber")
    if not critic.pretrain:
        for name in ("pretrain_patience", "pretrain_rise"):
            yield from unread(f"critic.{name}", getattr(critic, name), getattr(default, name), "critic.pretrain > 0")
    elif critic.warmup_steps:
        text = f"critic.pretrain = {critic.pretrain} is given too, and fits the critic first as well; give one of them"
        yield problem("critic.warmup_steps", critic.warmup_steps, text)
    elif critic.pretrain >= s.steps:
        text = f"the policy might never be updated in {s.steps} steps; give fewer than steps"
        yield problem("critic.pretrain", critic.pretrain, text)
    if critic.freeze and not (s.model.critic_path or critic.pretrain or critic.warmup_steps):
        text = "it would stay as it is drawn; give model.critic_path, critic.pretrain or critic.warmup_steps"
        yield problem("critic.freeze", True, text)
