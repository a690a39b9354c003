"""The rewards of an environment as a part of the score."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fppo._errors import RunFailed
from fppo.rewards.functions import tensor_reward

if TYPE_CHECKING:
    from torch import Tensor

    from fppo.batch import Rollout
    from fppo.metrics import Metrics


@tensor_reward
def environment_reward(rollout: Rollout) -> tuple[Tensor, Metrics, Tensor]:
    """Sum each row's rewards of turns [B]; the third result, bool [B], is False where the environment failed.

    Raises ValueError for a rollout without rewards of turns, and RunFailed, its subclass, if the environment failed on
    every row of a policy without updates.
    """
    from fppo.rollout.turns.engine import WHY

    if rollout.turn_rewards is None:
        raise ValueError("the rollout has no turn_rewards: it was sampled without an environment")
    total = rollout.turn_rewards.sum(1)
    known = ~total.isnan()
    if not known.any() and not rollout.versions.any():
        why = next((extra[WHY] for extra in rollout.extras if extra.get(WHY)), "the log has it")
        raise RunFailed(
            f"the environment failed on every one of the first {len(total)} episodes, so there is nothing to learn "
            f"from; the first error: {why} (prompts over data.max_prompt_tokens count as failures)"
        )
    return total.nan_to_num(nan=0.0), {}, known
