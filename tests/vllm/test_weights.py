"""What vLLM holds is what the trainer has: after every sync, and after none that went wrong."""

import attrs
import pytest
import torch

from fppo import models
from fppo.key import Key
from fppo.models import Lora
from fppo.rollout import sync
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.sync import SyncError
from fppo.rollout.vllm import engine as engines
from fppo.rollout.vllm.engine import VllmEngine, VllmOptions
from tests.rollout.test_embedded import make_prompts
from tests.vllm.conftest import forks
from tests.vllm.families import make

ROWS = [[5, 6, 7, 40, 60, 0, 1, 12, 9, 33], [59, 58, 3, 3, 3, 17, 22, 9, 41, 8]]


def trainer_log_probs(model, params, rows=ROWS):
    tokens = torch.tensor(rows)
    attend = models.padded_attention(torch.ones(1, tokens.shape[1], dtype=torch.bool))
    head = models.output_head(model, params)
    actual = []
    for row in tokens:
        hidden = models.hidden_states(model, params, row, torch.arange(len(row)), attend=attend)
        logits = hidden[:-1] @ head.weight.T
        actual.append(logits.log_softmax(-1).gather(1, row[1:, None])[:, 0])
    return torch.stack(actual)


def gap(engine, model, params, start=1):
    return float((engine.log_probs(ROWS, start) - trainer_log_probs(model, params)[:, start - 1 :]).abs().max())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen2-tied", "gpt2"])
def test_after_every_sync_log_probs_are_the_trainers(name, lent):
    with lent(name) as (engine, model):
        for version in range(3):
            _, params = make(name, seed=version)
            done = engine.sync(params, version=version)
            assert (done.version, done.tensors) == (version, len(params))
            assert done.num_bytes == sum(x.nbytes for x in params.values())
            assert engine.version == version
            assert gap(engine, model, params) < 1e-5
            assert gap(engine, model, params, start=6) < 1e-5
        half = {key: x.bfloat16() for key, x in params.items()}
        engine.sync(half, version=3)
        assert gap(engine, model, {key: x.float() for key, x in half.items()}) < 1e-5


def test_adapters_are_merged_for_each_version_and_only_what_they_change_is_sent_again(lent):
    model, params = make("qwen2")
    adapted, adapter = models.adapt(model, params, Lora(2, 4.0), key=Key(0))
    places = adapted.frozen.places
    with lent(model=adapted, send="changed") as (engine, _):
        for version in range(3):
            adapter = {
                name: x + 0.1 * version * torch.sin(torch.arange(x.numel())).view_as(x) for name, x in adapter.items()
            }
            done = engine.sync(adapter, version=version)
            assert len(places) <= done.tensors <= len(params)
            assert (done.tensors == len(params)) == (version == 0)
            assert gap(engine, model, models.merged(adapted, adapter)) < 1e-5
        ask = Ask(make_prompts(), Sampling(max_tokens=4), Key(0), version=3)
        engine.generate(adapter, ask)
        held = engine._weights
        engine.generate(adapter, ask)
        assert engine._weights is held  # the same factors under the same version are not merged again
        assert gap(engine, model, params) > 1e-3


@pytest.mark.parametrize(("name", "host"), [("qwen2", "local"), ("qwen2-tied", "process")])
def test_an_adapter_goes_alone_beside_a_base_that_is_sent_once(name, host, monkeypatch):
    model, params = make(name)
    adapted, adapter = models.adapt(model, params, Lora(2, 4.0, scaling="rslora"), key=Key(0))
    options = VllmOptions(cache_gb=0.05, max_rows=16, adapter="alone", host=host)
    with forks(), VllmEngine(adapted, pad_token_id=0, options=options) as engine:
        for version in range(3):
            adapter = {
                name: x + 0.1 * version * torch.sin(torch.arange(x.numel())).view_as(x) for name, x in adapter.items()
            }
            done = engine.sync(adapter, version=version)
            assert done.tensors == len(adapter) + (len(params) if version == 0 else 0)
            assert gap(engine, model, models.merged(adapted, adapter)) < 1e-5
            assert engine._probed == (version > 0)  # while B is 0, nothing tells an adapter from none
        assert gap(engine, model, params) > 1e-3
        engine.generate(adapter, Ask(make_prompts(), Sampling(max_tokens=4), Key(0), version=3))
        held = engine._delivered
        engine.generate(adapter, Ask(make_prompts(), Sampling(max_tokens=4), Key(1), version=3))
        assert engine._delivered == held  # the same factors under the same version do not go again
        call = engine._host.call

        def lossy(method, *arguments):
            if method == "fppo_take_adapter":
                number, config, factors = arguments
                first = next(iter(factors))
                arguments = (number, config, {**factors, first: factors[first] + 1e-6})
            return call(method, *arguments)

        monkeypatch.setattr(engine._host, "call", lossy)
        with pytest.raises(SyncError, match="lora_A"):
            engine.sync(adapter, version=4)
        assert engine.version is None
        monkeypatch.undo()
        assert engine.sync(adapter, version=4).tensors == len(adapter) + len(params)
        assert gap(engine, model, models.merged(adapted, adapter)) < 1e-5


