"""Whole runs: repeatable, resumable after any kill, replayable, exportable."""

import json
import math
import os
import random
import re
import shutil
import signal
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fppo import batch as batches
from fppo import losses, metrics, models, tree
from fppo.assembly.run import assemble
from fppo.commands import actions
from fppo.pipeline.train import iterate
from fppo.runs import jsonl, session
from fppo.runs.writer import Checkpoints
from fppo.runtime import checkpoint
from fppo.runtime.checkpoint import Pending
from fppo.runtime.digests import digest
from fppo.tree import replace
from tests import tiny_run
from tests.distributed.processes import server
from tests.distributed.ranks import draw_little


@pytest.fixture(scope="module")
def plain(task):
    """A whole run, which tests read, or copy."""
    return _run(task, task, "plain")[1]


def _numbers(directory: Path):
    """The metrics without what depends on the clock or the machine's memory."""
    skipped = ("timing_s/", "perf/", "time")
    return [
        {name: value for name, value in line.items() if not name.startswith(skipped)}
        for line in jsonl.read(directory / "metrics.jsonl")
    ]


def _digests(directory: Path):
    return {line["step"]: line["state"] for line in jsonl.read(directory / "digests.jsonl")}


def _run(task, tmp_path, name, **changes):
    given = tiny_run.settings(task, output_dir=str(tmp_path / name), **changes)
    return actions.train(given), tmp_path / name


@pytest.mark.slow
def test_one_seed_twice_is_one_run_and_another_seed_is_another(task, plain, tmp_path):
    first = plain
    _, second = _run(task, tmp_path, "second")
    _, other = _run(task, tmp_path, "other", seed=1, steps=1)
    assert _numbers(first) == _numbers(second)
    assert tiny_run.sample_bytes(first) == tiny_run.sample_bytes(second)
    assert _digests(first) == _digests(second)
    assert _digests(first)[1] != _digests(other)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "changes"),
    [(1, {}), pytest.param(2, {"critic__popart": 0.3, "critic__privileged": 2}, marks=pytest.mark.slow)],
)
def test_a_stopped_run_goes_on_bit_for_bit(task, tmp_path, cut, changes):
    changes = {"actor__optimizer__schedule": "constant", "steps": 3} | changes
    _, whole = _run(task, tmp_path, "whole", **changes)
    _, parts = _run(task, tmp_path, "parts", **changes | {"steps": cut})
    _, parts = _run(task, tmp_path, "parts", **changes)
    assert _digests(whole) == _digests(parts)
    steps = [line["step"] for line in jsonl.read(parts / "metrics.jsonl")]
    assert steps == list(range(4))


@pytest.mark.slow
def test_a_run_that_samples_ahead_stops_goes_on_and_replays_bit_for_bit(task, tmp_path):
    given = {"rollout__ahead": 1, "actor__optimizer__schedule": "constant", "steps": 3}
    _, whole = _run(task, tmp_path, "whole", **given)
    _, parts = _run(task, tmp_path, "parts", **given | {"steps": 1})
    _, parts = _run(task, tmp_path, "parts", **given)
    assert _digests(whole) == _digests(parts)
    without = [[{n: x for n, x in line.items() if "val" not in n} for line in _numbers(d)] for d in (whole, parts)]
    assert without[0] == without[1]  # the run of one step has evaluated after its last
    assert actions.replay(whole, 3) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "sampling"),
    [
        ({}, {}),
        (
            {"rollout__n": 2, "rollout__filter__groups": True, "rollout__filter__max_draws": 2},
            {"rollout__ahead": 2, "rollout__interrupt": 1},
        ),
    ],
    ids=["plain", "groups ahead, interrupted"],
)
def test_a_run_trains_on_the_rollouts_that_another_saved(task, tmp_path, shared, sampling):
    """Groups that filled a batch up are left out of the loss again."""
    shared = {"reward__functions": ["tests.rewards.functions:length"], **shared}
    _, first = _run(task, tmp_path, "first", rollout__save=True, **shared, **sampling)
    given = tiny_run.settings(
        task, output_dir=str(tmp_path / "second"), rollout__from=str(first / "rollouts"), **shared
    )
    assert actions.train(given) == 0
    other_data = (".cursor", ".ahead")  # no prompt was drawn
    for one, other in zip(*(jsonl.read(x / "digests.jsonl") for x in (first, tmp_path / "second")), strict=True):
        assert one["batch"] == other["batch"]
        differing = {name for name in one["result"] if one["result"][name] != other["result"].get(name)}
        assert all(name.startswith(other_data) for name in differing)
    if sampling:
        with pytest.raises(ValueError, match=r"rollout.interrupt the clock decided .*--rollout.from .*first/rollouts "):
            actions.replay(first, 3)
        ages = [line["rollout/lag/max"] for line in jsonl.read(first / "metrics.jsonl") if "rollout/lag/max" in line]
        assert max(ages) <= 8  # updates: of two steps, two epochs, two mini-batches
        dropped = [line.get("rollout/dropped", 0.0) for line in jsonl.read(tmp_path / "second" / "metrics.jsonl")]
        assert 0 < max(dropped) < 1


