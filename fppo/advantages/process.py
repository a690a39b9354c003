"""Process supervision: the steps of responses to one prompt are compared, in the place of whole responses."""

from __future__ import annotations

import torch

from fppo.advantages._common import Advantages, centre, check_rows, group_rows
from fppo.advantages.grouped import divisor
from fppo.losses._common import check_tokens
from fppo.shapes import Mask, RowIds, Tokens
from fppo_kernels.gae.scan import reverse_scan


def grpo_process(step_rewards: Tokens, mask: Mask, groups: RowIds, *, scale: str = "std") -> Advantages:
    """The sum of (R - mean) / (std + 1e-6) over the steps that end at a token or after it, with R the reward of a step,
    mean and unbiased std over all steps of the group; arXiv:2402.03300, 4.1.3.

    `step_rewards` [B, T] holds R at each step's last token, and nan at other tokens. `scale="none"` leaves the division
    out. Returns are the sums of R. If each row is one step, which ends with it, that is `grpo` of the rewards. The mean
    compares early with late steps, and rows of many with rows of few, so the gradient is biased.
    """
    check_tokens(mask, step_rewards=step_rewards)
    check_rows(mask, groups)
    ends = mask & ~step_rewards.isnan()
    rewards, of_row = step_rewards.detach()[ends], ends.nonzero()[:, 0]
    stats = centre(rewards, torch.ones_like(rewards, dtype=torch.bool), group_rows(groups[of_row]))
    normal = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    normal[ends] = stats.deviation / divisor(stats, scale)
    given = step_rewards.detach().double().where(ends, 0.0)
    later = [reverse_scan(x, 1.0).where(mask, 0.0).to(step_rewards.dtype) for x in (normal, given)]
    return Advantages(*later)