def test_an_adapter_that_is_lost_or_comes_twice_is_noticed_at_the_first_step(monkeypatch):
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    model, params = make("qwen2")
    adapted, adapter = models.adapt(model, params, Lora(2, 4.0), key=Key(0))
    adapter = {name: x + 0.1 * torch.cos(torch.arange(x.numel())).view_as(x) for name, x in adapter.items()}
    options = VllmOptions(cache_gb=0.05, max_rows=16, adapter="alone")
    with VllmEngine(adapted, pad_token_id=0, options=options) as engine:
        host, weights_of = engine._host, engines.weights_of
        generate, call = host.generate, host.call

        def noticed(message, owner, name, fault):
            monkeypatch.setattr(owner, name, fault)
            with pytest.raises(SyncError, match=message):
                engine.sync(adapter, version=0)
            assert engine.version is None
            monkeypatch.undo()

        def without(method, *arguments):  # a module whose factors are left behind
            if method == "fppo_take_adapter":
                number, config, factors = arguments
                arguments = (number, config, {name: x for name, x in factors.items() if "0.mlp.up_proj" not in name})
            return call(method, *arguments)

        differ = r"log-probs of 8 tokens lie .* from the model's"
        bare = lambda request, keep: generate(attrs.evolve(request, adapter=None), keep)  # noqa: E731
        noticed(differ, host, "generate", bare)  # it came, and no row is asked with it
        noticed(differ, engines, "weights_of", lambda *x, alone=False: weights_of(*x))  # it is in the base as well
        noticed(r"missing: .*0\.mlp\.up_proj", host, "call", without)
        noticed(r"missing: .*lora_A", engines, "deliver", lambda *_: {})  # it never left
        assert engine.sync(adapter, version=0).tensors == len(adapter) + len(params)
        assert gap(engine, model, models.merged(adapted, adapter)) < 1e-5
        adapter = {name: x * 2 for name, x in adapter.items()}  # it comes, and vLLM goes on with the factors before
        noticed(r"other factors of .*down_proj", BaseLinearLayerWithLoRA, "set_lora", lambda *_: None)


def test_adapters_that_vllm_has_not_are_refused_by_name():
    for name, targets, words in (
        ("qwen2", ("embed_tokens",), "embed_tokens"),
        ("qwen3_moe", ("all-linear",), "experts"),
    ):
        model, params = make(name)
        adapted, _ = models.adapt(model, params, Lora(2, 4.0, targets), key=Key(0))
        with pytest.raises(ValueError, match=rf"{words}.* cannot go to vLLM alone"):
            VllmEngine(adapted, pad_token_id=0, options=VllmOptions(adapter="alone"))


def test_a_dropped_or_renamed_tensor_is_named_whichever_it_is(qwen2):
    engine, model = qwen2
    _, params = make("qwen2", seed=9)
    for name in params:
        rest = {key: x for key, x in params.items() if key != name}
        with pytest.raises(SyncError, match=rf"missing: {name}$"):
            engine.sync(rest, version=1)
        with pytest.raises(SyncError, match=rf"missing: {name}; unknown: {name}2$"):
            engine.sync({**rest, f"{name}2": params[name]}, version=1)
        assert engine.version is None
    engine.sync(params, version=1)
    assert gap(engine, model, params) < 1e-5


def test_a_renaming_that_does_not_fit_is_named(lent):
    def wrong(name, x):
        return [] if name.endswith("k_proj.bias") else [(name.replace("up_", "op_"), x)]

    with (
        lent(rename=wrong) as (engine, _),
        pytest.raises(SyncError, match=r"missing: model.layers.0.mlp.up_proj.weight, .*unknown: .*op_proj"),
    ):
        engine.sync(make("qwen2")[1], version=0)


