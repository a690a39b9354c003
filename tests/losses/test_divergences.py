"""Divergences of distributions are their definitions, loops over floats, with the gradients that they are named for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses

SEEDS = st.integers(0, 2**20)


def kl(p, q):
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jensen_shannon(p, q, beta=0.5):
    middle = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]
    return beta * kl(q, middle) + (1 - beta) * kl(p, middle)


FORMULAS = {"reverse_kl": kl, "forward_kl": lambda p, q: kl(q, p), "jensen_shannon": jensen_shannon}


def drawn(seed, rows=3, width=4, size=5, spread=2.0):
    """Logits of policy and teacher, and a mask with gaps."""
    g = torch.Generator().manual_seed(seed)
    policy, teacher = (spread * torch.randn(rows, width, size, generator=g).double() for _ in range(2))
    return policy, teacher, torch.rand(rows, width, generator=g) < 0.7


@pytest.mark.parametrize("name", FORMULAS)
@given(SEEDS, st.integers(1, 6), st.sampled_from([0.1, 2.0, 8.0]))
def test_each_is_its_definition_at_each_token_and_nothing_elsewhere(name, seed, size, spread):
    policy, teacher, mask = drawn(seed, size=size, spread=spread)
    p, q = policy.log_softmax(-1), teacher.log_softmax(-1)
    garbage = torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(3, mask.shape)].double()[..., None]
    found = losses.DIVERGENCES[name](*(x.where(mask[..., None], garbage) for x in (p, q)), mask)
    for row, places in enumerate(mask.tolist()):
        for place, there in enumerate(places):
            numbers = (x[row, place].exp().tolist() for x in (p, q))
            assert found[row, place] == pytest.approx(FORMULAS[name](*numbers) if there else 0.0, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
@given(SEEDS)
def test_a_teacher_that_agrees_moves_nothing_and_gives_none(name, seed):
    policy, _, mask = drawn(seed)
    policy = policy.requires_grad_()
    teacher = policy.log_softmax(-1)
    found = losses.DIVERGENCES[name](policy.log_softmax(-1), teacher, mask)
    assert found.abs().max() < 1e-12
    (grad,) = torch.autograd.grad(found.sum(), policy)
    assert grad.abs().max() < 1e-12


@given(SEEDS)
def test_the_mean_gradient_of_sampled_tokens_is_that_of_the_whole_vocabulary(seed):
    """By enumeration: sum_v p_v (log p_v - log q_v) d log p_v, the policy gradient of `advantages.reverse_kl`."""
    policy, teacher, mask = drawn(seed)
    policy, q = policy.requires_grad_(), teacher.log_softmax(-1)
    p = policy.log_softmax(-1)
    (whole,) = torch.autograd.grad(losses.reverse_kl(p, q, mask).sum(), policy, retain_graph=True)
    advantage = (q - p).detach()
    surrogate = -(p.exp().detach() * advantage * p).sum(-1).where(mask, 0.0)
    (sampled,) = torch.autograd.grad(surrogate.sum(), policy)
    torch.testing.assert_close(sampled, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FORMULAS)
@given(SEEDS, st.integers(1, 4))
def test_the_rest_as_one_bucket_is_a_coarser_distribution(name, seed, count):
    """As by a loop over floats, at most the whole's, and its gradient that of the buckets."""
    policy, teacher, mask = drawn(seed, spread=1.0)
    policy = policy.requires_grad_()
    p, q = policy.log_softmax(-1), teacher.log_softmax(-1)
    ids = q.topk(count).indices
    fn = losses.DIVERGENCES[name]
    found = fn(losses.with_tail(p.gather(-1, ids)), losses.with_tail(q.gather(-1, ids)), mask)
    assert (found <= fn(p, q, mask) + 1e-12).all()
    left = torch.zeros_like(p, dtype=torch.bool).scatter(-1, ids, True).logical_not()
    rest = [x.exp().where(left, 0.0).sum(-1, keepdim=True).log() for x in (p, q)]
    expected = fn(*(torch.cat([x.gather(-1, ids), r], -1) for x, r in zip((p, q), rest, strict=True)), mask)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    grads = [torch.autograd.grad(x.sum(), policy, retain_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-9)


def test_the_ends_of_jensen_shannon_are_both_divergences():
    policy, teacher, _ = drawn(0)
    p, q, mask = policy.log_softmax(-1), teacher.log_softmax(-1), torch.ones(3, 4, dtype=torch.bool)
    near = 1e-6
    for beta, factor, name in ((near, near, "forward_kl"), (1 - near, near, "reverse_kl")):
        found = losses.jensen_shannon(p, q, mask, beta=beta) / factor
        torch.testing.assert_close(found, losses.DIVERGENCES[name](p, q, mask), rtol=1e-3, atol=1e-4)
    assert (losses.jensen_shannon(p, q, mask) <= math.log(2)).all()


def test_what_does_not_fit_is_named():
    policy, teacher, mask = drawn(0)
    with pytest.raises(ValueError, match=r"beta=1\.0: give a number between 0 and 1; its ends are forward_kl"):
        losses.jensen_shannon(policy, teacher, mask, beta=1.0)
    with pytest.raises(ValueError, match=r"log-probs of buckets are \[3, 4, 5\] and \[3, 4, 2\] with a mask \[3, 4\]"):
        losses.reverse_kl(policy, teacher[..., :2], mask)
