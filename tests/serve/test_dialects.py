"""A conversation in three protocols: chats, Responses and Messages have the same ids, log-probs and episodes."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.rollout.requests import FinishedRequest
from fppo.serve.calls import ParsedTurn, ToolCall
from fppo.serve.messages import MessagesForm, messages_request
from fppo.serve.protocol import chat_request
from fppo.serve.refusal import Refusal
from fppo.serve.replies import message_of
from fppo.serve.responses import ResponseForm, StoredResponse, response_request
from fppo.serve.service import Bounds, WholeAnswer
from tests.serve.parrot import Parrot
from tests.serve.test_answers import CHAT, together
from tests.serve.test_forced import TOOLS
from tests.serve.test_recorded import answer
from tests.serve.world import END, MODEL, World, chat, parrot_world, texts, tokenizer

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CALL = '<tool_call>\n{"name": "read", "arguments": {"file": "a é"}}\n</tool_call>'
ODD = '<tool_call>\n{"name": "list", "arguments": [1, "b"]}\n</tool_call>'
SAID = ("lamp", "", "No, again é ü 漢", "which; in it", CALL, f"read\n{CALL}\n{ODD}", "<|im_end|>", ODD, CALL)


def by_conversation(request, before):
    """An answer by all ids before it and the key alone."""
    seen = repr((list(before), request.key.seed, request.row)).encode()
    text = SAID[hashlib.blake2b(seen).digest()[0] % len(SAID)]
    return [*tokenizer().encode(text, add_special_tokens=False), END]


def objects(response):
    """The objects of a stream's events, whose names are their types."""
    found = []
    for each in response.text.strip().split("\n\n"):
        *names, data = each.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert names == [f"event: {value['type']}"]
        found.append(value)
    return found


