"""vLLM that cuts the model over two workers, each a process: what one worker does, and all of them confirm."""

import os
import signal
from pathlib import Path

import pytest
import torch

from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.sync import SyncError
from fppo.rollout.vllm.host import EngineDied
from fppo.rollout.vllm.local import _agreed
from fppo.rollout.vllm.options import VllmOptions, check_options
from tests.rollout.test_embedded import make_prompts
from tests.vllm.conftest import damage, process_of, start
from tests.vllm.families import make
from tests.vllm.test_engine import expected
from tests.vllm.test_weights import gap

CUT = Sampling(n=2, max_tokens=12, temperature=1.2, top_k=9)
OPTIONS = {"host": "process", "tensor_parallel": 2, "patience": 60.0, "restarts": 0}


@pytest.fixture(scope="module")
def engine():
    started, _ = start(options=OPTIONS, bucket_bytes=1 << 15)
    with started:
        yield started


def test_rollouts_are_those_of_the_embedded_engine(engine):
    model, params = make("qwen2", seed=2)
    for version in (3, 4):
        whole = expected(params, CUT)
        rollout = engine.generate(params, Ask(make_prompts(), CUT, Key(1), version=version))
        assert torch.equal(rollout.tokens, whole.tokens)
        for name in ("rollout_log_probs", "sampling_log_probs"):
            torch.testing.assert_close(getattr(rollout, name), getattr(whole, name), rtol=0, atol=1e-5)
        assert gap(engine, model, params) < 1e-5
        _, params = make("qwen2", seed=6)


def test_each_worker_holds_its_part_and_confirms_the_whole(engine, monkeypatch):
    _, params = make("qwen2", seed=2)
    engine.sync(params, version=5)
    assert len(engine._host.call("fppo_names", [])) == 2
    wrong = "model.layers.1.mlp.gate_proj.weight"
    damage(engine._host, wrong, monkeypatch)
    with pytest.raises(SyncError, match=f"changed on the way: {wrong}$"):
        engine.sync(params, version=6)
    monkeypatch.undo()
    assert engine.sync(params, version=6).tensors == len(params)


def test_a_worker_that_got_something_else_is_no_agreement():
    digests, unfilled = _agreed([({"a": "1", "b": "2", "c": "3"}, []), ({"a": "1", "b": "4"}, ["d"])])
    assert digests == {"a": "1", "b": "2|4"}
    assert unfilled == ["d"]


def test_a_worker_that_dies_is_a_vllm_that_died(engine):
    _, params = make("qwen2", seed=2)
    engine.sync(params, version=7)
    own = process_of(engine)
    workers = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(p) == own]
    assert len(workers) >= 2
    os.kill(workers[-1], signal.SIGKILL)
    with pytest.raises(EngineDied, match="a worker of vLLM ended"):
        engine.generate(params, Ask(make_prompts(), CUT, Key(1), version=7))


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def test_it_is_not_for_the_process_that_trains():
    with pytest.raises(ValueError, match=r'tensor_parallel = 2: .* give host = "process" or "ray"'):
        check_options(VllmOptions(tensor_parallel=2))
