"""Answers in the protocol's form: streams add up to whole answers, stops, log-probs, tools."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fppo.data import stop_texts
from fppo.serve.calls import BetweenTexts, reader_of
from fppo.serve.texts import AnswerReader, texts_of
from tests.rollout.templates import KINDS
from tests.serve.parrot import Parrot, log_prob
from tests.serve.world import END, MODEL, World, chat, parrot_world, sampling, says, texts, tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"file": {"type": "string"}}}},
}


def events(response):
    """The objects of a stream, which ends as the protocol says."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed(chunks, index=0):
    own = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
    return "".join(c["delta"].get("content") or "" for c in own), own[-1]["finish_reason"]


def together(chunks):
    """The message that a stream's chunks add up to."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for name, value in chunk["choices"][0]["delta"].items():
            message[name] = message.get(name, "") + value if name != "role" else value
    return message


def test_an_answer_has_all_that_clients_read():
    with parrot_world("lamp in it") as world:
        answer = world.post(CHAT, chat("find", logprobs=True, model=MODEL, return_token_ids=True)).json()
        (choice,) = answer["choices"]
        (row,) = world.episodes.rows("unnamed-0")
    ids = tokenizer().encode("lamp in it")
    assert choice["message"] == {"role": "assistant", "content": "lamp in it", "refusal": None}
    assert (choice["finish_reason"], choice["index"]) == ("stop", 0)
    assert choice["token_ids"] == [*ids, END] == row.turns[0].answer.tokens.tolist()
    assert choice["prompt_token_ids"] == list(row.prompt)
    noted = choice["logprobs"]["content"]
    assert [x["logprob"] for x in noted] == pytest.approx([log_prob(t) for t in (*ids, END)])
    assert b"".join(bytes(x["bytes"]) for x in noted).decode() == "lamp in it<|im_end|>"
    assert "".join(x["token"] for x in noted) == "lamp in it<|im_end|>"
    assert answer["usage"] == {
        "prompt_tokens": len(row.prompt),
        "completion_tokens": len(ids) + 1,
        "total_tokens": len(row.prompt) + len(ids) + 1,
    }
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_what_is_recorded(n):
    with parrot_world() as world:
        more = {"stream": True, "stream_options": {"include_usage": True}, "n": n, "max_tokens": 15, "logprobs": True}
        chunks = events(world.post(f"/e/1{CHAT}", chat("find", **more)))
        rows = world.episodes.rows("1")
    assert [c["choices"][0]["delta"] for c in chunks[:n]] == [{"role": "assistant", "content": ""}] * n
    for index, row in enumerate(rows):
        text, finish = streamed(chunks, index)
        assert text == row.turns[0].text
        assert finish == "length"
        noted = [c["choices"][0]["logprobs"] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        log_probs = [x["logprob"] for each in noted if each for x in each["content"]]
        assert log_probs == pytest.approx(row.turns[0].answer.log_probs.tolist())
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 15 * n


def test_completions_have_their_own_form():
    with parrot_world("lamp") as world:
        whole = world.post(COMPLETIONS, {"prompt": ["find", "list"], "logprobs": 0}).json()
        chunks = events(world.post(COMPLETIONS, {"prompt": "find", "stream": True}))
    assert [choice["text"] for choice in whole["choices"]] == ["lamp", "lamp"]
    assert whole["object"] == "text_completion"
    assert len(whole["choices"][0]["logprobs"]["token_logprobs"]) == len(whole["choices"][0]["logprobs"]["tokens"])
    assert "".join(c["choices"][0]["text"] for c in chunks) == "lamp"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(stream):
    with parrot_world("list read say which what") as world:
        body = chat("find", stop=["zzz", "say wh", "what"], stream=stream)
        response = world.post(f"/e/1{CHAT}", body)
        (row,) = world.episodes.rows("1")
    text, finish = (
        streamed(events(response)) if stream else (response.json()["choices"][0]["message"]["content"], "stop")
    )
    assert (text, finish) == ("list read ", "stop")
    drawn = tokenizer().decode(row.turns[0].answer.tokens.tolist())
    assert drawn.startswith("list read say wh")  # with the ids that ended it
    assert row.turns[0].answer.end == "stop"


def test_a_row_goes_on_behind_the_ids_of_a_stop_text():
    with parrot_world("list read say which what", "lamp") as world:
        first = world.post(f"/e/1{CHAT}", chat("find", stop="say")).json()["choices"][0]["message"]["content"]
        assert world.post(f"/e/1{CHAT}", chat("find", first, "again")).status_code == 200
        (row,) = world.episodes.rows("1")
    assert len(row.turns) == 2
    assert "say<|im_end|>\n<|im_start|>user\nagain" in tokenizer().decode(row.ids)


letters = st.text("abé漢😀 \n<|im_", max_size=12)


@settings(max_examples=60)
@given(
    letters,
    letters,
    st.lists(st.text("abé ", min_size=1, max_size=4), max_size=3),
    st.integers(1, 4),
    st.integers(0, 30),
)
@example("xaab", "", ["aab"], 1, 0)  # of "aa" both letters may belong to the stop
def test_parts_of_an_answer_join_to_the_whole_and_hold_no_stop(first, second, stops, size, last):
    """Whatever parts its tokens come in; half of a character is never shown."""
    ids = tokenizer().encode(first + second, add_special_tokens=False)
    whole_text = texts().decoded(ids)
    ends = [whole_text.find(stop) for stop in stops if stop in whole_text]
    reader = AnswerReader(texts(), stops, (END,))
    if ends:  # an engine ends with the token that completes the first
        done = min(whole_text.find(stop) + len(stop) for stop in stops if stop in whole_text)
        count = next(n for n in range(1, len(ids) + 1) if len(texts().decoded(ids[:n]).rstrip("\ufffd")) >= done)
        ids = ids[:count]
        expected = texts().decoded(ids)
        expected = expected[: min(expected.find(s) for s in stops if s in expected)]
    else:
        ids, expected = [*ids, END], whole_text
    before, last_ids = ids[: max(len(ids) - last, 0)], ids[max(len(ids) - last, 0) :]
    parts = [reader.add(before[i : i + size]) for i in range(0, len(before), size)]
    assert "\ufffd" not in "".join(parts)
    rest, whole = reader.close("stop", last_ids)
    assert whole == expected
    assert "".join(parts) + rest == whole


CALL = 'it is\n<tool_call>\n{"name": "read", "arguments": {"file": "lamp"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_read_as_the_template_writes_them(stream):
    with parrot_world(CALL, "lamp") as world:
        response = world.post(f"/e/1{CHAT}", chat("find", tools=[TOOL], stream=stream))
        if stream:
            chunks = [c["choices"][0] for c in events(response)]
            message = {"content": streamed(events(response))[0], "tool_calls": []}
            for chunk in chunks:
                message["tool_calls"] += chunk["delta"].get("tool_calls", [])
            finish = chunks[-1]["finish_reason"]
        else:
            (choice,) = response.json()["choices"]
            message, finish = choice["message"], choice["finish_reason"]
        assert finish == "tool_calls"
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "read", "arguments": '{"file": "lamp"}'}
        assert message["content"] == "it is"
        call.pop("index", None)
        again = chat("find", tools=[TOOL])
        again["messages"] += [
            {"role": "assistant", "content": message["content"], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "which"},
        ]
        assert world.post(f"/e/1{CHAT}", again).json()["choices"][0]["message"]["content"] == "lamp"
        (row,) = world.episodes.rows("1")
        assert len(row.turns) == 2
        assert tokenizer().decode(row.ids).count("</tool_call><|im_end|>\n<|im_start|>tool\nwhich<|im_end|>") == 1
        again["tools"] = []
        assert world.post(f"/e/1{CHAT}", again).status_code == 200
        assert len(world.episodes.rows("1")) == 2  # without its tools it is another conversation


def test_no_tools_are_read_where_none_are_to_be_called():
    with parrot_world(CALL) as world:
        answer = world.post(CHAT, chat("find", tools=[TOOL], tool_choice="none")).json()["choices"][0]
    assert answer["message"]["content"] == CALL
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("lamp", "lamp", 0),
        ('<tool_call>{"name": "read"}</tool_call>', '<tool_call>{"name": "read"}</tool_call>', 0),  # no arguments
        ('<tool_call>{"name": "read", "arg', '<tool_call>{"name": "read", "arg', 0),  # it was cut
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            0,
        ),
        ('<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b", "arguments": 3}', "", 2),
        ("<tool_call>" + '{"a":' * 5000, "<tool_call>" + '{"a":' * 5000, 0),
    ],
)
def test_what_is_no_call_stays_text(text, content, calls):
    turn = BetweenTexts("<tool_call>", "</tool_call>", "arguments")(text, text, "", ())
    assert (turn.content, len(turn.calls)) == (content, calls)


def test_the_parser_is_found_in_the_chat_template():
    assert reader_of(tokenizer()) == BetweenTexts("<tool_call>", "</tool_call>", "arguments")


def test_a_template_whose_calls_cannot_be_read_takes_no_tools():
    import copy

    other = copy.deepcopy(tokenizer())
    other.chat_template = KINDS["strips"]
    assert reader_of(other) is None
    changed = texts_of(other, vocabulary=len(other))
    with parrot_world("lamp", texts=changed) as world:
        assert world.post(CHAT, chat("find")).status_code == 200
        refused = world.post(CHAT, chat("find", tools=[TOOL]))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"


def test_a_template_of_parts_shows_what_is_said():
    import copy

    other = copy.deepcopy(tokenizer())
    other.chat_template = KINDS["parts"]
    said = texts_of(other, vocabulary=len(other)).prompt([{"role": "user", "content": "find"}], ())
    assert other.decode(said) == "<|user|>find<eos>\n<|assistant|>"


def test_a_turn_ends_by_a_token_that_the_policy_has():
    assert texts_of(tokenizer(), vocabulary=END + 1).ends == (END,)
    assert texts_of(tokenizer(), vocabulary=END).ends == ()


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokenizers_own_response_template_reads_calls(stream):
    other = copy.deepcopy(tokenizer())
    other.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    said = '<think>hm</think>it is<tool_call>{"name": "read", "arguments": {"file": "lamp"}}</tool_call> say which'
    changed = texts_of(other, vocabulary=len(other))
    with parrot_world(said, said, texts=changed) as world:
        response = world.post(CHAT, chat("find", tools=[TOOL], stream=stream))
        message = together(events(response)) if stream else response.json()["choices"][0]["message"]
        plain = world.post(CHAT, chat("list")).json()["choices"][0]["message"]
    assert message["content"] == "it is\nsay which"
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "read", "arguments": '{"file": "lamp"}'}
    assert plain["content"] == said  # without tools a turn is shown as it is


NINE = (
    "{% macro checked(id) %}{% if id is not defined or id | length != 9 or not id.isalnum() %}"
    "{{ raise_exception('an id has nine letters or digits') }}{% endif %}{% endmacro %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{{ checked(c.id) }}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|im_end|>"
    "{% elif m.role == 'tool' %}{{ checked(m.tool_call_id) }}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}"
    "{% endfor %}"
)
LISTED = '[TOOL_CALLS][{"name": "read", "arguments": {"file": "a"}}, {"name": "read", "arguments": {"file": "b"}}]'


def with_template(template):
    other = copy.deepcopy(tokenizer())
    other.chat_template = template
    return texts_of(other, vocabulary=len(other))


def test_ids_of_calls_are_those_that_a_template_of_mistral_takes_and_no_other_servers():
    """In nine letters or digits; the answer's two calls stand in one list."""
    seen = set()
    for _ in range(2):
        with parrot_world(LISTED, "lamp", "lamp", texts=with_template(NINE)) as world:
            first = world.post(f"/e/1{CHAT}", chat("find", tools=[TOOL])).json()["choices"][0]["message"]
            said = [{"role": "user", "content": "find"}, {**first, "content": ""}]
            said += [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in first["tool_calls"]]
            second = world.post(f"/e/1{CHAT}", {"messages": said, "tools": [TOOL]})
            (row,) = world.episodes.rows("1")
        assert second.status_code == 200, second.text
        assert [json.loads(call["function"]["arguments"])["file"] for call in first["tool_calls"]] == ["a", "b"]
        assert first["content"] is None
        assert len(row.turns) == 2
        seen |= {call["id"] for call in first["tool_calls"]}
    assert len(seen) == 4
    assert all(len(each) == 9 and each.isalnum() for each in seen)


