"""Rollouts to scores. Torch is imported where it is used: worker processes import this package, and must start fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fppo.rewards.functions import Part
from fppo.rewards.runner import Judge
from fppo.workers.sample import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from fppo.batch import Prompts, Rollout, Scored
    from fppo.metrics import Metrics

EXTRACTED = "extracted_answer"  # the key under which extras hold what a reward took as the answer


def score(rollout: Rollout, *, reward: Judge, tokenizer: Any) -> tuple[Scored, Metrics]:
    """The rollout with scores [B] float32, the weighted sum of the reward's parts, and with each part by name.

    `named_scores` holds every part, unweighted, and the further numbers that functions returned: by their own names if
    the reward is one function, else as "part/name". If functions name answers, `extras` hold them as
    "extracted_answer". The metrics count samples that failed as reward/errors and reward/timeouts; they score 0 and are
    logged. Raises ValueError for results that are no scores.
    """
    import torch

    from fppo import batch, metrics

    device = rollout.tokens.device
    judged = reward.judge(samples_of(rollout, tokenizer), rollout.groups.tolist())
    parts = {name: torch.tensor(column, dtype=torch.float64) for name, column in judged.scores.items()}
    noted: Metrics = {}
    for part in reward.parts:
        if part.kind == "tensor":
            parts[part.name], more = _tensor_scores(part, rollout)
            noted |= more
    parts = {part.name: parts[part.name].to(device) for part in reward.parts}
    total = sum((part.weight * parts[part.name] for part in reward.parts), torch.zeros(len(rollout.tokens)).to(device))
    clash = sorted(set(parts) & set(judged.named))
    if clash:
        raise ValueError(f"the reward returns {clash} beside its score, which are names of functions too; rename them")
    further = {name: torch.tensor(column, dtype=torch.float64, device=device) for name, column in judged.named.items()}
    named = {name: x.float() for name, x in (parts | further).items()}
    extras = rollout.extras
    if any(answer is not None for answer in judged.answers):
        pairs = zip(extras, judged.answers, strict=True)
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
        failed = {failure.number for failure in judged.failures if failure.kind == kind}
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


def _tensor_scores(part: Part, rollout: Rollout) -> tuple[Tensor, Metrics]:
    """The scores of a function of the whole rollout, and its metrics if it gives any.

    Raises ValueError unless the scores are finite and of shape [B].
    """
    import torch

    found = part.fn(rollout)
    found, more = found if isinstance(found, tuple) else (found, {})
    count = len(rollout.tokens)
    if not isinstance(found, torch.Tensor) or found.shape != (count,):
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ValueError(f"the reward {part.name!r} returned {shape}, not a tensor of shape ({count},)")
    bad = (~found.isfinite()).nonzero().flatten().tolist()
    if bad:
        value = found[bad[0]].item()
        raise ValueError(
            f"the reward {part.name!r} returned {value} for sample {bad[0]} ({len(bad)} of {count} are so)"
        )
    return found.detach().double().cpu(), more
