"""The rollout and the host's memory that are planned are what engines, shards and checkpoints of small models have."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import pytest
import torch

from fppo import models, tree
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.models import flops
from fppo.models.adapted import Lora
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask
from fppo.rollout.engine import Sampling as Drawn
from fppo.rollout.sync import reshard
from fppo.runtime import checkpoint
from fppo.runtime.mesh import LOCAL
from fppo.runtime.simulate import simulate
from fppo.steps.train_state import init_state
from fppo.studies.plan import host, passes
from fppo.studies.plan.case import GIB, PlannedSampling, Role, hardware_of, overhead
from fppo.studies.plan.estimate import ATTENTION_SHARE, COPY_SHARE, MATMUL_SHARE
from fppo.studies.plan.measured import telling
from fppo.studies.plan.passes import Built, model_of
from fppo.studies.plan.plan import plan
from fppo.studies.plan.rollout import KEYS, MOVING, OUTSIDE, WEIGHTS, met_weights, rollout_of
from fppo.studies.plan.track import STATE, Tracker, peak_of
from fppo_kernels.table import Kernels
from tests.studies.plan.cases import case, mixture

N = 2


def sampled(what, mesh):
    """The bytes by which a real engine on this rank exceeds the parameters where most is held, and what it sends."""
    sent: list[int] = []
    mesh = attrs.evolve(mesh, sharding=what.sharding if what.shards > 1 else None)
    mesh = telling(mesh, lambda axis, op, size, *_: sent.append(size if op == "all_gather" else 0))
    model = models.place(model_of(what, "actor"), mesh)
    params = models.own_params(model, models.init_params(model, Key(0)), mesh)
    count, prompt = what.sampling.sequences // N, what.length - what.response_tokens
    count //= what.world // mesh["tensor"].size
    blank = Column([None] * count)
    prompts = Prompts(
        tokens=torch.randint(3, 99, (count, prompt)),
        attention_mask=torch.ones(count, prompt, dtype=torch.bool),
        row_ids=torch.arange(count),
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
    )
    engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0, mesh=mesh, cache_bytes=_bound(what))
    tracker = Tracker()
    tracker.hold(params.values(), STATE)
    with tracker:
        engine.generate(params, Ask(prompts, Drawn(n=N, max_tokens=what.response_tokens, temperature=0.7), Key(1)))
    _, peak = peak_of(tracker.phases())
    return peak.total - peak.peak[STATE], sum(sent)


def _bound(what):
    return None if what.sampling.cache is None else int(what.sampling.cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes", "within"),
    [
        ({}, {}, 0.02),
        ({}, {"cache": 100_000.0}, 0.06),  # it is held while later prompts are read, too
        ({"shard": 2}, {}, 0.02),
        pytest.param({"shard": 2}, {"compute_dtype": torch.bfloat16}, 0.02, marks=pytest.mark.slow),
        pytest.param({}, {"compute_dtype": torch.bfloat16}, 0.02, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, {}, 0.15, marks=pytest.mark.slow),
    ],
)
def test_an_engine_holds_and_gathers_what_was_planned(mesh, changes, within):
    sampling = PlannedSampling(sequences=8, n=N, cache=changes.get("cache"))
    changes = {name: value for name, value in changes.items() if name != "cache"}
    what = case(mesh=mesh, critic=False, reference=False, sampling=sampling, length=32, **changes)
    planned = rollout_of(what, {}, Built())
    real, sent = sampled(what, LOCAL) if not mesh else simulate(mesh, lambda mesh: sampled(what, mesh))[0]
    assert real == pytest.approx(planned.total, rel=within)
    assert "tensor" in mesh or sent == planned.gathered
    assert planned.together == (2 if sampling.cache else 8 // what.world * what.size("tensor"))


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_the_time_of_a_rollout_is_that_of_its_steps(engine):
    gpu = hardware_of("h100")
    what = case(
        hardware=gpu, compute_dtype=torch.bfloat16, length=96, sampling=PlannedSampling(sequences=8, engine=engine)
    )
    model, response = model_of(what, "actor"), what.response_tokens
    prompt = what.length - response
    column, bandwidth = 2 * 2 * 64 * 3, COPY_SHARE * gpu.bandwidth  # of three layers, in 16 bits
    layers = sum(x.numel() for n, x in model.whole_shapes.items() if ".layers." in n and len(x) == 2)
    weights = layers + 2048 * 128
    seconds = 0.0
    for token in range(1, response + 1):
        seen = 8 * (prompt + token)
        seconds += max(2 * weights / bandwidth, 2 * 8 * weights / (gpu.flops * MATMUL_SHARE))
        seconds += max(seen * column / bandwidth, 3 * 4 * 128 * seen / (gpu.flops * ATTENTION_SHARE))
    planned = rollout_of(what, {}, Built())
    assert planned.decode == pytest.approx(seconds)
    needed = flops.forward_flops(model, [prompt] * 8, head_tokens=8) / (gpu.flops * MATMUL_SHARE)
    whole = sum(x.numel() for x in model.whole_shapes.values())
    assert planned.prefill == pytest.approx(max(needed, 2 * whole / bandwidth))


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_prompts_take_several_gpus_a_share_of_the_time(cut):
    """Many prompts, so that products take longer than reading the weights."""
    gpu = hardware_of("h100")
    sampling = PlannedSampling(sequences=256, engine="vllm", tensor=cut, pool=1)
    what = case(hardware=gpu, compute_dtype=torch.bfloat16, length=96, sampling=sampling)
    prompts = [what.length - what.response_tokens] * 256
    needed = flops.forward_flops(model_of(what, "actor"), prompts, head_tokens=256) / (gpu.flops * MATMUL_SHARE)
    assert rollout_of(what, {}, Built()).prefill == pytest.approx(needed / cut)


def test_rows_meet_more_experts_the_more_they_are():
    model = model_of(case(config=mixture(chosen=2)), "actor")
    one = sum(flops.layer_weights(model)) + flops.head_weights(model)
    routed = 2 * 8 * 3 * 128 * 64
    assert met_weights(model, 1) == one
    assert met_weights(model, 2) == pytest.approx(one + routed * (0.25 - 0.0625))
    assert met_weights(model, 1000) == pytest.approx(one + routed * 0.75)


@pytest.mark.slow
def test_vllm_takes_its_share_of_the_memory_from_updates_unless_it_sleeps_or_is_elsewhere():
    gpu = hardware_of("h100", {"memory": 8 * GIB})
    shared = PlannedSampling(engine="vllm", share=0.25, sequences=4096, n=4)
    what = case(layers=1, hardware=gpu, micro_batches=1, critic=False, reference=False, sampling=shared)
    found = plan(what)
    rest = found.rest
    numbers = sum(x.numel() for x in model_of(what, "actor").whole_shapes.values())
    assert found.rollout.memory[WEIGHTS] == found.rollout.sent == 4 * numbers
    assert found.rollout.total == pytest.approx(sum(rest.values()) + 2 * GIB + overhead(gpu, 0, 0))
    assert found.needs == found.peak.total + found.rollout.stays == pytest.approx(found.peak.total + 2 * GIB)
    row = 4 * 2 * 64 * what.length  # of one layer
    assert found.rollout.together == min(1024, found.rollout.memory[KEYS] // row)
    for changes in ({"sleeps": True}, {"apart": True}):
        other = rollout_of(attrs.evolve(what, sampling=attrs.evolve(shared, **changes)), rest, Built())
        assert other.stays == 0
        assert (rest.keys() <= other.memory.keys()) is ("sleeps" in changes)
    assert {WEIGHTS, KEYS, OUTSIDE} == other.memory.keys()
    assert MOVING not in other.memory
    half = rollout_of(attrs.evolve(what, sampling=attrs.evolve(shared, share=None)), rest, Built())
    assert half.stays == pytest.approx(0.95 * 0.5 * (gpu.memory - sum(rest.values()) - overhead(gpu, 0, 0)))


def test_the_host_has_the_state_that_is_there_and_copies_of_what_is_written(tmp_path):
    roles = {"reference": Role(offload="all")}
    what = case(
        layers=1, offload="moments", roles=roles, sampling=PlannedSampling(engine="vllm", shared=True, bucket=300_000)
    )
    built, states, optimizer = Built(), {}, passes.optimizer_of(what)
    for name in ("actor", "critic"):
        states[name] = init_state(models.init_params(model_of(what, name), Key(0)), optimizer)
    kept = [x for state in states.values() for x in tree.tensors(state.opt) if x.dim()]
    away = [*kept, *states["actor"].params.values()]  # the reference's
    found = host.host_of(what, built)
    assert found.rest[host.STATE] == sum(x.nbytes for x in away)
    assert found.files == 0
    on_disk = host.host_of(attrs.evolve(what, moments_in_files=True), built)
    assert on_disk.files == sum(x.nbytes for x in kept) == found.rest[host.STATE] - on_disk.rest[host.STATE]
    assert found.meanwhile[host.COPIES] - on_disk.meanwhile[host.COPIES] == on_disk.files
    saved = checkpoint.begin_save(states, tmp_path, 1).wait()
    written = sum(file.stat().st_size for file in saved.glob("*.safetensors"))
    assert written == pytest.approx(found.meanwhile[host.COPIES], rel=0.01)
    buckets = reshard(states["actor"].params, model_of(what, "actor").shapes, bucket_bytes=300_000)
    assert found.meanwhile[host.BUCKET] == max(sum(x.nbytes for x in bucket.tensors.values()) for bucket in buckets)
    largest = max(x.nbytes for x in states["actor"].params.values())
    assert found.starting[host.READ] == largest
    gpu = host.host_of(attrs.evolve(what, hardware=hardware_of("h100")), built)
    assert gpu.rest[host.STATE] == sum(1 << (x.nbytes - 1).bit_length() for x in away)  # as torch pins it
    assert gpu.starting[host.READ] == largest + sum(x.nbytes for x in states["critic"].params.values())
    assert gpu.needs == sum(gpu.rest.values()) + sum(gpu.meanwhile.values())


@pytest.mark.parametrize(
    ("starting", "meanwhile"), [({"a": 5.0}, {"b": 1.0, "c": 3.0}), ({"a": 1.0, "b": 3.0}, {"c": 5.0})]
)
def test_a_process_needs_the_more_of_its_start_and_of_its_later_work(starting, meanwhile):
    rest = {"d": 1.0, "e": 2.0}
    assert host.HostMemory(rest=rest, starting=starting, meanwhile=meanwhile).needs == 3.0 + 5.0


@pytest.mark.parametrize("gpu", ["cpu", "h100"])
def test_adapters_have_their_base_read_in_the_dtype_that_it_is_computed_in(gpu):
    """Through a buffer of the largest tensor as it is in a file; on a CPU what was read stays."""
    adapters = Lora(2, 1.0, ("q_proj",))
    what = case(layers=1, critic=False, lora=adapters, compute_dtype=torch.bfloat16, hardware=hardware_of(gpu))
    model = model_of(what, "actor")
    base = sum(x.numel() for x in model.plain.shapes.values())
    largest = max(x.numel() for x in model.whole_shapes.values())
    found = host.read_bytes(what, Built()) - 4 * largest
    factors = 2 * 2 * 128  # of 2 x 128 and 128 x 2
    assert found == (2 * (base + factors) if gpu == "h100" else 0)


@pytest.mark.slow
def test_a_process_has_the_size_that_is_planned():
    code = "import fppo.commands.actions, fppo.assembly.run; print(open('/proc/self/statm').read().split()[1])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) * os.sysconf("SC_PAGE_SIZE") == pytest.approx(host.process_bytes(), rel=0.15)


@pytest.mark.parametrize(("cut", "share"), [(1, 1), (2, 2), (4, 2), (8, 2)])
def test_heads_that_several_gpus_need_count_on_each(cut, share):
    """A model with 2 key heads; its cache has room for one row."""
    sampling = PlannedSampling(sequences=8, engine="vllm", tensor=cut, cache=1.0)
    what = case(hardware=hardware_of("h100"), compute_dtype=torch.bfloat16, sampling=sampling)
    assert rollout_of(what, {}, Built()).memory[KEYS] == 64 * 3 * 2 * 2 * 32 * 2 / share  # of three layers, in 16 bits
