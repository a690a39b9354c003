"""Rows as other people's files hold them: what is missing, messages, tools, keys that stand twice, and directories."""

from __future__ import annotations

import csv
import json
import os
import socket

import pytest
from tokenizers import processors

from fppo import data
from fppo.data.images import opened
from fppo.data.plain import plain
from fppo.environments import Reply
from fppo.rollout import ToolRunner
from tests.data.rows import CHAT, tokenizer, write
from tests.data.test_load import load

ASK = [{"role": "user", "content": "1 2"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLED = (
    "{% for t in tools or [] %}Q {{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }} : "
    "{{ m.content + ' ' }}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "{{ c.function.name }} {{ c.function.arguments | tojson }} {% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def tooled():
    words = tokenizer(chat=True)
    words.chat_template = TOOLED
    return words


def table(path, rows):
    import datasets

    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


# what is missing


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", '{"value": [1, NaN]}', "[1, Infinity]", "null"])
def test_a_ground_truth_that_is_no_number_is_refused(tmp_path, text):
    path = tmp_path / "a.jsonl"
    write(path, [{"prompt": "1", "answer": "2"}, f'{{"prompt": "1", "answer": {text}}}'])
    with pytest.raises(
        ValueError, match=r"1 problem in the data:\n.*a\.jsonl:2: field 'answer': (null|nan or infinite)"
    ):
        load(path)


def test_what_pandas_writes_for_a_missing_value_is_refused(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["1", "2"], "answer": [1.0, float("nan")]})
    frame.to_parquet(tmp_path / "a.parquet")
    frame["when"] = pandas.to_datetime(["2024-01-02", None])
    with pytest.raises(ValueError, match=r"a\.parquet:2: field 'answer': (null|nan or infinite)"):
        load(tmp_path / "a.parquet")
    rows = data.rows_of(frame.to_dict("records"), "mine")
    for name in ("answer", "when"):
        with pytest.raises(ValueError, match=rf"mine:2: field '{name}': nan or infinite"):
            data.encode_rows(rows, tokenizer(), fields=data.Fields(ground_truth=name))
    assert plain(frame["when"][1]) is None
    with pytest.raises(ValueError, match=r"mine:1: field 'answer': a NAType does not fit JSON"):
        data.encode_rows(data.rows_of([{"prompt": "1", "answer": pandas.NA}], "mine"), tokenizer())


def test_a_missing_value_does_not_enter_a_template(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": NaN, "answer": "2"}\n{"q": 1.5, "answer": "2"}\n')
    with pytest.raises(ValueError, match=r"1 problem in the data:\n.*a\.jsonl:1: field 'q': nan, a table's missing"):
        load(path, prompt="Q {q}")


# messages


def test_nulls_that_arrow_fills_in_do_not_enter_prompts(tmp_path):
    """Of the arguments of calls that differ, each call keeps its own, in files with columns as in lines of JSON."""
    calls = [{**CALL, "function": {"name": "add", "arguments": own}} for own in ({"a": 1}, {"b": "2"})]
    rows = [
        {"prompt": [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, *ASK], "answer": "3"}
        for call in calls
    ]
    wanted = load(write(tmp_path / "a.jsonl", rows), chat=True, tokenizer=tooled())
    for path in (table(tmp_path / "a.parquet", rows), table(tmp_path / "data" / "train.parquet", rows).parent):
        got = load(path, chat=True, tokenizer=tooled())
        assert [extra["prompt_messages"] for extra in got.extras] == [row["prompt"] for row in _plainly(rows)]
        assert got.tokens == wanted.tokens
    import datasets

    dicts = list(datasets.Dataset.from_list(rows))
    got = data.encode_rows(data.rows_of(dicts, "mine"), tooled(), fields=data.Fields(chat=True))
    assert got.tokens == wanted.tokens
    explicit = [{**CALL, "function": {"name": "add", "arguments": {"a": None, "c": [None, 1]}}}]
    row = {"prompt": [*ASK, {"role": "assistant", "tool_calls": explicit}, *ASK], "answer": "3"}
    kept = load(write(tmp_path / "b.jsonl", [row]), chat=True, tokenizer=tooled()).extras[0]["prompt_messages"]
    assert kept[1]["tool_calls"] == explicit
    whole = explicit[0]["function"]["arguments"]
    for value, arguments in ((row["prompt"], {"c": [None, 1]}), (json.dumps(row["prompt"]), whole)):
        rows = data.rows_of([{**row, "prompt": value}], "mine")
        kept = data.encode_rows(rows, tooled(), fields=data.Fields(chat=True)).extras[0]["prompt_messages"]
        assert kept[1]["tool_calls"][0]["function"]["arguments"] == arguments


def _plainly(rows):
    """The rows with "" as the content of calls."""
    return [{**row, "prompt": [{**m, "content": m["content"] or ""} for m in row["prompt"]]} for row in rows]


@pytest.mark.parametrize("content", ["null", "missing", "empty"])
def test_a_call_of_a_tool_needs_no_words(tmp_path, content):
    said = {"null": {"content": None}, "missing": {}, "empty": {"content": ""}}[content]
    call = {"role": "assistant", "tool_calls": [CALL], **said}
    row = {"prompt": [*ASK, call, {"role": "tool", "content": "3"}], "answer": "3"}
    prompts = load(write(tmp_path / "a.jsonl", [row]), chat=True, tokenizer=tooled())
    assert prompts.extras[0]["prompt_messages"][1] == {"role": "assistant", "tool_calls": [CALL], "content": ""}
    older = {"role": "assistant", "function_call": {"name": "add"}, **said}
    row = {"prompt": [*ASK, older, *ASK], "answer": "3"}
    prompts = load(write(tmp_path / "a.jsonl", [row]), chat=True, tokenizer=tooled())
    assert prompts.extras[0]["prompt_messages"][1] == {**older, "content": ""}
    for wrong in ({"role": "assistant", **said}, {"role": "tool", "content": None}, {"role": "user", "tool_calls": []}):
        if wrong.get("content") != "":
            path = write(tmp_path / "b.jsonl", [{"prompt": [wrong, *ASK], "answer": "3"}])
            with pytest.raises(ValueError, match=r"b\.jsonl:1: field 'prompt': message 0 has no text"):
                load(path, chat=True, tokenizer=tooled())


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_content_in_parts_of_text_is_text(tmp_path, kind):
    parts = [{"type": "text", "text": "1 "}, {"type": "text", "text": "2"}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "answer": "3"}]
    path = write(tmp_path / "a.jsonl", rows) if kind == "jsonl" else table(tmp_path / "a.parquet", rows)
    prompts = load(path, chat=True, tokenizer=tokenizer(chat=True))
    assert prompts.extras[0]["prompt_messages"] == ASK
    assert (
        prompts.tokens
        == load(
            write(tmp_path / "b.jsonl", [{"prompt": ASK, "answer": "3"}]), chat=True, tokenizer=tokenizer(chat=True)
        ).tokens
    )
    for wrong in ([{"type": "image", "image": "a.png"}, *parts], ["1"], [], [{"type": "text"}]):
        path = write(tmp_path / "c.jsonl", [{"prompt": [{"role": "user", "content": wrong}], "answer": "3"}])
        with pytest.raises(ValueError, match=r"c\.jsonl:1: field 'prompt': message 0 has parts of the kinds"):
            load(path, chat=True, tokenizer=tokenizer(chat=True))


def test_messages_as_text_are_messages(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], [json.dumps(ASK), "3"]])
    prompts = load(path, chat=True, tokenizer=tokenizer(chat=True))
    assert prompts.extras[0]["prompt_messages"] == ASK
    assert prompts.tokens == ((3, 5, 11, 12, 4, 5),)
    with pytest.raises(
        ValueError, match=r"a\.csv:2: field 'prompt': a list, not text; messages need the chat template"
    ):
        load(path)
    assert load(path, prompt="{prompt}", chat=True, tokenizer=tokenizer(chat=True)).extras[0]["prompt_messages"] == [
        {"role": "user", "content": json.dumps(ASK)}
    ]
    for text, what in (
        (str(ASK), "text that looks like messages, but is not JSON"),
        (json.dumps(ASK[0]), "one message, not a list of them"),
        (json.dumps(ASK)[:-1], "text that looks like messages, but is not JSON"),
    ):
        path = write(tmp_path / "b.jsonl", [{"prompt": text, "answer": "3"}])
        for chat in (True, False):
            with pytest.raises(ValueError, match=rf"b\.jsonl:1: field 'prompt': {what}"):
                load(path, chat=chat, tokenizer=tokenizer(chat=True))
    path = write(tmp_path / "b.jsonl", [{"prompt": '[{"role": "user", "role": "x", "content": "1"}]', "answer": "3"}])
    with pytest.raises(ValueError, match=r"b\.jsonl:1: field 'prompt': \['role'\] more than once"):
        load(path, chat=True, tokenizer=tokenizer(chat=True))
    for text in ('[{"roles": 1}]', '{"role": 1}', "[1, 2]", "[role: 1]"):
        load(write(tmp_path / "b.jsonl", [{"prompt": text, "answer": "3"}]), chat=True, tokenizer=tokenizer(chat=True))


def test_a_number_that_is_none_does_not_enter_messages(tmp_path):
    call = {"function": {"name": "add", "arguments": {"a": float("nan")}}}
    path = write(tmp_path / "a.jsonl", [{"prompt": [{"role": "assistant", "tool_calls": [call]}, *ASK], "answer": "1"}])
    with pytest.raises(ValueError, match=r"message 0 has nan, .* at \['tool_calls'\]\[0\]\['function'\]"):
        load(path, chat=True, tokenizer=tooled())


def test_messages_in_numpy_are_messages():
    numpy = pytest.importorskip("numpy")
    rows = data.rows_of([{"prompt": numpy.array(ASK), "answer": "3"}], "mine")
    prompts = data.encode_rows(rows, tokenizer(chat=True), fields=data.Fields(chat=True))
    assert prompts.tokens == ((3, 5, 11, 12, 4, 5),)


# tools


def test_rows_have_tools_of_their_own(tmp_path):
    tools = [{"type": "function", "function": {"name": name}} for name in ("7", "8")]
    rows = [{"prompt": "1", "answer": "1", "tools": own} for own in (tools, None, [], json.dumps(tools[:1]))]
    rows += [{"prompt": "1", "answer": "1"}, *({"prompt": "1", "answer": "1", "tools": own} for own in ("", " "))]
    chat = data.ChatOptions(tools=[{"function": {"name": "9"}}], row_tools=True)
    path = write(tmp_path / "a.jsonl", rows)
    prompts = data.load_prompts(path, tooled(), fields=data.Fields(chat=True, tools="tools"), chat=chat)
    end = (3, 5, 11, 4, 5)
    own, others = ((6, 17, 6, 18, *end), (6, 19, *end), (6, 19, *end), (6, 17, *end)), ((6, 19, *end),) * 3
    assert prompts.tokens == own + others
    assert all("tools" not in extra for extra in prompts.extras)
    with pytest.raises(ValueError, match=r"does not read \['tools'\]"):
        data.load_prompts(path, tokenizer(chat=True), fields=data.Fields(chat=True, tools="tools"), chat=chat)
    for wrong in ("{", 3, [3], {"a": 1}, '{"a": 1}', ['{"function": {}, "function": {}}']):
        path = write(tmp_path / "b.jsonl", [{"prompt": "1", "answer": "1", "tools": wrong}])
        with pytest.raises(ValueError, match=r"b\.jsonl:1: field 'tools': (not JSON|not a list of tool schemas)"):
            data.load_prompts(path, tooled(), fields=data.Fields(chat=True, tools="tools"), chat=chat)


# tokens


def with_bos():
    words = tokenizer(bos_token="x")
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(single="x $A", special_tokens=[("x", 9)])
    return words


def test_a_prompt_that_is_rendered_already_begins_once(tmp_path):
    rows = [{"prompt": text, "answer": "1"} for text in ("1 2", "x 1 2", " x 1 2", "1 x 2")]
    prompts = load(write(tmp_path / "a.jsonl", rows), tokenizer=with_bos())
    assert prompts.tokens == ((9, 11, 12), (9, 11, 12), (9, 11, 12), (9, 11, 9, 12))
    assert data.prompt_set(["1 2", "x 1 2"], with_bos()).tokens == ((9, 11, 12), (9, 11, 12))
    assert data.prompt_set(["1 1 2", "1 1"], tokenizer()).tokens == ((11, 11, 12), (11, 11))
    two = tokenizer()
    special = [("x", 9), ("Q", 6)]
    two.backend_tokenizer.post_processor = processors.TemplateProcessing(single="x Q $A", special_tokens=special)
    assert data.prompt_set(["1 2", "x Q 1 2", "x 1"], two).tokens == ((9, 6, 11, 12), (9, 6, 11, 12), (9, 6, 9, 11))


def test_a_rendered_prompt_is_no_message(tmp_path):
    words = with_bos()
    words.chat_template = "x " + CHAT
    rows = [{"prompt": text, "answer": "1"} for text in ("1 2", "x user : 1", "1 x")]
    with pytest.raises(
        ValueError, match=r"1 problem in the data:\n.*a\.jsonl:2: .*begins with 'x', .* give chat = false"
    ):
        load(write(tmp_path / "a.jsonl", rows), tokenizer=words, chat=True)
    assert load(write(tmp_path / "a.jsonl", rows[:1]), tokenizer=words, chat=True).tokens == ((9, 3, 5, 11, 12, 4, 5),)


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        ("{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}", True),
        ("{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}assistant :", False),
        ("{% for m in messages %}{{ 'Q ' if m.role == 'user' else ' ' }}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ 'Q ' if m.role == 'user' else 'A ' }}{{ m.content }}{% endfor %}", True),
        (
            "{% for m in messages %}{{ m.role }} : {{ 'x x ' if m.role == 'assistant' }}{{ m.content }} {% endfor %}"
            "{% if add_generation_prompt %}assistant :{% endif %}",
            False,
        ),
        (CHAT, False),
        ("{{ messages[0].content }}", False),
    ],
)
def test_a_template_says_where_the_assistant_speaks(template, refused):
    words = tokenizer()
    words.chat_template = template
    if not refused:
        data.check_chat_template(words)
        return
    with pytest.raises(ValueError, match=r"ignores add_generation_prompt: it writes '(assistant :|A)' before"):
        data.check_chat_template(words)


