"""Results of many ranks are those of one process, and so are its errors."""

import pytest
import torch

from fppo import rewards
from fppo.rewards.distributed import SpreadRewardRunner
from fppo.runtime.simulate import simulate
from fppo.workers.sample import Sample


def sample(number):
    return Sample("", str(number), None, "s", {}, (number,), (number,), "stop")


@rewards.inline_reward
def parity(sample):
    return {"score": float(sample.response), "odd": float(int(sample.response) % 2)}


@rewards.inline_reward
def odd_ones_fail(sample):
    if int(sample.response) % 2:
        raise RuntimeError("no")
    return {"score": 1.0, "half": int(sample.response) / 2}


@rewards.inline_reward
def stepwise(sample):
    return rewards.StepRewards([0.5], [len(sample.response)]) if int(sample.response) % 2 else [0.25]


@rewards.inline_reward
def names_differ(sample):
    return {"score": 1.0, "odd" if int(sample.response) % 2 else "even": 1.0}


def run(fns, ranks, count=5):
    def on_rank(mesh):
        with rewards.RewardRunner(rewards.combine(fns, (), extra={})) as runner:
            return SpreadRewardRunner(runner, mesh, torch.device("cpu")).run([sample(n) for n in range(count)])

    return simulate({"shard": ranks}, on_rank)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("fn", ["parity", "odd_ones_fail", "stepwise"])
def test_any_number_of_ranks_judges_as_one(fn, count):
    """With two ranks one of them has the samples that fail, all of them; with three and one sample two have none."""
    name = f"{__name__}:{fn}"
    (expected,) = run([name], 1, count)
    for ranks in (2, 3):
        for results in run([name], ranks, count):
            assert results == expected


def test_a_failure_is_logged_once_whatever_the_ranks(caplog):
    for ranks in (1, 3):
        run([f"{__name__}:odd_ones_fail"], ranks)
        (record,) = (each for each in caplog.records if each.name == "fppo.rewards")
        assert "'odd_ones_fail' failed on 2 of 5 samples; sample 1: RuntimeError: no" in record.getMessage()
        caplog.clear()


def test_names_that_differ_between_ranks_are_an_error_as_in_one_process():
    for ranks in (1, 2):
        with pytest.raises(ValueError, match="give every sample the same"):
            run([f"{__name__}:names_differ"], ranks)