class Chat:
    """A client of chats, which sends back the messages that it gets."""

    path = CHAT

    def __init__(self, plan):
        self.plan, self.said = plan, []

    def body(self, said, results):
        plan = self.plan
        results = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]
        self.said += [*results, *([] if said is None else [{"role": "user", "content": said}])]
        system = [] if plan["system"] is None else [{"role": "system", "content": plan["system"]}]
        own = {"messages": [*system, *self.said], "stop": plan["stop"], "max_tokens": plan["max_tokens"]}
        if plan["tools"]:
            own |= {"tools": TOOLS, "tool_choice": plan["choice"]}
        return own

    def read(self, response, stream):
        """The ids of the calls that an answer has; None for an error."""
        if stream:
            lines = [json.loads(x.removeprefix("data: ")) for x in response.text.split("\n") if x.startswith("data: {")]
            message = None if "error" in lines[-1] else together(lines)
        else:
            message = response.json()["choices"][0]["message"] if response.status_code == 200 else None
        if message is None:
            return None
        calls = [{x: y for x, y in call.items() if x != "index"} for call in message.get("tool_calls") or ()]
        self.said.append(
            {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
        )
        return [call["id"] for call in calls]


class Responses:
    """A client of Responses, which sends back the items that it gets, or names the response before."""

    path = RESPONSES

    def __init__(self, plan):
        self.plan, self.said, self.before = plan, [], None

    def body(self, said, results):
        plan = self.plan
        added = [{"type": "function_call_output", "call_id": name, "output": text} for name, text in results]
        added += [] if said is None else [{"role": "user", "content": [{"type": "input_text", "text": said}]}]
        self.said += added
        own = {"instructions": plan["system"], "stop": plan["stop"], "max_output_tokens": plan["max_tokens"]}
        own |= {"input": added, "previous_response_id": self.before} if plan["ids"] else {"input": self.said}
        if plan["tools"]:
            choice = plan["choice"]
            choice = {"type": "function", "name": "read"} if isinstance(choice, dict) else choice
            own |= {"tools": [{"type": "function", **tool["function"], "strict": None} for tool in TOOLS]}
            own |= {"tool_choice": choice}
        return own

    def read(self, response, stream):
        if stream:
            whole = self._added_up(objects(response))
        else:
            whole = response.json() if response.status_code == 200 else None
        if whole is None:
            return None
        self.said, self.before = [*self.said, *whole["output"]], whole["id"]
        return [item["call_id"] for item in whole["output"] if item["type"] == "function_call"]

    def _added_up(self, events):
        """The response of a stream, whose items are those that its events add up to; None if it ends by an error."""
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        if events[-1]["type"] == "error":
            return None
        items, texts_of, sent = [], {}, {}
        for event in events:
            kind = event["type"]
            if kind == "response.output_item.added":
                assert event["output_index"] == len(sent)
                sent[event["item"]["id"]] = event["item"]
            elif kind.endswith(".delta"):
                texts_of[event["item_id"]] = texts_of.get(event["item_id"], "") + event["delta"]
            elif kind == "response.output_item.done":
                item = event["item"]
                text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
                assert texts_of.get(item["id"], "") == text
                assert sent[item["id"]]["type"] == item["type"]
                items.append(item)
        assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["response"]["output"] == items
        assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
        return events[-1]["response"]


class Messages:
    """A client of Messages, which sends back the blocks that it gets."""

    path = MESSAGES

    def __init__(self, plan):
        self.plan, self.said = plan, []

    def body(self, said, results):
        plan = self.plan
        blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results]
        blocks += [] if said is None else [{"type": "text", "text": said}]
        self.said.append({"role": "user", "content": blocks})
        own = {"messages": self.said, "stop_sequences": plan["stop"], "max_tokens": plan["max_tokens"]}
        own |= {} if plan["system"] is None else {"system": [{"type": "text", "text": plan["system"]}]}
        if plan["tools"]:
            renamed = [
                {"input_schema" if name == "parameters" else name: x for name, x in tool["function"].items()}
                for tool in TOOLS
            ]
            kinds = {None: "auto", "required": "any"}
            choice = {"type": "tool", "name": "read"}
            if not isinstance(plan["choice"], dict):
                choice = {"type": kinds[plan["choice"]]}
            own |= {"tools": renamed, "tool_choice": choice}
        return own

    def read(self, response, stream):
        if stream:
            whole = self._added_up(objects(response))
        else:
            whole = response.json() if response.status_code == 200 else None
        if whole is None:
            return None
        self.said.append({"role": "assistant", "content": whole["content"]})
        return [block["id"] for block in whole["content"] if block["type"] == "tool_use"]

    def _added_up(self, events):
        if events[-1]["type"] == "error":
            return None
        message, parts = events[0]["message"], []
        for event in events[1:]:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(message["content"])
                    message["content"].append(event["content_block"])
                    parts.append("")
                case "content_block_delta":
                    delta = event["delta"]
                    parts[event["index"]] += delta.get("text", "") + delta.get("partial_json", "")
                case "message_delta":
                    message |= event["delta"]
                    message["usage"] |= event["usage"]
        for block, part in zip(message["content"], parts, strict=True):
            block |= {"text": part} if block["type"] == "text" else {"input": json.loads(part)}
        assert events[-1] == {"type": "message_stop"}
        return message


def played(client, plan, *, stream):
    """What is recorded of a conversation, turn by turn, by the names of episodes."""
    client = client(plan)
    world = World(Parrot(by_conversation), repeats=True)
    with world:
        calls: list[str] | None = []
        for turn in range(plan["turns"]):
            results = [(name, f"found {place}") for place, name in enumerate(calls)]
            body = client.body(None if results and plan["silent"] else f"find {turn}", results)
            body |= {"stream": stream, "model": MODEL} | ({} if plan["seed"] is None else {"seed": plan["seed"]})
            response = world.post(f"{plan['before']}{client.path}", body)
            assert response.status_code in ((200,) if stream else (200, 422)), response.text
            if (calls := client.read(response, stream)) is None:
                break
        return {
            name: [[shown(x) for x in row.turns] for row in world.episodes.rows(name)]
            for name in world.episodes.names()
        }


def shown(turn):
    found: FinishedRequest = turn.answer
    lists = [getattr(found, x).tolist() for x in ("tokens", "log_probs", "sampling_log_probs", "versions")]
    return [turn.before, turn.opened, turn.text, found.end, *lists]


