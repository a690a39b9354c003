"""Small worlds by their definitions: every response, every batch and every mean written out as loops."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from fppo import advantages, laws, losses
from fppo.laws.expectation import KL, StepMath, compared, step_bias
from fppo.laws.worlds import DIVERGENCES, END, OUTSIDE, all_batches, world, worlds


def responses(made, horizon, vocabulary):
    """The tokens of each response, in the order of the world."""
    found = [tuple(tokens[mask].tolist()) for tokens, mask in zip(made.tokens, made.mask, strict=True)]
    assert len({*found}) == len(found)
    wanted = set()
    for length in range(1, horizon + 1):
        for tokens in itertools.product(range(vocabulary), repeat=length):
            if END not in tokens[:-1] and (tokens[-1] == END or length == horizon):
                wanted.add(tokens)
    assert {*found} == wanted
    return found


def chances_of(made, found, logits, prompt):
    """The probabilities of the tokens of each response, by the place that each is drawn at."""
    every = []
    for row, tokens in enumerate(found):
        places = made.places[row][made.mask[row]].tolist()
        every.append(
            [float(logits[prompt, place].softmax(0)[token]) for place, token in zip(places, tokens, strict=True)]
        )
    return every


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize(("prompts", "vocabulary", "horizon"), [(1, 2, 3), (2, 3, 2)])
def test_values_are_the_expected_scores_of_what_follows(prompts, vocabulary, horizon, gap):
    """Less the KL estimate of the tokens from there on, and with the critic's errors."""
    made = world(prompts=prompts, vocabulary=vocabulary, horizon=horizon, seed=4, lag=0.3, critic_error=0.5, gap=gap)
    found = responses(made, horizon, vocabulary)
    values, log_probs, baselines, squares = (
        made.values(0.7),
        made.log_probs(made.logits),
        made.baselines(),
        made.squares(),
    )
    for prompt in range(prompts):
        own, ref = (chances_of(made, found, logits, prompt) for logits in (made.logits, made.ref_logits))
        for row, tokens in enumerate(found):
            inside = made.mask[row]
            assert log_probs[prompt, row][inside].tolist() == pytest.approx([math.log(x) for x in own[row]])
            for t in range(len(tokens)):
                total = chance = 0.0
                for other, later in enumerate(found):
                    if later[:t] != tokens[:t] or len(later) <= t:
                        continue
                    away = sum(math.log(a / b) for a, b in zip(own[other][t:], ref[other][t:], strict=True))
                    total += math.prod(own[other]) * (float(made.scores[prompt, other]) - 0.7 * away)
                    chance += math.prod(own[other])
                place = int(made.places[row][inside][t])
                expected = total / chance + float(made.value_errors[prompt, place])
                assert float(values[prompt, row][inside][t]) == pytest.approx(expected)
                p = made.logits[prompt, place].softmax(0)
                assert float(squares[prompt, row][inside][t]) == pytest.approx(float((p * p).sum()))
        greedy: list[int] = []
        while len(greedy) < horizon and (not greedy or greedy[-1] != END):
            row = next(
                i
                for i, tokens in enumerate(found)
                if tokens[: len(greedy)] == tuple(greedy) and len(tokens) > len(greedy)
            )
            place = int(made.places[row][made.mask[row]][len(greedy)])
            greedy.append(int(made.logits[prompt, place].argmax()))
        assert float(baselines[prompt]) == float(made.scores[prompt, found.index(tuple(greedy))])
    assert (values[:, ~made.mask] == 0).all()


