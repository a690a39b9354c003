"""What the records of a run on several ranks say of each."""

import torch

from fppo.key import Key
from fppo.pipeline.program import RunState
from fppo.pipeline.train import StepRecord
from fppo.runs.observers import gauged_by
from fppo.runtime.simulate import simulate
from fppo.runtime.watch import Traffic
from fppo.steps.train_state import TrainState


def test_records_have_the_gauges_of_all_ranks():
    run = RunState(actor=TrainState(params={}, opt=None, step=0), key=Key(0))

    def on_rank(mesh):
        rank = mesh["shard"].rank
        traffic = {"shard": Traffic(seconds=1.0 + rank, bytes=2**30)}
        observe = gauged_by(mesh, torch.device("cpu"), lambda: traffic)
        return observe(StepRecord(run=run, experience=None, metrics={"critic/score/mean": 0.5}))

    for numbers in simulate({"shard": 2}, on_rank):
        assert numbers["perf/comm_s/shard"] == 2.0  # of the rank that waited longest
        assert numbers["perf/comm_gb/shard"] == 1.0  # GiB
        assert {f"perf/cpu_memory_used_gb/rank_{rank}" for rank in (0, 1)} <= numbers.keys()
