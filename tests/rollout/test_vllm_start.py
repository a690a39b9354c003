"""What vLLM is started with and ended by, beside stand-ins for it, and what an adapter that goes alone comes to."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from fppo import models
from fppo.key import Key
from fppo.models import Lora, lora_files
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.sync import SyncError, digest
from fppo.rollout.vllm import adapter as adapters
from fppo.rollout.vllm import local
from fppo.rollout.vllm.devices import GIB
from fppo.rollout.vllm.engine import VllmEngine
from fppo.rollout.vllm.host import Answer, EngineDied, EngineFailure, check_rows, config_directory
from fppo.rollout.vllm.options import VllmOptions
from fppo.rollout.vllm.probe import ProbeRow, compare_log_probs, own_log_probs
from fppo.runtime.mesh import LOCAL
from tests.models.families import make
from tests.rollout.test_embedded import make_prompts
from tests.rollout.vllm_stand_in import host_of, worker_of

MODEL, PARAMS = make("qwen2", dtype=torch.float32)
ADAPTED, FIRST = models.adapt(MODEL, PARAMS, Lora(2, 4.0), key=Key(0))


def adapter(number):
    """Factors of version `number`, of which the first changes nothing."""
    return {name: x + 0.1 * number * torch.sin(torch.arange(x.numel())).view_as(x) for name, x in FIRST.items()}


@pytest.fixture
def config(tmp_path):
    with config_directory(MODEL.whole_config, trust_remote_code=False) as path:
        yield path


def test_a_config_names_the_class_that_vllm_is_to_run():
    bare = type(MODEL.whole_config).from_dict(MODEL.whole_config.to_dict())
    bare.architectures, bare.name_or_path = None, "somewhere"
    with config_directory(bare, trust_remote_code=False) as path:
        saved = json.loads((Path(path) / "config.json").read_text())
    assert saved["architectures"] == ["Qwen2ForCausalLM"]
    assert bare.architectures is None
    assert not Path(path).exists()
    with config_directory(bare, trust_remote_code=True) as path:
        assert path == "somewhere"


class LLM:
    """vLLM that notes what it is made of, and what becomes of it."""

    def __init__(self, log):
        self.log = log
        core = SimpleNamespace(shutdown=lambda: log.append("shut down"))
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=33), engine_core=core)

    def sleep(self, level):
        self.log.append(("sleep", level))

    def wake_up(self, tags):
        self.log.append(("wake", tags))


@contextlib.contextmanager
def opened(options, path, *, raises=None, environment=None, **how):
    """A host on a vLLM of this process, and the log of it, which begins with how vLLM was made."""
    log = []

    def make(*given, **keywords):
        torch.manual_seed(99)
        log.append((given, keywords))
        if raises is not None:
            raise raises
        return LLM(log)

    before = torch.random.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        worker_of(patch, LLM=make, cleanup_dist_env_and_memory=lambda: log.append("cleaned"))
        patch.setattr(os, "environ", {**os.environ} if environment is None else environment)
        try:
            host = local.LocalHost(path, options, **{"dtype": "float32", "trust_remote_code": False} | how)
        except BaseException:
            assert log[1:] == ["cleaned"] * len(log[:1])
            raise
        finally:
            assert torch.equal(torch.random.get_rng_state(), before)
        yield host, log
        host.close()
    assert log[-2:] == ["shut down", "cleaned"]


def started(options, path):
    """The keywords with which vLLM is started."""
    with opened(options, path) as (_, log):
        ((positional, keywords),) = log
    assert positional == (path,)
    (draws,) = keywords.pop("logits_processors")
    assert (draws.__module__, draws.__name__) == ("fppo.rollout.vllm.worker", "KeyedDraws")
    return keywords


def test_vllm_is_started_with_what_the_options_say(config):
    fixed = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "generation_config": "vllm",
        "trust_remote_code": False,
        "async_scheduling": False,
        "worker_extension_cls": "fppo.rollout.vllm.worker.Extension",
        "enable_sleep_mode": False,
        "kv_cache_memory_bytes": GIB,
    }
    plain = {"max_model_len": None, "max_num_seqs": 256, "enforce_eager": True, "enable_prefix_caching": True}
    assert started(VllmOptions(), config) == {**fixed, **plain, "tensor_parallel_size": 1}
    own = {"max_model_len": 77, "max_rows": 5, "eager": False, "prefix_cache": False, "tensor_parallel": 2}
    options = VllmOptions(**own, transport="nccl", extra={"kv_cache_memory_bytes": 4, "more": 5})
    assert started(options, config) == {
        **fixed,
        "max_model_len": 77,
        "max_num_seqs": 5,
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "tensor_parallel_size": 2,
        "weight_transfer_config": {"backend": "nccl"},
        "kv_cache_memory_bytes": 4,
        "more": 5,
    }


def test_what_keeps_vllm_from_starting_is_said_and_leaves_nothing(config):
    for raises, kind, text in (
        (ValueError("no KV cache"), EngineFailure, r"vLLM did not start: no KV cache .*max_rows = 256"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ):
        with pytest.raises(kind, match=text), opened(VllmOptions(), config, raises=raises):
            pass
    with pytest.raises(EngineFailure, match="sleep = True: vLLM's CPU build"), opened(VllmOptions(sleep=True), config):
        pass


def test_a_host_here_starts_sleeps_wakes_and_ends_once(config, monkeypatch):
    options = VllmOptions(cache_gb=2.0)
    with opened(options, config, dtype="float16", trust_remote_code=True) as (host, log):
        ((_, made),) = log
        assert (made["dtype"], made["trust_remote_code"], made["kv_cache_memory_bytes"]) == ("float16", True, 2 * GIB)
        assert host.limit == 33
        host.sleep()
        host.wake("weights")
        host.close()
    assert log[1:] == [("sleep", 2), ("wake", ["weights"]), "shut down", "cleaned"]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"this process is in a torch.distributed group"), opened(options, config):
        pass


@pytest.mark.parametrize("verbose", [True, False])
def test_vllm_reads_variables_that_nobody_has_set_otherwise(config, verbose):
    variables = {"VLLM_NO_USAGE_STATS": "0"}
    with opened(VllmOptions(verbose=verbose), config, environment=variables):
        fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "0"}
        quiet = {} if verbose else {"VLLM_LOGGING_LEVEL": "ERROR"}
        assert variables == {**fixed, **quiet}
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER"):
        with (
            pytest.raises(ValueError, match="fppo needs both 0, or unset"),
            opened(VllmOptions(), config, environment={name: "1"}),
        ):
            pass


@pytest.mark.parametrize(
    ("cpus", "workers", "shares"), [(range(4), 2, "0,2|1,3"), ((5, 3), 2, "3|5"), ((1,), 2, "nobind")]
)
def test_workers_share_the_processors(config, cpus, workers, shares, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*cpus})
    variables = {}
    with opened(VllmOptions(host="process", tensor_parallel=workers), config, environment=variables):
        assert variables["VLLM_CPU_OMP_THREADS_BIND"] == shares


@pytest.mark.parametrize(
    ("text", "given", "said"),
    [
        ("out of Memory", {}, ("neither cache_gb nor memory_share", "max_model_len = 7, max_rows = 8")),
        ("no KV cache", {"memory_share": 0.5}, ("memory_share = 0.5, vLLM's gpu_memory_utilization", "max_rows = 8")),
        ("memory", {"cache_gb": 2.0}, ("cache_gb = 2.0, in place of vLLM's", "max_model_len = 7")),
        ("max_position_embeddings", {}, ("(setting: max_model_len = 7)",)),
        ("nothing of that", {}, ("nothing of that",)),
    ],
)
def test_settings_are_named_where_vllm_does_not_start(config, text, given, said):
    options = VllmOptions(max_model_len=7, max_rows=8, **given)
    with pytest.raises(EngineFailure) as raised, opened(options, config, raises=RuntimeError(text)):
        pass
    found = str(raised.value).removeprefix("vLLM did not start: ")
    assert found.startswith(text)
    assert all(part in found for part in said)
    assert (found == text) == (said == (text,))


def test_a_worker_that_is_gone_is_a_death_in_any_call(monkeypatch):
    llm = SimpleNamespace(llm_engine=LLM([]).llm_engine)
    host = host_of(local, llm)
    executor = SimpleNamespace(is_failed=True)
    llm.llm_engine.engine_core.engine_core = SimpleNamespace(model_executor=executor)

    def fails(method, args):
        raise RuntimeError("gone")

    llm.collective_rpc = fails
    for failed, kind in ((True, local.EngineDied), (False, RuntimeError)):
        executor.is_failed = failed
        with pytest.raises(kind):
            host.call("x")
    for load, given in (
        (host.begin_load, ("bytes",)),
        (host.take_in, ({"a": torch.ones(1)},)),
        (host.take_in_from, ("memory", "packed", [(0, 4)])),
        (host.end_load, ()),
    ):
        executor.is_failed = False
        with pytest.raises(SyncError, match=r"^vLLM could not load the weights: RuntimeError: gone$"):
            load(*given)
        executor.is_failed = True
        with pytest.raises(local.EngineDied, match=r"^a worker of vLLM ended"):
            load(*given)


class AdapterHost:
    """A host that notes what it is sent, answers each row with the number of its adapter, and gives forced tokens the
    log-probs of the adapted model."""

    limit = 128

    def __init__(self, log):
        self.log, self.got, self.wrong, self.dies = log, {}, None, False
        log.append("start")

    def call(self, method, *arguments):
        if method == "fppo_names":
            return [({name: [name] for name in PARAMS}, {})]
        assert method == "fppo_take_adapter"
        number, config, factors = arguments
        if isinstance(self.wrong, Exception):
            raise self.wrong
        self.log.append(("adapter", number, dict(config), {name: x.clone() for name, x in factors.items()}))
        came = {name: digest(x, "bytes") for name, x in factors.items()}
        return [came, came if self.wrong is None else {**came, self.wrong(came): "other"}]

    def begin_load(self, how, transfer=False):
        self.how, self.got = how, {}

    def take_in(self, tensors):
        self.got |= {name: digest(x, self.how) for name, x in tensors.items()}

    def end_load(self):
        self.log.append(("base", {*self.got}))
        return dict(self.got), []

    def generate(self, request, on_answer):
        if self.dies:
            raise EngineDied("it died")
        for row, prompt in enumerate(request.prompts):
            found = np.full(1, -1, np.float32)
            if request.forced is not None:
                probe, merged = (
                    [*prompt, *request.forced[row].tolist()],
                    models.merged(ADAPTED, adapter(request.adapter - 1)),
                )
                found = own_log_probs(ADAPTED.plain, merged, LOCAL, ProbeRow(probe, len(prompt))).numpy()
                self.log.append("probed")
            on_answer(row, Answer(np.full(1, request.adapter or 0), found, found))

    def close(self):
        self.log.append("closed")


def test_an_adapter_goes_beside_a_base_that_is_sent_once():
    """Under a new number each time; the base again to a vLLM that stands in for one. Log-probs are compared with those
    of the adapted model, until an adapter has come that changes something."""
    log, hosts, asked = [], [], []

    def start(model, options, dtype):
        asked.append(options)
        hosts.append(AdapterHost(log))
        return hosts[-1]

    options = VllmOptions(host="process", adapter="alone", restarts=0)
    engine = VllmEngine(ADAPTED, pad_token_id=0, options=options, start=start)
    assert asked[0].extra["max_lora_rank"] == 8
    own, prompts = {}, make_prompts((2, 3))
    base = sum(x.nbytes for x in PARAMS.values())
    for version, anew in ((0, True), (1, False), (2, False), (3, True)):
        log.clear()
        if version == 3:
            hosts[-1].dies = True
            with pytest.raises(EngineDied):
                engine.generate(own, Ask(prompts, Sampling(max_tokens=1), Key(0), version=2))
        own = adapter(version)
        factors = lora_files.stored(ADAPTED, own)
        done = engine.sync(own, version=version)
        heads = ["closed", "start"] if version == 3 else []
        probed = ["probed"] * (version != 2)
        *before, (kind, number, how, sent) = log[: len(log) - len(probed)]
        assert log[len(log) - len(probed) :] == probed
        assert before == [*heads, *([("base", {*PARAMS})] if anew else [])]
        assert (kind, number) == ("adapter", version + 1)
        assert how == {"r": 2, "lora_alpha": 4.0, "target_modules": []}
        assert sent.keys() == factors.keys()
        assert all(torch.equal(sent[name], x) for name, x in factors.items())
        size = sum(x.nbytes for x in factors.values())
        assert done[:3] == (version, len(factors) + anew * len(PARAMS), size + anew * base)
    ask = Ask(prompts, Sampling(max_tokens=1), Key(0), version=4)
    rollout = engine.generate(adapter(4), ask)
    assert rollout.tokens[:, -1].tolist() == [5, 5]
    hosts[-1].wrong = lambda came: next(iter(came))
    with pytest.raises(SyncError, match="changed on the way"):
        engine.sync(adapter(5), version=5)
    assert engine.version is None
    for error, kind, text in (
        (KeyError("lost"), SyncError, "vLLM could not take the adapter: KeyError: 'lost'"),
        (EngineFailure("silent"), EngineFailure, "silent"),
    ):
        hosts[-1].wrong = error
        with pytest.raises(kind, match=text):
            adapters.deliver(hosts[-1], 9, ADAPTED, {})


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512), (513, None)])
def test_vllm_has_room_for_the_adapters_rank(rank, room):
    def of(spec, places=ADAPTED.frozen.places):
        return attrs.evolve(ADAPTED, frozen=attrs.evolve(ADAPTED.frozen, lora=spec, places=places))

    options = VllmOptions(adapter="alone", extra={"max_loras": 3, "more": 1})
    if room is None:
        with pytest.raises(ValueError, match="rank 513, beyond 512, cannot go to vLLM alone"):
            adapters.with_room(of(Lora(rank, 4.0)), options)
        return
    found = adapters.with_room(of(Lora(rank, 4.0)), options)
    assert found.extra == {"enable_lora": True, "max_loras": 3, "max_lora_rank": room, "more": 1}
    assert attrs.evolve(found, extra=options.extra) == options
    merged = VllmOptions()
    assert adapters.with_room(of(Lora(rank, 4.0)), merged) is merged
    assert adapters.with_room(MODEL, options) is options
    places = {**ADAPTED.frozen.places, "model.embed_tokens.weight": False}
    with pytest.raises(ValueError, match=r"adapters of \['model.embed_tokens.weight'\] cannot go to vLLM alone"):
        adapters.with_room(of(Lora(rank, 4.0), places), options)


def test_what_goes_to_vllm_of_a_model_and_its_adapter():
    assert adapters.weights_of(MODEL, PARAMS, LOCAL) is PARAMS
    for alone, expected in ((True, PARAMS), (False, models.merged(ADAPTED, adapter(1)))):
        found = adapters.weights_of(ADAPTED, adapter(1), LOCAL, alone=alone)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) for name, x in expected.items())
    wide = lora_files.stored(ADAPTED, adapter(1))
    found = adapters.factors_of(ADAPTED, adapter(1), LOCAL, torch.bfloat16)
    assert found.keys() == wide.keys()
    assert all(torch.equal(found[name], x.bfloat16()) for name, x in wide.items())
    assert [adapters.changes_something(lora_files.stored(ADAPTED, adapter(i))) for i in (0, 1)] == [False, True]


def test_log_probs_that_lie_apart_on_average_are_no_sync():
    ours = torch.tensor([-1.0, -2.0])
    compare_log_probs(ours, ours + torch.tensor([0.0015, 0.0]), "float32")
    compare_log_probs(ours, ours + torch.tensor([0.5, 0.0]), "bfloat16")
    for far in ([0.0025, 0.0], [1.0, -1.0], [torch.nan, 0.0]):
        with pytest.raises(SyncError, match=r"vLLM's log-probs of 2 tokens lie .* 0.001 is allowed"):
            compare_log_probs(ours, ours + torch.tensor(far), "float32")


def test_rows_that_vllm_cannot_answer_are_refused():
    """A row may be as long as vLLM's limit, and padding may hold any token."""
    prompts = make_prompts((2, 4))
    prompts = attrs.evolve(prompts, tokens=prompts.tokens.where(prompts.attention_mask, 99))
    ask = Ask(prompts, Sampling(max_tokens=6, stop_token_ids=(30,)), Key(0))
    check_rows(ask, [2, 4], [6, 5], size=31, limit=9)
    with pytest.raises(ValueError, match="the longest prompt has 4 tokens; with max_tokens = 5 a row may reach 9, but"):
        check_rows(ask, [2, 4], [6, 5], size=31, limit=8)
    top = int(prompts.tokens[prompts.attention_mask].max())
    with pytest.raises(ValueError, match=f"beyond the model's vocabulary of {top} tokens"):
        check_rows(attrs.evolve(ask, sampling=Sampling()), [2, 4], [6, 5], size=top, limit=9)
    with pytest.raises(ValueError, match=r"stop_token_ids \[30\]"):
        check_rows(ask, [2, 4], [6, 5], size=30, limit=9)
