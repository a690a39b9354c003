"""Memory of a step by stage and kind: each number follows from its definition, and looking changes nothing."""

from __future__ import annotations

import gzip
import inspect
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from fppo.commands import actions
from fppo.key import Key
from fppo.pipeline.program import RunState
from fppo.runs import jsonl, memory
from fppo.runs.memory import StageMemory, StateBytes
from fppo.runs.observers import Profiles
from fppo.settings import files
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from tests import tiny_run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STATE = StateBytes(parameters=1000, moments=2000, gradients={"update_actor": 400})


def allocated(time: float, size: int, address: int, *, kind: int = 0, total: int = 0) -> dict[str, Any]:
    """An allocation, or with a negative size a release, as kineto writes it."""
    args = {"Bytes": size, "Addr": address, "Device Type": kind, "Device Id": -1, "Total Allocated": total}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": time, "args": args}


def span(name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start}


EVENTS = [
    span("gen", 10, 30),
    span("keys and values", 12, 14),
    span("update_actor", 40, 60),
    span("aten::mm", 40, 60),
    allocated(5, 7, 1),  # before the first stage, and there in all of them
    allocated(13, 300, 2),  # the engine's cache
    allocated(15, 50, 3),
    allocated(16, -50, 3),
    allocated(20, 20, 4),
    allocated(25, -99, 9),  # allocated before the trace: not known
    allocated(35, -300, 2),
    allocated(36, 5000, 5),  # between stages
    allocated(37, -5000, 5),
    allocated(45, 400, 6),
    allocated(46, 100, 7),
    allocated(46.5, 8888, 8, kind=1),  # another device's
    allocated(47, -100, 7),
    allocated(50, -400, 6),
]


def test_a_stage_has_the_parts_of_its_peak():
    gen, update = memory.stages_of(EVENTS, {"gen", "update_actor", "ref"}, STATE, CPU)
    assert gen == StageMemory(
        stage="gen", parameters=1000, gradients=0, moments=2000, cache=300, activations=57, peak=3357
    )
    assert update == StageMemory(
        stage="update_actor", parameters=1000, gradients=400, moments=2000, cache=0, activations=127, peak=3527
    )


def test_a_stage_without_allocations_has_what_was_there_when_it_began():
    events = [allocated(1, 30, 1), span("adv", 2, 3), allocated(4, 500, 2)]
    (adv,) = memory.stages_of(events, {"adv"}, STATE, CPU)
    assert (adv.activations, adv.peak) == (30, 3030)
    (adv,) = memory.stages_of([span("adv", 2, 3)], {"adv"}, STATE, CPU)
    assert (adv.activations, adv.peak) == (0, 3000)


def test_a_stage_that_ran_twice_has_its_larger_peak():
    events = [span("gen", 1, 3), allocated(2, 80, 1), allocated(4, -80, 1), span("gen", 5, 7), allocated(6, 20, 1)]
    (gen,) = memory.stages_of(events, {"gen"}, STATE, CPU)
    assert gen.peak == 3080


def test_an_accelerator_s_trace_says_the_whole_itself():
    """Also what was allocated before, and freed since; parts are no larger than the whole."""
    events = [
        span("update_actor", 1, 5),
        allocated(2, 900, 1, kind=1, total=3100),
        allocated(3, -600, 9, kind=1, total=2500),
        allocated(4, 10**6, 3, total=10**6),  # the host's
    ]
    (row,) = memory.stages_of(events, {"update_actor"}, STATE, CUDA)
    assert (row.gradients, row.activations, row.peak) == (100, 0, 3100)


def test_the_state_is_counted_once_and_on_its_device_alone():
    weight, away = torch.zeros(3, 5), torch.zeros(7, device="meta")
    actor = init_state({"a": weight, "b": torch.zeros(2, dtype=torch.bfloat16), "c": away}, adamw(1e-3))
    run = RunState(actor=actor, key=Key(0), ref={"a": weight, "b": torch.zeros(4)})
    found = memory.held(run, [{"base": torch.zeros(8, dtype=torch.int8)}], CPU)
    own = 3 * 5 * 4 + 2 * 2
    assert found.gradients == {"update_actor": own}
    assert found.parameters == own + 4 * 4 + 8
    assert found.moments == 2 * own
    assert found.total == found.parameters + found.moments


def test_damaged_files_are_left_out_and_steps_can_be_chosen(tmp_path):
    (tmp_path / memory.MEMORY).mkdir()
    row = memory.stages_of(EVENTS, {"gen"}, STATE, CPU)
    for step, rank in ((2, 0), (2, 1), (4, 0)):
        larger = [attrs.evolve(x, peak=x.peak + 10 * rank) for x in row]
        memory.write(tmp_path / memory.MEMORY / f"step_{step:08d}_rank_{rank}.json", step, larger)
    for number, text in enumerate(("", "[]", '{"step": 3}', '{"step": 3, "stages": [{"stage": "gen"}]}')):
        (tmp_path / memory.MEMORY / f"step_0000000{5 + number}.json").write_text(text)
    (tmp_path / memory.MEMORY / "step_00000002_rank_0.json.gz").write_bytes(b"")
    assert [(each.step, each.rank) for each in memory.read(tmp_path)] == [(2, 0), (2, 1), (4, 0)]
    assert [each.step for each in memory.read(tmp_path, (4, 7))] == [4]
    assert memory.peaks(memory.read(tmp_path)) == {"gen": row[0].peak + 10}
    assert memory.read(tmp_path / "none") == []


