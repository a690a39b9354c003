"""The built-in rewards, and rewards by name."""

from __future__ import annotations

import importlib.util
import pickle
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import rewards
from fppo.rewards import RewardRunner
from fppo.workers.sample import name_of
from tests.rewards import functions
from tests.rewards.samples import NONE, sample


def test_exact_match():
    assert rewards.exact_match(sample(" 42\n", "42")) == {"score": 1.0, "answer": "42"}
    assert rewards.exact_match(sample("42", 42))["score"] == 1.0
    assert rewards.exact_match(sample("4 2", "42"))["score"] == 0.0


@pytest.mark.parametrize("truth", [["3", "4"], {"answer": "3"}, None])
def test_a_ground_truth_that_no_response_equals_is_no_score_of_zero(truth):
    """A list would never be equal, so that every response were wrong without a word."""
    for fn in (rewards.exact_match, rewards.regular_expression(pattern=r"(\d+)"), rewards.math_verify):
        with pytest.raises(ValueError, match=r"no response equals the ground truth .*data\.ground_truth"):
            fn(sample("3", truth))
    assert rewards.regular_expression(pattern=r"\d+")(sample("3", truth)) == 1.0  # it reads none
    assert rewards.exact_match(sample("True", True))["score"] == 1.0


def test_regular_expression_without_and_with_a_group():
    form = rewards.regular_expression(pattern=r"<think>.*</think>")
    assert (form(sample("a <think>b</think>")), form(sample("<think>"))) == (1.0, 0.0)
    final = rewards.regular_expression(pattern=r"####\s*(-?\d+|none)?")
    assert final(sample("#### 3 ... #### 42", 42)) == {"score": 1.0, "answer": "42"}
    assert final(sample("#### 42 ... #### 3", "42")) == {"score": 0.0, "answer": "3"}
    assert final(sample("42", "42")) == {"score": 0.0, "answer": None}
    assert final(sample("####", "42")) == {"score": 0.0, "answer": None}
    with pytest.raises(ValueError, match=r"pattern = '\(' is not a regular expression"):
        rewards.regular_expression(pattern="(")


@pytest.mark.slow
def test_a_pattern_that_takes_for_ever_is_bounded():
    with RewardRunner(rewards.regular_expression(pattern="(a+)+b"), time_limit=3.0) as runner:
        results = runner.run([sample("a" * 60), sample("ab", "a")])
    assert results.scores == {"regular_expression": [NONE, 1.0]}
    assert results.failures[0].kind == "timeout"


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (15, 0.0), (16, -0.1), (18, -0.3), (20, -0.5), (22, -0.7)])
def test_length_penalty(tokens, penalty):
    fn = rewards.length_penalty(max_tokens=20, buffer=5, factor=0.5)
    assert fn(sample(tokens=tokens)) == pytest.approx(penalty)


def test_length_penalty_checks_its_numbers():
    for arguments in ((20, 0), (20, 21), (20, 5, -1.0)):
        with pytest.raises(ValueError, match="length_penalty: buffer"):
            rewards.length_penalty(**dict(zip(("max_tokens", "buffer", "factor"), arguments)))


@pytest.mark.slow
def test_math_verify():
    mathematics = [
        sample("so it is $\\frac{2}{4}$", "0.5"),
        sample("The answer is \\boxed{x^2 + 2x + 1}", "$(x+1)^2$"),
        sample("#### 1,234", "1234"),
        sample("it is 7", "8"),
        sample("I do not know", "8"),
        sample("7", ""),
    ]
    with RewardRunner(rewards.math_verify, time_limit=120) as runner:
        results = runner.run(mathematics)
    assert results.scores["math_verify"] == [1.0, 1.0, 1.0, 0.0, 0.0, NONE]
    assert [(f.number, "cannot" in f.text or "not mathematics" in f.text) for f in results.failures] == [(5, True)]
    assert results.answers[3:5] == ["7", None]


def test_math_verify_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'fppo\[math\]'"):
        rewards.resolve("math_verify")


