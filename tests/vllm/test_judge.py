"""A judge on a vLLM of its own gives the scores of the same judge on transformers."""

import attrs
import pytest

from fppo import models
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.vllm.engine import EngineFailure
from tests import tiny_run
from tests.rewards.samples import Letters, rollout
from tests.rewards.scorers import judge_of
from tests.rollout.test_embedded import make_prompts
from tests.vllm.families import make

GIVEN = rollout(list("abcdefgh"), list("ijklmnop"), list("12345678"))


def settings(directory, engine, **changes):
    by_hand = {"path": str(directory / "judge"), "template": "{ground_truth}={response}+{prompt}", "pattern": r"(\d)"}
    by_hand |= {"chat": False, "max_tokens": 5, "max_prompt_tokens": 20, "temperature": 1.3, "engine": engine} | changes
    return tiny_run.settings(directory, **{f"reward__judge__{name}": value for name, value in by_hand.items()})


def judged(by_hand):
    with judge_of(by_hand, Letters()) as sampled:
        fn, _ = sampled["judge"]
        first = fn(GIVEN)
        again = fn(attrs.evolve(GIVEN, row_ids=GIVEN.row_ids + 8))
    return [x[0].tolist() for x in (first, again)]


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    tokenizer = character_tokenizer(CHARACTERS)
    model = small_model(len(tokenizer), width=128, layers=1)
    params = {name: 4 * x for name, x in models.init_params(model, Key(1)).items()}
    models.save(model, params, tmp_path / "judge", tokenizer=tokenizer)
    return tmp_path


def test_scores_are_those_of_the_embedded_judge(task):
    scores = judged(settings(task, "vllm", vllm__cache_gb=0.05))
    assert scores == judged(settings(task, "embedded"))
    assert scores[0] != scores[1]  # other rows, other draws
    assert len(set(scores[0])) > 2


def test_it_tells_of_rows_as_they_end(qwen2):
    engine, _ = qwen2
    _, params = make("qwen2")
    reported = {}
    sampling = Sampling(n=2, max_tokens=9, stop_token_ids=(3, 5, 8, 13, 21))
    sampled = engine.generate(
        params,
        Ask(
            make_prompts(),
            sampling,
            Key(1),
            on_finished=lambda row, response, finish: reported.setdefault(row, []).append((response, finish)),
        ),
    )
    rows = sampled.tokens[:, -sampled.response_mask.shape[1] :]
    expected = [(ids[mask].tolist(), finish) for ids, mask, finish in zip(rows, sampled.response_mask, sampled.finish)]
    assert [reported[row] for row in range(len(expected))] == [[each] for each in expected]
    assert {finish for _, finish in expected} == {"stop", "length"}


def test_a_judge_without_memory_says_which_setting(task):
    with pytest.raises(EngineFailure, match=r"reward\.judge: vLLM did not start: .*cache_gb = 1e-05"):
        judged(settings(task, "vllm", vllm__cache_gb=1e-5))
