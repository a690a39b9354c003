"""A critic compared with exact values, on tasks whose values are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from fppo import advantages, metrics
from fppo import batch as batches
from fppo.advantages import Advantages, exact_values
from fppo.batch import Column, Prompts, Rollout
from fppo.data.tokenizers import encode_after
from fppo.metrics import Metrics
from fppo.pipeline.passes import Passes, read_values, required
from fppo.pipeline.program import RunState
from fppo.rollout.engine import Ask, Engine, Sampling
from fppo.steps.forward import Rows, TokenOutputs
from fppo.tree import state

Answers = Callable[[Prompts], tuple[Tensor, Tensor]]  # the right responses: int64 [B, A], and their mask
KEPT = 8  # responses that are shown token by token
LEAST = 1e-3  # the least size of an exact advantage whose sign is compared


@state
class Continued:
    """The columns of prompts with responses that a pass reads."""

    tokens: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] bool
    response_mask: Tensor  # [B, T] bool
    ground_truth: Column


class Compared(NamedTuple):
    """Responses with the critic's values and the estimator's advantages, beside the exact ones; all [B, T]."""

    rollout: Rollout
    values: Tensor
    exact_values: Tensor
    advantages: Tensor
    exact_advantages: Tensor


OnCompared = Callable[[Compared], None]


class Truth(NamedTuple):
    """Responses; the policy's outputs for them, if they were computed; the exact value before each token; and for the
    policy's own responses their rewards and exact advantages, all [B, T]."""

    rows: Rows
    out: TokenOutputs | None
    values: Tensor
    rewards: Tensor | None = None
    advantages: Tensor | None = None


PolicyOf = Callable[[Rows], TokenOutputs]


@attrs.frozen(kw_only=True)
class Known:
    """The known truth of a task: `exact`, a function of prompts, their rollout and the policy's outputs for rows, such
    as `one_answer`; and `estimate`, the run's estimator, a function of token rewards, values and mask."""

    exact: Callable[[Prompts, Rollout, PolicyOf], Iterable[Truth]]
    estimate: Callable[[Tensor, Tensor, Tensor], Advantages] = advantages.gae


def critic_truth(
    run: RunState,
    *,
    prompts: Iterable[Prompts],
    known: Known,
    engine: Engine,
    sampling: Sampling,
    passes: Passes,
    keep: OnCompared = lambda compared: None,
) -> Metrics:
    """Metrics of how far the critic's values are from the exact ones of the policy that samples.

    Compared are the values before every token of the policy's responses, one to each prompt, and of other responses
    that `known.exact` yields. critic/true/mse is the mean squared difference, critic/true/variance the variance of the
    exact values, critic/true/r2 is 1 - mse / variance: 1 for a perfect critic, 0 for one that knows their mean.

    For the policy's own responses, the advantages that `known.estimate` makes of the critic's values are compared with
    the exact ones. critic/true/cosine is the cosine of the angle between them over all tokens. critic/true/sign is the
    fraction of equal signs among the tokens whose exact advantage is 0.001 or more in size. `keep` gets the first
    responses with all this.
    """
    assert run.critic is not None
    of_policy, of_critic = partial(passes.policy, run.actor.params, outputs=("log_probs", *passes.read)), passes.values
    exact: list[Tensor] = []
    guessed: list[Tensor] = []
    all_compared: list[Compared] = []
    for number, asked in enumerate(prompts):
        ask = Ask(asked, sampling, run.key.fold("truth", number), version=run.actor.step)
        rollout = engine.generate(run.actor.params, ask)
        for rows, out, true, rewards, real in known.exact(asked, rollout, of_policy):
            own = rows.response_mask
            if of_critic is not None:
                values = of_critic(run.critic.params, rows)
            else:
                out = of_policy(rows) if out is None else out
                values = read_values(passes, run.critic.params, required(out.log_probs), out, rows).values
            exact.append(true[own].double())
            guessed.append(values[own].double())
            if rewards is not None and real is not None:
                found = known.estimate(rewards, values.to(true), own).advantages
                all_compared.append(Compared(rollout, values.to(true), true, found, real))
    keep(batches.rows(all_compared[0], range(min(KEPT, len(all_compared[0].values)))))
    return _compared(torch.cat(exact), torch.cat(guessed)) | _pointing(all_compared)


def one_answer(
    prompts: Prompts, rollout: Rollout, of_policy: PolicyOf, *, answers: Answers, gamma: float = 1.0
) -> Iterator[Truth]:
    """Yield the exact values of the right answers, then those of the rollout's responses, one to each prompt, if the
    right answer is worth 1 and all others 0 (`advantages.exact_values`). The exact advantage of the token at t is
    r_t + gamma V_s - V_t, where s is the next position in the mask (V_s = 0 at the end)."""
    answer, answered = (x.to(rollout.tokens.device) for x in answers(prompts))
    right = _answered(prompts, answer, answered)
    out = of_policy(right)
    value = partial(exact_values, required(out.log_probs), answer, answered, gamma=gamma)
    yield Truth(right, out, value(answer, answered))
    mask = rollout.response_mask
    said = rollout.tokens[:, -mask.shape[1] :]
    true = value(said, mask)
    rewards = _rewards(answer, answered, said, mask).to(true)
    real = advantages.td(rewards, true, mask, steps=1, gamma=gamma).advantages
    yield Truth(rollout, None, true, rewards, real)


def _answered(prompts: Prompts, answer: Tensor, mask: Tensor) -> Continued:
    return Continued(
        tokens=torch.cat([prompts.tokens.to(answer.device), answer], 1),
        attention_mask=torch.cat([prompts.attention_mask.to(mask.device), mask], 1),
        response_mask=mask,
        ground_truth=prompts.ground_truth,
    )


def _rewards(answers: Tensor, answer_mask: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, T]: 1 at the last token of each response that equals its answer, else 0."""
    width = max(answers.shape[1], responses.shape[1])

    def wide(x: Tensor, present: Tensor) -> Tensor:
        return F.pad(x.where(present, -1), (0, width - x.shape[1]), value=-1)

    same = (wide(answers, answer_mask) == wide(responses, mask)).all(1) & mask.any(1)
    return advantages.token_rewards(same.double(), mask)


def _pointing(all_compared: list[Compared]) -> Metrics:
    """Metrics of how well the estimated advantages agree with the exact ones in direction."""
    real, found = (
        torch.cat([getattr(each, name)[each.rollout.response_mask].double() for each in all_compared])
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


def right_answers(prompts: Prompts, *, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The ground truths as responses, int64 [B, A], and their mask: each with the stop token, if there is room.

    A ground truth that is longer than responses can be has no response, and an empty row. Raises ValueError unless one
    token alone ends a response: else there are several right ones.
    """
    if len(sampling.stop_token_ids) != 1 or sampling.stop_texts is not None:
        text = "responses end in several ways, so that several are right"
        raise ValueError(f"eval.exact_values = True: {text}: {list(sampling.stop_token_ids)}, {sampling.stop_texts}")
    rows: list[list[int]] = []
    for truth, prompt, seen in zip(prompts.ground_truth, prompts.tokens, prompts.attention_mask, strict=True):
        before: Any = tokenizer.decode(prompt[seen].tolist(), clean_up_tokenization_spaces=False)
        ids = encode_after(tokenizer, str(truth).strip(), before)
        ids = [*ids, *sampling.stop_token_ids][: sampling.max_tokens] if len(ids) <= sampling.max_tokens else []
        rows.append(ids)
    width = max(1, *map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    return tokens.to(prompts.tokens.device), mask.to(prompts.tokens.device)
