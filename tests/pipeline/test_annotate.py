"""Annotating: its calls of a run's models, and the columns of their results, with models that are noted."""

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import metrics
from fppo.batch import Scored
from fppo.key import Key
from fppo.pipeline.passes import Passes
from fppo.pipeline.program import RunState
from fppo.pipeline.stages import Annotate
from fppo.steps.actor import rollout_gap
from fppo.steps.outputs import TokenOutputs
from fppo.steps.train_state import TrainState
from tests import tiny

ROWS = batches.narrow(Scored, tiny.experience(0, 4))
SHAPE = ROWS.response_mask.shape


def numbers(seed, *more):
    return torch.randn(*SHAPE, *more, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OF = {"log_probs": 1, "entropy": 2, "sum_squared_probs": 3, "hidden": 4}
MEMBERS = torch.stack([numbers(5), numbers(6), numbers(7)])
SIGNS = numbers(8, 2)


def passes_of(calls, **more):
    """Passes that note what they get: the policy's outputs are numbers of their names, the reference's others."""

    def of(role, shift):
        def run(params, rows, *, outputs):
            calls.append((role, params, rows, tuple(outputs)))
            made = {x: numbers(OF[x], *([3] if x == "hidden" else [])) + shift for x in outputs}
            return TokenOutputs(**made)

        return run

    def balance(rows):
        return {"perf/imbalance": metrics.mean(1.5)}

    return Passes(policy=of("policy", 0.0), reference=of("reference", 10.0), balance=balance, **more)


def run_of(*, ref=None, critic=None):
    actor = TrainState(params={"actor": torch.ones(1)}, opt=None, step=0)
    critic = None if critic is None else TrainState(params={"critic": torch.ones(1)}, opt=None, step=0)
    return RunState(actor=actor, critic=critic, key=Key(0), ref=ref)


def report_names(report):
    return {name for name in report if not name.startswith(("training/rollout_", "rollout_corr/"))}


TIMES = {"timing_s/old_log_prob", "timing_s/ref", "timing_s/values"}


@pytest.mark.parametrize("source", ["pass", "engine", "update"])
@pytest.mark.parametrize("sum_squared", [False, True])
def test_the_old_log_probs_are_those_of_their_source(source, sum_squared):
    """A pass that is made for something else is reported, and gives them only where they are a pass's."""
    calls, run = [], run_of()
    annotate = Annotate(passes=passes_of(calls), old_log_probs=source, sum_squared=sum_squared)
    found, report = annotate(ROWS, run)
    outputs = ("log_probs", "sum_squared_probs") if sum_squared else ("log_probs",)
    made = source == "pass" or sum_squared
    assert calls == ([("policy", run.actor.params, ROWS, outputs)] if made else [])
    expected = numbers(OF["log_probs"]) if source == "pass" else ROWS.rollout_log_probs
    assert torch.equal(found.old_log_probs, expected)
    assert (found.sum_squared_probs is not None) == sum_squared
    if sum_squared:
        assert torch.equal(found.sum_squared_probs, numbers(OF["sum_squared_probs"]))
    assert all(
        getattr(found, name) is None for name in ("ref_log_probs", "values", "entropy", "hidden", "disagreement")
    )
    assert report_names(report) == TIMES | {f"training/old_log_probs/{source}", "perf/imbalance"}
    gap = rollout_gap(numbers(OF["log_probs"]), ROWS.rollout_log_probs, ROWS.response_mask) if made else {}
    assert report.keys() - report_names(report) == gap.keys()
    for name, metric in gap.items():
        assert all(torch.equal(x, y) for x, y in zip(report[name], metric, strict=True)), name
    said = metrics.report(report)
    assert (said[f"training/old_log_probs/{source}"], said["perf/imbalance"]) == (1.0, 1.5)
    assert (said["timing_s/ref"], said["timing_s/values"]) == (0.0, 0.0)


def test_a_pass_that_is_made_anyway_gives_the_old_log_probs_where_either_would_do():
    found, report = Annotate(passes=passes_of([]), old_log_probs="auto", sum_squared=True)(ROWS, run_of())
    assert torch.equal(found.old_log_probs, numbers(OF["log_probs"]))
    assert [name for name in report if name.startswith("training/old_log_probs/")] == ["training/old_log_probs/pass"]


def test_a_reference_and_a_critic_have_columns_of_their_own():
    calls, run = [], run_of(ref={"ref": torch.ones(1)}, critic=True)

    def values(params, rows):
        calls.append(("values", params, rows, ()))
        return numbers(9)

    found, report = Annotate(passes=passes_of(calls, values=values))(ROWS, run)
    assert sorted(calls, key=lambda call: call[0]) == [
        ("policy", run.actor.params, ROWS, ("log_probs",)),
        ("reference", run.ref, ROWS, ("log_probs",)),
        ("values", run.critic.params, ROWS, ()),
    ]
    assert torch.equal(found.old_log_probs, numbers(OF["log_probs"]))
    assert torch.equal(found.ref_log_probs, numbers(OF["log_probs"]) + 10.0)
    assert torch.equal(found.values, numbers(9))
    assert found.disagreement is None
    assert "critic/ensemble/std" not in report


@pytest.mark.parametrize("reads", ["entropy", "hidden"])
@pytest.mark.parametrize("ensemble", [False, True])
@pytest.mark.parametrize("privileged", [False, True])
def test_a_critic_without_a_model_reads_the_policys_pass(reads, ensemble, privileged):
    calls, run = [], run_of(critic=True)

    def confidence(params, log_probs, entropy, mask, signs):
        calls.append(("critic", params, (log_probs, entropy, mask, signs)))
        return MEMBERS if ensemble else MEMBERS[0]

    def hidden(params, states, mask, signs):
        calls.append(("critic", params, (states, mask, signs)))
        return MEMBERS if ensemble else MEMBERS[0]

    more = {"confidence": confidence} if reads == "entropy" else {"hidden": hidden}
    truth = {"truth_signs": lambda rows: SIGNS} if privileged else {}
    found, report = Annotate(passes=passes_of(calls, **more, **truth))(ROWS, run)
    (_, _, _, outputs), (_, params, given) = calls
    assert (outputs, params) == (("log_probs", reads), run.critic.params)
    before = (numbers(OF["log_probs"]), numbers(OF["entropy"])) if reads == "entropy" else (numbers(OF["hidden"], 3),)
    for one, other in zip(given[:-1], (*before, ROWS.response_mask), strict=True):
        assert torch.equal(one, other)
    assert (given[-1] is None) == (not privileged)
    torch.testing.assert_close(found.values, MEMBERS.mean(0) if ensemble else MEMBERS[0])
    assert torch.equal(getattr(found, reads), before[-1])
    assert (found.truth_signs is None) == (not privileged)
    assert (found.disagreement is None) == (not ensemble)
    if ensemble:
        middle = MEMBERS.mean(0)
        apart = ((MEMBERS - middle) ** 2).mean(0).sqrt()
        torch.testing.assert_close(found.disagreement, apart)
        mask = ROWS.response_mask
        assert metrics.report(report)["critic/ensemble/std"] == pytest.approx(apart[mask].mean().item())
        assert report["critic/ensemble/std"].count == mask.sum()


def test_annotating_changes_no_other_column():
    found, _ = Annotate(passes=passes_of([]))(ROWS, run_of())
    for field in attrs.fields(Scored):
        assert getattr(found, field.name) is getattr(ROWS, field.name), field.name
