"""Other ways to make a step's batch than a single draw: refilled groups, and saved rollouts; and the rows that losses
leave out."""

from __future__ import annotations

from pathlib import Path

import attrs
import torch
from torch import Tensor

from fppo import advantages, metrics
from fppo import batch as batches
from fppo.batch import Annotated, Scored
from fppo.data.cursor import DataCursor, at_step
from fppo.metrics import Metrics
from fppo.pipeline.program import (
    Draw,
    LearnOfPrompts,
    RolloutStage,
    RunState,
    SampleStage,
    ScoreStage,
    learn_nothing,
    roll_out,
)
from fppo.pipeline.timing import timed
from fppo.rollout import saved
from fppo.rollout.records import widened
from fppo.tree import replace

SCORE = "score"


@attrs.frozen(kw_only=True)
class SampleGroups:
    """Sample as many prompts as one draw has, without those whose responses all have the same score (DAPO,
    arXiv:2503.14476, 3.2).

    Such groups (`equal_groups`) have nothing to compare: they are dropped, and prompts are drawn again, up to
    `max_draws` times in all. If groups are still missing, dropped ones fill the batch, and `equal_groups` leaves them
    out of the loss. Groups are in the order of their draws; surplus ones are dropped, the last first. `by` names the
    score that is compared, a part of the reward or "score". `learn` gets all rows of every draw, dropped ones included:
    see `SampleBatch`.
    """

    pad_token_id: int
    max_draws: int = 10
    by: str = SCORE
    learn: LearnOfPrompts = learn_nothing

    def __call__(
        self, run: RunState, *, draw: Draw, rollout: RolloutStage, score: ScoreStage
    ) -> tuple[Scored, DataCursor, Metrics]:
        key, cursor = run.key.fold("step", run.step), run.cursor
        kept: list[Scored] = []
        spare: list[Scored] = []
        reports: list[Metrics] = []
        wanted, drawn, good, rows = 0, 0, 0, 0
        for number in range(self.max_draws):
            prompts, cursor = draw(at_step(cursor, run.step))
            count = len(prompts.tokens)
            wanted = wanted or count
            place = key.fold("rollout") if number == 0 else key.fold("refill", number)
            prompts = replace(prompts, row_ids=prompts.row_ids + number * wanted)  # unique over the draws
            scored, report = roll_out(
                prompts, run.actor.params, key=place, version=run.actor.step, rollout=rollout, score=score
            )
            if scored.episodes is not None:  # rows of episodes are numbered from 0 in each draw
                scored = replace(scored, row_ids=scored.row_ids + rows)
                rows += len(scored.row_ids)
            cursor, learned = self.learn(cursor, scored)
            reports.append(metrics.merge(report, learned))
            equal = equal_groups(scored, by=self.by)
            kept.append(batches.rows(scored, ~equal))
            spare.append(batches.rows(scored, equal))
            drawn, good = drawn + count, good + len(set(scored.groups[~equal].tolist()))
            if good >= wanted:
                break
        every = concat([*kept, *spare], self.pad_token_id)
        groups = every.groups.tolist()
        first = {*[*dict.fromkeys(groups)][:wanted]}
        chosen = batches.rows(every, [row for row, group in enumerate(groups) if group in first])
        counts = {
            "rollout/groups/kept": metrics.mean(float(good), float(drawn)),
            "rollout/groups/draws": metrics.total(len(reports)),
            "rollout/groups/filled": metrics.mean(float(max(wanted - good, 0)), float(wanted)),
        }
        return chosen, cursor, metrics.merge(*reports) | counts


@attrs.frozen(kw_only=True)
class SampleSaved:
    """Read the rollout of a step from `directory` to the device, and score it. No prompts are drawn, and the cursor
    stays. Raises ValueError for tokens outside a `vocabulary` of this size."""

    directory: Path
    vocabulary: int
    device: torch.device

    def __call__(
        self, run: RunState, *, draw: Draw, rollout: RolloutStage, score: ScoreStage
    ) -> tuple[Scored, DataCursor, Metrics]:
        del draw, rollout
        responses = saved.read(self.directory, run.step + 1, self.device, vocabulary=self.vocabulary)
        scored, report = timed("reward", score)(responses, params=run.actor.params, prompts=None)
        return scored, run.cursor, report


@attrs.frozen(kw_only=True)
class Saving:
    """Sample by another stage, and also write every rollout to `directory`."""

    stage: SampleStage
    directory: Path

    def __call__(
        self, run: RunState, *, draw: Draw, rollout: RolloutStage, score: ScoreStage
    ) -> tuple[Scored, DataCursor, Metrics]:
        scored, cursor, report = self.stage(run, draw=draw, rollout=rollout, score=score)
        saved.write(scored, self.directory, run.step + 1)
        return scored, cursor, report


def equal_groups(rows: Scored | Annotated, *, by: str = SCORE) -> Tensor:
    """bool [B]: True where all responses to a row's prompt have the same outcome, or the same part `by` of the score.

    The outcome is the score without the terms that shape it (`rewards.shaping_reward`), such as a penalty for length:
    wrong answers of different lengths are equal. So are numbers that differ by rounding, and responses without a score
    are not compared. Raises ValueError for a part that the reward does not have.
    """
    if by != SCORE and by not in rows.named_scores:
        names = [SCORE, *rows.named_scores]
        raise ValueError(f"rollout.filter.by: the reward has no part {by!r} to compare groups by; there are {names}")
    scores = rows.outcome if by == SCORE else rows.named_scores[by]
    return advantages.equal_scores(scores, ~scores.isnan(), rows.groups)


def truncated(rows: Scored | Annotated) -> Tensor:
    """bool [B]: True where the length limit cut the response (overlong filtering of DAPO)."""
    return torch.tensor([reason == "length" for reason in rows.finish], device=rows.tokens.device)


def concat(records: list[Scored], pad_token_id: int) -> Scored:
    """Concatenate records, padded to the widest of their prompts and of their responses.

    Each gets the named scores of all: see `batch.same_scores`.
    """
    prompt = max(record.tokens.shape[1] - record.response_mask.shape[1] for record in records)
    response = max(record.response_mask.shape[1] for record in records)
    return batches.concat([widened(r, prompt, response, pad_token_id) for r in batches.same_scores(records)])