@pytest.mark.parametrize("many", [True, False, None])
@pytest.mark.parametrize("shown", [True, False])
def test_one_call_at_most_is_no_promise_of_this_server(many, shown):
    more = {"tools": [TOOL]} if shown else {"tools": [TOOL], "tool_choice": "none"}
    with parrot_world("lamp") as world:
        response = world.post(CHAT, chat("find", parallel_tool_calls=many, **more))
        wrong = world.post(CHAT, chat("find", parallel_tool_calls="no", tools=[TOOL]))
    refused = shown and many is False
    assert response.status_code == (400 if refused else 200)
    if refused:
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("parallel_tool_calls", "unsupported_parameter")
    assert wrong.json()["error"]["param"] == "parallel_tool_calls"


def test_ids_of_calls_follow_from_the_draws_where_a_rollout_must_come_out_again():
    made = []
    for _ in range(2):
        with parrot_world(LISTED, texts=with_template(NINE), repeats=True) as world:
            posts = [world.post(f"/e/{name}{CHAT}", chat("find", tools=[TOOL])).json() for name in "12"]
        made.append([call["id"] for x in posts for call in x["choices"][0]["message"]["tool_calls"]])
    assert made[0] == made[1]
    assert len(set(made[0])) == 4


OF_FILE = '<tool_call>\n{"name": "read", "arguments": {"file": "%s"}}\n</tool_call>'
TURNS = {
    "cut in a second call": (OF_FILE % "a" + '\n<tool_call>\n{"name": "re', False, "a", '<tool_call>\n{"name": "re'),
    "cut behind a call": ("find" + OF_FILE % "a" + "\n", False, "a", "find"),
    "a word behind a call": (OF_FILE % "a" + "\nlamp", True, "a", "lamp"),
    "words around calls": ("say\n" + OF_FILE % "a" + "\nlist\n" + OF_FILE % "b" + " it", True, "ab", "say\nlist\n it"),
    "a call that is none": (
        OF_FILE % "a" + "<tool_call>\nlamp</tool_call>",
        True,
        "a",
        "<tool_call>\nlamp</tool_call>",
    ),
    "calls alone": (OF_FILE % "a" + "\n" + OF_FILE % "b", True, "ab", ""),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", TURNS)
def test_nothing_that_a_policy_writes_around_its_calls_is_dropped(kind, stream):
    """Whether it was cut is said, in a stream and whole."""
    said, ended, files, content = TURNS[kind]
    with World(Parrot(says(said, end=ended))) as world:
        response = world.post(CHAT, chat("find", tools=[TOOL], stream=stream, max_tokens=200))
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(response)]
        calls = [call for each in chunks for call in each["delta"].get("tool_calls", ())]
        text, finish = streamed(events(response))
    else:
        (choice,) = response.json()["choices"]
        calls, text, finish = choice["message"]["tool_calls"], choice["message"]["content"], choice["finish_reason"]
    assert [json.loads(call["function"]["arguments"])["file"] for call in calls] == [*files]
    assert (text or "", finish) == (content, "tool_calls" if ended else "length")


