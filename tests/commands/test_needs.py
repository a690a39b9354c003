"""A run's memory beside its plan: by stage where it was looked at, with a line where they are far apart."""

import attrs
import pytest

from fppo.assembly.run import assemble
from fppo.commands.needs import lines_at_end, memory_lines
from fppo.runs import memory
from fppo.settings.plan import PlanSettings
from fppo.studies.plan.needs import needs_of
from tests import tiny_run

MIB = 1 << 20
PLANNED = {"rollout": 2 * MIB, "log-probs": 3 * MIB, "update actor": 10 * MIB}


def test_stages_stand_beside_their_plan():
    lines = memory_lines(PLANNED, {"rollout": 1 * MIB, "update actor": 11 * MIB}, [1 * MIB, 11 * MIB])
    assert lines[0].startswith("tensors of a rank at the peak of each stage, MiB")
    assert [line.split() for line in lines[1:]] == [
        ["planned", "this", "run", "ratio"],
        ["rollout", "2", "1", "0.50"],
        ["log-probs", "3"],
        ["update", "actor", "10", "11", "1.10"],
        ["largest", "10", "11", "1.10"],
    ]


def test_a_run_that_was_not_looked_at_has_its_peak_alone():
    lines = memory_lines({"update actor": 8 << 30}, {}, [8 << 30])
    assert "GiB" in lines[0]
    assert [line.split() for line in lines[2:]] == [["largest", "8.00", "8.00", "1.00"]]


@pytest.mark.parametrize(
    ("peak", "said"),
    [
        (12, "the run took 20% more memory than planned"),
        (8, "the run took 20% less memory than planned"),
        (11.4, None),
        (8.6, None),
    ],
)
def test_a_gap_over_15_percent_is_a_line(peak, said):
    lines = memory_lines(PLANNED, {}, [peak * MIB])
    assert (said is None) == lines[-1].split()[0].startswith("largest")
    assert said is None or lines[-1].startswith(said)


def test_nothing_is_said_where_nothing_was_measured_or_planned():
    assert memory_lines(PLANNED, {}, []) == []
    assert memory_lines({}, {"rollout": MIB}, [MIB]) == []


@pytest.mark.slow
def test_a_short_run_is_compared_if_it_was_looked_at(tmp_path):
    """With steps that the settings name, and on an accelerator with the peak of the device."""
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, log__memory_steps=[2])
    row = memory.StageMemory(stage="gen", parameters=0, gradients=0, moments=0, cache=0, activations=0, peak=MIB // 10)
    place = tmp_path / "run" / memory.MEMORY
    place.mkdir(parents=True)
    memory.write(place / "step_00000002.json", 2, [row])
    memory.write(place / "step_00000003.json", 3, [attrs.evolve(row, peak=MIB)])  # of an earlier start
    planned = needs_of(settings, PlanSettings(gpu="cpu", gpus=1))
    with assemble(settings) as assembly:
        short = [{"timing_s/step": 1.0}]
        lines = lines_at_end(settings, assembly.inputs, short, 1)
        assert lines[0].startswith("tensors of a rank")
        cells = {" ".join(words[:-3]): words[-2] for words in map(str.split, lines[1:]) if len(words) > 3}
        assert cells["rollout"] == cells["largest"] == "0.1"
        assert any(line.split()[:2] == ["update", "actor"] for line in lines)
        device = [{"timing_s/step": 1.0, "perf/max_memory_allocated_gb": 1.0}]
        assert "1,024" in lines_at_end(settings, assembly.inputs, device, 1)[-2]
        without = attrs.evolve(settings, log=attrs.evolve(settings.log, memory_steps=()))
        assert lines_at_end(without, assembly.inputs, device, 1) == []
    assert max(planned.tensors.values()) == planned.memory  # on a CPU nothing is outside of tensors
