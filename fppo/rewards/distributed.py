"""Rewards on many ranks: each calls the functions on its share of the samples, and results are gathered."""

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


@attrs.frozen
class SpreadRewardRunner:
    """A reward runner on every rank: each calls the functions on its share of the samples; all get all results.

    Prompts are dealt to ranks as to engines, with all their responses, so that a rank scores the rows it sampled.
    """

    runner: RewardRunner | EarlyRewardRunner
    mesh: Mesh
    device: torch.device

    @property
    def terms(self) -> tuple[RewardTerm, ...]:
        """The terms of the reward."""
        return self.runner.terms

    def run(self, samples: Sequence[Sample], groups: Sequence[int] = ()) -> RewardResults:
        """Call every function on every sample, as `RewardRunner.run`; consecutive samples with an equal number in
        `groups` go to one rank, without `groups` each sample by itself."""
        numbers = range(len(samples))
        together = [list(members) for _, members in groupby(numbers, groups.__getitem__ if groups else None)]
        shares = [[i for place in share for i in together[place]] for share in deal(len(together), self.mesh)]
        own = self.runner.outcomes([samples[number] for number in shares[place_on(self.mesh, AXES)]])
        ranks = [own]
        if len(shares) > 1:
            texts = gather_objects(own, self.mesh, AXES, self.device)
            ranks = [{name: [Outcome.of(each) for each in column] for name, column in text.items()} for text in texts]
        outcomes = {name: _in_order([outcome for rank in ranks for outcome in rank[name]], shares) for name in own}
        results = results_of(self.terms, outcomes, samples)
        if is_first(self.mesh):
            log_failures(results.failures, len(samples))
        return results


def _in_order(outcomes: Sequence[Outcome], shares: Sequence[Sequence[int]]) -> list[Outcome]:
    """Reorder the concatenated outcomes of all ranks' shares to the order of the samples."""
    places = (number for share in shares for number in share)
    return [outcome for _, outcome in sorted(zip(places, outcomes, strict=True), key=lambda pair: pair[0])]
