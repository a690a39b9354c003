"""The line of a step in the file of digests, what is compared of it, and what is kept of a step that went wrong."""

from __future__ import annotations

import copy
import json
import sys

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import metrics, tree
from fppo.batch import Experience
from fppo.key import Key
from fppo.pipeline import replay as replays
from fppo.pipeline.program import RunState
from fppo.pipeline.replay import (
    Difference,
    DifferingLeaf,
    digests_of,
    dump,
    first_difference,
    kind_recorded,
    record_line,
    replay,
)
from fppo.pipeline.train import Evaluation, StepRecord, Watching, repeated
from fppo.runtime import digests
from fppo.runtime.mesh import LOCAL
from fppo.runtime.sketches import Size, size_of, sketches
from fppo.steps.train_state import TrainState
from tests import tiny

CPU = torch.device("cpu")


def run_of(step: int, value: float = 0.0) -> RunState:
    part = TrainState(params={"w": torch.full((3,), step + value)}, opt=None, step=step)
    return RunState(actor=part, critic=part, key=Key(0), step=step)


def record(step: int = 4) -> StepRecord:
    return StepRecord(run=run_of(step), experience=tiny.experience(step, 4), metrics={})


@pytest.mark.parametrize(("kind", "device"), [(None, None), ("sums", None), ("blake2b", CPU)])
def test_a_line_has_the_digests_of_the_batch_and_of_the_state(kind, device):
    one = record()
    line = record_line(one, LOCAL, kind=kind, device=device)
    used = kind or "blake2b"  # of one process on a CPU
    batch, result = (digests.digest(x, used, device=CPU) for x in (one.experience, one.run))
    sizes = {"batch": sketches(one.experience), "result": sketches(one.run)}
    expected = {"step": 4, "state": tree.combine(result), "batch": batch, "result": result, "sizes": sizes}
    assert line == expected | ({"kind": "sums"} if used == "sums" else {})
    assert kind_recorded(line) == used
    assert digests_of(one.run, one.experience, kind=kind, device=device) == {"batch": batch, "result": result}


def test_a_state_that_is_elsewhere_is_digested_there():
    asked = []
    line = record_line(record(), of_state=lambda run, kind: asked.append((run.step, kind)) or {".x": "1"}, kind="sums")
    assert asked == [(4, "sums")]
    assert (line["result"], line["state"]) == ({".x": "1"}, tree.combine({".x": "1"}))


def steps(run):
    while True:
        run = run_of(run.step + 1)
        yield run, tiny.experience(run.step, 4), {}


@pytest.mark.parametrize("kind", ["blake2b", "sums"])
def test_a_replay_compares_each_step_with_its_line_by_the_lines_own_kind(kind):
    lines = {step: record_line(record(step), kind=kind) for step in (2, 3, 4)}
    how = {"begin": steps, "until": 4}
    found = list(replay(run_of(0), recorded=lines, **how))
    assert [(run.step, difference) for run, difference in found] == [(step, None) for step in (1, 2, 3, 4)]
    for part, leaf in (("batch", ".advantages"), ("result", ".critic.params['w']")):
        wrong = copy.deepcopy(lines)
        wrong[3][part][leaf] = "0"
        found = [difference for _, difference in replay(run_of(0), recorded=wrong, **how)]
        size = size_of(wrong[3]["sizes"][part][leaf], lines[3]["sizes"][part][leaf])
        assert size is not None
        assert size.apart == 0.0
        assert found == [None, None, Difference(3, (DifferingLeaf(part, leaf, size),)), None]


def test_a_difference_has_its_size_and_one_at_rounding_that_metrics_alone_read_is_none_of_the_step():
    """The state after the step shows what read a column: where it is equal bit for bit, metrics alone did."""

    def lines_with(change, actor=0.0):
        one = record(3)
        experience = attrs.evolve(one.experience, old_log_probs=change(one.experience.old_log_probs))
        return record_line(attrs.evolve(one, experience=experience, run=run_of(3, actor)))

    def difference(new):
        return first_difference(3, lines_with(lambda x: x), new)

    def says(new, *words):
        found = difference(new)
        assert found is not None
        assert all(word in str(found) for word in words), str(found)
        return found

    assert difference(lines_with(lambda x: x)) is None
    near = lines_with(lambda x: x + 1e-7)
    rounded = says(near, "batch differs first in .old_log_probs, by about ", "e-08 in numbers of")
    assert rounded.is_of_metrics("float32")
    coarse = says(lines_with(lambda x: x + 1e-3), "by about ", "e-04 in numbers of")
    assert not coarse.is_of_metrics("float32")
    assert coarse.is_of_metrics("bfloat16")
    both = says(lines_with(lambda x: x + 1e-7, 1e-6), "in all 1 leaves of its batch and 2 leaves of its result")
    assert not both.is_of_metrics("float32")
    unknown = dict(near)
    del unknown["sizes"]
    assert not says(unknown, "batch differs first in .old_log_probs").is_of_metrics("float32")
    tokens = lines_with(lambda x: x)
    tokens["batch"] = {**tokens["batch"], ".tokens": "others"}
    assert not says(tokens, "batch differs first in .tokens").is_of_metrics("float32")


@pytest.mark.parametrize("shape", [(1,), (7,), (40, 33), (2_500_000,)])
def test_sketches_tell_the_size_of_a_difference_within_a_factor_of_about_two(shape):
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    for scale in (1e-6, 1e-3, 3.0):
        found = size_of(*(sketches({"x": y})["['x']"] for y in (x, x + scale * noise)))
        assert found is not None
        expected = Size(scale * noise.double().square().mean().sqrt().item(), x.double().square().mean().sqrt().item())
        assert expected.apart / 3 < found.apart < expected.apart * 3
        assert 0.9 < found.of / max(expected.of, found.of) <= 1.0
    assert sketches({"x": x.long(), "y": torch.full((3,), torch.nan), "z": x[:0]}) == {}
    assert size_of(sketches({"x": x})["['x']"], [2.0, 1.0, 0.0]) is None


