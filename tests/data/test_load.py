"""Reading and encoding rows, and every way in which they can be wrong."""

from __future__ import annotations

import datetime
import json

import attrs
import pyarrow
import pyarrow.parquet
import pytest

from fppo import data
from fppo.data import read
from tests.data.rows import tokenizer, write

GOOD = [{"prompt": "1 2 3", "answer": "6", "level": 2}, {"prompt": "4 5", "answer": "9", "level": None}]


def load(path, **changes):
    fields = {name: changes.pop(name) for name in attrs.fields_dict(data.Fields) if name in changes}
    words = changes.pop("tokenizer", None) or tokenizer()
    return data.load_prompts(path, words, fields=data.Fields(**fields), **changes)


def test_a_jsonl_file_becomes_prompts(tmp_path):
    path = write(tmp_path / "train.jsonl", [GOOD[0], "", GOOD[1]])
    prompts = load(path)
    assert prompts.tokens == ((11, 12, 13), (14, 15))
    assert prompts.ids == ("train.jsonl:1", "train.jsonl:3")
    assert prompts.ground_truths == ("6", "9")
    assert prompts.sources == ("train", "train")
    assert prompts.extras == ({"level": 2}, {"level": None})
    assert (prompts.pad_token_id, prompts.num_dropped, prompts.num_truncated, prompts.left_out) == (0, 0, 0, ())


def test_every_format_gives_the_same_prompts(tmp_path):
    import datasets

    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "lines.json", GOOD)
    (tmp_path / "array.json").write_text(json.dumps(GOOD, indent=1))
    table = datasets.Dataset.from_list(GOOD)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(tmp_path / "splits"))
    wanted = load(tmp_path / "a.jsonl")
    for name in ("lines.json", "array.json", "a.parquet", "saved", "splits"):
        prompts = load(tmp_path / name)
        assert (prompts.tokens, prompts.ground_truths, prompts.extras) == (
            wanted.tokens,
            wanted.ground_truths,
            wanted.extras,
        ), name
    assert len(load(tmp_path / "splits", split="test")) == 1
    assert len(load([tmp_path / "a.jsonl", tmp_path / "a.parquet"])) == 4
    with pytest.raises(ValueError, match=r"unknown split 'dev'; there are \['test', 'train'\]"):
        load(tmp_path / "splits", split="dev")


def test_a_csv_file_names_its_fields_and_rows_by_the_line_that_they_begin_in(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer,note\r\n1 2 3,6,"a ""b"",\nc"\r\n\r\n"4, 5",9,\r\n')
    prompts = load(path)
    assert prompts.ids == ("a.csv:2", "a.csv:5")
    assert prompts.ground_truths == ("6", "9")
    assert prompts.extras == ({"note": 'a "b",\nc'}, {"note": ""})
    for content, said in (
        (b"prompt,answer\n1,2\n1,2,3\n1\n1,\xff\n", [r"a\.csv:5: not UTF-8"]),
        (b"prompt,answer\n1,2\n1,2,3\n1\n", [r"a\.csv:3: 3 fields, and the first line names 2", r"a\.csv:4: 1 fields"]),
        (b'prompt,answer\n1,2\n1,"2\n', [r"a\.csv:3: not CSV: "]),
        (b"question,answer\n1,2\n", [r"data\.prompt = 'prompt': no row has that field; did you mean 'question'\? "]),
        (b"prompt,answer\n", ["the data set is empty"]),
    ):
        path.write_bytes(content)
        for text in said:
            with pytest.raises(ValueError, match=text):
                load(path)


def test_a_template_takes_fields(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"q": "1 x", "n": 7, "answer": "1"}])
    assert load(path, prompt="Q {q} {n} {{ A").tokens == ((6, 11, 9, 17, 2, 7),)
    assert load(path, prompt="{q}").extras == ({"q": "1 x", "n": 7},)


def test_dots_reach_into_fields(tmp_path):
    row = {"prompt": "1", "reward": {"truth": [1, 2]}, "data_source": "sums", "a.b": "dotted"}
    path = write(tmp_path / "a.jsonl", [row])
    prompts = load(path, ground_truth="reward.truth", source="data_source")
    assert (prompts.ground_truths, prompts.sources) == (([1, 2],), ("sums",))
    assert load(path, ground_truth="a.b", source_name="all").ground_truths == ("dotted",)
    assert load(path, ground_truth=None, source_name="all").sources == ("all",)