def test_a_cuda_device_writes_torch_s_own_snapshot(tmp_path, monkeypatch):
    """No GPU is here: the calls are held against the functions of torch that is installed."""
    calls: list[Any] = []
    for name in ("_record_memory_history", "_dump_snapshot"):
        signature = inspect.signature(getattr(torch.cuda.memory, name))
        monkeypatch.setattr(
            torch.cuda.memory, name, lambda *x, _s=signature, **y: calls.append(dict(_s.bind(*x, **y).arguments))
        )
    for device in (CPU, CUDA):
        memory.record_history(device, on=True)
        memory.dump(device, tmp_path / "a.pickle")
        memory.record_history(device, on=False)
    on, dumped, off = calls
    assert (on["enabled"], off["enabled"]) == ("all", None)
    assert dumped == {"filename": str(tmp_path / "a.pickle")}


def test_a_device_that_is_not_traced_is_refused():
    memory.check_device(CUDA)
    with pytest.raises(ValueError, match=r"^log\.memory_steps: torch traces no memory on mps; leave it out"):
        memory.check_device(torch.device("mps"))


def test_updates_in_a_pool_are_not_looked_at(tmp_path):
    pools = {"placement__pools": {"a": {"ranks": 2}}, "placement__roles__actor": "a"}
    with pytest.raises(files.SettingsError, match=r"log\.memory_steps = .*: the updates run in a pool"):
        tiny_run.settings(tmp_path, log__memory_steps=[2], **pools)


def lines_of(run: Path) -> list[dict[str, float]]:
    lines = jsonl.read(run / "metrics.jsonl")
    return [{name: x for name, x in line.items() if not name.startswith(tiny_run.UNLIKE)} for line in lines]


@pytest.mark.slow
def test_a_run_is_looked_at_and_has_the_same_numbers(tmp_path, capsys):
    """Three models of float32; the step after has a profile of its own, and one more is both."""
    tiny_run.write_task(tmp_path)
    how = {"steps": 3, "checkpoint__every": 0, "actor__epochs": 1}
    without = tiny_run.settings(tmp_path, output_dir=str(tmp_path / "without"), **how)
    looked = tiny_run.settings(tmp_path, log__memory_steps=[1, 3], log__profile_steps=[2, 3], **how)
    for settings in (without, looked):
        assert actions.train(settings) == 0
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "without")
    assert not (tmp_path / "without" / "memory").exists()
    names = [path.name for path in sorted((tmp_path / "run" / "memory").iterdir())]
    assert names == [f"step_0000000{step}.{ending}" for step in (1, 3) for ending in ("json", "json.gz")]
    assert len(list((tmp_path / "run" / "profiles").iterdir())) == 2

    weights = load_file(tmp_path / "run" / "checkpoints" / "step_00000003" / "shard_00000.safetensors")
    places = {"actor": ".actor.params", "critic": ".critic.params", "ref": ".ref"}
    state = {
        role: sum(x.numel() * x.itemsize for name, x in weights.items() if name.startswith(place))
        for role, place in places.items()
    }
    assert min(state.values()) > 10_000
    found = memory.read(tmp_path / "run")
    assert [each.step for each in found] == [1, 3]
    for each in found:
        rows = {row.stage: row for row in each.stages}
        assert {"gen", "old_log_prob", "ref", "values", "update_critic", "update_actor"} <= set(rows)
        for row in each.stages:
            assert row.parameters == state["actor"] + state["critic"] + state["ref"]
            assert row.moments == 2 * (state["actor"] + state["critic"])
            parts = row.parameters + row.gradients + row.moments + row.cache + row.activations
            assert row.peak == parts
            assert row.activations > 0
        gradients = {row.stage: row.gradients for row in each.stages if row.gradients}
        assert gradients == {"update_actor": state["actor"], "update_critic": state["critic"]}
        # keys and values of the batch's rows, float32, of at least a prompt and a response
        assert rows["gen"].cache >= 8 * (4 + 3) * 2 * 4
    trace = json.loads(gzip.decompress((tmp_path / "run" / "memory" / "step_00000003.json.gz").read_bytes()))
    assert any(event.get("name") == "[memory]" for event in trace["traceEvents"])
    said = capsys.readouterr().out
    assert said.count("as fppo check and fppo plan count them") == 1  # the run that was looked at
    assert "update actor" in said


def test_nothing_is_traced_without_the_setting(tmp_path):
    profiles = Profiles(directory=tmp_path)
    profiles.begin(1)
    assert profiles.running == []
    assert not list(tmp_path.iterdir())
