"""A context axis changes no number: outputs and gradients of models of many kinds are those of one process."""

from functools import partial

import attrs
import pytest

from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from fppo.steps import packed
from fppo.steps.forward import Forward, forward_micro_batch
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import make
from tests.steps.test_tensor import BATCH, assert_same, outcome


def on(ring, fn, mesh):
    return fn(attrs.evolve(mesh, ring=ring))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "ring"),
    [
        ("qwen2", {"context": 8}, False),
        ("qwen2", {"context": 8}, True),
        ("gemma2", {"context": 2}, False),
        ("gemma2", {"context": 2}, True),
        ("gpt_oss", {"context": 2, "tensor": 2}, False),
        ("gpt_oss", {"context": 2, "tensor": 2}, True),
        ("mistral", {"context": 4}, False),
    ],
)
def test_a_model_on_a_context_axis_is_the_whole_one(name, axes, ring):
    """With more ranks than heads; windows, soft caps, sinks."""
    model, params = make(name)
    expected = outcome(Mesh.local(), model, params)
    assert_same(simulate(axes, partial(on, ring, partial(outcome, model=model, params=params))), expected)


def test_what_a_context_axis_cannot_do_is_named():
    model, params = tiny.model_and_params("lm")

    def own(query, key, value, *, lengths, scale, window, softcap, sinks): ...

    def run(mesh, **changes):
        return forward_micro_batch(params, BATCH, forward=Forward(model, mesh=mesh, **changes))

    for axes, changes, words in (
        ({"context": 2}, {"remove_padding": False}, "a context axis of 2 ranks cuts one packed row: remove padding"),
        ({"context": 2, "sequence": 2}, {}, "a sequence axis of 2 ranks and a context axis of 2 .* of 4 ranks"),
        ({"context": 2}, {"kernels": attrs.evolve(Kernels.named(), attention=own)}, "own has no keyword key_lengths"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate(axes, partial(run, **changes))


def test_the_window_of_all_layers_is_what_work_is_counted_with(monkeypatch):
    seen, deal = [], packed.deal
    monkeypatch.setattr(
        packed, "deal", lambda *args, window, **keywords: seen.append(window) or deal(*args, **keywords)
    )
    for name in ("mistral", "gemma2", "llama"):
        model, params = make(name)
        simulate({"context": 2}, partial(outcome, model=model, params=params))
    assert seen == [3, 3, None, None, None, None]
