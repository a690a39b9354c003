"""Which GPUs an engine gets and what of their memory, for all machines at once: no vLLM and no GPU is needed."""

import math

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.rollout.vllm.devices import (
    GIB,
    GpuMemory,
    buffer_bytes,
    gpus_of,
    memory_keywords,
)
from fppo.rollout.vllm.options import VllmOptions
from fppo.rollout.vllm.transfer import Meta, metadata
from fppo.runtime.launch import visible

MEMORIES = st.integers(1, 200 * GIB).flatmap(lambda total: st.tuples(st.integers(100, max(total, 100)), st.just(total)))
MEMORIES = MEMORIES.filter(lambda pair: pair[0] <= pair[1]).map(lambda pair: GpuMemory(*pair))


def starts(memory, share):
    """Whether vLLM's own check lets it start: `vllm.v1.worker.utils.request_memory`."""
    return 0 < share <= 1 and memory.free >= math.ceil(memory.total * share)


CACHES = {"cache_gb": st.none() | st.floats(1e-3, 200), "memory_share": st.none() | st.floats(1e-3, 1)}
CACHES |= {"sleep": st.booleans(), "alone": st.booleans()}


@settings(max_examples=60)
@given(st.lists(MEMORIES, min_size=1, max_size=4), st.fixed_dictionaries(CACHES))
def test_vllm_starts_beside_a_trainer_or_the_setting_is_named(memories, given):
    cache_gb, share, alone = given["cache_gb"], given["memory_share"], given["alone"]
    options = VllmOptions(cache_gb=cache_gb, memory_share=share, sleep=given["sleep"])
    name = "cache_gb" if share is None else "memory_share"
    cache = 0 if cache_gb is None else int(cache_gb * GIB)
    if any((cache >= x.free if share is None else not starts(x, share)) for x in memories):
        with pytest.raises(ValueError, match=f"^{name} = {getattr(options, name)}: "):
            memory_keywords(options, memories, alone=alone)
        return
    keywords = memory_keywords(options, memories, alone=alone)
    assert all(starts(x, keywords["gpu_memory_utilization"]) for x in memories)
    if share is not None:
        assert keywords == {"gpu_memory_utilization": share}
    elif cache_gb is not None:
        assert keywords["kv_cache_memory_bytes"] == cache
    elif not alone and not given["sleep"]:  # the trainer's updates have the other half
        assert all(keywords["gpu_memory_utilization"] * x.total <= x.free / 2 for x in memories)


def test_beside_a_trainer_that_holds_a_third_vllm_gets_what_is_free():
    third = [GpuMemory(53 * GIB, 80 * GIB)]
    free = 0.95 * 53 / 80
    assert not starts(third[0], 0.92)  # vLLM's own default is refused
    given = memory_keywords(VllmOptions(cache_gb=2), third, alone=False)
    assert given == {"kv_cache_memory_bytes": 2 * GIB, "gpu_memory_utilization": pytest.approx(free)}
    beside, asleep, alone = (
        memory_keywords(VllmOptions(sleep=sleep), third, alone=alone)["gpu_memory_utilization"]
        for sleep, alone in ((False, False), (True, False), (False, True))
    )
    assert (beside, asleep, alone) == (pytest.approx(free / 2), pytest.approx(free), pytest.approx(free))
    with pytest.raises(ValueError, match=r"memory_share = 0.9: 53.0 of the GPU's 80.0 GiB are free; give at most 0.66"):
        memory_keywords(VllmOptions(memory_share=0.9), third, alone=False)


