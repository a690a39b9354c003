"""What opens and builds a supervised run is handed all that settings say, in order: stand-ins note every call."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo.assembly import supervised as supervised_module
from fppo.assembly.inputs import Tried
from fppo.assembly.run import PromptRecord
from fppo.assembly.supervised import COMMAND, SupervisedInputs
from fppo.data import DemonstrationSet
from fppo.data.conversations import Answers, Imitated, digest_of_demonstrations
from fppo.key import Key
from fppo.models.model import Model
from fppo.pipeline.supervised import EvaluateLoss, Imitation
from fppo.quickstart import small_model
from fppo.runtime.mesh import LOCAL
from fppo.settings.model import ModelSettings
from fppo.settings.placement import AxesSettings
from fppo.settings.sft import SftSettings
from fppo.settings.train import DataSettings, EvalSettings, LogSettings, sized_for_sft
from fppo.steps.outputs import Forward
from fppo.steps.supervised import UpdateSupervised
from fppo_kernels.table import Kernels
from tests import tiny_run
from tests.assembly.log import Log

SUPERVISED: Any = supervised_module
CPU = torch.device("cpu")
KERNELS = Kernels.named()
MODEL = small_model(15, width=16, layers=1)
NAMES = {"attention": "model.attention"}


@pytest.fixture
def log(monkeypatch):
    return Log(monkeypatch, SUPERVISED)


@pytest.mark.parametrize("held_out", [True, False])
def test_what_a_supervised_run_reads_is_opened_as_its_sections_say(monkeypatch, log, held_out):
    section, rows, sft = ModelSettings(path="p"), DataSettings(path=("a",)), SftSettings(batch_size=3)
    how, axes, mesh, watch = EvalSettings(max_prompts=5), AxesSettings(tensor=2), attrs.evolve(LOCAL), LogSettings()
    for name in ("optimizer_of", "load_tokenizer", "policy_generation", "load_demonstrations", "config_place"):
        log.stub(name)
    for name in (
        "check_export",
        "config_of",
        "check_mesh",
        "check_kernels",
        "bare_model",
        "_check_ids",
        "_check_positions",
        "positions",
    ):
        log.stub(name)
    log.stub("kernels_of", KERNELS)
    log.stub("watching_of", {"loggers": {"a": 1}, "observers": {"b": 2}})
    monkeypatch.setattr(SUPERVISED, "_held_out", lambda *args: seen.append(args) or ("kept back" if held_out else None))
    of_data = Log(monkeypatch, SUPERVISED.data)
    of_data.stub("check_vocabulary")
    of_data.stub("vocabulary_size", 77)
    seen: list[Any] = []
    made = SUPERVISED.read_supervised(
        section, rows, sft, how, watch, names=NAMES, axes=axes, mesh=mesh, device=CPU, tried=Tried()
    )
    words, config = "<load_tokenizer>", "<config_of>"
    others = [] if not held_out else ["kept back"]
    assert log.every == [
        ("kernels_of", (NAMES,), {}),
        ("optimizer_of", (sft.optimizer, 1), {"setting": "sft.optimizer"}),
        ("watching_of", (watch,), {}),
        ("load_tokenizer", (section, rows), {}),
        ("policy_generation", (section, rows, words), {}),
        ("check_export", (section, words, "<policy_generation>"), {}),
        ("load_demonstrations", (rows, sft, words), {}),
        ("config_place", ("p", "model.path"), {}),
        ("config_of", (section, "<config_place>"), {}),
        ("check_mesh", (config, "", mesh), {}),
        ("_check_ids", ("<load_demonstrations>", 77), {}),
        ("positions", (config,), {}),
        ("_check_positions", ("<load_demonstrations>", "<positions>", "p"), {}),
        ("_check_ids", (others[0] if others else None, 77), {}),
        ("positions", (config,), {}),
        ("_check_positions", (others[0] if others else None, "<positions>", "p"), {}),
        ("bare_model", (section,), {}),
        ("check_kernels", (NAMES, "<bare_model>", axes), {}),
    ]
    assert seen == [(rows, sft, 5, words)]
    assert of_data.of("check_vocabulary") == ((words, {"actor": config}), {})
    assert of_data.calls["vocabulary_size"] == [((config,), {})] * 2
    whole: dict[str, Any] = {"device": CPU, "kernels": KERNELS, "tokenizer": words, "rows": "<load_demonstrations>"}
    whole |= {"generation": "<policy_generation>", "loggers": {"a": 1}, "observers": {"b": 2}}
    assert made == SupervisedInputs(**whole, held_out=others[0] if others else None)
    assert made.texts == words


def test_demonstrations_are_read_and_encoded_as_their_sections_say(monkeypatch, log):
    for name in ("read_data", "chat_options"):
        log.stub(name)
    of_data = Log(monkeypatch, SUPERVISED.data)
    of_data.stub("encode_demonstrations")
    section = DataSettings(path=("a",), ground_truth="answer", over_long="drop", pad_token="<pad>")
    sft = SftSettings(response="r", messages="m", turns="last", max_tokens=11)
    assert SUPERVISED.load_demonstrations(section, sft, "words") == "<encode_demonstrations>"
    (given, problems), _ = log.of("read_data")
    assert given == section
    whole = {"fields": attrs.evolve(section.fields, ground_truth=None), "max_tokens": 11, "problems": problems}
    whole |= {"answers": Answers(response="r", messages="m", turns="last"), "chat": "<chat_options>"}
    whole |= {"over_long": "drop", "pad_token": "<pad>"}
    assert of_data.of("encode_demonstrations") == (("<read_data>", "words"), whole)
    assert log.of("chat_options") == ((section,), {})


def a_set(count: int, first: int = 0) -> DemonstrationSet:
    """Demonstrations of lengths that differ, the later halves of their responses to be imitated."""
    rows = [
        Imitated(prompt=(1, *range(2, 2 + n % 3)), response=(*range(3, 5 + n),), mask=(False, *[True] * (n + 1)))
        for n in range(first, first + count)
    ]
    names = [f"row {n}" for n in range(first, first + count)]
    return DemonstrationSet(
        rows=tuple(rows), ids=tuple(names), sources=tuple(f"s{n % 2}" for n in range(count)), pad_token_id=0
    )


@pytest.mark.parametrize(("most", "kept"), [(None, 4), (3, 3), (9, 4)])
def test_held_out_demonstrations_are_the_first_of_their_own_rows(monkeypatch, log, most, kept):
    found = a_set(4)
    log.stub("load_demonstrations", found)
    section = DataSettings(path=("t",), split="a", rows="m:t", eval_path=("e",), eval_split="b", eval_rows="m:e")
    sft = SftSettings(batch_size=3)
    given = SUPERVISED._held_out(section, sft, most, "words")
    assert log.of("load_demonstrations") == (
        (attrs.evolve(section, path=("e",), split="b", rows="m:e"), sft, "words"),
        {},
    )
    parts = {name: getattr(found, name)[:kept] for name in ("rows", "ids", "sources")}
    assert given == attrs.evolve(found, **parts)
    assert SUPERVISED._held_out(DataSettings(path=("t",)), sft, most, "words") is None


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("held_out", [True, False])
def test_a_supervised_run_is_built_of_its_parts(tmp_path, monkeypatch, log, given, held_out):
    changes = {"model__path": "p", "seed": 5, "sft__batch_size": 3, "sft__epochs": 2, "data__shuffle": False}
    changes |= {"data__may_change": True, "module_dirs": ["here"], "sft__optimizer__warmup_steps": 1}
    changes |= {"model__offload": "all", "model__offload_activations": False, "sft__max_tokens": 9}
    settings = tiny_run.settings(tmp_path, **changes)
    resolved_model, seen = attrs.evolve(settings.model, attention="eager"), []
    narrowed = attrs.evolve(settings, model=resolved_model)
    monkeypatch.setattr(SUPERVISED, "resolved", lambda of, device: seen.append((of, device)) or (narrowed, ["chosen"]))
    inputs = SimpleNamespace(device=CPU, kernels=KERNELS, rows=a_set(7), held_out=a_set(4, 3) if held_out else None)
    params = {"w": torch.ones(2)}
    results = {"device_of": torch.device("cuda"), "load_policy": (MODEL, params), "read_supervised": inputs}
    for name in (*results, "search", "supervised_lines", "base_of_role", "bases_of"):
        log.stub(name, results.get(name))
    state = SimpleNamespace(params=params)
    lanes, learned = [], []
    learning = SimpleNamespace(
        loop=SimpleNamespace(micro_batching="micro"),
        offload="all",
        optimizer_on=lambda tools, model: lanes.append((tools, model)) or "optimizer",
        state=lambda *args: learned.append(args) or state,
        measured=lambda update, forward, lane: ("measured", update, forward, lane),
    )
    monkeypatch.setattr(SUPERVISED, "learning_of", lambda *args, **named: lanes.append((args, named)) or learning)
    monkeypatch.setattr(SUPERVISED, "whole_shapes", lambda of, extents: {".w": (of is state, extents is MODEL.extents)})
    monkeypatch.setattr(SUPERVISED, "RunState", lambda **named: named)
    said: list[Any] = []
    mesh = attrs.evolve(LOCAL)
    after, made = SUPERVISED.assemble_supervised(
        settings, mesh=mesh, device=CPU if given else None, announce=said.append
    )
    steps = 5  # twice seven rows by three
    expected = attrs.evolve(settings, model=resolved_model, steps=steps)
    assert after == expected
    assert seen == [(sized_for_sft(settings), CPU if given else None)]
    section, sft, key = resolved_model, settings.sft, Key(5)
    assert log.of("search") == ((("here",),), {})
    args, named = log.of("read_supervised")
    assert args == (section, settings.data, sft, settings.eval, settings.log)
    assert isinstance(named.pop("tried"), Tried)
    names = SUPERVISED.kernels_named(expected)
    device = CPU if given else torch.device("cuda")
    assert named == {"names": names, "axes": settings.mesh, "mesh": mesh, "device": device}
    assert log.calls.get("device_of", []) == ([] if given else [((settings.device, settings.placement), {})])
    counts = {"demonstrations": inputs.rows, "held out": inputs.held_out}
    assert log.of("supervised_lines") == ((CPU, section, counts, steps, 3, ["chosen"]), {})
    assert said == ["<supervised_lines>"]
    assert log.of("load_policy") == ((section, settings.critic, key, mesh, CPU), {})
    ((role, actor), how), (tools, model) = lanes
    assert (role, how["batch_size"], how["steps"]) == ("actor", 3, steps)
    assert (how["offload"], how["offload_activations"]) == ("all", False)
    for name in ("weight_mode", "horizon", "micro_batch_size", "token_budget", "optimizer"):
        assert getattr(actor, name) == getattr(sft, name)
    assert (tools.kernels, tools.lane.device, model) == (KERNELS, CPU, MODEL)
    assert learned == [(params, "optimizer")]
    assert made.run == {"actor": state, "key": key, "bases": "<bases_of>"}
    assert log.of("bases_of") == (({"actor": "<base_of_role>"},), {})
    assert log.of("base_of_role") == ((section, "actor", MODEL), {})
    forward = Forward(MODEL, KERNELS, mesh, remove_padding=section.remove_padding, share_prompts=False)
    update = UpdateSupervised(forward=forward, loop=learning.loop, optimizer="optimizer")  # pyright: ignore
    draw = partial(SUPERVISED._next, inputs.rows, 3, key.fold("data"), CPU, False)
    assert isinstance(made.imitation, Imitation)
    own: Any = made.imitation
    assert (own.draw.func, own.draw.args, own.draw.keywords) == (draw.func, draw.args, {})
    assert own.steps == steps
    assert own.update == ("measured", update, forward, tools.lane)
    sets = {"prompts": inputs.rows, **({"held-out prompts": inputs.held_out} if held_out else {})}
    assert made.drawn == PromptRecord(sets, may_change=True, digests_of=digest_of_demonstrations, made_by=COMMAND)
    assert made.shapes == {".actor.w": (True, True)}
    assert (made.inputs, made.model, made.mesh is mesh, made.device) == (inputs, MODEL, True, CPU)
    assert isinstance(made.model, Model)
    if not held_out:
        assert made.evaluate is None
        return
    assert isinstance(made.evaluate, EvaluateLoss)
    batches, policy = made.evaluate.batches, made.evaluate.policy
    assert (batches.func, batches.args) == (SUPERVISED._batches, (inputs.held_out, 3, CPU))  # pyright: ignore
    assert (policy.forward, policy.micro_batching, policy.temperature) == (forward, "micro", 1.0)  # pyright: ignore


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_all_demonstrations_come_in_order_with_what_is_imitated(size):
    """Prompts on the left and responses on the right of one column, with each row's own mask and source."""
    rows = a_set(5, 1)
    place = 0
    for batch, sources in SUPERVISED._batches(rows, size, CPU):
        for row, source in enumerate(sources):
            given = rows.rows[place]
            real = batch.attention_mask[row]
            assert batch.tokens[row][real].tolist() == [*given.prompt, *given.response]
            width = batch.response_mask.shape[1]
            response = batch.tokens[row, -width:]
            assert response[batch.response_mask[row]].tolist() == [
                token for token, own in zip(given.response, given.mask, strict=True) if own
            ]
            assert source == rows.sources[place]
            place += 1
    assert place == 5


def test_ids_beyond_the_embedding_are_named_with_their_rows():
    row = Imitated(prompt=(1, 2), response=(5, 3), mask=(True, True))
    found: Any = SimpleNamespace(rows=(row, attrs.evolve(row, prompt=(6,))), ids=("line 1", "line 2"))
    supervised_module._check_ids(found, 7)
    for words, named in ((6, ["line 2"]), (5, ["line 1", "line 2"])):
        with pytest.raises(ValueError, match=f"outside the model's vocabulary of {words}") as error:
            supervised_module._check_ids(found, words)
        assert [name for name in found.ids if name in str(error.value)] == named
