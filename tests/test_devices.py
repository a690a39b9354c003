"""Devices by their names in settings; tests/standin runs one that is not CUDA."""

import attrs
import pytest
import torch

from fppo import devices
from fppo.settings import resolve
from fppo.settings.model import ModelSettings
from fppo.settings.train import TrainSettings


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "xpu:12", "npu", "mps"])
def test_the_names_of_devices_are_taken(name):
    assert devices.wrong_name(name) is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gpu", "cuda"),
        ("ROCm", "cuda"),
        ("CUDA", "cuda"),
        ("cuda0", "cuda"),
        ("metal", "mps"),
        ("intel", "xpu"),
        ("xpuu:1", "xpu"),
        ("ascend", "npu"),
        ("automatic", "auto"),
    ],
)
def test_of_unknown_names_the_nearest_is_suggested(name, near):
    assert devices.wrong_name(name).startswith(f"did you mean {near}? must be auto, cpu, cuda or cuda:N, xpu")


@pytest.mark.parametrize("name", ["mps:0", "cpu:1", "cuda:", "cuda:-1", "cuda:x", "auto:0", "", "?"])
def test_a_number_is_for_devices_of_which_there_are_several(name):
    assert "must be auto, cpu, cuda or cuda:N" in devices.wrong_name(name)


def test_a_device_that_is_not_there_is_named_by_its_setting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.named("cpu", "a.b") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^a\.b: torch sees no GPU here; give cpu$"):
        devices.named("cuda", "a.b")
    for name, advice in (
        ("npu", "no NPU here; give cpu, or install torch_npu"),
        ("mps", "no Apple GPU here; give cpu"),
    ):
        with pytest.raises(ValueError, match=rf"^a\.b: torch sees {advice}$"):
            devices.named(name, "a.b")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [devices.named(name, "a.b").index for name in ("cuda", "cuda:1")] == [None, 1]
    assert devices.named("auto", "a.b") == torch.device("cuda")
    with pytest.raises(ValueError, match=r"^a\.b: there are 2 GPUs here, cuda:0 the first"):
        devices.named("cuda:2", "a.b")


@pytest.mark.parametrize("kind", ["xpu", "npu", "mps"])
def test_auto_is_what_torch_runs_on_any_accelerator(kind):
    given = attrs.evolve(TrainSettings(), device=kind, model=ModelSettings(graphs="auto", cpp="auto"))
    settings, lines = resolve.resolved(given, resolve.Machine(device=kind))
    model = settings.model
    assert (model.attention, model.decode_attention, model.log_probs) == ("sdpa", "sdpa", "chunked")
    assert (model.compute_dtype, model.graphs, model.cpp, model.linear) == ("bfloat16", False, False, "torch")
    assert {getattr(model, op) for op in resolve.LAYERS} == {"eager"}
    assert lines == []
    assert ("device", kind, "has no graphs") in resolve.hindrances(given)
