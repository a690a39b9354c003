"""Log-probs of any targets are those of the model's logits, however rows run, and only chosen ones have gradients."""

from functools import cache

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from fppo import models
from fppo.grad import value_and_grad
from fppo.models.heads import Head
from fppo.models.logits import LogitForm
from fppo.models.model import build
from fppo.models.precision import KeepDouble
from fppo.runtime.simulate import simulate
from fppo.steps.forward import forward_micro_batch
from fppo.steps.outputs import Forward
from fppo.steps.targets import _scores, forward_targets
from tests import tiny


@attrs.frozen(eq=False)
class Scored:
    """Rows with K targets after each token."""

    tokens: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    targets: torch.Tensor
    graded: torch.Tensor


def rows(seed: int, count: int = 4, wide: int = 3, *, alike: bool = False) -> Scored:
    batch = tiny.experience(seed, count)
    g = torch.Generator().manual_seed(seed)
    mask, tokens = batch.attention_mask, batch.tokens
    if alike:  # one prompt for all
        tokens = torch.cat([tokens[:1, :5].expand(count, -1), tokens[:, 5:]], 1)
        mask = torch.cat([mask[:1, :5].expand(count, -1), mask[:, 5:]], 1)
        tokens = tokens.where(mask, 0)
    targets = torch.randint(0, tiny.VOCAB, (*mask.shape, wide), generator=g)
    return Scored(tokens, mask, mask[:, 5:], targets, torch.rand(mask.shape, generator=g) < 0.5)


MODEL, PARAMS = tiny.model_and_params()
few = settings(max_examples=5)


@cache
def plain():
    """The model of transformers itself."""
    built = AutoModelForCausalLM.from_config(tiny.config()).double()
    built.load_state_dict(PARAMS, strict=False)
    built.tie_weights()
    return built


@torch.no_grad()
def by_transformers(batch: Scored, form=None) -> torch.Tensor:
    """Log-softmax of the logits of transformers' own model, row by row, at the targets."""
    found = torch.zeros(batch.targets.shape, dtype=torch.float64)
    for row, mask in enumerate(batch.attention_mask):
        with KeepDouble():  # its norms would compute in float32
            logits = plain()(input_ids=batch.tokens[row, mask][None]).logits[0]
        logits = logits if form is None else form(logits)
        found[row, mask] = logits.log_softmax(-1).gather(1, batch.targets[row, mask])
    return found


@pytest.mark.parametrize("form", [None, LogitForm(softcap=1.5, scale=0.7)])
@given(seed=st.integers(0, 2**20))
@few
def test_equal_the_log_softmax_of_the_logits(form, seed):
    model = MODEL if form is None else attrs.evolve(MODEL, logit_form=form)
    batch = rows(seed)
    found = forward_targets(PARAMS, batch, forward=Forward(model))
    torch.testing.assert_close(found, by_transformers(batch, form), rtol=0.0, atol=1e-8)  # its angles are float32


def test_logits_of_bfloat16_states_and_weights_are_not_rounded():
    """Differences of targets' log-probs are those of the logits, products that are summed in float32."""
    g = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, 64, generator=g).bfloat16() for n in (20, 9))
    targets = torch.randint(0, 9, (20, 4), generator=g)
    found = _scores(states, targets, Head(weight), Forward(MODEL))
    logits = (states.double() @ weight.double().T).gather(1, targets)
    torch.testing.assert_close(found.double().diff(dim=1), logits.diff(dim=1), rtol=0.0, atol=1e-4)


@given(seed=st.integers(0, 2**20))
@few
def test_of_next_tokens_are_those_of_a_pass_over_responses(seed):
    rows = tiny.experience(seed, 4)
    width = rows.response_mask.shape[1]
    following = torch.cat([rows.tokens[:, 1:], rows.tokens[:, :1]], 1)[..., None]
    batch = Scored(rows.tokens, rows.attention_mask, rows.response_mask, following, rows.attention_mask)
    found = forward_targets(PARAMS, batch, forward=Forward(MODEL))[:, -width - 1 : -1, 0].where(rows.response_mask, 0.0)
    expected = forward_micro_batch(PARAMS, rows, forward=Forward(MODEL)).log_probs
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-10)


