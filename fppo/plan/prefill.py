"""A pass over prompts by the embedded engine's own code, on parameters without data: what it keeps, and what it holds
meanwhile."""

from __future__ import annotations

from typing import NamedTuple

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from fppo import models
from fppo.models.model import Model
from fppo.models.rows import RowWise
from fppo.plan import layers, passes
from fppo.plan._track import STATE, Tracker
from fppo.plan.built import Built
from fppo.plan.case import Case
from fppo.plan.values import peak_of
from fppo.rollout import cache as caches
from fppo.rollout.states import PromptStates
from fppo_kernels.padding import make_lengths

FEW, MORE = 1, 2  # layers: without a gradient none holds what another one does, but for keys and values


class Prefill(NamedTuple):
    """Bytes of a pass over prompts."""

    column: float  # of keys and values of one token, in all layers
    states: float  # of one row's states
    moving: float  # of what it holds where most is held, with the keys and values of its tokens


def prefill_of(case: Case, built: Built, *, prompts: int, length: int) -> Prefill:
    """What a pass over so many prompts of one length keeps and holds on a rank, by the model that no axis cuts; from
    few layers, where all are alike. A tensor axis shares it out."""
    key = ("prefill", case.compute_dtype, case.hardware.on_gpu, prompts, length)
    return built.once(key, lambda: _of_all(case, built, prompts, length))


def _of_all(case: Case, built: Built, prompts: int, length: int) -> Prefill:
    whole = built.model(case, "actor").plain
    count = len(whole.layers)
    if case.full or count <= MORE or not layers.alike(whole):
        return _run(case, whole, prompts, length)
    few, more = (_run(case, built.model(case, "actor", some).plain, prompts, length) for some in (FEW, MORE))
    return Prefill(*(a + (b - a) * (count - FEW) / (MORE - FEW) for a, b in zip(few, more, strict=True)))


def _run(case: Case, model: Model, prompts: int, length: int) -> Prefill:
    tracker = Tracker(on_gpu=case.hardware.on_gpu)
    model = attrs.evolve(model, compute_dtype=case.compute_dtype)
    kernels = passes.kernels_of(case, tracker)
    tokens = torch.ones(1, prompts * length, dtype=torch.int64)
    positions = torch.arange(length).repeat(prompts)[None]
    lengths = make_lengths([length] * prompts)
    kept, states = caches.Layers(), PromptStates(lengths, model)

    def run(skeleton: PreTrainedModel) -> None:
        attend = caches.prefill_attention(kernels.attention, lengths, kept, [])
        with tracker:
            models.forward(model.text_of(skeleton), tokens, positions, attend=RowWise(attend, states))

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        dtype = case.compute_dtype or case.dtype
        params = {name: torch.empty(shape, dtype=dtype) for name, shape in model.whole_shapes.items()}
        tracker.hold(params.values(), STATE)
        models.bind(model, params, run, kernels=kernels)
    peak = peak_of(tracker.phases())[1]
    return Prefill(caches.row_bytes(kept, 1), states.states_(1, 1).row_bytes, peak.total - peak.peak[STATE])
