"""Rollouts to scores, and scores to validation metrics."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import fmean

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import batch, metrics, rewards
from fppo.episodes import joined
from fppo.rewards import RewardRunner, Sample
from fppo.rewards.environment import environment_reward
from fppo.rewards.scoring import EXTRACTED
from tests.rewards import functions
from tests.rewards.samples import NONE, Letters, rollout


@rewards.inline_reward
def vowels(rows: Sample) -> dict[str, float]:
    if "z" in rows.response:
        raise RuntimeError("no z")
    count = float(sum(c in "aeiou" for c in rows.response))
    return {"score": count, "length": float(len(rows.response_tokens))}


def score(rows, reward):
    with RewardRunner(reward) as runner:
        return rewards.score(rows, reward=runner, tokenizer=Letters())


def test_samples_hold_texts_and_ids():
    rows = rollout(["ab", "c"], ["xyz", "x"], ["t", None])
    first, second = rewards.samples_of(rows, Letters())
    assert first == Sample("ab", "xyz", "t", "letters", {"row": 0}, (1, 2), (24, 25, 26, 27), "stop")
    assert (second.prompt, second.response, second.prompt_tokens, second.response_tokens) == ("c", "x", (3,), (24, 27))
    # tokens of tools and environments stand between the policy's own
    chosen = rows.response_mask & (torch.arange(rows.response_mask.shape[1]) % 2 == 0)
    assert rewards.samples_of(attrs.evolve(rows, response_mask=chosen), Letters()) == [first, second]


def test_scores_and_metrics():
    rows = rollout(["q"] * 3, ["aeb", "b", "az"], [None] * 3)
    scored, report = score(rows, vowels)
    assert scored.scores.tolist() == [2.0, 0.0, NONE]
    assert scored.has_score.tolist() == [True, True, False]
    assert scored.scores.dtype == torch.float32
    assert {k: v.tolist() for k, v in scored.named_scores.items()} == {
        "vowels": [2.0, 0.0, NONE],
        "length": [4.0, 2.0, NONE],
    }
    assert scored.named_scores["length"].dtype == torch.float32
    assert torch.equal(scored.tokens, rows.tokens)
    assert scored.extras == rows.extras
    assert metrics.report(report) == pytest.approx(
        {
            "critic/score/mean": 1.0,
            "critic/score/max": 2.0,
            "critic/score/min": 0.0,
            "reward/vowels": 1.0,
            "reward/length": 3.0,
            "reward/unscored": 1.0,
            "reward/errors": 1.0,
            "reward/timeouts": 0.0,
        }
    )
    assert batch.num_rows(scored) == 3


@pytest.mark.slow
def test_a_function_that_fails_on_all_rows_of_the_first_policy_is_an_error():
    """A later one has shown that it can score: such rows are counted."""
    rows = rollout(["q"] * 3, ["aeb", "b", "a"], [None] * 3)
    both = rewards.weighted_sum({"v": vowels, "r": functions.refuses})
    with pytest.raises(
        ValueError, match=r"the reward 'r' failed on every one of the first 3 .*LookupError: the key is not set"
    ):
        score(rows, both)
    later = batch.extend(type(rows), rows, versions=torch.tensor([0, 0, 1]))
    scored, report = score(later, both)
    assert scored.scores.tolist() == [NONE] * 3
    assert scored.named_scores["v"].tolist() == [2.0, 0.0, 1.0]
    assert (metrics.report(report)["reward/errors"], metrics.report(report)["reward/unscored"]) == (3, 3)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([[0], [0, 1], [2]]),
)
def test_a_first_policy_is_at_fault_for_all_rows_of_one_function(fails, versions):
    """Not for as many failures of several functions; and a row of a later policy shows that it can score."""

    def failing(number):
        return rewards.inline_reward(lambda sample: 1.0 / (not fails[sample.extras["row"]][number]))

    rows = rollout(["q"] * len(fails), ["a"] * len(fails), [None] * len(fails))
    versions = torch.tensor([versions[row % len(versions)] for row in range(len(fails))])
    reward = rewards.weighted_sum({f"f{number}": failing(number) for number in range(3)})
    every = [number for number in range(3) if all(each[number] for each in fails)]
    if every and not versions.any():
        text = f"the reward 'f{every[0]}' failed on every one of the first {len(fails)} responses.*division by zero"
        with pytest.raises(ValueError, match=text):
            score(attrs.evolve(rows, versions=versions), reward)
        return
    scored, report = score(attrs.evolve(rows, versions=versions), reward)
    assert scored.scores.tolist() == [NONE if any(each) else 3.0 for each in fails]
    assert metrics.report(report)["reward/errors"] == sum(map(any, fails))


def test_a_runner_is_told_which_samples_answer_one_prompt():
    """For episodes these are the whole ones."""
    asked = []

    class Told(RewardRunner):
        def run(self, samples, groups=()):
            asked.append(([sample.response for sample in samples], [*groups]))
            return super().run(samples, groups)

    rows = rollout(["q"] * 4, ["a", "b", "c", "d"], [None] * 4)
    rows = attrs.evolve(rows, groups=torch.tensor([7, 7, 3, 3]))
    with Told(vowels) as runner:
        rewards.score(rows, reward=runner, tokenizer=Letters())
        several = attrs.evolve(rows, episodes=torch.tensor([5, 5, 2, 2]), observed=batch.Column([[], [], [], []]))
        rewards.score(several, reward=runner, tokenizer=Letters())
    assert asked == [(["a", "b", "c", "d"], [7, 7, 3, 3]), (["ab", "cd"], [7, 3])]


@rewards.inline_reward
def cost(sample: Sample) -> dict[str, float]:
    """The best is 0, which a failure must not score."""
    if "z" in sample.response:
        raise RuntimeError("no z")
    return {"score": -float(len(sample.response)), "seen": 1.0}


def test_a_failure_has_no_score_or_the_one_that_is_named():
    rows = rollout(["q"] * 3, ["aeb", "z", "bz"], ["x"] * 3)
    scored, _ = score(rows, cost)
    assert scored.scores.tolist() == [-3.0, NONE, NONE]
    with RewardRunner(rewards.weighted_sum({"c": cost, "e": rewards.exact_match}, {"c": 2.0})) as runner:
        scored, report = rewards.score(rows, reward=runner, tokenizer=Letters(), failure_score=-9.0)
    assert scored.scores.tolist() == [-6.0, -18.0, -18.0]
    assert scored.named_scores["c"].tolist() == [-3.0, -9.0, -9.0]
    numbers = metrics.report(report)
    assert (numbers["reward/unscored"], numbers["reward/errors"], numbers["reward/c/seen"]) == (0.0, 2.0, 1.0)


def test_a_function_of_weight_0_takes_no_score_away():
    rows = rollout(["q"] * 2, ["z", "aa"], ["x"] * 2)
    scored, _ = score(rows, rewards.weighted_sum({"v": vowels, "e": rewards.exact_match}, {"v": 0.0}))
    assert scored.scores.tolist() == [0.0, 0.0]
    assert scored.named_scores["v"].tolist() == [NONE, 2.0]


def test_outcomes_are_the_scores_without_what_shapes_them():
    """A penalty for length is none of what came of a response, nor is a function of the user's that is marked so."""

    @rewards.shaping_reward
    @rewards.inline_reward
    def shorter(sample: Sample) -> float:
        return -float(len(sample.response)) / 10

    rows = rollout(["q"] * 2, ["aaaa", "b"], ["aaaa", "x"])
    penalty = rewards.length_penalty(max_tokens=5, buffer=5)
    shaped = {"exact": rewards.exact_match, "penalty": penalty, "shorter": shorter}
    scored, _ = score(rows, rewards.weighted_sum(shaped, {"exact": 2.0}))
    assert scored.outcome.tolist() == [2.0, 0.0]
    assert scored.scores.tolist() == pytest.approx([2.0 - 1.0 - 0.4, -0.4 - 0.1])
    for alone in (rewards.exact_match, shorter):  # nothing is left of a reward of shaping alone
        scored, _ = score(rows, alone)
        assert scored.outcome is scored.scores


