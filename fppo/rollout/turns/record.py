"""Assemble the rollout of episodes that several ranks played."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo.batch import Column, Prompts, Rollout, extend, repeat
from fppo.data.examples import MESSAGES
from fppo.episodes import EpisodeCut, cut
from fppo.rollout.engine import Ask
from fppo.rollout.records import completed_experts, number_rows, tensor_of
from fppo.rollout.turns.chains import Chain
from fppo.runtime.mesh import AXES, Mesh, gather_objects
from fppo.steps.ranks import collect
from fppo.tree import replace


@attrs.frozen(kw_only=True)
class Records:
    """The parts of a rollout of `ask` that several ranks played; each list of `shares` has the rows of one rank of the
    mesh."""

    ask: Ask
    shares: Sequence[Sequence[int]]
    mesh: Mesh
    pad_token_id: int
    device: torch.device
    judges: bool  # rewards are the player's, and prompts may be
    anew: bool = False  # each turn is a row

    def rollout(self, chains: Sequence[Chain], extras: Callable[[Chain], Mapping[str, Any]]) -> Rollout:
        """The rollout, the same on every rank, from the episodes of this rank's rows, in their order. `extras` returns
        a row's additional extras."""
        ask, routed = self.ask, next((chain.experts[0][2] for chain in chains if chain.experts), None)
        own = {
            "width": max((len(chain.ids) for chain in chains), default=1),
            "routed": None if routed is None else [*routed.shape[1:], str(routed.dtype).removeprefix("torch.")],
            "wide": any(chain.sections[0].log_probs.dtype == torch.float64 for chain in chains),
            "newer": bool((_drawn_versions(chains) != ask.version).any()),
            "rows": [
                [chain.row, chain.finish, dict(extras(chain)), _opening(chain), [list(x) for x in self._cuts(chain)]]
                for chain in chains
            ],
        }
        ranks = gather_objects(own, self.mesh, AXES, self.device)
        rows = {row: rest for rank in ranks for row, *rest in rank["rows"]}
        prompts = repeat(self._prompts(rows), ask.sampling.n)
        width, count = max(rank["width"] for rank in ranks), len(prompts.tokens)
        columns = _columns(chains, width, torch.float64 if any(rank["wide"] for rank in ranks) else torch.float32)
        all_columns = {name: self._collected(x) for name, x in columns.items()}
        seen = all_columns.pop("seen")
        mask, tokens, versions, rewards = (all_columns.pop(x) for x in ("chosen", "tokens", "versions", "rewards"))
        whole = torch.cat([prompts.attention_mask.to(self.device).bool(), seen], 1)
        rollout = extend(
            Rollout,
            prompts,
            tokens=torch.cat([prompts.tokens.to(self.device), tokens.where(seen, self.pad_token_id)], 1),
            attention_mask=whole,
            response_mask=mask,
            row_ids=number_rows(ask, self.device),
            groups=prompts.row_ids.to(self.device),
            versions=torch.full((count,), ask.version, dtype=torch.int64, device=self.device),
            finish=Column(rows[row][0] for row in range(count)),
            extras=Column({**prompts.extras[row], **rows[row][1]} for row in range(count)),
            token_versions=versions.where(mask, 0) if any(rank["newer"] for rank in ranks) else None,
            turn_rewards=rewards if self.judges else None,
            **all_columns,
        )
        cuts = [[EpisodeCut(*each) for each in rows[row][3]] for row in range(count)]
        if self.anew:
            rollout = cut(rollout, cuts, pad_token_id=self.pad_token_id)
        experts = next((rank["routed"] for rank in ranks if rank["routed"]), None)
        if experts is None:
            return rollout
        routed = self._experts(chains, rollout, [len(own) for own in cuts], experts)
        return replace(rollout, routed=completed_experts(routed, rollout.attention_mask))

    def _cuts(self, chain: Chain) -> list[EpisodeCut]:
        """The rows of an episode. Unless each turn is a row there is a single one; its prompt is left out, since the
        rollout has it already."""
        return chain.cuts if self.anew else [EpisodeCut(())]

    def _collected(self, x: Tensor, shares: Sequence[Sequence[int]] | None = None) -> Tensor:
        return collect(x.to(self.device), self.shares if shares is None else shares, self.mesh, AXES)

    def _prompts(self, rows: Mapping[int, Sequence[Any]]) -> Prompts:
        """The prompts that episodes began with."""
        prompts, n = self.ask.prompts, self.ask.sampling.n
        openings = [rows[row * n][2] for row in range(len(prompts.tokens))]
        if not any(openings):
            return prompts
        asked = [
            own[0] if own else tokens[mask.bool()].tolist()
            for own, tokens, mask in zip(openings, prompts.tokens, prompts.attention_mask, strict=True)
        ]
        width = max(map(len, asked))
        tokens = [[*[self.pad_token_id] * (width - len(ids)), *ids] for ids in asked]
        seen = [[*[False] * (width - len(ids)), *[True] * len(ids)] for ids in asked]
        device = prompts.tokens.device
        columns = {"tokens": torch.tensor(tokens, device=device), "attention_mask": torch.tensor(seen, device=device)}
        more = [{MESSAGES: own[1]} if own else {} for own in openings]
        extras = Column({**had, **new} for had, new in zip(prompts.extras, more, strict=True))
        return replace(prompts, **columns, extras=extras)

    def _experts(self, chains: Sequence[Chain], rollout: Rollout, sizes: Sequence[int], kind: Sequence[Any]) -> Tensor:
        """The experts [B, S, L, k] of a rollout. `sizes` are the numbers of rows of each episode, and `kind` is the
        shape of a token's experts, then the name of their dtype."""
        *shape, dtype = kind
        ends = list(accumulate(sizes))
        shares = [[n for row in share for n in range(ends[row] - sizes[row], ends[row])] for share in self.shares]
        length, prompt = rollout.tokens.shape[1], rollout.tokens.shape[1] - rollout.response_mask.shape[1]
        whole = torch.zeros(sum(sizes[chain.row] for chain in chains), length, *shape, dtype=getattr(torch, dtype))
        first = 0
        for chain in chains:
            for row, end, experts in chain.experts:
                stop = prompt - len(chain.cuts[row].prompt) + end
                whole[first + row, stop - len(experts) : stop] = experts.cpu()
            first += sizes[chain.row]
        return self._collected(whole, shares)


