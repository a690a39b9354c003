"""Responses of the quickstart's warmed-up policy, as rows with log-probs and advantages: what its first update gets."""

from __future__ import annotations

from typing import NamedTuple

import attrs
from torch import Tensor

from fppo import advantages, data, quickstart, rewards
from fppo.batch import Experience, Prompts, extend
from fppo.key import Key
from fppo.rollout import Ask, EmbeddedEngine, Sampling
from fppo.steps import Forward, MicroBatching, compute_log_probs

Params = dict[str, Tensor]


@attrs.frozen
class Sampler:
    """Samples and scores responses; the first prompts are the same for all that ask."""

    forward: Forward
    reward: rewards.RewardRunner
    tokenizer: object
    prompts: Prompts

    def __call__(self, params: Params, key: Key) -> Experience:
        """Eight responses to each prompt, with GRPO's advantages. Log-probs are those of `params`."""
        engine = EmbeddedEngine(model=self.forward.model, kernels=self.forward.kernels, pad_token_id=0)
        sampling = Sampling(n=8, max_tokens=4, stop_token_ids=(1,))
        rollout = engine.generate(params, Ask(self.prompts, sampling, key.fold("sample")))
        scored, _ = rewards.score(rollout, reward=self.reward, tokenizer=self.tokenizer)
        micro = MicroBatching(size=len(scored.row_ids))
        old = compute_log_probs(params, scored, forward=self.forward, micro_batching=micro)
        token_rewards = advantages.token_rewards(scored.scores, scored.response_mask)
        advantage, returns = advantages.grpo(scored.scores, scored.response_mask, scored.groups)
        columns = {"old_log_probs": old, "token_rewards": token_rewards, "advantages": advantage, "returns": returns}
        return extend(Experience, scored, **columns)


class Start(NamedTuple):
    """A policy that has imitated, what samples from it, and a first batch."""

    params: Params
    sample: Sampler
    rows: Experience


def start(key: Key, *, warm_up: int, prompts: int) -> Start:
    """The policy after so many updates on examples, and its responses to so many prompts."""
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    asked, _ = data.next_batch(quickstart.prompt_sets(tokenizer)[0], data.DataCursor(), size=prompts, key=key)
    sample = Sampler(Forward(model), rewards.RewardRunner(rewards.exact_match), tokenizer, asked)
    return Start(params, sample, sample(params, key))
