"""Score rollouts. Torch is imported inside functions: worker processes import this package, and must start fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fppo.rewards.functions import RewardTerm
from fppo.rewards.runner import Runner, check_failures
from fppo.workers.sample import Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fppo.batch import Prompts, Rollout, Scored
    from fppo.metrics import Metrics

EXTRACTED = "extracted_answer"  # the key of a reward's extracted answer in extras


def score(
    rollout: Rollout, *, reward: Runner, tokenizer: Any, failure_score: float | None = None
) -> tuple[Scored, Metrics]:
    """Score a rollout: scores [B] float32, the weighted sum of the reward's terms, and each term by name.

    `named_scores` holds every term, unweighted, and further numbers returned by functions: by their own names if the
    reward is one function, else as "term/name". Answers returned by functions go to `extras` as "extracted_answer", for
    each sample that of the last function that returns one. `outcomes` are the sums without the terms marked by
    `shaping_reward`, if there are any.

    An episode of several rows is scored as one response (`episodes.joined`), and each of its rows has that score.

    A row without a score of a term (exception, timeout, a judge's answer without a number) has nan in its column, and
    in its score unless the term's weight is 0; `failure_score` replaces these nan. The metrics count failed samples as
    reward/errors and reward/timeouts, and rows without a score as reward/unscored; other means leave them out. Raises
    ValueError for invalid results, and RunFailed, its subclass, for a function that fails on every row of a policy
    without updates (`versions` of 0), since the fault is then not the responses'.
    """
    import torch

    from fppo import batch, episodes, metrics

    rows, rollout = rollout, episodes.joined(rollout)
    device = rollout.tokens.device
    results = reward.run(samples_of(rollout, tokenizer), rollout.groups.tolist())
    if results.failures and not rollout.versions.any():
        check_failures(results.failures, len(rollout.tokens))
    scores, noted = _term_scores(reward.terms, results.scores, rollout, failure_score)
    count = len(rollout.tokens)
    total = _total(reward.terms, scores, count, device)
    known = [term for term in reward.terms if not term.shaping]
    outcomes = _total(known, scores, count, device).float() if 0 < len(known) < len(reward.terms) else None
    clash = sorted(set(scores) & set(results.named))
    if clash:
        raise ValueError(f"the reward returns numbers named {clash}, names of its functions too; rename them")
    further = {name: torch.tensor(column, dtype=torch.float64, device=device) for name, column in results.named.items()}
    named = {name: x.float() for name, x in (scores | further).items()}
    extras = rollout.extras
    if any(answer is not None for answer in results.answers):
        pairs = zip(extras, results.answers, strict=True)
        extras = batch.Column({**extra, EXTRACTED: answer} for extra, answer in pairs)
    columns = {"scores": total.float(), "named_scores": named, "outcomes": outcomes}
    scored = batch.extend(batch.Scored, rollout, **columns, extras=extras)
    report = means(scored) | noted
    for kind in ("error", "timeout"):
        failed = {failure.number for failure in results.failures if failure.kind == kind}
        report[f"reward/{kind}s"] = metrics.total(len(failed))
    return scored if rows.episodes is None else _of_rows(scored, rows), report


def _term_scores(
    terms: Sequence[RewardTerm],
    columns: Mapping[str, Sequence[float]],
    rollout: Rollout,
    failure_score: float | None,
) -> tuple[dict[str, Tensor], Metrics]:
    """The scores [B] float64 of each term, from the `columns` of functions of samples, or by functions of the whole
    rollout, and the metrics of the latter. `failure_score`, if it is given, replaces nan."""
    import torch

    scores = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    noted: Metrics = {}
    for term in terms:
        if term.kind == "tensor":
            scores[term.name], more = _tensor_scores(term, rollout)
            noted |= more
    scores = {term.name: scores[term.name].to(rollout.tokens.device) for term in terms}
    if failure_score is not None:
        scores = {name: x.nan_to_num(nan=failure_score) for name, x in scores.items()}
    return scores, noted


def _of_rows(scored: Scored, rows: Rollout) -> Scored:
    """Give each row of an episode the episode's scores."""
    from fppo import batch, episodes

    of_row = episodes.layout_of(rows).episode_of
    return batch.extend(
        batch.Scored,
        rows,
        scores=scored.scores[of_row],
        named_scores={name: x[of_row] for name, x in scored.named_scores.items()},
        outcomes=None if scored.outcomes is None else scored.outcomes[of_row],
        extras=batch.Column(scored.extras[episode] for episode in of_row.tolist()),
    )


def means(scored: Scored) -> Metrics:
    """The means of the scores over rows with a score, and the number of rows without."""
    from fppo import metrics

    present = scored.has_score
    return {
        "critic/score/mean": metrics.masked_mean(scored.scores, present),
        "critic/score/max": metrics.masked_max(scored.scores, present),
        "critic/score/min": metrics.masked_min(scored.scores, present),
        **{f"reward/{name}": metrics.masked_mean(x, ~x.isnan()) for name, x in scored.named_scores.items()},
        "reward/unscored": metrics.total((~present).sum()),
    }


def _total(terms: Sequence[RewardTerm], scores: Mapping[str, Tensor], count: int, device: torch.device) -> Tensor:
    """The weighted sum [B] float64 of the terms' scores for `count` rows, 0 if there are no terms. A term of weight 0
    adds nothing, not even nan."""
    import torch

    added = (term.weight * scores[term.name] for term in terms if term.weight)
    return sum(added, torch.zeros(count, dtype=torch.float64, device=device))


def samples_of(rollout: Rollout, tokenizer: Any) -> list[Sample]:
    """The rows as samples for reward functions: texts without padding and special tokens, ids without padding."""
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
    """A sample of these token ids, with the ground truth, source and extras of row `row` of the record."""
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


def _tensor_scores(term: RewardTerm, rollout: Rollout) -> tuple[Tensor, Metrics]:
    """The scores of a function of the whole rollout, nan for rows without one, and its metrics if any.

    Raises ValueError unless the scores are finite and of shape [B].
    """
    import torch

    result = term.fn(rollout)
    scores, *others = result if isinstance(result, tuple) else (result,)
    more: Metrics = others[0] if others else {}
    known = others[1] if len(others) > 1 else None
    count = len(rollout.tokens)
    if not isinstance(scores, torch.Tensor) or scores.shape != (count,):
        shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise ValueError(f"the reward {term.name!r} returned {shape}, not a tensor of shape ({count},)")
    known = torch.ones_like(scores, dtype=torch.bool) if known is None else known.to(scores.device)
    bad = (known & ~scores.isfinite()).nonzero().flatten().tolist()
    if bad:
        value = scores[bad[0]].item()
        raise ValueError(
            f"the reward {term.name!r} returned {value} for sample {bad[0]} ({len(bad)} of {count} samples)"
        )
    return scores.detach().double().where(known, torch.nan).cpu(), more
