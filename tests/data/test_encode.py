"""Prompt sets, demonstrations and examples written out by hand, with every option that may meet another."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import data
from fppo.data import Fields, Imitated, Problems, Row, encode_demonstrations
from fppo.data.conversations import Answers, DemonstrationSet, digest_of_demonstrations
from fppo.data.examples import Example, example_of, fill, lookup
from fppo.data.plain import BadField
from tests.data.rows import tokenizer, write

LONGEST = len("assistant")  # the longest word of the vocabulary
# options of its own, tools, and the header of a prompt
OWN = (
    "{% for t in tools or [] %}Q {{ t.function.name }} {% endfor %}{% if mood %}x {% endif %}"
    "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def own_words():
    words = tokenizer(chat=True)
    words.chat_template = OWN
    return words


def named(name):
    return {"type": "function", "function": {"name": name}}


@settings(max_examples=80)
@given(
    st.lists(st.sampled_from([1, 2, 3, 5, 40]), min_size=1, max_size=5),
    st.integers(1, 8),
    st.sampled_from(["error", "drop", "truncate"]),
    st.booleans(),
    st.sampled_from([None, "x"]),
    st.booleans(),
)
def test_a_prompt_set_is_what_its_rows_say(counts, limit, rule, chat, pad, small):
    """Each rule for long prompts holds, for text and for messages, also where a prompt is too long to be tokenized."""
    rows, tokens, texts = [], [], []
    for i, count in enumerate(counts):
        digits = [(i + j) % 10 for j in range(count)]
        texts.append(" ".join(map(str, digits)))
        ids = [10 + digit for digit in digits]
        tokens.append((3, 5, *ids, 4, 5) if chat else tuple(ids))
        fields = {"prompt": texts[-1], "answer": [i, None], "from": f"s{i % 2}", "more": {"k": (i, None)}}
        fields |= {"raw": b"x"} if i % 2 else {}
        fields |= {"also": {1}} if i % 3 == 2 else {}
        rows.append(Row("a/x.jsonl", 3 * i + 1, fields, "x"))
    longer = [i for i, ids in enumerate(tokens) if len(ids) > limit]
    huge = [i for i in longer if small and len(texts[i]) > max(1, limit * LONGEST)]
    kept = [i for i in range(len(rows)) if rule == "truncate" or i not in longer]
    problems = Problems()
    for i in huge or longer if rule == "error" else []:
        size = f"{len(texts[i])} characters" if huge else f"{len(tokens[i])} tokens"
        can = " tokens can have" if huge else ""
        text = f"the prompt has {size}, more than max_prompt_tokens = {limit}{can} (over_long can drop or truncate it)"
        problems.add(text, at=f"a/x.jsonl:{3 * i + 1}")
    own = Fields(chat=chat, source="from")
    how = {"fields": own, "max_prompt_tokens": limit, "over_long": rule, "pad_token": pad}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fppo.data.encode._SHORT", 1 if small else 1 << 20)
        if problems.count or not kept:
            with pytest.raises(ValueError) as told:
                data.encode_rows(rows, tokenizer(chat=chat), **how)
            expected = f"the data set holds no prompts: all {len(rows)} were too long and dropped"
            assert str(told.value) == (problems.text("data") if problems.count else expected)
            return
        found = data.encode_rows(rows, tokenizer(chat=chat), **how)
    messages = [{"prompt_messages": [{"role": "user", "content": text}]} if chat else {} for text in texts]
    assert found == data.PromptSet(
        tokens=tuple(tokens[i][-limit:] for i in kept),
        ids=tuple(f"x.jsonl:{3 * i + 1}" for i in kept),
        ground_truths=tuple([i, None] for i in kept),
        sources=tuple(f"s{i % 2}" for i in kept),
        extras=tuple({"more": {"k": [i, None]}} | messages[i] for i in kept),
        pad_token_id=9 if pad else 0,
        num_dropped=len(rows) - len(kept),
        num_truncated=len(longer) if rule == "truncate" else 0,
        left_out=tuple(sorted({"raw" for i in kept if i % 2} | {"also" for i in kept if i % 3 == 2})),
    )


def test_files_are_encoded_by_the_options_that_rows_are(tmp_path):
    rows = [{"prompt": "1 2 3", "answer": "6"}, {"prompt": "1", "answer": "2", "tools": [named("7")], "from": "web"}]
    path = write(tmp_path / "a.jsonl", rows)
    fields = Fields(chat=True, tools="tools", source_name="all")
    chat = data.ChatOptions(arguments={"mood": True}, tools=[named("9")], row_tools=True)
    how = {"fields": fields, "max_prompt_tokens": 9, "over_long": "drop", "pad_token": "x", "chat": chat}
    found = data.load_prompts(path, own_words(), **how)
    assert found == data.encode_rows(data.read_rows(path), own_words(), **how)
    assert found.tokens == ((6, 17, 9, 3, 5, 11, 4, 5),)
    assert (found.ids, found.sources, found.pad_token_id, found.num_dropped) == (("a.jsonl:2",), ("all",), 9, 1)
    with pytest.raises(ValueError, match=r"does not read \['moods'\]; leave them out"):
        data.load_prompts(path, own_words(), **how | {"chat": data.ChatOptions(arguments={"moods": 1, "mood": 1})})


def test_a_rendered_prompt_is_known_by_what_the_template_writes_with_its_arguments():
    words = tokenizer(chat=True)
    words.add_tokens(["<s>"])
    words.chat_template = "{% if mood %}<s> {% endif %}" + OWN.replace("{% if mood %}x {% endif %}", "")
    rows = [Row("a.jsonl", 1, {"prompt": "<s> user : 1", "answer": "1"}, "a")]
    fields = Fields(chat=True)
    assert data.encode_rows(rows, words, fields=fields).tokens == ((3, 5, 20, 3, 5, 11, 4, 5),)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the text of a message begins with '<s>'"):
        data.encode_rows(rows, words, fields=fields, chat=data.ChatOptions(arguments={"mood": True}))


# demonstrations


@pytest.mark.parametrize("kind", ["list", "text", "numpy"])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_conversations_are_imitated_with_their_own_tools_and_the_template_s_arguments(kind, turns):
    """Turns without a token at their end have rows of their own, which end with the tokenizer's."""
    talk = [{"role": role, "content": str(i)} for i, role in enumerate(["user", "assistant"] * 2, 1)]
    value = {"list": talk, "text": json.dumps(talk), "numpy": np.array(talk)}[kind]
    values = [
        {"talk": value, "tools": [named("7")], "from": "a"},
        {"talk": value, "tools": None, "from": "b"},
        {"talk": value, "from": "a", "prompt": "not read", "more": 1},
    ]
    rows = [Row("f/a.jsonl", number, row, "a") for number, row in enumerate(values, 5)]
    chat = data.ChatOptions(arguments={"mood": True}, tools=[named("9")], row_tools=True)
    found = encode_demonstrations(
        rows,
        own_words(),
        fields=Fields(ground_truth=None, chat=True, tools="tools", source="from"),
        answers=Answers(messages="talk", turns=turns),
        pad_token="x",
        chat=chat,
    )
    made = []
    for tool in (17, 19, 19):
        first = Imitated(prompt=(6, tool, 9, 3, 5, 11, 4, 5), response=(12, 1), mask=(True, True))
        prompt = (*first.prompt, 12, 3, 5, 13, 4, 5)
        last = Imitated(prompt=prompt, response=(14, 1), mask=(True, True))
        made += [first, last] if turns == "all" else [last]
    each = 2 if turns == "all" else 1
    assert found == DemonstrationSet(
        rows=tuple(made),
        ids=tuple(name for name in ("a.jsonl:5", "a.jsonl:6", "a.jsonl:7") for _ in range(each)),
        sources=tuple(name for name in "aba" for _ in range(each)),
        pad_token_id=9,
    )


