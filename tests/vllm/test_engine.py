"""Where vLLM's engine has limits of its own, and what becomes of a process that ends."""

import contextlib
import copy
import importlib
import os
import signal
import socket
from unittest.mock import Mock

import pytest
import torch
from torch import distributed

from fppo import models, tree
from fppo.key import Key
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.vllm import engine as vllm
from fppo.rollout.vllm.engine import EngineFailure, VllmEngine, VllmOptions
from fppo.rollout.vllm.host import EngineDied
from fppo_kernels.table import Kernels
from tests.fleet.test_processes import running
from tests.rollout.test_embedded import make_prompts
from tests.vllm.conftest import process_of, start
from tests.vllm.families import make
from tests.vllm.interrupts import interrupted

LONG = Sampling(n=2, max_tokens=40, temperature=1.2)


def expected(params, sampling=LONG):
    engine = EmbeddedEngine(model=make("qwen2")[0], kernels=Kernels.named(), pad_token_id=0)
    return engine.generate(params, Ask(make_prompts(), sampling, Key(1), version=3))


def test_limits_name_their_setting(qwen2):
    engine, _ = qwen2
    _, params = make("qwen2")
    assert engine.limit == 128
    with pytest.raises(ValueError, match=r"longest prompt has 7 tokens; .* 129, .* max_model_len = 128: raise that"):
        engine.generate(params, Ask(make_prompts(), Sampling(max_tokens=122), Key(0)))
    engine.generate(params, Ask(make_prompts(), Sampling(max_tokens=121), Key(0)))
    assert engine.generate(params, Ask(make_prompts((127, 3)), Sampling(max_tokens=1), Key(0))).tokens.shape == (2, 128)
    prompts = make_prompts()
    wrong = tree.replace(prompts, tokens=prompts.tokens.where(prompts.tokens != int(prompts.tokens[0, -1]), 61))
    with pytest.raises(ValueError, match="tokens beyond the model's vocabulary of 61"):
        engine.generate(params, Ask(wrong, Sampling(max_tokens=3), Key(0)))
    with pytest.raises(ValueError, match="cannot sleep"):
        engine.sleep()


def test_a_caller_that_fails_leaves_no_rows_to_go_on(qwen2):
    engine, _ = qwen2
    _, params = make("qwen2")
    limits = torch.tensor([1, 40, 40, 40, 40, 40])

    def failed(row, tokens, finish):
        raise ZeroDivisionError(row)

    with pytest.raises(ZeroDivisionError, match="0"):
        engine.generate(params, Ask(make_prompts(), LONG, Key(1), limits=limits, on_finished=failed))
    assert not engine._host._llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_gb": 1e-5, "max_model_len": 128}, r"cache_gb = 1e-05, in place of .*max_model_len = 128"),
        ({"cache_gb": 1e6}, r"cache_gb = 1000000.0"),
        ({"memory_share": 1.0}, r"memory_share = 1.0, vLLM's gpu_memory_utilization"),
        ({"max_model_len": 4096}, r"max_model_len = 4096"),
        ({"sleep": True}, "^sleep = True: vLLM's CPU build .*leave it False$"),
        ({"extra": {"no_such_argument": 1}}, "no_such_argument"),
    ],
    ids=["small-cache", "large-cache", "share", "length", "sleep", "extra"],
)
def test_a_start_that_fails_says_why(options, message):
    with pytest.raises(EngineFailure, match=message):
        start(options=options)


def test_a_closed_engine_says_so():
    engine, _ = start()
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.generate(make("qwen2")[1], Ask(make_prompts(), LONG, Key(0)))


