"""Supervised learning: the gradient of transformers' cross entropy, over responses alone, in any cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fppo import batch as batches
from fppo import metrics
from fppo.key import Key
from fppo.models.precision import KeepDouble
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.supervised import UpdateSupervised, demonstrations, imitate
from fppo.steps.train_state import init_state
from tests import tiny

MODEL, PARAMS = tiny.model_and_params()
GRADIENT = adamw(schedule("constant", 1e-3), betas=(0.0, 0.9), max_grad_norm=None)
WHOLE = MicroBatching(size=1000)


def _texts(seed, rows):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        length = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(2, tiny.VOCAB, (length,), generator=generator).tolist()

    return [draw(1, 5) for _ in range(rows)], [draw(0 if i else 1, 6) for i in range(rows)]


def _update(state, batch, *, optimizer=GRADIENT, key=None, mini_batch_size=None, micro_batching=WHOLE):
    loop = Loop(mini_batch_size=mini_batch_size or len(batch.tokens), micro_batching=micro_batching)
    return UpdateSupervised(forward=Forward(MODEL), loop=loop, optimizer=optimizer)(state, batch, key=key)


def _cross_entropy(prompts, responses):
    """The slow program: (mean loss per response token, gradients) of transformers' own module."""
    module = AutoModelForCausalLM.from_config(tiny.config(), dtype=torch.float64, attn_implementation="eager").eval()
    module.load_state_dict(PARAMS, strict=False)
    module.tie_weights()
    total = torch.zeros((), dtype=torch.float64)
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = torch.tensor([[*prompt, *response]])
        with KeepDouble():
            logits = module(tokens).logits[0, len(prompt) - 1 : -1]
        total = total + F.cross_entropy(logits, tokens[0, len(prompt) :], reduction="sum")
    loss = total / sum(map(len, responses))
    loss.backward()
    return loss.item(), {name: x.grad for name, x in module.named_parameters()}


@pytest.mark.slow
@settings(max_examples=10)
@given(rows=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_the_gradient_is_that_of_the_plain_cross_entropy_in_any_cut(rows, seed):
    prompts, responses = _texts(seed, rows)
    loss, grads = _cross_entropy(prompts, responses)
    batch = demonstrations(prompts, responses, pad_token_id=0)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    for given_batch, cut in (
        (batch, WHOLE),
        (batch, MicroBatching(size=1)),
        (batches.rows(batch, order), MicroBatching(token_budget=13)),
    ):
        state, report = _update(init_state(PARAMS, GRADIENT), given_batch, micro_batching=cut)
        assert metrics.report(report)["supervised/nll_loss"] == pytest.approx(loss, rel=1e-10)
        for name, grad in grads.items():
            torch.testing.assert_close(state.opt.mu[name], grad, atol=1e-11, rtol=1e-9)


def test_demonstrations_are_padded_like_a_rollout():
    batch = demonstrations([[5, 6], [7]], [[8], [9, 10, 1]], pad_token_id=0)
    assert batch.tokens.tolist() == [[5, 6, 8, 0, 0], [0, 7, 9, 10, 1]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.response_mask.int().tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.row_ids.tolist() == [0, 1]
    with pytest.raises(ValueError, match="demonstration 1 has an empty prompt"):
        demonstrations([[5], []], [[6], [7]], pad_token_id=0)


@pytest.mark.slow
def test_it_learns_and_its_metrics_are_means_over_mini_batches():
    prompts, responses = _texts(1, 9)
    batch = demonstrations(prompts, responses, pad_token_id=0)
    optimizer = adamw(schedule("constant", 0.02))
    state, losses = init_state(PARAMS, optimizer), []
    for epoch in range(8):
        state, report = _update(
            state, batch, optimizer=optimizer, mini_batch_size=4, micro_batching=MicroBatching(size=3), key=Key(epoch)
        )
        losses.append(metrics.report(report)["supervised/nll_loss"])
    assert state.step == 24
    assert losses[-1] < losses[0] / 2


def test_imitation_is_a_step_per_batch_which_leaves_the_parameters_that_it_begins_with():
    batches_of = [demonstrations(*_texts(seed, 3), pad_token_id=0) for seed in range(4)]
    own, optimizer = {name: x.clone() for name, x in PARAMS.items()}, adamw(schedule("constant", 0.02))
    state, losses, said = init_state(PARAMS, optimizer), [], []
    for batch in batches_of:
        state, report = _update(state, batch, optimizer=optimizer)
        losses.append(metrics.report(report)["supervised/nll_loss"])
    how = {"forward": Forward(MODEL), "optimizer": optimizer, "micro_batching": WHOLE}
    got = imitate(own, batches_of, **how, on_step=lambda step, loss: said.append((step, loss)), every=2)
    assert said == [(2, losses[1]), (4, losses[3])]
    for name, x in PARAMS.items():
        assert torch.equal(own[name], x)
        assert torch.equal(got[name], state.params[name])