@pytest.mark.parametrize("of", DIVERGENCES)
def test_a_gradient_is_that_of_the_score_less_the_divergence(of):
    """Divergences of tokens are under the places that the policy visits, which stand still."""
    made = world(prompts=2, vocabulary=2, horizon=2, seed=1)
    found = responses(made, 2, 2)

    def value(logits, visited):
        total = 0.0
        for prompt in range(2):
            own = chances_of(made, found, logits, prompt)
            there = chances_of(made, found, visited, prompt)
            ref = chances_of(made, found, made.ref_logits, prompt)
            for row in range(len(found)):
                total += math.prod(own[row]) * float(made.scores[prompt, row])
                if of == "sequence":
                    total -= 0.3 * math.prod(own[row]) * math.log(math.prod(own[row]) / math.prod(ref[row]))
                    continue
                for place in made.places[row][made.mask[row]].tolist():
                    p, q = (x[prompt, place].softmax(0).tolist() for x in (logits, made.ref_logits))
                    apart = {
                        "token": sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
                        "reverse": sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)),
                        "variation": sum(abs(a - b) for a, b in zip(p, q, strict=True)),
                    }[of]
                    total -= 0.3 * math.prod(there[row]) * apart
        return total / 2

    assert float(made.objective(made.logits, 0.3, of)) == pytest.approx(value(made.logits, made.logits))
    gradient, step = made.gradient(0.3, of).view(made.logits.shape), 1e-5
    for place in itertools.product(*map(range, made.logits.shape)):
        more, less = made.logits.clone(), made.logits.clone()
        more[place] += step
        less[place] -= step
        slope = (value(more, made.logits) - value(less, made.logits)) / (2 * step)
        assert float(gradient[place]) == pytest.approx(-slope, abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_batches_are_all_that_the_sampler_can_draw(n):
    made = world(prompts=2, vocabulary=2, horizon=2, lag=0.5, seed=2)
    found = responses(made, 2, 2)
    batches = all_batches(made, n)
    sampler = [[math.prod(x) for x in chances_of(made, found, made.sampler_logits, prompt)] for prompt in range(2)]
    expected: dict[tuple, float] = {}
    for one in itertools.product(range(len(found)), repeat=n):
        for other in itertools.product(range(len(found)), repeat=n):
            chance = math.prod(sampler[0][s] for s in one) * math.prod(sampler[1][s] for s in other)
            key = tuple(sorted(one)), tuple(sorted(other))
            expected[key] = expected.get(key, 0.0) + chance
    assert batches.count == len(expected)
    assert batches.rows == 2 * n
    for number in range(batches.count):
        own = batches.numbers == number
        rows = list(zip(batches.prompts[own].tolist(), batches.responses[own].tolist(), strict=True))
        key = tuple(tuple(sorted(s for prompt, s in rows if prompt == p)) for p in range(2))
        assert float(batches.chances[number]) == pytest.approx(expected.pop(key))
    assert not expected


def test_a_world_is_as_far_from_others_as_it_is_told():
    plain = world(prompts=2, seed=7)
    assert torch.equal(plain.sampler_logits, plain.logits)
    assert not plain.value_errors.any()
    lagging, further = (world(prompts=2, seed=7, lag=lag) for lag in (0.5, 1.0))
    assert torch.equal(lagging.logits, plain.logits)
    torch.testing.assert_close(2 * (lagging.sampler_logits - plain.logits), further.sampler_logits - plain.logits)
    assert 0.3 < float((further.sampler_logits - plain.logits).std()) < 2
    wrong, worse = (world(prompts=2, seed=7, critic_error=error) for error in (0.25, 0.5))
    torch.testing.assert_close(2 * wrong.value_errors, worse.value_errors)
    assert 0.2 < float(worse.value_errors.std()) < 1
    assert 0.2 < float((plain.ref_logits - plain.logits).std()) < 1
    binary = world(prompts=2, seed=7, binary=True)
    above = plain.scores > plain.scores.median(1, keepdim=True).values
    assert torch.equal(binary.scores, above.double())
    assert binary.horizon == plain.horizon == 3
    gap = world(vocabulary=2, horizon=3, gap=True)
    assert gap.tokens.shape[1] == 4
    assert not gap.mask[:, 1].any()
    assert plain.made == "laws.world(prompts=2, vocabulary=3, horizon=3, seed=7)"
    assert eval(gap.made, {"laws": laws}).made == gap.made


def test_the_worlds_of_a_check_grow():
    made = worlds(lag=0.25, critic_error=0.5)
    sizes = [(len(x.logits), x.logits.shape[2], x.horizon, x.tokens.shape[1] - x.horizon) for x in made]
    assert sizes == [(1, 2, 1, 0), (1, 2, 2, 0), (1, 3, 2, 0), (2, 2, 2, 1), (1, 3, 3, 1)]
    for x in made:
        assert not torch.equal(x.sampler_logits, x.logits)
        assert x.value_errors.any()
    assert {*worlds(binary=True)[4].scores.flatten().tolist()} == {0.0, 1.0}


@pytest.mark.parametrize("mode", losses.MODES)
def test_the_mean_of_a_step_is_that_of_all_its_batches(mode):
    """By the weights of each mode, and with the KL estimate in the rewards, of all ordered pairs of responses."""
    made = world(vocabulary=2, horizon=2, seed=3, lag=0.4)
    found = responses(made, 2, 2)
    own, ref, sampler = (
        chances_of(made, found, logits, 0) for logits in (made.logits, made.ref_logits, made.sampler_logits)
    )
    slopes = made.slopes()[0]
    mean = torch.zeros(slopes.shape[-1], dtype=torch.float64)
    square = 0.0
    away = [sum(math.log(a / b) for a, b in zip(own[s], ref[s], strict=True)) for s in range(len(found))]
    scores = [float(made.scores[0, s]) - 0.2 * away[s] for s in range(len(found))]
    for pair in itertools.product(range(len(found)), repeat=2):
        lengths = [len(found[s]) for s in pair]
        gradient = torch.zeros_like(mean)
        for place, s in enumerate(pair):
            weight = {
                "token-mean": 1 / sum(lengths),
                "token-sum": 1.0,
                "seq-mean-token-sum": 1 / 2,
                "seq-mean-token-mean": 1 / (2 * lengths[place]),
                "seq-mean-token-sum-norm": 1 / (2 * 2),
            }[mode]
            gain = scores[s] - scores[pair[1 - place]]
            gradient -= weight * gain * slopes[s][made.mask[s]].sum(0)
        chance = math.prod(math.prod(sampler[s]) for s in pair)
        mean += chance * gradient
        square += chance * float(gradient @ gradient)
    step = StepMath(estimator=advantages.rloo, mode=mode, kl=KL("k1", 0.2))
    bias = step_bias(step, made)
    torch.testing.assert_close(bias.mean, mean)
    assert bias.deviation == pytest.approx(math.sqrt(square - float(mean @ mean)))
    assert bias.noise == pytest.approx(bias.deviation / float(mean.norm()))
    torch.testing.assert_close(bias.gradient, made.gradient(0.2))


def test_a_bias_is_the_part_along_the_gradient_and_the_part_across():
    g = torch.tensor([3.0, 4.0]).double()
    found = compared(torch.tensor([6.0, 8.0]).double() + torch.tensor([-4.0, 3.0]).double(), g, 2.0)
    assert (found.scale, found.turned) == (pytest.approx(2.0), pytest.approx(0.5))
    assert found.cosine == pytest.approx(10 / math.sqrt(125))
    assert found.noise == pytest.approx(2 / math.sqrt(125))
    assert found.error == pytest.approx(math.sqrt(50) / 5)
    back = compared(-g, g, 1.0)
    assert (back.scale, back.turned, back.cosine) == (pytest.approx(-1.0), pytest.approx(0.0), pytest.approx(-1.0))
    still = compared(0 * g, g, 1.0)
    assert (still.scale, still.turned, still.noise) == (0.0, 0.0, math.inf)
    assert math.isnan(still.cosine)
    nothing = compared(g, 0 * g, 1.0)
    assert (nothing.scale, nothing.turned, nothing.error) == (0.0, math.inf, pytest.approx(5.0))


def test_numbers_outside_of_a_mask_show_where_they_are_read():
    def blind(rewards, values, mask):
        return advantages.gae(rewards, values, torch.ones_like(mask), lam=0.0)

    assert OUTSIDE > 1
    made = world(vocabulary=2, horizon=2, gap=True)
    assert step_bias(StepMath(estimator=partial(advantages.gae, lam=0.0)), made).error < 1e-12
    assert step_bias(StepMath(estimator=blind), made).error > 0.01
