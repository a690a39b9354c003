"""Recorded rows as rollouts: what training and files of samples take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fppo import batch as batches
from fppo.batch import Column, Prompts, Rollout
from fppo.rollout.engine import Ask
from fppo.rollout.records import number_rows, rollout_of_columns
from fppo.rollout.requests import FinishedRequest
from fppo.rollout.turns.engine import FAILURES, INFO
from fppo.rollout.turns.episode import PlayedRow, RowTurn
from fppo.rollout.turns.record import padded_prompts, response_columns
from fppo.serve.agents import PlayedEpisode
from fppo.serve.episodes import EpisodeRow, RecordedTurn
from fppo.tree import replace


def rollout_of_rows(
    rows: Sequence[EpisodeRow],
    *,
    pad_token_id: int,
    row_ids: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    rewards: Sequence[float] | None = None,
    episodes: Sequence[int] | None = None,
) -> Rollout:
    """The rollout of B recorded rows. Their answers are in the response mask; what was said between is context.

    `row_ids` and `groups` number rows and prompts (None: from 0 on, each a group of its own); `columns` are `ids`,
    `ground_truth`, `source` and `extras`, where they are known. `rewards` stand at the rows' last tokens. With
    `episodes`, the numbers of the rows' episodes, turn numbers continue from row to row of an episode. Raises
    ValueError for no rows.
    """
    if not rows:
        raise ValueError("no rows were recorded: nobody got an answer")
    count, beside = len(rows), columns or {}
    numbers = torch.tensor(range(count) if row_ids is None else row_ids, dtype=torch.int64)
    tokens, attended = padded_prompts([row.prompt for row in rows], pad_token_id, torch.device("cpu"))
    prompts = Prompts(
        tokens=tokens,
        attention_mask=attended,
        row_ids=numbers if groups is None else torch.tensor(groups, dtype=torch.int64),
        ids=Column(beside.get("ids", numbers.tolist())),
        ground_truth=Column(beside.get("ground_truth", [None] * count)),
        source=Column(beside.get("source", ["serve"] * count)),
        extras=Column(beside.get("extras", [{}] * count)),
    )
    played = _played(rows, range(count) if episodes is None else episodes, rewards or [0.0] * count)
    wide = any(turn.answer.log_probs.dtype == torch.float64 for row in rows for turn in row.turns)
    width = max(row.size for row in played)
    rollout = rollout_of_columns(
        prompts,
        response_columns(played, width, torch.float64 if wide else torch.float32),
        pad_token_id=pad_token_id,
        row_ids=numbers,
        versions=torch.stack([row.turns[0].answer.versions[0].long() for row in rows]),
        finish=["stop" if row.turns[-1].answer.end == "stop" else "length" for row in rows],
    )
    return replace(
        rollout,
        turn_rewards=None if rewards is None else rollout.turn_rewards,
        episodes=None if episodes is None else torch.tensor(episodes, dtype=torch.int64),
    )


def _played(rows: Sequence[EpisodeRow], episodes: Sequence[int], rewards: Sequence[float]) -> list[PlayedRow]:
    """The rows with their turns numbered by episode, and the rewards at their last turns."""
    before, played = Counter[int](), list[PlayedRow]()
    for row, episode, reward in zip(rows, episodes, rewards, strict=True):
        first, *later = row.turns
        pairs = [((), first.answer), *((turn.before, turn.answer) for turn in later)]
        turns = [RowTurn(observed, answer, before[episode] + n) for n, (observed, answer) in enumerate(pairs)]
        turns[-1].reward = reward
        played.append(PlayedRow(row.prompt, turns))
        before[episode] += len(turns)
    return played


def rollout_of_played(
    ask: Ask,
    episodes: Sequence[Sequence[EpisodeRow]],
    played: Sequence[PlayedEpisode],
    *,
    pad_token_id: int,
    every: bool,
) -> Rollout:
    """The rollout of an agent's recorded episodes, one for each response to `ask`, with their scores in `played`.

    Of each episode it has the row with the most tokens of the policy's or, with `every`, all rows (`Rollout.episodes`).
    The score is at the last token of the last one. An episode without rows has a prompt, a padding token and no score.
    """
    chosen: list[tuple[int, EpisodeRow]] = []
    for place, rows in enumerate(episodes):
        kept = rows if every else sorted(rows, key=_own_tokens, reverse=True)[:1]
        chosen += [(place, row) for row in kept or [_lost(ask, place, pad_token_id)]]
    places = [place for place, _ in chosen]
    numbers = number_rows(ask, torch.device("cpu"))[places].tolist()
    prompts = batches.rows(ask.prompts, [place // ask.sampling.n for place in places])
    infos = [{**played[place].numbers, "rows": float(len(episodes[place]))} for place in places]
    failures = [{FAILURES: 1} if played[place].failed else {} for place in places]
    extras = [{**x, INFO: info, **failed} for x, info, failed in zip(prompts.extras, infos, failures, strict=True)]
    lasts = [place != later for place, later in zip(places, [*places[1:], None], strict=True)]
    scores = [played[place].score if episodes[place] else math.nan for place in places]
    return rollout_of_rows(
        [row for _, row in chosen],
        pad_token_id=pad_token_id,
        row_ids=range(len(places)) if every else numbers,
        groups=prompts.row_ids.tolist(),
        columns={
            "ids": prompts.ids,
            "ground_truth": prompts.ground_truth,
            "source": prompts.source,
            "extras": extras,
        },
        rewards=[score if last else 0.0 for score, last in zip(scores, lasts, strict=True)],
        episodes=numbers if every else None,
    )


def _own_tokens(row: EpisodeRow) -> int:
    return sum(len(turn.answer.tokens) for turn in row.turns)


def _lost(ask: Ask, place: int, pad_token_id: int) -> EpisodeRow:
    """The row of an episode in which the policy answered nothing: the prompt and one padding token."""
    row = place // ask.sampling.n
    prompt = ask.prompts.tokens[row][ask.prompts.attention_mask[row].bool()].tolist()
    nothing = torch.zeros(1)
    answer = FinishedRequest(
        name="",
        tokens=torch.tensor([pad_token_id]),
        log_probs=nothing,
        sampling_log_probs=nothing,
        versions=torch.tensor([ask.version], dtype=torch.int32),
        end="length",
        fed=0,
    )
    return EpisodeRow(0, (RecordedTurn(tuple(prompt), answer, ""),))
