"""Plans against runs: the same functions on real tensors, tracked; on simulated meshes; and a process's real peak."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import partial

import attrs
import pytest
import torch

from fppo import models
from fppo.models.experts import expert_names
from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from fppo.runtime.watch import watched
from fppo.settings.learning import OptimizerSettings
from fppo.studies.plan import host, passes
from fppo.studies.plan.case import Role, config_of, hardware_of
from fppo.studies.plan.estimate import wires
from fppo.studies.plan.measured import loads_of, measured, prepared
from fppo.studies.plan.passes import model_of
from fppo.studies.plan.plan import plan, shard_numbers
from fppo.studies.plan.track import Tracker, peak_of
from fppo_kernels.context import deal
from tests.studies.plan.cases import case, config, mixture

# mesh, stage, layers that are computed again, log-probs, layers: the middle one of three has two neighbours to wait for
CASES = [
    ({}, 3, False, "chunked", 3),
    ({}, 3, "selective", "reference", 2),
    ({"shard": 2}, 1, False, "chunked", 2),
    ({"shard": 2}, 2, True, "chunked", 2),
    ({"shard": 2}, 3, False, "chunked", 3),
    pytest.param({"shard": 4}, 3, True, "reference", 2, marks=pytest.mark.slow),
    ({"sequence": 2}, 3, False, "chunked", 2),
    pytest.param({"replicate": 2, "shard": 2}, 1, "selective", "chunked", 2, marks=pytest.mark.slow),
    pytest.param({"shard": 2, "sequence": 2}, 3, False, "chunked", 2, marks=pytest.mark.slow),
    ({"tensor": 2}, 3, False, "chunked", 2),
    pytest.param({"shard": 2, "tensor": 2}, 3, True, "chunked", 2, marks=pytest.mark.slow),
    ({"pipeline": 2}, 3, False, "chunked", 2),
    pytest.param({"pipeline": 2, "shard": 2}, 3, True, "chunked", 3, marks=pytest.mark.slow),
    ({"context": 2}, 3, False, "chunked", 2),
    pytest.param({"context": 2, "tensor": 2}, 3, False, "chunked", 2, marks=pytest.mark.slow),
]
UPDATE = "update actor"


def on_the_fullest_rank(what, name):
    """The phases of a real run, on the rank that the plan is of."""
    if what.world == 1:
        return measured(what, name, Mesh.local())
    fullest = passes.fullest(what)

    def run(mesh):
        if all(mesh[axis].rank == fullest.get(axis, 0) for axis in what.mesh):
            return measured(what, name, mesh)
        state, stage, _ = prepared(what, name, mesh, Tracker())
        stage(state)  # as the others do, which nobody watches
        return []

    return next(phases for phases in simulate(what.mesh, run) if phases)


@pytest.mark.slow
def test_keys_that_travel_are_planned():
    holds(case(layers=2, mesh={"context": 2}, ring=True), UPDATE)


@pytest.mark.slow
def test_the_attention_of_a_context_rank_is_counted_by_the_keys_it_sees():
    """On a GPU, where no mask is made."""
    gpu = hardware_of("h100")
    what = case(layers=1, hardware=gpu, tokens=4096, length=4096, micro_batches=1, compute_dtype=torch.bfloat16)
    for ranks in (1, 4):
        phases = passes.run_stage(attrs.evolve(what, mesh={"context": ranks}), "log-probs")
        work = deal([4096], ranks).work[0]  # all have as much
        assert sum(phase.cost.flops["attention bfloat16"] for phase in phases) == 4 * 128 * work


def counted(phases, counter):
    return sum((getattr(phase.cost, counter) for phase in phases), Counter())


def holds(what, name):
    """The planned phases, which are those of a real run."""
    planned, real = passes.run_stage(what, name), on_the_fullest_rank(what, name)
    assert [phase.name for phase in planned] == [phase.name for phase in real]
    for a, b in zip(planned, real, strict=True):
        assert [segment.total for segment in a.segments] == pytest.approx([s.total for s in b.segments], rel=1e-3)
        assert a.cost.flops == b.cost.flops
    place, peak = peak_of(planned)
    assert (place, dict(peak.peak)) == (place, pytest.approx(dict(peak_of(real)[1].peak), rel=1e-2, abs=2048))
    for counter, most in (("sent", 8192), ("calls", 1)):
        a, b = counted(planned, counter), counted(real, counter)
        if what.size("pipeline") > 1:  # only the last stage has metrics: they are not planned for another one
            for op in (("pipeline", "broadcast", True), ("shard", "all_reduce", False)):
                assert abs(a.pop(op, 0) - b.pop(op, 0)) <= most
        assert a == b
    return planned


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stage", "again", "log_probs", "layers"), CASES)
def test_an_update_holds_and_sends_what_was_planned(mesh, stage, again, log_probs, layers):
    for rank in range(mesh.get("pipeline", 1)):
        what = case(layers=layers, mesh=mesh, stage=stage, checkpoint_layers=again, log_probs=log_probs)
        holds(attrs.evolve(what, pipeline_rank=rank), "update actor")


@pytest.mark.slow
def test_mlps_in_slices_are_planned():
    what = case(layers=2, tokens=256, length=256, micro_batches=1, checkpoint_layers="selective", mlp_slice_tokens=32)
    holds(what, UPDATE)
    whole, cut = (passes.run_stage(each, UPDATE) for each in (attrs.evolve(what, mlp_slice_tokens=None), what))
    assert peak_of(cut)[1].total < peak_of(whole)[1].total


@pytest.mark.slow
def test_attention_that_is_kept_is_planned():
    """Its output and a float32 number for each head, for no work beyond that of layers that are kept."""
    gpu = hardware_of("h100")
    what = case(layers=2, hardware=gpu, tokens=256, length=256, micro_batches=1, compute_dtype=torch.bfloat16)
    work, held = {}, {}
    for how in (False, True, "selective"):
        phases = passes.run_stage(attrs.evolve(what, checkpoint_layers=how), UPDATE)
        work[how] = sum(phase.cost.flops["attention bfloat16"] for phase in phases)
        held[how] = next(phase.start["activations"] for phase in phases if phase.name == "backward 1")
    assert work["selective"] == work[False] == work[True] * 3.5 / 4.5
    assert held["selective"] - held[True] == 2 * 256 * (2 * 128 + 4 * 4)  # of two layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        ({"expert": 2}, 3),
        ({"shard": 2, "expert": 2}, 3),
        pytest.param({"expert": 2}, 1, marks=pytest.mark.slow),
        pytest.param({"shard": 2, "expert": 2}, 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_that_go_to_their_experts_are_planned(mesh, stage):
    """With as many choices as experts, so that loads are equal."""
    holds(case(config=mixture(chosen=8), mesh=mesh, stage=stage), "update actor")


@pytest.mark.parametrize(("mesh", "dense", "of_experts"), [({"expert": 8}, 8, 8), ({"shard": 2, "expert": 4}, 8, 8)])
def test_both_axes_cut_what_is_dense_and_what_is_of_experts(mesh, dense, of_experts):
    what = case(config=mixture(chosen=2), mesh=mesh)
    model = model_of(what, "actor")
    inside = sum(model.shapes[name].numel() for name in expert_names(model))
    outside = sum(shape.numel() for shape in model.shapes.values()) - inside
    assert shard_numbers(what, "actor") == inside / of_experts + outside / dense


@pytest.mark.slow
def test_experts_that_routers_prefer_make_their_rank_hold_what_is_planned_for_their_load(monkeypatch):
    """As counted: of routers that choose the first half of the experts far more often."""
    plain = models.init_params

    def preferring(*args, **kwargs):
        params = plain(*args, **kwargs)
        for name in params:
            if name.endswith("mlp.gate.weight"):  # what the others' logits are small beside
                params[name][4:] *= 0.3
        return params

    monkeypatch.setattr(models, "init_params", preferring)
    what = case(config=mixture(chosen=2), mesh={"expert": 2}, tokens=512)
    both = simulate(what.mesh, lambda mesh: (loads_of(what, UPDATE, mesh), measured(what, UPDATE, mesh)))
    loads = both[0][0]
    assert loads == both[1][0]
    assert 1.4 < loads[0] < 1.9
    for rank, (_, real) in enumerate(both):
        planned = passes.run_stage(attrs.evolve(what, load=loads[rank]), UPDATE)
        assert peak_of(planned)[1].total == pytest.approx(peak_of(real)[1].total, rel=0.02)
        sent = [counted(phases, "sent")["expert", "all_to_all", True] for phases in (planned, real)]
        assert sent[0] == pytest.approx(sent[1], rel=0.05)


@pytest.mark.slow
def test_the_ranks_of_an_expert_axis_send_a_token_to_each_of_its_experts_and_back():
    """2 k N H (e - 1) / e numbers forward, and as many backward; of a rank with more tokens, more of its own stay,
    and more of others go back."""
    what = case(config=mixture(chosen=2), mesh={"expert": 4}, micro_batches=2)
    sent, held = [], []
    for load in (1.0, 1.5):
        phases = passes.run_stage(attrs.evolve(what, load=load), "update actor")
        sent.append(counted(phases, "sent")["expert", "all_to_all", True] // 2)  # of a pass
        held.append(peak_of(phases)[1].peak["activations"])
    counts = 2 * 8 * 8 * 3 // 4  # of two layers, how many rows go to each of 8 experts
    one_way = 2 * 2 * 256 * 128 * 4 * 3 // 4
    # of 2 * 256 choices of its tokens 1.5 / 4 stay; of 3 * 256 * 2 of others' it answers as many
    assert sent == [4 * one_way + counts, 2 * (1 - 1.5 / 4 + 1.5 * 3 / 4) / (3 / 4) * one_way + counts]
    assert held[1] > 1.05 * held[0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"shard": 2}])
@pytest.mark.parametrize("name", ["log-probs", "values", "update critic"])
def test_the_other_stages_hold_and_send_what_was_planned(mesh, name):
    holds(case(layers=2, mesh=mesh), name)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "offload"), [({"shard": 2}, "all"), ({"sequence": 2}, "none")])
def test_a_reward_model_of_its_own_size_holds_and_sends_what_was_planned(mesh, offload):
    what = case(layers=2, mesh=mesh, offload=offload, reward_model=config(hidden_size=64, num_hidden_layers=1))
    holds(what, "reward model")
    planned, model = plan(what), model_of(what, "reward model")
    assert planned.parameters["reward model"] == sum(shape.numel() for shape in model.shapes.values())
    held = 4 * shard_numbers(what, "reward model") if offload == "none" else 0
    assert planned.rest["reward model's parameters"] == held
    assert planned.stages[0].name == "reward model"
    without = plan(attrs.evolve(what, reward_model=None))
    for stage, plain in zip(planned.stages[1:], without.stages, strict=True):
        assert stage.total == plain.total + held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "name"),
    [
        ("all", "log-probs"),
        ("moments", "update actor"),
        ("optimizer_step", "log-probs"),
        ("optimizer_step", "update actor"),
    ],
)
def test_state_on_the_host_is_planned(offload, name):
    what = case(layers=2, mesh={"shard": 2}, offload=offload)
    holds(what, name)
    state = 4 * shard_numbers(what, "actor")
    plain = passes.run_stage(attrs.evolve(what, offload="none"), name)[-1].segments[-1]
    less = passes.run_stage(what, name)[-1].segments[0].peak
    assert plain.peak["state"] == pytest.approx(3 * state, rel=0.001)
    assert less.get("state", 0) == pytest.approx(state if offload == "moments" else 0, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "moments", "optimizer_step"])
def test_moments_in_8_bits_are_planned(offload):
    optimizer = OptimizerSettings(name="adamw_8bit")
    holds(
        case(layers=2, mesh={"shard": 2}, offload=offload, optimizer=optimizer, critic=False, reference=False), UPDATE
    )


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, pytest.param("selective", marks=pytest.mark.slow)])
def test_activations_on_the_host_are_planned(monkeypatch, again):
    """A window of them is on the device, and as much on the host as goes there."""
    small = {"minimum_bytes": 1 << 12, "window_bytes": 1 << 18}
    monkeypatch.setattr(passes, "HostActivations", partial(passes.HostActivations, **small))
    what = case(offload_activations=True, checkpoint_layers=again, critic=False, reference=False)
    phases = holds(what, UPDATE)
    plain = passes.run_stage(attrs.evolve(what, offload_activations=False), UPDATE)
    before, after = ({p.name: p.start.get("activations", 0) for p in each}["backward 1"] for each in (plain, phases))
    forward, backward = (
        next(p.cost.other for p in phases if p.name == f"{name} 1") for name in ("forward", "backward")
    )
    assert forward["away"] == forward["host"] > before - after > 0.5 * before
    assert backward["away"] == 0 < 0.5 * forward["away"] < backward["host"]
    planned = plan(attrs.evolve(what, full=False))
    assert planned.host.rest[host.AWAY] == forward["away"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "update critic"])
def test_a_role_of_its_own_holds_what_was_planned(name):
    roles = {
        "critic": Role(tokens=128, compute_dtype="bfloat16", checkpoint_layers=True, offload="moments"),
        "reference": Role(dtype=torch.bfloat16, offload="none"),
    }
    what = case(layers=2, mesh={"shard": 2}, roles=roles, forward_tokens=512, offload="all")
    holds(what.at(name), name)


@pytest.mark.slow
def test_bfloat16_passes_hold_what_was_planned():
    holds(case(layers=2, mesh={"shard": 2}, compute_dtype=torch.bfloat16), UPDATE)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_parameters_gradients_and_moments_are_an_nth_of_all(ranks):
    what = case(layers=1, mesh={"shard": ranks}, micro_batches=1)
    total = 4 * sum(shape.numel() for shape in model_of(what, "actor").shapes.values())
    for phases in simulate(what.mesh, lambda mesh: measured(what, "update actor", mesh)):
        after = phases[-1].segments[0].peak
        assert after["state"] + after["gradients"] == pytest.approx(4 * total / ranks, rel=0.02)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "llama-3.1-70b"])
def test_a_64th_is_planned_as_one(name):
    what = case(config=config_of(name)[1], mesh={"shard": 64})
    model = model_of(what, "actor")
    total = sum(shape.numel() for shape in model.shapes.values())
    assert shard_numbers(what, "actor") == pytest.approx(total / 64, rel=0.02)


@pytest.mark.slow
def test_a_watch_counts_the_bytes_that_were_planned():
    what = case(layers=2, mesh={"replicate": 2, "shard": 2, "sequence": 2}, stage=3)

    def run(mesh):
        mesh, watch = watched(mesh)
        state, stage, _ = prepared(what, "update actor", mesh, Tracker())
        stage(state)
        return {axis: (traffic.calls, traffic.bytes) for axis, traffic in watch.traffic().items()}

    planned = wires(passes.run_stage(what, "update actor"), attrs.evolve(what, micro_batches=passes.PASSES))
    real = simulate(what.mesh, run)[passes.fullest_slice(what)]
    assert {axis: (wire.calls, wire.sent) for axis, wire in planned.items()} == real


@pytest.mark.slow
def test_later_passes_are_like_the_second(monkeypatch):
    what = case(layers=2, mesh={"shard": 2, "sequence": 2}, stage=3, micro_batches=4)
    two = passes.run_stage(what, "update actor")
    monkeypatch.setattr(passes, "PASSES", 4)
    four = passes.run_stage(what, "update actor")
    assert peak_of(four)[1].total == pytest.approx(peak_of(two)[1].total, rel=0.01)
    planned, real = wires(two, what), counted(four, "sent")
    for axis, wire in planned.items():
        sent = sum(size for (name, *_), size in real.items() if name == axis)
        assert wire.sent == pytest.approx(sent, abs=64)  # numbers of rows


PROCESS = """
import gc
from pathlib import Path
import attrs
import torch
from fppo.studies.plan import passes
from fppo.studies.plan.measured import prepared
from fppo.studies.plan.track import Tracker, peak_of
from fppo.runtime.mesh import Mesh
from tests.studies.plan.cases import case, config, mixture

def held(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

torch.set_num_threads(1)
what = case(config=config(hidden_size=256, intermediate_size=1024), tokens=2048, length=256)
small = attrs.evolve(what, config=config(num_hidden_layers=1), tokens=128)
state, run, batch = prepared(small, "update actor", Mesh.local(), Tracker())
run(state)  # what torch takes once
del state, run, batch
gc.collect()
before = held("VmRSS")
state, run, batch = prepared(what, "update actor", Mesh.local(), Tracker())
Path("/proc/self/clear_refs").write_text("5")
run(state)
taken = held("VmHWM") - before
planned = peak_of(passes.run_stage(what, "update actor"))[1].total
print(planned / taken)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of a process is read from /proc")
def test_a_process_takes_what_was_planned():
    """With every tensor mapped on its own: what malloc keeps of freed memory is no tensor's."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, env=environment, check=True)
    assert float(found.stdout) == pytest.approx(1.0, abs=0.1)