def test_rewards_by_name(tmp_path, monkeypatch):
    assert rewards.resolve("exact_match") is rewards.exact_match
    penalty = rewards.length_penalty(max_tokens=8, buffer=4)
    assert rewards.resolve("length_penalty", {"max_tokens": 8, "buffer": 4}) == penalty
    assert rewards.resolve("tests.rewards.functions:length") is functions.length
    assert rewards.resolve("tests.rewards.functions:judge") is functions.judge
    assert rewards.resolve("tests.rewards.functions:summed") is functions.summed
    (tmp_path / "my_own_reward.py").write_text("def score(sample):\n    return 1.0\n")
    (tmp_path / "broken_reward.py").write_text("import no_such_module\n")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    assert rewards.resolve("my_own_reward:score")(None) == 1.0
    with RewardRunner(rewards.resolve("my_own_reward:score")) as runner:
        assert runner.run([sample()]).scores == {"score": [1.0]}
    with pytest.raises(ValueError, match=r"'broken_reward' does not import: ModuleNotFoundError: .*no_such_module"):
        rewards.resolve("broken_reward:score")


def test_a_function_of_this_process_is_the_reward_of_its_name_and_of_no_other_process():
    own = {"fppo.train:score": lambda sample, *, factor=1.0: factor}
    assert rewards.resolve("fppo.train:score", None, own)(None) == 1.0
    (term,) = rewards.combine(["fppo.train:score"], arguments={"fppo.train:score": {"factor": 2.0}}, own=own).terms
    assert (term.name, term.fn(None)) == ("<lambda>", 2.0)
    with pytest.raises(ValueError, match=r"of the program that called fppo\.train; call fppo\.train there again"):
        rewards.resolve("fppo.train:score")


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("exact_mach", None, "did you mean 'exact_match'"),
        ("exact_match", {"pattern": "x"}, "unexpected keyword argument 'pattern'"),
        ("regular_expression", None, r"missing a required argument: 'pattern'"),
        ("length_penalty", {"max_tokens": 8, "bufer": 4}, "bufer"),
        ("no_such_module:f", None, "'no_such_module' does not import"),
        ("tests.rewards.functions:lenght", None, "no 'lenght'; did you mean 'length'"),
        ("tests.rewards.functions:constant", None, "is a int, not a function"),
        ("tests.rewards.functions:Judge", None, "is a class, not a function; name a function, or an instance"),
        ("tests.rewards.functions:", None, "not of the form"),
        ("tests.rewards.functions:length", {"a": 1}, "unexpected keyword argument 'a'"),
        ("tests.rewards.functions:summed", {"a": 1}, "is a sum, which takes no keywords"),
    ],
)
def test_names_that_stand_for_no_reward(name, arguments, text):
    with pytest.raises(ValueError, match=text):
        rewards.resolve(name, arguments)


def test_keywords_are_bound_to_a_function_of_ones_own():
    """What the function says of itself stays with it, also where a worker gets it."""
    said = sample("abc", None)
    keywords = {"factor": 2.0}
    one, batch = (rewards.resolve(f"tests.rewards.functions:{name}", keywords) for name in ("scaled", "batch_scaled"))
    for fn in (one, pickle.loads(pickle.dumps(one))):
        assert fn(said) == 6.0
        assert name_of(fn) == "scaled"
    for fn in (batch, pickle.loads(pickle.dumps(batch))):
        assert fn([said, said]) == [6.0, 6.0]
        assert fn.reward_kind == functions.batch_scaled.reward_kind
    terms = rewards.combine(["tests.rewards.functions:scaled"], arguments={"tests.rewards.functions:scaled": keywords})
    assert terms.terms[0].fn(said) == 6.0


@rewards.shaping_reward
@rewards.inline_reward
def marked(sample, *, factor=1.0):
    return factor


marked.reward_name, marked.reward_prepare = "known as", len  # type: ignore[attr-defined]


def test_a_function_with_keywords_says_of_itself_what_it_said_without():
    plain, bound = (rewards.resolve("tests.rewards.test_builtin:marked", how) for how in (None, {"factor": 2.0}))
    assert (plain(sample()), bound(sample())) == (1.0, 2.0)
    for fn in (plain, bound):
        term = rewards.combine(["tests.rewards.test_builtin:marked"]).terms[0]._replace(fn=fn)
        assert (name_of(fn), fn.reward_prepare) == ("known as", len)
        assert (term.kind, term.inline, term.shaping) == ("sample", True, True)