def test_chat_takes_text_and_messages(tmp_path):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "1 2"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": "1 2", "answer": "3"}, {"prompt": messages, "answer": "3"}])
    prompts = load(path, chat=True, tokenizer=tokenizer(chat=True))
    assert prompts.tokens == ((3, 5, 11, 12, 4, 5), (8, 5, 9, 3, 5, 11, 12, 4, 5))
    assert [extra["prompt_messages"] for extra in prompts.extras] == [messages[1:], messages]
    with pytest.raises(ValueError, match="has no chat template"):
        load(path, chat=True)
    with pytest.raises(
        ValueError, match=r"a.jsonl:2: field 'prompt': a list, not text; messages need the chat template"
    ):
        load(path)


def test_a_prompt_that_the_assistant_has_answered_is_refused(tmp_path):
    """As in data sets of whole conversations: the policy would be asked behind the answer."""
    messages = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3"}]
    path = write(tmp_path / "a.jsonl", [{"messages": messages}, {"messages": [*messages, messages[0]]}])
    options = {"prompt": "messages", "ground_truth": None, "chat": True, "tokenizer": tokenizer(chat=True)}
    with pytest.raises(ValueError, match=r"a\.jsonl:1: field 'messages': ends with a message of the") as caught:
        load(path, **options)
    assert ":2: field" not in str(caught.value)


def test_all_faults_are_one_error(tmp_path):
    faults = [
        '{"prompt": "1", ',
        "[1, 2]",
        {"answer": "1"},
        {"prompt": 3, "answer": "1"},
        {"prompt": "", "answer": "1"},
        {"prompt": "1", "answer": None},
        {"prompt": None, "answer": "1"},
        {"prompt": "1"},
        {"prompt": " ", "answer": "1"},
        {"other": 1},
        {"prompt": "1 2 3 4 5", "answer": 1},
    ]
    path = write(tmp_path / "bad.jsonl", [GOOD[0], *faults])
    with pytest.raises(ValueError) as caught:
        load(path, max_prompt_tokens=4)
    text = str(caught.value)
    assert text.startswith("12 problems in the data:")
    for line, what in (
        (2, "not JSON: "),
        (3, "a list, not an object"),
        (4, "field 'prompt': missing; the row has ['answer']"),
        (5, "field 'prompt': an int, not text"),
        (6, "field 'prompt': empty"),
        (7, "field 'answer': null"),
        (8, "field 'prompt': null, not text"),
        (9, "field 'answer': missing"),
    ):
        assert f"{path}:{line}: {what}" in text, what
    assert len(text.splitlines()) == 12  # the head, ten problems, and how many more
    assert text.endswith("and 2 more")


def test_faulty_templates_and_sources(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1", "list": [1], "source": 3}])
    for prompt, text in (
        ("{missing}", "missing"),
        ("{list}", "a list, not text"),
        ("{prompt", "is not a template"),
    ):
        with pytest.raises(ValueError, match=text):
            load(path, prompt=prompt)
    with pytest.raises(ValueError, match="the name of a field"):
        load(path, prompt="{}")
    with pytest.raises(ValueError, match="field 'source': an int, not the name of a source"):
        load(path, source="source")
    with pytest.raises(ValueError, match="over_long = 'cut'"):
        load(path, over_long="cut")


def test_what_the_tokenizer_refuses_names_the_row(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1"}, {"prompt": "strange", "answer": "1"}])
    with pytest.raises(ValueError, match=r"1 problem in the data:\n  .*a.jsonl:2: the tokenizer refuses the prompt"):
        load(path, tokenizer=tokenizer(unknown=False))
    roles = [
        {"prompt": [{"role": "judge", "content": "1"}], "answer": "1"},
        {"prompt": [{"role": "user"}], "answer": 1},
    ]
    path = write(tmp_path / "b.jsonl", roles)
    with pytest.raises(ValueError, match=r"(?s)b.jsonl:2: field 'prompt': message 0 .*b.jsonl:1: .*no role judge"):
        load(path, tokenizer=tokenizer(chat=True), chat=True)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", b"", "is empty: no rows in .*a.jsonl"),
        ("a.jsonl", b"\n\n", "is empty"),
        ("a.json", b"[]", "is empty"),
        ("a.json", b'[{"a": 1},\n nope]', r"a.json:2: not JSON: .*column 2"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"a.jsonl:2: not UTF-8"),
        ("a.parquet", b"PAR1 cut", "not a whole parquet file"),
        ("a.txt", b"1", "unknown kind of file '.txt'"),
    ],
)
def test_damaged_and_empty_files(tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=text):
        load(tmp_path / name)


