"""Batches made ahead: which weights made them, what the state holds, and that nothing depends on time."""

import threading
import time

import attrs
import pytest
import torch

from fppo import tree
from fppo.assembly import run as assembly
from fppo.batch import Column, Scored, join
from fppo.pipeline import ahead
from fppo.pipeline.train import iterate
from fppo.runs import session
from fppo.runtime import checkpoint
from tests import tiny_run


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    with assembly.assembled(tiny_run.settings(directory, rollout__batch_size=8)) as parts:
        yield parts


def _steps(parts, count, *, run=None, **given):
    """The states after `count` steps, their batches and metrics."""
    steps = iterate(run or parts.run, program=parts.program, draw=parts.draw, donate=False, **given)
    return [next(steps) for _ in range(count)]


def _number(metric):
    return float(metric.total / metric.count)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_batch_is_made_by_the_policy_of_so_many_steps_ago_and_never_of_an_older_one(parts, lag):
    done = _steps(parts, 5, ahead=lag)
    versions = [parts.run.actor.step, *(run.actor.step for run, _, _ in done)]
    for step, (run, experience, report) in enumerate(done):
        made_by = versions[max(step - lag, 0)]
        assert experience.versions.unique().tolist() == [made_by]
        assert _number(report["rollout/lag"]) == versions[step] - made_by
        assert float(report["rollout/lag/max"].value) == versions[step] - made_by
        assert len(run.ahead) == lag
        assert {"timing_s/gen", "timing_s/reward"} <= report.keys()
        assert ("timing_s/wait" in report) == (lag > 0)


def test_the_first_step_and_the_prompts_are_those_of_a_run_that_is_not_ahead(parts):
    plain, early = _steps(parts, 4), _steps(parts, 4, ahead=1)
    join(type(plain[0][1]), plain[0][1], early[0][1])  # raises if a column differs
    for (_, a, _), (_, b, _) in zip(plain, early, strict=True):
        assert a.ids == b.ids
    # the second batch: the same prompts and draws, answered by the first policy
    assert early[1][1].versions.unique().tolist() == [0]
    assert tree.digest(plain[1][0].actor) != tree.digest(early[1][0].actor)


def test_the_mismatch_shows_in_the_metrics_of_a_run_that_is_ahead_alone(parts):
    for lag in (0, 1):
        _, _, report = _steps(parts, 2, ahead=lag)[-1]
        assert (_number(report["rollout_corr/k3_kl"]) > 1e-7) == (lag == 1)
        assert (abs(_number(report["training/rollout_ratio_mean"]) - 1) > 1e-6) == (lag == 1)


def test_scores_of_any_name_wait_on_disk(parts, tmp_path):
    """A reward names its further numbers as it likes."""
    run, _, _ = _steps(parts, 1, ahead=2)[-1]
    names = ("it's", "a.b", "x']['y", 'say "so"', "[0]", "tab\t")
    more = {f"named_scores.{name}": torch.full((8,), float(i)) for i, name in enumerate(names)}
    run = attrs.evolve(run, ahead=tuple({**batch, **more} for batch in run.ahead))
    checkpoint.save(run, tmp_path, 1)
    found = session.load(parts, tmp_path, 1)
    assert tree.digest(found) == tree.digest(run)
    scored, _ = ahead.unpack(found.ahead[1])
    assert [scored.named_scores[name][0].item() for name in names] == list(range(len(names)))


@pytest.mark.parametrize("lag", [1, 2])
def test_a_state_goes_on_from_disk_bit_for_bit(parts, tmp_path, lag):
    done = _steps(parts, 4, ahead=lag)
    checkpoint.save(done[1][0], tmp_path, 2)
    run = session.load(parts, tmp_path, 2)
    assert tree.digest(run) == tree.digest(done[1][0])
    again = _steps(parts, 2, run=run, ahead=lag)
    for (expected, _, report), (found, _, other) in zip(done[2:], again, strict=True):
        assert tree.digest(found) == tree.digest(expected)
        names = {name for name in report if name.startswith(("critic/score", "reward/", "rollout/"))}
        assert names == {name for name in other if name.startswith(("critic/score", "reward/", "rollout/"))}
        assert all(torch.equal(report[name][0].double(), other[name][0].double()) for name in names)


