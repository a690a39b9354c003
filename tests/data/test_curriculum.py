"""Curricula: draws as often as weights say, states of what was seen, weights by their formulas, and their laws."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import data, laws
from fppo.batch import Scored, extend
from fppo.data import DataCursor, draw_by_weights, systematic
from fppo.data.cursor import at_step
from fppo.key import Key
from fppo.runtime import checkpoint
from fppo.tree import replace
from tests.test_episodes import build, cut_up

weighted = st.lists(st.just(0.0) | st.floats(0.01, 8.0), min_size=1, max_size=9).filter(lambda x: sum(x) > 0)


def prompts(sources):
    return data.prompt_set([[i + 1] for i in range(len(sources))], pad_token_id=0, sources=list(sources))


@given(weighted, st.integers(1, 12))
def test_the_expected_number_of_draws_is_exactly_what_the_weights_say(weights, size):
    """The integral over all starts: between two breaks, the fractions of the parts' ends, the draws do not change."""
    expected = [size * w / math.fsum(weights) for w in weights]
    ends = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    breaks = sorted({0.0, 1.0, *(ends / ends[-1] * size % 1.0).tolist()})
    integral = [0.0] * len(weights)
    for a, b in pairwise(breaks):
        counts = Counter(systematic(torch.tensor(weights), (a + b) / 2, size).tolist())
        assert sum(counts.values()) == size
        for i, number in enumerate(expected):
            integral[i] += (b - a) * counts[i]
            assert abs(counts[i] - number) < 1 + 1e-9
    assert integral == pytest.approx(expected, abs=1e-9)


@given(weighted, st.integers(1, 12), st.sampled_from([0.0, math.nextafter(1.0, 0.0)]))
def test_what_weighs_nothing_is_never_drawn(weights, size, start):
    assert all(weights[i] > 0 for i in systematic(torch.tensor(weights), start, size).tolist())


@given(st.data(), weighted, st.integers(1, 12), st.integers(0, 2**63))
def test_prompts_and_strata_are_drawn_as_often_as_expected_but_for_rounding(draw, weights, size, seed):
    strata = draw.draw(st.lists(st.integers(0, 2), min_size=len(weights), max_size=len(weights)))
    drawn = draw_by_weights(torch.tensor(weights), Key(seed), size, strata=torch.tensor(strata)).tolist()
    shares = [size * w / math.fsum(weights) for w in weights]
    of_strata = Counter(strata[i] for i in drawn)
    for i, share in enumerate(shares):
        assert abs(drawn.count(i) - share) < 1 + 1e-9
    for stratum in set(strata):
        assert abs(of_strata[stratum] - sum(x for x, s in zip(shares, strata, strict=True) if s == stratum)) < 1 + 1e-9


@pytest.mark.slow
def test_over_many_keys_each_prompt_comes_as_often_as_its_weight_and_at_any_place():
    weights, size, times = torch.tensor([3.0, 1.0, 0.0, 2.0, 2.0]), 2, 2000
    drawn = torch.stack([draw_by_weights(weights, Key(i), size) for i in range(times)])
    for i, share in enumerate((weights / weights.sum()).tolist()):
        for place in range(size):
            deviation = math.sqrt(times * share * (1 - share))
            assert abs(int((drawn[:, place] == i).sum()) - times * share) <= 4.5 * deviation


def test_prompts_of_a_stratum_come_at_any_place():
    weights, strata = torch.ones(4), torch.tensor([0, 0, 1, 1])
    drawn = [strata[draw_by_weights(weights, Key(i), 4, strata=strata)] for i in range(400)]
    assert ((torch.stack(drawn).double().mean(0) - 0.5).abs() < 0.1).all()  # four standard errors


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -0.1], [1.0, math.nan], [math.inf, 1.0]])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="finite, none negative, and not all 0"):
        systematic(torch.tensor(weights), 0.5, 2)


scores = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 0.25, 2.0, math.nan])), max_size=6)


@given(st.lists(scores, max_size=4), st.sampled_from([0.0, 0.5, 1.0]))
def test_counts_are_those_of_the_definition_written_out(batches, decay):
    made = data.learnability(decay=decay, low=0.0, high=2.0)
    known = made.init(prompts("aabb"))
    expected = [[0.0, 0.0] for _ in range(4)]
    for batch in batches:
        seen = {i for i, score in batch if not math.isnan(score)}
        for i in seen:
            expected[i] = [decay * x for x in expected[i]]
        for i, score in batch:
            if not math.isnan(score):
                expected[i][0] += score / 2
                expected[i][1] += 1 - score / 2
        indices = torch.tensor([i for i, _ in batch], dtype=torch.int64)
        known = made.update(known, indices, torch.tensor([score for _, score in batch], dtype=torch.float64))
    assert torch.stack([known.successes, known.failures], 1).tolist() == [pytest.approx(x) for x in expected]


