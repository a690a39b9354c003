"""The pace of a machine: what a miniature of a run takes on it, over what is planned for the miniature."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
import torch

from fppo.studies.plan.case import Case, Pace, PlannedSampling, hardware_of
from fppo.studies.plan.pace import paced
from fppo.studies.plan.plan import plan
from fppo_kernels.table import Kernels
from tests.studies.plan.cases import bare, config, mixture

KERNELS = Kernels.named()
SAMPLED = PlannedSampling(sequences=4, n=2)


def timed(case: Case, seconds: float = 1.0) -> Pace:
    """The pace by a clock with which every call takes so long."""
    return paced(case, KERNELS, clock=itertools.count(step=seconds).__next__).pace


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 9, "sampling": SAMPLED},
        {"config": mixture(chosen=2), "sampling": SAMPLED},
        {"compute_dtype": torch.bfloat16, "checkpoint_layers": True, "critic": True, "reference": True},
        {"mesh": {"shard": 4, "tensor": 2}, "sampling": SAMPLED},
    ],
    ids=str,
)
def test_a_pace_is_measured_with_the_runs_kernels_and_is_as_slow_as_the_clock_says(changes: dict[str, Any]):
    """Of any model, on any mesh, in this process; the draws of others are left alone, and the threads as they were."""
    case, before, threads = bare(**changes), torch.random.get_rng_state(), torch.get_num_threads()
    one, two = timed(case), timed(case, 2.0)
    assert attrs.astuple(two) == pytest.approx(
        [x * (2.0 if x != 1.0 or name != "decode" else 1.0) for name, x in attrs.asdict(one).items()]
    )
    assert (one.decode == 1.0) is (case.sampling is None)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_a_miniature_has_the_pace_of_the_run_that_it_is_made_of():
    """A model of two layers whose whole vocabulary is kept is its own miniature: its passes take what was measured."""
    case = bare(layers=2, config=config(num_hidden_layers=2))
    measured = attrs.evolve(case, pace=timed(case))
    stages = {stage.name: stage.seconds.total for stage in plan(measured).stages}
    assert stages["log-probs"] == pytest.approx(1.0)


@pytest.mark.slow
def test_seconds_on_a_cpu_are_products_copies_and_calls_at_its_pace():
    """Nothing is launched ahead there, so calls are added; parts of a step have a pace each, and a GPU has none."""
    case = bare(sampling=SAMPLED)
    pace = Pace(forward=2.0, update=3.0, optimizer=5.0, decode=7.0)
    own, slow = plan(case), plan(attrs.evolve(case, pace=pace))
    assert own.rollout is not None
    assert slow.rollout is not None
    before, after = ({x.name: x.seconds for x in found.stages} for found in (own, slow))
    assert after["log-probs"].total <= 5 * before["log-probs"].total
    assert after["log-probs"].total >= 2 * before["log-probs"].total
    assert 3 * before["update actor"].total <= after["update actor"].total <= 5 * before["update actor"].total
    assert slow.rollout.decode == pytest.approx(7 * own.rollout.decode)
    assert slow.rollout.prefill == pytest.approx(2 * own.rollout.prefill)
    assert all(x.launching == 0 for x in before.values())
    gpu = attrs.evolve(case, hardware=hardware_of("h100"))
    assert plan(gpu).stages == plan(attrs.evolve(gpu, pace=pace)).stages
