"""What a script can give to one stage and forget for another is refused before any work, as settings are."""

import attrs
import pytest
import torch

from fppo import advantages
from fppo.assembly.run import assemble
from fppo.batch import Annotated, narrow
from fppo.key import Key
from fppo.losses import KLState
from fppo.pipeline import OfRows, Program, RunState, local_passes, ppo_step, stages
from fppo.pipeline.checks import disagreements
from fppo.rollout import Sampling
from fppo.steps import Forward
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.train_state import TrainState
from tests import tiny, tiny_run

WARM = PolicyTerms(temperature=0.7)
MODEL, _ = tiny.model_and_params()


def _program(*, temperature=0.7, rollout=0.7, terms=WARM, old="pass", source="pass", **estimating):
    return Program(
        rollout=stages.RollOut(engine=None, sampling=Sampling(temperature=rollout)),
        score=stages.Score(score=None),
        annotate=stages.Annotate(
            passes=local_passes(Forward(MODEL), micro_batching=None, temperature=temperature), old_log_probs=old
        ),
        estimate=stages.Estimate(advantage_fn=None, max_tokens=3, **estimating),
        update_actor=UpdateActor(
            forward=None, loss_fn=None, loop=None, optimizer=None, terms=terms, old_log_probs=source
        ),
    )


def _disagreements(program):
    stages = ("rollout", "annotate", "estimate", "update_actor")
    return disagreements(**{name: getattr(program, name) for name in stages})


def _correct(*args):
    raise AssertionError("nothing is computed")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 1.0}, ["temperature = 0.7 in rollout (Sampling), 1.0 in annotate, 0.7 in UpdateActor"]),
        ({"terms": PolicyTerms()}, ["temperature = 0.7 in rollout (Sampling), 0.7 in annotate, 1.0 in UpdateActor"]),
        ({"rollout": 1.0, "correct": _correct}, []),
        ({"rollout": 1.0, "correct": _correct, "terms": PolicyTerms()}, ["temperature = 0.7 in annotate, 1.0 in"]),
        ({"old": "update"}, ["old_log_probs = 'update' in annotate, 'pass' in UpdateActor: give both the same"]),
        ({"source": "update"}, ["old_log_probs = 'pass' in annotate, 'update' in UpdateActor: give both the same"]),
        ({"old": "engine"}, []),
        ({"old": "engine", "source": "engine", "correct": _correct}, ["would compare the engine's with themselves"]),
        (
            {"old": "update", "source": "update", "kl_in_reward": True, "rollout": 1.0},
            ["temperature = 1.0 in rollout", "kl_in_reward in estimate needs them before the update"],
        ),
        ({}, []),
    ],
)
def test_stages_agree(changes, words):
    program = _program(**changes)
    found = _disagreements(program)
    assert len(found) == len(words)
    assert all(text in line for text, line in zip(words, found, strict=True))
    run = RunState(actor=TrainState(params={}, opt=None, step=0), key=Key(0))

    def draw(cursor):
        raise LookupError("the step has begun")

    with pytest.raises(ValueError if words else LookupError) as error:
        ppo_step(run, program=program, draw=draw)
    assert all(text in str(error.value) for text in words)


def test_stages_of_ones_own_are_left_alone():
    program = attrs.evolve(_program(temperature=1.0), annotate=lambda scored, run: (scored, {}), rollout=_correct)
    assert _disagreements(program) == []


def test_what_settings_make_agrees(tmp_path):
    tiny_run.write_task(tmp_path)
    changes = {"rollout__temperature": 0.7, "algorithm__old_log_probs": "engine", "model__offload": "all"}
    with assemble(tiny_run.settings(tmp_path, **changes)) as assembly:
        assert _disagreements(assembly.program) == []


def _rows(**changes):
    return attrs.evolve(narrow(Annotated, tiny.experience(3, 4)), **changes)


def test_a_kl_in_the_reward_needs_a_reference():
    def run(rows, **how):
        return stages.Estimate(advantage_fn=advantages.grpo, max_tokens=3, **how)(rows, KLState(coef=0.1))

    with pytest.raises(ValueError, match=r"kl_in_reward=True with the coefficient 0\.1 needs ref_log_probs"):
        run(_rows(ref_log_probs=None), kl_in_reward=True)
    run(_rows(ref_log_probs=None))
    run(_rows(), kl_in_reward=True)


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline", "gdpo", "reinforce_plus_plus"]
)
def test_an_estimator_of_groups_needs_groups(name):
    rows = _rows(groups=torch.arange(4), named_scores={"a": torch.ones(4)})
    rewards = torch.ones_like(rows.old_log_probs)
    if name == "reinforce_plus_plus":
        OfRows(getattr(advantages, name))(rows, rewards)
        return
    with pytest.raises(ValueError, match=rf"{name}' compares responses to one prompt, and each has one: raise Sampl"):
        OfRows(getattr(advantages, name))(rows, rewards)
