"""Score rollouts. Torch is imported inside functions: worker processes import this package, and must start fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fppo._errors import shown
from fppo.rewards.functions import RewardTerm
from fppo.rewards.runner import RewardResults, Runner, check_failures
from fppo.rewards.steps import process_rewards, rewards_of_tokens
from fppo.workers.sample import Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fppo.batch import Column, Prompts, Rollout, Scored
    from fppo.metrics import Metrics

EXTRACTED = "extracted_answer"  # the key of a reward's extracted answer in extras
SAID = "reward_feedback"  # the key of what rewards said about a response in extras, texts by the reward's name


def score(
    rollout: Rollout, *, reward: Runner, tokenizer: Any, failure_score: float | None = None
) -> tuple[Scored, Metrics]:
    """Score a rollout: scores [B] float32, the weighted sum of the reward's terms, and each term by name.

    `named_scores` holds every term, unweighted, and further numbers returned by functions: by their own names if the
    reward is one function, else as "term/name". Answers returned by functions go to `extras` as "extracted_answer", for
    each sample that of the last function that returns one; what functions say ("feedback", and a judge's answers) goes
    there by their names as "reward_feedback". `outcomes` are the sums without the terms marked by `shaping_reward`, if
    there are any.

    If a function rewards steps, `process_rewards` hold the weighted sum token by token (`steps.process_rewards`); the
    score of a term is the sum of its steps.

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
    samples = samples_of(rollout, tokenizer)
    results = reward.run(samples, rollout.groups.tolist())
    if results.failures and not rollout.versions.any():
        check_failures(results.failures, len(rollout.tokens))
    steps = {name: rewards_of_tokens(name, own, samples, rollout, tokenizer) for name, own in results.steps.items()}
    scores, more, noted, words = _term_scores(reward.terms, results.scores, rollout, failure_score)
    steps |= more
    count = len(rollout.tokens)
    total = _total(reward.terms, scores, count, device)
    known = [term for term in reward.terms if not term.shaping]
    outcomes = _total(known, scores, count, device).float() if 0 < len(known) < len(reward.terms) else None
    clash = sorted(set(scores) & set(results.named))
    if clash:
        raise ValueError(f"the reward returns numbers named {clash}, names of its functions too; rename them")
    further = {name: torch.tensor(column, dtype=torch.float64, device=device) for name, column in results.named.items()}
    named = {name: x.float() for name, x in (scores | further).items()}
    extras = _with_texts(rollout.extras, results, words)
    columns = {"scores": total.float(), "named_scores": named, "outcomes": outcomes}
    if any(term.weight and term.name in steps for term in reward.terms):
        columns["process_rewards"] = process_rewards(reward.terms, scores, steps, rollout)
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
) -> tuple[dict[str, Tensor], dict[str, Tensor], Metrics, dict[str, Sequence[str | None]]]:
    """The scores [B] float64 of each term, from the `columns` of functions of samples, or by functions of the whole
    rollout; and the latter's rewards of steps [B, T], metrics, and texts about the rows. `failure_score`, if it is
    given, replaces nan."""
    import torch

    scores = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    steps: dict[str, Tensor] = {}
    noted: Metrics = {}
    words: dict[str, Sequence[str | None]] = {}
    for term in terms:
        if term.kind == "tensor":
            scores[term.name], given, more, said = _tensor_scores(term, rollout)
            steps |= {} if given is None else {term.name: given}
            words |= {} if said is None else {term.name: said}
            noted |= more
    scores = {term.name: scores[term.name].to(rollout.tokens.device) for term in terms}
    if failure_score is not None:
        scores = {name: x.nan_to_num(nan=failure_score) for name, x in scores.items()}
    return scores, steps, noted, words


