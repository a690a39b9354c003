"""Episodes of several rows: joined they are what they were before they were cut, and count once wherever rows count."""

from __future__ import annotations

from typing import NamedTuple

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fppo import advantages, metrics
from fppo import batch as batches
from fppo.advantages.experience import estimate
from fppo.batch import Annotated, Column, Rollout, Scored, extend
from fppo.data.cursor import DataCursor
from fppo.episodes import episode_rows, joined, layout_of, num_episodes
from fppo.key import Key
from fppo.losses import KLState
from fppo.pipeline import turn_metrics
from fppo.pipeline.draw import SampleGroups
from fppo.pipeline.pretrain import plain_returns
from fppo.pipeline.stages import Estimate
from fppo.rewards import RewardRunner, inline_reward
from fppo.rewards.scoring import score
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.tree import replace

PAD, PROMPT = 0, 2


class EpisodeCut(NamedTuple):
    """A row of an episode: its prompt, where its response begins, and how many tokens before are in no row."""

    prompt: list[int]
    start: int
    observed: int


@attrs.frozen
class Words:
    """Ids as text."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


@st.composite
def episodes(draw):
    """Episodes as one row each, of turns with something observed between them, and how each is cut into rows."""
    turns = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=3)
    groups = draw(st.lists(st.lists(turns, min_size=1, max_size=3), min_size=1, max_size=3))
    rows = [(group, each) for group, own in enumerate(groups) for each in own]
    return build(rows, draw(st.integers(0, 99)))


def build(rows, seed=0):
    """Rows of (group, [(observed, said), ...]) as a rollout, and their cuts."""
    g = torch.Generator().manual_seed(seed)
    lengths = [sum(a * (i > 0) + b for i, (a, b) in enumerate(turns)) for _, turns in rows]
    count, width = len(rows), max(lengths)
    tokens = torch.randint(3, 50, (count, PROMPT + width), generator=g)
    seen, ids = torch.zeros(count, width, dtype=torch.bool), torch.full((count, width), -1, dtype=torch.int32)
    cuts = []
    for row, (_, turns) in enumerate(rows):
        own, end = [], 0
        for number, (observed, said) in enumerate(turns):
            observed = observed if number else 0
            prompt = tokens[row, :PROMPT].tolist() if not number else list(range(60, 61 + number))
            own.append(EpisodeCut(prompt, end + observed, observed))
            ids[row, end + observed : end + observed + said] = number
            end += observed + said
        seen[row, :end] = True
        cuts.append(own)
    mask = ids >= 0
    tokens[:, PROMPT:][~seen] = PAD
    noise = torch.randn(count, width, generator=g, dtype=torch.float64)
    rewards = torch.randn(count, width, generator=g).where(
        mask & ~torch.cat([mask[:, 1:], mask[:, :1] * False], 1), 0.0
    )
    rollout = Rollout(
        tokens=tokens,
        attention_mask=torch.cat([torch.ones(count, PROMPT, dtype=torch.bool), seen], 1),
        row_ids=torch.arange(count) + 7,
        ids=Column(f"{group}" for group, _ in rows),
        ground_truth=Column([None] * count),
        source=Column(["s"] * count),
        extras=Column({"environment": {"n": float(row)}} for row in range(count)),
        response_mask=mask,
        rollout_log_probs=noise.where(mask, 0.0),
        sampling_log_probs=noise.where(mask, 0.0),
        groups=torch.tensor([group for group, _ in rows]),
        versions=torch.zeros(count, dtype=torch.int64),
        finish=Column("length" if row % 3 == 2 else "stop" for row in range(count)),
        turn_ids=ids,
        turn_rewards=rewards,
    )
    return rollout, cuts


def cut_up(rollout, cuts):
    """The rows of the cuts: each a prompt of its own, and its part of the response."""
    width = rollout.response_mask.shape[1]
    flat, spans = [], []
    for row, own in enumerate(cuts):
        stops = [*(later.start - later.observed for later in own[1:]), int(rollout.attention_mask[row, -width:].sum())]
        flat += [(row, each) for each in own]
        spans += [(each.start, stop) for each, stop in zip(own, stops)]
    rows = batches.rows(rollout, [row for row, _ in flat])
    long, most = max(len(each.prompt) for _, each in flat), max(stop - start for start, stop in spans)

    def parts(x, fill=0):
        """Each row's part of a column of responses, padded."""
        return torch.stack([F.pad(own[a:b], (0, most - b + a), value=fill) for own, (a, b) in zip(x, spans)])

    prompts = torch.tensor([[PAD] * (long - len(each.prompt)) + list(each.prompt) for _, each in flat])
    read = torch.tensor([[False] * (long - len(each.prompt)) + [True] * len(each.prompt) for _, each in flat])
    columns = {
        field.name: parts(getattr(rows, field.name), -1 if field.name == "turn_ids" else 0)
        for field in attrs.fields(type(rows))
        if getattr(getattr(rows, field.name), "shape", ()) == (len(flat), width)
    }
    observed = [rollout.tokens[row, PROMPT:][each.start - each.observed : each.start].tolist() for row, each in flat]
    last = [place + 1 == len(flat) or flat[place + 1][0] != row for place, (row, _) in enumerate(flat)]
    return replace(
        rows,
        **columns,
        tokens=torch.cat([prompts, parts(rows.tokens[:, -width:], PAD)], 1),
        attention_mask=torch.cat([read, parts(rows.attention_mask[:, -width:])], 1),
        row_ids=torch.arange(len(flat)),
        finish=Column(rows.finish[place] if last[place] else "stop" for place in range(len(flat))),
        versions=rows.versions if rollout.token_versions is None else columns["token_versions"][:, 0].long(),
        episodes=rows.row_ids,
        observed=Column(observed),
    )


