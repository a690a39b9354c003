"""Rollouts on many ranks: each does its part of the work, and all get all of the results.

All ranks hold the same prompts, keys and records, so the math between the heavy stages is that of one process.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo.batch import Column, Prompts, Rollout, extend, repeat
from fppo.key import Key
from fppo.rollout.engine import Engine, OnFinished, Sampling
from fppo.runtime.mesh import GRADIENT_AXES, Mesh, gather_objects, place_on, ranks_on
from fppo.runtime.offload import Lane, to_device
from fppo.steps.ranks import collect, deal

ALL = GRADIENT_AXES


@attrs.frozen(kw_only=True)
class SpreadEngine:
    """An engine on every rank: each answers some of the prompts, and all get the whole rollout, in its usual order.

    The engine knows how parameters lie on the mesh. If its draws depend on the key and the rows alone, the rollout is
    that of one process.
    """

    engine: Engine
    mesh: Mesh
    pad_token_id: int

    def generate(
        self,
        params: Mapping[str, Tensor],
        prompts: Prompts,
        sampling: Sampling,
        key: Key,
        *,
        version: int = 0,
        limits: Tensor | None = None,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """The rollout of all prompts, the same on every rank."""
        if ranks_on(self.mesh, ALL) == 1:
            return self.engine.generate(
                params, prompts, sampling, key, version=version, limits=limits, on_finished=on_finished
            )
        parts = deal(len(prompts.tokens), self.mesh)
        own = parts[place_on(self.mesh, ALL)]
        # a rank without a prompt makes an answer that nobody reads: engines gather parameters together
        asked = own or [0]
        most = None if limits is None else limits[asked]

        def tell(row: int, response: list[int], finish: str) -> None:
            assert on_finished is not None
            on_finished(own[row // sampling.n] * sampling.n + row % sampling.n, response, finish)

        heard = tell if own and on_finished is not None else None
        made = self.engine.generate(
            params, batches.rows(prompts, asked), sampling, key, version=version, limits=most, on_finished=heard
        )
        return self._gathered(made if own else batches.rows(made, []), prompts, parts, sampling.n)

    def _gathered(self, made: Rollout, prompts: Prompts, parts: list[list[int]], n: int) -> Rollout:
        """The rollout of all ranks from each rank's rows of it."""
        device = made.tokens.device
        every = gather_objects([made.response_mask.shape[1], list(made.finish)], self.mesh, ALL, device)
        width = max(found[0] for found in every if found[1])
        rows = [[prompt * n + j for prompt in part for j in range(n)] for part in parts]

        def column(x: Tensor, fill: int = 0) -> Tensor:
            return collect(F.pad(x, (0, width - x.shape[1]), value=fill), rows, self.mesh, ALL)

        start = prompts.tokens.shape[1]
        asked = repeat(prompts, n)
        finish = [reason for found in every for reason in found[1]]
        places = [row for part in rows for row in part]
        return extend(
            Rollout,
            asked,
            tokens=torch.cat([asked.tokens.to(device), column(made.tokens[:, start:], self.pad_token_id)], 1),
            attention_mask=torch.cat(
                [asked.attention_mask.to(device).bool(), column(made.attention_mask[:, start:])], 1
            ),
            response_mask=column(made.response_mask),
            rollout_log_probs=column(made.rollout_log_probs),
            sampling_log_probs=column(made.sampling_log_probs),
            row_ids=collect(made.row_ids, rows, self.mesh, ALL),
            groups=asked.row_ids.to(device),
            versions=collect(made.versions, rows, self.mesh, ALL),
            finish=Column(reason for _, reason in sorted(zip(places, finish, strict=True))),
        )


@attrs.frozen(kw_only=True)
class FetchingEngine:
    """An engine for parameters on the host, which are on the device for the call."""

    engine: Engine
    lane: Lane

    def generate(
        self,
        params: Mapping[str, Tensor],
        prompts: Prompts,
        sampling: Sampling,
        key: Key,
        *,
        version: int = 0,
        limits: Tensor | None = None,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """The engine's rollout."""
        here = to_device(dict(params), self.lane)
        return self.engine.generate(
            here, prompts, sampling, key, version=version, limits=limits, on_finished=on_finished
        )
