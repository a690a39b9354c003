"""Episodes of environments as rollouts: rows, turns and rewards are those of a loop over single episodes."""

import functools
import logging
import pickle

import attrs
import pytest
import torch

from fppo import advantages, metrics
from fppo import batch as batches
from fppo.environments import EnvironmentRunner, Reply
from fppo.environments.runner import is_asynchronous
from fppo.key import Key
from fppo.pipeline import turn_metrics
from fppo.rollout.engine import Ask
from fppo.rollout.records import widened
from fppo.rollout.spread import SpreadEngine
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.observations import PlainText
from fppo.runtime.simulate import simulate
from tests.models.families import make
from tests.rollout import environments
from tests.rollout.test_embedded import PAD, make_prompts
from tests.rollout.test_turns import SAMPLING, TOKENIZER, embedded, response


def runner(make_environment, **changes):
    fixed = {"name": "own", "asynchronous": is_asynchronous(make_environment), "inline": True}
    return EnvironmentRunner(make_environment, **{**fixed, **changes})


def engine_of(inner, player, **changes):
    fixed = {"max_turns": 4, "pad_token_id": PAD, "encode": PlainText(TOKENIZER), "tokenizer": TOKENIZER}

    def prompt(messages):
        return TOKENIZER.encode("".join(message["content"] for message in messages))

    return TurnsEngine(engine=inner, tools=player, **{"prompt": prompt, **fixed, **changes})


def asked(**changes):
    return Ask(make_prompts(), attrs.evolve(SAMPLING, max_tokens=24), Key(3), **changes)


def sampled(player, ask=None, **changes):
    model, params = make("qwen2")
    return engine_of(embedded(model), player, **changes).generate(params, ask or asked())


def prompt_of(rollout, row):
    width = rollout.tokens.shape[1] - rollout.response_mask.shape[1]
    return TOKENIZER.decode(rollout.tokens[row, :width][rollout.attention_mask[row, :width]].tolist())


def turns_of(rollout, row):
    """The ids of each turn of a row, by the numbers of its tokens, and the turns' rewards."""
    ids, tokens = rollout.turn_ids[row].tolist(), rollout.tokens[row, -rollout.turn_ids.shape[1] :].tolist()
    turns = [[t for t, number in zip(tokens, ids) if number == k] for k in range(max(ids) + 1)]
    return turns, [
        sum(r for r, number in zip(rollout.turn_rewards[row].tolist(), ids) if number == k) for k in range(max(ids) + 1)
    ]


def test_a_row_is_an_episode_played_by_hand():
    """Its prompt, its observations, its rewards and its end are what the environment says to the sampled turns."""
    rollout, by_hand = sampled(runner(environments.Count)), environments.Count()
    ends, numbers = set(), []
    for row in range(12):
        turns, rewards = turns_of(rollout, row)
        seed = int(prompt_of(rollout, row))
        assert prompt_of(rollout, row) == prompt_of(rollout, row - row % 2)  # of the group
        state, left = [seed], response(rollout, row)[0]
        for number, (turn, reward) in enumerate(zip(turns, rewards, strict=True)):
            assert left[: len(turn)] == turn
            left = left[len(turn) :]
            cut = (
                number == len(turns) - 1 and rollout.finish[row] == "length" and turn[-1] not in SAMPLING.stop_token_ids
            )
            text = TOKENIZER.decode(turn[:-1] if turn[-1] in TOKENIZER.all_special_ids else turn)
            state, messages, expected, done, info = by_hand.step(state, Reply(text, tuple(turn), "" if cut else "x"))
            assert reward == pytest.approx(expected)
            if number < len(turns) - 1:
                assert not done
                observed = TOKENIZER.encode(messages[0]["content"])
                assert left[: len(observed)] == observed
                left = left[len(observed) :]
        assert left == []
        ended = done or len(turns) == 4 or rollout.finish[row] == "length"
        assert ended
        ends.add((done, rollout.finish[row]))
        numbers.append(len(turns))
        assert rollout.extras[row]["environment"] == info
    assert len(ends) > 1
    assert max(numbers) > 1
    report = metrics.report(turn_metrics(rollout))
    assert report["environment/turns"] == report["rollout/turns/mean"] == pytest.approx(sum(numbers) / 12)
    assert report["environment/failures"] == 0
    assert torch.equal(rollout.turn_ids >= 0, rollout.response_mask)