PLANS = st.fixed_dictionaries(
    {
        "system": st.sampled_from([None, "find the lamp", "<|im_end|>"]),
        "tools": st.booleans(),
        "choice": st.sampled_from([None, None, "required", {"type": "function", "function": {"name": "read"}}]),
        "turns": st.integers(1, 3),
        "silent": st.booleans(),
        "stop": st.sampled_from([[], [";"], ["in", "漢"]]),
        "seed": st.sampled_from([None, 3]),
        "max_tokens": st.sampled_from([4, 90]),
        "before": st.sampled_from(["", "/e/7"]),
        "ids": st.booleans(),
    }
)


@pytest.mark.slow
@settings(max_examples=25)
@given(PLANS)
def test_every_conversation_is_recorded_alike_in_every_protocol(plan):
    check(plan)


def test_a_conversation_is_recorded_alike_in_every_protocol():
    plan = {"system": "find the lamp", "tools": True, "choice": None, "turns": 3, "silent": False, "stop": [";"]}
    check({**plan, "seed": None, "max_tokens": 90, "before": "/e/7", "ids": True})


def check(plan):
    expected = played(Chat, plan, stream=False)
    assert [len(rows) for rows in expected.values()] == [1]  # nothing was read anew
    for client in (Chat, Responses, Messages):
        for stream in (False, True):
            assert played(client, plan, stream=stream) == expected, (client, stream)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('abé {}"\\<', max_size=6),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text('ab"}', max_size=3), each, max_size=2),
    max_leaves=4,
)
turns = st.builds(
    ParsedTurn,
    st.sampled_from(["", "lamp", "é\n"]),
    st.lists(st.builds(ToolCall, st.sampled_from(["read", "a"]), values.map(json.dumps) | st.just("{no")), max_size=3),
    st.sampled_from([None, "", "hm"]),
)


def whole(turn, end="stop", tokens=(5, 6)):
    own = {"index": 0, "tokens": list(tokens), "prompt": (1, 2), "origin": "x"}
    return WholeAnswer(turn=turn, finished=answer(list(tokens), "r", end=end), **own)


@settings(max_examples=200)
@given(st.lists(turns, min_size=1, max_size=3))
def test_what_clients_send_back_is_the_same_chat(said):
    """Thoughts, texts and calls of answers, one after the other, whose arguments may be no object and no JSON."""
    user = {"role": "user", "content": "find"}
    forms = (
        ResponseForm(id="r", created=1, model="m", body={}),
        MessagesForm(id="m", model="m", texts=texts(), stops=()),
    )
    messages, items, blocks = [user], [user], [user]
    for turn in said:
        messages += [message_of(whole(turn)), user]
        items += [*forms[0].whole([whole(turn)])["output"], user]
        blocks += [{"role": "assistant", "content": forms[1].whole([whole(turn)])["content"]}, user]
    expected = chat_request({"messages": messages}).messages
    assert response_request({"input": items}, StoredResponse()).translated.chat.messages == expected
    assert messages_request({"messages": blocks}).chat.messages == expected


def test_the_end_of_a_message_says_what_ended_it():
    cases = [
        (["in"], "which in it", "stop_sequence", "in"),
        (["漢"], "lamp", "end_turn", None),
        ([], CALL, "tool_use", None),
    ]
    for stops, said, reason, text in cases:
        with parrot_world(said) as world:
            tools = [{"name": "read", "input_schema": {"type": "object"}}] if said == CALL else []
            body = {**chat("find"), "stop_sequences": stops, "max_tokens": 90, "tools": tools}
            reply = world.post(MESSAGES, body).json()
        assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, text)
    with parrot_world("lamp in it") as world:
        reply = world.post(MESSAGES, {**chat("find"), "max_tokens": 2}).json()
        again = world.post(RESPONSES, {"input": "find", "max_output_tokens": 2}).json()
        (row,) = world.episodes.rows("unnamed-0")
    assert (reply["stop_reason"], again["status"]) == ("max_tokens", "incomplete")
    assert reply["usage"] == {"input_tokens": len(row.prompt), "output_tokens": 2}
    assert again["usage"]["total_tokens"] == len(row.prompt) + 2


