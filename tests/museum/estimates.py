"""Failures of advantages: padding, tool tokens, groups, whitening."""

from functools import partial

import torch

from fppo import advantages

from .exhibit import exhibit

gae = partial(exhibit, kind="gae")
grouped = partial(exhibit, kind="advantages")
temporal = partial(exhibit, kind="temporal")


def everywhere(rewards, values, mask, gamma, lam):
    """GAE with every position a step, cut to the mask afterwards."""
    found = advantages.gae(rewards, values, torch.ones_like(mask), gamma=gamma, lam=lam)
    return found.advantages.where(mask, 0.0), found.returns.where(mask, 0.0)


def to_go(rewards, mask):
    return advantages.discounted_returns(rewards, mask)


@gae("ROLL#447", "Values of masked positions serve as the next state's.", "masked garbage")
def masked_values(rewards, values, mask, *, gamma, lam):
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = (rewards + gamma * following - values).where(mask, 0.0)
    found = advantages.discounted_returns(deltas, mask, gamma=gamma * lam)
    return found, (found + values).where(mask, 0.0)


@gae("miles#1827", "Tool tokens are steps of the episode, with rewards and values of their own.", "masked steps")
def every_token(rewards, values, mask, *, gamma, lam):
    return everywhere(rewards, values, mask, gamma, lam)


@gae("verl#2337", "Observations between turns are states of value 0.", "definition")
def zero_states(rewards, values, mask, *, gamma, lam):
    return everywhere(rewards.where(mask, 0.0), values.where(mask, 0.0), mask, gamma, lam)


@gae("rlhf-book#216", "The advantage is the token's reward less its value, without what follows.", "definition")
def no_future(rewards, values, mask, *, gamma, lam):
    found = (rewards - values).where(mask, 0.0)
    return found, (found + values).where(mask, 0.0)


@temporal("verl#7278", "The running return is reset at the observations of tools.", "masked steps")
def reset_at_gaps(rewards, values, mask):
    columns, running = [], torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = (rewards[:, t] + running).where(mask[:, t], 0.0)
        columns.append(running)
    return torch.stack(columns[::-1], 1)


@temporal("slime#1370", "The KL penalty of tool tokens adds up in the returns of what comes before.", "masked garbage")
def penalty_of_tools(rewards, values, mask):
    kl = 0.1 * values.abs()
    return (rewards.where(mask, 0.0) - kl).flip(1).cumsum(1).flip(1).where(mask, 0.0)


@temporal("miles#1383", "A fork lost the mask of the penalty: gaps are discounted, too.", "masked steps")
def discounted_gaps(rewards, values, mask):
    return everywhere(rewards - 0.1 * values.abs(), 0.0 * values, mask, 0.9, 1.0)[0]


@temporal("trl#7024", "Padding is not masked: its rewards are in the advantage of every token.", "masked garbage")
def sums_of_padding(rewards, values, mask):
    return rewards.flip(1).cumsum(1).flip(1).where(mask, 0.0)


@temporal("DeepSpeedExamples#672", "The end of a row is one position too far.", "masked garbage")
def one_too_far(rewards, values, mask):
    wider = mask | torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    return to_go(rewards, wider).where(mask, 0.0)


@grouped("trl#3750", "The score stands on the token behind the end, which the loss masks.", "unequal rewards")
def behind_the_end(scores, mask, groups):
    behind = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1) & ~mask
    return to_go(scores[:, None].where(behind, 0.0), mask)


@grouped("AReaL#1351", "Rows that count nowhere shift the mean of the others.", "masked garbage")
def counts_left_out_rows(scores, mask, groups):
    return (scores - scores.mean())[:, None].where(mask, 0.0)


@grouped(
    "gem#113",
    "Advantages of a group are normalised a second time over the batch.",
    "reference",
    reference=advantages.grpo,
)
def normalised_twice(scores, mask, groups):
    return advantages.whiten(advantages.grpo(scores, mask, groups).advantages, mask)


@grouped(
    "NeMo-RL#4158",
    "The variance is the mean of squares less the square of the mean, which is rounding alone.",
    "equal rewards",
)
def variance_of_squares(scores, mask, groups):
    result = torch.zeros_like(scores)
    for group in groups.unique():
        rows = (groups == group) & mask.any(1)
        x = scores[rows]
        if len(x):
            variance = ((x * x).mean() - x.mean() ** 2).clamp(min=0.0)
            result[rows] = (x - x.mean()) / (variance.sqrt() + 1e-6)
    return result[:, None].where(mask, 0.0)


@exhibit("OpenRLHF#1250", "Statistics of rows are subtracted along the wrong axis.", "mean and variance", "whiten")
def wrong_axis(x, mask):
    if len(x) != x.shape[1]:
        return advantages.whiten(x, mask)  # other shapes do not broadcast
    kept, counts = x.where(mask, 0.0), mask.sum(1).clamp(min=1)
    centred = (kept - kept.sum(1) / counts).where(mask, 0.0)  # [B, T] - [B]
    variance = (centred**2).sum(1) / counts
    return centred * (variance + 1e-8).rsqrt()


ROOM = (
    *(masked_values, every_token, zero_states, no_future, reset_at_gaps, penalty_of_tools, discounted_gaps),
    *(sums_of_padding, one_too_far, behind_the_end, counts_left_out_rows, normalised_twice, variance_of_squares),
    *(wrong_axis,),
)