def test_turns_that_nothing_parts_are_turns_of_their_own():
    rollout = sampled(runner(environments.Plain))
    own, width = make_prompts(), make_prompts().tokens.shape[1]
    for row in range(12):
        turns, rewards = turns_of(rollout, row)
        assert rewards == [1.0] * len(turns)
        assert len(turns) <= 3
        prompt = own.tokens[row // 2][own.attention_mask[row // 2]]
        assert torch.equal(rollout.tokens[row, :width][rollout.attention_mask[row, :width]], prompt)
    assert (rollout.turn_ids.amax(1) > 0).any()
    assert torch.equal(rollout.attention_mask[:, width:], rollout.response_mask)


def same(a, b):
    for name in ("tokens", "attention_mask", "turn_ids", "turn_rewards"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.extras == b.extras


@pytest.mark.slow
def test_processes_coroutines_and_ranks_play_the_same():
    expected = sampled(runner(environments.Count))
    same(sampled(runner(environments.Later)), expected)
    with runner(environments.Count, inline=False) as outside:
        same(sampled(outside), expected)
    model, params = make("qwen2")

    def on_rank(mesh):
        inner = SpreadEngine(engine=embedded(model, mesh=mesh), mesh=mesh, pad_token_id=PAD)
        return engine_of(inner, runner(environments.Count), mesh=mesh).generate(params, asked())

    for other in simulate({"shard": 2}, on_rank):
        same(other, expected)


def moods(*names):
    prompts = make_prompts((3,) * len(names))
    return attrs.evolve(prompts, extras=batches.Column({"mood": name} for name in names))


def test_failures_end_an_episode_without_a_score(caplog):
    names = ("fine", "raise", "reset", "fine")
    ask = Ask(moods(*names), attrs.evolve(SAMPLING, n=1), Key(3))
    with caplog.at_level(logging.WARNING):
        rollout = sampled(runner(environments.Moody), ask)
    score = rollout.turn_rewards.sum(1)
    assert score.isnan().tolist() == [False, True, True, False]
    assert "failed on 2 of 7 calls: RuntimeError: no" in caplog.text
    assert metrics.report(turn_metrics(rollout))["environment/failures"] == 2
    assert all(rollout.response_mask.any(1))


@pytest.mark.slow
def test_an_environment_that_hangs_costs_its_episode():
    ask = Ask(moods("hang", "fine"), attrs.evolve(SAMPLING, n=1), Key(3))
    with runner(environments.Moody, inline=False, time_limit=1.0) as outside:
        assert sampled(outside, ask).turn_rewards.sum(1).isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("mood", "text"),
    [
        ("wrong", r"step returned a float, not a Step\(state, messages"),
        ("nan", "step returned the reward nan; give a finite number"),
        ("open", "a state that does not pickle"),
    ],
)
def test_results_that_are_no_steps_are_errors(mood, text):
    with pytest.raises(ValueError, match=f"the environment 'own': .*{text}"):
        sampled(runner(environments.Moody), Ask(moods(mood), SAMPLING, Key(3)))


@pytest.mark.slow
def test_prompts_that_do_not_fit_or_differ_are_lost():
    long = sampled(runner(functools.partial(environments.Count, prompt="{}" + "1" * 9)), prompt_tokens=9)
    assert long.turn_rewards.sum(1).isnan().all()
    fits = sampled(runner(functools.partial(environments.Count, prompt="{}" + "1" * 8)), prompt_tokens=9)
    assert not fits.turn_rewards.isnan().any()
    restless = sampled(runner(environments.Restless))
    assert restless.turn_rewards.sum(1).isnan().tolist() == [False, True] * 6


@pytest.mark.slow
def test_what_is_dealt_depends_on_key_and_prompt_alone():
    whole = sampled(runner(environments.Count))
    part = sampled(runner(environments.Count), attrs.evolve(asked(), prompts=batches.rows(make_prompts(), [4, 1])))
    for row, other in enumerate([8, 9, 2, 3]):
        assert prompt_of(part, row) == prompt_of(whole, other)
        assert response(part, row) == response(whole, other)
    changed = sampled(runner(environments.Count), attrs.evolve(asked(), key=Key(4)))
    assert [prompt_of(changed, row) for row in range(12)] != [prompt_of(whole, row) for row in range(12)]


def test_rewards_of_turns_reach_estimators_and_survive_files(tmp_path):
    rollout = sampled(runner(environments.Count))
    scores = rollout.turn_rewards.sum(1)
    rewards = advantages.token_rewards(scores, rollout.response_mask, turns=rollout.turn_rewards)
    torch.testing.assert_close(rewards, rollout.turn_rewards)
    wide = widened(rollout, rollout.tokens.shape[1], rollout.response_mask.shape[1] + 3, PAD)
    assert (wide.turn_ids[:, -3:] == -1).all()
    batches.save(rollout, tmp_path / "x.safetensors")
    same(batches.load(batches.Rollout, tmp_path / "x.safetensors"), rollout)


def test_states_are_values():
    """A player may take any state again, in any process, and gives the same."""
    player = runner(environments.Count)
    (begun,) = player.reset([{}], [7])
    replies = [Reply("12", (1,), "x")]
    first, again = (player.step([begun.state], replies) for _ in range(2))
    assert first == again
    assert pickle.loads(pickle.dumps(first)) == first
