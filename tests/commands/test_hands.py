"""The way from `fppo train` to a policy loss: the functions of the library that call each other on it."""

import inspect
from pathlib import Path

import pytest

import fppo
from fppo import losses
from fppo.commands import cli
from fppo.settings import files
from tests import tiny_run

ROOM = Path(fppo.__file__).parent
SEEN: list[list[str]] = []


def noting(log_probs, old_log_probs, advantages, mask):
    """A loss of ones own that notes who called it."""
    calls = (frame for frame in inspect.stack(0) if Path(frame.filename).is_relative_to(ROOM))
    SEEN.append([f"{Path(frame.filename).relative_to(ROOM)}: {frame.function}" for frame in calls])
    return losses.ppo_clip(log_probs, old_log_probs, advantages, mask)


@pytest.mark.slow
def test_a_loss_is_thirteen_hands_from_the_command(tmp_path):
    """Itself among them; a debugger shows no more of ours."""
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, steps=1, data__eval_path=[], actor__loss=f"{__name__}:noting", check=False)
    files.save(settings, tmp_path / "run.toml")
    assert cli.main(["train", str(tmp_path / "run.toml"), "--check", "false"]) == 0
    assert SEEN[-1][-1] == "commands/cli.py: main"
    assert len(SEEN[-1]) + 1 <= 13, "\n".join(SEEN[-1])
