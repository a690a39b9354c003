"""Traces are of the steps that were asked for, from one to the next, with their stages by name."""

import gzip
import json

from fppo.assembly.run import assemble
from fppo.pipeline import train
from fppo.runs.profiles import Profiles, counts
from tests import tiny_run


def test_a_step_is_profiled_with_its_stages(tmp_path):
    tiny_run.write_task(tmp_path)
    profiles, records = Profiles(directory=tmp_path, steps=(2,)), []
    profiles.begin(1)
    with assemble(tiny_run.settings(tmp_path)) as assembly:
        observers = [profiles, lambda record: records.append(record.metrics)]
        train(assembly.run, program=assembly.program, draw=assembly.draw, steps=2, observers=observers)
    assert not profiles.running
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.name == "step_00000002.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    stages = ["gen", "reward", "annotate", "adv", "update_critic", "update_actor"]
    assert [name for name in named if name in stages] == stages  # once: it is one step
    assert [numbers.get("perf/recompiles") for numbers in records] == [None, 0.0]


def test_launches_and_waits_are_counted_on_a_gpu():
    assert counts({"aten::mm": 3}) == {}
    events = {"cudaLaunchKernel": 5, "cuLaunchKernelEx": 2, "cudaStreamSynchronize": 3, "aten::mm": 3}
    assert counts(events) == {"perf/launches": 7, "perf/host_syncs": 3}