def same(a, b):
    """Equal where there is something."""
    seen, width = b.attention_mask, b.response_mask.shape[1]
    more = a.tokens.shape[1] - seen.shape[1]  # padding before prompts
    assert not a.attention_mask[:, :more].any()
    a = replace(a, tokens=a.tokens[:, more:], attention_mask=a.attention_mask[:, more:])
    assert torch.equal(a.attention_mask, seen)
    assert torch.equal(a.tokens[seen], b.tokens[seen])
    for field in attrs.fields(type(b)):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name in ("tokens", "attention_mask"):
            continue
        if isinstance(y, torch.Tensor) and y.ndim > 1:
            x, y = x[seen[:, -width:]], y[seen[:, -width:]]
        assert torch.equal(x, y) if isinstance(y, torch.Tensor) else x == y, field.name


@given(episodes())
def test_cut_rows_joined_are_the_episodes(made):
    rollout, cuts = made
    rows = cut_up(rollout, cuts)
    assert len(rows.tokens) == sum(map(len, cuts))
    assert num_episodes(rows) == len(cuts)
    same(joined(rows), rollout)
    assert joined(rollout) is rollout


@settings(max_examples=25)
@given(episodes(), st.integers(0, 99))
def test_each_row_has_its_own_part_of_its_episode(made, seed):
    """By hand, token by token, in numbers of any shape."""
    rollout, cuts = made
    g, seen = torch.Generator().manual_seed(seed), rollout.attention_mask[:, PROMPT:]
    versions = torch.randint(0, 5, seen.shape, generator=g).to(torch.int32).where(rollout.response_mask, 0)
    rollout = replace(rollout, token_versions=versions, versions=versions[:, 0].long())
    rows = cut_up(rollout, cuts)
    same(joined(rows), rollout)
    flat = [(row, each) for row, own in enumerate(cuts) for each in own]
    at, width = layout_of(rows), rows.response_mask.shape[1]
    x = torch.randn(len(flat), width, 3, generator=g)
    whole, numbers = at.of_episodes(x, 2.0), torch.randn(len(cuts), at.width, generator=g)
    of_rows, left = at.of_rows(numbers), torch.ones(len(cuts), at.width, dtype=torch.bool)
    assert (at.width, at.starts) == (int(seen.sum(1).max()), [each.start for _, each in flat])
    assert at.episode_of.tolist() == [row for row, _ in flat]
    for place, (row, each) in enumerate(flat):
        own = slice(0, int(rows.attention_mask[place, -width:].sum()))
        there = slice(each.start, each.start + own.stop)
        assert whole[row, there].equal(x[place, own])
        assert of_rows[place, own].equal(numbers[row, there])
        assert not of_rows[place, own.stop :].any()
        left[row, there] = False
    assert (whole[left] == 2.0).all()
    assert [flat[place][0] for place in at.first] == [flat[place][0] for place in at.last] == list(range(len(cuts)))
    one = replace(in_rows(annotated(rollout), cuts), hidden=x)
    assert joined(one).hidden.equal(at.of_episodes(x))


