"""Rewards of steps: on the tokens that the definition says, from any function, and refused where they do not fit."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fppo import metrics, rewards
from fppo.advantages import token_rewards
from fppo.batch import Column, narrow, same_scores
from fppo.pipeline.draw import concat
from fppo.quickstart import bpe_tokenizer, character_tokenizer
from fppo.rewards.functions import RewardTerm, WeightedSum
from fppo.workers.sample import Outcome, outcome_of
from tests.rewards import functions
from tests.rewards.samples import rollout as letters

LETTERS = character_tokenizer("abcdefghijklmnopqrstuvwxyz")
WORDS = bpe_tokenizer(["let x be two. then y is four\nso it is € six € six"] * 3, size=300)


def rollout(texts, *, holes=(), tokenizer=LETTERS):
    """Responses that end with <eos>, in which the policy did not choose the tokens at `holes`, (row, place)."""
    ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    rows = letters(["q"] * len(ids), ["a" * (len(row) - 1) for row in ids], [None] * len(ids), n=2)
    tokens, mask = torch.zeros_like(rows.tokens), rows.response_mask.clone()
    for row, own in enumerate(ids):
        tokens[row, 1 : 1 + len(own)] = torch.tensor(own)
    for place in holes:
        mask[place] = False
    return attrs.evolve(rows, tokens=tokens, response_mask=mask, versions=rows.versions + 1)


def score(rows, terms, tokenizer=LETTERS, **how):
    with rewards.RewardRunner(WeightedSum(tuple(terms))) as runner:
        return rewards.score(rows, reward=runner, tokenizer=tokenizer, **how)


@attrs.frozen(eq=False)
class Drawn:
    """A function whose results are given by row: a number, rewards of tokens or of steps, or None where it fails."""

    results: list[Any]
    reward_inline = True

    def __call__(self, sample: Any) -> Any:
        result = self.results[sample.extras["row"]]
        if result is None:
            raise RuntimeError("no")
        return result


@attrs.frozen(eq=False)
class Whole:
    """The same of the whole rollout, as a tensor [B, T]."""

    results: list[Any]
    reward_kind = "tensor"

    def __call__(self, rollout: Any) -> Any:
        given = torch.full(rollout.response_mask.shape, math.nan)
        for row, own in enumerate(self.results):
            given[row, : len(own or ())] = torch.tensor([math.nan if x is None else x for x in own or ()])
        given[:, -1] = given[:, -1].where(rollout.attention_mask[:, -1], math.inf)  # padding is not looked at
        return given, {}, torch.tensor([own is not None for own in self.results])


NUMBER = st.sampled_from([-1.0, 0.0, 0.25, 0.1, 2.0])


@st.composite
def cases(draw):
    """Texts, places that the policy did not choose, and terms: weight, kind, and for each row a result."""
    texts = draw(st.lists(st.text("abcz", min_size=0, max_size=5), min_size=1, max_size=4))
    holes = [(row, place) for row, text in enumerate(texts) for place in range(len(text) + 1) if draw(st.booleans())]
    terms = []
    for _ in range(draw(st.integers(1, 3))):
        kind, results = draw(st.sampled_from(["sample", "tensor"])), []
        for text in texts:
            tokens = st.lists(NUMBER | st.none(), min_size=len(text) + 1, max_size=len(text) + 1)
            ends = st.lists(st.integers(1, max(len(text), 1)), unique=True, max_size=len(text)).map(sorted)
            steps = ends.flatmap(
                lambda x: st.builds(rewards.StepRewards, st.lists(NUMBER, min_size=len(x), max_size=len(x)), st.just(x))
            )
            results.append(draw(st.none() | tokens if kind == "tensor" else st.none() | NUMBER | tokens | steps))
        terms.append((draw(st.sampled_from([1.0, -0.5, 0.0, 3.0])), kind, results))
    return texts, holes, terms


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])  # drawing takes long, not scoring
@given(cases())
def test_every_reward_is_at_its_token_and_all_add_up_to_the_score(case):
    texts, holes, drawn = case
    rows = rollout(texts, holes=holes)
    terms = [RewardTerm(f"t{i}", w, {"sample": Drawn, "tensor": Whole}[k](r)) for i, (w, k, r) in enumerate(drawn)]
    scored, report = score(rows, terms)
    given_steps = [any(r is not None and not isinstance(r, float) for r in x) or k == "tensor" for _, k, x in drawn]
    if not any(w and some for (w, _, _), some in zip(drawn, given_steps, strict=True)):
        assert scored.process_rewards is None
        return
    counts = []
    for row, text in enumerate(texts):
        chosen = rows.response_mask[row].nonzero().flatten().tolist()
        expected: dict[int, float] = {}
        total = 0.0
        for weight, _, results in drawn:
            own = results[row]
            if not weight:
                continue
            if own is None:
                total = math.nan
                continue
            if isinstance(own, rewards.StepRewards):
                size = len(text)
                pairs = [(end - 1 if end < size else size, x) for end, x in zip(own.ends, own.rewards, strict=True)]
            elif isinstance(own, float):
                pairs = [(len(text), own)]
            else:
                pairs = [(place, x) for place, x in enumerate(own) if x is not None]
            if not pairs:  # a response without steps is one step
                own, pairs = 0.0, [(len(text), 0.0)]
            total += weight * sum(x for _, x in pairs)
            for place, x in pairs:
                before = [t for t in chosen if t <= place]
                if chosen:
                    at = before[-1] if before else chosen[0]
                    at = chosen[-1] if isinstance(own, float) else at
                    expected[at] = expected.get(at, 0.0) + weight * x
        assert scored.scores[row].item() == pytest.approx(total, nan_ok=True)
        if total == total:
            counts.append(len(expected))
            found = {t: x for t, x in enumerate(scored.process_rewards[row].tolist()) if x == x}
            assert found == pytest.approx(expected)
    if counts:
        assert metrics.report(report)["rollout/steps/mean"] == pytest.approx(sum(counts) / len(counts))
    dense = token_rewards(scored.scores.nan_to_num(0.0), rows.response_mask, turns=scored.process_rewards)
    there = rows.response_mask.any(1) & ~scored.scores.isnan()
    torch.testing.assert_close(dense.sum(1)[there], scored.scores[there])


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["two", "€", " ", ".", "\n", "six €", "é", "<eos>"]), min_size=1, max_size=6), st.data()
)
def test_a_step_ends_with_the_token_that_completes_its_last_character(parts, data):
    """Of tokens of several characters, characters of several tokens, and special tokens within."""
    ids = [*WORDS.encode("".join(parts)), WORDS.eos_token_id]
    rows = rollout([""], tokenizer=WORDS)
    wide = torch.tensor([[5, *ids]])
    full = torch.ones(1, len(ids), dtype=torch.bool)
    rows = attrs.evolve(rows, tokens=wide, attention_mask=torch.ones_like(wide).bool(), response_mask=full)
    rows = attrs.evolve(rows, rollout_log_probs=full.float(), sampling_log_probs=full.float())
    (sample,) = rewards.samples_of(rows, WORDS)
    text = sample.response
    end = data.draw(st.integers(min(1, len(text)), len(text)))

    def reaches(count):
        return WORDS.decode(ids[:count], skip_special_tokens=True).startswith(text[:end])

    place = len(ids) - 1 if end == len(text) else next(n for n in range(1, len(ids) + 1) if reaches(n)) - 1
    scored, _ = score(rows, [RewardTerm("t", 1.0, Drawn([rewards.StepRewards([2.0], [end])]))], WORDS)
    assert scored.process_rewards.nan_to_num(0.0).nonzero().tolist() == [[0, place]]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([1.0, 2.0], r"2 numbers for 4 response tokens; it must return one for each \(1 of 1 samples; the response"),
        ([1.0, math.nan, 0.0, 0.0], r"\[1.0, nan, 0.0, 0.0\]; it must return .*one for each response token"),
        (rewards.StepRewards([1.0, None], [1, 2]), "it must return .*StepRewards"),
        (rewards.StepRewards([1.0], [1, 2]), "1 rewards of steps with 2 ends; each step has one end"),
        (rewards.StepRewards([1.0, 1.0], [2, 2]), r"end at \[2, 2\]; they must ascend .*, from 1 to 3"),
        (rewards.StepRewards([1.0], [0]), r"end at \[0\]; .* from 1 to 3"),
        (rewards.StepRewards([1.0, 1.0], [1, 4]), r"end at \[1, 4\]; .* from 1 to 3"),
        (rewards.StepRewards([1.0], [1.5]), "it must return .*StepRewards"),
        ({"score": [1.0], "more": 1.0}, "1 numbers for 4 response tokens"),
    ],
)
def test_steps_that_do_not_fit_end_the_run_with_function_and_row(result, words):
    with pytest.raises(ValueError, match=f"the reward 'mine' returned .*{words}"):
        score(rollout(["abc"]), [RewardTerm("mine", 1.0, Drawn([result]))])


@pytest.mark.parametrize("shape", [(2,), (1, 3), (1, 4, 1)])
def test_a_tensor_of_another_shape_ends_the_run(shape):
    def whole(rows):
        return torch.zeros(shape)

    with pytest.raises(ValueError, match=r"returned \(.*\), not a tensor of shape \(1,\) or \(1, 4\)"):
        score(rollout(["abc"]), [RewardTerm("whole", 1.0, rewards.tensor_reward(whole))])


def test_arrays_are_lists_of_numbers():
    for numbers in (np.array([0.5, 2.0]), torch.tensor([0.5, 2.0]), (0.5, 2)):
        assert outcome_of(numbers) == Outcome("value", 2.5, steps=rewards.StepRewards((0.5, 2.0)))


def test_steps_travel_from_worker_processes():
    rows = rollout(["abc", "e", ""])
    names = ("by_token", "by_character")
    terms = [RewardTerm(name, 1.0, getattr(functions, name)) for name in names]
    found, _ = score(rows, terms)
    inline = [RewardTerm(x.name, 1.0, rewards.inline_reward(lambda sample, fn=x.fn: fn(sample))) for x in terms]
    expected, _ = score(rows, inline)
    assert torch.equal(found.process_rewards.nan_to_num(9.0), expected.process_rewards.nan_to_num(9.0))
    assert found.process_rewards.nan_to_num(0.0).any()


def test_failures_have_the_score_that_is_named_at_their_last_token():
    rows = rollout(["ab", "ab"])
    scored, _ = score(rows, [RewardTerm("t", 2.0, Drawn([[1.0, None, 0.5], None]))], failure_score=-1.0)
    assert scored.scores.tolist() == [3.0, -2.0]
    assert scored.process_rewards.nan_to_num(9.0).tolist() == [[2.0, 9.0, 1.0], [9.0, 9.0, -2.0]]


def test_an_environments_rewards_stay_at_their_turns_beside_steps():
    """The environment's term counts in the score; what it gave for turns is not counted again at the end."""
    turns = torch.tensor([[0.0, 0.25, 0.0, 1.0]])
    ids = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    rows = attrs.evolve(rollout(["abc"]), turn_rewards=turns, turn_ids=ids)
    environment = rewards.tensor_reward(lambda rows: rows.turn_rewards.sum(1))
    terms = [RewardTerm("e", 1.0, environment), RewardTerm("t", 1.0, Drawn([[0.5, None, None, None]]))]
    scored, _ = score(rows, terms)
    assert scored.scores.tolist() == [1.75]
    assert scored.process_rewards.nan_to_num(9.0).tolist() == [[0.5, 0.25, 9.0, 1.0]]


def test_batches_with_steps_and_without_are_joined():
    some, _ = score(rollout(["abc"]), [RewardTerm("t", 1.0, Drawn([[1.0, None, None, 0.0]]))])
    none, _ = score(rollout(["ab"]), [RewardTerm("t", 1.0, Drawn([3.0]))])
    both = concat([some, none], 0)
    assert token_rewards(both.scores, both.response_mask, turns=both.rewards_within).tolist() == [
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 3.0, 0.0],
    ]
    assert both.step_rewards.nan_to_num(9.0).tolist() == [[1.0, 9.0, 9.0, 0.0], [9.0, 9.0, 3.0, 9.0]]
    assert same_scores([none])[0].process_rewards is None
    assert narrow(type(none), none).process_rewards is None
    assert both.ids == Column(["0", "0"])