def refusal_of(call, *how):
    with pytest.raises(Refusal) as caught:
        call(*how)
    return caught.value


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "input: give a text"),
        ({"input": []}, "input: give"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens: 0 is not allowed"),
        ({"input": "a", "max_tokens": 5}, "max_tokens: there is no such parameter"),
        ({"input": "a", "frobnicate": 1}, "frobnicate: there is no such parameter"),
        ({"input": "a", "background": True}, "background: true is not supported"),
        ({"input": "a", "conversation": "c"}, "conversation:"),
        ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning:"),
        ({"input": "a", "truncation": "auto"}, "truncation:"),
        ({"input": "a", "text": {"format": {"type": "json_object"}}}, "text:"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include:"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs:"),
        ({"input": "a", "store": 1}, "store: 1 is not allowed"),
        ({"input": "a", "instructions": 1}, "instructions: give a text"),
        ({"input": "a", "previous_response_id": 1}, "previous_response_id: give"),
        ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id: there is no response 'resp_x'"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, 'tools[0]: "web_search" is not supported'),
        (
            {"input": "a", "tools": [{"type": "function", "name": "f", "defer_loading": True}]},
            "tools[0].defer_loading:",
        ),
        ({"input": "a", "tools": TOOLS[:1]}, "tools[0]:"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice:"),
        ({"input": "a", "tool_choice": "sometimes"}, "tool_choice:"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "king", "content": "a"}]}, "input[1].role:"),
        ({"input": [{"role": "user", "content": "a", "frob": 1}]}, "input[0].frob:"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]:"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type:"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}]}, "input[0].summary:"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id:"),
        (
            {"input": [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "x"}]},
            "input[1].name:",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": 3}]}, "input[0].output:"),
    ],
)
def test_what_responses_cannot_honour_is_refused_by_name(body, named):
    error = refusal_of(response_request, body, StoredResponse())
    assert error.message.startswith(named)
    assert (error.status, named.startswith(error.param)) == (400, True)