DRAWN = 1 << 13
rounded = partial(pytest.approx, rel=0, abs=2 / DRAWN)


def weights_of(made, known, step, count=5):
    """The share of each prompt in a large draw, which is that of its weight but for rounding."""
    drawn = made.choose(known, Key(0), step, DRAWN)
    return (torch.bincount(drawn, minlength=count) / DRAWN).tolist()


WINS, LOSSES = [0.0, 8.0, 4.0, 0.0, 1.0], [8.0, 0.0, 4.0, 0.0, 2.0]


def seen(made, sources="aaabb"):
    known = made.init(prompts(sources))
    counts = {"successes": torch.tensor(WINS).double(), "failures": torch.tensor(LOSSES).double()}
    return replace(known, **counts)


def test_easy_to_hard_draws_from_a_source_far_from_its_target():
    made = data.easy_to_hard(steps=10, begin=1.0, end=1.0, width=1e-3, explore=0.0, keep_sources=True)
    found = weights_of(made, seen(made), 0)
    assert sum(found[:3]) == rounded(3 / 5)


@pytest.mark.parametrize(
    ("keywords", "step", "shares"),
    [
        ({}, 7, [6 / 10, 3 / 10, 1 / 10]),
        ({"power": 0.0}, 0, [1 / 3, 1 / 3, 1 / 3]),
        ({"power": 0.5}, 0, [math.sqrt(n) / (math.sqrt(6) + math.sqrt(3) + 1) for n in (6, 3, 1)]),
        ({"begin": {"a": 3.0, "c": 1.0}}, 2, [0.75, 0.0, 0.25]),
        ({"begin": {"a": 1}, "end": {"b": 3, "a": 1}, "steps": 4}, 1, [1 - 0.25 * 0.75, 0.25 * 0.75, 0.0]),
        ({"begin": {"a": 1}, "end": {"b": 3, "a": 1}, "steps": 4}, 9, [0.25, 0.75, 0.0]),
    ],
)
def test_mixtures_give_each_source_its_share_and_its_prompts_alike(keywords, step, shares):
    made = data.mixture(**keywords)
    found = weights_of(made, made.init(prompts("aaaaaabbbc")), step, 10)
    assert found == rounded([shares[0] / 6] * 6 + [shares[1] / 3] * 3 + [shares[2]])


def test_a_mixture_reports_what_was_drawn():
    made = data.mixture()
    known = made.update(made.init(prompts("aab")), torch.tensor([0, 0, 1, 2]), torch.zeros(4).double())
    assert made.report(known, 0) == {"curriculum/drawn/a": 0.75, "curriculum/drawn/b": 0.25}


def test_a_curriculum_learns_of_outcomes_at_the_step_and_goes_on_to_the_next():
    """Of the scores without what shapes them, as a penalty for length."""
    made, dataset = data.easy_to_hard(steps=10), prompts("aab")
    cursor = at_step(data.begin_course(made, dataset), 4)
    outcomes = torch.tensor([1.0, float("nan"), 0.0])
    scored = SimpleNamespace(ids=["2", "0", "1"], outcome=outcomes, scores=outcomes - 0.75, episodes=None)
    after, report = data.Learn.of(made, dataset)(cursor, scored)
    assert (after.course.known.successes.tolist(), after.course.known.failures.tolist()) == ([0, 0, 1], [0, 1, 0])
    assert after.course.step == 5
    assert float(report["curriculum/target"].total) == pytest.approx(0.9 - 0.6 * 0.4)


@pytest.mark.parametrize("prior", [1.0, 0.5])
def test_learned_rates_are_reported_of_the_prompts_that_were_seen(prior):
    """Of two responses of the first prompt one was right, of one of the third none; the others were not asked."""
    made = data.learnability(prior=prior)
    known = made.init(prompts("aabb"))
    assert made.report(known, 0) == {"curriculum/seen": 0.0}
    known = made.update(known, torch.tensor([0, 2, 0]), torch.tensor([1.0, 0.0, 0.0]).double())
    rates = [(1 + prior) / (2 + 2 * prior), prior / (1 + 2 * prior)]
    assert made.report(known, 0) == pytest.approx({"curriculum/seen": 0.5, "curriculum/success_rate": sum(rates) / 2})


MADE = {
    "learnability": data.learnability(),
    "by source": data.learnability(keep_sources=True, decay=0.0),
    "easy_to_hard": data.easy_to_hard(steps=3),
    "mixture": data.mixture(begin={"a": 1.0, "b": 1.0}, end={"c": 1.0, "a": 1.0}, steps=4),
}


