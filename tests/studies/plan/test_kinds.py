"""Kinds of storages and the work of a kernel's stand-in, on a few real tensors, against sums by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fppo.studies.plan import passes
from fppo.studies.plan.passes import triton_buffers
from fppo.studies.plan.track import ACTIVATIONS, GRADIENTS, LOGITS, STATE, Tracker
from tests.studies.plan.cases import case

TOKENS, WIDTH, WORDS = 4, 8, 64


def held(tracker):
    """Bytes by kind that live now."""
    tracker.begin_pass()
    return {kind: size for kind, size in tracker.phases()[-1].start.items() if size}


def test_what_a_scope_creates_is_of_its_kind_forward_and_backward():
    """Logits and their gradient, of float32; what is made of them elsewhere is as usual."""
    hidden, weight = torch.ones(TOKENS, WIDTH, requires_grad=True), torch.ones(WIDTH, WORDS, requires_grad=True)
    tracker = Tracker()
    fn = tracker.scoped(lambda hidden, weight: (hidden @ weight).exp().sum(1), LOGITS)
    state, logits = 4 * (TOKENS + WORDS) * WIDTH, 4 * TOKENS * WORDS
    with tracker:
        tracker.hold([hidden, weight])
        assert held(tracker) == {STATE: state}
        twice = 2 * hidden
        out = fn(twice, weight)
        kept = {STATE: state, ACTIVATIONS: 4 * TOKENS * WIDTH, LOGITS: logits + 4 * TOKENS}
        assert held(tracker) == kept  # of the logits alone the exponential, which the backward pass reads
        loss = out.sum()
        loss.backward()
        backward = next(phase for phase in tracker.phases() if phase.name.startswith("backward"))
        assert max(segment.peak[LOGITS] for segment in backward.segments) >= 2 * logits
        del out, loss, twice
        assert held(tracker) == {STATE: state, GRADIENTS: state}


def test_what_is_made_of_gradients_alone_is_one_and_of_others_too_is_none():
    weight = torch.ones(WIDTH, requires_grad=True)
    tracker = Tracker()
    with tracker:
        tracker.hold([weight])
        (weight * weight).sum().backward()
        assert held(tracker) == {STATE: 4 * WIDTH, GRADIENTS: 4 * WIDTH}
        grad, size = weight.grad, 4 * WIDTH
        with torch.no_grad():
            squared = grad * grad
            assert held(tracker) == {STATE: size, GRADIENTS: 2 * size}
            for pair in ((grad, weight), (weight, grad)):
                mixed = torch.mul(*pair)
                assert held(tracker) == {STATE: size, GRADIENTS: 2 * size, ACTIVATIONS: size}
                del mixed
            for pair in ((squared, activation := 2 * weight), (activation, squared)):
                mixed = torch.mul(*pair)
                assert held(tracker) == {STATE: size, GRADIENTS: 2 * size, ACTIVATIONS: 2 * size}
                del mixed


@pytest.mark.slow
def test_logits_of_a_pass_are_counted_as_such():
    """Of each response token a float32 number for each entry of the vocabulary."""
    what = case(layers=1, log_probs="reference", micro_batches=1)
    for name in ("log-probs", "update actor"):
        forward = next(phase for phase in passes.run_stage(what, name) if phase.name == "forward 1")
        most = max(segment.peak.get(LOGITS, 0) for segment in forward.segments)
        assert most >= 4 * what.tokens * what.response * 2048


@pytest.mark.parametrize("words", [5, 512, 513, 1800])
@pytest.mark.parametrize("tokens", [3, 4, 9])
def test_the_stand_in_for_triton_multiplies_every_part_of_the_logits_twice_and_of_their_gradient(
    monkeypatch, tokens, words
):
    """Logits forward and again backward, there in slabs of at most 512 words and 4 tokens, and each slab's gradient by
    the weight and by the hidden states: the four products that the rough estimate counts."""
    monkeypatch.setattr(passes, "COLUMNS", 512)
    monkeypatch.setattr(passes, "ROWS", 4)
    hidden, weight = torch.ones(tokens, WIDTH, requires_grad=True), torch.ones(words, WIDTH, requires_grad=True)
    tracker = Tracker()
    with tracker:
        tracker.begin_pass()
        triton_buffers(hidden, weight, torch.zeros(tokens, dtype=torch.long)).log_probs.sum().backward()
    work = Counter[str]()
    for phase in tracker.phases():
        work[phase.name.split()[0]] += phase.cost.flops["matmul float32"]
    product = 2 * tokens * words * WIDTH
    assert +work == {"forward": product, "backward": 3 * product}
