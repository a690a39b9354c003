"""vLLM in a Ray actor: what a process of its own does, on whichever machine has room."""

import os
import signal

import pytest
import torch

from fppo.key import Key
from fppo.rollout.engine import Ask
from fppo.rollout.sync import SyncError
from fppo.rollout.vllm.engine import EngineFailure
from fppo.rollout.vllm.host import EngineDied
from tests.rollout.test_embedded import make_prompts
from tests.vllm.conftest import damage, process_of, start
from tests.vllm.families import make
from tests.vllm.interrupts import interrupted
from tests.vllm.test_engine import LONG, expected
from tests.vllm.test_weights import gap

pytest.importorskip("vllm", reason="vLLM is not installed here")
ray = pytest.importorskip("ray", reason="Ray is not installed here")

OPTIONS = {"host": "ray", "max_rows": 2, "patience": 60.0, "restarts": 1}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def engine():
    started, _ = start(options=OPTIONS, bucket_bytes=1 << 15)
    with started:
        yield started


def test_its_rollouts_are_those_of_the_embedded_engine_and_its_weights_the_trainers(engine):
    model, params = make("qwen2", seed=2)
    whole = expected(params)
    rollout = engine.generate(params, Ask(make_prompts(), LONG, Key(1), version=3))
    assert torch.equal(rollout.tokens, whole.tokens)
    torch.testing.assert_close(rollout.rollout_log_probs, whole.rollout_log_probs, rtol=0, atol=1e-5)
    assert gap(engine, model, params) < 1e-5


def test_what_changes_on_the_way_is_named_and_the_next_sync_mends_it(engine, monkeypatch):
    model, params = make("qwen2", seed=1)
    wrong = "model.layers.1.mlp.gate_proj.weight"
    damage(engine._host, wrong, monkeypatch)
    with pytest.raises(SyncError, match=f"changed on the way: {wrong}$"):
        engine.sync(params, version=2)
    monkeypatch.undo()
    engine.sync(params, version=2)
    assert gap(engine, model, params) < 1e-5


def test_errors_there_are_errors_here(engine):
    with pytest.raises(EngineFailure, match="no_such_method"):
        engine._host.call("no_such_method")


def test_an_actor_that_dies_costs_no_finished_row(engine, monkeypatch):
    _, params = make("qwen2", seed=4)
    whole = expected(params)
    engine.sync(params, version=3)
    seen: list[int] = []
    monkeypatch.setattr(engine._host, "generate", interrupted(engine._host.generate, seen, steps=100))
    with pytest.warns(RuntimeWarning, match="was lost in generate: .* of 12 rows are done, a new one goes on"):
        rollout = engine.generate(params, Ask(make_prompts(), LONG, Key(1), version=3))
    assert len(seen) == 4
    assert torch.equal(rollout.tokens, whole.tokens)
    assert engine.replaced == 1


def test_an_actor_that_hangs_is_ended(engine):
    process = process_of(engine)
    object.__setattr__(engine._host._options, "patience", 3.0)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(EngineDied, match="no sign of life for 3 s"):
        engine._host.sleep()


def test_which_cluster_is_never_guessed():
    with pytest.raises(ValueError, match=r"is in the Ray cluster at .* already, not in that at .10.0.0.1:1"):
        start(options=OPTIONS | {"cluster": "10.0.0.1:1"})


def test_a_start_that_fails_says_why():
    with pytest.raises(EngineFailure, match="cache_gb = 1e-05"):
        start(options=OPTIONS | {"cache_gb": 1e-5, "max_model_len": 128})
