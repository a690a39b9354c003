"""vLLM beside every rank of a mesh that cuts the parameters: all gather together, whatever becomes of one engine."""

import os
import signal
import warnings
from contextlib import ExitStack

import attrs
import pytest
import torch

from fppo.key import Key
from fppo.rollout import sync
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.sync import SyncError
from fppo.rollout.vllm.host import EngineDied
from fppo.runtime import fsdp
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from tests.rollout.test_embedded import make_prompts
from tests.vllm.conftest import process_of
from tests.vllm.families import make
from tests.vllm.interrupts import interrupted
from tests.vllm.test_engine import expected
from tests.vllm.test_weights import gap

SHORT = Sampling(n=2, max_tokens=12, temperature=1.2)
SETTINGS = {"host": "process", "max_rows": 2, "restarts": 1}


@pytest.fixture(scope="module")
def engines(lent):
    with ExitStack() as stack:
        yield [stack.enter_context(lent(options=SETTINGS, bucket_bytes=1 << 15))[0] for _ in range(2)]


def on_ranks(engines, params, fn):
    """What `fn(engine, shards)` returns on two ranks, each with its engine and its shards."""

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        engine = engines[mesh["shard"].rank]
        engine._mesh = mesh
        return fn(engine, fsdp.shard(params, mesh))

    return simulate({"shard": 2}, run)


def rollouts(engines, params, *, version=3):
    prompts = make_prompts()
    return on_ranks(engines, params, lambda engine, x: engine.generate(x, Ask(prompts, SHORT, Key(1), version=version)))


def test_shards_are_synced_bucket_by_bucket(engines):
    model, params = make("qwen2", seed=3)
    buckets = [0, 0]
    for rank, engine in enumerate(engines):
        take_in = engine._host.take_in

        def counted(tensors, rank=rank, take_in=take_in):
            buckets[rank] += 1
            take_in(tensors)

        engine._host.take_in = counted
    done = on_ranks(engines, params, lambda engine, x: engine.sync(x, version=4))
    assert min(buckets) > 10
    for engine, synced in zip(engines, done, strict=True):
        assert synced.tensors == len(params)
        assert gap(engine, model, params) < 1e-5
        del engine._host.take_in


def test_tensors_under_each_others_names_are_noticed_on_shards_too(engines):
    _, params = make("qwen2", seed=3)
    wrong = {"q_proj": "o_proj", "o_proj": "q_proj"}
    for engine in engines:
        engine._rename = lambda name, x: [
            (name.replace(p := name.split(".")[-2], wrong.get(p, p)) if name.endswith("weight") else name, x)
        ]
        engine._probed = False
    try:
        with pytest.raises(SyncError, match="log-probs of 8 tokens lie"):
            on_ranks(engines, params, lambda engine, x: engine.sync(x, version=5))
    finally:
        for engine in engines:
            engine._rename = sync.hf_weight_loader


@pytest.mark.parametrize("when", ["in a generation", "in a sync"])
def test_one_ranks_process_that_dies_is_replaced_and_all_sync_again(engines, when):
    _, params = make("qwen2", seed=4)
    whole = expected(params, SHORT)
    rollouts(engines, params)  # both hold version 3
    before = [engine.replaced for engine in engines]
    process = process_of(engines[1])
    seen: list[int] = []
    if when == "in a generation":
        host = engines[1]._host
        host.generate = interrupted(host.generate, seen, steps=30)
    else:
        take_in = engines[1]._host.take_in

        def broken(tensors):
            seen.append(0)
            if len(seen) == 3:
                os.kill(process, signal.SIGKILL)
            take_in(tensors)

        engines[1]._host.take_in = broken
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        synced = rollouts(engines, params, version=4)
    assert any(
        "SIGKILL" in str(x.message) and "of 12 rows are done, a new one goes on" in str(x.message) for x in warned
    )
    for rollout in synced:
        assert torch.equal(rollout.tokens, whole.tokens)
        assert rollout.versions.unique().tolist() == [4]
    assert len(seen) < 12
    assert [engine.replaced - n for engine, n in zip(engines, before)] == [0, 1]
    assert process_of(engines[1]) != process


def test_all_ranks_end_when_one_may_not_be_replaced_again(engines):
    _, params = make("qwen2", seed=4)
    rollouts(engines, params)
    for engine in engines:
        engine._options = attrs.evolve(engine._options, restarts=0)
    os.kill(process_of(engines[0]), signal.SIGKILL)
    with pytest.raises(EngineDied):
        rollouts(engines, params)
