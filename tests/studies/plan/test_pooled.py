"""The plans of a run's pools: each of its own models on its own mesh, with the columns that pass through it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fppo.commands import plan
from fppo.settings.plan import PlanSettings
from fppo.studies.plan.columns import ColumnCall
from tests import tiny_run


@pytest.fixture
def shown(monkeypatch):
    """The plan of each pool; a pool fits unless its name is in `small`."""
    kept = SimpleNamespace(cases={}, engines={}, small=set())

    def planned(of, options, case, pool=None):
        kept.cases[pool] = case
        return [[f"of {pool}"]], {"pool": pool}, pool not in kept.small

    def engines(of, options, pool, columns):
        kept.engines[pool] = columns
        return SimpleNamespace(fits="e" not in kept.small)

    calls = {
        "p": [
            ColumnCall("actor", "old_log_prob", {"tokens": 7, "masks": 2}, {}),
            ColumnCall("actor", "update_actor", {"tokens": 7, "advantages": 4}, {"x": 99}),
        ],
        "v": [ColumnCall("critic", "values", {"tokens": 5}, {})],
        "e": [ColumnCall("rollout", "generate", {"tokens": 3}, {})],
    }
    monkeypatch.setattr(plan, "_planned", planned)
    monkeypatch.setattr(plan, "engines_of", engines)
    monkeypatch.setattr(plan, "plan_engines", lambda case: case)
    monkeypatch.setattr(plan, "column_calls", lambda of, case: calls)
    monkeypatch.setattr(plan.text, "of_engines", lambda planned: [["engines"]])
    monkeypatch.setattr(plan.text, "plain", lambda planned: {"engines": True})
    monkeypatch.setattr(plan.text, "of_columns", lambda calls: [[f"{len(calls)} calls"]])
    return kept


def settings_of(tmp_path, *, engines):
    pools = {"p": {"ranks": 2, "tensor": 2}, "v": {"ranks": 1}} | ({"e": {"ranks": 3}} if engines else {})
    roles = {"placement__roles__actor": "p", "placement__roles__critic": "v"}
    roles |= {"placement__roles__rollout": "e"} if engines else {}
    return tiny_run.settings(tmp_path, model__path="quickstart", placement__pools=pools, **roles, mesh__stage=2)


@pytest.mark.parametrize("engines", [False, True])
def test_each_pool_has_its_models_its_mesh_and_the_most_of_its_columns(tmp_path, shown, engines):
    sections, numbers, fits = plan.planned_pools(settings_of(tmp_path, engines=engines), PlanSettings(gpu="cpu"))
    assert fits
    policy, critic = shown.cases["p"], shown.cases["v"]
    assert (policy.only, policy.critic, policy.reference) == (("actor", "reference"), False, True)
    assert (critic.only, critic.critic, critic.reference) == (("critic",), True, False)
    assert (policy.size("tensor"), policy.world, critic.world) == (2, 2, 1)
    assert policy.sharding.stage == critic.sharding.stage == 2
    assert (policy.columns, critic.columns) == (11.0, 5.0)  # the fullest call's, as they are sent
    assert (policy.sampling is None) is engines
    assert shown.engines == ({"e": 3} if engines else {})
    assert numbers["p"]["pool"] == "p"
    assert [call.call for call in numbers["p"]["columns"]] == ["old_log_prob", "update_actor"]
    titles = [each[0] for each in sections]
    assert titles[:3] == ["pool p: actor, reference", "of p", "2 calls"]
    assert ("pool e: rollout" in titles) is engines
