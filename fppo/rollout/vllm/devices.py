"""The choice of an engine's GPUs, and of the memory that it may take there; no vLLM and no GPU is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fppo.rollout.vllm.options import VllmOptions

GIB = 1 << 30
KEPT_FREE = 0.05  # of free memory before vLLM starts: its workers create contexts and NCCL buffers before they measure
BESIDE = 0.5  # fraction of the rest, for a vLLM that stays beside a trainer


class EngineGpus(NamedTuple):
    """The GPUs of an engine, and whether no rank trains on any of them."""

    numbers: tuple[int, ...]
    alone: bool


class GpuMemory(NamedTuple):
    """Bytes of one GPU, as the driver counts them."""

    free: int
    total: int


def gpus_of(options: VllmOptions, *, own: int | None, count: int, engine: int = 0, engines: int = 1) -> EngineGpus:
    """Choose the GPUs of this rank's engine, number `engine` of the machine's `engines`, as this process numbers its
    `count` GPUs; each rank of a machine starts an engine of its own.

    `own` is the GPU on which this rank trains. An engine without `devices` shares it. If it cannot (NCCL joins no two
    processes of one GPU, and several engines cannot cut their models over the same GPUs), it gets GPUs on which no rank
    trains; rank i trains on GPU i. Raises ValueError if there are too few.
    """
    trainers = {own} if engines == 1 else set(range(engines))
    spare = [gpu for gpu in range(count) if gpu not in trainers]
    if options.devices:
        chosen = _named(options, own, count, engine, engines)
    else:
        chosen = _unnamed(options, own, spare, engine, engines)
    if options.transport == "ipc" and not trainers.issuperset(chosen):
        raise ValueError(
            f"transport = 'ipc' connects processes of one GPU, but not all of vLLM's GPUs {list(chosen)} train a rank; "
            "give transport = 'nccl' or 'auto'"
        )
    return EngineGpus(chosen, trainers.isdisjoint(chosen))


def _unnamed(options: VllmOptions, own: int | None, spare: list[int], engine: int, engines: int) -> tuple[int, ...]:
    each, apart = options.tensor_parallel, options.transport == "nccl"
    if own is not None and not apart and each == 1:
        return (own,)
    if not apart and engines == 1:
        chosen = [*(() if own is None else (own,)), *spare]
    else:
        chosen = spare[engine * each :]
    if len(chosen) >= each:
        return tuple(chosen[:each])
    needed = f"{engines} engines of {each} GPUs" if engines > 1 else f"{each} GPU{'s' if each > 1 else ''}"
    there = f"there {'is' if len(spare) == 1 else 'are'} {len(spare)} on which no rank trains"
    if apart:
        raise ValueError(
            f"transport = 'nccl': NCCL joins different GPUs, and {there}; vLLM needs {needed}; give transport = 'auto' "
            "or 'ipc', or fewer ranks"
        )
    raise ValueError(
        f"tensor_parallel = {each}: that takes {needed}, and {there}; give a smaller one, or name the GPUs by devices"
    )


def _named(options: VllmOptions, own: int | None, count: int, engine: int, engines: int) -> tuple[int, ...]:
    each, devices = options.tensor_parallel, options.devices
    given = f"devices = {list(devices)}"
    if len(devices) != engines * each:
        text = f"{engines} ranks start an engine each, over {each} GPUs" if engines > 1 else f"an engine over {each}"
        raise ValueError(f"{given}: {text}: name {engines * each}")
    if beyond := [gpu for gpu in devices if gpu >= count]:
        raise ValueError(f"{given}: there is no GPU {beyond[0]}, but {count}, counted from 0")
    chosen = devices[engine * each : (engine + 1) * each]
    if options.transport == "nccl" and own in chosen:
        raise ValueError(f"{given}: GPU {own} trains, and with transport = 'nccl' it cannot run vLLM too; name others")
    return chosen


def memory_keywords(options: VllmOptions, memories: Sequence[GpuMemory], *, alone: bool) -> dict[str, Any]:
    """vLLM's keywords for its memory on these GPUs; without GPUs, on a CPU.

    Without a cache size or a share, vLLM gets nearly all free memory if it is `alone` there or sleeps while the trainer
    works, else half of it, since updates need the rest.

    At its start vLLM requires that `ceil(gpu_memory_utilization * total)` bytes of each GPU are free, by default 0.92
    of all memory, even if its cache size is given. Raises ValueError for settings that need more than is free.
    """
    share = options.memory_share
    cache = None if options.cache_gb is None else int(options.cache_gb * GIB)
    for free, total in memories:
        there = f"{free / GIB:.1f} of the GPU's {total / GIB:.1f} GiB are free"
        if share is not None and math.ceil(share * total) > free:
            raise ValueError(f"memory_share = {share}: {there}; give at most {math.floor(100 * free / total) / 100}")
        if share is None and cache is not None and cache >= free:
            raise ValueError(f"cache_gb = {options.cache_gb}: {there}; give less")
    if share is not None:
        return {"gpu_memory_utilization": share}
    if not memories:
        return {"kv_cache_memory_bytes": GIB if cache is None else cache}
    free = min(map(share_of_free, memories))
    if cache is not None:
        return {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": free}
    return {"gpu_memory_utilization": free if alone or options.sleep else free * BESIDE}


def share_of_free(memory: GpuMemory) -> float:
    """The share of the GPU's total memory that vLLM may take: what is free now, less `KEPT_FREE`."""
    return (1 - KEPT_FREE) * memory.free / memory.total


def buffer_bytes(bucket: int, tensors: Sequence[int]) -> int:
    """Bytes of a transfer's buffer: a bucket or the largest tensor, whichever is larger, since transports cut no
    tensor."""
    return max([bucket, *tensors])
