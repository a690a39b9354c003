"""What is wrong with settings on a mesh."""

from __future__ import annotations

from fppo.settings.problems import Problems, problem, unread
from fppo.settings.train import TrainSettings


def pipeline_problems(s: TrainSettings) -> Problems:
    """What does not go with a pipeline axis, or needs one."""
    stages, virtual = s.mesh.pipeline, s.mesh.virtual_stages
    if stages == 1 and virtual > 1:
        advice = "its stages are those of a pipeline rank; give mesh.pipeline 2 or more, or leave it out"
        yield problem("mesh.virtual_stages", virtual, advice)
    if stages > 1 and s.model.compile_layers:
        advice = "torch.compile has not been tried on the layers of a stage; leave out model.compile_layers"
        yield problem("mesh.pipeline", stages, advice)


def expert_axis_problems(s: TrainSettings, *, critic: bool) -> Problems:
    """What does not go with an expert axis, in a run that has a critic or has none."""
    yield from _cutting_axis_problems(s, "mesh.expert", s.mesh.expert, critic=critic)


def context_axis_problems(s: TrainSettings) -> Problems:
    """What does not go with a context axis, and what does nothing without one."""
    context, sequence = s.mesh.context, s.mesh.sequence
    if context == 1:
        yield from unread("mesh.ring", s.mesh.ring, False, "mesh.context > 1")
        return
    if not s.model.remove_padding:
        yield problem("mesh.context", context, "a context axis deals packed rows; set model.remove_padding")
    if sequence > 1:
        advice = f"mesh.sequence = {sequence} cuts the same rows; give one of them, of {sequence * context} ranks"
        yield problem("mesh.context", context, advice)


def tensor_axis_problems(s: TrainSettings, *, critic: bool) -> Problems:
    """What does not go with a tensor axis, in a run that has a critic or has none."""
    if not s.model.remove_padding:
        yield problem("mesh.tensor", s.mesh.tensor, "a tensor axis cuts packed rows; set model.remove_padding")
    if s.model.log_probs in ("compiled", "liger"):
        advice = "it cannot split the vocabulary over mesh.tensor; give chunked, triton or reference"
        yield problem("model.log_probs", s.model.log_probs, advice)
    yield from _cutting_axis_problems(s, "mesh.tensor", s.mesh.tensor, critic=critic)


def _cutting_axis_problems(s: TrainSettings, axis: str, ranks: int, *, critic: bool) -> Problems:
    """What does not go with an axis that cuts parameters inside layers."""
    if s.model.compile_layers:
        advice = "its layers exchange tokens, which torch.compile does not; leave out model.compile_layers"
        yield problem(axis, ranks, advice)
    for name, section in (("actor", s.actor), ("critic", s.critic)):
        if section.optimizer.name == "muon" and (name == "actor" or critic):
            advice = f"it needs whole parameters, which {axis} cuts; give adamw or sgd, or {axis} = 1"
            yield problem(f"{name}.optimizer.name", "muon", advice)
