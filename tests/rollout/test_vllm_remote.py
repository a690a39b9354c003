"""A host of vLLM that is elsewhere: what its process sees, and that it does what one here does."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fppo.fleet import group
from fppo.fleet.codec import tensors_of, tree_of
from fppo.fleet.shared import Memory
from fppo.rollout.sync import SyncError, digest
from fppo.rollout.vllm import remote
from fppo.rollout.vllm.engine import VllmOptions
from fppo.rollout.vllm.host import Answer, EngineDied, EngineFailure
from fppo.rollout.vllm.remote import RemoteHost
from fppo.runtime import clock
from tests.fleet.threads import Threads


@pytest.mark.parametrize(
    ("visible", "initialized", "options", "expected"),
    [
        (None, True, {}, "2"),
        ("4,5,6,7", True, {}, "6"),
        ("4,5,6,7", True, {"transport": "ipc"}, "6"),
        ("4,5,6,7", True, {"transport": "nccl"}, "4"),
        ("4,5,6,7", True, {"tensor_parallel": 2}, "6,4"),
        ("4,5,6,7", True, {"tensor_parallel": 2, "devices": (0, 3)}, "4,7"),
        (None, False, {}, None),
        (None, False, {"devices": (3,)}, "3"),
    ],
)
def test_a_process_beside_a_rank_is_on_that_ranks_gpu(visible, initialized, options, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", "2")
    results = remote._environment(remote._gpus(VllmOptions(host="process", **options)))
    assert results.get("CUDA_VISIBLE_DEVICES") == expected
    assert "LOCAL_RANK" not in results


class OnRank:
    """What is on the rank of a `RemoteHost` in place of vLLM."""

    limit = 7

    def __init__(self, path, options, **rest):
        self.got, self.loads = {}, []

    def call(self, method, *arguments):
        if method == "died":
            raise EngineDied("a worker of vLLM ended")
        return [arguments, {"method": method}]

    def begin_load(self, how, transfer=False):
        self.got = {}

    def take_in_from(self, path, packed, spans):
        self.take_in(tree_of(packed, tensors_of(packed, Memory.at(path).get(spans))))

    def take_in(self, tensors):
        if "wrong" in tensors:
            raise SyncError("what came is wrong")
        self.got |= tensors

    def end_load(self):
        if not self.got:
            raise SyncError("nothing came")
        return {name: digest(x, "bytes") for name, x in self.got.items()}, []

    def sleep(self):
        threading.Event().wait(5.0)

    def wake(self, part):
        raise KeyError(part)

    def turn(self, new, ended):
        self.sleep()

    def answers(self, request):
        if request == "silent":
            self.sleep()
        ones = np.ones(2, np.float32)
        yield [(0, Answer(ones.astype(np.int64), ones, ones)), (1, Answer(ones.astype(np.int64), 2 * ones, ones))]
        yield []
        yield [(2, Answer(ones.astype(np.int64), 3 * ones, ones))]


@pytest.fixture(params=["process", "ray"])
def host(monkeypatch, tmp_path, request):
    """A host whose rank is a thread."""
    monkeypatch.setattr(remote, "check_installed", lambda: "0")
    monkeypatch.setattr(remote, "LocalHost", OnRank)
    monkeypatch.setattr(remote, "_ranks_of", lambda options: (Threads(), True))
    options = VllmOptions(host=request.param, patience=0.5)
    made = RemoteHost(str(tmp_path), options, dtype="float32", trust_remote_code=False)
    yield made
    made.close()
    made.close()


def test_a_host_elsewhere_does_what_one_here_does(host):
    assert host.limit == 7
    assert host.call("names", ["a"], 3) == [(["a"], 3), {"method": "names"}]
    for version in range(2):
        host.begin_load("bytes")
        pieces = [{f"{i}": torch.full((5, 40_000), float(i + version)), f"b{i}": torch.ones(i)} for i in range(4)]
        for tensors in pieces:
            host.take_in(tensors)
        assert host.end_load() == ({name: digest(x) for each in pieces for name, x in each.items()}, [])
    answers = {}
    host.generate(None, answers.__setitem__)
    assert [float(answers[row].log_probs[0]) for row in range(3)] == [1.0, 2.0, 3.0]


def test_errors_of_a_host_elsewhere_are_those_of_one_here(host):
    host.begin_load("bytes")
    for call, error in (
        (host.end_load, SyncError("nothing came")),
        (lambda: host.call("died"), EngineDied("a worker of vLLM ended")),
        (lambda: host.wake("nothing"), EngineFailure("KeyError: 'nothing'")),
    ):
        with pytest.raises(type(error), match=str(error)):
            call()
    host.take_in({"wrong": torch.ones(3)})
    with pytest.raises(SyncError, match="what came is wrong"):
        host.end_load()


def test_a_caller_that_fails_leaves_no_answers_to_the_next_question(host):
    def on_answer(row, answer):
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        host.generate(None, on_answer)
    with pytest.raises(EngineDied, match="generate was interrupted"):
        host.call("names")


@pytest.mark.parametrize(("what", "arguments"), [("sleep", ()), ("generate", ("silent", None)), ("turn", ([], []))])
def test_silence_is_a_death_and_the_setting_is_named(host, what, arguments, monkeypatch):
    passed = [0.0]

    def passing():
        passed[0] += 0.1
        return passed[0]

    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=passing))
    monkeypatch.setattr(group, "_LOOK", 0.1)
    with pytest.raises(EngineDied, match=rf"no sign of life for 0.5 s \(setting: patience\), in {what}"):
        getattr(host, what)(*arguments)
    with pytest.raises(EngineDied):
        host.call("names")