@pytest.mark.parametrize("name", MADE)
def test_built_in_curricula_keep_their_laws(name):
    laws.check_curriculum(MADE[name])


@pytest.mark.parametrize("name", MADE)
def test_a_cursor_with_a_state_resumes(name, tmp_path):
    made, dataset, key = MADE[name], prompts("aaabbc"), Key(3)

    def step(cursor):
        asked, cursor = data.next_batch(dataset, cursor, size=3, key=key, curriculum=made)
        learn = data.Learn.of(made, dataset)
        rows = torch.tensor([int(i) for i in asked.ids])
        known = learn.curriculum.update(cursor.course.known, rows, (rows % 2).double())
        return replace(cursor, course=replace(cursor.course, known=known, step=cursor.course.step + 1))

    begin, places = data.begin_course(made, dataset), iter(range(99))

    def save(cursor):
        path = tmp_path / str(next(places))
        checkpoint.begin_save(cursor, path, 1).wait()
        return path

    laws.check_resume(step, begin, save=save, load=lambda path: checkpoint.load(begin, path, 1), steps=3)


def test_each_draw_from_one_state_has_its_own_key():
    """As a step that draws again (rollout.filter) does; the same cursor draws the same."""
    made, dataset = data.learnability(), prompts("a" * 40)
    first = data.begin_course(made, dataset)
    drawn = {}
    cursor = first
    for number in range(4):
        asked, cursor = data.next_batch(dataset, cursor, size=4, key=Key(0), curriculum=made)
        drawn[number] = tuple(asked.ids)
    assert len(set(drawn.values())) == 4
    assert tuple(data.next_batch(dataset, first, size=4, key=Key(0), curriculum=made)[0].ids) == drawn[0]


def test_a_cursor_without_a_curriculum_has_the_leaves_that_it_had():
    from fppo import tree

    assert [path for path, _ in tree.leaves_with_paths(at_step(DataCursor(), 5))] == [".epoch", ".position"]
    plain, _ = data.next_batch(prompts("aaaa"), DataCursor(), size=4, key=Key(1))
    assert list(plain.ids) == [str(i) for i in data.epoch_order(4, Key(1), 0)]


PLAIN = data.learnability()


def in_place(known, indices, scores):
    known.successes.add_(1.0)
    return known


def by_place(known, indices, scores):
    return replace(known, successes=known.successes + torch.arange(len(indices)).double().dot(scores.nan_to_num()))


def by_the_last(known, indices, scores):
    """Learns from the last score of a prompt alone."""
    successes = known.successes.clone()
    successes[indices] = scores.nan_to_num()
    return replace(known, successes=successes)


WRONG = {
    "purity": [
        PLAIN._replace(update=in_place),
        PLAIN._replace(choose=lambda known, key, step, size: torch.randint(12, (size,))),
    ],
    "order": [PLAIN._replace(update=by_place), PLAIN._replace(update=by_the_last)],
    "key": [PLAIN._replace(choose=lambda known, key, step, size: torch.arange(size))],
    "indices": [
        PLAIN._replace(choose=lambda known, key, step, size: torch.arange(size + 1)),
        PLAIN._replace(choose=lambda known, key, step, size: torch.arange(size).double()),
        PLAIN._replace(choose=lambda known, key, step, size: torch.arange(size) + 10),
    ],
    "state": [PLAIN._replace(init=lambda prompts: {"ids": {"a"}})],
}


@pytest.mark.parametrize(("law", "number"), [(law, i) for law, made in WRONG.items() for i in range(len(made))])
def test_laws_notice_what_is_wrong(law, number):
    with pytest.raises(laws.LawViolation) as caught:
        laws.check_curriculum(WRONG[law][number])
    assert caught.value.law == law


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: data.learnability(decay=1.5), r"decay = 1\.5: must be 0 to 1"),
        (lambda: data.learnability(low=1.0), r"high = 1\.0: must be more than low"),
        (lambda: data.easy_to_hard(steps=0), "steps = 0: must be 1 to inf"),
        (lambda: data.easy_to_hard(steps=5, width=0.0), "width = 0"),
        (lambda: data.mixture(begin={"a": -1.0}), "a table of sources with weights"),
        (lambda: data.mixture(end={}), "one above 0"),
        (lambda: data.mixture(begin={"a": True}), "a table of sources with weights"),
        (lambda: data.mixture(begin={"gms8k": 1.0}).init(prompts(["gsm8k"])), "did you mean gsm8k"),
        (lambda: data.next_batch(prompts("aa"), DataCursor(), size=1, key=Key(0), curriculum=PLAIN), "begin_course"),
        (lambda: data.Learn.of(PLAIN, data.select(prompts("ab"), [0, 0])), "two prompts have the id '0'"),
    ],
)
def test_what_does_not_fit_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