@given(seed=st.integers(0, 2**20))
@few
def test_packed_padded_and_shared_rows_have_the_same_values_and_gradients(seed):
    model, params = MODEL, PARAMS
    batch = rows(seed, alike=True)
    weights = torch.randn(batch.targets.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def loss(params, forward):
        found = forward_targets(params, batch, forward=forward)
        return (found * weights).sum(), found

    ways = [Forward(model, share_prompts=False), Forward(model, share_prompts=True)]
    ways.append(Forward(model, remove_padding=False, share_prompts=False))
    results = [value_and_grad(loss, has_aux=True)(params, way) for way in ways]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0.0, atol=1e-10)


@given(seed=st.integers(0, 2**20))
@few
def test_k_targets_are_k_single_ones_and_ungraded_ones_have_no_gradient(seed):
    model, params = MODEL, PARAMS
    batch, forward = rows(seed), Forward(model)

    def summed(params, targets, graded):
        found = forward_targets(params, attrs.evolve(batch, targets=targets, graded=graded), forward=forward)
        return (found * (1.0 if graded is batch.graded else batch.graded[..., None])).sum(), found

    together = value_and_grad(summed, has_aux=True)(params, batch.targets, batch.graded)
    alone = [
        value_and_grad(summed, has_aux=True)(params, batch.targets[..., k : k + 1], torch.ones_like(batch.graded))
        for k in range(batch.targets.shape[-1])
    ]
    values = torch.cat([found for (_, found), _ in alone], -1)
    grads = {name: sum(grad[name] for _, grad in alone) for name in params}
    torch.testing.assert_close(together[0][1], values, rtol=0.0, atol=1e-10)
    torch.testing.assert_close(together[1], grads, rtol=0.0, atol=1e-10)


def test_targets_of_a_prompt_that_rows_share_are_scored_once():
    model, params = MODEL, PARAMS
    batch = rows(3, 4, 1, alike=True)
    targets = torch.cat([batch.tokens[:, 1:], batch.tokens[:, :1]], 1)[..., None]
    batch = attrs.evolve(batch, targets=targets, graded=torch.zeros_like(batch.graded))
    counts: list[int] = []
    forward = Forward(model, share_prompts=True)

    def counting(states, *given, **more):
        counts.append(len(states))
        return forward.kernels.log_probs(states, *given, **more)

    kernels = attrs.evolve(forward.kernels, log_probs=counting)
    found = forward_targets(params, batch, forward=attrs.evolve(forward, kernels=kernels))
    assert sum(counts) < int(batch.attention_mask.sum())
    torch.testing.assert_close(found, by_transformers(batch), rtol=0.0, atol=1e-8)


def test_a_value_head_and_a_mesh_that_cuts_rows_are_refused():
    model = build(tiny.config(), head="value")
    with pytest.raises(ValueError, match="value head"):
        forward_targets(models.init_params(model, tiny.Key(0)), rows(0), forward=Forward(model))
    model, params = MODEL, PARAMS

    def on_rank(mesh):
        with pytest.raises(ValueError, match="sequence"):
            forward_targets(params, rows(0), forward=Forward(model, mesh=mesh))

    simulate({"sequence": 2}, on_rank)


def test_targets_that_the_head_excludes_are_impossible_and_take_no_others_with_them():
    """By a bias of -inf, as of a vocabulary that is padded: in the first place, in another, and in all."""
    g = torch.Generator().manual_seed(2)
    states, weight, bias = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((3, 4), (9, 4), (9,)))
    bias[6:] = -torch.inf
    targets = torch.tensor([[7, 1, 2], [3, 8, 0], [6, 7, 7]])
    expected = (states @ weight.T + bias).log_softmax(-1).gather(1, targets)
    states.requires_grad_()
    got = _scores(states, targets, Head(weight=weight, bias=bias), Forward(tiny.model_and_params()[0]))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad(got.where(got.isfinite(), 0.0).sum(), states)
    assert grad.isfinite().all()