def block(*blocks, role="user"):
    return {"messages": [{"role": role, "content": [*blocks]}]}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "messages: give a list"),
        ({**chat("a"), "max_tokens": 0}, "max_tokens: 0 is not allowed"),
        ({**chat("a"), "stop_sequences": [""]}, "stop_sequences[0]:"),
        ({**chat("a"), "stop": ["a"]}, "stop: there is no such parameter"),
        ({**chat("a"), "n": 2}, "n: there is no such parameter"),
        ({**chat("a"), "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking:"),
        ({**chat("a"), "mcp_servers": [{}]}, "mcp_servers:"),
        ({**chat("a"), "output_config": {"effort": "low"}}, "output_config:"),
        ({**chat("a"), "system": 5}, "system: give a text"),
        ({**chat("a", "b")}, "messages: the last one is the assistant's"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role:"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "messages[0].name:"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content:"),
        (block({"type": "image"}), "messages[0].content[0].type:"),
        (block({"type": "text", "text": "a"}, {"type": "text", "text": 3}), "messages[0].content[1].text:"),
        (block({"type": "text", "text": "a", "frob": 1}), "messages[0].content[0].frob:"),
        (block({"type": "tool_use", "id": "x", "name": "f", "input": {}}), "messages[0].content[0].type:"),
        (block({"type": "redacted_thinking"}, role="assistant"), "messages[0].content[0].type:"),
        (block({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id:"),
        (
            block({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0]:",
        ),
        ({**chat("a"), "tools": [{"type": "bash_20250124", "name": "bash"}]}, 'tools[0]: "bash_20250124"'),
        ({**chat("a"), "tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading:"),
        ({**chat("a"), "tool_choice": {"type": "some"}}, "tool_choice:"),
        ({**chat("a"), "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice:"),
        (
            {**chat("a"), "tools": [{"name": "f"}], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use:",
        ),
    ],
)
def test_what_messages_cannot_honour_is_refused_by_name(body, named):
    error = refusal_of(messages_request, body)
    assert error.message.startswith(named)
    assert error.status == 400


def test_harmless_parameters_change_nothing():
    asked = response_request({"input": "a"}, StoredResponse()).translated.chat
    more = {"metadata": {"a": "b"}, "store": False, "include": ["reasoning.encrypted_content"], "background": False}
    more |= {"text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled", "client_metadata": {}}
    more |= {"reasoning": {"summary": "auto", "effort": None}}
    assert response_request({"input": "a", **more}, StoredResponse()).translated.chat == asked
    plain = messages_request(chat("a")).chat
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    said = [{"role": "system", "content": "b"}, *chat("a")["messages"]]
    assert messages_request({"messages": said}).chat == messages_request({**chat("a"), "system": "b"}).chat
    harmless = {"metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}, "service_tier": "auto"}
    assert messages_request({**block(cached), **harmless}).chat == plain


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, f"/e/7{MESSAGES}", f"{MESSAGES}/batches"])
def test_errors_have_the_form_of_their_protocol(path):
    theirs, body = MESSAGES in path, {"input": "find"} if path == RESPONSES else chat("find")
    long = {**body, ("input" if path == RESPONSES else "system"): "find " * 200}
    with parrot_world("lamp", bounds=Bounds(row_tokens=64, body_bytes=4000)) as world:
        cases = [
            (world.post(path, body, headers={"authorization": "Bearer no"}), 401, "authentication_error"),
            (world.post(path, b"x" * 5000), 413, "request_too_large"),
            (world.post(path, {**body, "model": "other"}), 404, "not_found_error"),
        ]
        if not path.endswith("batches"):
            cases += [(world.post(path, sent), 400, "invalid_request_error") for sent in (b"{", long)]
        assert world.episodes.names() == []
    for response, status, kind in cases:
        error = response.json()["error"]
        assert response.status_code == status
        assert (response.json().get("type") == "error") == theirs
        assert (error.keys() == {"type", "message"} and error["type"] == kind) == theirs
    if path == RESPONSES:
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_the_key_may_come_as_messages_clients_send_it():
    with parrot_world("lamp") as world:

        def status(**headers):
            async def send():
                async with world.client() as client:
                    del client.headers["authorization"]
                    return await client.post(MESSAGES, json=chat("find"), headers=headers)

            return asyncio.run(send()).status_code

        assert status(**{"x-api-key": "secret"}) == 200
        assert status(authorization="Bearer secret", **{"x-api-key": "other"}) == 200  # the first header decides
        for wrong in ({}, {"x-api-key": "Bearer secret"}, {"x-api-key": ""}, {"authorization": "secret"}):
            assert status(**wrong) == 401
        assert status(authorization="Bearer no", **{"x-api-key": "secret"}) == 401


def test_a_response_is_followed_if_it_was_stored():
    with parrot_world("lamp", "which", "No", "again") as world:
        first = world.post(RESPONSES, {"input": "find", "instructions": "list", "store": False}).json()
        lost = world.post(RESPONSES, {"input": "more", "previous_response_id": first["id"]})
        second = world.post(RESPONSES, {"input": "find", "instructions": "list"}).json()
        one, other = (
            world.post(RESPONSES, {"input": text, "previous_response_id": second["id"]}).json() for text in ("a", "b")
        )
    assert (lost.status_code, lost.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert one["id"] != other["id"]
    assert one["previous_response_id"] == second["id"]
    sent = [texts().decoded(request.ids) for request in world.engine.requests]
    assert "system" in sent[1]
    assert "system" not in sent[2]  # instructions are those of one request
    assert "which" in sent[2]
    assert "which" in sent[3]


def test_stored_conversations_are_bounded_and_the_least_used_goes_first():
    stored = StoredResponse(most_bytes=100)
    for name in ("a", "b"):
        stored.add(name, [{"role": "user", "content": name * 10}])
    stored.messages("a")
    stored.add("c", [{"role": "user", "content": "c" * 10}])
    assert [m["content"][0] for name in ("a", "c") for m in stored.messages(name)] == ["a", "c"]
    assert refusal_of(stored.messages, "b").code == "previous_response_not_found"
    stored.add("d", [{"role": "user", "content": "d" * 200}])
    for name in ("a", "c", "d"):
        refusal_of(stored.messages, name)
