"""Episodes of agents as rollouts: one for each response, with the agent's score, and what the policy said in it."""

from __future__ import annotations

import logging

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import metrics
from fppo.batch import Column, Prompts
from fppo.episodes import joined
from fppo.key import Key
from fppo.pipeline import turn_metrics
from fppo.rewards.environment import environment_reward
from fppo.rollout.engine import Ask
from fppo.serve.agents import AgentRunner, PlayedEpisode
from fppo.serve.engine import AgentEngine
from fppo.serve.episodes import row_number
from fppo.serve.service import Bounds
from tests.serve import players
from tests.serve.parrot import Parrot, by_key
from tests.serve.world import SIZE, sampling, texts, tokenizer


def prompts(count, **extras):
    rows = [{name: values[i] for name, values in extras.items()} for i in range(count)]
    tokens = torch.arange(2, 2 + count)[:, None]
    return Prompts(
        tokens=tokens,
        attention_mask=torch.ones_like(tokens, dtype=torch.bool),
        row_ids=torch.arange(count) + 3,
        ids=Column(f"id {i}" for i in range(count)),
        ground_truth=Column([None] * count),
        source=Column(["here"] * count),
        extras=Column(rows),
    )


def asked(rows, n=2, **changes):
    how = sampling(n=n, max_tokens=100)
    return Ask(rows, how, **{"key": Key(3), "version": 4, **changes})


def generated(play, ask, engine=None, *, rows="longest", thinking="keep", **how):
    runner = AgentRunner(play, **{"inline": True, **how})
    bounds = Bounds(row_tokens=512, answer_tokens=32)
    with AgentEngine(
        engine or Parrot(by_key(SIZE - 2)),
        runner,
        texts(),
        pad_token_id=0,
        bounds=bounds,
        rows=rows,
        thinking=thinking,
    ) as made:
        return made.generate({}, ask)


def test_a_row_is_what_the_policy_said_to_the_agent():
    parrot = Parrot(by_key(SIZE - 2))
    rollout = generated(players.counting, asked(prompts(3)), parrot)
    width = rollout.response_mask.shape[1]
    assert rollout.row_ids.tolist() == [6, 7, 8, 9, 10, 11]
    assert rollout.groups.tolist() == [3, 3, 4, 4, 5, 5]
    assert list(rollout.ids) == [f"id {i}" for i in (0, 0, 1, 1, 2, 2)]
    assert {request.row for request in parrot.requests} == set(rollout.row_ids.tolist())
    assert {request.sampling.greedy for request in parrot.requests} == {False}  # whatever the agent asks for
    for row in range(6):
        text = tokenizer().decode(rollout.tokens[row][rollout.attention_mask[row]].tolist())
        assert text.startswith("<|im_start|>user\nfind ")
        said = [
            texts().decoded(rollout.tokens[row, -width:][rollout.turn_ids[row] == turn].tolist()) for turn in range(2)
        ]
        own = [len(x) for x in said]
        assert rollout.turn_rewards[row].sum() == pytest.approx(sum(own) / 10)
        assert rollout.extras[row]["environment"] == {"first": own[0], "rows": 1.0}
        last = int(rollout.response_mask[row].nonzero().max())
        assert rollout.turn_rewards[row].nonzero().tolist() == [[last]]
        question = text.partition("assistant")[0]
        other = tokenizer().decode(rollout.tokens[row ^ 1][rollout.attention_mask[row ^ 1]].tolist())
        assert other.startswith(question)  # the responses to a prompt have the same seed
    assert torch.equal(rollout.turn_ids >= 0, rollout.response_mask)
    assert rollout.versions.tolist() == [4] * 6
    assert rollout.finish[0] == "length"
    scores, _, known = environment_reward(rollout)
    assert known.all()
    report = metrics.report(turn_metrics(rollout))
    assert report["rollout/turns/mean"] == 2
    assert report["environment/rows"] == 1
    assert torch.equal(scores, rollout.turn_rewards.sum(1))


@pytest.mark.slow
def test_processes_and_coroutines_play_the_same():
    ask = asked(prompts(2))
    expected = generated(players.counting, ask)
    for play, how in ((players.later, {}), (players.counting, {"inline": False})):
        rollout = generated(play, ask, **how)
        assert torch.equal(rollout.tokens, expected.tokens)
        assert torch.equal(rollout.turn_rewards, expected.turn_rewards)