def test_tensors_under_each_others_names_are_noticed(lent):
    """All names and digests are right; the log-probs are not."""

    def swapped(name, x):
        other = {"q_proj": "o_proj", "o_proj": "q_proj"}
        part = name.split(".")[-2]
        return [(name.replace(part, other.get(part, part)) if name.endswith("weight") else name, x)]

    with (
        lent(rename=swapped) as (engine, _),
        pytest.raises(SyncError, match=r"log-probs of 8 tokens lie .* from the model's"),
    ):
        engine.sync(make("qwen2")[1], version=0)


def test_a_tensor_of_another_shape_does_not_load_and_the_next_sync_mends_it(qwen2):
    engine, model = qwen2
    _, params = make("qwen2", seed=9)
    name = "model.layers.0.mlp.up_proj.weight"
    engine._rename = lambda key, x: [(key, x[1:] if key == name else x)]
    with pytest.raises(SyncError, match="vLLM could not load the weights"):
        engine.sync(params, version=1)
    engine._rename = sync.hf_weight_loader
    engine.sync(params, version=1)
    assert gap(engine, model, params) < 1e-5


@pytest.mark.parametrize("host", ["local", "process"])
def test_what_changes_on_the_way_is_named_and_the_next_sync_mends_it(host, lent, monkeypatch):
    with lent(options={"host": host}) as (engine, model):
        _, params = make("qwen2", seed=1)
        engine.sync(params, version=1)
        take_in = engine._host.take_in
        wrong = "model.layers.1.mlp.gate_proj.weight"

        def damaged(tensors):
            actual = dict(tensors)
            if wrong in actual:
                actual[wrong] = actual[wrong].clone()
                actual[wrong][3, 5] += 1e-6
            return actual

        def lost(tensors):
            return {name: x for name, x in tensors.items() if name != wrong}

        for harm, message in ((damaged, "changed on the way"), (lost, "missing")):
            monkeypatch.setattr(engine._host, "take_in", lambda tensors, harm=harm: take_in(harm(tensors)))
            with pytest.raises(SyncError, match=f"{message}: {wrong}$"):
                engine.sync(params, version=2)
            assert engine.version is None
        monkeypatch.undo()
        engine.sync(params, version=2)
        assert gap(engine, model, params) < 1e-5
        # and digested as where the trainer's weights are on a GPU and come to the engine through the host's memory
        monkeypatch.setattr(sync, "digest_method", lambda tensors: "sums")
        _, params = make("qwen2", seed=2)
        engine.sync(params, version=3)
        assert gap(engine, model, params) < 1e-5


def test_only_what_changed_is_sent_with_what_vllm_fuses_it_with(lent):
    frozen = frozenset({"model.embed_tokens.weight"})
    with lent(send="changed", frozen=frozen) as (engine, model):
        _, params = make("qwen2", seed=1)
        assert engine.sync(params, version=0).tensors == len(params)
        assert engine.sync(params, version=1).tensors == 0
        later = dict(params)
        later["model.layers.0.self_attn.k_proj.bias"] = params["model.layers.0.self_attn.k_proj.bias"] + 1
        later["model.norm.weight"] = params["model.norm.weight"] * 2
        assert engine.sync(later, version=2).tensors == 7  # q, k, v weights and biases; the norm
        assert gap(engine, model, later) < 1e-5
        ignored = {**later, "model.embed_tokens.weight": params["model.embed_tokens.weight"] * 2}
        assert engine.sync(ignored, version=3).tensors == 0
        assert gap(engine, model, later) < 1e-5


def test_other_tensors_under_the_same_version_are_not_overlooked(qwen2):
    engine, model = qwen2
    for seed in (1, 2):
        _, params = make("qwen2", seed=seed)
        engine.generate(params, Ask(make_prompts(), Sampling(max_tokens=2), Key(0), version=7))
        assert gap(engine, model, params) < 1e-5


@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2"])
def test_a_tied_head_follows_its_embedding_where_only_changes_are_sent(name, lent):
    with lent(name, send="changed") as (engine, model):
        _, params = make(name, seed=1)
        engine.sync(params, version=0)
        for version, part in enumerate(["norm", "embed"] if name != "gpt2" else ["ln_f", "wte"], start=1):
            params = {key: x * 1.5 if part in key else x for key, x in params.items()}
            assert 0 < engine.sync(params, version=version).tensors < len(params)
            assert gap(engine, model, params) < 1e-5
