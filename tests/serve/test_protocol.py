"""Bodies of requests as values, against definitions by hand: each parameter's default, bounds and form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.serve.protocol import chat_request, completion_request, parsed
from fppo.serve.refusal import Refusal
from tests.serve.world import chat

DEFAULTS = {
    "model": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "max_tokens": None,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "seed": None,
    "stream": False,
    "include_usage": False,
    "top_logprobs": None,
    "return_token_ids": False,
    "user": None,
}
# the smallest and the largest values that are taken, and values beyond them
BOUNDS = [
    ("temperature", [0, 100, 0.5], [-0.01, 100.01, True, "1"]),
    ("top_p", [1e-6, 1], [0, 1.01]),
    ("top_k", [-1, 10**6], [-2, 0.5, True]),
    ("min_p", [0, 0.999], [-0.01, 1, 1.0, True, "0"]),
    ("max_tokens", [1, 10**6], [0]),
    ("n", [1, 128], [0, 129]),
    ("seed", [-(1 << 63), (1 << 63) - 1, 0], [-(1 << 63) - 1, 1 << 63]),
    ("stop", ["a", ["a"] * 16], ["", ["a", ""], ["a"] * 17, 3, [3]]),
    ("stop_token_ids", [[0, 5], []], [[-1], 5, [True]]),
    ("stream", [True, False], [1, "yes"]),
    ("return_token_ids", [True, False], [1]),
    ("model", ["a"], [3]),
    ("user", ["a"], [3]),
]


def shown(options):
    return {name: options.sampling[name] if name in options.sampling else getattr(options, name) for name in DEFAULTS}


def as_values(given):
    """Parameters as the options hold them."""
    return given | ({"stop": [given["stop"]]} if isinstance(given.get("stop"), str) else {})


@given(st.fixed_dictionaries({}, optional={name: st.sampled_from([*right, None]) for name, right, _ in BOUNDS}))
@settings(max_examples=100)
def test_options_are_what_the_body_says_and_defaults_elsewhere(given):
    expected = DEFAULTS | as_values({name: x for name, x in given.items() if x is not None})
    assert shown(chat_request(chat("find", **given)).options) == expected
    assert shown(completion_request({"prompt": "find", **given}).options) == expected


@pytest.mark.parametrize(("name", "wrong"), [(name, x) for name, _, wrong in BOUNDS for x in wrong])
def test_values_beyond_a_bound_are_refused_by_name(name, wrong):
    for read, body in ((chat_request, chat("find")), (completion_request, {"prompt": "find"})):
        with pytest.raises(Refusal) as raised:
            read({**body, name: wrong})
        assert (raised.value.status, raised.value.param) == (400, name)


def test_all_that_is_wrong_is_said_at_once_by_its_place_and_value():
    body = chat("find", temperature=-1, stop=["a", 3], stream=True, stream_options={"include_usage": "no"}, n=0)
    with pytest.raises(Refusal) as raised:
        chat_request(body)
    parts = raised.value.message.split("; ")
    told = [part.partition(" is not allowed: ")[0] for part in parts]
    assert told == ["temperature: -1", "n: 0", "stop[1]: 3", 'stream_options.include_usage: "no"']
    assert parts[0].endswith("greater than or equal to 0")


@pytest.mark.parametrize(
    ("given", "top"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True, "stream": True, "top_logprobs": 0}, 0),
    ],
)
def test_a_chat_has_the_log_probs_that_it_wants(given, top):
    assert chat_request(chat("find", **given)).options.top_logprobs == top


@pytest.mark.parametrize("top", [0, 20])
def test_completions_have_the_log_probs_that_they_want(top):
    assert completion_request({"prompt": "find", "logprobs": top}).options.top_logprobs == top


@pytest.mark.parametrize(
    "given",
    [
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": False},
        {"top_logprobs": False},
        {"logprobs": True, "top_logprobs": 1, "stream": True},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": 3},
    ],
)
def test_log_probs_and_streams_that_do_not_go_together_are_refused(given):
    with pytest.raises(Refusal):
        chat_request(chat("find", **given))


def test_a_stream_tells_its_usage_where_it_is_to():
    for told in (True, False):
        body = chat("find", stream=True, stream_options={"include_usage": told})
        assert chat_request(body).options.include_usage == told


def test_the_newer_name_of_a_bound_comes_before_the_older():
    body = chat("find", max_completion_tokens=5, max_tokens=3)
    assert chat_request(body).options.max_tokens == 5
    assert chat_request(chat("find", max_completion_tokens=5)).options.max_tokens == 5


REFUSED = {
    "frequency_penalty": (0, 1),
    "presence_penalty": (0, -1),
    "repetition_penalty": (1, 1.1),
    "logit_bias": ({}, {"5": 1}),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "function_call": ("auto", {"name": "a"}),
    "functions": ([], [{}]),
    "modalities": (["text"], ["audio"]),
    "best_of": (1, 2),
    "echo": (False, True),
    "suffix": ("", "a"),
    "prompt_logprobs": (0, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_what_is_sampled_is_refused_and_its_neutral_value_taken(name):
    harmless, other = REFUSED[name]
    assert shown(chat_request(chat("find", **{name: harmless})).options) == DEFAULTS
    with pytest.raises(Refusal) as raised:
        chat_request(chat("find", **{name: other}))
    assert (raised.value.param, raised.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", ["metadata", "store", "verbosity"])
def test_what_changes_nothing_is_passed_over(name):
    assert shown(chat_request(chat("find", **{name: "x"})).options) == DEFAULTS


TOOL = {"type": "function", "function": {"name": "read"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"a": [1]}'}}


def test_messages_are_read_with_their_fields():
    said = [
        {"role": "developer", "content": "a"},
        {"role": "user", "name": "me", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "d", "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "e"},
        {"role": "assistant", "content": "f", "tool_calls": None},
    ]
    read = chat_request({"messages": said, "tools": [TOOL]})
    call = CALL | {"function": {"name": "read", "arguments": {"a": [1]}}}
    assert list(read.messages) == [
        {"role": "system", "content": "a"},
        {"role": "user", "name": "me", "content": "bc"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "d"},
        {"role": "tool", "tool_call_id": "c1", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    assert read.tools == (TOOL,)
    assert chat_request({"messages": said, "tools": [TOOL], "tool_choice": "auto"}).tools == (TOOL,)
    assert chat_request({"messages": said, "tools": [TOOL], "tool_choice": "none"}).tools == ()


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"role": "user", "content": None}, "content"),
        ({"role": "assistant", "content": None}, "content"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "content"),
        ({"role": "user", "content": "a", "name": 3}, "name"),
        ({"role": "tool", "content": "a", "tool_call_id": 3}, "tool_call_id"),
        ({"role": "assistant", "content": "a", "reasoning_content": 3}, "reasoning_content"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}, "tool_calls[0]"),
    ],
)
def test_messages_of_another_form_are_refused_by_name(message, name):
    with pytest.raises(Refusal) as raised:
        chat_request({"messages": [{"role": "user", "content": "a"}, message]})
    assert raised.value.param == f"messages[1].{name}"


@pytest.mark.parametrize("arguments", ["{", "[1", 3, {"a": 1}])
def test_arguments_that_are_no_json_stay_as_they_are(arguments):
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}
    (message,) = chat_request({"messages": [said]}).messages
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ([0, 5], ((0, 5),)),
        ([(1 << 31) - 1], (((1 << 31) - 1,),)),
        (["a", "b"], ("a", "b")),
        ([[1], "b"], ((1,), "b")),
        (["a"] * 128, ("a",) * 128),
    ],
)
def test_prompts_are_texts_or_ids_or_lists_of_them(prompt, expected):
    assert completion_request({"prompt": prompt}).prompts == expected


@pytest.mark.parametrize("prompt", [None, [], [[]], [-1], [1 << 31], [[5, -1]], ["a"] * 129, [True], 3, [["a"]]])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(Refusal):
        completion_request({"prompt": prompt})


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": 1' + b"0" * 400])
def test_bodies_that_are_no_object_of_json_are_refused(body):
    with pytest.raises(Refusal):
        parsed(body)


def test_a_body_is_read_as_it_is():
    assert parsed(json.dumps({"a": ["é", 1.5]}).encode()) == {"a": ["é", 1.5]}
