"""A teacher's prompts made after scoring, from all responses to a prompt, their scores, and what rewards said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from fppo import metrics
from fppo.batch import Column, Scored
from fppo.data.examples import MESSAGES
from fppo.data.messages import Message
from fppo.data.privileged import TEACHER_PROMPT
from fppo.metrics import Metrics
from fppo.rewards.scoring import SAID, samples_of
from fppo.tree import replace
from fppo.workers.sample import Sample


@attrs.frozen(kw_only=True)
class ScoredResponse:
    """A response to a prompt, its score and the terms of that by name (nan is a missing score), and the texts that
    rewards said about it, by their names."""

    response: str
    score: float
    named: Mapping[str, float]
    feedback: Mapping[str, str]
    finish: str  # "stop" or "length"


@attrs.frozen(kw_only=True)
class ScoredGroup:
    """A row's prompt with all responses to it, in the order that they were sampled. `messages` are those of a chat, and
    `extras` the row's other fields."""

    prompt: str
    messages: Sequence[Message]
    ground_truth: Any
    source: str
    extras: Mapping[str, Any]
    each: tuple[ScoredResponse, ...]


TeacherPrompt = str | Sequence[Message]
PromptFn = Callable[
    [ScoredGroup, int], TeacherPrompt | None
]  # None: nothing to teach about the response of that number
Prompt = Callable[[Scored], tuple[Scored, Metrics]]


@attrs.frozen(kw_only=True)
class PromptByFeedback:
    """Give scored rows the prompts that a teacher is to read before the same responses, in their extras.

    `fn(group, number)` returns the prompt for a response of a group as text or messages, or None if there is nothing
    to teach about it; it must return the same in each process. `encode` makes tokens of a prompt. A prompt of more than
    `limit` tokens counts as None. Rows without a prompt are False in the column `taught`, and the teacher reads their
    own prompt. teacher/taught is the fraction of rows with a prompt, teacher/over_long the number of prompts over the
    limit. Neither tokens nor masks of the rows change. Raises ValueError for a function that raises or returns anything
    else, and for episodes of several rows.
    """

    fn: PromptFn
    encode: Callable[[TeacherPrompt], Sequence[int]]
    tokenizer: Any
    limit: int

    def __call__(self, scored: Scored) -> tuple[Scored, Metrics]:
        """Return the rows with prompts of a teacher, and metrics."""
        if scored.episodes is not None:
            raise ValueError(
                "data.teacher_prompt: episodes of several rows have no one prompt to replace; leave it out"
            )
        samples, members = samples_of(scored, self.tokenizer), dict[int, list[int]]()
        for row, group in enumerate(scored.groups.tolist()):
            members.setdefault(group, []).append(row)
        prompts: list[Sequence[int] | None] = [None] * len(samples)
        for rows in members.values():
            group = _group_of(scored, samples, rows)
            for number, row in enumerate(rows):
                prompts[row] = self._prompt(group, number)
        fits = [ids is not None and 0 < len(ids) <= self.limit for ids in prompts]
        own = [ids if ok else x.prompt_tokens for ids, ok, x in zip(prompts, fits, samples, strict=True)]
        extras = ({**extra, TEACHER_PROMPT: [*(ids or ())]} for extra, ids in zip(scored.extras, own, strict=True))
        taught = torch.tensor(fits, device=scored.tokens.device)
        long = sum(ids is not None and len(ids) > self.limit for ids in prompts)
        report: Metrics = {"teacher/taught": metrics.masked_mean(taught, torch.ones_like(taught))}
        report = {**report, "teacher/over_long": metrics.total(long)}
        return replace(scored, extras=Column(extras), taught=taught), report

    def _prompt(self, group: ScoredGroup, number: int) -> Sequence[int] | None:
        try:
            prompt = self.fn(group, number)
            return None if prompt is None else self.encode(prompt)
        except Exception as error:  # the function is the user's, and templates raise any exception
            asked = f"for response {number} to {group.prompt[:100]!r}"
            raise ValueError(
                f"data.teacher_prompt: {type(error).__name__} {asked}: {error}; return text, messages or None"
            ) from error


def _group_of(scored: Scored, samples: Sequence[Sample], rows: Sequence[int]) -> ScoredGroup:
    first = samples[rows[0]]
    return ScoredGroup(
        prompt=first.prompt,
        messages=first.extras.get(MESSAGES) or (),
        ground_truth=first.ground_truth,
        source=first.source,
        extras={name: x for name, x in first.extras.items() if name != SAID},
        each=tuple(
            ScoredResponse(
                response=samples[row].response,
                score=float(scored.scores[row]),
                named={name: float(x[row]) for name, x in scored.named_scores.items()},
                feedback=samples[row].extras.get(SAID, {}),
                finish=samples[row].finish,
            )
            for row in rows
        ),
    )


def untaught(rows: Scored) -> torch.Tensor:
    """The rows that a teacher had nothing to say about, bool [B]."""
    return torch.zeros_like(rows.scores, dtype=torch.bool) if rows.taught is None else ~rows.taught
