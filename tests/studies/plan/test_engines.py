"""The weights of a planned engine: what a rank gathers, makes and sends, by counts of the model's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import pytest
import torch

from fppo.models.adapted import Lora
from fppo.rollout.vllm.devices import BESIDE, KEPT_FREE
from fppo.runtime.mesh import DENSE
from fppo.studies.plan.case import GIB, PlannedSampling, hardware_of, overhead
from fppo.studies.plan.estimate import LINK_SHARE, link
from fppo.studies.plan.passes import Built, model_of
from fppo.studies.plan.plan import plan_engines
from fppo.studies.plan.rollout import KEYS, OUTSIDE, WEIGHTS, rollout_of
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


def sampled(what: Any, sampling: PlannedSampling = EMBEDDED, rest: Mapping[str, float] = MappingProxyType({})) -> Any:
    """The rollout of 8 prompts, with so many bytes at rest beside it."""
    own = attrs.evolve(sampling, sequences=8 * sampling.n)
    return rollout_of(attrs.evolve(what, sampling=own), rest, Built())


N = sum(x.numel() for x in model_of(of(), "actor").whole_shapes.values())
LORA = Lora(4, 1.0, ("q_proj",))


CODES = {"lora": LORA, "lora_base": "nf4", "compute_dtype": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "sampling", "gathered", "made"),
    [
        ({}, EMBEDDED, 0, 2 * N + 2 * JOINED),  # cast
        ({"compute_dtype": None}, EMBEDDED, 0, 4 * JOINED),
        ({"offload": "all"}, EMBEDDED, 4 * N, 2 * N + 2 * JOINED),
        ({"offload": "moments"}, EMBEDDED, 0, 2 * N + 2 * JOINED),
        ({"mesh": {"shard": 2}}, EMBEDDED, 2 * N, 2 * JOINED),  # they come as they are run
        ({"mesh": {"pipeline": 2}}, EMBEDDED, 2 * N, 2 * JOINED),
        ({"mesh": {"replicate": 2}}, EMBEDDED, 0, 2 * N + 2 * JOINED),
        ({"mesh": {"tensor": 2}}, EMBEDDED, 0, 2 * (N // 2) + 2 * JOINED // 2),
        ({"mesh": {"tensor": 2, "shard": 2}}, EMBEDDED, 2 * (N // 2), 2 * JOINED // 2),
        ({}, PlannedSampling(pool=3), 4 * N, 2 * N + 2 * JOINED),
        ({"lora": LORA}, EMBEDDED, 0, 2 * JOINED),
        ({"lora": LORA, "offload": "all"}, EMBEDDED, 2 * N, 2 * JOINED),
        ({"lora": LORA, "compute_dtype": None}, EMBEDDED, 0, 4 * N + 4 * JOINED),  # merged
        (CODES, EMBEDDED, 0, 4 * JOINED),
        (CODES | {"mesh": {"shard": 2}}, EMBEDDED, 4 * N, 4 * JOINED),
        ({"hardware": ON_CPU}, EMBEDDED, 0, 2 * N + 2 * JOINED + 4 * HEAD),
        ({"hardware": ON_CPU, "compute_dtype": None}, EMBEDDED, 0, 4 * JOINED),
        ({"hardware": ON_CPU, "compute_dtype": None, "packs": True}, EMBEDDED, 0, 4 * (JOINED + ALONE + HEAD)),
        ({"hardware": ON_CPU, "packs": True}, EMBEDDED, 0, 2 * (N + JOINED + ALONE) + 8 * HEAD),
    ],
    ids=str,
)
def test_an_engine_gathers_the_weights_that_it_has_not_and_makes_those_that_are_cast_merged_or_joined(
    changes, sampling, gathered, made
):
    assert sampled(of(**changes), sampling).memory[WEIGHTS] == gathered + made


def rate(what: Any, axis: str) -> float:
    return link(what, axis)[1] * LINK_SHARE


def sent_of(what: Any, sampling: PlannedSampling = EMBEDDED) -> tuple[float, float, float]:
    """Bytes that a rank sends to others and that an engine is sent, and the seconds of both."""
    found = sampled(what, sampling)
    return found.gathered, found.sent, found.sending


@pytest.mark.slow
def test_weights_are_sent_over_the_axes_that_cut_them_and_to_an_engine_of_its_own():
    what = of(mesh={"shard": 4})
    sent = 2 * N * 3 // 4
    assert sent_of(what) == pytest.approx((sent, 0.0, sent / rate(what, DENSE)))
    assert sent_of(of()) == (0.0, 0.0, 0.0)
    both = of(mesh={"shard": 2, "tensor": 2})
    part = 2 * N // 2 * 1 // 2
    assert sent_of(both) == pytest.approx((part, 0.0, part / rate(both, DENSE)))
    dense, tensor = (2 * N // 2) // 2, 2 * N // 2
    seconds = dense / rate(both, DENSE) + tensor / rate(both, "tensor")
    for sampling, way in (
        (VLLM, GPU.bandwidth / 2),
        (attrs.evolve(VLLM, shared=True), GPU.host_bandwidth),
        (attrs.evolve(VLLM, apart=True), GPU.host_bandwidth),
        (attrs.evolve(VLLM, tensor=2), GPU.bandwidth / 2),  # the same whole weights go to halves
    ):
        took = seconds + 2 * N / (way * LINK_SHARE)
        assert sent_of(both, sampling) == pytest.approx((dense + tensor, 2 * N, took))
    took = 4 * N / (GPU.network_bandwidth * LINK_SHARE)
    assert sent_of(both, PlannedSampling(pool=3)) == pytest.approx((0.0, 4 * N, took))


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


COLUMN = LAYERS * 2 * 2 * 32  # keys and values of two heads


@pytest.mark.slow
def test_rows_wait_their_turn_where_the_cache_is_full():
    """Each as long as a prompt and a response: of a cache of five rows two prompts of two, or one prompt's draws."""
    what = of(compute_dtype=None, length=64, hardware=ON_CPU)
    row = 64 * 4.0 * COLUMN
    for n, cache, together in ((2, 5 * row, 4), (2, None, 16), (8, 5 * row, 5), (1, row / 2, 1)):
        sampling = PlannedSampling(n=n, cache=cache)
        found = sampled(what, sampling, {"state": 7.0})
        assert found.together == together
        assert found.memory[KEYS] == together * row
        assert (found.memory["state"], found.memory[OUTSIDE]) == (7.0, 0.0)
        few = sampled(what, attrs.evolve(sampling, max_rows=3))
        assert few.together == min(max(1, 3 // n) * min(n, together), together)


@pytest.mark.slow
def test_vllm_has_what_updates_leave_or_the_share_that_it_is_given():
    what, rest = of(mesh={"replicate": 2}), {"state": 4.0 * GIB}
    outside, weights = overhead(GPU, 0, 0), 2.0 * N
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
        found = sampled(what, attrs.evolve(VLLM, **changes), rest)
        assert found.memory[KEYS] == pytest.approx(keys)
        assert ("state" in found.memory) is there
        assert found.memory[OUTSIDE] == pytest.approx(outside + (trainer if there else 0))
        assert found.memory[WEIGHTS] == weights
        held = 0.0 if not there or "sleeps" in changes else weights + keys + outside
        assert found.stays == pytest.approx(held)
        assert found.together == found.rows == 4  # prompts of each of two engines
    cut = sampled(what, attrs.evolve(VLLM, tensor=2), rest)
    assert cut.memory[OUTSIDE] == pytest.approx(trainer + overhead(GPU, 1, 0))
    least = sampled(what, attrs.evolve(VLLM, cache=1.0), rest)
    assert (least.memory[KEYS], least.together) == (64 * 2 * COLUMN, 1)
    assert sampled(what, attrs.evolve(VLLM, max_rows=3, n=2), rest).together == 3
    assert sampled(of(hardware=ON_CPU), VLLM).memory[KEYS] == GIB


@pytest.mark.slow
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
