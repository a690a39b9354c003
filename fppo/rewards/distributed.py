"""Rewards on many ranks: each judges its share of the samples, and all get all judgements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import attrs
import torch

from fppo.rewards.functions import Part
from fppo.rewards.runner import Judged, Scorer, judged, log_failures
from fppo.runtime.mesh import GRADIENT_AXES, Mesh, gather_objects, is_first, place_on
from fppo.steps.ranks import deal
from fppo.workers.sample import Outcome, Sample

ALL = GRADIENT_AXES


@attrs.frozen
class SpreadJudge:
    """Reward functions on every rank: each calls them on some of the samples, and all get all judgements.

    The samples of a rank are those that its engine made: all answers to a prompt are dealt together, as to engines.
    """

    own: Scorer
    mesh: Mesh
    device: torch.device

    @property
    def parts(self) -> tuple[Part, ...]:
        """The functions of the reward."""
        return self.own.parts

    def judge(self, samples: Sequence[Sample], groups: Sequence[int] = ()) -> Judged:
        """Every function on every sample, as `RewardRunner.judge`; samples next to each other with the same number in
        `groups` (none given: each by itself) on one rank."""
        numbers = range(len(samples))
        together = [list(found) for _, found in groupby(numbers, groups.__getitem__ if groups else None)]
        shares = [[i for place in part for i in together[place]] for part in deal(len(together), self.mesh)]
        found = self.own.outcomes([samples[number] for number in shares[place_on(self.mesh, ALL)]])
        every = [found]
        if len(shares) > 1:
            texts = gather_objects(found, self.mesh, ALL, self.device)
            every = [{part: [Outcome(*each) for each in column] for part, column in own.items()} for own in texts]
        whole = {
            part: _in_order([outcome for own in every for outcome in own[part]], shares)
            for part in (part.name for part in self.parts if part.kind != "tensor")
        }
        result = judged(self.parts, whole, samples)
        if is_first(self.mesh):
            log_failures(result.failures, len(samples))
        return result


def _in_order(outcomes: Sequence[Outcome], shares: Sequence[Sequence[int]]) -> list[Outcome]:
    """The outcomes of all ranks' shares, one after the other, in the order of the samples."""
    places = (number for share in shares for number in share)
    return [outcome for _, outcome in sorted(zip(places, outcomes, strict=True), key=lambda pair: pair[0])]
