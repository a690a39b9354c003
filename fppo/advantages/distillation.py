"""On-policy distillation: the policy learns, on its own responses, to give each token a teacher's probability."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.advantages._common import Advantages, check_unit, on_mask
from fppo.advantages.grouped import rloo
from fppo.advantages.temporal import discounted_returns
from fppo.losses._common import check_tokens, positive
from fppo.shapes import Mask, Rows, Tokens


def reverse_kl(
    log_probs: Tokens,
    teacher_log_probs: Tokens,
    mask: Mask,
    *,
    scores: Rows | None = None,
    groups: Tensor | None = None,
    gamma: float = 0.0,
    coef: float = 1.0,
    limit: float | None = None,
    score_coef: float = 0.0,
) -> Advantages:
    """Minus reverse KL to a teacher: A_t = -coef * (d_t + gamma d_s + gamma^2 ...), d = log_probs - teacher_log_probs.

    s is the row's next token in the mask. The mean gradient is that of coef * KL(policy || teacher): with `gamma` 0 of
    each token's divergence, the texts before it held fixed (on-policy GKD, Agarwal et al., arXiv:2306.13649; Thinking
    Machines, "On-Policy Distillation", 2025), with 1 of the whole responses' (MiniLLM, Gu et al., arXiv:2306.08543),
    with more noise. Where both models agree on a token, d is exactly 0. Not whitened.

    `log_probs` and `teacher_log_probs` [B, T] are of the sampled tokens, the policy's before its update. `limit` bounds
    each |d|: with it a token that the teacher all but rules out turns the gradient less than it should. A `score_coef`
    above 0 adds score_coef * (score [B] - the mean score of the other rows of its group, int64 [B]), as `rloo` does;
    nothing for the only row of a group. returns = A without the score's part. All [B, T], 0 outside the mask.

    Raises ValueError for a gamma outside [0, 1], a limit that is not above 0, and a score_coef without scores.
    """
    check_tokens(mask, log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    check_unit("gamma", gamma)
    gain = on_mask(teacher_log_probs, mask) - on_mask(log_probs, mask)
    if limit is not None:
        positive("limit", limit)
        gain = gain.clamp(-limit, limit)
    to_go = coef * (discounted_returns(gain, mask, gamma=gamma) if gamma else gain)
    learned = to_go
    if score_coef:
        if scores is None or groups is None:
            raise ValueError(f"score_coef={score_coef} needs scores and groups [B]")
        learned = to_go + score_coef * rloo(scores.double(), mask, groups).advantages
    return Advantages(learned.to(log_probs.dtype), to_go.to(log_probs.dtype))


def mean_reverse_kl(log_probs: Tokens, teacher_log_probs: Tokens, mask: Mask) -> Rows:
    """The mean of log_probs - teacher_log_probs over each row's tokens in the mask, [B]; 0 for a row without any.

    An unbiased estimate of KL(policy || teacher) per token where the policy itself has sampled the tokens.
    """
    check_tokens(mask, log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    apart = on_mask(log_probs, mask) - on_mask(teacher_log_probs, mask)
    return (apart.sum(1) / mask.sum(1).clamp(min=1)).to(torch.promote_types(log_probs.dtype, torch.float32))
