"""Rollouts to scores. Torch is imported where it is used: worker processes import this package, and must start fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fppo.rewards.functions import Term
from fppo.rewards.runner import Runner, check_failures
from fppo.workers.sample import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from fppo.batch import Prompts, Rollout, Scored
    from fppo.metrics import Metrics

EXTRACTED = "extracted_answer"  # the key under which extras hold what a reward took as the answer


def score(rollout: Rollout, *, reward: Runner, tokenizer: Any) -> tuple[Scored, Metrics]:
    """The rollout with scores [B] float32, the weighted sum of the reward's terms, and with each term by name.

    `named_scores` holds every term, unweighted, and the further numbers that functions returned: by their own names if
    the reward is one function, else as "term/name". If functions name answers, `extras` hold them as
    "extracted_answer". The metrics count samples that failed as reward/errors and reward/timeouts; they score 0 and are
    logged. Raises ValueError for results that are no scores, and RunFailed, which is one too, for a function that fails
    on every row of a policy that has had no update (whose `versions` are 0): the fault is not the responses'.
    """
    import torch

    from fppo import batch, metrics

    device = rollout.tokens.device
    results = reward.run(samples_of(rollout, tokenizer), rollout.groups.tolist())
    if results.failures and not rollout.versions.any():
        check_failures(results.failures, len(rollout.tokens))
    scores = {name: torch.tensor(column, dtype=torch.float64) for name, column in results.scores.items()}
    noted: Metrics = {}
    for term in reward.terms:
        if term.kind == "tensor":
            scores[term.name], more = _tensor_scores(term, rollout)
            noted |= more
    scores = {term.name: scores[term.name].to(device) for term in reward.terms}
    total = sum((term.weight * scores[term.name] for term in reward.terms), torch.zeros(len(rollout.tokens)).to(device))
    clash = sorted(set(scores) & set(results.named))
    if clash:
        raise ValueError(f"the reward returns {clash} beside its score, which are names of functions too; rename them")
    further = {name: torch.tensor(column, dtype=torch.float64, device=device) for name, column in results.named.items()}
    named = {name: x.float() for name, x in (scores | further).items()}
    extras = rollout.extras
    if any(answer is not None for answer in results.answers):
        pairs = zip(extras, results.answers, strict=True)
        extras = batch.Column({**extra, EXTRACTED: answer} for extra, answer in pairs)
    scored = batch.extend(batch.Scored, rollout, scores=total.float(), named_scores=named, extras=extras)
    every = torch.ones_like(scored.scores, dtype=torch.bool)
    report: Metrics = {
        "critic/score/mean": metrics.masked_mean(scored.scores, every),
        "critic/score/max": metrics.masked_max(scored.scores, every),
        "critic/score/min": metrics.masked_min(scored.scores, every),
        **{f"reward/{name}": metrics.masked_mean(x, every) for name, x in named.items()},
        **noted,
    }
    for kind in ("error", "timeout"):
        failed = {failure.number for failure in results.failures if failure.kind == kind}
        report[f"reward/{kind}s"] = metrics.total(len(failed))
    return scored, report


def samples_of(rollout: Rollout, tokenizer: Any) -> list[Sample]:
    """The rows as a reward function sees them: texts without padding and special tokens, ids without padding."""
    width = rollout.response_mask.shape[1]
    tokens, attended = rollout.tokens.cpu(), rollout.attention_mask.cpu()
    start = tokens.shape[1] - width
    return [
        sample_of(
            tokens[row, :start][attended[row, :start]].tolist(),
            tokens[row, start:][attended[row, start:]].tolist(),
            rollout.finish[row],
            rollout,
            row,
            tokenizer,
        )
        for row in range(len(tokens))
    ]


def sample_of(
    prompt: Sequence[int], response: Sequence[int], finish: str, record: Prompts | Rollout, row: int, tokenizer: Any
) -> Sample:
    """A sample of these token ids, with what row `row` of the record holds to judge it by."""
    return Sample(
        prompt=_text(prompt, tokenizer),
        response=_text(response, tokenizer),
        ground_truth=record.ground_truth[row],
        source=record.source[row],
        extras=record.extras[row],
        prompt_tokens=tuple(prompt),
        response_tokens=tuple(response),
        finish=finish,
    )


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _tensor_scores(term: Term, rollout: Rollout) -> tuple[Tensor, Metrics]:
    """The scores of a function of the whole rollout, and its metrics if it returns any.

    Raises ValueError unless the scores are finite and of shape [B].
    """
    import torch

    result = term.fn(rollout)
    scores, more = result if isinstance(result, tuple) else (result, {})
    count = len(rollout.tokens)
    if not isinstance(scores, torch.Tensor) or scores.shape != (count,):
        shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise ValueError(f"the reward {term.name!r} returned {shape}, not a tensor of shape ({count},)")
    bad = (~scores.isfinite()).nonzero().flatten().tolist()
    if bad:
        value = scores[bad[0]].item()
        raise ValueError(
            f"the reward {term.name!r} returned {value} for sample {bad[0]} ({len(bad)} of {count} are so)"
        )
    return scores.detach().double().cpu(), more