@rewards.tensor_reward
def row_numbers(rows) -> torch.Tensor:
    return rows.row_ids.double()


def test_sums_with_functions_of_the_rollout():
    rows = rollout(["q"] * 3, ["aeb", "b", "e"], ["aeb", "x", "e"])
    reward = rewards.weighted_sum(
        {"exact": rewards.exact_match, "vowels": vowels, "model": row_numbers}, {"exact": 10.0, "model": -0.5}
    )
    scored, _ = score(rows, reward)
    assert scored.scores.tolist() == [12.0, -0.5, 10.0]
    assert {k: v.tolist() for k, v in scored.named_scores.items()} == {
        "exact": [1.0, 0.0, 1.0],
        "vowels": [2.0, 0.0, 1.0],
        "model": [0.0, 1.0, 2.0],
        "vowels/length": [4.0, 2.0, 2.0],
    }
    assert [extra["extracted_answer"] for extra in scored.extras] == ["aeb", "b", "e"]
    assert scored.extras[1]["row"] == 1


def test_the_answer_of_a_sample_is_that_of_the_last_function_that_gives_one():
    @rewards.inline_reward
    def first(sample):
        return {"score": 0.0, "answer": f"first of {sample.response}"}

    @rewards.inline_reward
    def second(sample):
        return {"score": 0.0, "answer": "second" if sample.response == "a" else None}

    for functions_of in (
        {"x": first, "y": second},
        {"x": first, "y": second, "z": rewards.length_penalty(max_tokens=9, buffer=9)},
    ):
        scored, _ = score(rollout(["q"] * 2, ["a", "b"], [None] * 2), rewards.weighted_sum(functions_of))
        assert [extra["extracted_answer"] for extra in scored.extras] == ["second", "first of b"]


