"""Chat templates show all of a conversation once, in whichever form they read it, or the conversation is refused."""

from __future__ import annotations

import json

import pytest

from fppo.data import Fields, Row, encode_demonstrations, encode_rows
from fppo.data.chat import ChatOptions, encode_chat, render_chat
from fppo.data.conversations import Answers
from tests.rollout.templates import tokenizer_of

OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
USER, LAMP = {"role": "user", "content": "find"}, {"q": "lamp é", "most": 3}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def words_of(message, *, calls=""):
    """A tokenizer whose template writes `message` for each, and `calls` for each call `f` of a function."""
    each = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + calls + "{% endfor %}" if calls else ""
    return tokenizer_of("{% for m in messages %}<|{{ m.role }}|>" + message + each + "<|eot|>{% endfor %}" + OPEN)


def said(arguments, **more):
    call = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call], **more}]


def shown(words, messages, *, generation=True, **options):
    return render_chat(words, messages, generation=generation, options=ChatOptions(**options))


def refused(words, messages, *, generation=True, **options):
    with pytest.raises(ValueError, match="the chat template") as caught:
        shown(words, messages, generation=generation, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "calls",
    [
        "{{ f.name }}{{ f.arguments | tojson }}",  # reads objects, and would encode a text again
        "{{ f.name }}{{ f.arguments if f.arguments is string else f.arguments | tojson }}",
        "{{ f.name + f.arguments }}",  # refuses objects
        "{{ f.name }}{{ f.arguments }}",  # writes objects as Python does
    ],
)
def test_arguments_are_encoded_once_however_they_come_and_whatever_the_template_reads(calls):
    words = words_of("{{ m.content }}", calls=calls)
    written = json.dumps(LAMP, ensure_ascii=False)
    expected = f"<|user|>find<|eot|><|assistant|>find{written}<|eot|>"
    flat = [USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "find", "arguments": written}]}]
    older = [USER, {"role": "assistant", "content": "", "function_call": {"name": "find", "arguments": written}}]
    for messages in (said(LAMP), said(json.dumps(LAMP)), said(written), flat, older):
        assert shown(words, messages, generation=False) == expected


def test_arguments_that_are_no_json_stay_text_and_none_are_an_empty_object():
    words = words_of("{{ m.content }}", calls="{{ f.name }}{{ f.arguments | tojson }}")
    assert '<|assistant|>find"{q"<|eot|>' in shown(words, said("{q"), generation=False)
    for nothing in ("", {}, "{}"):
        assert "<|assistant|>find{}<|eot|>" in shown(words, said(nothing), generation=False)


def test_prompts_and_what_is_imitated_have_the_same_calls():
    words = words_of("{{ m.content }}", calls="{{ f.name }}{{ f.arguments | tojson }}")
    messages = [*said(json.dumps(LAMP)), {"role": "tool", "content": "5", "tool_call_id": "call00000"}]
    row = Row("a.jsonl", 1, {"prompt": messages, "talk": messages[:2]}, "a")
    fields = Fields(ground_truth=None, chat=True)
    call = f"find{json.dumps(LAMP, ensure_ascii=False)}"
    assert f"<|assistant|>{call}<|eot|><|tool|>5" in words.decode(encode_rows([row], words, fields=fields).tokens[0])
    (taught,) = encode_demonstrations([row], words, fields=fields, answers=Answers(messages="talk")).rows
    assert words.decode(taught.response) == f"{call}<|eot|>"


VANISH = "{% if m.role in ('system', 'user', 'assistant') %}{{ m.content }}{% endif %}"