def _with_texts(extras: Column, results: RewardResults, words: Mapping[str, Sequence[str | None]]) -> Column:
    """The extras with extracted answers, and with what rewards said: functions of samples, and `words` of others."""
    from fppo import batch

    if any(answer is not None for answer in results.answers):
        extras = batch.Column(
            {**extra, EXTRACTED: answer} for extra, answer in zip(extras, results.answers, strict=True)
        )
    said = [
        own | {name: texts[row] for name, texts in words.items() if texts[row] is not None}
        for row, own in enumerate(results.feedback)
    ]
    pairs = zip(extras, said, strict=True)
    return batch.Column({**extra, SAID: each} for extra, each in pairs) if any(said) else extras


def _of_rows(scored: Scored, rows: Rollout) -> Scored:
    """Give each row of an episode the episode's scores."""
    from fppo import batch, episodes

    layout, steps = episodes.layout_of(rows), scored.process_rewards
    of_row = layout.episode_of
    if steps is not None:
        steps = layout.of_rows(steps).masked_fill(~layout.present, float("nan"))
    return batch.extend(
        batch.Scored,
        rows,
        scores=scored.scores[of_row],
        named_scores={name: x[of_row] for name, x in scored.named_scores.items()},
        outcomes=None if scored.outcomes is None else scored.outcomes[of_row],
        process_rewards=steps,
        extras=batch.Column(scored.extras[episode] for episode in of_row.tolist()),
    )


def means(scored: Scored) -> Metrics:
    """The means of the scores over rows with a score, and of their number of steps; and the number of rows without."""
    from fppo import metrics

    present = scored.has_score
    steps = scored.process_rewards
    number = {} if steps is None else {"rollout/steps/mean": metrics.masked_mean((~steps.isnan()).sum(1), present)}
    return {
        "critic/score/mean": metrics.masked_mean(scored.scores, present),
        "critic/score/max": metrics.masked_max(scored.scores, present),
        "critic/score/min": metrics.masked_min(scored.scores, present),
        **{f"reward/{name}": metrics.masked_mean(x, ~x.isnan()) for name, x in scored.named_scores.items()},
        "reward/unscored": metrics.total((~present).sum()),
        **number,
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


def _tensor_scores(
    term: RewardTerm, rollout: Rollout
) -> tuple[Tensor, Tensor | None, Metrics, Sequence[str | None] | None]:
    """The scores of a function of the whole rollout, nan for rows without one; its rewards of steps [B, T], if it gives
    these; its metrics if any; and what it says about each row, if it does.

    Raises ValueError unless the result is finite and of shape [B], or of shape [B, T] and nan where no step ends, and
    what it says a text or None for each row.
    """
    import torch

    result = term.fn(rollout)
    scores, *others = result if isinstance(result, tuple) else (result,)
    more: Metrics = others[0] if others else {}
    known, said = (*others[1:], None, None)[:2]
    count, shape = len(rollout.tokens), tuple(rollout.response_mask.shape)
    if not isinstance(scores, torch.Tensor) or scores.shape not in ((count,), shape):
        given = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise ValueError(f"the reward {term.name!r} returned {given}, not a tensor of shape ({count},) or {shape}")
    scores = scores.detach().double().cpu()
    known = torch.ones(count, dtype=torch.bool) if known is None else known.cpu()
    steps = None
    if scores.ndim == 2:
        ends = ~scores.isnan() & rollout.attention_mask[:, -shape[1] :].cpu().bool() & known[:, None]
        steps = scores.where(ends, torch.nan)
        scores = scores.where(ends, 0.0).sum(1)
    bad = (known & ~scores.isfinite()).nonzero().flatten().tolist()
    if bad:
        value = scores[bad[0]].item()
        raise ValueError(
            f"the reward {term.name!r} returned {value} for sample {bad[0]} ({len(bad)} of {count} samples)"
        )
    if said is not None and (len(said) != count or not all(text is None or isinstance(text, str) for text in said)):
        raise ValueError(f"the reward {term.name!r} said {shown(said)}, not a text or None for each of {count} samples")
    return scores.where(known, torch.nan), steps, more, said
