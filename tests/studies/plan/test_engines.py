"""The weights of a planned engine: what a rank gathers, makes and sends, by counts of the model's numbers."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from fppo.models.adapted import Lora
from fppo.rollout.vllm.devices import BESIDE, KEPT_FREE
from fppo.runtime.mesh import DENSE
from fppo.studies.plan import rollout
from fppo.studies.plan.case import GIB, PlannedSampling, hardware_of, overhead
from fppo.studies.plan.estimate import LINK_SHARE, link
from fppo.studies.plan.passes import Built, model_of
from fppo.studies.plan.plan import plan_engines
from fppo.studies.plan.rollout import KEYS, OUTSIDE, WEIGHTS, Prefill, _Engine, rollout_of
from tests.studies.plan.cases import case, mixture

GPU = hardware_of("h100")
ON_CPU = attrs.evolve(hardware_of("cpu"), memory=64.0 * GIB)  # of no machine in particular
HALF, SINGLE = torch.bfloat16, torch.float32
LAYERS, WIDTH, INNER, WORDS = 3, 128, 512, 2048
JOINED = LAYERS * (WIDTH * (128 + 64 + 64) + 256 + 2 * WIDTH * INNER)  # of queries, keys, values; gate and up
ALONE = LAYERS * WIDTH * (128 + INNER)  # of outputs and of what comes down
HEAD = WIDTH * WORDS
EMBEDDED, VLLM = PlannedSampling(), PlannedSampling(engine="vllm")


def of(**changes: Any) -> Any:
    return case(**{"hardware": GPU, "compute_dtype": HALF, "critic": False, "reference": False, **changes})


def engine(what: Any, *, cut: int = 1, dtype: torch.dtype = HALF, **changes: Any) -> _Engine:
    """An engine of 8 prompts of 32 tokens, whose responses are as long."""
    model = model_of(attrs.evolve(what, lora=None), "actor").plain
    usual = {"count": 1, "prompts": 8, "prompt": 32, "response": 32, "prefill": Prefill(100.0, 0.0, 5000.0)}
    return _Engine(model=model, dtype=dtype, cut=cut, **{**usual, **changes})


N = sum(x.numel() for x in model_of(of(), "actor").whole_shapes.values())
LORA = Lora(4, 1.0, ("q_proj",))


@pytest.mark.parametrize(
    ("changes", "cut", "sampling", "gathered"),
    [
        ({}, 1, EMBEDDED, 0),
        ({"compute_dtype": None}, 1, EMBEDDED, 0),
        ({"offload": "all"}, 1, EMBEDDED, 4 * N),
        ({"offload": "moments"}, 1, EMBEDDED, 0),
        ({"mesh": {"shard": 2}}, 1, EMBEDDED, 2 * N),
        ({"mesh": {"pipeline": 2}}, 1, EMBEDDED, 2 * N),
        ({"mesh": {"replicate": 2}}, 1, EMBEDDED, 0),
        ({"mesh": {"tensor": 2}}, 2, EMBEDDED, 0),
        ({"mesh": {"tensor": 2}}, 1, EMBEDDED, 2 * N),  # which gathers all of them
        ({"mesh": {"tensor": 2, "shard": 2}}, 2, EMBEDDED, 2 * (N // 2)),
        ({}, 1, PlannedSampling(pool=3), 4 * N),
        ({"lora": LORA, "offload": "all"}, 1, EMBEDDED, 2 * N),
        ({"lora": LORA, "lora_base": "nf4", "compute_dtype": None, "mesh": {"shard": 2}}, 1, EMBEDDED, 4 * N),
    ],
    ids=str,
)
def test_a_rank_gathers_the_weights_that_it_has_not(changes, cut, sampling, gathered):
    what = of(**changes)
    assert rollout._gathered(what, sampling, engine(what, cut=cut)) == gathered


@pytest.mark.parametrize(
    ("changes", "cut", "dtype", "made"),
    [
        ({}, 1, HALF, 2 * N + 2 * JOINED),  # cast
        ({"compute_dtype": None}, 1, SINGLE, 4 * JOINED),
        ({"mesh": {"shard": 2}}, 1, HALF, 2 * JOINED),  # they come as they are run
        ({"mesh": {"tensor": 2}}, 2, HALF, 2 * (N // 2) + 2 * JOINED // 2),
        ({"lora": LORA}, 1, HALF, 2 * JOINED),
        ({"lora": LORA, "compute_dtype": None}, 1, SINGLE, 4 * N + 4 * JOINED),  # merged
        ({"lora": LORA, "lora_base": "nf4", "compute_dtype": None}, 1, SINGLE, 4 * JOINED),
        ({"hardware": ON_CPU}, 1, HALF, 2 * N + 2 * JOINED + 4 * HEAD),
        ({"hardware": ON_CPU, "compute_dtype": None}, 1, SINGLE, 4 * JOINED),
        ({"hardware": ON_CPU, "compute_dtype": None, "packs": True}, 1, SINGLE, 4 * (JOINED + ALONE + HEAD)),
        ({"hardware": ON_CPU, "packs": True}, 1, HALF, 2 * (N + JOINED + ALONE) + 4 * HEAD),
    ],
    ids=str,
)
def test_an_engine_makes_weights_that_are_cast_merged_or_joined(changes, cut, dtype, made):
    what = of(**changes)
    assert rollout._made(what, engine(what, cut=cut, dtype=dtype)) == made


def rate(what: Any, axis: str) -> float:
    return link(what, axis)[1] * LINK_SHARE


def test_weights_are_sent_over_the_axes_that_cut_them_and_to_an_engine_of_its_own():
    what = of(mesh={"shard": 4})
    sent = 2 * N * 3 // 4
    assert rollout._weights(what, EMBEDDED, engine(what)) == pytest.approx((sent, 0.0, sent / rate(what, DENSE)))
    assert rollout._weights(of(), EMBEDDED, engine(of())) == (0.0, 0.0, 0.0)
    both = of(mesh={"shard": 2, "tensor": 2})
    part = 2 * N // 2 * 1 // 2
    expected = (part, 0.0, part / rate(both, DENSE))
    assert rollout._weights(both, EMBEDDED, engine(both, cut=2)) == pytest.approx(expected)
    dense, tensor = (2 * N // 2) // 2, 2 * N // 2
    seconds = dense / rate(both, DENSE) + tensor / rate(both, "tensor")
    for sampling, way in (
        (VLLM, GPU.bandwidth / 2),
        (attrs.evolve(VLLM, shared=True), GPU.host_bandwidth),
        (attrs.evolve(VLLM, apart=True), GPU.host_bandwidth),
    ):
        took = seconds + 2 * N / (way * LINK_SHARE)
        assert rollout._weights(both, sampling, engine(both)) == pytest.approx((dense + tensor, 2 * N, took))
    halves = engine(both, cut=2)  # of vLLM, to each of which the same whole weights go
    assert rollout._weights(both, VLLM, halves) == rollout._weights(both, VLLM, engine(both))
    pool = PlannedSampling(pool=3)
    took = 4 * N / (GPU.network_bandwidth * LINK_SHARE)
    assert rollout._weights(both, pool, engine(both)) == pytest.approx((0.0, 4 * N, took))


@pytest.mark.parametrize(
    ("sampling", "mesh", "engines", "gpus", "prompts"),
    [
        (PlannedSampling(sequences=24, n=2), {}, 1, 1, 12),
        (PlannedSampling(sequences=24, n=2), {"shard": 4}, 4, 1, 3),
        (PlannedSampling(sequences=24, n=2), {"shard": 2, "tensor": 2}, 2, 2, 6),
        (PlannedSampling(sequences=22, n=2), {"shard": 4}, 4, 1, 3),
        (PlannedSampling(sequences=24, n=2, pool=5), {"shard": 4}, 5, 1, 3),
        (PlannedSampling(sequences=24, n=2, engine="vllm", tensor=2), {"shard": 4}, 4, 2, 3),
    ],
    ids=str,
)
def test_prompts_are_dealt_to_engines(sampling, mesh, engines, gpus, prompts):
    found = rollout_of(of(mesh=mesh, sampling=sampling), {}, Built())
    assert (found.engines, found.gpus, found.rows) == (engines, gpus, prompts * sampling.n)


def test_an_expert_axis_gathers_all_weights_for_its_engine():
    found = rollout_of(
        of(config=mixture(chosen=2), mesh={"expert": 2, "tensor": 2}, sampling=PlannedSampling(sequences=8)),
        {},
        Built(),
    )
    assert (found.engines, found.gpus) == (4, 1)


def test_rows_wait_their_turn_where_the_cache_is_full():
    """Each as long as a prompt and a response: of a cache of five rows two prompts of two, or one prompt's draws."""
    what = of(compute_dtype=None, length=64, hardware=ON_CPU)
    own = engine(what, dtype=SINGLE)
    row = 64 * 100.0
    assert own.row(1) == row
    assert own.row(48) == 96 * 100.0
    for n, cache, together, waves in ((2, 5 * row, 4, 4), (2, None, 16, 1), (8, 5 * row, 5, 16), (1, row / 2, 1, 8)):
        sampling = PlannedSampling(n=n, cache=cache)
        memory, rows, turns = rollout._embedded(what, sampling, own, {"state": 7.0})
        assert (rows, turns) == (together, waves)
        assert memory[KEYS] == together * row
        assert (memory["state"], memory[OUTSIDE]) == (7.0, 0.0)
        assert memory[WEIGHTS] == 4 * JOINED
        few = attrs.evolve(sampling, max_rows=3)
        prompts = max(1, 3 // n)
        assert rollout._embedded(what, few, own, {})[1] == min(prompts * min(n, together), together)


def test_vllm_has_what_updates_leave_or_the_share_that_it_is_given():
    what, own = of(mesh={"replicate": 2}), engine(of())
    rest, outside, weights = {"state": 4.0 * GIB}, overhead(GPU, 0, 0), 2.0 * N
    trainer = overhead(GPU, 1, 0)
    free = GPU.memory - 4 * GIB - trainer
    for changes, keys, there in (
        ({}, (1 - KEPT_FREE) * free * BESIDE - weights - outside, True),
        ({"sleeps": True}, (1 - KEPT_FREE) * free - weights - outside, True),
        ({"apart": True}, (1 - KEPT_FREE) * GPU.memory - weights - outside, False),
        ({"pool": 2}, (1 - KEPT_FREE) * GPU.memory - weights - outside, False),
        ({"share": 0.5}, 0.5 * GPU.memory - weights - outside, True),
        ({"cache": 3.0 * GIB}, 3.0 * GIB, True),
    ):
        memory, together, stays = rollout._vllm(what, attrs.evolve(VLLM, **changes), own, rest)
        assert memory[KEYS] == pytest.approx(keys)
        assert ("state" in memory) is there
        assert memory[OUTSIDE] == pytest.approx(outside + (trainer if there else 0))
        assert memory[WEIGHTS] == weights
        held = 0.0 if not there or "sleeps" in changes else weights + keys + outside
        assert stays == pytest.approx(held)
        assert together == 8
    cut = engine(of(), cut=2)
    assert rollout._vllm(what, VLLM, cut, rest)[0][OUTSIDE] == pytest.approx(trainer + overhead(GPU, 1, 0))
    least = rollout._vllm(what, attrs.evolve(VLLM, cache=1.0), own, rest)
    assert least[0][KEYS] == own.row(16)
    assert least[1] == 1
    few = attrs.evolve(VLLM, max_rows=3, n=2)
    assert rollout._vllm(what, few, own, rest)[1] == 3
    assert rollout._vllm(of(hardware=ON_CPU), VLLM, own, {})[0][KEYS] == GIB


def test_a_pool_of_engines_is_planned_by_itself():
    what = of(sampling=PlannedSampling(sequences=24, n=2, pool=3, shared=True), only=())
    found = plan_engines(what)
    assert found.case is what
    assert found.rollout == rollout_of(what, {}, Built())
    assert found.sent == 3 * 4 * N
    assert found.fits
    small = attrs.evolve(found, case=attrs.evolve(what, hardware=attrs.evolve(GPU, memory=found.rollout.total - 1)))
    assert not small.fits
    assert attrs.evolve(found, case=attrs.evolve(what, hardware=attrs.evolve(GPU, memory=found.rollout.total))).fits