def test_responses_to_messages_are_imitated_with_their_own_tools():
    values = [
        {"prompt": [{"role": "user", "content": "1"}], "said": "2", "why": "3", "tools": [named("7")]},
        {"prompt": "1", "said": "2", "why": "4"},
    ]
    rows = [Row("f/a.jsonl", number, row, "a") for number, row in enumerate(values, 1)]
    chat = data.ChatOptions(arguments={"mood": True}, tools=[named("9")], row_tools=True)
    fields = Fields(ground_truth=None, chat=True, tools="tools")
    found = encode_demonstrations(rows, own_words(), fields=fields, answers=Answers(response="{why} {said}"), chat=chat)
    assert found.rows == (
        Imitated(prompt=(6, 17, 9, 3, 5, 11, 4, 5), response=(13, 12, 1), mask=(True,) * 3),
        Imitated(prompt=(6, 19, 9, 3, 5, 11, 4, 5), response=(14, 12, 1), mask=(True,) * 3),
    )
    assert (found.pad_token_id, found.sources) == (0, ("a", "a"))


def test_all_demonstrations_that_are_too_long_are_named():
    rows = [Row("f/a.jsonl", n, {"prompt": "1", "response": "2 " * n}, "a") for n in (1, 2, 3, 4)]
    with pytest.raises(ValueError) as told:
        encode_demonstrations(rows, tokenizer(), fields=Fields(ground_truth=None), max_tokens=4)
    assert str(told.value).splitlines() == [
        "2 problems in the data:",
        *(
            f"  f/a.jsonl:{n}: the row has {n + 2} tokens, more than max_tokens = 4 (over_long can drop or truncate it)"
            for n in (3, 4)
        ),
    ]


