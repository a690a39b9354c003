"""How vLLM runs: its options, which are settings too, and what is wrong with them. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

import attrs

from fppo.fields import (
    MOST_SECONDS,
    Problem,
    Problems,
    Table,
    above,
    at_least,
    at_most,
    kept,
    kinds_of,
    nonempty,
    only,
    setting,
    wrong_values,
)


def _gpus(value: tuple[int, ...]) -> str | None:
    different = len(set(value)) == len(value) and all(gpu >= 0 for gpu in value)
    return None if different else "name different GPUs, counted from 0"


@attrs.frozen(kw_only=True)
class VllmOptions:
    """How vLLM runs. `extra` goes to `vllm.LLM` as it is, and wins over all else."""

    max_model_len: int | None = setting(None, at_least(1))
    """The longest prompt and response together, in tokens; None: the model's own limit."""
    max_rows: int = setting(256, at_least(1))
    """Rows that decode together."""
    cache_gb: float | None = setting(None, above(0))
    """Memory for keys and values, in GiB; None: of half of what is free beside a trainer, else of all; 1 on a CPU."""
    memory_share: float | None = setting(None, above(0), at_most(1))
    """The share of the device's memory that vLLM may take in all, in place of cache_gb."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None)
    """The dtype vLLM holds and computes in; None: the one training computes in."""
    eager: Literal["auto"] | bool = setting("auto")
    """Run without compiling or capturing graphs: starts at once, decodes slower on a GPU; auto: on a CPU."""
    prefix_cache: bool = setting(True)
    """Compute what prompts share once; samples of one prompt share it."""
    sleep: bool = setting(False)
    """Give weights and cache back to the GPU between rollouts."""
    host: Literal["local", "process", "ray"] = setting("local")
    """Where it runs: in this process, in one of its own, or in a Ray actor; what dies or hangs there is replaced."""
    cluster: str = setting("local", nonempty("give local, or the HOST:PORT of a Ray cluster that runs"))
    """The Ray cluster of host = "ray": local, a new one on this machine, or the HOST:PORT of one that runs."""
    tensor_parallel: int = setting(1, at_least(1))
    """Over how many devices it cuts the model; not with host = "local"."""
    devices: tuple[int, ...] = setting((), _gpus)
    """GPUs it runs on, tensor_parallel of them for each rank; unset: its rank's, or as many more as it needs."""
    transport: Literal["auto", "nccl", "ipc"] = setting("auto")
    """How weights go: as the host has it (directly, shared memory, Ray's store), or by vLLM's own NCCL or CUDA IPC."""
    restarts: int = setting(3, at_least(0))
    """How often it is replaced in one rollout before the run ends."""
    patience: float = setting(120.0, above(0), at_most(MOST_SECONDS))
    """Seconds without a sign of life after which it counts as hung."""
    start_patience: float = setting(900.0, above(0), at_most(MOST_SECONDS))
    """The same, while it starts or takes weights in."""
    extra: Table = setting(dict)
    """Further keywords of vllm.LLM, as {max_num_batched_tokens = 8192}."""
    adapter: Literal["merged", "alone"] = kept("merged")
    """How a model's adapter goes: in merged weights, or alone, beside weights that are sent once."""
    verbose: bool = kept(False)
    """Let vLLM log what it does."""


def conflicts(options: VllmOptions) -> Problems:
    """Options that do not go with the host."""
    if options.tensor_parallel > 1 and options.host == "local":
        text = 'its processes are not for the trainer to start; give host = "process" or "ray"'
        yield Problem("tensor_parallel", options.tensor_parallel, text)
    if options.devices and options.host != "process":
        text = f'with host = "{options.host}" they are not for us to choose; give host = "process"'
        yield Problem("devices", options.devices, f"{text}, or set CUDA_VISIBLE_DEVICES")
    if options.transport != "auto" and options.host == "local":
        text = 'one process needs none; give auto, or host = "process" or "ray"'
        yield Problem("transport", options.transport, text)


def check_options(options: VllmOptions) -> None:
    """Raise ValueError for impossible values, and for those that do not go with the host."""
    choices = {name: get_args(kind) for name, kind in kinds_of(VllmOptions).items() if get_origin(kind) is Literal}
    wrong = [
        Problem(name, value, f"must be one of {', '.join(choices[name])}")
        for name, value in only(options, *choices).items()
        if value not in choices[name]
    ]
    if wrong := [*wrong, *wrong_values(options), *conflicts(options)]:
        raise ValueError("; ".join(map(str, wrong)))
