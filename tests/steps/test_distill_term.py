"""The update by a divergence from a teacher's distributions is its formula, however rows are cut, padded and packed."""

from __future__ import annotations

import attrs
import pytest
import torch

from fppo import losses, tree
from fppo.steps import (
    DistillTerm,
    Forward,
    Loop,
    MicroBatching,
    PolicyTerms,
    Top,
    UpdateActor,
    compute_outputs,
    init_state,
    sgd,
)
from tests import tiny

MICRO = MicroBatching(size=8)
TEMPERATURE = 0.7


def nothing(log_probs, old_log_probs, advantages, mask):
    return 0.0 * log_probs, {}


def taught(count, seed=1, rows=8):
    """Rows with a teacher's distributions at `count` tokens, two of them untaught; the policy."""
    model, params = tiny.model_and_params(seed=0)
    _, teacher = tiny.model_and_params(seed=5)
    forward = Forward(model, top=Top(count, tiny.VOCAB))
    batch = tiny.experience(seed, rows)
    outputs = ("log_probs", "top_ids", "top_log_probs")
    how = {"forward": forward, "micro_batching": MICRO, "temperature": TEMPERATURE}
    out = compute_outputs(teacher, batch, outputs=outputs, **how)
    mask = torch.arange(rows) >= 2
    columns = {"teacher_top_ids": out.top_ids.int(), "teacher_top_log_probs": out.top_log_probs, "taught": mask}
    return model, params, teacher, tree.replace(batch, **columns)


def moved(model, params, batch, term, micro=MICRO, **forward):
    """What one step of gradient descent takes off the parameters: the gradient."""
    update = UpdateActor(
        forward=Forward(model, **forward),
        loss_fn=nothing,
        loop=Loop(mini_batch_size=len(batch.tokens), micro_batching=micro),
        optimizer=sgd(lambda step: 1.0, max_grad_norm=None),
        terms=PolicyTerms(temperature=TEMPERATURE),
        distill=term,
    )
    after, report = update(init_state(params, update.optimizer), batch)
    return {name: params[name] - x for name, x in after.params.items()}, report


def logits_of(model, params, batch):
    """The logits after each response token's prefix, by transformers' own code, [B, T, V]."""
    position = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": batch.tokens, "attention_mask": batch.attention_mask.long(), "position_ids": position}
    width = batch.response_mask.shape[1]
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_config(model.config).double()
    out = torch.func.functional_call(whole, params, (), {**given, "use_cache": False}, tie_weights=True)
    return out.logits[:, -width - 1 : -1]


@pytest.mark.parametrize("count", [4, tiny.VOCAB])
@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_the_gradient_is_that_of_the_formula_over_logits(name, count):
    model, params, teacher, batch = taught(count)
    term = DistillTerm(divergence=losses.DIVERGENCES[name], coef=0.3, whole=count == tiny.VOCAB)
    found, _ = moved(model, params, batch, term)
    leaves = {key: x.clone().requires_grad_() for key, x in params.items()}
    p, q = ((logits_of(model, x, batch) / TEMPERATURE).log_softmax(-1) for x in (leaves, teacher))
    kept = torch.zeros_like(q, dtype=torch.bool).scatter(-1, q.topk(count).indices, True)
    buckets = [x.gather(-1, q.topk(count).indices) for x in (p, q)]
    if count < tiny.VOCAB:
        rest = [x.exp().where(~kept, 0.0).sum(-1, keepdim=True).log() for x in (p, q)]
        buckets = [torch.cat(pair, -1) for pair in zip(buckets, rest, strict=True)]
    mask = batch.response_mask
    each = losses.DIVERGENCES[name](*buckets, mask & batch.taught[:, None])
    expected = torch.autograd.grad(0.3 * each.sum() / mask.sum(), list(leaves.values()))
    for key, grad in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[key], grad, rtol=1e-3, atol=1e-7)  # its rope is in float32
    assert max(x.abs().max() for x in found.values()) > 1e-3


@pytest.mark.parametrize(
    "other",
    [
        {"micro": MicroBatching(size=1)},
        {"micro": MicroBatching(token_budget=24)},
        {"remove_padding": False},
        {"share_prompts": False},
        {"wide": True},
    ],
    ids=str,
)
def test_it_does_not_depend_on_how_rows_are_passed(other):
    model, params, _, batch = taught(4)
    term = DistillTerm(divergence=losses.jensen_shannon)
    expected, one = moved(model, params, batch, term)
    if other.pop("wide", False):
        tops = {name: getattr(batch, name) for name in ("teacher_top_ids", "teacher_top_log_probs")}
        padded = {name: torch.nn.functional.pad(x, (0, 0, 0, 2)) for name, x in tops.items()}
        bare = tree.replace(batch, **dict.fromkeys(tops))
        batch = tree.replace(tiny.widened(bare, 3, 2), **padded)
    found, two = moved(model, params, batch, term, **other)
    for key, x in expected.items():
        torch.testing.assert_close(found[key], x, rtol=1e-9, atol=1e-11)
    loss = [report["actor/distill_loss"].total for report in (one, two)]
    torch.testing.assert_close(*loss, rtol=1e-10, atol=1e-12)


def test_what_is_not_there_is_named():
    model, params, _, batch = taught(4)
    term, bare = DistillTerm(divergence=losses.reverse_kl), tree.replace(batch, teacher_top_ids=None)
    with pytest.raises(ValueError, match="listed_log_probs needs teacher_top_ids in the rows"):
        moved(model, params, bare, term)
    forward = attrs.evolve(Forward(model), top=None)
    with pytest.raises(ValueError, match=r"top_ids and top_log_probs need Forward\.top"):
        compute_outputs(params, batch, forward=forward, micro_batching=MICRO, outputs=("top_ids", "top_log_probs"))
