"""User code that ends the process, and somebody else's text: neither passes for a run that is done, or reaches a
terminal as it is."""

import sys

import pytest

from fppo import _errors, advantages, losses
from fppo.commands import cli
from fppo.rewards import inline_reward
from fppo.settings import files
from tests import tiny_run

ESCAPE = "\x1b]0;gone\x07\x1b[2J"


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, steps=2, rollout__n=2, eval__before=False, check=False)
    files.save(settings, tmp_path / "run.toml")
    return tmp_path


def _train(task, *overrides):
    return cli.main(["train", str(task / "run.toml"), *overrides])


def _leave():
    sys.exit(0)


def exiting_loss(log_probs, old_log_probs, advantages, mask):
    _leave()
    return losses.ppo_clip(log_probs, old_log_probs, advantages, mask)


def exiting_advantage(rows, rewards):
    quit()
    return advantages.grpo(rewards.sum(1), rows.response_mask, rows.groups)


def exiting_optimizer(rate):
    raise SystemExit


def exiting_rows():
    yield {"prompt": "1+1=", "answer": "2"}
    sys.exit()


def exiting_sampler(prompts, epoch, key):
    sys.exit(0)


@inline_reward
def exiting_reward(sample):
    sys.exit(0)


def exiting_tool(conversation):
    sys.exit(0)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("--actor.loss.name {}:exiting_loss", "_leave()"),
        ("--algorithm.advantage {}:exiting_advantage", "exiting_advantage()"),
        ("--actor.optimizer.name {}:exiting_optimizer", "exiting_optimizer()"),
        ("--data.rows {}:exiting_rows --data.path", "exiting_rows()"),
        ("--data.sampler {}:exiting_sampler", "exiting_sampler()"),
        ("--reward.functions {}:exiting_reward", "the reward 'exiting_reward' failed on every one"),
        ("--reward.functions leaves:reward", "reward 'leaves:reward': the module 'leaves' does not import"),
        ("--actor.loss.name leaves:loss", "'leaves:loss': the module 'leaves' does not import"),
    ],
)
def test_code_that_ends_the_process_does_not_end_a_run_as_done(task, capsys, monkeypatch, overrides, name):
    (task / "leaves.py").write_text("import sys\n\nsys.exit(0)\ndef loss(): ...\ndef reward(): ...\n")
    monkeypatch.syspath_prepend(task)
    assert _train(task, *overrides.format(__name__).split()) in (1, 2)
    said = capsys.readouterr().err
    assert name in said
    assert "Traceback" not in said
    assert not (task / "run" / "model").exists()


def test_batches_ahead_of_code_that_ends_the_process_end_the_run_too(task, capsys):
    assert _train(task, "--rollout.ahead", "1", "--data.sampler", f"{__name__}:exiting_sampler") == 1
    assert "exiting_sampler()" in capsys.readouterr().err


def test_the_parser_of_arguments_ends_commands_as_it_did(task, capsys):
    for arguments, status in ((["diff", "--help"], 0), (["diff", "--nowhere"], 2), (["train", "--nowhere", "1"], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == status
    assert "called sys.exit" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (_leave, r"_leave\(\), .*test_ends.py:\d+, called sys.exit\(0\)"),
        (lambda: exiting_advantage(None, None), r"exiting_advantage\(\), .*called sys.exit\(None\)"),
    ],
)
def test_the_text_of_an_exit_names_the_function_of_the_user(code, said):
    with pytest.raises(_errors.RunFailed, match=said), _errors.no_exit():
        code()
