"""An engine that runs on the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor

from fppo.batch import Prompts, Rollout
from fppo.fleet import Group
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling

Generate = Callable[[Mapping[str, Tensor], Ask], Rollout]


@attrs.frozen
class PlacedEngine:
    """The engine whose `generate` the group's ranks hold. Parameters are handles there; rows are not reported as they
    finish, since whoever listens is elsewhere."""

    group: Group
    engine: Any  # a handle of `Engine.generate`

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """Their rollout."""
        asked = (ask.prompts, ask.sampling, ask.key, ask.version, ask.limits, ask.offset)
        return self.group.call(_generate, self.engine, params, *asked, label="generate")


def _generate(
    generate: Generate,
    params: Mapping[str, Tensor],
    prompts: Prompts,
    sampling: Sampling,
    key: Key,
    version: int,
    limits: Tensor | None,
    offset: int,
) -> Rollout:
    return generate(params, Ask(prompts, sampling, key, version=version, limits=limits, offset=offset))