def test_a_digest_of_demonstrations_is_of_each_token_each_mark_and_each_boundary():
    first = Imitated(prompt=(1, 2), response=(3, 4), mask=(True, True))
    second = Imitated(prompt=(5,), response=(6,), mask=(True,))
    others = [
        [first, second],
        [second, first],
        [first],
        [Imitated(prompt=(1, 3), response=(3, 4), mask=(True, True)), second],
        [Imitated(prompt=(1, 2), response=(3, 5), mask=(True, True)), second],
        [Imitated(prompt=(1, 2), response=(3, 4), mask=(False, True)), second],
        [Imitated(prompt=(1,), response=(2, 3, 4), mask=(True, True, True)), second],
        [first, Imitated(prompt=(5,), response=(7,), mask=(True,))],
        [Imitated(prompt=(1, 2, 3, 4), response=(1,), mask=(True,)), second],  # 1 is True
    ]

    def digest(rows, **more):
        ids = ("a",) * len(rows)
        return digest_of_demonstrations(
            DemonstrationSet(**{"rows": tuple(rows), "ids": ids, "sources": ids, "pad_token_id": 0, **more})
        )

    assert len({str(digest(rows)) for rows in others}) == len(others)
    assert digest(others[0]) == digest(others[0], ids=("b", "c"), pad_token_id=3)


# examples


@pytest.mark.parametrize("there", [True, False])
def test_an_example_has_each_value_in_its_role(tmp_path, there):
    """Images stand where the texts have marks, in order over all messages; videos without marks before the first text
    of the user; relative paths are beside the file of the row."""
    file = tmp_path / "rows.jsonl"
    if there:
        file.write_text("")
    beside = f"{tmp_path}/" if there else ""
    first = {"role": "user", "content": [{"type": "text", "text": "b<image>c"}, {"type": "text", "text": "<image>"}]}
    messages = [
        {"role": "system", "content": "s<image><image>t"},
        {"role": "user", "content": "a", "name": None},
        first,
    ]
    messages[2]["content"].append({"type": "image", "image": "not read"})
    row = {
        "talk": messages,
        "truth": {"x": (1, None)},
        "web": {"from": "here"},
        "pictures": ["1.png", b"2", {"path": "3.png"}, {"path": "4.png", "bytes": b"4"}, "/5.png"],
        "films": "v.mp4",
        "tools": [named("7")],
        "level": 2,
        "raw": b"x",
    }
    fields = Fields(
        prompt="talk",
        ground_truth="truth",
        source="web.from",
        chat=True,
        images="pictures",
        videos="films",
        tools="tools",
    )
    text, image = (lambda x: {"type": "text", "text": x}), {"type": "image"}
    prompt = [
        {"role": "system", "content": [text("s"), image, image, text("t")]},
        {"role": "user", "content": [{"type": "video"}, text("a")]},
        {"role": "user", "content": [text("b"), image, text("c"), image, image]},
    ]
    assert example_of(Row(str(file), 1, row, "rows"), fields, Problems()) == Example(
        prompt=prompt,
        ground_truth={"x": [1, None]},
        source="here",
        extras={"web": {"from": "here"}, "level": 2, "prompt_messages": prompt},
        left_out=("raw",),
        images=(f"{beside}1.png", b"2", f"{beside}3.png", {"path": "4.png", "bytes": b"4"}, "/5.png"),
        videos=(f"{beside}v.mp4",),
        tools=(named("7"),),
    )


