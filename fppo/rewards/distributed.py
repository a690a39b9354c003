"""Rewards on many ranks: each calls the functions on its share of the samples, and all get all results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import attrs
import torch

from fppo.rewards.early import EarlyRewardRunner
from fppo.rewards.functions import RewardTerm
from fppo.rewards.runner import RewardResults, RewardRunner, log_failures, results_of
from fppo.runtime.mesh import AXES, Mesh, gather_objects, is_first, place_on
from fppo.steps.ranks import deal
from fppo.workers.sample import Outcome, Sample

ALL = AXES


@attrs.frozen
class SpreadRewardRunner:
    """Reward functions on every rank: each calls them on some of the samples, and all get all results.

    The samples of a rank are those that its engine sampled: all answers to a prompt are dealt together, as to engines.
    """

    runner: RewardRunner | EarlyRewardRunner
    mesh: Mesh
    device: torch.device

    @property
    def terms(self) -> tuple[RewardTerm, ...]:
        """The functions of the reward."""
        return self.runner.terms

    def run(self, samples: Sequence[Sample], groups: Sequence[int] = ()) -> RewardResults:
        """Every function on every sample, as `RewardRunner.run`; samples next to each other with the same number in
        `groups` (without them each by itself) on one rank."""
        numbers = range(len(samples))
        together = [list(members) for _, members in groupby(numbers, groups.__getitem__ if groups else None)]
        shares = [[i for place in share for i in together[place]] for share in deal(len(together), self.mesh)]
        own = self.runner.outcomes([samples[number] for number in shares[place_on(self.mesh, ALL)]])
        ranks = [own]
        if len(shares) > 1:
            texts = gather_objects(own, self.mesh, ALL, self.device)
            ranks = [{name: [Outcome(*each) for each in column] for name, column in text.items()} for text in texts]
        outcomes = {name: _in_order([outcome for rank in ranks for outcome in rank[name]], shares) for name in own}
        results = results_of(self.terms, outcomes, samples)
        if is_first(self.mesh):
            log_failures(results.failures, len(samples))
        return results


def _in_order(outcomes: Sequence[Outcome], shares: Sequence[Sequence[int]]) -> list[Outcome]:
    """The outcomes of all ranks' shares, one after the other, in the order of the samples."""
    places = (number for share in shares for number in share)
    return [outcome for _, outcome in sorted(zip(places, outcomes, strict=True), key=lambda pair: pair[0])]
