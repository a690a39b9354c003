"""Recorded rows as rollouts: what training and files of samples take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fppo.batch import Column, Rollout
from fppo.serve.episodes import EpisodeRow


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
    responses = _responses(rows, range(len(rows)) if episodes is None else episodes)
    prompt = max(len(row.prompt) for row in rows)
    length = max(len(response["tokens"]) for response in responses)
    count = len(rows)
    tokens = torch.full((count, prompt + length), pad_token_id, dtype=torch.int64)
    attended = torch.zeros(count, prompt + length, dtype=torch.bool)
    wide = torch.float64 if any(x["log_probs"].dtype == torch.float64 for x in responses) else torch.float32
    kinds = {"log_probs": wide, "sampling_log_probs": wide, "versions": torch.int32, "turns": torch.int32}
    columns_of = {name: torch.zeros(count, length, dtype=kind) for name, kind in kinds.items()}
    columns_of["turns"].fill_(-1)
    for place, (row, response) in enumerate(zip(rows, responses, strict=True)):
        own = len(response["tokens"])
        tokens[place, prompt - len(row.prompt) : prompt] = torch.tensor(row.prompt)
        tokens[place, prompt : prompt + own] = response["tokens"]
        attended[place, prompt - len(row.prompt) : prompt + own] = True
        for name, column in columns_of.items():
            column[place, :own] = response[name].to(column)
    mask, ends = columns_of["turns"] >= 0, [len(response["tokens"]) - 1 for response in responses]
    numbers = torch.tensor(range(count) if row_ids is None else row_ids, dtype=torch.int64)
    beside = columns or {}
    return Rollout(
        tokens=tokens,
        attention_mask=attended,
        row_ids=numbers,
        ids=Column(beside.get("ids", numbers.tolist())),
        ground_truth=Column(beside.get("ground_truth", [None] * count)),
        source=Column(beside.get("source", ["serve"] * count)),
        extras=Column(beside.get("extras", [{}] * count)),
        response_mask=mask,
        rollout_log_probs=columns_of["log_probs"],
        sampling_log_probs=columns_of["sampling_log_probs"],
        groups=numbers if groups is None else torch.tensor(groups, dtype=torch.int64),
        versions=torch.stack([row.turns[0].answer.versions[0].long() for row in rows]),
        finish=Column("stop" if row.turns[-1].answer.end == "stop" else "length" for row in rows),
        token_versions=columns_of["versions"],
        turn_ids=columns_of["turns"],
        turn_rewards=None if rewards is None else _at_ends(rewards, ends, length),
        episodes=None if episodes is None else torch.tensor(episodes, dtype=torch.int64),
    )


def _responses(rows: Sequence[EpisodeRow], episodes: Sequence[int]) -> list[dict[str, Tensor]]:
    """The columns of all rows' responses, whose turns are numbered by episode."""
    before, responses = Counter[int](), list[dict[str, Tensor]]()
    for row, episode in zip(rows, episodes, strict=True):
        responses.append(_response(row, before[episode]))
        before[episode] += len(row.turns)
    return responses


def _response(row: EpisodeRow, before: int) -> dict[str, Tensor]:
    """The columns of a row's response: its answers, numbered from `before` on, and the observations between them."""
    parts: dict[str, list[Tensor]] = {}
    for number, turn in enumerate(row.turns):
        answer, count = turn.answer, len(turn.answer.tokens)
        observed = turn.before if number else ()
        nothing = answer.log_probs.new_zeros(len(observed))
        own = {
            "tokens": [torch.tensor(observed, dtype=torch.int64), answer.tokens],
            "log_probs": [nothing, answer.log_probs],
            "sampling_log_probs": [nothing, answer.sampling_log_probs],
            "versions": [nothing.int(), answer.versions],
            "turns": [torch.full((len(observed),), -1), torch.full((count,), before + number)],
        }
        for name, each in own.items():
            parts.setdefault(name, []).extend(each)
    return {name: torch.cat(each) for name, each in parts.items()}


def _at_ends(rewards: Sequence[float], ends: Sequence[int], length: int) -> Tensor:
    whole = torch.zeros(len(ends), length)
    whole[torch.arange(len(ends)), torch.tensor(ends)] = torch.tensor(rewards, dtype=torch.float32)
    return whole
