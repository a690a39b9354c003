"""Batches made ahead: which weights made them, what the state holds, and that nothing depends on time."""

import contextlib
import threading
import time

import attrs
import pytest
import torch

from fppo import metrics, tree
from fppo.assembly.run import assemble
from fppo.batch import Column
from fppo.pipeline import ahead
from fppo.pipeline.ahead import sample_ahead
from fppo.pipeline.step import ppo_step, sample
from fppo.pipeline.train import iterate
from fppo.pipeline.waiting import Waiting
from fppo.rollout import InterruptibleEngine
from fppo.runs import session
from fppo.runtime import checkpoint
from fppo.steps.forward import Forward, forward_micro_batch
from tests import tiny, tiny_run


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    with assemble(tiny_run.settings(directory, rollout__batch_size=8)) as assembly:
        yield assembly


def _steps(assembly, count, *, run=None, **keywords):
    """The states after `count` steps, their batches and metrics."""
    steps = iterate(run or assembly.run, program=assembly.program, draw=assembly.draw, donate=False, **keywords)
    return [next(steps) for _ in range(count)]


def _number(metric):
    return float(metric.total / metric.count)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_batch_is_version_the_policy_of_so_many_steps_ago_and_never_of_an_older_one(assembly, lag):
    done = _steps(assembly, 5, ahead=lag)
    versions = [assembly.run.actor.step, *(run.actor.step for run, _, _ in done)]
    for step, (run, experience, report) in enumerate(done):
        version = versions[max(step - lag, 0)]
        assert experience.versions.unique().tolist() == [version]
        assert _number(report["rollout/lag"]) == versions[step] - version
        assert float(report["rollout/lag/max"].value) == versions[step] - version
        assert len(run.ahead) == lag
        assert {"timing_s/gen", "timing_s/reward"} <= report.keys()
        assert ("timing_s/wait" in report) == (lag > 0)


@pytest.mark.slow
def test_the_first_step_and_the_prompts_are_those_of_a_run_that_is_not_ahead(assembly):
    plain, early = _steps(assembly, 4), _steps(assembly, 4, ahead=1)
    tiny.assert_same_columns(plain[0][1], early[0][1])
    for (_, a, _), (_, b, _) in zip(plain, early, strict=True):
        assert a.ids == b.ids
    # the second batch: the same prompts and draws, answered by the first policy
    assert early[1][1].versions.unique().tolist() == [0]
    assert tree.digest(plain[1][0].actor) != tree.digest(early[1][0].actor)


@pytest.mark.slow
def test_the_mismatch_shows_in_the_metrics_of_a_run_that_is_ahead_alone(assembly):
    for lag in (0, 1):
        _, _, report = _steps(assembly, 2, ahead=lag)[-1]
        assert (_number(report["rollout_corr/k3_kl"]) > 1e-7) == (lag == 1)
        assert (abs(_number(report["training/rollout_ratio_mean"]) - 1) > 1e-6) == (lag == 1)


def test_scores_of_any_name_wait_on_disk(assembly, tmp_path):
    """A reward names its further numbers as it likes."""
    run, _, _ = _steps(assembly, 1, ahead=2)[-1]
    names = ("it's", "a.b", "x']['y", 'say "so"', "[0]", "tab\t")
    more = {name: torch.full((8,), float(i)) for i, name in enumerate(names)}
    batches = [attrs.evolve(waiting.scored, named_scores=more) for waiting in run.ahead]
    ahead = (attrs.evolve(waiting, scored=scored) for waiting, scored in zip(run.ahead, batches, strict=True))
    run = attrs.evolve(run, ahead=tuple(ahead))
    checkpoint.begin_save(run, tmp_path, 1, free=session.AHEAD).wait()
    loaded = session.load(assembly, tmp_path, 1)
    assert tree.digest(loaded) == tree.digest(run)
    scored = loaded.ahead[1].scored
    assert [scored.named_scores[name][0].item() for name in names] == list(range(len(names)))


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
def test_a_state_goes_on_from_disk_bit_for_bit(assembly, tmp_path, lag):
    done = _steps(assembly, 4, ahead=lag)
    checkpoint.begin_save(done[1][0], tmp_path, 2, free=session.AHEAD).wait()
    run = session.load(assembly, tmp_path, 2)
    assert tree.digest(run) == tree.digest(done[1][0])
    again = _steps(assembly, 2, run=run, ahead=lag)
    for (expected, _, report), (found, _, other) in zip(done[2:], again, strict=True):
        assert tree.digest(found) == tree.digest(expected)
        names = {name for name in report if name.startswith(("critic/score", "reward/", "rollout/"))}
        assert names == {name for name in other if name.startswith(("critic/score", "reward/", "rollout/"))}
        assert all(float(report[name][0]) == float(other[name][0]) for name in names)


