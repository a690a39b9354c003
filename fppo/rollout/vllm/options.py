"""vLLM's options, which are settings too, and checks of them. Nothing here imports torch."""

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
    """Options of vLLM. `extra` is passed to `vllm.LLM` unchanged, and overrides everything else."""

    max_model_len: int | None = setting(None, at_least(1))
    """Maximal length of prompt and response together, in tokens; None: the model's own limit."""
    max_rows: int = setting(256, at_least(1))
    """Rows that decode together."""
    cache_gb: float | None = setting(None, above(0))
    """Memory for keys and values, in GiB; None: from half of the free memory beside a trainer, else all; 1 on a CPU."""
    memory_share: float | None = setting(None, above(0), at_most(1))
    """Share of the device's memory that vLLM may take in all, instead of cache_gb."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None)
    """dtype of vLLM's weights and computation; None: the compute dtype of training."""
    eager: Literal["auto"] | bool = setting("auto")
    """Run without compiling or capturing graphs: starts at once, decodes slower on a GPU; auto: on a CPU."""
    prefix_cache: bool = setting(True)
    """Compute common prefixes of prompts once; samples of one prompt always share it."""
    sleep: bool = setting(False)
    """Release weights and cache on the GPU between rollouts."""
    host: Literal["local", "process", "ray"] = setting("local")
    """Place of the engine: this process, its own process, or a Ray actor; one that dies or hangs there is restarted."""
    cluster: str = setting("local", nonempty("give local, or the HOST:PORT of a Ray cluster that runs"))
    """Ray cluster of host = "ray": local (a new one on this machine), or the HOST:PORT of a running one."""
    tensor_parallel: int = setting(1, at_least(1))
    """Number of devices over which vLLM cuts the model; not with host = "local"."""
    devices: tuple[int, ...] = setting((), _gpus)
    """GPUs of the engine, tensor_parallel of them for each rank; unset: the rank's, or as many more as it needs."""
    transport: Literal["auto", "nccl", "ipc"] = setting("auto")
    """Transport of weights: that of the host (directly, shared memory, Ray's store), or vLLM's own NCCL or CUDA IPC."""
    restarts: int = setting(3, at_least(0))
    """Maximal number of restarts in one rollout, after which the run ends."""
    patience: float = setting(120.0, above(0), at_most(MOST_SECONDS))
    """Seconds without a sign of life after which the engine counts as hung."""
    start_patience: float = setting(900.0, above(0), at_most(MOST_SECONDS))
    """Seconds without a sign of life while it starts or receives weights."""
    extra: Table = setting(dict)
    """Further keywords of vllm.LLM, as {max_num_batched_tokens = 8192}."""
    adapter: Literal["merged", "alone"] = kept("merged")
    """Transfer of a model's adapter: in merged weights, or alone, beside base weights that are sent once."""
    verbose: bool = kept(False)
    """Show vLLM's own log."""


def conflicts(options: VllmOptions) -> Problems:
    """Describe the options that conflict with the host."""
    if options.tensor_parallel > 1 and options.host == "local":
        text = 'the trainer\'s process cannot start its workers; give host = "process" or "ray"'
        yield Problem("tensor_parallel", options.tensor_parallel, text)
    if options.devices and options.host != "process":
        text = f'with host = "{options.host}" they cannot be chosen; give host = "process"'
        yield Problem("devices", options.devices, f"{text}, or set CUDA_VISIBLE_DEVICES")
    if options.transport != "auto" and options.host == "local":
        text = 'one process needs none; give auto, or host = "process" or "ray"'
        yield Problem("transport", options.transport, text)


def check_options(options: VllmOptions) -> None:
    """Raise ValueError for invalid values, and for options that conflict with the host."""
    choices = {name: get_args(kind) for name, kind in kinds_of(VllmOptions).items() if get_origin(kind) is Literal}
    wrong = [
        Problem(name, value, f"must be one of {', '.join(choices[name])}")
        for name, value in only(options, *choices).items()
        if value not in choices[name]
    ]
    if wrong := [*wrong, *wrong_values(options), *conflicts(options)]:
        raise ValueError("; ".join(map(str, wrong)))