def test_a_sample_on_which_several_functions_fail_is_one_that_failed():
    rows = rollout(["q"] * 3, ["z", "az", "a"], [None] * 3)
    _, report = score(rows, rewards.weighted_sum({"v": vowels, "c": cost}))
    numbers = metrics.report(report)
    assert (numbers["reward/errors"], numbers["reward/timeouts"], numbers["reward/unscored"]) == (2.0, 0.0, 2.0)


def test_rows_of_the_rollout_that_its_function_does_not_know_have_no_score():
    """Whatever number stands there; the metrics that it returns are the step's."""

    @rewards.tensor_reward
    def model(rows):
        known = torch.tensor([True, False, True])
        return torch.tensor([2.0, 7.0, -1.0]), {"own/metric": metrics.mean(4.0)}, known

    rows = rollout(["q"] * 3, ["a", "b", "c"], [None] * 3)
    scored, report = score(rows, model)
    assert scored.scores.tolist() == [2.0, NONE, -1.0]
    numbers = metrics.report(report)
    assert (numbers["own/metric"], numbers["reward/model"], numbers["critic/score/mean"]) == (4.0, 0.5, 0.5)
    assert (numbers["critic/score/max"], numbers["critic/score/min"], numbers["reward/unscored"]) == (2.0, -1.0, 1.0)