def test_where_the_assistant_speaks_may_depend_on_the_given_arguments():
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ opens if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    data.check_chat_template(words, options=data.ChatOptions(arguments={"opens": ""}))
    with pytest.raises(ValueError, match=r"ignores add_generation_prompt: it writes 'A' before"):
        data.check_chat_template(words, options=data.ChatOptions(arguments={"opens": "A "}))


# files


def test_a_field_of_a_csv_file_may_be_long(tmp_path):
    path, text = tmp_path / "a.csv", "1 " * 100_000
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], [text, "3"]])
    limit = csv.field_size_limit()
    assert len(load(path, max_prompt_tokens=100_000).tokens[0]) == 100_000
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "prompt,answer,answer\n1,2,3\n", r"a\.csv:1: the first line names \['answer'\] more than once"),
        ("a.jsonl", '{"prompt": "1", "answer": "2", "answer": "3"}\n', r"a\.jsonl:1: \['answer'\] more than once"),
        ("a.jsonl", '{"prompt": "1", "answer": {"a": 1, "a": 2}}\n', r"a\.jsonl:1: \['a'\] more than once"),
        ("a.json", '[{"prompt": "1", "answer": "2", "prompt": "3"}]', r"a\.json: \['prompt'\] more than once"),
    ],
)
def test_names_that_stand_twice_are_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        load(tmp_path / name)


