"""What settings name is opened part by part, once, and one error names all that is wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo.assembly import inputs as inputs_module
from fppo.assembly import rows as rows_module
from fppo.assembly.checks import EVALUATE, IMITATE, TRAIN, check_functions
from fppo.assembly.inputs import Inputs, SeveralErrors, attempt
from fppo.batch import Scored
from fppo.data.read import Row
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer
from fppo.rollout import saved
from fppo.settings import files
from fppo.settings.train import DataSettings
from fppo_kernels.table import Kernels
from tests import tiny, tiny_run
from tests.assembly.log import Log

ROWS: Any = rows_module
CPU = torch.device("cpu")


# the record


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    return tmp_path


def refused(settings: Any, *parts: Any, **how: Any) -> list[str]:
    """What is wrong with settings, each line up to its first colon."""
    with pytest.raises(files.SettingsError) as caught:
        Inputs(settings=settings, **how).need(*parts)
    return [line.split(":")[0] for line in caught.value.problems]


NONE = "tests.rewards.functions:none"
WRONG = {
    "model__attention": NONE,
    "actor__loss": NONE,
    "algorithm__advantage": NONE,
    "reward__functions": [NONE],
    "log__observers": [NONE],
    "rollout__from": "nowhere",
    "rollout__gap": "off",
    "data__path": ["nowhere.jsonl"],
    "model__ref_path": "nowhere",
    "model__lora__rank": 2,
    "model__lora__targets": ["nothing"],
}


def test_one_error_names_all_that_is_wrong_in_the_order_of_what_is_opened(task):
    assert refused(tiny_run.settings(task, **WRONG), *TRAIN) == [
        "model.attention 'tests.rewards.functions",
        "actor.loss.name 'tests.rewards.functions",
        "algorithm.advantage.name 'tests.rewards.functions",
        "reward 'tests.rewards.functions",
        "log.observers 'tests.rewards.functions",
        "rollout.from = 'nowhere'",
        "nowhere.jsonl",
        "model.ref_path",
        "model.lora.targets",
    ]


def test_an_evaluation_and_a_supervised_run_name_what_they_read(task):
    shown = {"data__eval_path": ["none.jsonl"], "sft__response": "answer", "sft__optimizer": NONE}
    settings = tiny_run.settings(task, **(WRONG | shown))
    kernels = "model.attention 'tests.rewards.functions"
    assert refused(settings, *EVALUATE, trains=False) == [kernels, "reward 'tests.rewards.functions", "none.jsonl"]
    assert refused(settings, *IMITATE) == [
        kernels,
        "sft.optimizer.name 'tests.rewards.functions",
        "log.observers 'tests.rewards.functions",
        "model.lora.targets",
        "nowhere.jsonl",
        "none.jsonl",
    ]


@pytest.mark.parametrize("parts", [TRAIN, EVALUATE, IMITATE], ids=["train", "evaluate", "imitate"])
def test_without_a_tokenizer_nothing_is_said_of_what_it_would_read(task, parts):
    changes = {"model__tokenizer": "./nowhere", "data__eval_path": ["none.jsonl"], "model__lora__rank": 2}
    settings = tiny_run.settings(task, **changes, model__lora__targets=["nothing"])
    assert refused(settings, *parts, trains=parts is not EVALUATE) == ["model.tokenizer"]


def lawless(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
    """A policy loss of which tokens outside the mask are a part."""
    return log_probs * advantages * torch.arange(log_probs.shape[1]), {}


@pytest.mark.slow
def test_laws_are_checked_where_the_run_wants_it_and_nothing_is_wrong_with_its_functions(task):
    own, law = {"actor__loss": "tests.assembly.test_opened:lawless"}, "actor.loss.name = 'tests.assembly.test_opened"
    assert refused(tiny_run.settings(task, **own, data__path=["no.jsonl"]), *TRAIN) == [law, "no.jsonl"]
    two = tiny_run.settings(task, **own, reward__functions=[NONE])
    assert refused(two, *TRAIN) == ["reward 'tests.rewards.functions"]
    for how in ({"check": False}, {}):
        settings, kernels = tiny_run.settings(task, **own, **how), None if how else Kernels.named()
        inputs = Inputs(settings=settings, own_kernels=kernels, own_device=CPU).need(*TRAIN)
        assert (len(inputs.prompts), inputs.device) == (24, CPU)


def test_a_part_is_opened_once_and_only_if_it_is_used(task, monkeypatch):
    log, tokenizer = Log(monkeypatch, inputs_module), character_tokenizer(CHARACTERS)
    log.stub("load_tokenizer", tokenizer)
    log.stub("load_prompts", "prompts")
    inputs = Inputs(settings=tiny_run.settings(task, data__eval_path=[]), pads=False)
    assert log.every == []
    assert [inputs.prompts, inputs.prompts, inputs.texts, inputs.held_out] == ["prompts", "prompts", tokenizer, None]
    settings = inputs.settings
    assert log.every == [
        ("load_tokenizer", (settings.model, settings.data), {"pads": False}),
        ("load_prompts", (settings.data, tokenizer, None), {}),
    ]


def test_a_part_that_cannot_be_opened_is_tried_once_and_raises_the_same_error_again(task):
    inputs = Inputs(settings=tiny_run.settings(task, log__observers=["no_such_module:f"]))
    with pytest.raises(ValueError, match="no_such_module") as first:
        _ = inputs.observers
    with pytest.raises(files.SettingsError) as caught:
        inputs.need(Inputs.observers, Inputs.device, Inputs.observers)
    assert len(caught.value.problems) == 1
    assert caught.value.__cause__ is first.value


def test_all_checks_are_made_and_each_error_is_kept_once():
    error, others = ValueError("a"), [FileNotFoundError("b"), ValueError("a")]

    def fail(error: Exception) -> None:
        raise error

    def checks() -> Any:
        yield lambda: 3
        yield partial(fail, error)
        yield lambda: iter([partial(fail, others[0]), partial(fail, error)])
        yield partial(fail, others[1])
        raise SeveralErrors([error])

    with pytest.raises(SeveralErrors) as caught:
        attempt(checks())
    assert [id(x) for x in caught.value.errors] == [id(x) for x in (error, *others)]
    with pytest.raises(KeyError):
        attempt([partial(fail, KeyError("c"))])
    attempt([])


# the prompts


@pytest.mark.parametrize("taught", [None, "hint"])
def test_prompts_are_read_and_encoded_as_their_section_says(monkeypatch, taught):
    log = Log(monkeypatch, ROWS)
    rows = [Row("d", 1, {"hint": "x"}, "d")]
    log.stub("read_data", rows)
    log.stub("chat_options")
    encoded: list[Any] = []

    @attrs.frozen
    class Encoded:
        ids: tuple[str, ...]
        tokens: tuple[tuple[int, ...], ...]
        extras: tuple[dict[str, Any], ...] = ()

    def encode(*args: Any, **named: Any) -> Encoded:
        encoded.append((args, named))
        if len(encoded) == 1:
            return Encoded(("b", "a"), ((1,), (2,)), ({"x": 1}, {"x": 2}))
        return Encoded(("a", "c", "b"), ((5,), (6,), (7, 8)))

    monkeypatch.setattr(ROWS.data, "encode_rows", encode)
    section = DataSettings(max_prompt_tokens=9, over_long="drop", teacher_prompt=taught, teacher_prompt_tokens=30)
    section = attrs.evolve(section, pad_token="<pad>")
    found = ROWS.load_prompts(section, "words", "images")
    problems = log.of("read_data")[0][1]
    assert log.of("read_data")[0][0] == section
    assert log.of("chat_options") == ((section,), {})
    common: dict[str, Any] = {"pad_token": "<pad>", "chat": "<chat_options>"}
    own = {"fields": section.fields, "images": "images", "problems": problems, "max_prompt_tokens": 9}
    assert encoded[0] == ((rows, "words"), {**common, **own, "over_long": "drop"})
    if taught is None:
        assert (len(encoded), found.extras) == (1, ({"x": 1}, {"x": 2}))
        return
    fields = attrs.evolve(section.fields, prompt="hint")
    assert encoded[1:] == [((rows, "words"), {**common, "fields": fields, "max_prompt_tokens": 30})]
    name = ROWS.TEACHER_PROMPT
    assert found.extras == ({"x": 1, name: [7, 8]}, {"x": 2, name: [5]})
    assert (found.ids, found.tokens) == (("b", "a"), ((1,), (2,)))


@pytest.mark.parametrize(("limit", "kept"), [(None, 24), (3, 3), (24, 24), (30, 24)])
def test_held_out_prompts_are_the_first_of_their_own_rows(task, limit, kept):
    inputs = Inputs(settings=tiny_run.settings(task, eval__max_prompts=limit))
    assert [len(inputs.prompts), len(inputs.held_out)] == [24, kept]
    assert inputs.prompts.ground_truths[:3] == ("0", "4", "8")
    assert inputs.held_out.ground_truths[:3] == ("1", "5", "9")
    assert Inputs(settings=tiny_run.settings(task, data__eval_path=[])).held_out is None


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(("count", "most", "held_out"), [(0, None, None), (5, None, 5), (5, 4, 4), (3, 4, 3)])
def test_prompts_are_rows_or_those_of_an_environment(task, rows, count, most, held_out):
    """Held-out ones are the environment's where it has some, else those of rows."""
    world = {"name": "tests.rollout.environments:Count", "eval_episodes": count} | ({} if rows else {"episodes": 11})
    changes = {f"rollout__environment__{name}": x for name, x in world.items()} | {"eval__max_prompts": most}
    changes |= {} if rows else {"data__path": [], "data__eval_path": []}
    inputs = Inputs(settings=tiny_run.settings(task, **changes))
    assert len(inputs.prompts) == (24 if rows else 11)
    found = inputs.held_out and len(inputs.held_out)
    assert found == (held_out if count else 24 if rows else None)


