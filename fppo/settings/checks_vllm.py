"""What is wrong with the settings of a vLLM, wherever a section of them stands."""

from __future__ import annotations

from fppo.settings.problems import Problems, problem, unread
from fppo.settings.vllm import VllmSettings

_DEFAULT = VllmSettings()


def vllm_problems(section: VllmSettings, path: str) -> Problems:
    """Conflicts inside the section that stands at `path`."""
    if section.cache_gb != _DEFAULT.cache_gb and section.memory_share is not None:
        yield problem(f"{path}.cache_gb", section.cache_gb, "memory_share takes its place; leave one out")
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