def test_videos_of_a_row_are_told_from_the_frames_of_one():
    frames, several = np.zeros((2, 4, 4, 3), np.uint8), np.zeros((3, 2, 4, 4, 3), np.uint8)
    counts = [(frames, 1), ([*frames], 1), (several, 3), ([*several], 3), (["a.mp4", "b.mp4"], 2), ([], 0), (None, 0)]
    for value, count in counts:
        asked = [{"role": "user", "content": "<video>" * count + "a"}]
        row = Row("f.jsonl", 1, {"prompt": asked, "answer": "1", "films": value}, "f")
        found = example_of(row, Fields(chat=True, videos="films"), Problems())
        assert found is not None
        assert len(found.videos) == count


def test_every_fault_of_a_row_is_noted_once():
    fields = Fields(prompt="{a} {b}", ground_truth="c", source="d", tools="tools", chat=True)
    problems = Problems()
    row = Row("f.jsonl", 3, {"a": "1", "b": [], "c": None, "d": 5, "tools": 3}, "f")
    assert example_of(row, fields, problems) is None
    lines = [line.strip() for line in problems.text("data").splitlines()]
    assert lines[0] == "4 problems in the data:"
    for line, part in zip(
        lines[1:], ("field 'b': a list, not text", "'c': null", "'d': an int", "'tools': "), strict=True
    ):
        assert line.startswith("f.jsonl:3: field ")
        assert part in line
    same = Problems()
    assert example_of(Row("f.jsonl", 3, {"x": "1"}, "f"), Fields(prompt="m", ground_truth="m"), same) is None
    assert same.count == 1


values = st.recursive(
    st.integers(0, 3),
    lambda x: st.lists(x, max_size=3) | st.tuples(x, x) | st.dictionaries(st.sampled_from("ab"), x, max_size=2),
    max_leaves=8,
)
parts = st.lists(st.sampled_from(["a", "b", "0", "1", "-1", "-3"]), min_size=1, max_size=3)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["a", "b", "a.b", "b.0"]), values, min_size=1), parts)
def test_a_dotted_path_leads_where_a_walk_does(fields, path):
    name, at = ".".join(path), [fields]
    for part in path:
        inside = dict(enumerate(at[-1])) if isinstance(at[-1], list | tuple) else {}
        inside |= {number - len(at[-1]): x for number, x in inside.items()} if inside else {}
        inside = {str(number): x for number, x in inside.items()} or (at[-1] if isinstance(at[-1], dict) else {})
        if part not in inside:
            break
        at.append(inside[part])
    if name in fields:
        assert lookup(fields, name) == fields[name]
    elif len(at) == len(path) + 1:
        assert lookup(fields, name) is at[-1]
    else:
        with pytest.raises(BadField, match=r"missing; the row has \["):
            lookup(fields, name)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["{a}", "{b.0}", "{{", "}}", " x", "{c}"]), max_size=6))
def test_a_template_is_filled_piece_by_piece(pieces):
    meant = {"{a}": "1", "{b.0}": "2.5", "{{": "{", "}}": "}", " x": " x", "{c}": "{a}"}
    found = fill("".join(pieces), {"a": 1, "b": [2.5], "c": "{a}"}, "data.prompt")
    assert found == "".join(meant[piece] for piece in pieces)
    for wrong in ("{a!r}", "{a:3}", "{}", "{0}"):
        with pytest.raises((BadField, ValueError)):
            fill(wrong, {"a": 1}, "data.prompt")
    with pytest.raises(BadField, match="a bool, not text"):
        fill("{a}", {"a": True}, "data.prompt")


@pytest.mark.parametrize("filled", [False, True])
def test_nulls_that_arrow_fills_in_are_left_out_of_tools(filled):
    tools = [{"function": {"name": "7", "parameters": {"x": None, "y": [{"z": None, "w": 1}]}}}]
    row = Row("a.parquet", 1, {"prompt": "1", "answer": "2", "tools": tools}, "a", filled)
    found = example_of(row, Fields(tools="tools", chat=True), Problems())
    bare = {"function": {"name": "7", "parameters": {"y": [{"w": 1}]}}}
    assert found.tools == ((bare,) if filled else (*tools,))
