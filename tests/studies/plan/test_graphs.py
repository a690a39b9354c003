"""Passes of few tokens: what a plan says of the host that launches them, and of graphs that record them."""

from __future__ import annotations

import attrs
import pytest
import torch

from fppo.settings.plan import PlanSettings
from fppo.steps import recorded
from fppo.studies.plan import passes
from fppo.studies.plan.case import hardware_of
from fppo.studies.plan.estimate import LAUNCH, PASS_LAUNCH, Seconds, busy_seconds, seconds_of
from fppo.studies.plan.passes import model_of
from fppo.studies.plan.plan import plan
from fppo.studies.plan.run import case_of
from fppo.studies.plan.text import of_plan, rendered
from tests import tiny_run
from tests.studies.plan.cases import case

FEW = case(
    hardware=hardware_of("h100"), layers=1, critic=False, reference=False, compute_dtype=torch.bfloat16, graphs=True
)


def test_a_pass_takes_what_its_launches_take_where_these_take_longest_and_are_not_recorded():
    phases = passes.run_stage(attrs.evolve(FEW, micro_batches=2), "log-probs")
    inside = [phase.cost for phase in phases if phase.name.startswith("forward")]
    others = [phase.cost for phase in phases if not phase.name.startswith("forward")]
    outside = sum(max(cost.other["launches"] * LAUNCH, busy_seconds(cost, FEW.hardware)) for cost in others)
    launched, graphs = (seconds_of(phases, attrs.evolve(FEW, micro_batches=2), recorded=x) for x in (False, True))
    assert launched.compute == pytest.approx(outside + sum(x.other["launches"] for x in inside) * PASS_LAUNCH)
    assert graphs.compute == pytest.approx(outside + sum(busy_seconds(x, FEW.hardware) for x in inside))
    assert launched.launching - graphs.launching == pytest.approx(launched.compute - graphs.compute)
    assert graphs.compute < 0.2 * launched.compute


@pytest.mark.slow
def test_a_plan_says_in_words_what_waits_for_launches_and_what_is_recorded():
    graphs = plan(FEW)
    assert {stage.name: stage.recorded for stage in graphs.stages} == {"log-probs": True, "update actor": True}
    words = rendered(of_plan(graphs, None))
    assert "Recorded as CUDA graphs (model.graphs): the passes of log-probs, update actor." in words
    slow = [
        attrs.evolve(stage, recorded=False, seconds=Seconds(*stage.seconds[:4], launching=1.0))
        for stage in graphs.stages
    ]
    words = rendered(of_plan(attrs.evolve(graphs, stages=tuple(slow)), None))
    assert "of that for launches" in words
    assert "the GPU waits for the host to launch operations" in words
    assert "Recorded" not in words
    on_cpu = attrs.evolve(FEW, hardware=hardware_of("cpu"))
    again = attrs.evolve(graphs, stages=tuple(slow), case=on_cpu)
    assert "launches" not in rendered(of_plan(again, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": {"replicate": 2}},
        {"checkpoint_layers": True},
        {"mlp_slice_tokens": 64},
        {"hardware": hardware_of("cpu")},
        {"offload": "all"},
        {"graphs": False},
        {"tokens": 1024},
    ],
)
def test_what_a_run_would_not_record_is_not_planned_so(changes, monkeypatch):
    size = sum(shape.numel() for shape in model_of(FEW, "actor").shapes.values())
    monkeypatch.setattr(recorded, "LAYER_TOKENS", 1000 * size)  # a plan of the real number takes long
    assert not any(stage.recorded for stage in plan(attrs.evolve(FEW, **changes)).stages)


def test_a_runs_settings_say_whether_it_records(tmp_path):
    run = tiny_run.settings(tmp_path)

    def planned(device="cuda", **changes):
        auto = {"compute_dtype": "auto", "attention": "auto", "graphs": "auto"}
        own = attrs.evolve(run, device=device, model=attrs.evolve(run.model, path="quickstart", **auto | changes))
        return case_of(own, PlanSettings(gpu="h100")).graphs

    assert planned() is True
    assert planned(graphs=False) is False
    assert planned(checkpoint_layers=True) is False
    assert planned("cpu") is False