@pytest.mark.parametrize(
    ("message", "messages", "fault"),
    [
        (VANISH, [{"role": "human", "content": "lamp"}, USER], "the content of message 0, of the role 'human'"),
        (VANISH, [USER, {"role": "tool", "content": "lamp"}], "the content of message 1, of the role 'tool'"),
        ("{% if loop.last %}{{ m.content }}{% endif %}", [USER, USER], "the content of message 0, of the role 'user'"),
        ("{{ m.content }}", said(LAMP), "the tool_calls of message 1, of the role 'assistant'"),
        (
            "{{ m.content }}",
            [USER, {"role": "user", "content": "x", "tool_calls": said(LAMP)[1]["tool_calls"]}],
            "tool",
        ),
        (
            "{{ m.content[:20] }}",
            [{"role": "user", "content": "find the file with the lamp"}],
            "all of the content of message 0",
        ),
        ("{{ m.content }}{{ m.content }}", [USER], "writes twice the content of message 0"),
    ],
)
def test_what_a_template_leaves_out_or_doubles_is_named(message, messages, fault):
    assert fault in refused(words_of(message), messages)


def test_each_of_several_calls_is_shown():
    first = words_of("{{ m.content }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}")
    every = words_of("{{ m.content }}", calls="{{ f | tojson }}")
    call = said(LAMP)[1]["tool_calls"][0]
    assert "find" in shown(first, said(LAMP), generation=False)
    twice = [USER, {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "call00001"}]}]
    assert shown(every, twice, generation=False).count("lamp") == 2
    assert "does not show the tool_calls of message 1" in refused(first, twice, generation=False)


def test_a_row_with_a_message_that_vanishes_is_named_with_its_line():
    rows = [{"prompt": [USER]}, {"prompt": [{"role": "human", "content": "lamp"}, USER]}]
    made = [Row("a.jsonl", number, row, "a") for number, row in enumerate(rows, 1)]
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*message 0, of the role 'human'"):
        encode_rows(made, words_of(VANISH), fields=Fields(ground_truth=None, chat=True))
    talks = [Row("b.jsonl", 7, {"talk": [*said(LAMP)]}, "b")]
    with pytest.raises(ValueError, match=r"b\.jsonl:7: .*the tool_calls of message 1"):
        encode_demonstrations(
            talks,
            words_of(VANISH),
            fields=Fields(ground_truth=None, chat=True),
            answers=Answers(messages="talk"),
        )


def test_roles_by_their_older_names_are_those_that_the_template_knows():
    words = words_of(VANISH)
    assert shown(words, [{"role": "developer", "content": "lamp"}, USER]).startswith("<|system|>lamp<|eot|>")
    own = words_of("{{ m.content }}")
    assert shown(own, [{"role": "developer", "content": "lamp"}, USER]).startswith("<|developer|>lamp<|eot|>")


@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_go_by_the_name_that_the_template_reads(read, given):
    words = words_of("{% if m." + read + " %}<think>{{ m." + read + " }}</think>{% endif %}{{ m.content }}")
    messages = [USER, {"role": "assistant", "content": "yes", given: "hm"}, USER]
    assert "<|assistant|><think>hm</think>yes<|eot|>" in shown(words, messages)
    assert "does not show the reasoning of message 1" in refused(words_of("{{ m.content }}"), messages)
    both = {"role": "assistant", "content": "yes", "reasoning": "hm", "thinking": "hm"}
    assert shown(words, [USER, both, USER]) == shown(words, messages)
    with pytest.raises(ValueError, match="message 1, of the role 'assistant': thinking: says otherwise than reasoning"):
        shown(words, [USER, {**both, "thinking": "no"}, USER])