def test_every_row_of_an_episode_has_the_numbers_of_the_whole():
    """Four rows of two episodes, which stand between each other: scores, outcomes, parts and answers."""

    @rewards.shaping_reward
    @rewards.inline_reward
    def shorter(sample: Sample) -> float:
        return -float(len(sample.response_tokens)) / 10

    rows = rollout(["q"] * 4, ["ae", "b", "i", "c"], ["aei", "bc", "aei", "bc"])
    extras = batch.Column({f"of row {row}": row} for row in range(4))
    rows = attrs.evolve(
        rows, episodes=torch.tensor([8, 3, 8, 3]), observed=batch.Column([[], [], [], []]), extras=extras
    )
    scored, report = score(rows, rewards.weighted_sum({"exact": rewards.exact_match, "v": vowels, "s": shorter}))
    whole = [(1.0, 3.0, -0.5), (1.0, 0.0, -0.4)]  # with the tokens that end responses
    assert scored.scores.tolist() == pytest.approx([sum(whole[i]) for i in (0, 1, 0, 1)])
    assert scored.outcome.tolist() == [whole[i][0] + whole[i][1] for i in (0, 1, 0, 1)]
    for place, name in enumerate(("exact", "v", "s")):
        assert scored.named_scores[name].tolist() == pytest.approx([whole[i][place] for i in (0, 1, 0, 1)])
    whole_extras = [
        {**extra, "extracted_answer": x} for extra, x in zip(joined(rows).extras, ("aei", "bc"), strict=True)
    ]
    assert [*scored.extras] == [whole_extras[i] for i in (0, 1, 0, 1)]
    assert torch.equal(scored.tokens, rows.tokens)
    assert metrics.report(report)["critic/score/mean"] == pytest.approx((sum(whole[0]) + sum(whole[1])) / 2)
    assert report["critic/score/mean"].count == 2


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from([(0.5, -2.0), (0.0, 0.0), (math.nan, 1.0), (1.0, math.nan)]), min_size=1, max_size=3),
    st.sampled_from([0, 2]),
)
def test_an_environments_score_is_the_sum_of_its_turns_unless_it_failed(turns, version):
    """A failure in any turn is one of the row; of all rows of the first policy it is an error."""
    rows = rollout(["q"] * len(turns), ["a"] * len(turns), [None] * len(turns))
    rows = attrs.evolve(rows, turn_rewards=torch.tensor(turns), versions=torch.full((len(turns),), version))
    failed = [any(math.isnan(x) for x in row) for row in turns]
    if all(failed) and not version:
        with pytest.raises(ValueError, match=f"failed on every one of the first {len(turns)} episodes"):
            environment_reward(rows)
        return
    scored, report = score(rows, environment_reward)
    assert scored.scores.tolist() == [NONE if gone else sum(row) for row, gone in zip(turns, failed, strict=True)]
    assert metrics.report(report)["reward/unscored"] == sum(failed)
    assert scored.outcome is scored.scores
    with pytest.raises(ValueError, match="no turn_rewards"):
        environment_reward(attrs.evolve(rows, turn_rewards=None))


def test_the_weight_of_a_sum_is_a_factor_of_its_terms():
    rows = rollout(["q"] * 2, ["aeb", "e"], ["aeb", "x"])
    inner = rewards.weighted_sum({"vowels": vowels, "exact": rewards.exact_match}, {"vowels": 0.5})
    scored, _ = score(rows, rewards.weighted_sum({"inner": inner}, {"inner": 3.0}))
    assert scored.scores.tolist() == [3.0 * (0.5 * 2.0 + 1.0), 3.0 * 0.5 * 1.0]


def test_tensor_rewards_are_checked():
    rows = rollout(["q"] * 2, ["a", "b"], [None] * 2)
    cases = [
        (lambda r: r.row_ids[:1], r"'f' returned \(1,\), not a tensor of shape \(2,\)"),
        (lambda r: [1.0, 2.0], "'f' returned list"),
        (lambda r: r.row_ids / 0, r"'f' returned nan for sample 0 \(2 of 2"),
        (lambda r: (r.row_ids, {}, None, ["no"]), r"'f' said \['no'\], not a text or None for each of 2 samples"),
    ]
    for fn, text in cases:
        with pytest.raises(ValueError, match=text):
            score(rows, rewards.weighted_sum({"f": rewards.tensor_reward(fn)}))


def test_names_that_clash_are_refused():
    def length(sample):
        return {"score": 1.0, "length": 2.0}

    with pytest.raises(ValueError, match=r"returns numbers named \['length'\], names of its functions"):
        score(rollout(["q"], ["a"], [None]), rewards.inline_reward(length))


# validation


def brute_force(fn, n, k):
    actual = [fn(chosen) for chosen in combinations(range(n), k)]
    return sum(actual) / len(actual)


@st.composite
def votes(draw):
    n = draw(st.integers(1, 7))
    scores = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, -2.0]), min_size=n, max_size=n))
    answers = draw(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=n, max_size=n))
    return scores, answers, draw(st.integers(1, n))


