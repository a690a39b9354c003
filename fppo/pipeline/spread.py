"""Rollouts and rewards on many ranks: each does its part of the work, and all get all of the results.

All ranks hold the same prompts, keys and records, so the math between the heavy stages is that of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo.batch import Column, Prompts, Rollout, extend, repeat
from fppo.key import Key
from fppo.models.model import Model
from fppo.rewards.runner import Failure, Judge, Judged
from fppo.rewards.sample import Part, Sample
from fppo.rollout.engine import Engine, Sampling
from fppo.runtime import fsdp
from fppo.runtime.mesh import GRADIENT_AXES, Mesh, gather_objects, place_on, ranks_on
from fppo.steps.spread import collect

ALL = GRADIENT_AXES


def deal(count: int, mesh: Mesh) -> list[list[int]]:
    """Which of `count` things of unknown cost each rank takes: like a deck of cards."""
    ranks = ranks_on(mesh, ALL)
    return [list(range(rank, count, ranks)) for rank in range(ranks)]


@attrs.frozen(kw_only=True)
class SpreadEngine:
    """An engine on every rank: each answers some of the prompts, and all get the whole rollout, in its usual order.

    The parameters, which may be shards, are gathered whole first, for the engine to run on. An engine whose draws
    depend on the key and the rows alone gives the rollout of one process.
    """

    engine: Engine
    model: Model
    mesh: Mesh
    pad_token_id: int

    def generate(
        self, params: Mapping[str, Tensor], prompts: Prompts, sampling: Sampling, key: Key, *, version: int = 0
    ) -> Rollout:
        """The rollout of all prompts, the same on every rank."""
        if ranks_on(self.mesh, ALL) == 1:
            return self.engine.generate(params, prompts, sampling, key, version=version)
        with torch.no_grad():
            whole = fsdp.gather(params, self.model.shapes, self.mesh)
        parts = deal(len(prompts.tokens), self.mesh)
        own = parts[place_on(self.mesh, ALL)]
        made = None
        if own:
            made = self.engine.generate(whole, batches.rows(prompts, own), sampling, key, version=version)
        return self._gathered(made, prompts, parts, sampling.n, next(iter(params.values())).device)

    def _gathered(
        self, made: Rollout | None, prompts: Prompts, parts: list[list[int]], n: int, device: torch.device
    ) -> Rollout:
        """The rollout of all ranks from each rank's, `made`; None where a rank had no prompt."""
        own: tuple[int, str, list[str]] | None = None
        if made is not None:
            kind = str(made.rollout_log_probs.dtype).removeprefix("torch.")
            own = (made.response_mask.shape[1], kind, list(made.finish))
        every = [found for found in gather_objects(own, self.mesh, ALL, device) if found is not None]
        width = max(found[0] for found in every)
        dtype = getattr(torch, every[0][1])
        rows = [[prompt * n + j for prompt in part for j in range(n)] for part in parts]

        def columns(x: Tensor | None, kind: torch.dtype, fill: int = 0) -> Tensor:
            if x is None:
                x = torch.zeros(0, width, dtype=kind, device=device)
            return collect(F.pad(x, (0, width - x.shape[1]), value=fill), rows, self.mesh, ALL)

        start = prompts.tokens.shape[1]
        asked = repeat(prompts, n)
        response = None if made is None else made.tokens[:, start:]
        attended = None if made is None else made.attention_mask[:, start:]
        versions = torch.zeros(0, dtype=torch.int64, device=device) if made is None else made.versions
        row_ids = torch.zeros(0, dtype=torch.int64, device=device) if made is None else made.row_ids
        finish = [reason for found in every for reason in found[2]]
        places = [row for part in rows for row in part]
        return extend(
            Rollout,
            asked,
            tokens=torch.cat([asked.tokens.to(device), columns(response, torch.int64, self.pad_token_id)], 1),
            attention_mask=torch.cat([asked.attention_mask.to(device).bool(), columns(attended, torch.bool)], 1),
            response_mask=columns(made and made.response_mask, torch.bool),
            rollout_log_probs=columns(made and made.rollout_log_probs, dtype),
            sampling_log_probs=columns(made and made.sampling_log_probs, dtype),
            row_ids=collect(row_ids, rows, self.mesh, ALL),
            groups=asked.row_ids.to(device),
            versions=collect(versions, rows, self.mesh, ALL),
            finish=Column(reason for _, reason in sorted(zip(places, finish, strict=True))),
        )


@attrs.frozen(kw_only=True)
class SpreadJudge:
    """Reward functions on every rank: each judges some of the samples, and all get all judgements."""

    judge_own: Judge
    mesh: Mesh
    device: torch.device

    @property
    def parts(self) -> tuple[Part, ...]:
        """The functions of the reward."""
        return self.judge_own.parts

    def judge(self, samples: Sequence[Sample]) -> Judged:
        """Every function on every sample, as `RewardRunner.judge`."""
        if ranks_on(self.mesh, ALL) == 1:
            return self.judge_own.judge(samples)
        shares = deal(len(samples), self.mesh)
        own = shares[place_on(self.mesh, ALL)]
        judged = self.judge_own.judge([samples[number] for number in own])
        found = [Judged(*each) for each in gather_objects(judged, self.mesh, ALL, self.device)]
        order = [number for share in shares for number in share]
        place = {number: at for at, number in enumerate(order)}

        def joined(columns: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
            names = dict.fromkeys(name for column in columns for name in column)
            whole = {
                name: [x for c, share in zip(columns, shares) for x in c.get(name) or [0.0] * len(share)]
                for name in names
            }
            return {name: [column[place[number]] for number in range(len(order))] for name, column in whole.items()}

        answers = [answer for each in found for answer in each.answers]
        failures = [
            Failure(part, share[number], kind, text)
            for each, share in zip(found, shares)
            for part, number, kind, text in each.failures
        ]
        return Judged(
            joined([each.scores for each in found]),
            joined([each.named for each in found]),
            [answers[place[number]] for number in range(len(order))],
            tuple(sorted(failures)),
        )
