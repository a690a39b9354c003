"""What the vLLM engine says where vLLM is not, or is too old. With vLLM: tests/vllm."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from fppo.rollout.vllm import host
from fppo.rollout.vllm.adapter import lost_modules
from fppo.rollout.vllm.engine import VllmEngine
from fppo.rollout.vllm.options import VllmOptions, check_options
from fppo.settings import checks, files
from tests.models.families import make


def test_absent_and_old_ones_are_refused(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    with pytest.raises(ValueError, match=r"vLLM is not installed; fppo runs on vLLM 0\.32 and newer: pip install"):
        VllmEngine(make("qwen2")[0], pad_token_id=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.2" if name == "vllm" else version(name))
    with pytest.raises(ValueError, match=r"vllm 0\.9\.2 is installed; fppo runs on vLLM 0\.32 and newer"):
        VllmEngine(make("qwen2")[0], pad_token_id=0)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.1+cpu")
    assert host.check_installed() == "0.33.1+cpu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 0}, "max_model_len = 0: must be 1 or more"),
        ({"max_rows": 0}, "max_rows = 0"),
        ({"cache_gb": 0.0}, "cache_gb = 0.0: must be greater than 0"),
        ({"memory_share": 1.5}, "memory_share = 1.5: must be 1 or less"),
        ({"restarts": -1}, "restarts = -1: must be 0 or more"),
        ({"patience": 0.0}, "patience = 0.0"),
        ({"host": "elsewhere"}, "host"),
        ({"tensor_parallel": 2}, r'tensor_parallel = 2: .* give host = "process" or "ray"'),
        ({"transport": "nccl"}, 'transport = .nccl.: one process needs none; give auto, or host = "process"'),
        ({"transport": "carrier", "host": "process"}, "transport"),
        ({"devices": (1, 1), "host": "process"}, r"devices = \[1, 1\]: name different GPUs"),
        ({"devices": (1,)}, r"devices = \[1\]: with host = \"local\" .* give host = \"process\""),
    ],
)
def test_options_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check_options(VllmOptions(**settings))


def test_a_dtype_that_vllm_has_not():
    with pytest.raises(ValueError, match="dtype = 'float64': vLLM computes in one of"):
        VllmEngine(make("qwen2")[0], pad_token_id=0, options=VllmOptions(dtype="float64"))


def test_ray_is_asked_for_where_it_is_absent(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.1")
    with pytest.raises(ValueError, match=r"Ray is not installed: pip install 'fppo\[ray\]'"):
        VllmEngine(make("qwen2")[0], pad_token_id=0, options=VllmOptions(host="ray"))


SECTION = {"rollout.engine": "vllm"}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"rollout.vllm.tensor_parallel": 2}, "rollout.vllm.tensor_parallel"),
        ({"rollout.vllm.transport": "ipc"}, "rollout.vllm.transport"),
        ({"rollout.vllm.devices": (1,)}, "rollout.vllm.devices"),
        ({"rollout.vllm.host": "ray", "rollout.vllm.devices": (1,)}, "rollout.vllm.devices"),
        ({"rollout.vllm.host": "process", "rollout.vllm.devices": (1, 1)}, "rollout.vllm.devices"),
        ({"rollout.vllm.host": "process", "rollout.vllm.cluster": "10.0.0.1:1"}, "rollout.vllm.cluster"),
        ({"rollout.vllm.host": "ray", "rollout.vllm.cluster": "auto"}, "rollout.vllm.cluster"),
        ({"rollout.vllm.restarts": 0}, "rollout.vllm.restarts"),
        ({"rollout.vllm.patience": 3.0}, "rollout.vllm.patience"),
        ({"rollout.vllm.start_patience": 3.0}, "rollout.vllm.start_patience"),
        ({"rollout.vllm.cache_gb": 2.0, "rollout.vllm.memory_share": 0.5}, "rollout.vllm.cache_gb"),
        ({"model.decode_attention": "cpp"}, "model.decode_attention"),
        ({"rollout.vllm.cache_gb": 0.0}, "rollout.vllm.cache_gb"),
        ({"rollout.vllm.max_model_len": 767}, "rollout.vllm.max_model_len"),  # of 512 + 256
        ({"rollout.engine": "embedded", "rollout.vllm.host": "ray"}, "rollout.vllm.host"),
    ],
)
def test_settings_that_conflict_or_that_nothing_reads_are_named(changes, place):
    start = files.from_dict({"model": {"path": "m"}, "data": {"path": ["d"]}, "output_dir": "o"})
    actual = checks.problems(files.replace(start, SECTION | changes))
    ours = "rollout.vllm", "model.decode"
    assert [p.path for p in actual if p.path.startswith(ours)] == [place]
    there = {"rollout.vllm.host": "process", "rollout.vllm.transport": "nccl", "rollout.vllm.tensor_parallel": 2}
    there |= {"rollout.vllm.max_model_len": 768, "rollout.vllm.devices": (1, 2)}
    assert not [p for p in checks.problems(files.replace(start, SECTION | there)) if "vllm" in str(p)]


class Worker:
    """One of two workers' modules: gate and up in one, whose rows are cut, and down, whose columns are."""

    def __init__(self, rank, rows=4, columns=6):
        cuts = (slice(rank * rows // 2, (rank + 1) * rows // 2), slice(rank * columns // 2, (rank + 1) * columns // 2))
        rows, columns, room = rows // 2, columns // 2, 3

        def stack(*shape):
            return torch.zeros(1, 1, *shape)

        self.gate_up = SimpleNamespace(
            tp_size=2,
            lora_a_stacked=(stack(room, 6), stack(room, 6)),
            lora_b_stacked=(stack(rows, room), stack(rows, room)),
            slice_lora_a=lambda each: each,
            slice_lora_b=lambda each: [None if x is None else x[cuts[0]] for x in each],
        )
        self.down = SimpleNamespace(
            tp_size=2,
            lora_a_stacked=(stack(room, columns),),
            lora_b_stacked=(stack(4, room),),
            slice_lora_a=lambda x: x[:, cuts[1]],
            slice_lora_b=lambda x: x,
        )

    def take(self, came):
        for place, part in enumerate(("gate", "up")):
            if part in came:
                a, b = came[part]
                self.gate_up.lora_a_stacked[place][0, 0, :2] = a
                self.gate_up.lora_b_stacked[place][0, 0, :, :2] = self.gate_up.slice_lora_b([b])[0]
        a, b = came["down"]
        self.down.lora_a_stacked[0][0, 0, :2] = self.down.slice_lora_a(a)
        self.down.lora_b_stacked[0][0, 0, :, :2] = b

    def lost(self, came):
        modules = {"gate_up": self.gate_up, "down": self.down}
        return lost_modules(modules, {"gate_up": ["gate", "up"]}, came, 0)


@pytest.mark.parametrize("names", [("gate", "up", "down"), ("up", "down")])
def test_each_worker_reads_back_its_parts_of_an_adapter(names):
    came = {name: (torch.randn(2, 6), torch.randn(4, 2)) for name in names}
    workers = [Worker(0), Worker(1)]
    for worker in workers:
        assert worker.lost(came) == ["down", "gate_up"]  # it never came
        worker.take(came)
        assert worker.lost(came) == []
    workers[0].down.lora_b_stacked[0].mul_(2)  # twice
    workers[1].gate_up.lora_b_stacked[1].zero_()  # one of two that are fused
    assert [worker.lost(came) for worker in workers] == [["down"], ["gate_up"]]
    other = Worker(1)
    other.take(came)
    other.gate_up.lora_b_stacked[0][0, 0, 0, 2] = 1.0  # left from another version of a higher rank, or where none came
    assert other.lost(came) == ["gate_up"]
    assert Worker(0).lost({}) == []