@given(votes())
def test_best_and_majority_are_means_over_all_subsets(case):
    scores, answers, k = case
    n = len(scores)

    def majority(chosen):
        ballots = [answers[i] for i in chosen]
        most = max(ballots.count(a) for a in ballots)
        winners = {a for a in ballots if ballots.count(a) == most}
        means = []
        for winner in winners:
            logged = [s for s, a in zip(scores, answers, strict=True) if a == winner]
            means.append(sum(logged) / len(logged))
        return sum(means) / len(means)

    assert rewards.best_at_k(scores, k) == pytest.approx(brute_force(lambda c: max(scores[i] for i in c), n, k))
    assert rewards.majority_at_k(scores, answers, k) == pytest.approx(brute_force(majority, n, k))


def test_best_and_majority_of_many():
    scores = [float(i % 4 == 0) for i in range(64)]
    answers = [str(i % 4 if i % 4 == 0 else i) for i in range(64)]
    assert rewards.best_at_k(scores, 1) == pytest.approx(0.25)
    assert rewards.best_at_k(scores, 64) == 1.0
    assert rewards.majority_at_k(scores, answers, 1) == pytest.approx(0.25)
    assert rewards.majority_at_k(scores, answers, 64) == 1.0
    for wrong in (0, 65):
        with pytest.raises(ValueError, match="64 scores"):
            rewards.best_at_k(scores, wrong)
        with pytest.raises(ValueError, match="64 scores"):
            rewards.majority_at_k(scores, answers, wrong)


def test_summary_by_source():
    words = ["a", "a", "b", "c", "x", "y", "x", "x"]
    scored, _ = score(rollout(["q"] * 8, words, list("aaaaxxxx"), n=4), rewards.exact_match)
    sources = batch.Column(["one"] * 4 + ["two"] * 4)
    scored = batch.extend(batch.Scored, scored, source=sources)
    actual = metrics.report(rewards.summarize([scored, scored], n=4))
    assert {k: v for k, v in actual.items() if "/reward/" in k} == pytest.approx(
        {
            "val-core/one/reward/mean@4": 0.5,
            "val-core/one/reward/best@4/mean": 1.0,
            "val-core/one/reward/maj@4/mean": 1.0,
            "val-aux/one/reward/best@2/mean": 5 / 6,
            "val-aux/one/reward/maj@2/mean": 0.5,
            "val-core/two/reward/mean@4": 0.75,
            "val-core/two/reward/best@4/mean": 1.0,
            "val-core/two/reward/maj@4/mean": 1.0,
            "val-aux/two/reward/best@2/mean": 1.0,
            "val-aux/two/reward/maj@2/mean": 0.75,
        }
    )
    assert actual["val-aux/two/exact_match/mean@4"] == 0.75
    with pytest.raises(ValueError, match="prompt 0 has 4 responses, not n = 2"):
        rewards.summarize([scored], n=2)


answered = st.tuples(st.sampled_from([0.0, 0.25, 1.0, -2.0, math.nan]), st.sampled_from(["a", "b", None]))


# a vote of two is the mean whoever answered what: only four of five responses or more tell answers apart
asked = st.sampled_from([1, 2, 3, 5, 6, 7]).flatmap(
    lambda n: st.lists(st.lists(answered, min_size=n, max_size=n), min_size=1, max_size=4)
)


