"""A critic beside the truth, on tasks whose values are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from fppo import metrics
from fppo.advantages import exact_values
from fppo.batch import Prompts
from fppo.metrics import Metrics
from fppo.pipeline.program import RunState
from fppo.pipeline.stages import ConfidenceFn, Role, share_of, there
from fppo.rollout.engine import Ask, Engine, Sampling
from fppo.runtime.offload import OnHost
from fppo.steps.forward import Forward, TokenOutputs, compute_outputs, compute_values
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.train_state import Params
from fppo.tree import state

Answers = Callable[[Prompts], tuple[Tensor, Tensor]]  # the right responses: int64 [B, A], and their mask


@state
class _Rows:
    """What a pass reads of prompts with responses."""

    tokens: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] bool
    response_mask: Tensor  # [B, T] bool


def critic_truth(
    run: RunState,
    *,
    prompts: Iterable[Prompts],
    answers: Answers,
    engine: Engine,
    sampling: Sampling,
    forward: Forward,
    critic: Forward | ConfidenceFn,
    micro_batching: MicroBatching,
    gamma: float = 1.0,
    fetch: Callable[[Role, Params], Params | OnHost] = lambda role, params: params,
) -> Metrics:
    """How far the critic's values are from the exact ones (`advantages.exact_values`) of the policy as it samples.

    The values compared are those before every token of the policy's responses to the prompts, one to each, and of
    their right answers. critic/true/mse is the mean square of the difference, critic/true/variance that of the exact
    values, and critic/true/r2 is 1 - mse / variance: 1 for a critic that knows, 0 for one that knows their mean.
    """
    assert run.critic is not None
    policy, of_critic = fetch("actor", run.actor.params), fetch("critic", run.critic.params)
    of_policy = partial(
        compute_outputs,
        policy,
        forward=forward,
        micro_batching=micro_batching,
        outputs=("log_probs", "entropy"),
        temperature=sampling.temperature,
    )
    exact: list[Tensor] = []
    guessed: list[Tensor] = []
    for number, asked in enumerate(prompts):
        ask = Ask(asked, sampling, run.key.fold("truth", number), version=run.actor.step)
        rollout = engine.generate(run.actor.params, ask)
        answer, mask = answers(asked)
        right = _Rows(
            tokens=torch.cat([asked.tokens, answer], 1),
            attention_mask=torch.cat([asked.attention_mask, mask], 1),
            response_mask=mask,
        )
        said = rollout.tokens[:, -rollout.response_mask.shape[1] :]
        of_answer: Tensor | None = None
        for rows, responses in ((right, answer), (rollout, said)):
            share = share_of(rows, forward)
            out = TokenOutputs()
            if of_answer is None or not isinstance(critic, Forward):
                out = TokenOutputs(*(None if x is None else share.collected(x) for x in of_policy(share.own)))
            of_answer = there(out.log_probs) if of_answer is None else of_answer
            if isinstance(critic, Forward):
                values = compute_values(of_critic, share.own, forward=critic, micro_batching=micro_batching)
                values = share.collected(values)
            else:
                values = critic(run.critic.params, there(out.log_probs), there(out.entropy), rows.response_mask)
            true = exact_values(of_answer, answer, mask, responses, rows.response_mask, gamma=gamma)
            exact.append(true[rows.response_mask].double())
            guessed.append(values[rows.response_mask].double())
    return _compared(torch.cat(exact), torch.cat(guessed))


def _compared(true: Tensor, guess: Tensor) -> Metrics:
    error, variance = (true - guess).square().mean(), true.var(unbiased=False)
    r2 = torch.where(variance > 0, 1.0 - error / variance, torch.nan)  # a share of nothing
    report = {"mse": error, "variance": variance, "r2": r2}
    return {f"critic/true/{name}": metrics.mean(value) for name, value in report.items()}
