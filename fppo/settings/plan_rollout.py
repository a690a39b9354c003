"""The settings of the rollout that `fppo plan` plans."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.fields import above, at_least, at_most, setting
from fppo.settings.train import RolloutSettings


@attrs.frozen(kw_only=True)
class PlanRolloutSettings:
    """How responses are sampled."""

    engine: Literal["embedded", "vllm"] | None = setting(None)
    """What generates: the trainer's own model, or vLLM on a copy that is sent to it; None: plan no rollout."""
    batch_size: int | None = setting(None, at_least(1))
    """Sequences of a rollout over all ranks; None: those of an optimizer update."""
    n: int = setting(1, at_least(1))
    """Responses to each prompt."""
    cache_gb: float | None = setting(None, above(0))
    """GiB of keys and values that an engine holds; None: as a run has it, of what is free."""
    memory_share: float | None = setting(None, above(0), at_most(1))
    """The share of the GPU's memory that vLLM may take in all, in place of --rollout.cache-gb."""
    max_rows: int = setting(256, at_least(1))
    """Rows that vLLM decodes together."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None)
    """The dtype that vLLM holds and computes in; None: that of passes."""
    tensor_parallel: int = setting(1, at_least(1))
    """GPUs that vLLM cuts the model over."""
    apart: bool = setting(False)
    """Give vLLM GPUs of its own."""
    sleep: bool = setting(False)
    """Have vLLM give its memory back between rollouts."""
    host: Literal["local", "process", "ray"] = setting("local")
    """Where vLLM runs: in the rank's process, in one of its own, or in a Ray actor."""
    bucket_mb: int = setting(256, at_least(1))
    """MiB of parameters that are sent to vLLM at once."""


def of_run(rollout: RolloutSettings) -> PlanRolloutSettings:
    """What a run's settings say of it."""
    vllm, own = rollout.vllm, rollout.engine == "vllm"
    return PlanRolloutSettings(
        engine=rollout.engine,
        batch_size=rollout.batch_size,
        n=rollout.n,
        cache_gb=vllm.cache_gb if own else rollout.cache_gb,
        memory_share=vllm.memory_share,
        max_rows=vllm.max_rows,
        dtype=vllm.dtype,
        tensor_parallel=vllm.tensor_parallel,
        apart=bool(vllm.devices) or vllm.tensor_parallel > 1 or vllm.transport == "nccl",
        sleep=vllm.sleep,
        host=vllm.host,
        bucket_mb=vllm.bucket_mb,
    )