def test_one_engine_plays_one_rollout_after_the_other():
    runner, parrot = AgentRunner(players.counting, inline=True), Parrot(by_key(SIZE - 2))
    with AgentEngine(parrot, runner, texts(), pad_token_id=0, bounds=Bounds(row_tokens=512)) as engine:
        one, other = (engine.generate({}, asked(prompts(2), version=version)) for version in (4, 5))
        again = engine.generate({}, asked(prompts(2), key=Key(9)))
    assert torch.equal(one.tokens, other.tokens)
    assert one.versions.tolist() == [4] * 4
    assert other.versions.tolist() == [5] * 4
    assert not torch.equal(one.tokens[:, :40], again.tokens[:, :40])
    assert parrot.versions == [4, 5, 4]


def test_an_agent_that_fails_costs_its_episode(caplog):
    moods = ["fine", "raise", "mute", "wrong"]
    with caplog.at_level(logging.WARNING):
        rollout = generated(players.moody, asked(prompts(4, mood=moods), n=1))
    assert rollout.turn_rewards.sum(1).isnan().tolist() == [False, True, True, True]
    assert metrics.report(turn_metrics(rollout))["environment/failures"] == 3
    assert [extra["environment"]["rows"] for extra in rollout.extras] == [1.0, 1.0, 0.0, 1.0]
    assert rollout.response_mask.any(1).all()
    assert "the agent 'moody' failed on" in caplog.text


def test_an_agent_that_hangs_costs_its_episode():
    rollout = generated(players.moody, asked(prompts(2, mood=["hang", "fine"]), n=1), time_limit=0.5)
    assert rollout.turn_rewards.sum(1).isnan().tolist() == [True, False]


def test_an_edited_history_is_a_row_of_its_own():
    ask = asked(prompts(2, mood=["edit", "fine"]), n=1)
    longest = generated(players.moody, ask)
    assert batches.num_rows(longest) == 2
    assert longest.response_mask.sum(1).tolist() == [9, 6]
    every = generated(players.moody, ask, rows="all")
    assert every.groups.tolist() == [3, 3, 4]
    assert every.row_ids.tolist() == [0, 1, 2]
    assert every.response_mask.sum(1).tolist() == [6, 9, 6]
    assert every.turn_rewards.sum(1).tolist() == [0.0, 1.0, 1.0]
    assert every.episodes.tolist() == [3, 3, 4]
    assert every.turn_ids.amax(1).tolist() == [0, 1, 0]
    whole = joined(every)
    assert whole.turn_rewards.sum(1).tolist() == [1.0, 1.0]
    assert whole.response_mask.sum(1).tolist() == [15, 6]


