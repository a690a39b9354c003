"""Exact values are those of all responses, one by one."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.advantages import exact_values
from fppo.advantages.exact import GameTree, game_values

END, WORDS = 0, 3


def responses(limit):
    """All that a policy can say in at most `limit` tokens: to its end, or until it is cut."""
    for length in range(1, limit + 1):
        for body in itertools.product(range(1, WORDS), repeat=length - 1):
            yield (*body, END)
    yield from itertools.product(range(1, WORDS), repeat=limit)


class Policy:
    """Log-probs of the next token, drawn for every prefix."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, prefix):
        generator = torch.Generator().manual_seed(self.seed + hash(prefix) % 2**30)
        return torch.randn(WORDS, generator=generator, dtype=torch.float64).log_softmax(0).tolist()

    def log_prob(self, response, start=0):
        return sum(self(response[:t])[response[t]] for t in range(start, len(response)))


def by_enumeration(policy, prefix, answer, limit, gamma):
    """The sum over all responses that begin with the prefix."""
    value = 0.0
    for response in responses(limit):
        if response[: len(prefix)] == prefix and response == answer:
            value += math.exp(policy.log_prob(response, len(prefix))) * gamma ** (len(response) - 1 - len(prefix))
    return value


def padded(rows, width):
    tokens = torch.tensor([[*row, *[7] * (width - len(row))] for row in rows])
    return tokens, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


@given(st.integers(1, 4), st.integers(0, 2**16), st.sampled_from([1.0, 0.9]), st.data())
def test_they_are_those_of_all_responses_one_by_one(limit, seed, gamma, data):
    policy, everything = Policy(seed), list(responses(limit))
    pairs = data.draw(st.lists(st.tuples(*[st.sampled_from(everything)] * 2), min_size=1, max_size=5))
    right, said = zip(*[(a, b if i % 2 else a[:-1] + b[len(a) - 1 :]) for i, (a, b) in enumerate(pairs)])
    width = data.draw(st.integers(1, limit))  # some answers are longer than all that is read of the responses
    said = [(row if row in everything else answer)[:width] for row, answer in zip(said, right)]
    answers, answer_mask = padded(right, max(map(len, right)))
    tokens, mask = padded(said, width)
    log_probs = torch.full(answers.shape, float("nan"), dtype=torch.float64)
    for i, answer in enumerate(right):
        for t in range(len(answer)):
            log_probs[i, t] = policy(answer[:t])[answer[t]]
    values = exact_values(log_probs, answers, answer_mask, tokens, mask, gamma=gamma)
    for i, (answer, response) in enumerate(zip(right, said)):
        expected = [by_enumeration(policy, response[:t], answer, limit, gamma) for t in range(len(response))]
        assert values[i].tolist() == pytest.approx(expected + [0.0] * (width - len(response)), rel=1e-12)


def test_what_does_not_fit_is_refused(unhooked):
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"shapes do not fit.*'responses': \[2, 2\]"):
        exact_values(x, x.long(), mask, x.long()[:, :2], mask)


@given(st.integers(1, 4), st.integers(0, 99), st.sampled_from([1.0, 0.7]))
def test_values_of_a_game_are_those_of_its_recursion(height, seed, gamma):
    """A game whose state i has two tokens, each of which ends it, or leads with chance to later states."""
    g = torch.Generator().manual_seed(seed)
    at = torch.arange(height).repeat_interleave(2)
    edges = [(e, to) for e in range(2 * height) for to in range(int(at[e]) + 1, height)]
    by, to = (torch.tensor([edge[i] for edge in edges], dtype=torch.int64) for i in range(2))
    draw = partial(torch.rand, generator=g, dtype=torch.float64)
    ends, chance, probs = draw(2 * height), draw(len(edges)), draw(2 * height)
    tree = GameTree(at=at, ends=ends, by=by, to=to, chance=chance, places=height, height=height)

    def value(state):
        return sum(float(probs[e]) * said(e) for e in (2 * state, 2 * state + 1))

    def said(e):
        later = sum(float(chance[i]) * value(to) for i, (own, to) in enumerate(edges) if own == e)
        return float(ends[e]) + gamma * later

    got = game_values(probs, tree, gamma=gamma)
    assert got.values.tolist() == pytest.approx([value(state) for state in range(height)])
    assert got.action_values.tolist() == pytest.approx([said(e) for e in range(2 * height)])
