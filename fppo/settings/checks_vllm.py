"""What is wrong with the settings of a vLLM, wherever a section of them stands."""

from __future__ import annotations

from fppo.settings.problems import Problems, cluster_problems, problem, unread
from fppo.settings.vllm import VllmSettings

_DEFAULT = VllmSettings()
# vllm.LLM's keywords that are settings of ours, and those on which draws, weights and log-probs rest
_SETTINGS = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_rows",
    "kv_cache_memory_bytes": "cache_gb",
    "gpu_memory_utilization": "memory_share",
    "dtype": "dtype",
    "enforce_eager": "eager",
    "enable_prefix_caching": "prefix_cache",
    "enable_sleep_mode": "sleep",
    "tensor_parallel_size": "tensor_parallel",
    "weight_transfer_config": "transport",
}
_FIXED = (
    *("model", "tokenizer", "skip_tokenizer_init", "load_format", "generation_config", "trust_remote_code"),
    *("async_scheduling", "logits_processors", "worker_extension_cls", "speculative_config"),
)


def vllm_problems(section: VllmSettings, path: str) -> Problems:
    """Conflicts inside the section that stands at `path`."""
    if section.cache_gb != _DEFAULT.cache_gb and section.memory_share is not None:
        yield problem(f"{path}.cache_gb", section.cache_gb, "memory_share takes its place; leave one out")
    for name, value in section.extra.items():
        if name in _SETTINGS:
            yield problem(f"{path}.extra.{name}", value, f"give {path}.{_SETTINGS[name]}")
        if name in _FIXED:
            yield problem(
                f"{path}.extra.{name}", value, "how weights come and tokens are drawn rests on it; leave it out"
            )
    if section.host != "process":
        yield from unread(f"{path}.devices", section.devices, (), f'{path}.host = "process"')
    yield from cluster_problems(f"{path}.cluster", section.cluster, ("local",))
    if section.host != "ray":
        yield from unread(f"{path}.cluster", section.cluster, _DEFAULT.cluster, f'{path}.host = "ray"')
    if section.host != "local":
        return
    for name in ("restarts", "patience", "start_patience", "transport"):
        reader = f'{path}.host = "process" or "ray"'
        yield from unread(f"{path}.{name}", getattr(section, name), getattr(_DEFAULT, name), reader)
    if section.tensor_parallel > 1:
        text = 'its processes are not for the trainer to start; give host = "process" or "ray"'
        yield problem(f"{path}.tensor_parallel", section.tensor_parallel, text)


def too_short(section: VllmSettings, path: str, needed: int, names: str) -> Problems:
    """A conflict if vLLM would refuse the longest prompt and response that the settings `names` allow."""
    if section.max_model_len is not None and section.max_model_len < needed:
        text = f"a prompt and its response may have {needed} tokens ({names})"
        yield problem(f"{path}.max_model_len", section.max_model_len, text)


def vllm_on_ranks(section: VllmSettings, path: str, world: int) -> Problems:
    """What keeps it from running beside each of `world` ranks."""
    if world > 1 and section.host == "local":
        text = 'in a process of several ranks vLLM does not start; give "process", for one of its own, or "ray"'
        yield problem(f"{path}.host", section.host, text)
