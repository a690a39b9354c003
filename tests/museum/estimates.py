"""Failures of advantages: padding, tool tokens, groups, whitening."""

from functools import partial

import torch

from fppo import advantages
from fppo.advantages import Advantages

from .exhibit import exhibit, ones_like

gae = partial(exhibit, kind="gae")
grouped = partial(exhibit, kind="advantages")
temporal = partial(exhibit, kind="temporal")


@gae("ROLL#447", "Values of masked positions serve as the next state's.", "masked garbage")
def masked_values(rewards, values, mask, *, gamma, lam):
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = (rewards + gamma * following - values).where(mask, 0.0)
    found = advantages.discounted_returns(deltas, mask, gamma=gamma * lam)
    return found, (found + values).where(mask, 0.0)


@gae("miles#1827", "Tool tokens are steps of the episode, with their own rewards and values.", "masked steps")
def every_token(rewards, values, mask, *, gamma, lam):
    found = advantages.gae(rewards, values, ones_like(rewards), gamma=gamma, lam=lam)
    return found.advantages.where(mask, 0.0), found.returns.where(mask, 0.0)


@gae("verl#2337", "Observations between turns are states of value 0.", "masked steps")
def zero_states(rewards, values, mask, *, gamma, lam):
    rewards, values = (x.where(mask, 0.0) for x in (rewards, values))
    return every_token.__wrapped__(rewards, values, mask, gamma=gamma, lam=lam)


@gae("rlhf-book#216", "The advantage is the token's reward less its value, without what follows.", "definition")
def no_future(rewards, values, mask, *, gamma, lam):
    found = (rewards - values).where(mask, 0.0)
    return found, (found + values).where(mask, 0.0)


@temporal(
    "verl#7278", "The running return is reset at observations of tools.", "masked steps", columns=("rewards",)
)
def reset_at_gaps(rewards, mask):
    columns, running = [], torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = (rewards[:, t] + running).where(mask[:, t], 0.0)
        columns.append(running)
    return torch.stack(columns[::-1], 1)
