"""The settings of how responses are sampled, and which of them are trained on."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs
import tyro

from fppo.settings.fields import (
    MOST_ROWS,
    MOST_SECONDS,
    MOST_TOKENS,
    MOST_WORKERS,
    Table,
    above,
    at_least,
    at_most,
    nonempty,
    setting,
    temperature,
)


def _ids(values: tuple[int, ...]) -> str | None:
    return "must be 0 or more, each" if any(x < 0 for x in values) else None


def _gpus(value: tuple[int, ...]) -> str | None:
    different = len(set(value)) == len(value) and all(gpu >= 0 for gpu in value)
    return None if different else "name different GPUs, counted from 0"


@attrs.frozen(kw_only=True)
class VllmSettings:
    """How vLLM runs, where rollout.engine is vllm."""

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
    send: Literal["all", "changed"] = setting("all")
    """Send all parameters at every sync, or those that changed."""
    bucket_mb: int = setting(256, at_least(1))
    """MiB of parameters that are gathered and sent at once."""
    probe: Literal["first", "always", "never"] = setting("first")
    """After which syncs the log-probs of some tokens are held against the trainer's."""
    extra: Table = setting(dict)
    """Further keywords of vllm.LLM, as {max_num_batched_tokens = 8192}."""


@attrs.frozen(kw_only=True)
class TurnsSettings:
    """What answers the policy's turns. A turn ends where a response does: at the model's ends, or rollout.stop."""

    respond: str | None = setting(None)
    """calculator, or module:function of the conversation so far, or module:game; None: a response is one turn."""
    max_turns: int = setting(8, at_least(1), at_most(MOST_TOKENS))
    """Turns of a response at most."""
    turn_tokens: int | None = setting(None, at_least(1), at_most(MOST_TOKENS))
    """The longest turn, in tokens; one that is cut ends the response. None: only rollout.max_tokens bounds it, with all
    that it is told."""
    failure: str = setting("error")
    """What the policy is told where respond raises or takes too long; empty: the response ends there."""
    time_limit: float = setting(10.0, above(0), at_most(MOST_SECONDS))
    """Seconds that a call may take."""
    workers: int = setting(1, at_least(1), at_most(MOST_WORKERS))
    """Processes that calls run in, on each rank; the calculator needs none."""


@attrs.frozen(kw_only=True)
class FilterSettings:
    """Which responses are not trained on."""

    groups: bool = setting(False)
    """Drop prompts whose responses all came to the same, and sample others in their place (DAPO)."""
    by: str = setting("score", nonempty("give score, or the name of a reward function"))
    """What is compared: score (without what only shapes it, as the length penalty), or one function's part of it."""
    max_draws: int = setting(10, at_least(1), at_most(10_000))
    """How often prompts are drawn for one step at most; what is missing then is filled up, and not trained on."""
    truncated: bool = setting(False)
    """Leave responses that reached rollout.max_tokens out of the loss."""


@attrs.frozen(kw_only=True)
class RolloutSettings:
    """How responses are sampled. Batch sizes count sequences, here and everywhere."""

    batch_size: int = setting(64, at_least(1), at_most(MOST_ROWS))
    """Sequences per step: prompts times n."""
    n: int = setting(1, at_least(1), at_most(MOST_ROWS))
    """Responses to each prompt; it must divide batch_size."""
    temperature: float = setting(1.0, above(0), temperature)
    """The sampling temperature, which training uses too."""
    top_k: int | None = setting(None, at_least(1))
    """Sample among the k likeliest tokens only; None: among all."""
    top_p: float = setting(1.0, above(0), at_most(1))
    """Sample among the likeliest tokens that together have this probability."""
    max_tokens: int = setting(256, at_least(1), at_most(MOST_TOKENS))
    """The longest response, in tokens."""
    stop: tuple[str, ...] = setting(())
    """Texts that end a response, with the token that completes one, beside the model's and the chat template's ends."""
    stop_token_ids: tuple[int, ...] = setting((), _ids)
    """Tokens that end a response too, by their ids."""
    engine: Literal["embedded", "vllm"] = setting("embedded")
    """What generates: transformers on the training parameters themselves, or vLLM on a copy that is sent to it."""
    cache_gb: float | None = setting(None, above(0))
    """GiB of keys and values that the embedded engine holds; None: half of a GPU's free memory, no bound on a CPU."""
    vllm: VllmSettings = setting(VllmSettings)
    """How vLLM runs."""
    gap: Literal["warn", "stop", "off"] = setting("warn")
    """What to do where the engine's probabilities differ from the policy's by more than the dtypes explain."""
    turns: TurnsSettings = setting(TurnsSettings)
    """What answers the policy's turns, for responses of several of them."""
    ahead: int = setting(0, at_least(0), at_most(1000))
    """Steps by which responses are sampled ahead, with the weights of that earlier step, while others train."""
    interrupt: int = setting(0, at_least(0))
    """Tokens after which a response that is sampled ahead goes on with newer weights, if there are any; 0: never."""
    filter: FilterSettings = setting(FilterSettings)
    """Which responses are not trained on."""
    save: bool = setting(False)
    """Write every step's responses to the directory rollouts, for rollout.from."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = setting(None, name="from")
    """Train on the responses in this directory, in the order of their steps, instead of sampling any."""