def test_each_answer_is_a_row_where_turns_are_rows():
    """Its prompt is the conversation as the template has it, in which the first answer is text."""
    ask = asked(prompts(2), n=1)
    kept, rows = generated(players.counting, ask), generated(players.counting, ask, thinking="drop")
    assert rows.episodes.tolist() == [3, 3, 4, 4]
    width = rows.response_mask.shape[1]
    for row in range(4):
        seen = rows.attention_mask[row]
        before = tokenizer().decode(rows.tokens[row, :-width][seen[:-width]].tolist())
        assert before.endswith("<|im_start|>assistant\n")
        assert before.count("assistant\n") == 1 + row % 2
        first = rows.tokens[row - row % 2, -width:][rows.response_mask[row - row % 2]].tolist()
        assert (texts().decoded(first) in before) == bool(row % 2)
        assert first == kept.tokens[row // 2, -kept.response_mask.shape[1] :][: len(first)].tolist()
    scores, _, known = environment_reward(joined(rows))
    assert known.all()
    assert metrics.report(turn_metrics(rows))["rollout/rows/mean"] == 2
    assert len(scores) == 2


def test_a_response_has_at_most_its_tokens():
    ask = asked(prompts(1), n=1)
    ask = attrs.evolve(ask, sampling=attrs.evolve(ask.sampling, max_tokens=8))
    rollout = generated(players.counting, ask)
    assert rollout.attention_mask[:, -rollout.response_mask.shape[1] :].sum() <= 8
    assert rollout.turn_rewards.isnan().any()  # the second request had no room, and the agent takes no error


def test_what_goes_wrong_in_the_engine_is_not_the_agents_failure():
    parrot = Parrot(by_key(SIZE - 2))
    parrot.fails = ValueError("out of memory")
    with pytest.raises(ValueError, match="out of memory"):
        generated(players.counting, asked(prompts(1)), parrot)


def test_answers_are_by_the_newest_weights_there_are():
    rollout = generated(players.counting, asked(prompts(1), newer=lambda: ({}, 7)))
    assert rollout.token_versions[rollout.response_mask].unique().tolist() == [7]


class Named:
    """A player that names every second episode itself, at the base, and notes what it gets. A stranger speaks, too."""

    def __init__(self):
        self.got, self.open = [], 0

    def __enter__(self):
        self.open += 1

    def __exit__(self, *error):
        self.open -= 1

    def play(self, rows, urls, key, base):
        self.got.append((rows, urls, key, base))
        players.ask(base, key, [{"role": "user", "content": "list"}], max_tokens=3, user="stranger")
        found = []
        for place, (row, url) in enumerate(zip(rows, urls, strict=True)):
            name = f"mine-{place}" if place % 2 else None
            said = [{"role": "user", "content": f"find {row['mark']}"}]
            more = {} if name is None else {"user": name}
            players.ask(url if name is None else base, key, said, max_tokens=4 + place, **more)
            found.append(PlayedEpisode(place / 4, {"place": float(place)}, False, name))
        return found


def test_a_player_gets_every_row_and_may_name_the_episodes_itself():
    parrot, player = Parrot(by_key(SIZE - 2)), Named()
    own = attrs.evolve(prompts(2, mark=["x", "y"], seed=[1, 2], id=["own", "two"]), ground_truth=Column([5, 6]))
    with AgentEngine(parrot, player, texts(), pad_token_id=0, bounds=Bounds(row_tokens=512)) as engine:
        assert player.open == 1
        found = [engine.generate({}, asked(own, version=version)) for version in (4, 6)]
    assert player.open == 0
    assert [name for name, _ in parrot.calls].count("closed") == 2
    uniform = Key(3).fold("seed").uniform(torch.tensor([3, 4]), 1)[:, 0]
    seeds = (uniform * (1 << 62)).long().tolist()
    names = []
    for rows, urls, key, base in player.got:
        assert (key, base) == player.got[0][2:]
        expected = [
            {"ground_truth": 5 + i, "source": "here", "id": ("own", "two")[i], "mark": "xy"[i], "seed": seeds[i]}
            for i in range(2)
        ]
        assert rows == [row for row in expected for _ in range(2)]
        names += [url.removeprefix(f"{base.removesuffix('/v1')}/e/").removesuffix("/v1") for url in urls]
    assert names == [f"{number}-{row}" for number in range(2) for row in (6, 7, 8, 9)]
    for version, rollout in zip((4, 6), found, strict=True):
        width = rollout.response_mask.shape[1]
        assert rollout.response_mask.sum(1).tolist() == [4, 5, 6, 7]
        assert rollout.turn_rewards.sum(1).tolist() == [0.0, 0.25, 0.5, 0.75]
        assert [extra["environment"]["place"] for extra in rollout.extras] == [0.0, 1.0, 2.0, 3.0]
        assert rollout.versions.tolist() == [version] * 4
        for row, (ids, mask) in enumerate(zip(rollout.tokens, rollout.attention_mask, strict=True)):
            prompt = tokenizer().decode(ids[:-width][mask[:-width]].tolist())
            assert f"find {'xy'[row // 2]}<|im_end|>" in prompt
    rows = [6, row_number("mine-1"), 8, row_number("mine-3")]  # of ours by the row, of others by the name
    assert [request.row for request in parrot.requests] == [row_number("stranger"), *rows] * 2
    assert {request.sampling.max_tokens for request in parrot.requests} == {3, 4, 5, 6, 7}


@pytest.mark.slow
def test_an_agent_plays_in_so_many_processes_and_threads_and_so_long():
    limits = {"time_limit": 3.0, "workers": 2, "concurrency": 3}
    with AgentRunner(players.where, **limits) as runner:
        *played, late = runner.play([{}] * 5 + [{"seconds": 6}], [""] * 6, "", "")
        for _ in range(50):  # until the second process is ready, too
            if len({x.score for x in played}) == 2:
                break
            played += runner.play([{}] * 5, [""] * 5, "", "")
    assert late.failed
    assert len({x.score for x in played}) == 2
    assert max(x.numbers["most"] for x in played) == 3


@pytest.mark.parametrize(("answer_tokens", "expected"), [(32, 32), (1024, 100)])
def test_an_answer_has_at_most_its_own_bound_and_the_responses(answer_tokens, expected):
    parrot, runner = Parrot(by_key(SIZE - 2)), AgentRunner(players.talking, inline=True)
    with AgentEngine(parrot, runner, texts(), pad_token_id=0, bounds=Bounds(answer_tokens=answer_tokens)) as engine:
        engine.generate({}, asked(prompts(1), n=1))
    (request,) = parrot.requests
    assert (request.sampling.n, request.sampling.max_tokens, request.key) == (1, expected, Key(3))
