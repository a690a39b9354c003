"""A run that functions, a reward model and a judge score: on several ranks it is the run of one process."""

from __future__ import annotations

import threading

import pytest

import fppo
from fppo import models
from fppo.assembly import run as assembly
from fppo.commands import actions
from fppo.key import Key
from fppo.pipeline.train import iterate
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.rewards import RewardRunner
from fppo.runs import jsonl
from fppo.runtime.mesh import LOCAL
from fppo.runtime.simulate import simulate
from tests import tiny_run
from tests.pipeline.test_mesh import numbers, same, steps


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "all"])
def test_a_step_scored_by_models_is_the_same_on_two_ranks(tmp_path, offload):
    tiny_run.write_task(tmp_path)
    tokenizer = character_tokenizer(CHARACTERS)
    policy = small_model(len(tokenizer), width=16, layers=1)
    judge = {name: x + 0.2 for name, x in models.init_params(policy, Key(2)).items()}
    models.save(policy, judge, tmp_path / "judge", tokenizer=tokenizer)
    classifier = models.build(policy.config, "value")
    params = {name: x + 0.1 for name, x in models.init_params(classifier, Key(1)).items()}
    models.save(classifier, params, tmp_path / "model", tokenizer=character_tokenizer("=+9876543210"))
    settings = tiny_run.settings(
        tmp_path,
        reward__model__path=str(tmp_path / "model"),
        reward__judge__path=str(tmp_path / "judge"),
        reward__judge__template="{prompt}{response}",
        reward__judge__pattern=r"(\d)",
        reward__judge__chat=False,
        reward__judge__max_tokens=3,
        reward__failure_score=0.0,
        model__offload=offload,
    )
    ((_, experience, report, _),), held_out = steps(settings, LOCAL, 1)
    assert set(experience.named_scores) == {"exact_match", "reward_model", "judge"}
    assert report["reward/judge_truncated"] == 0
    assert 0 <= report["reward/judge_unparsed"] <= 8
    for ((_, runs, others, _),), also in simulate({"shard": 2}, lambda mesh: steps(settings, mesh, 1)):
        same(runs.named_scores, experience.named_scores)
        common = {n: x for n, x in numbers(others).items() if n.startswith("reward/")}
        assert common == pytest.approx({n: report[n] for n in common}, rel=1e-4, abs=1e-5)
        assert also == pytest.approx(held_out, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "n"), [(1, 2), (2, 1), (2, 2)])
def test_a_run_that_judges_early_is_the_run_that_waits(tmp_path, monkeypatch, ranks, n):
    """With overlap no sample of the step waits for the rollout's end; the numbers are the same without."""
    tiny_run.write_task(tmp_path)
    changes = {"reward__functions": ["tests.rewards.functions:length", "exact_match"], "rollout__n": n}
    changes["data__eval_path"] = []
    late: list[int] = []
    plain = RewardRunner.outcomes_of

    def watched(runner, term, samples, *patience):
        if term.name == "length" and threading.current_thread().name != "early rewards":
            late.append(len(samples))
        return plain(runner, term, samples, *patience)

    monkeypatch.setattr(RewardRunner, "outcomes_of", watched)
    runs = []
    for overlap in (True, False):
        settings = tiny_run.settings(tmp_path, reward__overlap=overlap, **changes)

        def on_rank(mesh, settings=settings):
            with assembly.assemble(settings, mesh=mesh) as bound:
                steps = iterate(bound.run, program=bound.program, draw=bound.draw, donate=False)
                return [next(steps)[1].named_scores for _ in range(2)]

        runs.append(simulate({"shard": ranks}, on_rank) if ranks > 1 else [on_rank(LOCAL)])
        assert sum(late) == (0 if overlap else 16)
        late.clear()
    for each in runs[0] + runs[1]:
        same(each, runs[1][0], at=0.0)


@pytest.mark.slow
def test_a_run_with_rewards_of_steps_stops_and_goes_on_bit_for_bit(tmp_path):
    """Its samples have the rewards at the tokens; a run whose reward is at the last token is that of the score."""
    tiny_run.write_task(tmp_path)

    def trained(name, function, **changes):
        functions = [f"tests.rewards.functions:{function}"]
        changes = {"actor__optimizer__schedule": "constant", "algorithm__advantage__lam": 0.9} | changes
        given = tiny_run.settings(
            tmp_path, output_dir=str(tmp_path / name), reward__functions=functions, data__eval_path=[], **changes
        )
        assert actions.train(given) == 0
        return [(line["step"], line["state"]) for line in jsonl.read(tmp_path / name / "digests.jsonl")]

    whole = trained("whole", "by_token", steps=2)
    trained("parts", "by_token", steps=1)
    assert trained("parts", "by_token", steps=2) == whole
    assert tiny_run.sample_bytes(tmp_path / "whole") == tiny_run.sample_bytes(tmp_path / "parts")
    rows = fppo.open(tmp_path / "whole").arrow(1).to_pydict()
    for tokens, rewards in zip(rows["tokens"], rows["process_rewards"], strict=True):
        assert [x if x == x else None for x in rewards] == [None if t == 5 else t % 2 for t in tokens]
    once, last = (trained(name, name, steps=1) for name in ("at_once", "at_the_end"))
    assert once == last
    assert once[0] != whole[0]
