"""A critic beside the truth, on tasks whose values are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fppo import batch as batches
from fppo import metrics
from fppo.advantages import exact_values
from fppo.batch import Prompts
from fppo.metrics import Metrics
from fppo.pipeline.program import RunState
from fppo.pipeline.stages import Role
from fppo.rollout.engine import Ask, Engine, Sampling
from fppo.runtime.mesh import DATA_AXES, place_on
from fppo.runtime.offload import OnHost
from fppo.steps.forward import Forward, compute_log_probs, compute_values, row_lengths
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.ranks import collect, shares
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
    critic: Forward,
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
    policy, values_of = fetch("actor", run.actor.params), fetch("critic", run.critic.params)
    exact: list[Tensor] = []
    guessed: list[Tensor] = []
    for number, asked in enumerate(prompts):
        rollout = engine.generate(
            run.actor.params, Ask(asked, sampling, run.key.fold("truth", number), version=run.actor.step)
        )
        answer, mask = answers(asked)
        right = _Rows(
            tokens=torch.cat([asked.tokens, answer], 1),
            attention_mask=torch.cat([asked.attention_mask, mask], 1),
            response_mask=mask,
        )
        log_probs = _of_all(
            right,
            forward,
            lambda own: compute_log_probs(
                policy, own, forward=forward, micro_batching=micro_batching, temperature=sampling.temperature
            ),
        )
        said = rollout.tokens[:, -rollout.response_mask.shape[1] :]
        for rows, responses in ((right, answer), (rollout, said)):
            values = _of_all(
                rows, critic, lambda own: compute_values(values_of, own, forward=critic, micro_batching=micro_batching)
            )
            true = exact_values(log_probs, answer, mask, responses, rows.response_mask, gamma=gamma)
            exact.append(true[rows.response_mask].double())
            guessed.append(values[rows.response_mask].double())
    true, guess = torch.cat(exact), torch.cat(guessed)
    error, variance = (true - guess).square().mean(), true.var(unbiased=False)
    report = {"mse": error, "variance": variance, "r2": 1.0 - error / variance}
    return {f"critic/true/{name}": metrics.mean(value) for name, value in report.items()}


def _of_all(rows: batches.Rollout | _Rows, forward: Forward, compute: Callable[..., Tensor]) -> Tensor:
    """What `compute` gives for all rows, of which each data rank computes a share."""
    places = shares(forward.model, row_lengths(rows), forward.mesh)
    own = rows if len(places) == 1 else batches.rows(rows, places[place_on(forward.mesh, DATA_AXES)])
    return collect(compute(own), places, forward.mesh)
