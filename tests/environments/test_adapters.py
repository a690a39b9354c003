"""Environments of other packages: episodes are values that any process plays again, and score as the packages say.

A package that is not installed is skipped; the kinds of objects are tested with objects of ours.
"""

import importlib.util
import random
import re
from pathlib import Path

import pytest

from fppo.environments import EnvironmentRunner, Reply
from fppo.environments.adapters.objects import Gym
from fppo.environments.adapters.tool_classes import ToolClass, tool_names
from tests.environments.objects import Weather, first_action

HERE = "tests.environments.objects"


def installed(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def play(environment, say, *, row=None, seed=7, most=20):
    """An episode by a runner, whose states are pickled: its texts, its rewards and its last info."""
    player = EnvironmentRunner(lambda: environment, name="own", inline=True)
    (now,) = player.reset([row or {}], [seed])
    texts, rewards = [message["content"] for message in now.messages], []
    while not now.done and not now.failed and len(rewards) < most:
        text = say(texts)
        random.seed()  # what an episode draws does not depend on what stands in the generators
        (now,) = player.step([now.state], [Reply(text, (1,), "<eos>")])
        texts += [text, *(message["content"] for message in now.messages)]
        rewards.append(now.reward)
    assert not now.failed
    return texts, rewards, dict(now.info)


def halves(texts):
    """The guess that halves what is left."""
    low, high = 1, 8
    for guess, answer in zip(texts[1::2], texts[2::2]):
        low, high = (int(guess) + 1, high) if answer == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


def test_gyms_objects():
    environment = Gym(make=f"{HERE}:GuessNumber")
    episodes = [play(environment, halves, seed=seed) for seed in range(40)]
    assert episodes == [play(environment, halves, seed=seed) for seed in range(40)]
    assert all(texts[0] == "Guess a number of 1 to 8." and set(info) == {"left"} for texts, _, info in episodes)
    right = [sum(rewards) for _, rewards, _ in episodes]
    assert set(right) == {0.0, 1.0}  # seven of eight numbers are found in three guesses
    assert sum(right) > 25
    assert {len(rewards) for _, rewards, _ in episodes} == {1, 2, 3}


def test_classes_of_tools():
    assert tool_names(Weather) == ["weather"]
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    environment = ToolClass(make=f"{HERE}:Weather")
    told = iter([call, "It rains."])
    texts, rewards, _ = play(environment, lambda texts: next(told), row={"city": "Rome", "number": 3})
    assert texts == ["What is the weather in Rome?", call, "rain in Rome", "It rains."]
    assert rewards == [0.0, 1.0]
    assert play(environment, lambda texts: "It rains.")[1] == [0.0]
    for wrong, text in (
        ('{"name": "_hidden"}', "error: there is no tool '_hidden'"),
        ('{"name": "weather"}', "error: Weather.weather() missing 1 required positional argument: 'city'"),
        ('{"name": }', "error: Expecting value"),
        ("{}", "error: 'name'"),
    ):
        told = iter([f"<tool_call>{wrong}</tool_call>", "so"])
        assert play(environment, lambda texts, told=told: next(told))[0][2].startswith(text)


def right(texts):
    """The sum that a question of chain_sum asks for."""
    a, sign, b = texts[0].rpartition(":")[2].strip(" =?.").split()
    return str(int(a) + int(b) if sign == "+" else int(a) - int(b))


@installed("reasoning_gym")
def test_reasoning_gym():
    from fppo.environments.adapters.reasoning import ReasoningGym

    how = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = ReasoningGym(datasets={"chain_sum": how, "letter_counting": {}}, chances=2)
    seen = set()
    (question, *_) = play(environment, lambda texts: "?", seed=4)[0]
    assert question == play(environment, lambda texts: "?", seed=4)[0][0]
    for seed in range(0, 40, 2):
        texts, rewards, info = play(environment, right, seed=seed)
        assert rewards == [1.0]
        assert info == {"right/chain_sum": 1.0, "right_at_once": 1.0, "right": 1.0}
        late = iter(["no", right(texts)])
        texts, rewards, info = play(environment, lambda texts, late=late: next(late), seed=seed)
        assert rewards == [0.0, 0.5]
        assert (info["right"], info["right_at_once"]) == (1.0, 0.0)
        assert texts[2] == " No, again:"
        assert play(environment, lambda texts: "no", seed=seed)[1] == [0.0, 0.0]
        seen.add(texts[0])
    assert len(seen) > 15
    other = ReasoningGym(datasets={"chain_sum": how}, seed=1, mark="answer:")
    texts, rewards, _ = play(other, lambda texts: f"4\nThe answer: {right(texts)}", seed=3)
    assert rewards == [1.0]
    assert (
        play(environment, lambda texts: "x", row={"dataset": "letter_counting"}, seed=3)[2]["right/letter_counting"]
        == 0
    )


@installed("reasoning_gym")
def test_a_second_chance_of_the_reference_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "experiments" / "reference"))
    environment = importlib.import_module("second_chance").Sums()

    def answers(wrong):
        """Solve the sum that the question ends with; the first `wrong` answers are one too high."""

        def say(texts):
            a, sign, b = re.search(r"(\d+) ([+-]) (\d+) =", texts[0]).groups()
            right = int(a) + int(f"{sign}{b}")
            return f"{a} {sign} {b} is {right + (len(texts) // 2 < wrong)}."

        return say

    for seed in range(20):
        for wrong, expected in ((0, [1.0]), (1, [0.0, 0.5]), (2, [0.0, 0.0])):
            texts, rewards, info = play(environment, answers(wrong), seed=seed)
            assert rewards == expected
            assert info == {"right_at_once": float(not wrong), "right": float(wrong < 2)}
            assert len(texts) == 2 * len(expected)


