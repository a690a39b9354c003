"""The columns that a plan says go to a pool and come back are those that a placed run counts in its trace."""

from __future__ import annotations

from collections import Counter

import pytest

from fppo import models
from fppo.assembly import pools
from fppo.assembly.run import assemble
from fppo.key import Key
from fppo.pipeline.train import iterate
from fppo.quickstart import small_model
from fppo.settings.plan import PlanSettings
from fppo.studies.plan.columns import column_calls
from fppo.studies.plan.plan import plan_engines
from fppo.studies.plan.run import case_of, engines_of
from tests import tiny_run
from tests.runs.test_placed import THREADS

WEIGHTS = ("read weights", "take weights")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    model = models.build(small_model(15, width=16, layers=1).config, "value")
    models.save(model, models.init_params(model, Key(1)), directory / "judge")
    return directory


def traced(settings):
    """The bytes that calls of the last step took there and back, by pool and call, as a trace has them."""
    there, back = Counter(), Counter()
    placed = settings.placement, settings.mesh, settings.device
    with (
        pools.groups_of(*placed, settings.model_roles, open_cluster=THREADS.open_cluster) as at,
        assemble(settings, places=at) as assembly,
    ):
        assembly.calls()  # which set everything up
        for run, _, _ in iterate(assembly.run, program=assembly.program, draw=assembly.draw, ahead=0, donate=True):
            calls = assembly.calls()
            if run.step == settings.steps:
                break
    for call in calls:
        place = call.group.split()[0], call.label  # engines are "e 0", "e 1", ...
        there[place] += call.there
        back[place] += call.back
    return there, back


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "changes"),
    [
        (
            {"actor": "a", "critic": "c", "reference": "c", "reward": "j", "rollout": "e"},
            {"rollout__n": 2, "algorithm__correction": "rollout"},
        ),
        pytest.param(
            {"actor": "a", "critic": "c"},
            {"critic__reads": "hidden", "critic__ensemble": 2, "critic__leave_disputed": 0.2, "critic__privileged": 3}
            | {"actor__entropy_coef": 0.01},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"actor": "a", "reward": "j"},
            {"rollout__n": 2, "algorithm__advantage": "remax", "algorithm__old_log_probs": "auto", "steps": 3}
            | tiny_run.NO_KL
            | {"rollout__batch_size": 20},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"actor": "a", "teacher": "t"},
            {"algorithm__advantage": "distill", "algorithm__old_log_probs": "pass", "actor__epochs": 1}
            | tiny_run.NO_KL,
            id="teacher",
        ),
        pytest.param(
            {"actor": "a", "critic": "c"}, {"algorithm__router_replay": "rollout"}, id="experts", marks=pytest.mark.slow
        ),
        pytest.param(
            {"actor": "a", "critic": "c"}, {"algorithm__router_replay": "all"}, id="again", marks=pytest.mark.slow
        ),
    ],
)
def test_a_placed_run_moves_the_columns_that_are_planned(task, roles, changes, tmp_path):
    if "algorithm__router_replay" in changes:
        tiny_run.write_task(task := tmp_path)
        tiny_run.write_mixture(task)
    ranks = {"a": 2, "e": 2} if "e" in roles.values() else {}
    placed = {f"placement__roles__{role}": pool for role, pool in roles.items()}
    judge = {"reward__model__path": str(task / "judge")} if "reward" in roles else {}
    judge |= {"model__teacher_path": str(task / "start")} if "teacher" in roles else {}
    settings = tiny_run.settings(
        task,
        output_dir=str(tmp_path / "run"),
        device="cpu",
        **{"steps": 1, "data__max_prompt_tokens": 4, "data__eval_path": [], **changes, **judge, **placed},
        placement__pools={pool: {"ranks": ranks.get(pool, 1)} for pool in roles.values()},
        **({"placement__engines__rows": 4} if "e" in ranks else {}),
    )
    planned = column_calls(settings, case_of(settings, PlanSettings()))
    assert set(planned) == set(roles.values())
    there, back = traced(settings)
    seen = set()
    for pool, calls in planned.items():
        for name in {call.call for call in calls}:
            own = [call for call in calls if call.call == name]
            assert there[pool, name] == sum(sum(call.there.values()) for call in own), (pool, name)
            columns = sum(sum(call.back.values()) for call in own)
            assert back[pool, name] == columns if columns else back[pool, name] < 2000, (pool, name)  # metrics
            seen.add((pool, name))
    if "e" in ranks:
        engines = plan_engines(engines_of(settings, PlanSettings(), "e", 0))
        assert there["e", "take weights"] == engines.rollout.engines * engines.rollout.sent == 2 * back["a", WEIGHTS[0]]
    besides = {at: size for at, size in there.items() if at not in seen and at[1] not in WEIGHTS}
    assert sum(besides.values()) == 0, besides