@given(episodes(), st.randoms(use_true_random=False))
def test_rows_may_stand_in_any_order_that_keeps_their_own(made, random):
    """Whatever stands between the rows of an episode, its tokens come in the order of its rows."""
    rollout, cuts = made
    rows = cut_up(rollout, cuts)
    _, own = episode_rows(rows.episodes)
    left, order = [[*each] for each in own], []
    while any(left):
        order.append(random.choice([each for each in left if each]).pop(0))
    mixed = joined(batches.rows(rows, order))
    numbers = mixed.row_ids.tolist()
    same(batches.rows(mixed, [numbers.index(i) for i in rollout.row_ids.tolist()]), rollout)


def annotated(rollout, seed=0, steps=False):
    """The rollout with scores and all that estimators read, also rewards of `steps`."""
    g, mask = torch.Generator().manual_seed(seed), rollout.response_mask
    scores = rollout.turn_rewards.sum(1) + torch.randn(len(mask), generator=g)
    values = torch.randn(mask.shape, generator=g, dtype=torch.float64).where(mask, 0.0)
    columns = {"values": values, "ref_log_probs": (rollout.rollout_log_probs + 0.1 * values).where(mask, 0.0)}
    scored = extend(Scored, rollout, scores=scores, named_scores={"a": scores})
    if steps:
        rewards = values.float().where(torch.rand(mask.shape, generator=g) < 0.4, torch.nan)
        scored = replace(scored, process_rewards=rewards.where(mask, torch.nan))
    return extend(Annotated, scored, old_log_probs=rollout.rollout_log_probs, **columns)


def in_rows(whole, cuts):
    """Annotated episodes as rows: cut as their rollout is, with the numbers of their tokens."""
    rows, names = cut_up(whole, cuts), ("old_log_probs", "ref_log_probs", "values", "process_rewards")
    given = {name: getattr(whole, name) for name in names if getattr(whole, name) is not None}
    return replace(rows, **{name: layout_of(rows).of_rows(x) for name, x in given.items()})


