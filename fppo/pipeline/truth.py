"""A critic beside the truth, on tasks whose values are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import advantages, metrics
from fppo import batch as batches
from fppo.advantages import Advantages, exact_values
from fppo.batch import Column, Prompts, Rollout
from fppo.metrics import Metrics
from fppo.pipeline.passes import Passes, read_values, there
from fppo.pipeline.program import RunState
from fppo.rollout.engine import Ask, Engine, Sampling
from fppo.steps.forward import TokenOutputs
from fppo.tree import state

Answers = Callable[[Prompts], tuple[Tensor, Tensor]]  # the right responses: int64 [B, A], and their mask
KEPT = 8  # responses that are shown token by token
LEAST = 1e-3  # of an exact advantage that has a direction


@state
class _Rows:
    """What a pass reads of prompts with responses."""

    tokens: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] bool
    response_mask: Tensor  # [B, T] bool
    ground_truth: Column


class Beside(NamedTuple):
    """Responses with what the critic and the estimator say of each token, and what is exact; all [B, T]."""

    rollout: Rollout
    values: Tensor
    exact_values: Tensor
    advantages: Tensor
    exact_advantages: Tensor


OnBeside = Callable[[Beside], None]


@attrs.frozen(kw_only=True)
class Known:
    """What is known of a task: the right responses, the discount, and the estimator of the run's advantages, of token
    rewards, values and mask."""

    answers: Answers
    gamma: float = 1.0
    estimate: Callable[[Tensor, Tensor, Tensor], Advantages] = advantages.gae


def critic_truth(
    run: RunState,
    *,
    prompts: Iterable[Prompts],
    known: Known,
    engine: Engine,
    sampling: Sampling,
    passes: Passes,
    keep: OnBeside = lambda beside: None,
) -> Metrics:
    """How far the critic's values are from the exact ones (`advantages.exact_values`) of the policy as it samples.

    The values compared are those before every token of the policy's responses to the prompts, one to each, and of
    their right answers. critic/true/mse is the mean square of the difference, critic/true/variance that of the exact
    values, and critic/true/r2 is 1 - mse / variance: 1 for a critic that knows, 0 for one that knows their mean.

    Of the policy's own responses the advantages that `known.estimate` makes of the critic's values are held against the
    exact ones, r + gamma V_s - V of the exact values: critic/true/cosine is that of the angle between them over all
    tokens, and critic/true/sign the share of the tokens whose exact advantage is 0.001 or more in size in which both
    have the same sign. The first responses, with all this, go to `keep`.
    """
    assert run.critic is not None
    of_policy = partial(passes.policy, run.actor.params, outputs=("log_probs", *passes.read))
    exact: list[Tensor] = []
    guessed: list[Tensor] = []
    besides: list[Beside] = []
    for number, asked in enumerate(prompts):
        ask = Ask(asked, sampling, run.key.fold("truth", number), version=run.actor.step)
        rollout = engine.generate(run.actor.params, ask)
        answer, mask = (x.to(rollout.tokens.device) for x in known.answers(asked))
        right = _answered(asked, answer, mask)
        said = rollout.tokens[:, -rollout.response_mask.shape[1] :]
        of_answer: Tensor | None = None
        for rows, responses in ((right, answer), (rollout, said)):
            out = of_policy(rows) if of_answer is None or passes.values is None else TokenOutputs()
            of_answer = there(out.log_probs) if of_answer is None else of_answer
            if passes.values is not None:
                values = passes.values(run.critic.params, rows)
            else:
                values = read_values(passes, run.critic.params, there(out.log_probs), out, rows.response_mask).values
            own = rows.response_mask
            true = exact_values(of_answer, answer, mask, responses, own, gamma=known.gamma)
            exact.append(true[own].double())
            guessed.append(values[own].double())
            if rows is rollout:
                besides.append(_beside(rollout, values.to(true), true, _rewards(answer, mask, said, own), known))
    keep(batches.rows(besides[0], range(min(KEPT, len(besides[0].values)))))
    return _compared(torch.cat(exact), torch.cat(guessed)) | _pointing(besides)


def _answered(asked: Prompts, answer: Tensor, mask: Tensor) -> _Rows:
    return _Rows(
        tokens=torch.cat([asked.tokens.to(answer.device), answer], 1),
        attention_mask=torch.cat([asked.attention_mask.to(mask.device), mask], 1),
        response_mask=mask,
        ground_truth=asked.ground_truth,
    )


def _beside(rollout: Rollout, values: Tensor, exact: Tensor, rewards: Tensor, known: Known) -> Beside:
    mask, rewards = rollout.response_mask, rewards.to(exact)
    found = known.estimate(rewards, values, mask).advantages
    real = advantages.td(rewards, exact, mask, gamma=known.gamma).advantages
    return Beside(rollout, values, exact, found, real)


def _rewards(answers: Tensor, answer_mask: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
    """1 at the last token of each response that is the answer, [B, T]."""
    width = max(answers.shape[1], responses.shape[1])

    def wide(x: Tensor, there: Tensor) -> Tensor:
        return F.pad(x.where(there, -1), (0, width - x.shape[1]), value=-1)

    same = (wide(answers, answer_mask) == wide(responses, mask)).all(1) & mask.any(1)
    return advantages.token_rewards(same.double(), mask)


def _pointing(besides: list[Beside]) -> Metrics:
    """Whether the estimated advantages point as the exact ones do."""
    real, found = (
        torch.cat([getattr(beside, name)[beside.rollout.response_mask].double() for beside in besides])
        for name in ("exact_advantages", "advantages")
    )
    clear = real.abs() >= LEAST
    sizes = (real.square().sum() * found.square().sum()).sqrt()
    cosine = torch.where(sizes > 0, (real * found).sum() / sizes, torch.nan)
    same = metrics.mean((clear & (real.sign() == found.sign())).sum(), clear.sum())
    return {"critic/true/cosine": metrics.mean(cosine), "critic/true/sign": same}


def _compared(true: Tensor, guess: Tensor) -> Metrics:
    error, variance = (true - guess).square().mean(), true.var(unbiased=False)
    r2 = torch.where(variance > 0, 1.0 - error / variance, torch.nan)  # a share of nothing
    report = {"mse": error, "variance": variance, "r2": r2}
    return {f"critic/true/{name}": metrics.mean(value) for name, value in report.items()}
