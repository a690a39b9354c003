"""The host that the options name, with vLLM running in it."""

from __future__ import annotations

import torch

from fppo.models.model import Model
from fppo.rollout.vllm.families import check_family
from fppo.rollout.vllm.host import Host, config_directory
from fppo.rollout.vllm.local import LocalHost
from fppo.rollout.vllm.options import VllmOptions


def start_host(model: Model, options: VllmOptions, dtype: str) -> Host:
    """vLLM for the model, whose weights are still to come. Raises ValueError for a model that it cannot run."""
    check_family(model.whole_config, tensor_parallel=options.tensor_parallel, alone=options.adapter == "alone")
    give_memory_back()
    remote = model.trust_remote_code
    with config_directory(model.whole_config, trust_remote_code=remote) as path:
        match options.host:
            case "process":
                from fppo.rollout.vllm.process import ProcessHost as Chosen
            case "ray":
                from fppo.rollout.vllm.on_ray import RayHost as Chosen
            case _:
                Chosen = LocalHost
        return Chosen(path, options, dtype=dtype, trust_remote_code=remote)


def give_memory_back() -> None:
    """Lets the GPU have what torch keeps of its memory and uses for nothing: vLLM does not get it from torch."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