@pytest.mark.parametrize("stream", [False, True])
def test_what_ends_a_policys_turns_ends_them_beside_a_requests_own_stops(stream):
    """A stop text of the run is no part of what an agent reads, and stays among those of a request."""
    stops = stop_texts(tokenizer(), ["\nwhich"])
    for own, text in ((None, "find"), ("list", "find"), (["fi", "list"], ""), ("<|im_start|>", "find")):
        with parrot_world("find\nwhich lamp list", sampling=sampling(stop_texts=stops)) as world:
            response = world.post(CHAT, chat("find", stop=own, stream=stream))
            asked = world.engine.requests[0].sampling.stop_texts
        got = streamed(events(response))[0] if stream else response.json()["choices"][0]["message"]["content"]
        assert got == text
        assert asked.texts[0] == b"\nwhich"


def test_a_tokenizer_without_a_chat_template_answers_completions_alone():
    changed = texts_of(tokenizer(), vocabulary=len(tokenizer()), chat=False)
    with parrot_world("lamp", texts=changed) as world:
        assert world.post(COMPLETIONS, {"prompt": "find"}).status_code == 200
        assert "no chat template" in world.post(CHAT, chat("find")).json()["error"]["message"]


def test_answers_of_several_requests_do_not_mix():
    with parrot_world() as world:

        async def many():
            async with world.client() as client:
                bodies = [chat(f"find {n}", max_tokens=5 + n % 7, stream=bool(n % 2)) for n in range(40)]
                posts = (client.post(f"/e/{n}{CHAT}", json=body) for n, body in enumerate(bodies))
                return await asyncio.gather(*posts)

        responses = asyncio.run(many())
        for number, response in enumerate(responses):
            got = streamed(events(response))[0] if number % 2 else response.json()["choices"][0]["message"]["content"]
            (row,) = world.episodes.rows(str(number))
            assert row.turns[0].text == got
            assert len(row.turns[0].answer.tokens) == 5 + number % 7
