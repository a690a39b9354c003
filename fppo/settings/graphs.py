"""Whether passes of few tokens are recorded as CUDA graphs (`steps.recorded`), and what of the settings hinders it."""

from __future__ import annotations

from typing import Any

from fppo.settings.problems import Problems, problem
from fppo.settings.train import TrainSettings

BY_DEVICE = ("varlen", "flash")  # attention that reads the lengths of rows on the device


def graphs_problems(s: TrainSettings) -> Problems:
    """What does not go with model.graphs, where it is asked for."""
    if s.model.graphs is True:
        for path, value, why in _hindrances(s):
            yield problem("model.graphs", True, f"{path} = {value!r} {why}; leave one of them out")


def records(s: TrainSettings) -> bool:
    """Whether settings for a GPU that leave it open record passes: where nothing hinders it, and where memory between
    updates is not kept for others."""
    shared = "vllm" in (s.rollout.engine, s.reward.judge.engine) or s.model.offload != "none"
    return s.model.attention in BY_DEVICE and not shared and not _hindrances(s)


def _hindrances(s: TrainSettings) -> list[tuple[str, Any, str]]:
    """Settings with which no pass can be recorded, and why."""
    model, again = s.model, s.model.checkpoint_layers
    known = (
        ("device", s.device, s.device == "cpu", "has no graphs"),
        ("rollout.ahead", s.rollout.ahead, s.rollout.ahead > 0, "runs other work on the GPU meanwhile"),
        ("model.remove_padding", False, not model.remove_padding, "runs rows of any width"),
        ("model.share_prompts", True, model.share_prompts is True, "lets rows share tokens"),
        ("model.checkpoint_layers", again, bool(again), "computes layers again"),
        ("model.compile_layers", True, model.compile_layers, "may compile a layer in any pass"),
        ("model.offload_activations", True, model.offload_activations, "moves memory in every pass"),
    )
    found = [(path, value, why) for path, value, hinders, why in known if hinders]
    if model.attention not in ("auto", *BY_DEVICE) and ":" not in model.attention:
        found.append(("model.attention", model.attention, "plans on the host, by the lengths of rows"))
    return found
