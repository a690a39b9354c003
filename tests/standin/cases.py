"""Tiny runs by name, as changes of `tests.tiny_run.settings`; one with a - goes on with the run named before it."""

from pathlib import Path

from fppo.settings.train import TrainSettings
from tests import tiny_run

STEP = {"model__offload": "optimizer_step"}
CASES = {
    "ppo": {"steps": 2},
    "ppo-resumed": {"steps": 3},
    "grpo": {**tiny_run.NO_KL, "algorithm__advantage": "grpo", "rollout__n": 4, "steps": 2, **STEP},
    "grpo-resumed": {**tiny_run.NO_KL, "algorithm__advantage": "grpo", "rollout__n": 4, "steps": 3, **STEP},
    "beside": {"steps": 2, "rollout__ahead": 1, "model__offload": "all"},
}


def settings_of(case: str, task: Path, directory: Path, device: str) -> TrainSettings:
    """The settings of a case on a device, in a directory of its own under `directory`."""
    output = str(directory / case.partition("-")[0])
    return tiny_run.settings(task, **CASES[case] | {"device": device, "output_dir": output})
