"""Where two runs part, in words."""

import copy

import pytest

from fppo.report.diff import diff
from fppo.runs.jsonl import JsonLines

OVER = "(of numbers over 1: of their size)"
LEAVES = {
    "batch": [".ids", ".tokens", ".rollout_log_probs", ".scores", ".old_log_probs", ".values", ".advantages"],
    "result": [".actor.params['w']", ".critic.params['w']", ".key"],
}


def steps(count):
    return {
        step: {
            "metrics": {"step": step, "actor/entropy": 1.0 / (step + 1), "timing_s/gen": 0.0, "loss": None},
            "digests": {"step": step, **{part: dict.fromkeys(x, f"{step}") for part, x in LEAVES.items()}},
        }
        for step in range(count)
    }


def written(directory, made):
    for name in ("metrics", "digests"):
        lines = JsonLines(directory / f"{name}.jsonl")
        lines.write(*(made[step][name] for step in made if made[step].get(name)))
        lines.close()
    return directory


@pytest.fixture
def first(tmp_path):
    return written(tmp_path / "first", steps(5))


def test_equal_runs_are_said_to_be(first, tmp_path):
    other = steps(4)
    other[2]["metrics"]["timing_s/gen"] = 3.0
    found = diff(first, written(tmp_path / "other", other))
    assert found.lines == [
        f"{first} alone has steps 4",
        "equal in steps 0 to 3, bit for bit: batches, states and metrics",
    ]
    assert not found.differs
    for step in other:
        other[step]["digests"]["kind"] = "sums"
    found = diff(first, written(tmp_path / "of_ranks", other))
    assert "equal in steps 0 to 3, by their metrics; they have digests of other kinds" in found.lines[-1]
    other[1]["digests"] = None
    found = diff(tmp_path / "of_ranks", written(tmp_path / "fewer", other))
    assert found.lines[-1].endswith("metrics, and by metrics alone in steps 1")


@pytest.mark.parametrize(
    ("part", "leaves", "text"),
    [
        ("batch", [".scores", ".advantages"], "first in what reward made: .scores"),
        ("batch", [".tokens", ".ids", ".advantages"], "first in what the drawing of prompts made: .ids"),
        ("batch", [".old_log_probs", ".values"], "first in what old_log_prob made: .old_log_probs"),
        ("result", [".actor.params['w']"], "first in what update_actor made: .actor.params['w']"),
        (
            "result",
            [".actor.params['w']", ".critic.params['w']"],
            "first in what update_critic made: .critic.params['w']",
        ),
    ],
)
def test_the_earliest_stage_of_the_first_step_to_differ_is_named(first, tmp_path, part, leaves, text):
    other = steps(5)
    for step in (2, 3):
        other[step]["digests"] = copy.deepcopy(other[step]["digests"])
        other[step]["digests"][part] |= dict.fromkeys(leaves, "else")
    found = diff(first, written(tmp_path / "other", other))
    assert found.differs
    assert found.lines[0] == "the first step to differ is 2 (equal in steps 0 to 1)"
    assert found.lines[1] == f"  {text}"
    assert f"{len(leaves)} of {len(LEAVES[part])} " in found.lines[2]


def test_metrics_that_differ_are_named_the_furthest_apart_first(first, tmp_path):
    other = steps(5)
    other[0]["metrics"] |= {"actor/entropy": 1.5, "loss": 0.5}
    del other[1]["metrics"]["loss"]
    found = diff(first, written(tmp_path / "other", other))
    assert found.lines == [
        "the first step to differ is 0 (no step before is equal)",
        f"  2 of 2 metrics differ, by at most 3e-01 {OVER}, as loss None and 0.5; actor/entropy 1.0 and 1.5",
    ]
    assert "loss None and nothing" in diff(first, written(tmp_path / "less", {1: other[1]})).lines[-1]


def test_an_evaluation_that_one_run_alone_made_is_no_difference(first, tmp_path):
    other = steps(5)
    other[2]["metrics"] |= {"val-core/x/reward/mean@1": 0.5, "critic/true/r2": 0.5}
    found = diff(first, written(tmp_path / "other", other))
    assert not found.differs
    assert found.lines[0] == f"{tmp_path / 'other'} alone was evaluated in steps 2"
    other[3]["metrics"]["loss"] = 1.0
    later = written(tmp_path / "later", other)
    assert "the first step to differ is 3 (equal in steps 0 to 2)" in diff(first, later).lines
    other[2]["metrics"]["val-core/x/reward/mean@1"] = 0.25
    found = diff(later, written(tmp_path / "both", other))
    assert (
        found.lines[-1] == f"  1 of 4 metrics differ, by at most 2e-01 {OVER}, as val-core/x/reward/mean@1 0.5 and 0.25"
    )


def test_what_is_no_run_is_refused(first, tmp_path):
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl and no digests\.jsonl"):
        diff(first, tmp_path)
    later = written(tmp_path / "later", {9: {"metrics": {"step": 9}}})
    with pytest.raises(ValueError, match=r"the runs have no step in common: .* holds steps 0 to 4 and .* steps 9"):
        diff(first, later)