@pytest.mark.slow
def test_time_changes_nothing(assembly):
    """Whichever of sampling and training is the slower."""
    expected = tree.digest(_steps(assembly, 3, ahead=1)[-1][0])
    program = assembly.program

    def slow(stage):
        def wrapped(*args, **kwargs):
            time.sleep(0.2)
            return stage(*args, **kwargs)

        return wrapped

    for name in ("rollout", "annotate"):
        slowed = attrs.evolve(assembly, program=attrs.evolve(program, **{name: slow(getattr(program, name))}))
        assert tree.digest(_steps(slowed, 3, ahead=1)[-1][0]) == expected


@pytest.mark.slow
def test_donated_memory_is_not_what_samples(assembly):
    expected = tree.digest(_steps(assembly, 3, ahead=1)[-1][0])
    program = assembly.program

    def late(*args, **kwargs):
        time.sleep(0.5)  # by now the update has given the old memory up
        return program.rollout(*args, **kwargs)

    slow = attrs.evolve(program, rollout=late)
    steps = iterate(tree.copy(assembly.run), program=slow, draw=assembly.draw, donate=True, ahead=1)
    assert tree.digest([next(steps) for _ in range(3)][-1][0]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_every_step_is_sampled_once_by_its_own_key(assembly, lag):
    program, seen = assembly.program, []

    def sample(*args, **kwargs):
        (run,) = args
        seen.append((run.step, run.key.seed, 24 * run.cursor.epoch + run.cursor.position))
        return program.sample(*args, **kwargs)

    _steps(attrs.evolve(assembly, program=attrs.evolve(program, sample=sample)), 4, ahead=lag)
    assert seen == [(step, assembly.run.key.seed, 8 * step) for step in range(4 + lag)]


@pytest.mark.slow
def test_a_run_may_stop_being_ahead_and_begin_again(assembly):
    run = _steps(assembly, 2, ahead=2)[-1][0]
    drained = _steps(assembly, 3, run=run, ahead=0)
    assert [len(after.ahead) for after, _, _ in drained] == [1, 0, 0]
    lags = [_number(report["rollout/lag"]) for _, _, report in drained]
    assert lags[0] == lags[1] > lags[2] == 0.0
    assert len(_steps(assembly, 1, run=drained[-1][0], ahead=2)[-1][0].ahead) == 2


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_an_error_in_either_half_ends_the_step(assembly, kind):
    program = assembly.program
    calls = []

    def rollout(*args, **kwargs):
        calls.append(kwargs["version"])
        if len(calls) == 2:
            raise kind("the engine is gone")
        return program.rollout(*args, **kwargs)

    with pytest.raises(kind, match="the engine is gone"):
        _steps(attrs.evolve(assembly, program=attrs.evolve(program, rollout=rollout)), 2, ahead=1)

    def estimate(*args):
        raise ValueError("no estimate")

    with pytest.raises(ValueError, match="no estimate"):
        _steps(attrs.evolve(assembly, program=attrs.evolve(program, estimate=estimate)), 1, ahead=1)


def _within(seconds, call):
    """What a call raises; a call that hangs fails the test."""
    raised = []

    def run():
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


@pytest.mark.parametrize("number", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_an_error_in_any_of_the_batches_ahead_comes_out(assembly, kind, number):
    """Whichever of those under way fails, nobody waits for it, nor for those behind it."""
    program, calls = assembly.program, []

    def rollout(*args, **kwargs):
        calls.append(kwargs["version"])
        if len(calls) == number:
            raise kind("the engine is gone")
        return program.rollout(*args, **kwargs)

    failing = attrs.evolve(assembly, program=attrs.evolve(program, rollout=rollout))
    error = _within(120.0, lambda: _steps(failing, 3, ahead=3))
    assert type(error) is kind
    assert str(error) == "the engine is gone"
    assert len(calls) == number


def test_an_error_is_not_kept_back_by_batches_ahead_that_do_not_end(assembly, monkeypatch, caplog):
    for name in ("QUIET", "PATIENCE"):
        monkeypatch.setattr(ahead, name, 0.05)
    program, calls, end = assembly.program, [], threading.Event()

    def rollout(*args, **kwargs):
        calls.append(kwargs["version"])
        if len(calls) > 1:
            end.wait()
        return program.rollout(*args, **kwargs)

    def estimate(*args):
        raise ValueError("no estimate")

    failing = attrs.evolve(assembly, program=attrs.evolve(program, rollout=rollout, estimate=estimate))
    with caplog.at_level("WARNING", logger="fppo.pipeline"):
        error = _within(120.0, lambda: _steps(failing, 1, ahead=2))
    end.set()
    assert str(error) == "no estimate"
    waits, left = (each.getMessage() for each in caplog.records if each.name.startswith("fppo."))
    assert waits == "ValueError: no estimate; waiting for batches that are being made ahead"
    assert left == "2 batches that are being made ahead do not end within 0.1 s, and are left"


def test_a_step_that_fails_waits_for_what_samples(assembly):
    """Whoever used the engine has left it when the error comes out."""
    program, failed, calls, left = assembly.program, threading.Event(), [], []

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
        _steps(attrs.evolve(assembly, program=attrs.evolve(program, rollout=rollout, estimate=estimate)), 1, ahead=1)
    assert left


def test_what_waits_is_what_was_sampled(assembly):
    scored, _, report = sample(assembly.run, program=assembly.program, draw=assembly.draw)
    (waiting,) = sample_ahead(assembly.run, 1, program=assembly.program, draw=assembly.draw).batches
    tiny.assert_same_columns(scored, waiting.batch())
    assert waiting.metrics.keys() == {name for name in report if not name.startswith("timing_s/")}
    for name, metric in waiting.metrics.items():
        assert type(metric) is type(report[name])
        assert [float(x) for x in metric] == [float(x) for x in report[name]]
    bad = tree.replace(scored, ground_truth=Column([object()] * len(scored.tokens)))
    with pytest.raises(ValueError, match="ground_truth does not fit JSON"):
        Waiting.of(bad, {})


def test_objects_wait_as_a_checkpoint_gives_them_back(assembly, tmp_path):
    """A tuple in a data row comes back from JSON as a list: the batch has it so before the run is saved, too."""
    program = assembly.program

    def score(rollout, **others):
        scored, report = program.score(rollout, **others)
        return tree.replace(scored, extras=Column([{"pair": (1, 2)}] * len(scored.tokens))), report

    changed = attrs.evolve(assembly, program=attrs.evolve(program, score=score))
    run, _, _ = _steps(changed, 1, ahead=1)[-1]
    checkpoint.begin_save(run, tmp_path, 1, free=session.AHEAD).wait()
    assert tree.digest(session.load(assembly, tmp_path, 1)) == tree.digest(run)


@pytest.mark.slow
def test_a_step_by_itself_takes_what_waits_first(assembly):
    """`ppo_step` on a state with two batches that wait: it uses them up, then samples."""
    run = _steps(assembly, 2, ahead=2)[-1][0]
    drained = _steps(assembly, 3, run=run, ahead=0)
    for expected, _, _ in drained:
        run, _, _ = ppo_step(run, program=assembly.program, draw=assembly.draw)
        assert tree.digest(run) == tree.digest(expected)


def test_on_a_gpu_sampling_has_a_stream_and_each_side_waits_for_what_the_other_made(tmp_path, monkeypatch):
    """By stand-ins for streams, on a CPU: the order of what is begun, and which thread is in which stream."""
    log, inside = [], threading.local()
    tiny_run.write_task(tmp_path)

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def synchronize(self):
            """For the clock, where there is a GPU."""

        def __enter__(self):
            inside.stream = self

        def __exit__(self, *error):
            inside.stream = None

    caller, beside = Stream("caller"), Stream("beside")

    def current(device=None):
        return getattr(inside, "stream", None) or caller

    monkeypatch.setattr(torch.accelerator, "current_stream", current)

    def rollout(*args, **keywords):
        log.append(f"rollout in {current().name}")
        return program.rollout(*args, **keywords)

    with assemble(tiny_run.settings(tmp_path, device="cpu")) as assembly:
        program, draw = assembly.program, assembly.draw
        watched = attrs.evolve(program, rollout=rollout)
        wait = ahead.start_sampling(assembly.run, 1, program=watched, draw=draw, stream=beside)
        batches = wait().batches
        assert log == ["beside waits for caller", "rollout in beside", "caller waits for beside"]
        plain = ahead.start_sampling(assembly.run, 1, program=program, draw=draw)().batches
        assert tree.digest(batches) == tree.digest(plain)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_several_gpus_are_refused_and_nothing_else(lag, ranks, device):
    if lag and ranks > 1 and device == "cuda":
        with pytest.raises(ValueError, match=f"rollout.ahead = 3 on {ranks} GPUs: "):
            ahead.check_devices(lag, ranks, torch.device(device))
    else:
        ahead.check_devices(lag, ranks, torch.device(device))


def test_batches_that_wait_on_disk_come_back_to_the_device_that_works(assembly, tmp_path):
    """Wherever the state is: offloaded, it is on the host."""
    run, _, _ = _steps(assembly, 1, ahead=1)[-1]
    checkpoint.begin_save(run, tmp_path, 1, free=session.AHEAD).wait()
    meta = torch.device("meta")  # a device that nothing else is on
    loaded = session.load(attrs.evolve(assembly, device=meta), tmp_path, 1)
    assert {x.device for x in tree.tensors(loaded.ahead)} == {meta}
    assert {x.device for x in tree.tensors(loaded.actor)} == {x.device for x in tree.tensors(run.actor)}


def _interrupted(assembly, lag, count):
    """`_steps` of a run whose batches under way wait, after the first token, for the next update."""
    engine = InterruptibleEngine(engine=assembly.program.rollout.engine, every=1, pad_token_id=0)
    rollout, begun = attrs.evolve(assembly.program.rollout, engine=engine), []

    def held_up(*args, newer, version, **others):
        seen = []

        def newest():
            for _ in range(60_000):
                if len(seen) != 1 or len(begun) == 1 or (newer() or (0, version))[1] > seen[0]:
                    break
                time.sleep(0.001)
            else:
                raise AssertionError("no newer weights have come")
            seen.append(max(version, (newer() or (0, 0))[1]))
            return newer()

        begun.append(version)  # the first batch is made before its step
        return rollout(*args, newer=newest, version=version, **others)

    program = attrs.evolve(assembly.program, rollout=held_up, interrupts=True)
    with contextlib.closing(
        iterate(assembly.run, program=program, draw=assembly.draw, donate=False, ahead=lag)
    ) as steps:
        return [next(steps) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_update_gets_into_what_is_generated_meanwhile(assembly, lag):
    done = _interrupted(assembly, lag, 4)
    states = [assembly.run, *(run for run, _, _ in done)]
    params = {state.actor.step: state.actor.params for state in states}
    for step, (_, experience, report) in enumerate(done):
        named, mask = experience.token_versions, experience.response_mask
        begun = max(step - 1, 0)  # a batch waits for the update behind that which the one before has waited for
        versions = [states[begun].actor.step, states[begun + (step > 0)].actor.step]
        assert experience.versions.unique().tolist() == versions[:1]
        assert (named[:, 0] == versions[0]).all()
        assert (named[:, 1:][mask[:, 1:]] == versions[1]).all()
        numbers, now = metrics.report(report), states[step].actor.step
        assert numbers["rollout/oldest_version"] == versions[0]
        assert numbers["rollout/lag/max"] == now - versions[0]
        assert numbers[f"rollout/lag/tokens/{now - versions[0]}"] == (mask & (named == versions[0])).sum()
        assert numbers["rollout/lag"] == pytest.approx(float((now - named)[mask].double().mean()))
        for version in set(versions):
            out = forward_micro_batch(params[version], experience, forward=Forward(assembly.model))
            own = mask & (named == version)
            torch.testing.assert_close(experience.rollout_log_probs[own], out.log_probs[own], rtol=0, atol=1e-5)
    assert not any(run.ahead for run, _, _ in done)  # it is under way, and no step has waited for it


def test_what_nobody_wants_any_more_ends_where_it_looks_for_newer_weights(assembly):
    ended, calls = [], []

    def rollout(*args, newer, **others):
        calls.append(1)
        try:
            for _ in range(10_000 if len(calls) > 1 else 0):
                newer()
                time.sleep(0.001)
        except Exception:
            ended.append(True)
            raise
        return assembly.program.rollout(*args, **others)

    program = attrs.evolve(assembly.program, rollout=rollout, interrupts=True)
    steps = iterate(assembly.run, program=program, draw=assembly.draw, ahead=1)
    with contextlib.closing(steps):
        next(steps)
    assert ended


def test_what_is_interrupted_needs_batches_ahead(assembly):
    program = attrs.evolve(assembly.program, interrupts=True)
    with pytest.raises(ValueError, match=r"Program.interrupts: nothing is generated while weights change; give ahead"):
        next(iterate(assembly.run, program=program, draw=assembly.draw))
