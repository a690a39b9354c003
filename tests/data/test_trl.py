"""Data sets in the forms that TRL documents: each is read by settings alone, from lines and from parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from fppo import data
from fppo.settings import files
from fppo.settings.checks import problems
from fppo.settings.train import TrainSettings
from tests.data.rows import tokenizer, write

USER, OTHER = {"role": "user", "content": "1 2"}, {"role": "user", "content": "4"}
ANSWER, WRONG = {"role": "assistant", "content": "3"}, {"role": "assistant", "content": "9"}
SYSTEM = {"role": "system", "content": "x"}
OF_USER = (3, 5, 11, 12, 4, 5)  # user : 1 2 assistant :
# the row, the settings of [data], the prompt's tokens and the true answer
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], Any]] = {
    "prompt-only": ({"prompt": "1 2", "answer": "3"}, {}, (11, 12), "3"),
    "prompt-completion": ({"prompt": "1 2", "completion": " 3"}, {"ground_truth": "completion"}, (11, 12), " 3"),
    "conversational prompt-only": ({"prompt": [USER], "answer": "3"}, {"chat": True}, OF_USER, "3"),
    "conversational prompt-completion": (
        {"prompt": [USER], "completion": [ANSWER]},
        {"chat": True, "ground_truth": "completion.0.content"},
        *(OF_USER, "3"),
    ),
    "conversational language modeling": (
        {"messages": [SYSTEM, USER, ANSWER]},
        {"chat": True, "prompt": "messages", "ground_truth": "messages"},
        *((8, 5, 9, *OF_USER), "3"),
    ),
    "several turns": (
        {"messages": [OTHER, WRONG, USER, ANSWER]},
        {"chat": True, "prompt": "messages", "ground_truth": "messages"},
        *((3, 5, 14, 4, 5, 19, *OF_USER), "3"),
    ),
    "preference": ({"prompt": "1 2", "chosen": "3", "rejected": "9"}, {"ground_truth": "chosen"}, (11, 12), "3"),
    "conversational preference": (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
        {"chat": True, "ground_truth": "chosen.-1.content"},
        *(OF_USER, "3"),
    ),
    "implicit prompt preference": (
        {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        {"chat": True, "prompt": "chosen", "ground_truth": "chosen"},
        *(OF_USER, "3"),
    ),
}
TURNS = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def read(path: Path | str, values: dict[str, Any], **more: Any) -> data.PromptSet:
    section = files.from_dict({"data": values}).data
    words = tokenizer(chat=True)
    words.chat_template = TURNS
    problems = data.Problems()
    rows = data.read_rows(path, problems=problems, **more)
    return data.encode_rows(rows, words, fields=section.fields, problems=problems)


@pytest.mark.parametrize("kind", ["lines", "text", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_gives_prompt_and_answer(tmp_path, form, kind):
    row, values, tokens, answer = FORMS[form]
    if kind == "parquet":
        datasets.Dataset.from_list([row]).to_parquet(path := tmp_path / "a.parquet")
    else:
        cells = {name: x if isinstance(x, str) or kind == "lines" else json.dumps(x) for name, x in row.items()}
        if kind == "text" and "." in values.get("ground_truth", ""):
            pytest.skip("text has no elements")
        path = write(tmp_path / "a.jsonl", [cells])
    prompts = read(path, values)
    assert (prompts.tokens, prompts.ground_truths) == ((tokens,), (answer,))


def test_messages_without_an_answer_are_named(tmp_path):
    values = {"chat": True, "prompt": "messages", "ground_truth": "messages"}
    rows = [
        {"messages": [USER]},
        {"messages": []},
        {"messages": [ANSWER]},
        {"messages": [USER, {**ANSWER, "content": None}]},
    ]
    with pytest.raises(ValueError) as caught:
        read(write(tmp_path / "a.jsonl", rows), values)
    said = str(caught.value)
    assert "a.jsonl:1: field 'messages': does not end with a message of the assistant" in said
    assert "(and 1 more have it)" in said  # the empty list
    assert "a.jsonl:3: field 'messages': no messages" in said
    assert "a.jsonl:4: field 'messages': null" in said


def test_an_answer_in_parts_is_text(tmp_path):
    parts = [{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]
    row = {"messages": [USER, {"role": "assistant", "content": parts}]}
    values = {"chat": True, "prompt": "messages", "ground_truth": "messages"}
    assert read(write(tmp_path / "a.jsonl", [row]), values).ground_truths == ("34",)


@pytest.mark.parametrize("place", ["completion.1.content", "completion.-2.content", "completion.x", "prompt.0"])
def test_an_element_that_is_not_there_is_named(tmp_path, place):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1 2", "completion": [ANSWER]}])
    with pytest.raises(ValueError, match=rf"data\.ground_truth = '{place}': no row has that field"):
        read(path, {"ground_truth": place})


@pytest.fixture
def named(tmp_path, monkeypatch) -> list[dict[str, Any]]:
    """A data set of the hub: the library itself reads it, from files here. What it is called with."""
    write(tmp_path / "train.jsonl", [{"prompt": str(i), "answer": str(i)} for i in range(9)])
    own, calls = datasets.load_dataset, list[dict[str, Any]]()

    def load_dataset(name: str, configuration: str | None, **options: Any) -> Any:
        calls.append({"name": name, "configuration": configuration, **options})
        return own(
            "json", data_files={"train": str(tmp_path / "train.jsonl")}, cache_dir=str(tmp_path / "c"), **options
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_a_stream_gives_the_first_rows_of_the_whole(named):
    whole, some = read("org/sums:main", {}), read("org/sums:main", {}, stream=4)
    assert some.tokens == whole.tokens[:4]
    assert some.ids == whole.ids[:4] == ("sums[train]:1", "sums[train]:2", "sums[train]:3", "sums[train]:4")
    assert some.ground_truths == whole.ground_truths[:4]
    assert some.sources[0] == "org/sums"
    assert read("org/sums:main", {}, stream=100).tokens == whole.tokens
    assert [call.get("streaming", False) for call in named] == [False, True, True]
    assert {(call["name"], call["configuration"]) for call in named} == {("org/sums", "main")}


def test_a_stream_that_breaks_is_one_error(named):
    with pytest.raises(ValueError, match="org/sums: neither a file nor a data set that could be loaded"):
        read("org/sums", {}, stream=3, split="other")


def test_files_are_not_streamed():
    settings = files.replace(TrainSettings(), {"data.path": ["a.jsonl"], "data.stream": 5})
    assert any(str(problem).startswith("data.stream = 5: only data sets by name") for problem in problems(settings))