@settings(max_examples=40)
@given(asked, st.data())
def test_a_summary_votes_with_the_answers_of_the_responses_that_have_a_score(prompts, data):
    """By the prompts' sources, over batches whose rows stand in any order; of a prompt without any answer nothing is
    voted on."""
    n, every = len(prompts[0]), [each for prompt in prompts for each in prompt]
    rows = rollout(["q"] * len(every), ["a"] * len(every), ["a"] * len(every), n=n)
    bare = data.draw(st.booleans())  # rows without an answer say nothing of it
    said_of = [{} if bare and answer is None else {EXTRACTED: answer} for _, answer in every]
    columns = {"extras": batch.Column(said_of)}
    columns["source"] = batch.Column(f"s{row // n % 2}" for row in range(len(every)))
    scores = torch.tensor([score for score, _ in every])
    scored = batch.extend(batch.Scored, rows, scores=scores, named_scores={"own": 2.0 * scores}, **columns)
    found: dict[str, list[float]] = {}
    for number, prompt in enumerate(prompts):
        kept = [(score, answer) for score, answer in prompt if score == score]
        own, said = [score for score, _ in kept], [answer for _, answer in kept]
        numbers = {f"mean@{n}": fmean(own)} if own else {}
        for k in {k for k in (2, 4, n) if 1 < k <= len(own)}:
            numbers |= {
                f"best@{k}/mean": rewards.best_at_k(own, k),
                f"maj@{k}/mean": rewards.majority_at_k(own, said, k),
            }
        kinds = ("best", "maj") if any(said_of[n * number : n * (number + 1)]) else ("best",)
        for name in (f"mean@{n}", *(f"{what}@{k}/mean" for what in kinds for k in {2, 4, n} if 1 < k <= n)):
            level = "core" if f"@{n}" in name else "aux"
            value = [numbers[name]] if name in numbers else []
            found.setdefault(f"val-{level}/s{number % 2}/reward/{name}", []).extend(value)
            found.setdefault(f"val-aux/s{number % 2}/own/{name}", []).extend(2.0 * x for x in value)
    expected = {name: fmean(values) if values else math.nan for name, values in found.items()}
    missing = sum(score != score for score, _ in every)
    expected |= {"val-aux/unscored": float(missing)} if missing else {}
    cut = n * data.draw(st.integers(0, len(prompts)))
    parts = [part for part in (range(cut), range(cut, len(every))) if part]
    batches = [batch.rows(scored, data.draw(st.permutations(part))) for part in parts]
    actual = metrics.report(rewards.summarize(batches, n=n))
    assert actual == {name: pytest.approx(x, nan_ok=True) for name, x in expected.items()}


def test_summary_of_single_responses():
    scored, _ = score(rollout(["q"] * 2, ["a", "b"], list("ax")), rewards.exact_match)
    actual = metrics.report(rewards.summarize([scored], n=1))
    assert actual == {"val-core/letters/reward/mean@1": 0.5, "val-aux/letters/exact_match/mean@1": 0.5}


def test_a_function_called_reward_does_not_stand_in_the_place_of_the_sum():
    @rewards.inline_reward
    def reward(sample: Sample) -> float:
        return 3.0

    both = rewards.weighted_sum({"exact_match": rewards.exact_match, "reward": reward}, {"reward": 0.5})
    scored, _ = score(rollout(["q"] * 2, ["a", "b"], list("ax")), both)
    assert metrics.report(rewards.summarize([scored], n=1)) == {
        "val-core/letters/reward/mean@1": 2.0,
        "val-aux/letters/exact_match/mean@1": 0.5,
        "val-aux/letters/reward_function/mean@1": 3.0,
    }


def test_a_batch_on_which_a_reward_failed_counts_nowhere():
    """As single samples on which it failed."""

    @rewards.inline_reward
    def picky(sample: Sample) -> dict[str, float]:
        if sample.response == "x":
            raise RuntimeError("no")
        return {"score": 1.0, "format": 2.0}

    rows = [rollout(["q"] * 2, words, list("ab")) for words in (["x", "x"], ["a", "b"])]
    later = [batch.extend(type(each), each, versions=torch.ones(2, dtype=torch.int64)) for each in rows]
    records = [score(each, picky)[0] for each in later]
    for order in (records, records[::-1]):
        actual = metrics.report(rewards.summarize(order, n=1))
        assert actual["val-core/letters/reward/mean@1"] == 1.0
        assert actual["val-aux/letters/format/mean@1"] == 2.0
        assert actual["val-aux/unscored"] == 2.0
    actual = metrics.report(rewards.summarize(records[:1], n=1))
    assert actual["val-core/letters/reward/mean@1"] == NONE


def test_a_prompt_counts_by_those_of_its_responses_that_have_a_score():
    """The rest is left out: the best of two where two of three have one, and the best of three nowhere."""
    scored, _ = score(rollout(["q"] * 3, ["a", "z", "bc"], ["a"] * 3, n=3), vowels)
    actual = metrics.report(rewards.summarize([scored], n=3))
    assert actual["val-core/letters/reward/mean@3"] == 0.5
    assert actual["val-aux/letters/reward/best@2/mean"] == 1.0
    assert actual["val-core/letters/reward/best@3/mean"] == NONE
    assert actual["val-aux/unscored"] == 1.0