def test_a_cpu_is_told_the_size_of_the_cache_alone():
    assert memory_keywords(VllmOptions(), [], alone=True) == {"kv_cache_memory_bytes": GIB}
    assert memory_keywords(VllmOptions(cache_gb=0.5), [], alone=True) == {"kv_cache_memory_bytes": GIB // 2}
    assert memory_keywords(VllmOptions(memory_share=0.5), [], alone=True) == {"gpu_memory_utilization": 0.5}


SIZES = {"own": st.none() | st.integers(0, 7), "count": st.integers(1, 16), "engines": st.integers(1, 8)}
SIZES |= {"each": st.integers(1, 4), "transport": st.sampled_from(["auto", "ipc", "nccl"])}


@settings(max_examples=100)
@given(st.fixed_dictionaries(SIZES), st.data())
def test_each_engine_has_gpus_that_are_there_and_no_two_share_what_they_cannot(sizes, data):
    own, count, engines, each, transport = (sizes[name] for name in ("own", "count", "engines", "each", "transport"))
    engines = min(engines, count)
    owns = [own if own is None or own < count else count - 1] if engines == 1 else list(range(engines))
    devices = ()
    if data.draw(st.booleans()):
        devices = tuple(data.draw(st.permutations(range(count)))[: engines * each])
    options = VllmOptions(host="process", tensor_parallel=each, transport=transport, devices=devices)
    apart = transport == "nccl"
    if devices:
        cuts = [devices[i * each : (i + 1) * each] for i in range(engines)]
        fits = len(devices) == engines * each and not (apart and any(x in y for x, y in zip(owns, cuts, strict=True)))
    elif engines == 1:
        fits = each <= count - (apart and owns[0] is not None)
    else:
        fits = (each == 1 and not apart) or engines + engines * each <= count
    if transport == "ipc":  # on the trainers' own GPUs, or not at all
        fits = fits and (set(devices) <= set(owns) if devices else each == 1 and owns[0] is not None)
    if not fits:
        with pytest.raises(ValueError, match=r"tensor_parallel = |devices = |transport = "):
            _ = [gpus_of(options, own=x, count=count, engine=i, engines=engines) for i, x in enumerate(owns)]
        return
    chosen = [gpus_of(options, own=x, count=count, engine=i, engines=engines) for i, x in enumerate(owns)]
    used = [gpu for gpus, _ in chosen for gpu in gpus]
    assert [alone for _, alone in chosen] == [not {*gpus} & {*owns} for gpus, _ in chosen]
    assert len(set(used)) == len(used) == engines * each  # no collision
    assert set(used) <= set(range(count))
    if transport == "nccl":
        assert not any(own in gpus for own, (gpus, _) in zip(owns, chosen, strict=True))
    if devices:
        assert tuple(used) == devices
    elif each == 1 and transport != "nccl" and owns[0] is not None:
        assert used == owns  # beside the trainer


@pytest.mark.parametrize(
    ("changes", "place", "message"),
    [
        (
            {"transport": "nccl"},
            {"own": 0, "count": 1},
            "transport = 'nccl': NCCL joins different GPUs, and there are 0 on which no rank trains; vLLM needs 1 GPU; "
            "give transport = 'auto' or 'ipc', or fewer ranks",
        ),
        (
            {"tensor_parallel": 2},
            {"own": 3, "count": 8, "engine": 3, "engines": 8},
            "tensor_parallel = 2: that takes 8 engines of 2 GPUs, and there are 0 on which no rank trains; ",
        ),
        ({"tensor_parallel": 4}, {"own": 0, "count": 2}, "tensor_parallel = 4: that takes 4 GPUs, and there is 1 "),
        (
            {"transport": "ipc", "tensor_parallel": 2},
            {"own": 0, "count": 2},
            "transport = 'ipc' connects processes ",
        ),
        ({"devices": (0, 1)}, {"own": 0, "count": 2}, "devices = [0, 1]: an engine over 1: name 1"),
        ({"devices": (2,)}, {"own": 0, "count": 2}, "devices = [2]: there is no GPU 2, but 2, counted from 0"),
        ({"devices": (1,), "transport": "nccl"}, {"own": 1, "count": 2}, "devices = [1]: GPU 1 trains, and with "),
    ],
)
def test_gpus_that_are_not_there_are_named(changes, place, message):
    with pytest.raises(ValueError) as caught:
        gpus_of(attrs.evolve(VllmOptions(host="process"), **changes), **place)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("gpus", "now", "expected"),
    [((2,), None, "2"), ((2,), "", "2"), ((2, 0), "4,5,6,7", "6,4"), ((1,), "GPU-a, MIG-b", "MIG-b")],
)
def test_gpus_are_counted_as_this_process_sees_them(gpus, now, expected):
    assert visible(gpus, now) == expected


def test_parameters_that_are_sent_in_their_own_dtype_are_announced_in_it():
    dtypes = {"weight": torch.float32, "bias": torch.float32, "count": torch.int64, "unsent": torch.float32}
    shapes = {name: torch.Size([2, 3]) for name in dtypes}
    found = metadata(dtypes, shapes, ["weight", "bias", "count"], lambda *x: [x], torch.bfloat16, {"bias"})
    kinds = {"weight": torch.bfloat16, "bias": torch.float32, "count": torch.int64}
    assert found == [Meta(name, kind, (2, 3)) for name, kind in kinds.items()]


@given(st.integers(1, 1 << 30), st.lists(st.integers(0, 1 << 40)))
def test_the_largest_tensor_fits_a_transfers_buffer(bucket, tensors):
    size = buffer_bytes(bucket, tensors)
    assert all(x <= size for x in (bucket, *tensors))
    assert size in (bucket, *tensors)