def test_files_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"gone.jsonl: no such file"):
        load(tmp_path / "gone.jsonl")
    for path in ("~/gone", "./gone", "/gone/a", "GONE.CSV"):
        with pytest.raises(ValueError, match=f"^{path}: no such file"):
            load(path)
    with pytest.raises(ValueError, match="no files"):
        load([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot read this directory"):
        load(tmp_path / "empty")
    import datasets

    def refuse(name, configuration):
        raise ConnectionError(f"{name} {configuration}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"team/sums:main: neither a file nor a data set .*ConnectionError.*sums main"):
        load("team/sums:main")


def test_data_sets_by_name(monkeypatch):
    import datasets

    table = datasets.DatasetDict({"train": datasets.Dataset.from_list(GOOD)})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration: table)
    prompts = load("team/sums:main")
    assert prompts.ids == ("sums[train]:1", "sums[train]:2")
    assert prompts.sources == ("team/sums",) * 2


def test_long_prompts(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"a.jsonl:1: the prompt has 3 tokens, more than max_prompt_tokens = 2"):
        load(path, max_prompt_tokens=2)
    dropped = load(path, max_prompt_tokens=2, over_long="drop")
    assert (dropped.tokens, dropped.num_dropped, dropped.num_truncated) == (((14, 15),), 1, 0)
    assert dropped.ground_truths == ("9",)
    cut = load(path, max_prompt_tokens=2, over_long="truncate")
    assert (cut.tokens, cut.num_dropped, cut.num_truncated) == (((12, 13), (14, 15)), 0, 1)
    with pytest.raises(ValueError, match="holds no prompts: all 2 were too long"):
        load(path, max_prompt_tokens=1, over_long="drop")


def test_extras_fit_json(tmp_path):
    import datasets

    row = {"prompt": "1", "answer": "2", "day": datetime.date(2024, 1, 2), "raw": b"x", "score": float("nan")}
    datasets.Dataset.from_list([row]).to_parquet(str(tmp_path / "a.parquet"))
    prompts = load(tmp_path / "a.parquet")
    assert prompts.extras == ({"day": "2024-01-02", "score": None},)
    assert prompts.left_out == ("raw",)
    with pytest.raises(ValueError, match="field 'raw': a bytes does not fit JSON"):
        load(tmp_path / "a.parquet", ground_truth="raw")


def packed(path, column, rows):
    """A parquet file of one value in many rows, which takes hardly any bytes."""
    table = pyarrow.table({"prompt": pyarrow.chunked_array([pyarrow.array([column])] * rows), "answer": ["2"] * rows})
    pyarrow.parquet.write_table(table, path, compression="zstd")
    return path


def test_a_file_that_was_packed_to_fill_a_memory_is_refused_before_it_does(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.nulls(11_000_000)}), tmp_path / "many.parquet")
    with pytest.raises(ValueError, match=r"many\.parquet: its rows take more than 4 GB of memory, and the file has"):
        data.read_rows(tmp_path / "many.parquet")
    path = packed(tmp_path / "long.parquet", "1 2 " * 1000, 3000)
    assert len(data.read_rows(path)) == 3000
    monkeypatch.setattr(read, "UNPACKED", 1000)
    with pytest.raises(ValueError, match=r"long\.parquet: its rows take more than .* GB of memory"):
        data.read_rows(path)


def test_a_file_that_repeats_itself_is_read(tmp_path):
    rows = data.read_rows(packed(tmp_path / "a.parquet", "1 2 " * 100, 3000))
    assert [row.line for row in rows] == [*range(1, 3001)]
    assert {row.fields["prompt"] for row in rows} == {"1 2 " * 100}


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_the_first_rows_are_read_without_the_others(tmp_path, ends):
    path = tmp_path / "a.jsonl"
    path.write_bytes(ends.join([*(json.dumps({"prompt": f"{i}\u2028"}) for i in range(3)), "", "no row"]).encode())
    assert [row.line for row in data.read_rows(path, max_rows=2)] == [1, 2]
    with pytest.raises(ValueError, match=r"a\.jsonl:5: not JSON"):
        data.read_rows(path)