def drawn_anew(prompts: Any, epoch: int, key: Key) -> list[int]:
    """An order of ones own that its key alone decides."""
    return torch.randperm(len(prompts), generator=key.generator()).tolist()


def test_an_order_of_ones_own_is_another_for_another_seed(task):
    own = {"data__sampler": f"{__name__}:drawn_anew"}
    found = [Inputs(settings=tiny_run.settings(task, seed=seed, **own)).drawing.order for seed in (3, 3, 4)]
    one, again, other = (list(order(0)) for order in found)
    assert one == again != other
    assert list(found[0](1)) != one


def test_saved_rollouts_have_as_many_rows_as_the_batches_that_they_are(task):
    saved.write(batches.narrow(Scored, tiny.experience(0, 8)), task / "saved", 1)
    given = {"steps": 1, "rollout__from": str(task / "saved"), "rollout__gap": "off"}
    Inputs(settings=tiny_run.settings(task, **given)).need(check_functions)
    fewer = {"rollout__batch_size": 4, "actor__mini_batch_size": 4, "critic__mini_batch_size": 4}
    (said,) = refused(tiny_run.settings(task, **given, **fewer), check_functions)
    assert said.endswith("holds 8 rows; give rollout.batch_size = 8")


def test_held_out_rows_are_named_by_settings_of_their_own():
    section = DataSettings(path=("t",), split="a", rows="m:t", eval_path=("e",), eval_split="b", eval_rows="m:e")
    assert rows_module.held_out_of(section) == attrs.evolve(section, path=("e",), split="b", rows="m:e")


def test_an_order_of_ones_own_has_a_key_for_each_epoch(monkeypatch):
    seen: list[Any] = []

    def own(prompts: Any, epoch: int, key: Key) -> list[int]:
        seen.append((prompts, epoch, key))
        return [2, 0, 1] if epoch % 2 else [1, 2, 0]

    monkeypatch.setattr(ROWS, "imported", lambda name, of: own if (name, of) == ("m:o", "data.sampler") else None)
    key, prompts = Key(4).fold("data"), "abc"
    order = ROWS.order_of("m:o", prompts, key)
    assert [list(order(epoch)) for epoch in (0, 1, 1, 0, 2)] == [[1, 2, 0], [2, 0, 1], [2, 0, 1], [1, 2, 0], [1, 2, 0]]
    assert seen == [(prompts, epoch, key.fold("epoch", epoch)) for epoch in (0, 1, 2)]
    assert ROWS.order_of(None, prompts, key) is None
