"""Process supervision: steps of responses are compared, and rewards within responses turn no gradient."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import advantages, laws
from fppo.advantages import grpo, grpo_process, token_rewards
from fppo.laws.references import advantages as references


def steps_of(seed, rows=6, width=7):
    """(rewards of steps, mask, groups), with rows without tokens and without steps."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[seed % rows] = False
    rewards = torch.randint(-2, 3, (rows, width), generator=g).double() / 4
    rewards = rewards.where(torch.rand(rows, width, generator=g) < 0.4, torch.nan)
    return rewards, mask, torch.randint(0, 3, (rows,), generator=g)


@given(st.integers(0, 10**6), st.sampled_from(["std", "none"]))
def test_steps_of_a_group_are_compared_as_the_definition_says(seed, scale):
    case = steps_of(seed)
    found, expected = grpo_process(*case, scale=scale), references.grpo_process(*case, scale=scale)
    torch.testing.assert_close(tuple(found), tuple(expected))
    shifted = grpo_process(case[0] + 50.0, *case[1:], scale=scale)
    torch.testing.assert_close(shifted.advantages, found.advantages, rtol=1e-6, atol=1e-6)


@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]))
def test_a_response_of_one_step_is_compared_as_a_response(seed, dtype):
    _, mask, groups = steps_of(seed)
    scores = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed), dtype=dtype)
    rewards = token_rewards(scores, mask)
    last = rewards.where(rewards != 0, torch.nan)
    for one, other in zip(grpo_process(last, mask, groups), grpo(scores, mask, groups), strict=True):
        assert torch.equal(one, other)


def of_responses(scores, mask, groups):
    """Each response as one step, from its score."""
    last = token_rewards(torch.ones_like(scores), mask) > 0
    return grpo_process(scores[:, None].where(last, torch.nan), mask, groups)


def test_its_laws_are_those_of_groups():
    laws.check_advantages(of_responses)


def dense(seed, early=0):
    """A world whose scores are sums of rewards of tokens, by the tokens up to there; some are steps, some are not. With
    `early` a reward comes so many tokens before what it is for."""
    world = laws.world(vocabulary=2, horizon=3, seed=seed, gap=seed % 2 == 1)
    g = torch.Generator().manual_seed(seed)
    by_prefix: dict[tuple[int, ...], float] = {}
    table = torch.full(world.mask.shape, torch.nan, dtype=torch.float64)
    for row, mask in enumerate(world.mask):
        places = mask.nonzero().flatten().tolist()
        for number in range(len(places)):
            prefix = tuple(world.tokens[row, places[: number + 1]].tolist())
            by_prefix.setdefault(prefix, float(torch.randn((), generator=g, dtype=torch.float64)))
            if len(prefix) != 2 or early:
                table[row, places[max(number - early, 0)]] = by_prefix[prefix]
    scores = table.nan_to_num(0.0).sum(1)
    numbers = {tuple(ids): row for row, ids in enumerate(world.tokens.where(world.mask, -1).tolist())}

    def placed(rows):
        width = rows.response_mask.shape[1]
        said = rows.tokens[:, -width:].where(rows.response_mask, -1)
        return attrs.evolve(rows, process_rewards=table[[numbers[tuple(ids)] for ids in said.tolist()]])

    return attrs.evolve(world, scores=scores.expand(world.scores.shape)), placed


def estimators(placed):
    """Estimators of tokens, given the rewards that rows of the world have at their tokens."""

    def rewards_of(rows):
        rows = placed(rows)
        return token_rewards(rows.scores, rows.response_mask, turns=rows.rewards_within)

    def to_go(rows, mask):
        return advantages.discounted_returns(rewards_of(rows), mask)

    def gae(rows, mask):
        values = mask.double().cumsum(1)  # of the tokens before alone, whatever they say
        return advantages.gae(rewards_of(rows), values, mask, lam=1.0)

    def sums(rows, mask, groups):
        return advantages.rloo(rewards_of(rows).sum(1), mask, groups)

    return {"to go": (to_go, 1), "gae": (gae, 1), "rloo": (sums, 2)}


@pytest.mark.parametrize("name", ["to go", "gae", "rloo"])
@pytest.mark.parametrize("seed", range(2))
def test_the_mean_gradient_is_that_of_the_sum_of_the_rewards(name, seed):
    """Over all batches of a small world. A reward that came before the token that earned it would not reach it."""
    world, placed = dense(seed)
    fn, n = estimators(placed)[name]
    laws.check_gradient(fn, n=n, worlds=[world])
    if name == "to go":
        world, placed = dense(seed, early=1)
        with pytest.raises(laws.LawViolation, match="expectation"):
            laws.check_gradient(estimators(placed)[name][0], n=n, worlds=[world])
