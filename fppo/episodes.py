"""Episodes of several rows, joined to be judged as a whole.

An episode is usually one row. If it has several (`Rollout.episodes`), each has its own prompt, and `Rollout.observed`
holds the tokens that were observed between the responses of consecutive rows.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import attrs
import torch
from torch import Tensor

from fppo import batch as batches
from fppo.batch import Column, Rollout
from fppo.tree import replace

R = TypeVar("R", bound=Rollout)
_WHOLE = ("tokens", "attention_mask", "routed")  # columns of [B, S], with prompts
_AT_PADDING = {"turn_ids": -1, "process_rewards": torch.nan}  # 0 in other columns


class EpisodeLayout(NamedTuple):
    """The positions of rows' tokens in E episodes, whose responses have W positions."""

    episode_of: Tensor  # [B] int64: the index of each row's episode; episodes are ordered by their first rows
    first: list[int]  # the first row of each episode
    last: list[int]
    starts: list[int]  # where each row begins in its episode's response
    present: Tensor  # [B, T] bool: the response tokens of rows
    columns: Tensor  # [B, T] int64: the position of each response token in the episode's response
    width: int  # W

    def of_rows(self, x: Tensor) -> Tensor:
        """Turn values per episode token [E, W] into values per row token [B, T]; 0 at padding."""
        return x[self.episode_of[:, None], self.columns].masked_fill(~self.present, 0)

    def of_episodes(self, x: Tensor, fill: float = 0) -> Tensor:
        """Turn values per row token [B, T, ...] into values per episode token [E, W, ...]; `fill` elsewhere."""
        whole = x.new_full((len(self.first), self.width, *x.shape[2:]), fill)
        rows = self.present.nonzero()[:, 0]
        return whole.index_put((self.episode_of[rows], self.columns[self.present]), x[self.present])


def layout_of(record: Rollout) -> EpisodeLayout:
    """The positions of a record's rows in their episodes. An episode's rows are in order; rows of others may lie
    between them. Raises ValueError for a record without episodes."""
    if record.episodes is None:
        raise ValueError("the rows have no episodes: each is one")
    present = record.attention_mask[:, -record.response_mask.shape[1] :].bool()
    counts, observed = present.sum(1).tolist(), record.observed or [()] * len(present)
    _, rows = episode_rows(record.episodes)
    starts, of_rows, width = [0] * len(counts), [0] * len(counts), 1
    for episode, own in enumerate(rows):
        end = 0
        for row in own:
            starts[row] = end + (len(observed[row]) if row != own[0] else 0)
            of_rows[row], end = episode, starts[row] + counts[row]
        width = max(width, end)
    device = present.device
    begins = torch.tensor(starts, dtype=torch.int64, device=device)[:, None]
    return EpisodeLayout(
        episode_of=torch.tensor(of_rows, dtype=torch.int64, device=device),
        first=[own[0] for own in rows],
        last=[own[-1] for own in rows],
        starts=starts,
        present=present,
        columns=(begins + present.cumsum(1) - 1).where(present, 0),
        width=width,
    )


def num_episodes(record: Any) -> int:
    """The number of episodes among a record's rows."""
    episodes = getattr(record, "episodes", None)
    return len(record.row_ids) if episodes is None else len(episodes.unique())


def episode_rows(episodes: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Group rows by their `episodes` [B]: the numbers [E], in the order of their first rows, and the rows of each."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(episodes.tolist()):
        rows.setdefault(number, []).append(row)
    return torch.tensor([*rows], dtype=torch.int64), [*rows.values()]


def joined(record: R) -> R:
    """Join the rows of each episode into one: the prompt of the first row, then all responses, with the observed tokens
    between them. A record without `episodes` is returned as it is.

    Columns with one value per row are the first row's, except that `finish` is the last row's, and `row_ids` are the
    episodes' numbers. `routed` is dropped: each row has its own choice of experts for the same tokens.
    """
    if record.episodes is None:
        return record
    at, width = layout_of(record), record.response_mask.shape[1]
    rows = batches.rows(record, at.first)
    tokens, seen = at.of_episodes(record.tokens[:, -width:]), at.of_episodes(at.present)
    for row, ids in enumerate(record.observed or ()):
        if ids and row not in at.first:
            episode, start = int(at.episode_of[row]), at.starts[row]
            tokens[episode, start - len(ids) : start] = torch.tensor(ids, dtype=tokens.dtype, device=tokens.device)
            seen[episode, start - len(ids) : start] = True
    return replace(
        rows,
        tokens=torch.cat([rows.tokens[:, :-width], tokens], 1),
        attention_mask=torch.cat([rows.attention_mask[:, :-width].bool(), seen], 1),
        row_ids=record.episodes[at.first],
        finish=Column(record.finish[row] for row in at.last),
        routed=None,
        episodes=None,
        observed=None,
        **{name: at.of_episodes(x, fill) for name, x, fill in _response_columns(record)},
    )


def _response_columns(record: Rollout) -> Iterator[tuple[str, Tensor, float]]:
    """Yield each column of response tokens: its name, the column [B, T, ...], and its value at padding."""
    for field in attrs.fields(type(record)):
        x = getattr(record, field.name)
        if isinstance(x, Tensor) and x.ndim > 1 and field.name not in _WHOLE:
            yield field.name, x, _AT_PADDING.get(field.name, 0)
