"""Which steps have digests and checkpoints: those asked for, the last, and those whose update was not finite."""

import json
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest

from fppo.commands import actions
from fppo.key import Key
from fppo.pipeline.program import RunState
from fppo.pipeline.train import StepRecord
from fppo.runs import jsonl
from fppo.runs.writer import Checkpoints, Digests
from fppo.runtime.checkpoint import Pending
from fppo.steps.train_state import TrainState
from tests import tiny, tiny_run


def _run(task, directory, **changes):
    given = {"device": "cpu", "steps": 3, "checkpoint__every": 2, "checkpoint__keep": 9, "eval__before": False}
    assert actions.train(tiny_run.settings(task, output_dir=str(directory), **given, **changes)) == 0
    return {line["step"]: line for line in jsonl.read(directory / "digests.jsonl")}


@pytest.mark.slow
def test_steps_without_digests_are_computed_again_and_not_compared(task, tmp_path, capsys):
    every = _run(task, tmp_path / "every")
    few = _run(task, tmp_path / "few", digest__every=0)
    assert [sorted(lines) for lines in (every, few)] == [[1, 2, 3], [2, 3]]
    assert few == {step: line for step, line in every.items() if step != 1}
    assert "kind" not in every[1]
    assert "digests of the state: only at checkpoints (digest.every = 0)\n" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "few" / "checkpoints")
    assert actions.replay(tmp_path / "few", 2) == 0
    assert "step 1: no digests were recorded\nstep 2: equal, bit for bit" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no record of step 1; the recorded steps are 2 to 3$"):
        actions.replay(tmp_path / "few", 1)
    shown = jsonl.read(tmp_path / "few" / "metrics.jsonl")
    assert [line["step"] for line in shown if "timing_s/digests" in line] == [2, 3]
    assert [line["step"] for line in shown if "timing_s/save_checkpoint" in line] == [3]  # of step 2


@pytest.mark.parametrize(
    ("step", "numbers", "written"),
    [
        (4, {}, True),
        (3, {}, False),
        (3, {"actor/skipped": 0.5}, True),
        (3, {"critic/skipped": 1.0}, True),
        (3, {"supervised/skipped": 1.0}, True),
    ],
)
def test_the_last_step_and_one_that_was_skipped_have_digests(tmp_path, step, numbers, written):
    run = RunState(actor=TrainState(params={}, opt=None, step=0), key=Key(0), step=step)
    lines = jsonl.JsonLines(tmp_path / "digests.jsonl")
    writer = Digests(
        directory=tmp_path,
        lines=lines,
        every=2,
        is_saved=lambda step: False,
        line=lambda record: {"step": record.run.step},
    )
    writer(StepRecord(run=run, experience=tiny.experience(0, 2), metrics=numbers))
    assert bool(jsonl.read(tmp_path / "digests.jsonl")) == written
    assert (tmp_path / "dumps" / f"step_{step:08d}.safetensors").exists() == bool(numbers)
    for _ in range(2):  # the run ends here, and its checkpoint has the digests of its step
        writer.end()
        assert json.loads((tmp_path / "digests.jsonl").read_text()) == {"step": step}
    lines.close()


@pytest.mark.parametrize(("last", "begun"), [(4, [2, 4]), (5, [2, 4, 5])])
def test_the_state_a_run_ends_with_is_written_once(last, begun):
    """What a step began is not read back whole, to be compared with the state that it was written from."""
    steps = []

    def begin(run):
        steps.append(run.step)
        written = Future()
        written.set_result(Path())
        return Pending(written)

    writer = Checkpoints(is_saved=lambda step: step % 2 == 0, begin=begin, ranks=1)
    runs = [RunState(actor=TrainState(params={}, opt=None, step=0), key=Key(0), step=step) for step in range(last + 1)]
    for run in runs[1:]:
        writer(StepRecord(run=run, experience=object(), metrics={}))
    writer.end(runs[-1])
    assert steps == begun
    assert not writer.pending
