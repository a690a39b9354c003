"""The file of who worked when: as long as it may be, and without the steps that are made again."""

from types import SimpleNamespace

from fppo.pipeline.timing import StageSpan
from fppo.pipeline.train import StepRecord
from fppo.runs import jsonl
from fppo.runs.observers import KEPT, Tracer


def record(step):
    return StepRecord(
        run=SimpleNamespace(step=step), experience=None, metrics={}, spans=(StageSpan("gen", float(step), 0.5),)
    )


def test_it_holds_the_last_steps(tmp_path):
    path = tmp_path / "trace" / "rank_00000.jsonl"
    tracer, most = Tracer(path, list), 0
    for step in range(1, 3 * KEPT + 1):
        tracer(record(step))
        held = [line["step"] for line in jsonl.read(path)] if step % 10 == 1 else []
        assert held == list(range(step + 1 - len(held), step + 1))
        most = max(most, len(held))
        assert len(held) >= min(step, KEPT) or not held
    assert KEPT < most <= 2 * KEPT
    tracer.close()
    again = Tracer(path, list, first_step=3 * KEPT)
    again(record(3 * KEPT))
    again.close()
    assert [line["step"] for line in jsonl.read(path)] == list(range(2 * KEPT, 3 * KEPT + 1))
