"""What this machine has not, seen without torch."""

import importlib.util
import sys

import pytest

from fppo.settings import files as settings_files
from fppo.settings.machine import machine_problems
from fppo.settings.model import LoraSettings, ModelSettings
from fppo.settings.placement import PlacementSettings, RoleSettings
from fppo.settings.train import LogSettings, TrainSettings

POOLED = {"placement.pools": {"a": {"ranks": 1}}, "placement.roles.actor": "a"}


@pytest.mark.parametrize(
    ("files", "visible", "device", "ranks", "words"),
    [
        ((), None, "cuda", 1, "there is no GPU here that torch could see; give cpu"),
        ((), None, "auto", 4, None),
        (("nvidia0", "nvidia1", "nvidiactl"), None, "cuda:2", 1, "there are at most 2 GPUs here, cuda:0 the first"),
        (("nvidia0", "nvidia1", "nvidiactl"), None, "cuda:1", 1, None),
        (("nvidia0", "nvidia1"), "1", "cuda:1", 1, "at most 1 GPUs"),
        (("nvidia0",), "-1", "cuda", 1, "there is no GPU here"),
        (("nvidia0",), "", "cpu", 1, None),
        (("nvidia0", "nvidia1"), None, "cuda", 4, "4 processes need as many GPUs, and this machine has 2"),
        (("dxg",), None, "cuda:7", 1, None),  # one file for all of them
    ],
)
def test_gpus_are_counted_by_their_files(tmp_path, files, visible, device, ranks, words):
    for name in files:
        (tmp_path / name).touch()
    settings = TrainSettings(device=device)
    lines = [*map(str, machine_problems(settings, ranks, visible=visible, devices=tmp_path))]
    assert [words in line and line.startswith(f"device = {device!r}: ") for line in lines] == [True] * bool(words)


def test_pools_of_this_machine_take_no_more_gpus_than_it_has(tmp_path):
    (tmp_path / "nvidia0").touch()
    pools = {"a": {"ranks": 1, "gpus": 0.5}, "e": {"ranks": 2, "gpus": 0.5}}

    def lines(cluster):
        section = PlacementSettings(cluster=cluster, pools=pools, roles=RoleSettings(actor="a", rollout="e"))
        settings = TrainSettings(device="cuda", placement=section)
        return [*map(str, machine_problems(settings, 1, visible=None, devices=tmp_path))]

    (line,) = lines("processes")
    assert line.endswith("they want 1.5 GPUs together, and this machine has 1; give fewer, or shares of one")
    assert not any(" GPUs " in line for line in lines("10.0.0.1:6379"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"placement.cluster": "local"}, []),
        ({"placement.cluster": "local", **POOLED}, ["placement.cluster"]),
        (POOLED, []),
        ({"rollout.vllm.host": "ray"}, []),
        ({"rollout.vllm.host": "ray", "rollout.engine": "vllm"}, ["rollout.vllm.host"]),
        ({"reward.judge.vllm.host": "ray"}, []),
        ({"reward.judge.vllm.host": "ray", "reward.judge.path": "j"}, ["reward.judge.vllm.host"]),
    ],
)
def test_ray_is_asked_for_where_something_runs_on_it(monkeypatch, changes, told):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == "ray" else package)
    settings = settings_files.replace(TrainSettings(), changes)
    found = [*machine_problems(settings, 1, visible=None)]
    assert [(each.path, each.text) for each in found] == [
        (x, "Ray is not installed; pip install 'fppo[ray]'") for x in told
    ]


def test_loggers_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package if package == "tensorboard" else None)
    for package in ("wandb", "bitsandbytes"):  # another test may have imported it
        monkeypatch.delitem(sys.modules, package, raising=False)
    settings = TrainSettings(device="cpu", log=LogSettings(loggers=("tensorboard", "wandb")))
    line = str(*machine_problems(settings, 1, visible=None))
    assert line == "log.loggers = ['tensorboard', 'wandb']: wandb is not installed; pip install 'fppo[wandb]'"
    settings = TrainSettings(device="cpu", model=ModelSettings(lora=LoraSettings(rank=1, base="nf4")))
    line = str(*machine_problems(settings, 1, visible=None))
    assert line == "model.lora.base = 'nf4': bitsandbytes is not installed; pip install 'fppo[quantised]'"