@pytest.mark.slow
def test_where_a_run_stands_is_read_once_nobody_else_writes(task, tmp_path, monkeypatch):
    real, seen = session.restore, []

    def restore(settings, assembled):
        with pytest.raises(ValueError, match="is writing to"), session.alone_in(Path(settings.output_dir)):
            seen.append("alone")
        seen.append("restored")
        return real(settings, assembled)

    monkeypatch.setattr(session, "restore", restore)
    _run(task, tmp_path, "run", steps=1)
    assert seen == ["restored"]


@pytest.mark.slow
def test_a_run_that_goes_on_holds_its_state_once(task, tmp_path):
    _, path = _run(task, tmp_path, "run", steps=1)
    with assemble(tiny_run.settings(task, output_dir=str(path), steps=2)) as assembly:
        places = [x.data_ptr() for x in tree.tensors(assembly.run)]
        run = session.restore(tiny_run.settings(task, output_dir=str(path), steps=2), assembly)
        assert run.step == 1
        assert [x.data_ptr() for x in tree.tensors(run)] == places


@pytest.mark.slow
def test_what_a_run_saved_stays_as_it_is_when_steps_are_computed_again(task, tmp_path):
    _, path = _run(task, tmp_path, "run", steps=2, rollout__save=True, checkpoint__keep=5)
    for file in (path / "rollouts").iterdir():
        file.write_bytes(b"mine")
    assert actions.replay(path, 2) == 0
    assert [file.read_bytes() for file in (path / "rollouts").iterdir()] == [b"mine"] * 2


@pytest.mark.slow
def test_rollouts_are_made_without_training_and_trained_on_later(task, tmp_path, capsys):
    given = tiny_run.settings(task, output_dir=str(tmp_path / "made"), steps=2)
    assert actions.rollout(given) == 0
    directory = tmp_path / "made" / "rollouts"
    said = capsys.readouterr().out
    assert f"--rollout.from {directory} --steps 2" in said
    assert re.search(
        r"^batch 1/2  score 0\.\d{3}  length [1-3]\.\d  tok/s [\d,]+\nbatch 2/2  score ", said, re.MULTILINE
    )
    rows = jsonl.read(directory / "samples.jsonl")
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8
    first, second = ([row["response"] for row in each] for each in (rows[:8], rows[8:]))
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 4  # each batch has draws of its own
    with pytest.raises(ValueError, match="holds rollouts already"):
        actions.rollout(given)
    status, path = _run(task, tmp_path, "trained", steps=2, rollout__from=str(directory))
    assert status == 0
    assert len(jsonl.read(path / "digests.jsonl")) == 2
    with pytest.raises(ValueError, match="none of step 3; give at most 2 steps"):
        _run(task, tmp_path, "longer", steps=3, rollout__from=str(directory))


@pytest.fixture(scope="module")
def here(task):
    """A run of two steps with its state where it trains."""
    return _run(task, task, "here", actor__kl_coef=0.1, steps=2)[1]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"model__offload": "moments"}, {"model__offload": "all"}])
