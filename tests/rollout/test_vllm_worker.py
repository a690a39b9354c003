"""Weights and adapters that come to vLLM's workers, where stand-ins take vLLM's own part."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from fppo.rollout.sync import digest
from fppo.rollout.vllm.host import Answer
from tests.rollout.vllm_stand_in import worker_of


class Attention(nn.Module):
    """A block whose products are fused."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(2, 6), nn.Linear(2, 2, bias=False)
        self.experts = nn.Linear(2, 2)
        self.inner = nn.Module()
        self.inner.experts = nn.Module()
        self.inner.experts.one = nn.Linear(2, 2)


class Whole(nn.Module):
    """A model that takes weights by their checkpoint names, and notes what it was loaded."""

    packed_modules_mapping: ClassVar = {"gate_up": ["gate", "up"]}

    def __init__(self):
        super().__init__()
        self.attn, self.gate_up = Attention(), nn.Linear(2, 4, bias=False)
        self.base = nn.Module()
        self.base.base_layer = nn.Linear(2, 2, bias=False)
        self.loads = []

    def load_weights(self, stream):
        came = dict(stream)
        self.loads.append({name: x.clone() for name, x in came.items()})
        return {name.replace("gate.", "gate_up.").replace("w.", "base.base_layer.") for name in came}


@pytest.fixture
def worker(monkeypatch):
    log, given = [], []

    @contextlib.contextmanager
    def current(config):
        log.append(("enter", config))
        yield
        log.append("leave")

    def from_lora_tensors(number, tensors, helper, **how):
        given.append((number, helper, how))
        names = sorted({name.rpartition(".lora_")[0] for name in tensors})
        loras = {
            name: SimpleNamespace(
                lora_a=tensors[f"{name}.lora_A.weight"], lora_b=tensors[f"{name}.lora_B.weight"], scaling=0.5
            )
            for name in names
        }
        return SimpleNamespace(number=number, loras=loras)

    made = worker_of(
        monkeypatch,
        set_current_vllm_config=current,
        initialize_layerwise_reload=lambda model: log.append("begin"),
        finalize_layerwise_reload=lambda model, config: log.append(("end", config)),
        LoRAModel=SimpleNamespace(from_lora_tensors=from_lora_tensors),
        PEFTHelper=SimpleNamespace(from_dict=lambda fields: ("helper", fields)),
    )
    made.log, made.given = log, given
    return made


def extension(worker, model, rank=0):
    made = worker.Extension()
    made.rank, made.device = rank, torch.device("cpu")
    made.vllm_config = SimpleNamespace(model_config="of the model")
    made.start_weight_update = lambda: worker.log.append("start")
    made.finish_weight_update = lambda: worker.log.append("finish")
    made.model_runner = SimpleNamespace(
        get_model=lambda: model, reset_lora_state=lambda: worker.log.append("reset adapters")
    )
    return made


def test_names_are_those_of_the_checkpoint_by_module(worker):
    names = worker.checkpoint_names(Whole())
    assert names == {
        "attn.qkv_proj": [
            f"attn.{part}.{kind}" for kind in ("weight", "bias") for part in ("q_proj", "k_proj", "v_proj")
        ],
        "attn.o_proj": ["attn.o_proj.weight"],
        "gate_up": ["gate.weight", "up.weight"],
        "base": ["base.weight"],
    }
    made = extension(worker, Whole())
    assert made.fppo_names(["a", "b"]) == (names, {"a": "a", "b": "b"})
    model = Whole()
    model.hf_to_vllm_mapper = SimpleNamespace(
        get_rename_mapper=lambda: SimpleNamespace(map_name=lambda name: {"a": "x.a"}.get(name))
    )
    assert extension(worker, model).fppo_names(["a", "b"])[1] == {"a": "x.a", "b": "b"}


@pytest.mark.parametrize("transfer", [False, True])
@pytest.mark.parametrize("how", ["bytes", "sums"])
def test_weights_that_come_are_digested_and_what_was_not_filled_is_named(worker, transfer, how):
    model = Whole()
    made = extension(worker, model)
    config = made.vllm_config
    first, second = (
        {"attn.o_proj.weight": torch.ones(2, 2)},
        {"w.weight": torch.zeros(2, 2), "gate.weight": torch.ones(1)},
    )
    for _ in range(2):  # another load begins with nothing
        worker.log.clear()
        model.loads.clear()
        made.fppo_begin_load(how, transfer)
        for each in (first, second):
            if transfer:
                model.load_weights(each.items())
            else:
                made.fppo_take_in(each)
        got, unfilled = made.fppo_end_load()
        assert got == {name: digest(x, how) for name, x in {**first, **second}.items()}
        every = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        assert unfilled == sorted(every - {"attn.o_proj.weight", "gate_up.weight", "base.weight"})
        assert [[*each] for each in model.loads] == [[*first], [*second]]
        assert "load_weights" not in vars(model)
        within = [("enter", config), "leave"]
        if transfer:
            assert worker.log == ["start", "finish"]
        else:
            begin = [("enter", config), "begin", "leave"]
            end = [("enter", config), ("end", "of the model"), "leave", "reset adapters"]
            assert worker.log == [*begin, *within, *within, *end]
        second = {"attn.o_proj.weight": torch.full((2, 2), 3.0), **second}


