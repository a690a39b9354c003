"""Names of metrics that a run will not log are known from its settings, and those that it may log are not refused."""

from __future__ import annotations

from typing import Any

import pytest

from fppo.settings import files
from fppo.settings.logged import FAMILIES, NAMES, missing
from fppo.settings.train import TrainSettings

HELD = {"data.eval_path": ["b.jsonl"]}
OWN = {"actor.loss": "my:loss"}
OF_CRITIC = [name for name in NAMES if name.startswith(("critic/vf", "critic/vpred", "critic/values", "critic/grad"))]


def why(name: str, changes: dict[str, Any]) -> str | None:
    return missing(files.replace(TrainSettings(), changes), name)


def test_a_known_name_may_be_logged_unless_it_is_of_what_is_not_there():
    plain, exact, alone = (
        files.replace(TrainSettings(), changes)
        for changes in ({}, HELD | {"eval.exact_values": True}, {"algorithm.advantage": "grpo"})
    )
    for name in NAMES:
        of_truth = name.startswith("critic/true/")
        assert (missing(plain, name) is None) is not of_truth, name
        assert missing(exact, name) is None, name
        of_critic = name in OF_CRITIC or of_truth or name == "critic/skipped"
        assert (missing(alone, name) is None) is not of_critic, name


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        (
            "critic/popart/mean",
            {"algorithm.advantage": "grpo"},
            "no critic is trained with algorithm.advantage = 'grpo'",
        ),
        ("critic/popart/mean", {}, None),
        ("critic/ensemble/std", {"algorithm.advantage": "rloo"}, "no critic is trained"),
        ("critic/pretrain/r2", {"algorithm.advantage": "rloo"}, "no critic is trained"),
        ("critic/pretrain/r2", {}, None),
        ("critic/score/mean", {"algorithm.advantage": "grpo"}, None),
        ("critic/true/r2", {}, "exact values are not computed; give eval.exact_values = true"),
        ("actor/pg_los", {}, "there is no such metric; did you mean actor/pg_loss"),
        ("actor/pg_los", OWN, "did you mean actor/pg_loss"),
        ("actor/mine", {}, None),
        ("mine/own", {}, f"names begin with {'/, '.join(FAMILIES)}/"),
        ("mine/own", OWN, None),
        ("val-core/a/reward/mean@1", {}, "there are no held-out prompts; give data.eval_path"),
        ("val-core/a/reward/mean@1", HELD, None),
        ("val-aux/errors", HELD, None),
        ("val-aux/timeouts", HELD, None),
        ("val-aux/timeouts", {}, "there are no held-out prompts"),
        ("val-core/a", HELD, "a held-out metric is val-core/SOURCE/reward/mean@1"),
        ("val-core/a/b/reward/mean@4", HELD | {"eval.n": 4}, None),
        ("val-core/a/reward/best@4/mean", HELD | {"eval.n": 4}, None),
        ("val-core/a/reward/maj@4/mean", HELD | {"eval.n": 4}, None),
        ("val-aux/a/reward/best@2/mean", HELD | {"eval.n": 4}, None),
        ("val-aux/a/length/mean@4", HELD | {"eval.n": 4}, None),
        ("val-core/a/reward/best@2/mean", HELD | {"eval.n": 4}, "it is called val-aux/a/reward/best@2/mean"),
        ("val-aux/a/reward/mean@4", HELD | {"eval.n": 4}, "it is called val-core/a/reward/mean@4"),
        ("val-core/a/length/mean@4", HELD | {"eval.n": 4}, "it is called val-aux/a/length/mean@4"),
        ("val-core/a/reward/mean@2", HELD | {"eval.n": 4}, "with eval.n = 4 there are mean@4"),
        ("val-core/a/reward/best@8/mean", HELD | {"eval.n": 4}, "with eval.n = 4"),
        ("val-core/a/reward/best@4", HELD | {"eval.n": 4}, "with eval.n = 4"),
        ("val-core/a/reward/mean@4/mean", HELD | {"eval.n": 4}, "with eval.n = 4"),
        (
            "val-core/a/reward/mean@1",
            {"rollout.environment": "my:env", "rollout.environment.eval_episodes": 2},
            None,
        ),
    ],
)
def test_what_cannot_be_logged_is_told_with_the_reason(name, changes, text):
    found = why(name, changes)
    assert (found is None) == (text is None)
    assert text is None or text in str(found)
