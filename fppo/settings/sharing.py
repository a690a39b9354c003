"""What of the settings keeps rows that begin alike from sharing their tokens."""

from __future__ import annotations

from typing import Any

from fppo.settings.problems import Problems, problem
from fppo.settings.train import TrainSettings


def sharing_problems(s: TrainSettings) -> Problems:
    """What does not go with model.share_prompts, where it is true."""
    if s.model.share_prompts is True:
        for path, value, why in sharing_hindrances(s):
            yield problem("model.share_prompts", True, f"{path} = {value!r} {why}; leave one of them out")


def sharing_hindrances(s: TrainSettings) -> list[tuple[str, Any, str]]:
    """Settings with which no row shares its prompt, and why."""
    model, replay, context = s.model, s.algorithm.router_replay, s.mesh.context
    known = (
        ("model.remove_padding", False, not model.remove_padding, "runs padded rows as they are"),
        ("mesh.context", context, context > 1, "deals the packed row in blocks"),
        ("algorithm.router_replay", replay, replay != "none", "replays what routers chose for each row"),
    )
    return [(path, value, why) for path, value, hinders, why in known if hinders]