ESTIMATORS = {
    "grpo": advantages.grpo,
    "grpo_process": advantages.grpo_process,
    "rloo": advantages.rloo,
    "gae": advantages.gae,
    "turn_gae": advantages.turn_gae,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "by turn": advantages.columns.OfRows(advantages.rloo, by_turn=True),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@given(episodes())
def test_advantages_of_rows_are_those_of_the_episodes(name, made):
    """Token by token, whatever the estimator: baselines and whitening count episodes, not rows."""
    rollout, cuts = made
    if name != "gae" and len(set(rollout.groups.tolist())) == len(cuts):
        return  # of groups of one row nothing is to be compared
    whole = annotated(rollout, steps=name == "grpo_process")
    rows = in_rows(whole, cuts)
    how = {"advantage_fn": ESTIMATORS[name], "whiten": name == "gae", "kl_in_reward": name != "grpo_process"}
    expected, _, one = estimate(whole, KLState(coef=0.1), **how)
    got, _, other = estimate(rows, KLState(coef=0.1), **how)
    for column in ("advantages", "returns", "token_rewards"):
        back = layout_of(got).of_episodes(getattr(got, column))
        torch.testing.assert_close(back, getattr(expected, column), rtol=1e-6, atol=1e-6)
    assert metrics.report(one) == pytest.approx(metrics.report(other))
    assert torch.equal(got.response_mask, rows.response_mask)


def test_an_episode_of_many_turns_weighs_once_in_a_baseline():
    """By hand: two episodes of a prompt with scores 0 and 1; five rows of the one do not move the mean."""
    rollout, cuts = build([(0, [(1, 2)] * 5), (0, [(0, 3)])])
    whole = replace(annotated(rollout), scores=torch.tensor([0.0, 1.0]))
    rows = in_rows(replace(whole, turn_rewards=None), cuts)
    got, _, _ = estimate(rows, KLState(coef=0.0), advantage_fn=advantages.grpo)
    std = 0.5**0.5
    for row, number in enumerate(got.episodes.tolist()):
        expected = (-0.5 if number == 7 else 0.5) / (std + 1e-6)
        own = got.advantages[row][got.response_mask[row]]
        torch.testing.assert_close(own, torch.full_like(own, expected))


@given(episodes())
def test_metrics_count_episodes(made):
    rollout, cuts = made
    whole = annotated(rollout)
    rows = in_rows(whole, cuts)
    stage = Estimate(advantage_fn=advantages.gae, max_tokens=9)
    (_, _, one), (_, _, other) = (stage(x, KLState(coef=0.0)) for x in (whole, rows))
    one, other = metrics.report(one), metrics.report(other)
    assert other.pop("perf/total_num_tokens") == int(rows.attention_mask.sum())
    del one["perf/total_num_tokens"]
    assert one == pytest.approx(other, nan_ok=True)
    one, other = (metrics.report(turn_metrics(x)) for x in (rollout, rows))
    assert other.pop("rollout/rows/mean") == len(rows.tokens) / len(cuts)
    assert one == pytest.approx(other, nan_ok=True)


@given(episodes())
def test_returns_go_on_from_row_to_row(made):
    rollout, cuts = made
    experience, _, _ = Estimate(advantage_fn=advantages.gae, max_tokens=9)(
        in_rows(annotated(rollout), cuts), KLState(coef=0.0)
    )
    for turns in (False, True):
        expected = plain_returns(joined(experience), gamma=0.5, turns=turns)
        back = layout_of(experience).of_episodes(plain_returns(experience, gamma=0.5, turns=turns))
        torch.testing.assert_close(back, expected)


@given(episodes(), st.integers(1, 4), st.booleans())
def test_mini_batches_count_episodes(made, size, by_prompt):
    """Each holds all rows of as many episodes, the same as if each episode were a row."""
    rollout, cuts = made
    rows = cut_up(rollout, cuts)
    loop = Loop(mini_batch_size=size, micro_batching=MicroBatching(size=1), by_prompt=by_prompt)
    for key in (None, Key(3)):
        expected = [rollout.row_ids[part].tolist() for part in loop.mini_batches(rollout, key)]
        found = [rows.episodes[part].tolist() for part in loop.mini_batches(rows, key)]
        assert [[*dict.fromkeys(part)] for part in found] == expected
        assert sorted(row for part in found for row in part) == sorted(rows.episodes.tolist())


def test_a_reward_sees_an_episode_as_one_response():
    """With what was observed in it, as where it is one row."""
    rollout, cuts = build([(0, [(1, 2), (2, 1)]), (1, [(0, 3)]), (0, [(0, 1), (1, 1), (1, 1)])])

    @inline_reward
    def length(sample):
        return {"score": float(len(sample.response_tokens)), "answer": sample.response}

    with RewardRunner(length) as runner:
        (one, first), (other, second) = (
            score(x, reward=runner, tokenizer=Words()) for x in (rollout, cut_up(rollout, cuts))
        )
    assert other.scores.tolist() == one.scores[[0, 0, 1, 2, 2, 2]].tolist() == [5, 5, 3, 5, 5, 5]
    assert [extra["extracted_answer"] for extra in joined(other).extras] == [
        extra["extracted_answer"] for extra in one.extras
    ]
    assert metrics.report(first) == metrics.report(second)


def test_refilled_groups_are_whole_whatever_their_rows():
    """Two prompts wanted, and every second one has equal scores: draws go on until two are there."""
    draws = []

    def rollout_stage(prompts, params, *, key, version):
        made, cuts = build([(int(g), [(1, 1)] * (1 + j)) for g in prompts.row_ids for j in range(2)], len(draws))
        numbers = torch.arange(4) + 4 * len(draws)
        draws.append(prompts)
        return cut_up(replace(made, row_ids=numbers, groups=prompts.row_ids.repeat_interleave(2)), cuts), {}

    def score_stage(rollout, *, params, prompts):
        scores = (rollout.episodes % 2 * (rollout.groups % 2)).float()
        return extend(Scored, rollout, scores=scores, named_scores={}), {}

    def draw(cursor):
        made, _ = build([(0, [(0, 1)]), (1, [(0, 1)])])
        return replace(batches.narrow(batches.Prompts, made), row_ids=torch.arange(2)), cursor

    run = attrs.make_class("Run", ["key", "step", "cursor", "actor"])(
        Key(0), 0, DataCursor(), attrs.make_class("Actor", ["params", "step"])({}, 0)
    )
    got, _, report = SampleGroups(pad_token_id=PAD)(run, draw=draw, rollout=rollout_stage, score=score_stage)
    assert got.groups.tolist() == [1, 1, 1, 3, 3, 3]
    assert len(set(got.row_ids.tolist())) == 6
    assert metrics.report(report)["rollout/groups/kept"] == 0.5


def test_rows_without_episodes_have_no_layout():
    rollout, _ = build([(0, [(0, 1)])])
    with pytest.raises(ValueError, match="each is one"):
        layout_of(rollout)


def test_files_keep_episodes(tmp_path):
    rows = cut_up(*build([(0, [(1, 2), (2, 1)]), (1, [(0, 3)])]))
    batches.save(rows, tmp_path / "x.safetensors")
    read = batches.load(Rollout, tmp_path / "x.safetensors")
    assert torch.equal(read.episodes, rows.episodes)
    assert read.observed == rows.observed


def test_an_episode_begins_with_the_first_of_its_rows_that_is_there():
    """The rows before it, and what was observed after them, are no part of it then."""
    rollout, cuts = build([(0, [(1, 2), (2, 1), (1, 3)]), (1, [(0, 2)])])
    rows = batches.rows(cut_up(rollout, cuts), [1, 2, 3])
    at, whole = layout_of(rows), joined(rows)
    assert (at.starts, at.first, at.last, at.width) == ([0, 2, 0], [0, 2], [1, 2], 5)
    seen = whole.attention_mask[0]
    begin = rollout.attention_mask.shape[1] - 5  # of the second row's response
    assert whole.tokens[0][seen].tolist() == [60, 61, *rollout.tokens[0, begin:].tolist()]
    assert whole.response_mask[0].tolist() == [True, False, True, True, True]
    assert whole.row_ids.tolist() == [7, 8]


def test_episodes_are_counted_whatever_their_numbers():
    rows = cut_up(*build([(0, [(1, 2), (2, 1)]), (1, [(0, 3)]), (0, [(0, 1)])]))
    for numbers in ([9, 9, -3, 100], [5, 5, 6, 7]):
        assert num_episodes(replace(rows, episodes=torch.tensor(numbers))) == 3
    assert num_episodes(replace(rows, episodes=None)) == 4