def test_time_changes_nothing(parts):
    """Whichever of sampling and training is the slower."""
    expected = tree.digest(_steps(parts, 3, ahead=1)[-1][0])
    program = parts.program

    def slow(stage):
        def wrapped(*args, **kwargs):
            time.sleep(0.2)
            return stage(*args, **kwargs)

        return wrapped

    for name in ("rollout", "annotate"):
        slowed = attrs.evolve(parts, program=attrs.evolve(program, **{name: slow(getattr(program, name))}))
        assert tree.digest(_steps(slowed, 3, ahead=1)[-1][0]) == expected


def test_donated_memory_is_not_what_samples(parts):
    expected = tree.digest(_steps(parts, 3, ahead=1)[-1][0])
    program = parts.program

    def late(*args, **kwargs):
        time.sleep(0.5)  # by now the update has given the old memory up
        return program.rollout(*args, **kwargs)

    slow = attrs.evolve(program, rollout=late)
    steps = iterate(tree.copy(parts.run), program=slow, draw=parts.draw, donate=True, ahead=1)
    assert tree.digest([next(steps) for _ in range(3)][-1][0]) == expected


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_every_step_is_sampled_once_by_its_own_key(parts, lag):
    program, seen = parts.program, []

    def sample(*args, **kwargs):
        seen.append((kwargs["step"], kwargs["key"].seed))
        return program.sample(*args, **kwargs)

    _steps(attrs.evolve(parts, program=attrs.evolve(program, sample=sample)), 4, ahead=lag)
    assert seen == [(step, parts.run.key.fold("step", step).seed) for step in range(4 + lag)]


def test_a_run_may_stop_being_ahead_and_begin_again(parts):
    run = _steps(parts, 2, ahead=2)[-1][0]
    drained = _steps(parts, 3, run=run, ahead=0)
    assert [len(after.ahead) for after, _, _ in drained] == [1, 0, 0]
    lags = [_number(report["rollout/lag"]) for _, _, report in drained]
    assert lags[0] == lags[1] > lags[2] == 0.0
    assert len(_steps(parts, 1, run=drained[-1][0], ahead=2)[-1][0].ahead) == 2


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_an_error_in_either_half_ends_the_step(parts, kind):
    program = parts.program
    calls = []

    def rollout(*args, **kwargs):
        calls.append(kwargs["version"])
        if len(calls) == 2:
            raise kind("the engine is gone")
        return program.rollout(*args, **kwargs)

    with pytest.raises(kind, match="the engine is gone"):
        _steps(attrs.evolve(parts, program=attrs.evolve(program, rollout=rollout)), 2, ahead=1)

    def estimate(*args):
        raise ValueError("no estimate")

    with pytest.raises(ValueError, match="no estimate"):
        _steps(attrs.evolve(parts, program=attrs.evolve(program, estimate=estimate)), 1, ahead=1)


def test_a_step_that_fails_waits_for_what_samples(parts):
    """Whoever used the engine has left it when the error comes out."""
    program, failed, calls, left = parts.program, threading.Event(), [], []

    def rollout(*args, **kwargs):
        calls.append(kwargs["version"])
        if len(calls) == 2:
            failed.wait()
            time.sleep(0.3)
            left.append(True)
        return program.rollout(*args, **kwargs)

    def estimate(*args):
        failed.set()
        raise ValueError("no estimate")

    with pytest.raises(ValueError, match="no estimate"):
        _steps(attrs.evolve(parts, program=attrs.evolve(program, rollout=rollout, estimate=estimate)), 1, ahead=1)
    assert left


def test_what_waits_is_what_was_made(parts):
    params, cursor = parts.run.actor.params, parts.run.cursor
    scored, _, report = ahead.sample(parts.run, cursor, step=0, program=parts.program, draw=parts.draw, params=params)
    found, again = ahead.unpack(ahead.pack(scored, report))
    join(Scored, scored, found)
    assert again.keys() == report.keys()
    for name, metric in report.items():
        assert type(again[name]) is type(metric)
        assert [float(x) for x in again[name]] == [float(x) for x in metric]
    bad = tree.replace(scored, ground_truth=Column([object()] * len(scored.tokens)))
    with pytest.raises(ValueError, match="ground_truth does not fit JSON"):
        ahead.pack(bad, report)