@installed("textarena")
def test_textarena():
    from fppo.environments.adapters.arena import TextArena

    environment = TextArena(game="KuhnPoker-v0-raw", opponent=f"{HERE}:first_action")
    say = lambda texts: first_action(texts[-1], random.Random(len(texts)))  # noqa: E731
    episodes = [play(environment, say, seed=seed) for seed in range(12)]
    assert episodes == [play(environment, say, seed=seed) for seed in range(12)]
    assert {sum(rewards) for _, rewards, _ in episodes} == {-1.0, 1.0}
    assert len({texts[0] for texts, _, _ in episodes}) > 2
    bad = play(environment, lambda texts: "I do not know", seed=0, most=9)
    assert (bad[1][-1], bad[2]["invalid"]) == (-1.0, 1.0)
    with pytest.raises(ValueError, match="give opponent = module:function"):
        TextArena(game="KuhnPoker-v0-raw")


@installed("gem")
def test_gem():
    environment = Gym(make="gem.envs.game_env.guess_the_number:GuessTheNumberEnv")
    say = lambda texts: f"\\boxed{{{1 + len(texts) // 2}}}"  # noqa: E731
    episodes = [play(environment, say, seed=seed) for seed in range(6)]
    assert episodes == [play(environment, say, seed=seed) for seed in range(6)]
    assert len({len(rewards) for _, rewards, _ in episodes}) > 1


@installed("verifiers")
def test_verifiers_of_01():
    import verifiers

    if not hasattr(verifiers, "MultiTurnEnv"):
        pytest.skip("verifiers of 0.4 and later have no step")
    from fppo.environments.adapters.verifiers_01 import Verifiers

    environment = Verifiers(env="tests.environments.verifiers_env:load_environment", arguments={"most": 4})
    told = iter(["3", "5", "4"])
    texts, rewards, info = play(environment, lambda texts: next(told), row={"number": 0})
    assert texts == ["2+2?", "3", "no, again", "5", "no, again", "4"]
    assert rewards == [0.0, 0.0, 1.0]
    assert info["right"] == 1.0
    assert play(environment, lambda texts: "3")[1] == [0.0] * 4


@installed("openenv")
def test_openenv_by_a_local_server():
    from fppo.environments.adapters.open_env import OpenEnv
    from tests.environments.openenv_server import serving

    with serving() as url:
        environment = OpenEnv(url=url, action=f"{HERE}:said", shown=f"{HERE}:echoed")
        texts, rewards, _ = play(environment, lambda texts: str(len(texts)))
        assert texts[0] == "ready"
        assert len(rewards) == 3
        assert rewards[-1] > 0
        player = EnvironmentRunner(lambda: environment, name="own", inline=True)
        (begun,) = player.reset([{}], [7])
        (first,) = player.step([begun.state], [Reply("1", (1,), "x")])
        elsewhere = EnvironmentRunner(
            lambda: OpenEnv(url=url, action=f"{HERE}:said", shown=f"{HERE}:echoed"), name="own", inline=True
        )
        here, other = (each.step([first.state], [Reply("3", (1,), "x")])[0] for each in (player, elsewhere))
        assert (here.messages, here.reward, here.done) == (other.messages, other.reward, other.done)
