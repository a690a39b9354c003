"""Failures of the loss of a token: ratios, clips, weights, divergences."""

from functools import partial

import torch

from fppo import losses
from fppo.metrics import Sum, masked_mean

from .exhibit import Exhibit, exhibit

token = partial(exhibit, kind="policy_loss")


def cleaned(log_probs, old, advantages, mask):
    return log_probs.where(mask, 0.0), old.detach().where(mask, 0.0), advantages.detach().where(mask, 0.0)


@token(
    "AReaL#1346",
    "A row's advantage is the mean over its padding too.",
    "masked garbage",
)
def advantage_of_a_row(log_probs, old, advantages, mask):
    rows = advantages.detach().mean(1, keepdim=True).expand_as(advantages)
    return losses.gspo(log_probs, old, rows, mask, clip_low=0.2, clip_high=0.2)


@token("slime#179", "The weight of the correction has the current policy's gradient.", "REINFORCE")
def attached_weight(log_probs, old, advantages, mask):
    new, before, _ = cleaned(log_probs, old, advantages, mask)
    loss, metrics = losses.ppo_clip(log_probs, old, advantages, mask)
    return (loss * (new - before).clamp(-20, 20).exp()).where(mask, 0.0), metrics


@token(
    "DeepSeekRL-Extended#5",
    "The ratio is that of the log-probs to themselves, so that nothing is ever clipped.",
    "reference",
    reference=losses.ppo_clip,
)
def ratio_to_itself(log_probs, old, advantages, mask):
    return losses.ppo_clip(log_probs, log_probs.detach(), advantages, mask)


@token(
    "hands-on-modern-rl#75",
    "The log-probs of a row are summed before ratio and clip.",
    "REINFORCE",
)
def ratio_of_sums(log_probs, old, advantages, mask):
    new, before, adv = cleaned(log_probs, old, advantages, mask)
    ratio = (new - before).sum(1, keepdim=True).clamp(-20, 20).exp().expand_as(new)
    loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
    return loss.where(mask, 0.0), {}


@token(
    "trl#6808",
    "A kernel ignores the loss it is asked for, and trains another one.",
    "reference",
    reference=losses.gmpo,
)
def other_loss(log_probs, old, advantages, mask):
    return losses.ppo_clip(log_probs, old, advantages, mask, clip_low=0.4, clip_high=0.4)


@token("verl#5767", "A mean is logged as a sum over mini-batches.", "metrics add")
def summed_means(log_probs, old, advantages, mask):
    loss, metrics = losses.ppo_clip(log_probs, old, advantages, mask)
    mean = masked_mean(loss.detach(), mask)
    return loss, {**metrics, "actor/pg_loss": Sum(mean.total / mean.count.clamp(min=1))}


@exhibit(
    "agents#352",
    "The old values of the clip are computed by the current critic, so that it never clips.",
    "reference",
    "value_loss",
    reference=losses.value_loss,
)
def clip_without_effect(values, old_values, returns, mask):
    return losses.value_loss(values, values.detach(), returns, mask)


# divergences: exact expectations over all tokens of two small distributions

POLICY = torch.tensor([0.2, -0.7, 1.1, 0.4], dtype=torch.float64)
REFERENCE = torch.tensor([-0.3, 0.5, 0.2, 0.9], dtype=torch.float64)


def _expected(estimator, logits):
    p, ref = logits.log_softmax(-1), REFERENCE.log_softmax(-1)
    return p.exp().detach(), estimator(p[None], ref[None])[0], (p.exp() * (p - ref)).sum()


def value_of(source, story, estimator):
    """An exhibit of an estimator whose expectation is not the divergence."""

    def show():
        weights, values, exact = _expected(estimator, POLICY)
        mean = (weights * values).sum()
        return None if torch.isclose(mean, exact) else f"the expectation is {mean:.4f}, the divergence {exact:.4f}"

    return Exhibit(source, story, "KL in expectation", show)


def slope_of(source, story, estimator):
    """An exhibit of an estimator as a loss, whose expected gradient is not that of the divergence."""

    def show():
        logits = POLICY.clone().requires_grad_()
        weights, values, exact = _expected(estimator, logits)
        (true,) = torch.autograd.grad(exact, logits, retain_graph=True)
        (mean,) = torch.autograd.grad((weights * values).sum(), logits)
        if torch.allclose(mean, true):
            return None
        return f"the norm of the expected gradient is {mean.norm():.4f}, of the divergence's {true.norm():.4f}"

    return Exhibit(source, story, "KL in expectation", show)


rewarded_divergence = slope_of(
    "marin#1742",
    "The squared log-ratio encouraged divergence where it should penalise it.",
    lambda new, ref: -losses.kl_estimate(new, ref, "k2"),
)
wrong_sign = value_of(
    "ToolRL#52", "The sign of the term is wrong, and the policy is driven away.", lambda a, b: -(a - b)
)
turned_ratio = value_of(
    "PAE#8",
    "The exponent of the estimator has the other sign, so that its mean is no divergence.",
    lambda new, ref: (new - ref).exp() - 1 - (new - ref),
)
k1_as_a_loss = slope_of(
    "arXiv:2506.09477",
    "The log-ratio is differentiated as a loss, where its expected gradient is zero.",
    lambda new, ref: losses.kl_estimate(new, ref, "k1"),
)
k3_as_a_loss = slope_of(
    "verl#2953",
    "The gradient of k3 is taken for that of the divergence which it estimates.",
    lambda new, ref: losses.kl_estimate(new, ref, "k3"),
)

ROOM = (
    *(advantage_of_a_row, attached_weight, ratio_to_itself, ratio_of_sums, other_loss, summed_means),
    *(clip_without_effect, rewarded_divergence, wrong_sign, turned_ratio, k1_as_a_loss, k3_as_a_loss),
)
