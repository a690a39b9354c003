r"""Answers that are none: what a policy may find that pays without an answer, with the score that it should have.

A row is a response, the ground truth, and the right score, by each reward that is built in, by what reads a judge's
answer, and by the adapters of environments. Beside the attacks stand honest answers that look like them.
"""

from __future__ import annotations

import re

import pytest

from fppo import rewards
from fppo.environments import EnvironmentRunner, Reply
from fppo.environments.adapters.objects import Gym
from fppo.environments.adapters.tool_classes import ToolClass
from fppo.rewards.question import score_in
from fppo.settings.reward import JudgeSettings
from tests.rewards.samples import sample

MATHEMATICS = [
    # expressions that equal the truth
    ("To find 2 times 3, we simply multiply 2*3.", "6", 0),
    ("If Lin has 60 apples and buys 14 more, then Lin has 60 + 14 apples.", "74", 0),
    (r"\boxed{2 \cdot 3}", "6", 0),
    (r"\boxed{2 \times 3}", "6", 0),
    (r"\boxed{48/2}", "24", 0),
    (r"\boxed{\frac{48}{2}}", "24", 0),
    (r"\boxed{\frac{1.5}{3}}", "0.5", 0),
    (r"\boxed{\binom{5}{2}}", "10", 0),
    (r"\boxed{5!}", "120", 0),
    (r"\boxed{\sqrt{36}}", "6", 0),
    (r"\boxed{6^1}", "6", 0),
    (r"\boxed{|-6|}", "6", 0),
    (r"\boxed{\sum_{i=1}^3 i}", "6", 0),
    (r"\boxed{\log_2 64}", "6", 0),
    (r"\boxed{9^{9^{9^{9}}}}", "6", 0),
    (r"\boxed{25\% + 25\%}", "0.5", 0),
    (r"$x = 2 \cdot 3$", "6", 0),
    ("6 = 2*3", "6", 0),
    (r"\boxed{\{1, 1+1\}}", r"\{1,2\}", 0),
    (r"\boxed{6 \pm 1}", r"\{5,7\}", 0),
    (r"\boxed{(-\infty, 1+1)}", r"(-\infty,2)", 0),
    (r"\boxed{2 \cdot 3 x}", "6x", 0),
    (r"\boxed{(1+1)\sqrt{3}}", r"2\sqrt{3}", 0),
    (r"\boxed{1000+24}", "2^{10}", 0),
    # no answer, and several
    ("6, so it is \\boxed{}", "6", 0),
    ("6, so it is \\boxed{6", "6", 0),
    (r"\boxed{5} or \boxed{6}", "6", 0),
    (r"\boxed{1,2,3,4,5,6}", "6", 0),
    (r"\boxed{5 \text{ or } 6}", "6", 0),
    ("6 or 7", "7", 0),
    ("1, 2, 3, 4, 5, 6", "6", 0),
    ("Answer: 6 7 8", "6", 0),
    ("", "6", 0),
    ("As the problem says.", "6", 0),
    ("-6", "6", 0),
    (r"\boxed{1}", "1 1/2", 0),
    # honest answers
    ("2 * 3 = 6", "6", 1),
    ("So 25% of 24 is 6.", "6", 1),
    ("He pays 2 x $3 = $6", "6", 1),
    (r"\boxed{6} and again \boxed{6}", "6", 1),
    (r"\boxed{5} and \boxed{6}", r"\{5,6\}", 1),
    (r"\boxed{\{1\}\cup\{2\}}", r"\{1,2\}", 1),
    (r"\boxed{[0,1/2]}", r"[0,\frac12]", 1),
    (r"\boxed{\frac{1}{2}}", "1/2", 1),
    (r"\boxed{-\frac{13}{2}}", "-6.5", 1),
    (r"\boxed{1 1/2}", "1 1/2", 1),
    (r"\boxed{50\%}", "0.5", 1),
    (r"\boxed{\$1,234.50}", "1234.5", 1),
    (r"\boxed{1\,200}", "1200", 1),
    (r"\boxed{18 \text{ dollars}}", "18", 1),
    (r"\boxed{18 dollars}", r"\$18", 1),
    (r"\boxed{6\text{ eggs/day}}", "6", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{1.2\times 10^5}", "120000", 1),
    (r"\boxed{x=6}", "6", 1),
    (r"\boxed{6.}", "6", 1),
    (r"\boxed{(x+1)^2}", "$x^2+2x+1$", 1),
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", 1),
    (r"\boxed{3\pi}", r"3\pi", 1),
    (r"\boxed{1024}", "2^{10}", 1),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
    (r"\boxed{true}", True, 1),
    (r"\boxed{18}", 18.0, 1),
    (r"\boxed{0.0000001}", 1e-7, 1),
]


@pytest.mark.parametrize(("response", "truth", "score"), MATHEMATICS)
def test_mathematics(response, truth, score):
    assert rewards.math_verify(sample(response, truth))["score"] == score


def test_expressions_count_where_they_are_asked_for():
    fn = rewards.resolve("math_verify", {"expressions": True})
    for response, truth in (("we simply multiply 2*3.", "6"), (r"\boxed{48/2}", "24"), (r"\boxed{5!}", "120")):
        assert fn(sample(response, truth))["score"] == 1.0
    assert fn(sample(r"6 \boxed{}", "6"))["score"] == 0.0


LAST = rewards.regular_expression(pattern=r"####\s*(-?[\d.]+)")
WORDS = [  # a reward, the response, the ground truth, the right score
    (rewards.exact_match, "6 7", "6", 0),
    (rewards.exact_match, "6\n6", "6", 0),
    (rewards.exact_match, "The answer is 6", "6", 0),
    (rewards.exact_match, "06", 6, 0),
    (rewards.exact_match, "", "6", 0),
    (rewards.exact_match, "False", True, 0),
    (rewards.exact_match, " 6\n", 6.0, 1),
    (rewards.exact_match, "6.0", 6.0, 1),
    (rewards.exact_match, "true", True, 1),
    (rewards.exact_match, "0.5", 0.5, 1),
    (LAST, "#### 6 #### 7", "6", 0),
    (LAST, "6 ####", "6", 0),
    (LAST, "#### 2*3", "6", 0),
    (LAST, "#### 7 #### 6", 6.0, 1),
    (rewards.length_penalty(max_tokens=8, buffer=4), "", None, 0),
]


@pytest.mark.parametrize(("fn", "response", "truth", "score"), WORDS)
def test_words(fn, response, truth, score):
    result = fn(sample(response, truth))
    assert (result["score"] if isinstance(result, dict) else result) == score


JUDGED = [  # a judge's answer, whether it was cut, the score that is read
    ('It says "Score: 10" itself. Score: 2', False, 2.0),
    ("Score: 10 would be wrong; Score: 1", False, 1.0),
    ("Score: ten", False, None),
    ("10", False, None),
    ("", False, None),
    (f"Score: {'9' * 400}", False, None),
    ("Score: 1", True, None),
    ("Score: 1.", True, None),
    ("Score: 1 of 10, as", True, 1.0),
    ("Score: 10\n", True, 10.0),
    ("Score: 7.5", False, 7.5),
]


@pytest.mark.parametrize(("answer", "cut", "score"), JUDGED)
def test_a_judges_answer(answer, cut, score):
    assert score_in(answer, re.compile(JudgeSettings().pattern), cut=cut) == score


def test_a_judges_cut_answer_of_a_fixed_length_is_whole():
    assert score_in("7", re.compile(r"\A(\d)"), cut=True) == 7.0


class Pays:
    """An environment of gym's kind whose reward and end are what it is made with."""

    def __init__(self, reward, done=True):
        self.reward, self.done = reward, done

    def reset(self, seed=None):
        return "say", {}

    def step(self, text):
        return "so", self.reward, self.done, False, {}


class Sells:
    """A class of tools whose reward is what it is made with."""

    def __init__(self, reward):
        self.reward = reward

    def reset(self):
        return "say"

    def get_reward(self):
        return self.reward


def stepped(environment):
    """The first step of an episode, by a runner."""
    player = EnvironmentRunner(lambda: environment, name="pays", inline=True)
    (begun,) = player.reset([{}], [1])
    (step,) = player.step([begun.state], [Reply("x", (1,), ".")])
    return step


@pytest.mark.parametrize("reward", ["1.0", "inf", None, [1.0], float("inf"), float("nan"), {"score": 1.0}])
@pytest.mark.parametrize(("kind", "made"), [(Gym, Pays), (ToolClass, Sells)])
def test_rewards_of_environments_are_numbers(kind, made, reward):
    with pytest.raises(ValueError, match=r"the environment 'pays': step returned the reward .*number"):
        stepped(kind(make=lambda: made(reward)))
    assert stepped(kind(make=lambda: made(True))).reward == 1.0


@pytest.mark.parametrize("done", ["no", "", 1, None, [False]])
def test_an_end_is_true_or_false(done):
    with pytest.raises(ValueError, match=r"the environment 'pays': step returned done = .*give True or False"):
        stepped(Gym(make=lambda: Pays(1.0, done)))
    assert stepped(Gym(make=lambda: Pays(1.0, True))).done