outcomes = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([-2.0, -1.0, 0.0, 1.5, 3.0, 4.0, math.nan])), max_size=7
)


@settings(max_examples=25)
@given(
    st.lists(outcomes, max_size=3),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([0.5, 2.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
    st.integers(0, 6),
)
def test_both_curricula_learn_draw_and_report_by_their_definitions(batches, decay, prior, explore, keep, step):
    """With every keyword, after several batches; scores count between -1 and 3."""
    sources = "abaab"
    how = {"decay": decay, "prior": prior, "explore": explore, "low": -1.0, "high": 3.0, "keep_sources": keep}
    counts = [[0.0, 0.0] for _ in sources]
    for batch in batches:
        for i in {i for i, score in batch if not math.isnan(score)}:
            counts[i] = [decay * x for x in counts[i]]
        for i, score in batch:
            if not math.isnan(score):
                rate = min(max((score + 1.0) / 4.0, 0.0), 1.0)
                counts[i][0] += rate
                counts[i][1] += 1.0 - rate
    rates = [(s + prior) / (s + f + 2 * prior) for s, f in counts]
    sizes = [s + f + 2 * prior for s, f in counts]
    target = 0.7 - 0.5 * min(step / 4, 1.0)
    drawn_by = {
        "learnability": [p * (1 - p) * n / (n + 1) for p, n in zip(rates, sizes, strict=True)],
        "easy_to_hard": [math.exp(-((p - target) ** 2) / (2 * 0.3**2)) for p in rates],
    }
    made = {
        "learnability": data.learnability(**how),
        "easy_to_hard": data.easy_to_hard(steps=4, begin=0.7, end=0.2, width=0.3, **how),
    }
    seen = [rate for rate, (s, f) in zip(rates, counts, strict=True) if s + f > 0]
    report = {"curriculum/seen": len(seen) / 5} | ({"curriculum/success_rate": sum(seen) / len(seen)} if seen else {})
    for name, one in made.items():
        known = one.init(prompts(sources))
        for batch in batches:
            indices = torch.tensor([i for i, _ in batch], dtype=torch.int64)
            known = one.update(known, indices, torch.tensor([x for _, x in batch], dtype=torch.float64))
        groups = [[0, 2, 3], [1, 4]] if keep else [[0, 1, 2, 3, 4]]
        expected = [0.0] * 5
        for group in groups:
            total = sum(drawn_by[name][i] for i in group)
            for i in group:
                share = (1 - explore) * drawn_by[name][i] / total + explore / len(group)
                expected[i] = len(group) / 5 * share
        assert weights_of(one, known, step) == rounded(expected), name
        for seed in range(4):  # a stratum has as many prompts as expected, but for rounding
            few = one.choose(known, Key(seed), step, 3).tolist()
            assert all(abs(sum(i in group for i in few) - 3 * len(group) / 5) < 1 for group in groups)
        more = {"curriculum/target": target} if name == "easy_to_hard" else {}
        assert one.report(known, step) == pytest.approx(report | more), name


def test_a_mixture_draws_each_source_as_often_as_its_share_says_in_every_batch():
    """Strata give 3 and 1 of 4 prompts, whatever the key, and counts of responses add up over batches."""
    made = data.mixture(begin={"a": 3.0, "c": 1.0})
    known = made.init(prompts("cabac"))
    for number in range(20):
        drawn = made.choose(known, Key(number), 0, 4)
        assert sorted(["cabac"[i] for i in drawn.tolist()]) == ["a", "a", "a", "c"]
        known = made.update(known, drawn, torch.zeros(4).double())
    assert known.responses.tolist() == [60, 0, 20]
    shares = {"curriculum/drawn/a": 0.75, "curriculum/drawn/b": 0.0, "curriculum/drawn/c": 0.25}
    assert made.report(known, 0) == shares
    assert set(made.report(made.init(prompts("cabac")), 0).values()) == {0.0}


def test_a_curriculum_learns_once_of_an_episode_of_several_rows():
    rollout, cuts = build([(0, [(1, 2), (1, 1), (2, 1)]), (1, [(0, 3)]), (0, [(0, 1), (1, 1)])])
    scores = torch.tensor([1.0, 0.0, 0.25])
    rows = cut_up(rollout, cuts)
    own = scores[[0, 0, 0, 1, 2, 2]]
    scored = extend(Scored, rows, scores=own - 9.0, named_scores={}, outcomes=own)
    made, dataset = data.learnability(), prompts("ab")
    after, _ = data.Learn.of(made, dataset)(data.begin_course(made, dataset), scored)
    assert after.course.known.successes.tolist() == [1.25, 0.0]
    assert after.course.known.failures.tolist() == [0.75, 1.0]