def test_combining_by_name():
    reward = rewards.combine(
        ["exact_match", "regular_expression", "tests.rewards.functions:length"],
        [1.0, 0.5, 2.0],
        arguments={"regular_expression": {"pattern": "x"}},
        max_tokens=8,
        overlong_buffer=4,
        overlong_penalty=0.25,
        extra={"model": (functions.judge, 0.5)},
    )
    weights = {term.name: term.weight for term in reward.terms}
    assert weights == {
        "exact_match": 1.0,
        "regular_expression": 0.5,
        "length": 2.0,
        "length_penalty": 0.25,
        "model": 0.5,
    }
    assert reward.terms[3].fn == rewards.length_penalty(max_tokens=8, buffer=4)
    with pytest.raises(ValueError, match="2 weights for 1 rewards"):
        rewards.combine(["exact_match"], [1.0, 2.0])
    with pytest.raises(ValueError, match="given twice"):
        rewards.combine(["exact_match", "exact_match"])
    with pytest.raises(ValueError, match="needs max_tokens"):
        rewards.combine(["exact_match"], overlong_buffer=4)
    with pytest.raises(ValueError, match="not among the functions"):
        rewards.weighted_sum({"a": functions.length}, {"b": 1.0})


def test_the_penalty_for_length_is_a_function_with_a_weight_of_its_own():
    """So that a sum has it, and so has an estimator that looks at each function by itself."""
    given = {"max_tokens": 10, "overlong_buffer": 5}
    exact, penalty = rewards.combine(["exact_match"], **given, overlong_penalty=0.25).terms
    assert (exact.weight, penalty.name, penalty.weight, penalty.shaping) == (1.0, "length_penalty", 0.25, True)
    assert penalty.fn(sample("x", tokens=10)) == -1.0
    assert rewards.combine(["exact_match"], **given).terms[1].weight == 1.0
    with pytest.raises(ValueError, match="the reward 'length_penalty' is given twice"):
        rewards.combine(["tests.rewards.test_builtin:length_penalty"], **given)


def length_penalty(sample):
    return 0.0


def length(sample):
    """With the name of another module's."""
    return 0.0


FOUND = {
    "exact_match": {"exact_match": (1.0, rewards.exact_match)},
    "tests.rewards.functions:length": {"length": (1.0, functions.length)},
    "tests.rewards.test_builtin:length": {"length": (1.0, length)},
    "tests.rewards.functions:judge": {"Judge": (1.0, functions.judge)},
    "tests.rewards.functions:batch_lengths": {"batch_lengths": (1.0, functions.batch_lengths)},
    "tests.rewards.functions:summed": {
        "summed/length": (0.5, functions.length),
        "summed/one": (1.0, functions.by_response),
    },
}


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([*FOUND]), min_size=1, max_size=4),
    st.one_of(st.just([]), st.lists(st.sampled_from([0.0, 1.0, -2.0, 0.25]), min_size=4, max_size=4)),
    st.sampled_from([0, 3]),
    st.booleans(),
)
def test_a_sum_has_each_function_by_its_name_with_its_own_weight(names, weights, buffer, more):
    """By its whole name where another has it; then what the run adds."""
    weights, expected = weights[: len(names)], []
    for number, name in enumerate(names):
        labels = [label for label, _, _ in expected]
        for label, (factor, fn) in FOUND[name].items():
            label = name if label in labels else label
            expected.append((label, factor * (weights[number] if weights else 1.0), fn))
    if buffer:
        expected.append(("length_penalty", 0.5, rewards.length_penalty(max_tokens=9, buffer=3)))
    if more:
        expected.append(("model", -1.5, functions.scaled))
    how = {"max_tokens": 9, "overlong_buffer": buffer, "overlong_penalty": 0.5}
    how["extra"] = {"model": (functions.scaled, -1.5)} if more else None
    if len({*names}) < len(names):
        with pytest.raises(ValueError, match=r"the reward '.*' is given twice"):
            rewards.combine(names, weights, **how)
        return
    terms = rewards.combine(names, weights, **how).terms
    assert [(term.name, term.weight) for term in terms] == [(label, weight) for label, weight, _ in expected]
    assert all(term.fn is fn or term.fn == fn for term, (_, _, fn) in zip(terms, expected, strict=True))