def test_thoughts_of_earlier_turns_may_be_forgotten_by_a_template_that_shows_them_at_the_end():
    forgets = words_of("{% if loop.last and m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}")
    turns = [USER, {"role": "assistant", "content": "yes", "thinking": "hm"}]
    assert "<think>hm</think>yes" in shown(forgets, turns, generation=False)
    assert "hm" not in shown(forgets, [*turns, USER])
    inside = [USER, {"role": "assistant", "content": "<think>hm</think>yes"}]
    strips = words_of("{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
    assert "hm" not in shown(strips, [*inside, USER])
    always = words_of("{{ m.content.split('</think>')[-1] }}")
    assert "hm" not in shown(always, [*inside, USER])
    assert "does not show all of the content of message 1" in refused(always, inside, generation=False)


@pytest.mark.parametrize("change", ["m.content | trim", "m.content | upper", "m.content | tojson", "m.content | e"])
def test_templates_may_trim_and_escape_what_they_write(change):
    words = words_of("{{ " + change + " }}")
    text = '  Say "a < b",\nand é.  '
    assert "b" in shown(words, [{"role": "user", "content": text}]).lower()


def test_contents_are_texts_or_parts_as_the_template_reads_them():
    parts = words_of("{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}")
    assert shown(parts, [USER]) == "<|user|>find<|eot|><|assistant|>"


@pytest.mark.parametrize(
    ("field", "value"), [("weight", 0), ("name", "me"), ("audio", {"id": "x"}), ("thinking_blocks", [{"a": "b"}])]
)
def test_a_field_that_the_template_does_not_read_is_refused_by_its_name(field, value):
    assert f"does not read the field '{field}' of message 0" in refused(
        words_of("{{ m.content }}"), [{**USER, field: value}]
    )
    read = words_of("{{ m.content }}{{ m." + field + " if m." + field + " is defined }}")
    assert str(value)[-2:] in shown(read, [{**USER, field: value}])


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_fields_without_a_value_say_nothing(nothing):
    names = ("tool_calls", "function_call", "refusal", "audio", "annotations", "reasoning_content", "name")
    message = {"role": "assistant", "content": "yes", **dict.fromkeys(names, nothing)}
    words = words_of("{{ m.content }}")
    assert shown(words, [USER, message, USER]) == shown(words, [USER, {"role": "assistant", "content": "yes"}, USER])


def test_a_refusal_is_what_was_said():
    words = words_of("{{ m.content }}")
    message = {"role": "assistant", "content": None, "refusal": "no"}
    assert "<|assistant|>no<|eot|>" in shown(words, [USER, message, USER])
    with pytest.raises(ValueError, match="message 1, of the role 'assistant': refusal: "):
        shown(words, [USER, {**message, "content": "yes"}, USER])


@pytest.mark.parametrize(
    "call",
    [
        {"type": "custom", "custom": {"name": "find", "input": "x"}},
        {"type": "function", "function": {"name": "find", "parameters": {"q": 1}}},
        {"type": "function", "function": {"arguments": "{}"}},
        "find(lamp)",
    ],
)
def test_what_is_no_call_of_a_function_is_refused(call):
    words = words_of("{{ m.content }}", calls="{{ f | tojson }}")
    with pytest.raises(ValueError, match=r"message 1, of the role 'assistant': tool_calls\[0\]: "):
        shown(words, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}])


def test_a_tools_message_has_the_name_of_the_tool_that_was_called():
    words = words_of("{{ m.name }}{{ m.content }}", calls="{{ f | tojson }}")
    messages = [*said(LAMP), {"role": "tool", "content": "5", "tool_call_id": "call00000"}]
    assert "<|tool|>find5<|eot|>" in shown(words, messages)


def test_tools_that_a_conversation_does_not_show_are_named():
    words = words_of("{% if m.role == 'system' %}{{ tools | tojson }}{% endif %}{{ m.content }}")
    assert "find" in shown(words, [{"role": "system", "content": "x"}, USER], tools=[TOOL])
    assert "does not show the tools" in refused(words, [USER], tools=[TOOL])
    own = words_of("{% if tools %}call: find{% endif %}{{ m.content }}")  # the model knows its tools
    assert "call: find" in shown(own, [USER], tools=[TOOL])


def test_tokens_are_those_of_the_text():
    words = words_of("{{ m.content }}")
    text = shown(words, [USER, {"role": "assistant", "content": "yes"}], generation=False)
    ids = encode_chat(words, [USER, {"role": "assistant", "content": "yes"}], generation=False)
    assert words.decode(ids) == text