def test_a_run_with_its_state_on_the_host_is_the_run_without(task, here, tmp_path, changes):
    _, host = _run(task, tmp_path, "host", actor__kl_coef=0.1, model__offload_activations=True, steps=2, **changes)
    assert _digests(here) == _digests(host)
    assert _numbers(here) == _numbers(host)


@pytest.mark.slow
def test_a_run_whose_moments_are_in_files_is_the_run_without_and_goes_on_either_way(task, here, tmp_path):
    files = {"model__offload": "optimizer_step", "model__moments_directory": str(tmp_path)}
    for name, both in (("into", ({}, files)), ("out_of", (files, {}))):
        for changes in both:
            status, run = _run(task, tmp_path, name, actor__kl_coef=0.1, steps=2, **changes)
            assert (status, _digests(run)) == (0, _digests(here))
            shutil.rmtree(sorted((run / "checkpoints").iterdir())[-1])  # the second start makes the second step again
        assert {path.name for path in tmp_path.iterdir()} <= {"into", "out_of"}, "no file of moments stays"


def _started(given):
    """A process that trains."""
    process = server().Process(target=_train_quietly, args=(given,))
    process.start()
    assert process.pid is not None
    return process


def _train_quietly(given):
    torch.set_num_threads(1)
    draw_little()
    with open(os.devnull, "w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        os._exit(actions.train(given))


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_where_an_undisturbed_one_ends(task, tmp_path):
    """5 starts, each killed at start-up, in a step or while writing, unless this machine let it end before; none may
    lose more than the step under way and the one before, which is still being written."""
    changes = {"steps": 14, "eval__before": False, "rollout__batch_size": 4, "checkpoint__keep": 1}
    given = tiny_run.settings(task, output_dir=str(tmp_path / "killed"), **changes)
    directory, draw, killed = tmp_path / "killed", random.Random(0), 0
    for kill in range(5):
        process = _started(given)
        before = _saved(directory)
        while kill % 4 and _saved(directory) == before and process.is_alive():
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.15))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        assert _saved(directory) >= max(before, _last_digest(directory) - 2)
    assert killed > 2, "runs ended before they were killed: give them more steps"
    assert actions.train(given) == 0
    _, whole = _run(task, tmp_path, "whole", **changes)
    assert _digests(directory) == _digests(whole)
    assert _numbers(directory) == _numbers(whole)


def _saved(directory: Path) -> int:
    return max(checkpoint.steps(directory / session.CHECKPOINTS), default=0)


def _last_digest(directory: Path) -> int:
    path = directory / "digests.jsonl"
    return max((line["step"] for line in jsonl.read(path)), default=0)


@pytest.mark.slow
def test_replay_finds_nothing_in_a_sound_run_and_names_the_leaf_in_a_changed_one(task, tmp_path, capsys):
    _, directory = _run(task, tmp_path, "run", checkpoint__every=2)
    assert actions.replay(directory, 3) == 0
    assert "step 3: equal, bit for bit" in capsys.readouterr().out
    path = directory / "digests.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    leaf = next(name for name in lines[2]["result"] if "mu" in name)
    lines[2]["result"][leaf] = "0" * 32
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert actions.replay(directory, 3) == 1
    assert f"step 3: result differs first in {leaf}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no record of step 5"):
        actions.replay(directory, 9)


def test_an_exported_policy_is_the_runs_policy_in_transformers(task, plain, tmp_path):
    directory = plain
    assert actions.export(directory, tmp_path / "out", None) == 0
    _, params = models.load(tmp_path / "out")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("1+2=") == AutoTokenizer.from_pretrained(task / "start").encode("1+2=")
    state = module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in params.items())
    with pytest.raises(ValueError, match="no checkpoint of step 99"):
        actions.export(directory, tmp_path / "out", 99)


