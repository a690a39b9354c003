"""Runs whose policy plays an environment, from settings to metrics."""

import itertools

import pytest
import torch

from fppo import metrics
from fppo._errors import RunFailed
from fppo.assembly import run as assembly
from fppo.episodes import joined, num_episodes
from fppo.pipeline.train import iterate
from fppo.settings import files, modules
from tests import tiny_run

COUNT = {"name": "tests.rollout.environments:Count", "prompt": "{}+"}


def playing(directory, environment=COUNT, **changes):
    """The settings of a run of episodes alone: no data, no reward functions."""
    tiny_run.write_task(directory)
    fixed = {"data__path": [], "data__eval_path": [], "reward__functions": [], "rollout__stop": ["+", "="]}
    fixed |= {"rollout__turns__max_turns": 3, "rollout__max_tokens": 24, "rollout__turns__turn_tokens": 6}
    fixed |= {f"rollout__environment__{name}": value for name, value in environment.items()}
    return tiny_run.settings(directory, **{**fixed, **changes})


GROUPS = {"algorithm__advantage": "rloo", "algorithm__group_by": "turn", "rollout__n": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, GROUPS, {"algorithm__advantage": "turn_gae", "rollout__ahead": 1}],
    ids=["gae", "by turn", "turn_gae"],
)
def test_whole_steps(tmp_path, changes):
    settings = playing(tmp_path, {**COUNT, "eval_episodes": 6, "episodes": 12}, **changes)
    with assembly.assemble(settings) as made:
        steps = iterate(made.run, program=made.program, draw=made.draw, ahead=settings.rollout.ahead)
        taken = list(itertools.islice(steps, 2))
        for _, batch, report in taken:
            numbers = metrics.report(report)
            assert numbers["rollout/turns/max"] > 1
            assert numbers["environment/failures"] == 0
            assert numbers["environment/turns"] == numbers["rollout/turns/mean"]
            torch.testing.assert_close(batch.scores, batch.turn_rewards.sum(1))
            assert numbers["reward/environment"] == pytest.approx(float(batch.scores.mean()), abs=1e-6)
            if not settings.algorithm.kl.coef:
                torch.testing.assert_close(batch.token_rewards, batch.turn_rewards)
            trained = {name: x for name, x in numbers.items() if name.startswith(("actor/", "critic/"))}
            assert all(torch.tensor(list(trained.values())).isfinite()), trained
        found, again = (metrics.report(made.evaluate(taken[-1][0])) for _ in range(2))
        assert found == again
        assert 1 <= found["val-aux/environment/turns"] <= 3
        assert f"val-core/environment/reward/mean@{settings.eval.n}" in found


# begins with the number of messages, so that what was written of earlier turns changes
CHAT = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"


def chatting(directory, *args, **changes):
    (directory / "chat.jinja").write_text(CHAT)
    chat = {"data__chat": True, "data__chat_template": str(directory / "chat.jinja")}
    return playing(directory, *args, **{**chat, "rollout__turns__thinking": "drop", **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, GROUPS, {"rollout__filter__groups": True, "rollout__filter__max_draws": 2, **GROUPS}],
    ids=["gae", "by turn", "refilled"],
)
def test_whole_steps_with_turns_as_rows(tmp_path, changes):
    settings = chatting(tmp_path, {**COUNT, "eval_episodes": 6, "episodes": 12}, **changes)
    with assembly.assemble(settings) as made:
        taken = list(itertools.islice(iterate(made.run, program=made.program, draw=made.draw), 2))
        for _, batch, report in taken:
            numbers = metrics.report(report)
            assert num_episodes(batch) == 8 < len(batch.tokens)
            assert numbers["rollout/rows/mean"] > 1
            assert numbers["rollout/turns/max"] > 1
            whole = joined(batch)
            torch.testing.assert_close(whole.scores, whole.turn_rewards.sum(1))
            assert numbers["training/rollout_probs_diff_max"] < 1e-5
            trained = {name: x for name, x in numbers.items() if name.startswith(("actor/", "critic/"))}
            assert all(torch.tensor(list(trained.values())).isfinite()), trained
        found = metrics.report(made.evaluate(taken[-1][0]))
        assert f"val-core/environment/reward/mean@{settings.eval.n}" in found


@pytest.mark.slow
def test_rows_of_data_and_rewards_go_with_an_environment(tmp_path):
    tiny_run.write_task(tmp_path)
    plain = "tests.rollout.environments:Plain"
    with assembly.assemble(tiny_run.settings(tmp_path, rollout__environment=plain)) as made:
        _, batch, report = next(iterate(made.run, program=made.program, draw=made.draw))
    assert (batch.scores >= 1).all()
    torch.testing.assert_close(batch.scores, batch.named_scores["exact_match"] + batch.named_scores["environment"])
    assert metrics.report(report)["environment/failures"] == 0


BAD = [
    ({"rollout__turns__respond": "calculator", "rollout__stop": ["="]}, "who answers is one of the two"),
    ({"algorithm__advantage": "remax"}, "in an episode of its own; take another estimator"),
    ({"rollout__environment__propt": "x"}, "Count has no such keyword; did you mean prompt?"),
    ({"rollout__environment__most": "x"}, "rollout.environment.most = 'x'"),
    ({"rollout__environment__name": "tests.rollout.environments:Cuont"}, "did you mean 'Count'?"),
    ({"rollout__environment__name": "gim"}, "there is no such environment; did you mean gym?"),
    ({"rollout__turns__failure": "oops"}, "it is for rollout.turns.respond"),
    ({"algorithm__group_by": "turn"}, "there are no turns to compare"),
    ({"rollout__turns__thinking": "drop"}, "by the chat template; give data.chat = true, or keep"),
    ({"eval__exact_values": True, "rollout__environment__eval_episodes": 3}, "leave rollout.environment out"),
]


@pytest.mark.parametrize(("changes", "text"), BAD, ids=[text for _, text in BAD])
def test_settings_that_conflict(tmp_path, changes, text):
    try:
        problems = modules.module_problems(playing(tmp_path, **changes))
    except files.SettingsError as error:
        problems = [error]
    assert text in "\n".join(map(str, problems))


@pytest.mark.slow
def test_what_is_no_environment_is_named(tmp_path):
    for name in ("math:floor", "json:JSONDecoder"):
        settings = playing(tmp_path, {"name": name})
        with pytest.raises(ValueError, match="environment"), assembly.assemble(settings) as made:
            next(iterate(made.run, program=made.program, draw=made.draw))


@pytest.mark.slow
def test_an_environment_that_always_fails_ends_the_run(tmp_path):
    settings = playing(tmp_path, {"name": "tests.rollout.environments:Moody"})
    text = (
        r"failed on every one of the first 8 episodes.*the first error: KeyError: 'mood' at .*the row has the columns"
    )
    with assembly.assemble(settings) as made, pytest.raises(RunFailed, match=text):
        next(iterate(made.run, program=made.program, draw=made.draw))