def test_a_step_without_a_record_is_named_by_the_first_that_lacks_one():
    recorded = {step: {} for step in (1, 2, 3, 5, 7, 8)}
    for until, missing in ((9, 9), (12, 9), (6, 6), (4, 4)):
        with pytest.raises(ValueError, match=rf"no record of step {missing}; the recorded steps are 1 to 3, 5, 7 to 8"):
            next(replay(run_of(0), begin=steps, recorded=recorded, until=until))
    with pytest.raises(ValueError, match="no record of step 11; the recorded steps are 1 to 3"):
        next(replay(run_of(10), begin=steps, recorded=recorded, until=12))
    with pytest.raises(ValueError, match="no record of step 1; the recorded steps are none"):
        next(replay(run_of(0), begin=steps, recorded={}, until=2))


def test_the_batch_of_a_step_that_went_wrong_is_kept_with_its_line(tmp_path):
    one, line = record(7), {"step": 7, "state": "x"}
    path = dump(one, line, tmp_path / "deep" / "dumps")
    assert path == tmp_path / "deep" / "dumps" / "step_00000007.safetensors"
    assert tree.digest(batches.load(Experience, path)) == tree.digest(one.experience)
    assert json.loads((path.parent / "step_00000007.json").read_text()) == line
    assert sorted(x.name for x in path.parent.iterdir()) == ["step_00000007.json", "step_00000007.safetensors"]
    assert replays.DIGESTS == "digests.jsonl"


class Clock:
    """A clock that turns only when told."""

    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return self.seconds


def test_a_record_has_the_numbers_and_the_spans_of_its_step_and_of_the_observers_before(monkeypatch):
    """Three steps of 8 s, 3 of them in a stage; a first observer takes 1, and a second one 4 of the next step."""
    clock = Clock()
    module = sys.modules["fppo.pipeline.train"]
    monkeypatch.setattr(module, "now", clock.now)
    monkeypatch.setattr(module, "memory_metrics", lambda: {"perf/memory": 5.0})
    seen = []

    def step(run):
        start = clock.seconds
        clock.seconds += 8.0
        report = {"timing_s/gen": metrics.spent((start + 2, 3.0)), "perf/total_num_tokens": metrics.mean(60.0)}
        return attrs.evolve(run, step=run.step + 1), "batch", report

    def first(record):
        seen.append((record.run.step, record.experience, dict(record.metrics), record.spans))
        clock.seconds += 1.0
        return {"timing_s/save": 1.0, "own": float(record.run.step)}

    def second(record):
        seen.append((record.run.step, record.experience, dict(record.metrics), record.spans))
        clock.seconds += 4.0
        return {"timing_s/log": 4.0}

    def evaluate(run):
        clock.seconds += 16.0
        return {"val": metrics.mean(float(run.step))}

    stops = []

    def stop():
        stops.append(clock.seconds)
        return len(stops) == 4  # asked before the first step, too

    evaluation = Evaluation(evaluate, every=2, before=False)
    watching = Watching(steps=9, observers=[first, second], evaluation=evaluation, stop=stop)
    assert [run.step for run, _, _ in repeated(step, run_of(0), watching=watching)] == [1, 2, 3]
    assert [(step, rows) for step, rows, *_ in seen] == [(n, "batch") for n in (1, 1, 2, 2, 3, 3)]
    # 8 s and an observer; the second step has the second observer of the first, and an evaluation
    wholes = [8.0, 9.0, 4 + 8 + 16.0, 4 + 8 + 16 + 1.0, 4 + 8.0, 4 + 8 + 1.0]
    inside = [3.0, 4.0, 4 + 3 + 16.0, 4 + 3 + 16 + 1.0, 4 + 3.0, 4 + 3 + 1.0]
    for (step, _, numbers, spans), whole, stages in zip(seen, wholes, inside, strict=True):
        assert numbers["timing_s/step"] == numbers["perf/time_per_step"] == whole
        assert numbers["timing_s/outside"] == whole - stages
        assert numbers["perf/throughput"] == 60.0 / whole
        assert (numbers["perf/memory"], numbers["training/global_step"]) == (5.0, float(step))
        assert numbers.get("val") == (2.0 if step == 2 else None)
        assert spans[0][0] == "step"
        assert spans[0].seconds == whole
    assert [numbers.get("own") for _, _, numbers, _ in seen] == [None, 1.0, None, 2.0, None, 3.0]
    assert [numbers.get("timing_s/log") for _, _, numbers, _ in seen] == [None, None, 4.0, 4.0, 4.0, 4.0]
    assert [numbers.get("timing_s/save") for _, _, numbers, _ in seen] == [None, 1.0, None, 1.0, None, 1.0]
    assert [[(span.stage, span.start, span.seconds) for span in spans[1:]] for *_, spans in seen[:4]] == [
        [("gen", 2.0, 3.0)],
        [("gen", 2.0, 3.0), ("save", 8.0, 1.0)],
        [("log", 9.0, 4.0), ("gen", 15.0, 3.0), ("testing", 21.0, 16.0)],
        [("log", 9.0, 4.0), ("gen", 15.0, 3.0), ("testing", 21.0, 16.0), ("save", 37.0, 1.0)],
    ]
    assert [spans[0].start for *_, spans in seen] == [0.0, 0.0, 9.0, 9.0, 38.0, 38.0]