def test_columns_that_stand_twice_are_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    columns = [pyarrow.array([x]) for x in ("1", "2", "3")]
    pyarrow.parquet.write_table(pyarrow.table(columns, names=["prompt", "answer", "answer"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"it has the columns \['answer'\] more than once"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet"])
def test_a_directory_of_files_gives_what_its_files_give(tmp_path, kind):
    rows = [{"prompt": "1", "answer": answer} for answer in ("1", "01", "1.0", "NA", "true", "2024-01-02")]
    place = tmp_path / "set"
    for split, own in (("train", rows), ("test", rows[:1])):
        path = place / f"{split}.{kind}"
        path.parent.mkdir(exist_ok=True)
        if kind == "csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([list(rows[0]), *(row.values() for row in own)])
        elif kind == "parquet":
            table(path, own)
        else:
            path.write_text(json.dumps(own) if kind == "json" else "\n".join(map(json.dumps, own)))
    prompts, alone = load(place), load(place / f"train.{kind}")
    assert prompts.ground_truths == alone.ground_truths == tuple(row["answer"] for row in rows)
    assert (prompts.ids, set(prompts.sources)) == (alone.ids, {"set"})
    assert load(place, split="test").ground_truths == ("1",)
    with pytest.raises(ValueError, match=r"unknown split 'dev'; there are \['test', 'train'\]"):
        load(place, split="dev")


def test_half_of_a_surrogate_pair_is_named(tmp_path):
    rows = [r'{"prompt": "1 \ud83d\ude00", "answer": "1"}', r'{"prompt": "1 \ud83d", "answer": "1"}']
    rows += [r'{"prompt": "1", "answer": ["\ude00"]}', r'{"prompt": "1", "answer": "1", "more": {"\ud800": 1}}']
    with pytest.raises(ValueError) as caught:
        load(write(tmp_path / "a.jsonl", rows))
    lines = str(caught.value).splitlines()
    assert [":2: " in lines[1], ":3: " in lines[2], ":4: " in lines[3], len(lines)] == [True, True, True, 4]
    assert all("holds half of a surrogate pair, which is no character" in line for line in lines[1:])


def test_what_is_no_regular_file_is_named(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl: it is a FIFO, not a file that can be read again"):
        load(tmp_path / "a.jsonl")
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(tmp_path)
        bound.bind("s.jsonl")
    with pytest.raises(ValueError, match=r"s\.jsonl: it is a socket"):
        load(tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match=r"/dev/null: it is a device"):
        load("/dev/null")
    for path in ("a\0.jsonl", "/a\0.jsonl", "a\0"):
        with pytest.raises(ValueError, match=r"it holds a NUL character, which no path has"):
            load(path)
    pytest.importorskip("PIL")
    for path, said in ((tmp_path / "a.jsonl", "it is a FIFO"), ("a\0.png", "it holds a NUL character")):
        with pytest.raises(ValueError, match=said):
            opened(str(path), 1)


@pytest.mark.parametrize("text", ["\ud800", "a\udc80"])
def test_a_tool_that_says_half_of_a_surrogate_pair_is_named(text):
    said = r"returned text with half of a surrogate pair, which is no character"
    with (
        ToolRunner(lambda conversation: [{"role": "tool", "content": text}], inline=True) as tools,
        pytest.raises(ValueError, match=said),
    ):
        tools.step([ASK], [Reply("x", (), "")])