def test_a_model_that_tells_nothing_of_what_it_filled_has_filled_nothing(worker):
    model = Whole()
    model_type = type("Silent", (Whole,), {"load_weights": lambda self, stream: [*stream] and None})
    model.__class__ = model_type
    made = extension(worker, model)
    made.fppo_begin_load("bytes", False)
    made.fppo_take_in({"gate.weight": torch.ones(1)})
    got, unfilled = made.fppo_end_load()
    assert ([*got], "gate_up.weight" in unfilled) == (["gate.weight"], True)


def test_modules_that_share_a_loaded_weight_are_prepared_again(worker):
    prepared = []

    def module(name, weight, *, embedding=True):
        made = nn.Module()
        made.weight = weight
        method = SimpleNamespace(process_weights_after_loading=lambda own: prepared.append(name))
        if embedding:
            method.embedding = True
        made.quant_method = method
        return made

    shared, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    model = nn.Module()
    model.embed, model.head = module("embed", shared), module("head", shared)
    model.plain = module("plain", shared, embedding=False)
    model.apart = module("apart", other)
    worker._repack_shared(model, {"embed.weight"})
    assert prepared == ["head"]
    worker._repack_shared(model, {"apart.weight"})
    worker._repack_shared(model, {"embed.weight", "head.weight"})
    assert prepared == ["head"]


class Manager:
    """vLLM's manager of adapters, which holds factors in buffers of its modules."""

    def __init__(self, *, loses=False):
        def stack(*shape):
            return torch.zeros(2, 1, *shape)

        self.modules = {
            name: SimpleNamespace(tp_size=1, lora_a_stacked=(stack(3, 4),), lora_b_stacked=(stack(5, 3),))
            for name in ("up", "down")
        }
        self.packed_modules, self.lora_index_to_id = {}, [None, None]
        self.lora_config = SimpleNamespace(lora_dtype=torch.float32)
        self.model, self.log, self.loses = SimpleNamespace(), [], loses

    def remove_all_adapters(self):
        self.log.append("removed")
        self.lora_index_to_id = [None, None]

    def add_adapter(self, adapter):
        self.log.append(("added", adapter.number))
        self.adapter = adapter

    def activate_adapter(self, number):
        self.log.append(("active", number))
        self.lora_index_to_id[1] = number
        for name, x in self.adapter.loras.items():
            module = self.modules[name]
            module.lora_a_stacked[0][1, 0, :2] = x.lora_a
            module.lora_b_stacked[0][1, 0, :, :2] = x.lora_b * (1.0 if self.loses else x.scaling)


def test_an_adapter_is_held_alone_and_read_back(worker):
    g = torch.Generator().manual_seed(0)
    factors = {
        f"{name}.lora_{kind}.weight": torch.randn(shape, generator=g)
        for name in ("up", "down")
        for kind, shape in (("A", (2, 4)), ("B", (5, 2)))
    }
    manager = Manager()
    made = extension(worker, Whole())
    made.model_runner.lora_manager = SimpleNamespace(_adapter_manager=manager)
    assert made.fppo_take_adapter(6, {"r": 2}, factors) == {name: digest(x, "bytes") for name, x in factors.items()}
    assert manager.log == ["removed", ("added", 6), ("active", 6)]
    ((number, helper, how),) = worker.given
    assert (number, helper) == (6, ("helper", {"r": 2}))
    assert how == {"device": "cpu", "dtype": torch.float32, "weights_mapper": None}
    losing = Manager(loses=True)
    made.model_runner.lora_manager = SimpleNamespace(_adapter_manager=losing)
    with pytest.raises(ValueError, match=r"vLLM holds other factors of \['down', 'up'\] than came"):
        made.fppo_take_adapter(7, {"r": 2}, factors)
    beside = {**factors, "head.lora_A.weight": torch.ones(2, 4), "head.lora_B.weight": torch.ones(5, 2)}
    with pytest.raises(ValueError, match=r"vLLM has no adapters of \['head'\]"):
        made.fppo_take_adapter(8, {"r": 2}, beside)


def test_the_first_worker_alone_answers(worker):
    class Draws(worker.KeyedDraws):
        def __init__(self):
            super().__init__(None, torch.device("cpu"), False)
            self.calls = []

        def take(self, row, length):
            self.calls.append((row, length))
            return Answer(*(row, length, 0))

        def drawn(self):
            self.calls.append("drawn")
            return [1]

    for rank in (0, 1):
        made, draws = extension(worker, Whole(), rank), Draws()
        made.model_runner.input_batch = SimpleNamespace(
            logitsprocs=SimpleNamespace(non_argmax_invariant=[object(), draws])
        )
        taken, drawn = made.fppo_take([(3, 4), (5, 6)]), made.fppo_drawn()
        if rank == 0:
            assert (taken, drawn) == ([Answer(3, 4, 0), Answer(5, 6, 0)], [1])
            assert draws.calls == [(3, 4), (5, 6), "drawn"]
        else:
            assert (taken, drawn) == (None, None)
            assert draws.calls == ["drawn"]


def test_rows_that_are_not_ours_are_left_to_vllm(worker):
    keyed = worker.KeyedDraws(None, torch.device("cpu"), False)
    logits = torch.randn(2, 5)
    assert torch.equal(keyed.apply(logits.clone()), logits)
    assert keyed.is_argmax_invariant() is False
    keyed.update_state(None)