def _opening(chain: Chain) -> list[Any] | None:
    """The prompt that the player gave an episode: tokens and messages."""
    return None if chain.messages is None else [list(chain.prompt), chain.messages]


def _drawn_versions(chains: Sequence[Chain]) -> Tensor:
    """The versions of the policies that drew the tokens, int32 [N]."""
    drawn = [x.versions for chain in chains for x in chain.sections if x.turn]
    return torch.cat(drawn) if drawn else torch.zeros(0, dtype=torch.int32)


def _columns(chains: Sequence[Chain], width: int, wide: torch.dtype) -> dict[str, Tensor]:
    """The columns of responses, each [b, T]."""
    lengths = tensor_of([len(chain.ids) for chain in chains], torch.int64)
    seen, sections = torch.arange(width) < lengths[:, None], [x for chain in chains for x in chain.sections]

    def column(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Concatenate the values of all sections, and lay them out at their places."""
        whole = torch.zeros(len(chains), width, dtype=dtype)
        if parts:
            whole[seen] = torch.cat([*parts]).to(dtype)
        return whole

    numbers = tensor_of([x.turn for x in sections], torch.int32)
    turns = column(
        [numbers.repeat_interleave(tensor_of([x.tokens.numel() for x in sections], torch.int64))], torch.int32
    )
    rewards = torch.zeros(len(chains), width)
    given = [(row, *each) for row, chain in enumerate(chains) for each in chain.rewards.items()]
    if given:
        rows, places, values = zip(*given, strict=True)
        rewards[tensor_of(rows, torch.int64), tensor_of(places, torch.int64)] = tensor_of(values, torch.float32)
    return {
        "tokens": column([x.tokens for x in sections], torch.int64),
        "seen": seen,
        "chosen": turns > 0,
        "rollout_log_probs": column([x.log_probs for x in sections], wide),
        "sampling_log_probs": column([x.sampling_log_probs for x in sections], wide),
        "versions": column([x.versions for x in sections], torch.int32),
        "turn_ids": turns - 1,
        "rewards": rewards,
    }
