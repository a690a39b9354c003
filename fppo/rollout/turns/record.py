"""Make rollouts of played rows: one builder for all engines of episodes, on one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fppo import batch as batches
from fppo.batch import Column, Prompts, Rollout
from fppo.data.examples import MESSAGES
from fppo.rollout.engine import Ask
from fppo.rollout.records import completed_experts, number_rows, rollout_of_columns, tensor_of
from fppo.rollout.turns.episode import Episode, PlayedRow
from fppo.runtime.mesh import AXES, Mesh, gather_objects
from fppo.steps.ranks import collect
from fppo.tree import replace


def padded_prompts(prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens [B, P] of prompts, padded on the left, and their attention mask."""
    tokens = [torch.tensor(ids, dtype=torch.int64) for ids in prompts]
    seen = [torch.ones(len(ids), dtype=torch.bool) for ids in prompts]
    whole = pad_sequence(tokens, True, pad_token_id, "left")
    return whole.to(device), pad_sequence(seen, True, False, "left").to(device)


def response_columns(rows: Sequence[PlayedRow], width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The columns [B, T] of rows' responses, at `width` positions, with log-probs in `dtype`. "present" marks tokens,
    and turn_ids >= 0 those that the policy drew; elsewhere log-probs, versions and rewards are 0."""
    turns = [turn for row in rows for turn in row.turns]
    sizes = tensor_of([size for turn in turns for size in (len(turn.before), len(turn.answer.tokens))], torch.int64)
    numbers = tensor_of([number for turn in turns for number in (-1, turn.number)], torch.int32)
    present = torch.arange(width) < tensor_of([row.size for row in rows], torch.int64)[:, None]
    turn_ids = torch.full(present.shape, -1, dtype=torch.int32)
    turn_ids[present] = numbers.repeat_interleave(sizes)
    chosen = turn_ids >= 0

    def drawn(name: str, dtype: torch.dtype) -> Tensor:
        whole = torch.zeros(present.shape, dtype=dtype)
        if turns:
            whole[chosen] = torch.cat([getattr(turn.answer, name) for turn in turns]).to(dtype)
        return whole

    tokens, rewards = drawn("tokens", torch.int64), torch.zeros(present.shape)
    tokens[present & ~chosen] = tensor_of([token for turn in turns for token in turn.before], torch.int64)
    given = torch.zeros(int(sizes.sum()))
    given[sizes.cumsum(0)[1::2] - 1] = tensor_of([turn.reward for turn in turns], torch.float32)
    rewards[present] = given
    return {
        "tokens": tokens,
        "present": present,
        "rollout_log_probs": drawn("log_probs", dtype),
        "sampling_log_probs": drawn("sampling_log_probs", dtype),
        "token_versions": drawn("versions", torch.int32),
        "turn_ids": turn_ids,
        "turn_rewards": rewards,
    }


class _RowParts(NamedTuple):
    """The parts of a row that ranks exchange."""

    episode: int
    prompt: Sequence[int] | None  # None: the one that was asked
    observed: Sequence[int]
    finish: str
    extras: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Records:
    """The episodes of `ask` that several ranks played, as a rollout."""

    ask: Ask
    mesh: Mesh
    pad_token_id: int
    device: torch.device
    judges: bool  # rewards are the player's, and prompts may be
    row_per_turn: bool = False  # each turn is a row

    def rollout(self, episodes: Sequence[Episode], extras: Callable[[Episode], Mapping[str, Any]]) -> Rollout:
        """The rollout, the same on every rank, from this rank's episodes in the order of their rows. `extras` returns
        an episode's additional extras."""
        version, rows = self.ask.version, [row for episode in episodes for row in episode.rows]
        answers = [turn.answer for row in rows for turn in row.turns]
        experts = next((x.experts for x in answers if x.experts is not None), None)
        own = {
            "width": max((row.size for row in rows), default=1),
            "experts": None if experts is None else [*experts.shape[1:], str(experts.dtype).removeprefix("torch.")],
            "wide": any(x.log_probs.dtype == torch.float64 for x in answers),
            "newer": any(bool((x.versions != version).any()) for x in answers),
            "rows": [parts for episode in episodes for parts in self._parts(episode, extras(episode))],
        }
        ranks = gather_objects(own, self.mesh, AXES, self.device)
        parts = [_RowParts(*each) for rank in ranks for each in rank["rows"]]
        order = sorted(range(len(parts)), key=lambda number: parts[number].episode)
        shares = [x.tolist() for x in batches.inverse(order).split([len(rank["rows"]) for rank in ranks])]
        width, wide = max(rank["width"] for rank in ranks), any(rank["wide"] for rank in ranks)
        columns = response_columns(rows, width, torch.float64 if wide else torch.float32)
        columns = {name: self._collected(x, shares) for name, x in columns.items()}
        rollout = self._joined([parts[number] for number in order], columns, any(rank["newer"] for rank in ranks))
        kind = next((rank["experts"] for rank in ranks if rank["experts"]), None)
        if kind is None:
            return rollout
        routed = self._collected(_experts(rows, rollout, kind), shares)
        return replace(rollout, routed=completed_experts(routed, rollout.attention_mask))

    def _parts(self, episode: Episode, extras: Mapping[str, Any]) -> Iterator[_RowParts]:
        given = {} if episode.messages is None else {MESSAGES: [*episode.messages]}
        for row in episode.rows:
            prompt = [*row.prompt] if given or self.row_per_turn else None
            finish = episode.finish if row is episode.rows[-1] else "stop"
            yield _RowParts(episode.row, prompt, [*row.observed], finish, {**given, **extras})

    def _collected(self, x: Tensor, shares: Sequence[Sequence[int]]) -> Tensor:
        return collect(x.to(self.device), shares, self.mesh, AXES)

    def _joined(self, rows: Sequence[_RowParts], columns: Mapping[str, Tensor], newer: bool) -> Rollout:
        """The rollout of all rows, in order; `newer`: some tokens are of later policies than the asked version."""
        numbers = torch.tensor([row.episode for row in rows])
        episodes = number_rows(self.ask, self.device)[numbers.to(self.device)]
        versions = torch.full_like(episodes, self.ask.version)
        if newer and self.row_per_turn:
            versions = columns["token_versions"][:, 0].to(versions)
        rollout = rollout_of_columns(
            self._prompts(rows, numbers // self.ask.sampling.n),
            columns,
            pad_token_id=self.pad_token_id,
            row_ids=torch.arange(len(rows), device=self.device) if self.row_per_turn else episodes,
            versions=versions,
            finish=[row.finish for row in rows],
        )
        return replace(
            rollout,
            token_versions=rollout.token_versions if newer else None,
            turn_rewards=rollout.turn_rewards if self.judges else None,
            episodes=episodes if self.row_per_turn else None,
            observed=Column(row.observed for row in rows) if self.row_per_turn else None,
        )

    def _prompts(self, rows: Sequence[_RowParts], index: Tensor) -> Prompts:
        """The prompts of rows, which belong to the asked prompts at `index` [B]."""
        prompts = batches.rows(self.ask.prompts, index)
        columns = {name: getattr(prompts, name).to(self.device) for name in ("tokens", "attention_mask", "row_ids")}
        if any(row.prompt is not None for row in rows):
            asked = zip(rows, prompts.tokens, prompts.attention_mask, strict=True)
            ids = [row.prompt or tokens[mask.bool()].tolist() for row, tokens, mask in asked]
            columns["tokens"], columns["attention_mask"] = padded_prompts(ids, self.pad_token_id, self.device)
        extras = Column({**own, **row.extras} for own, row in zip(prompts.extras, rows, strict=True))
        return replace(prompts, **columns, extras=extras)


def _experts(rows: Sequence[PlayedRow], rollout: Rollout, kind: Sequence[Any]) -> Tensor:
    """The experts [b, S, L, k] of rows; `kind` is the shape of a token's experts, then the name of their dtype."""
    *shape, dtype = kind
    length, width = rollout.tokens.shape[1], rollout.response_mask.shape[1]
    whole = torch.zeros(len(rows), length, *shape, dtype=getattr(torch, dtype))
    for place, row in enumerate(rows):
        end = length - width - 1  # an answer's last token is not run for it
        for turn in row.turns:
            end += len(turn.before) + len(turn.answer.tokens)
            if turn.answer.experts is not None:
                whole[place, end - len(turn.answer.experts) : end] = turn.answer.experts.cpu()
    return whole
