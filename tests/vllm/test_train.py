"""`fppo train --rollout.engine vllm`: the run of the embedded engine."""

import functools

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fppo import models
from fppo.commands import actions, cli
from fppo.key import Key
from fppo.pipeline.replay import DIGESTS
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.rollout.vllm.remote import RemoteHost
from fppo.runs import jsonl
from fppo.settings import files
from tests import tiny_run
from tests.vllm.conftest import lending
from tests.vllm.interrupts import interrupted


def write_task(directory):
    """A task, and a model with heads as wide as vLLM's CPU build needs."""
    tiny_run.write_task(directory)
    tokenizer = character_tokenizer(CHARACTERS)
    model = small_model(len(tokenizer), width=128, layers=1)
    models.save(model, models.init_params(model, Key(0)), directory / "start", tokenizer=tokenizer)
    return directory


def settings(directory, name, engine, **changes):
    return tiny_run.settings(
        directory,
        output_dir=str(directory / name),
        rollout__engine=engine,
        steps=3,
        rollout__batch_size=16,
        **changes,
    )


def trained(directory, engine):
    assert actions.train(settings(directory, engine, engine)) == 0
    return jsonl.read(directory / engine / "metrics.jsonl")


def test_a_run_on_vllm_is_the_run_on_the_embedded_engine(tmp_path):
    """The weights of every step reach it: its log-probs stay the trainer's, and the numbers those of the other run."""
    task = write_task(tmp_path)
    expected, actual = trained(task, "embedded"), trained(task, "vllm")
    for line, other in zip(expected[1:], actual[1:], strict=True):
        assert other["training/rollout_probs_diff_max"] < 1e-5
        assert other["rollout/kept_mass"] == pytest.approx(1.0)
        for name in (
            "critic/rewards/mean",
            "response_length/mean",
            "actor/entropy",
            "actor/grad_norm",
            "critic/vf_loss",
        ):
            assert other[name] == pytest.approx(line[name], rel=1e-3, abs=1e-5), name


STEP_2 = 5  # after the probe, the two batches of the first evaluation, and step 1
OWN = {"rollout__vllm__host": "process", "rollout__vllm__max_rows": 4, "rollout__max_tokens": 24}


def kill_in(monkeypatch, generation):
    """Kills the process in that generation, counted over all processes, when some of its rows are done."""
    generate, asked, answered = RemoteHost.generate, [], []

    def watched(self, request, on_answer):
        asked.append(len(request.prompts))
        run = functools.partial(generate, self)
        if len(asked) == generation:
            run = interrupted(run, answered, steps=40)
        run(request, on_answer)

    monkeypatch.setattr(RemoteHost, "generate", watched)
    return asked, answered


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The digests of a run that nothing disturbs, and its task."""
    directory = write_task(tmp_path_factory.mktemp("quiet"))
    with lending():
        assert actions.train(settings(directory, "quiet", "vllm", **OWN)) == 0
    return jsonl.read(directory / "quiet" / DIGESTS), directory


def test_a_run_whose_engine_is_killed_is_the_run_undisturbed(quiet, monkeypatch):
    """The digests of all batches and states, that of vLLM's own log-probs among them, are the same."""
    expected, directory = quiet
    asked, answered = kill_in(monkeypatch, STEP_2)
    with lending(), pytest.warns(RuntimeWarning, match="SIGKILL.* of 16 rows are done, a new one goes on"):
        assert actions.train(settings(directory, "killed", "vllm", **OWN)) == 0
    assert 4 <= len(answered) < 16
    assert asked[STEP_2 - 1 : STEP_2 + 2] == [16, 1, 16 - len(answered)]  # a probe, then what was left
    assert jsonl.read(directory / "killed" / DIGESTS) == expected


def test_a_run_that_may_replace_no_more_ends_with_its_steps(quiet, monkeypatch, capsys):
    expected, directory = quiet
    once = settings(directory, "ended", "vllm", rollout__vllm__restarts=0, **OWN)
    files.save(once, directory / "once.toml")
    kill_in(monkeypatch, STEP_2)
    with lending():
        assert cli.main(["train", str(directory / "once.toml")]) == 2
    assert "ended by SIGKILL, perhaps for want of memory" in capsys.readouterr().err

    assert jsonl.read(directory / "ended" / DIGESTS) == expected[:1]