def _learning_rates(directory):
    return [line["actor/lr"] for line in jsonl.read(directory / "metrics.jsonl")[-3:]]


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_epochs_keeps_its_schedule(task, tmp_path):
    """The rate of each step is that of its place in the run, whatever updates there were before."""
    _, directory = _run(task, tmp_path, "run", steps=3, actor__epochs=1)
    plain = _learning_rates(directory)
    _, other = _run(task, tmp_path, "other", steps=3, actor__epochs=3)
    newest = directory / "checkpoints"
    shutil.rmtree(sorted(newest.iterdir())[-1])
    status, _ = _run(task, tmp_path, "run", steps=3, actor__epochs=3)
    assert status == 0
    assert _learning_rates(directory)[:2] == plain[:2]
    assert _learning_rates(directory)[2] == pytest.approx(_learning_rates(other)[2])


ONCE = {"actor__epochs": 1, "actor__mini_batch_size": 8, "critic__mini_batch_size": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["linear", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cosine", "exponential", "wsd"))]
)
def test_a_longer_run_says_that_its_learning_rates_rise(task, tmp_path, capsys, schedule):
    """By the numbers that the next step logs, for each role whose rate is another."""
    changes = ONCE | {f"{role}__optimizer__schedule": schedule for role in ("actor", "critic")}
    changes |= {f"{role}__optimizer__min_lr_ratio": 0.1 for role in ("actor", "critic")}
    _, directory = _run(task, tmp_path, "run", steps=2, **changes)
    assert "learning rate" not in capsys.readouterr().err
    assert _run(task, tmp_path, "run", steps=2, **changes)[0] == 0
    assert "learning rate" not in capsys.readouterr().err
    _run(task, tmp_path, "run", steps=3, **changes)
    said = [line for line in capsys.readouterr().err.splitlines() if "another learning rate" in line]
    logged = list(jsonl.read(directory / "metrics.jsonl"))[-1]
    assert logged["step"] == 3
    course = [f"{schedule} from 0.001 to 0.0001 at step {steps}" for steps in (3, 2)]
    assert said == [
        f"going on from step 2 with another learning rate: {role}/lr is {logged[f'{role}/lr']:.4g}, and was to be "
        f"0.0001: {course[0]}, before {course[1]}"
        for role in ("actor", "critic")
    ]
    assert logged["actor/lr"] > 1.1e-4


@pytest.mark.slow
def test_a_run_from_anothers_checkpoint_says_that_its_learning_rate_is_another(task, tmp_path, capsys):
    _, directory = _run(task, tmp_path, "run", steps=2, **ONCE)
    capsys.readouterr()
    start = str(directory / "checkpoints" / "step_00000002")
    changes = ONCE | {"actor__optimizer__schedule": "constant", "actor__optimizer__lr": 2e-3}
    _run(task, tmp_path, "fork", steps=3, resume=start, **changes)
    said = [line for line in capsys.readouterr().err.splitlines() if "another learning rate" in line]
    text = "actor/lr is 0.002, and was to be 0: constant 0.002, before linear from 0.001 to 0 at step 2"
    assert said == [f"going on from step 2 with another learning rate: {text}"]


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_checkpoint_without_a_clock_goes_on_by_the_number_of_updates(task, tmp_path, warmup):
    """As those of earlier versions."""
    settings = tiny_run.settings(task, output_dir=str(tmp_path), actor__optimizer__warmup_steps=warmup)
    with assemble(settings) as assembly:
        run = replace(assembly.run, actor=replace(assembly.run.actor, clock=None))
        checkpoint.begin_save(run, tmp_path / "checkpoints", 0).wait()
        loaded = session.load(assembly, tmp_path / "checkpoints", 0)
        assert loaded.actor.clock is None
        assert loaded.critic.clock is not None
        reports = [
            metrics.report(next(iterate(each, program=assembly.program, draw=assembly.draw))[2])["actor/lr"]
            for each in (loaded, assembly.run)
        ]
    assert reports[0] == reports[1] > 0


def _two_steps(task, **changes):
    """The metrics of two steps with these settings, without files."""
    with assemble(tiny_run.settings(task, **changes)) as assembly:
        steps = iterate(assembly.run, program=assembly.program, draw=assembly.draw)
        return [metrics.report(next(steps)[2]) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("advantage", "n", "loss"),
    [
        ("grpo", 4, "gspo"),
        ("rloo", 4, "sapo"),
        ("opo", 4, "cispo"),
        ("gpg", 4, "gpg"),
        ("grpo_passk", 4, "gmpo"),
        ("reinforce_plus_plus", 1, "clip_cov"),
        ("reinforce_plus_plus_baseline", 4, "kl_cov"),
        ("remax", 2, "dppo_tv"),
        ("optimal_token_baseline", 4, "dppo_kl"),
        ("gdpo", 4, "dro"),
    ],
)
def test_every_estimator_and_every_policy_loss_run_as_settings(task, advantage, n, loss):
    no_kl = tiny_run.NO_KL
    reports = _two_steps(
        task,
        algorithm__advantage=advantage,
        algorithm__whiten=True,
        actor__loss__name=loss,
        rollout__n=n,
        **(no_kl if advantage == "gdpo" else {}),  # which takes none in the rewards
    )
    for report in reports:
        assert math.isfinite(report["actor/pg_loss"])
        assert "critic/vf_loss" not in report


@pytest.mark.slow
def test_correction_and_layer_checkpoints_run_as_settings(task, tmp_path):
    status, directory = _run(
        task,
        tmp_path,
        "corrected",
        algorithm__correction="rollout",
        algorithm__correction__reject="seq_mean_k3",
        algorithm__correction__reject_threshold=0.5,
        model__checkpoint_layers=True,
        model__compute_dtype="bfloat16",
        rollout__top_k=3,
        rollout__top_p=0.9,
        rollout__temperature=0.7,
        steps=2,
    )
    assert status == 0
    assert "rollout_corr/rollout_is_mean" in jsonl.read(directory / "metrics.jsonl")[-1]


@pytest.mark.slow
def test_the_engines_log_probs_are_the_trainers(task, tmp_path):
    _, directory = _run(task, tmp_path, "run", rollout__temperature=0.7, rollout__top_k=5, steps=2)
    for line in jsonl.read(directory / "metrics.jsonl")[1:]:
        assert line["training/rollout_probs_diff_max"] < 1e-5


@pytest.mark.slow
def test_the_critic_warms_up_alone(task, tmp_path):
    _, directory = _run(task, tmp_path, "run", critic__warmup_steps=2, steps=3)
    lines = jsonl.read(directory / "metrics.jsonl")
    assert ["actor/pg_loss" in line for line in lines] == [False, False, False, True]


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(task, tmp_path):
    given = tiny_run.settings(task, output_dir=str(tmp_path / "run"), steps=500, checkpoint__every=0)
    process = _started(given)
    deadline = time.monotonic() + 200
    while _last_digest(tmp_path / "run") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.join(200)
    assert process.exitcode == 130
    assert checkpoint.steps(tmp_path / "run" / session.CHECKPOINTS) == [_last_digest(tmp_path / "run")]


def test_a_request_to_stop_says_what_a_second_one_costs(capsys):
    with session.stop_requests(announce=session.STOPPING) as asked:
        for _ in range(2):  # both within a second: one request, from a terminal and a launcher
            signal.raise_signal(signal.SIGINT)
        assert len(asked) == 2
        asked[0] -= 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (
        capsys.readouterr().err
        == "\nfinishing this step; ctrl-C again abandons it, and all since the last checkpoint\n"
    )


@pytest.mark.slow
def test_resuming_refuses_what_would_mix_runs(task, plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    with pytest.raises(ValueError, match="another output_dir"):
        _run(task, tmp_path, "run", resume="never")
    with pytest.raises(ValueError, match="another seed"):
        _run(task, tmp_path, "run", seed=7)
    with pytest.raises(ValueError, match="no checkpoint"):
        _run(task, tmp_path, "new", resume="must")


def test_resuming_with_another_optimizer_names_the_setting(task, plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    message = r"^actor.optimizer.name adamw -> adamw_8bit: .*give the earlier values, or another output_dir"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        _run(task, tmp_path, "run", actor__optimizer__name="adamw_8bit")


def exploding(log_probs, old_log_probs, advantages, mask):
    """A loss whose gradient is not finite in some mini-batches."""
    per_token, report = losses.ppo_clip(log_probs, old_log_probs, advantages, mask)
    factor = torch.where(mask.sum() % 5 == 0, float("inf"), 1.0)
    return (per_token * factor).where(mask, 0.0), report


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_skipped_counted_dumped_and_replays(task, tmp_path, capsys):
    loss = "tests.runs.test_runs:exploding"
    _, directory = _run(task, tmp_path, "run", actor__loss__name=loss, check=False, steps=6)
    lines = jsonl.read(directory / "metrics.jsonl")
    skipped = [line["step"] for line in lines if line.get("actor/skipped", 0) > 0]
    assert skipped
    assert any(line.get("actor/skipped", 0) < 1 for line in lines[1:])
    for step in skipped:
        dump = directory / "dumps" / f"step_{step:08d}.safetensors"
        batch = batches.load(batches.Experience, dump)
        record = json.loads(dump.with_suffix(".json").read_text())
        assert digest(batch, record.get("kind", "blake2b"), device=torch.device("cpu")) == record["batch"]
    assert "an update was not finite" in capsys.readouterr().err
    assert actions.replay(directory, skipped[-1]) == 0


@pytest.mark.parametrize(("ranks", "alone"), [(1, False), (2, False), (2, True)])
def test_a_checkpoint_that_was_begun_is_finished_where_the_others_still_write(ranks, alone):
    """By a rank that fails elsewhere; one whose peers are gone does not wait for them."""
    result = Future()
    result.set_exception(checkpoint.CheckpointError("it could not be written"))
    pending = Pending(result)
    writer = Checkpoints(is_saved=lambda step: True, begin=lambda run: pending, ranks=ranks, pending=[pending])
    writer.leave(alone=alone)
    assert len(writer.pending) == alone


def test_eval_prints_what_the_run_logged_last(task, plain, tmp_path, capsys):
    directory = shutil.copytree(plain, tmp_path / "run")
    capsys.readouterr()
    assert actions.evaluate(tiny_run.settings(task, output_dir=str(directory))) == 0
    out, err = capsys.readouterr()
    last = jsonl.read(directory / "metrics.jsonl")[-1]
    shown = f"{last['val-core/test/reward/mean@1']:.4f}"
    assert [line.split() for line in out.splitlines()] == [
        ["step", "4"],
        ["source", "prompts", "mean@1"],
        ["test", "24", "reward", shown],
    ]
    record = directory / "evaluations" / "step_00000004_eval_1.json"
    assert str(record) in err
    numbers = json.loads(record.read_text())
    assert numbers
    assert all(last[name] == pytest.approx(value, abs=1e-6) for name, value in numbers.items())


@pytest.mark.slow
def test_every_response_of_an_evaluation_is_kept(task, tmp_path, capsys):
    _, directory = _run(task, tmp_path, "run", eval__every=2, eval__n=2, eval__temperature=1.0)
    kept = directory / "evaluations"
    assert sorted(path.name for path in kept.iterdir()) == [f"step_{step:08d}.jsonl" for step in (0, 2, 4)]
    numbers = {line["step"]: line for line in jsonl.read(directory / "metrics.jsonl")}
    for step in (0, 2, 4):
        lines = jsonl.read(kept / f"step_{step:08d}.jsonl")
        assert len(lines) == 2 * len((task / "test.jsonl").read_text().splitlines())
        assert {line["step"] for line in lines} == {step}
        mean = sum(line["score"] for line in lines) / len(lines)
        assert mean == pytest.approx(numbers[step]["val-core/test/reward/mean@2"])
    before = {path: path.read_bytes() for path in kept.iterdir()}
    asked = tiny_run.settings(task, output_dir=str(directory), eval__max_prompts=3)
    for count in (1, 2):
        assert actions.evaluate(asked) == 0
        assert str(kept) in capsys.readouterr().err
        assert len(jsonl.read(kept / f"step_00000004_eval_{count}.jsonl")) == 3
    assert {path: path.read_bytes() for path in before} == before