def test_weights_that_are_not_numbers_are_named_and_a_start_that_fails_is_tried_again(lent, monkeypatch):
    _, params = make("qwen2", seed=4)
    none = {name: torch.full_like(x, torch.nan) for name, x in params.items()}
    with lent(probe="never") as (engine, _):
        with pytest.raises(EngineFailure, match=r"log-probs are not numbers in row \d+: are its weights finite"):
            engine.generate(none, Ask(make_prompts(), LONG, Key(1), version=2))
        start_host = vllm.start_host

        def no_room(*_):
            raise EngineFailure("no room")

        for again in (no_room, no_room, start_host):
            monkeypatch.setattr(vllm, "start_host", again)
            if again is no_room:
                with pytest.raises(EngineFailure, match="no room"):
                    engine.generate(params, Ask(make_prompts(), LONG, Key(1), version=3))
        rollout = engine.generate(params, Ask(make_prompts(), LONG, Key(1), version=3))
        assert torch.equal(rollout.tokens, expected(params).tokens)
        monkeypatch.setattr(engine._host._llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(EngineFailure, match="does not let go"):
            engine.generate(params, Ask(make_prompts(), LONG, Key(1), version=3))
        monkeypatch.setattr(vllm, "start_host", no_room)
        with pytest.raises(EngineFailure, match="no room"):
            engine.sync(params, version=4)


def test_a_start_that_is_interrupted_leaves_no_process_group(monkeypatch):
    def interrupted(*_, **__):
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("vllm"), "LLM", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert not distributed.is_initialized()


def test_an_architecture_that_it_does_not_know():
    config = copy.deepcopy(make("qwen2")[0].config)
    config.architectures = ["NoSuchForCausalLM"]
    with pytest.raises(EngineFailure, match="NoSuchForCausalLM"):
        VllmEngine(models.build(config), pad_token_id=0, options=VllmOptions(cache_gb=0.05))


def test_a_process_that_dies_or_hangs_costs_no_finished_row(lent):
    _, params = make("qwen2", seed=4)
    whole = expected(params)
    options = {"host": "process", "patience": 12.0, "max_rows": 2}
    with lent(options=options, replaced_by=contextlib.nullcontext) as (engine, _):
        for number, reason in ((signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "no sign of life for 12 s")):
            seen: list[int] = []
            host = engine._host
            host.generate = interrupted(host.generate, seen, steps=100, number=number)
            with pytest.warns(RuntimeWarning, match=rf"{reason}.* of 12 rows are done, a new one goes on"):
                rollout = engine.generate(params, Ask(make_prompts(), LONG, Key(1), version=3))
            assert len(seen) == 4
            assert torch.equal(rollout.tokens, whole.tokens)
            assert rollout.finish == whole.finish
        assert engine.replaced == 2
        process = process_of(engine)
        engine.close()
    assert not running(process)


def test_a_process_that_keeps_dying_ends_the_run(monkeypatch):
    """It is no rank of the trainer's group, whose port is in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        own = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken.getsockname()[1]}
        for name, value in own.items():
            monkeypatch.setenv(name, str(value))
        engine, _ = start(options={"host": "process", "restarts": 0})
    with engine:
        os.kill(process_of(engine), signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL, perhaps for want of memory"):
            engine.generate(make("qwen2")[1], Ask(make_prompts(), LONG, Key(1)))


def test_a_process_that_does_not_start_says_why():
    with pytest.raises(EngineFailure, match="cache_gb = 1e-05"):
        start(options={"host": "process", "cache_gb": 1e-5, "max_model_len": 128})
    with pytest.raises(EngineDied, match=r"process .* was not up after 0.1 s \(setting: start_patience\)"):
        start(options={"host": "process", "start_patience": 0.1})


def test_what_is_set_is_what_vllm_has():
    options = {
        "max_model_len": 64,
        "max_rows": 3,
        "memory_share": 0.05,
        "dtype": "bfloat16",
        "prefix_cache": False,
        "extra": {"block_size": 32},
    }
    engine, _ = start(options=options)
    _, params = make("qwen2")
    with engine:
        actual = engine._host._llm.llm_engine.vllm_config
        assert engine.limit == actual.model_config.max_model_len == 64
        assert actual.model_config.dtype == torch.bfloat16
        assert actual.model_config.enforce_eager
        assert actual.scheduler_config.max_num_seqs == 3
        assert actual.cache_config.gpu_memory_utilization == 0.05
        assert actual.cache_config.block_size == 32
        assert not actual.cache_config.enable_prefix_caching
        rollout = engine.generate(params, Ask(make_prompts(), Sampling(n=2, max_tokens=5), Key(1)))
        assert rollout.rollout_log_probs.dtype == torch.float32


def test_with_and_without_a_prefix_cache_and_compiled_it_gives_the_same(monkeypatch):
    """Also where its cache is too small for all rows, and some wait for others in the middle of their responses."""
    model, params = make("qwen2")
    prompts = make_prompts((40, 40, 40))
    sampling = Sampling(n=4, max_tokens=30)
    whole = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0)
    expected = whole.generate(params, Ask(prompts, sampling, Key(1)))
    for cached, eager in ((True, True), (False, False)):
        extra = {"block_size": 32, **({"num_gpu_blocks_override": 9} if cached else {})}
        engine, _ = start(model=model, options={"prefix_cache": cached, "eager": eager, "extra": extra})
        with engine:
            scheduler = engine._host._llm.llm_engine.engine_core.engine_core.scheduler
            put_off = Mock(wraps=scheduler._preempt_request)
            monkeypatch.setattr(scheduler, "_preempt_request", put_off)
            rollout = engine.generate(params, Ask(prompts, sampling, Key(1)))
            assert put_off.called == cached
            assert engine._host._llm.llm_engine.vllm_config.cache_config.enable_prefix_caching == cached
            assert engine._host._llm.llm_engine.vllm_config.model_config.enforce_eager == eager
            assert torch.equal(rollout.tokens, expected.tokens)
            torch.testing.assert_close(rollout.rollout_log_probs, expected.rollout_log_probs, rtol=0, atol=1e-5)
