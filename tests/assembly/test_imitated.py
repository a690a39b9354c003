"""What builds a supervised run is handed all that settings say, in order: stand-ins note every call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo.assembly import inputs as inputs_module
from fppo.assembly import rows as rows_module
from fppo.assembly import supervised as supervised_module
from fppo.assembly.inputs import Inputs
from fppo.data import DemonstrationSet
from fppo.data.conversations import Answers, Imitated
from fppo.quickstart import small_model
from fppo.settings.sft import SftSettings
from fppo.settings.train import DataSettings, EvalSettings, TrainSettings
from fppo_kernels.table import Kernels
from tests.assembly.log import Log

SUPERVISED: Any = supervised_module
ROWS: Any = rows_module
CPU = torch.device("cpu")
KERNELS = Kernels.named()
MODEL = small_model(15, width=16, layers=1)


@pytest.fixture
def log(monkeypatch):
    return Log(monkeypatch, SUPERVISED)


def test_demonstrations_are_read_and_encoded_as_their_sections_say(monkeypatch):
    log = Log(monkeypatch, ROWS)
    for name in ("read_data", "chat_options"):
        log.stub(name)
    of_data = Log(monkeypatch, ROWS.data)
    of_data.stub("encode_demonstrations")
    section = DataSettings(path=("a",), ground_truth="answer", over_long="drop", pad_token="<pad>")
    sft = SftSettings(response="r", messages="m", turns="last", max_tokens=11)
    assert ROWS.load_demonstrations(section, sft, "words") == "<encode_demonstrations>"
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
def test_held_out_demonstrations_are_the_first_of_their_own_rows(monkeypatch, most, kept):
    found, log = a_set(4), Log(monkeypatch, inputs_module)
    log.stub("load_demonstrations", found)
    log.stub("load_tokenizer", "words")
    section = DataSettings(path=("t",), split="a", rows="m:t", eval_path=("e",), eval_split="b", eval_rows="m:e")
    sft = SftSettings(batch_size=3)
    settings = TrainSettings(data=section, sft=sft, eval=EvalSettings(max_prompts=most))
    given = Inputs(settings=settings).held_out_demonstrations
    assert log.of("load_demonstrations") == (
        (attrs.evolve(section, path=("e",), split="b", rows="m:e"), sft, "words"),
        {},
    )
    parts = {name: getattr(found, name)[:kept] for name in ("rows", "ids", "sources")}
    assert given == attrs.evolve(found, **parts)
    assert Inputs(settings=attrs.evolve(settings, data=DataSettings(path=("t",)))).held_out_demonstrations is None


def test_ids_beyond_the_embedding_are_named_with_their_rows():
    row = Imitated(prompt=(1, 2), response=(5, 3), mask=(True, True))
    found: Any = SimpleNamespace(rows=(row, attrs.evolve(row, prompt=(6,))), ids=("line 1", "line 2"))
    ROWS.check_ids(found, 7)
    for words, named in ((6, ["line 2"]), (5, ["line 1", "line 2"])):
        with pytest.raises(ValueError, match=f"outside the model's vocabulary of {words}") as error:
            ROWS.check_ids(found, words)
        assert [name for name in found.ids if name in str(error.value)] == named
