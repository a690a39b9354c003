"""What is wrong with the settings of the critic, in a run that has one."""

from __future__ import annotations

from fppo.settings.problems import Problems, problem, unread
from fppo.settings.train import TrainSettings

# for each setting of a value loss: the losses that read it
_READERS = {
    "value_clip": ("mse", "huber"),
    "huber_delta": ("huber", "quantile"),
    "bins": ("hl_gauss", "two_hot", "quantile"),
    "range": ("hl_gauss", "two_hot"),
    "sigma": ("hl_gauss",),
}


def critic_problems(s: TrainSettings) -> Problems:
    """What does not go together in how the critic learns."""
    critic, default = s.critic, type(s.critic)()
    for name, losses in _READERS.items():
        if critic.loss not in losses:
            reader = f"critic.loss = {' or '.join(losses)}"
            yield from unread(f"critic.{name}", getattr(critic, name), getattr(default, name), reader)
    if critic.loss in _READERS["range"] and not critic.range:
        text = f"{critic.loss} needs the least and the greatest return; give both, with some room, as [-0.1, 1.1]"
        yield problem("critic.range", list(critic.range), text)
