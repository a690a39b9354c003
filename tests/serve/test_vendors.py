"""The vendors' own clients against a server on a socket: their types hold for whatever we answer."""

from __future__ import annotations

import contextlib

import openai
import pytest
from openai.types.responses import Response

from fppo.serve.server import bound_socket, serving
from tests.serve.test_dialects import CALL, ODD
from tests.serve.world import KEY, MODEL, parrot_world

PARAMETERS = {"type": "object", "properties": {"file": {"type": "string"}}}


@contextlib.contextmanager
def served(*answers):
    with parrot_world(*answers) as world, serving(world.app, bound_socket("127.0.0.1", 0)) as url:
        yield world, url


def checked(value, kind=None):
    """A value that the vendor's type takes, all required fields among its own."""
    (kind or type(value)).model_validate(value.to_dict(warnings=False), strict=True)
    return value


def test_openais_client_reads_responses_and_their_events():
    with served("lamp é", CALL, f"read\n{ODD}", "No") as (world, url):
        client = openai.OpenAI(base_url=f"{url}/e/7/v1", api_key=KEY, max_retries=0)
        first = checked(client.responses.create(model=MODEL, input="find", instructions="list"), Response)
        assert first.output_text == "lamp é"
        tools = [{"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False}]
        how = {"model": MODEL, "instructions": "list", "tools": tools}
        called = checked(client.responses.create(input="read", previous_response_id=first.id, **how), Response)
        (call,) = called.output
        assert (call.type, call.name, call.arguments) == ("function_call", "read", '{"file": "a é"}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "in it"}
        with client.responses.stream(input=[result], previous_response_id=called.id, **how) as stream:
            for event in stream:
                checked(event)
            streamed = stream.get_final_response()
        assert [item.type for item in streamed.output] == ["message", "function_call"]
        assert (streamed.output_text, streamed.output[1].arguments) == ("read", '[1, "b"]')
        texts = [
            checked(event).delta
            for event in client.responses.create(model=MODEL, input="which", stream=True)
            if event.type == "response.output_text.delta"
        ]
        assert "".join(texts) == "No"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=MODEL, input="a", background=True)
        assert (caught.value.param, caught.value.code) == ("background", "unsupported_parameter")
        assert [len(row.turns) for row in world.episodes.rows("7")] == [1, 2, 1]  # tools begin another row


def test_anthropics_client_reads_messages_and_their_events():
    anthropic = pytest.importorskip("anthropic")
    with served("lamp é", CALL, "read; in it", f"read\n{CALL}") as (world, url):
        client = anthropic.Anthropic(base_url=f"{url}/e/7", api_key=KEY, max_retries=0)
        how = {"model": MODEL, "max_tokens": 90, "system": "list"}
        said = [{"role": "user", "content": "find"}]
        first = checked(client.messages.create(messages=said, **how))
        assert [(block.type, block.text) for block in first.content] == [("text", "lamp é")]
        assert first.stop_reason == "end_turn"
        tools = [{"name": "read", "description": "reads", "input_schema": PARAMETERS}]
        called = checked(client.messages.create(messages=said, tools=tools, **how))
        (use,) = called.content
        assert (use.type, use.name, use.input, called.stop_reason) == ("tool_use", "read", {"file": "a é"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "in it", "is_error": False}
        said += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(messages=said, tools=tools, stop_sequences=[";"], **how) as stream:
            for event in stream:
                checked(event)
            streamed = checked(stream.get_final_message())
        assert (streamed.content[0].text, streamed.stop_reason, streamed.stop_sequence) == (
            "read",
            "stop_sequence",
            ";",
        )
        with client.messages.stream(messages=said, tools=tools, **how) as stream:
            again = checked(stream.get_final_message())
        assert [block.type for block in again.content] == ["text", "tool_use"]
        assert again.content[1].input == {"file": "a é"}
        assert again.usage.output_tokens == len(world.episodes.rows("7")[-1].turns[-1].answer.tokens)
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
            client.messages.create(messages=said, extra_body={"mcp_servers": [{"url": "a"}]}, **how)
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=url, api_key="no", max_retries=0).messages.create(messages=said, **how)
        bearer = anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0)
        assert bearer.messages.create(messages=said[:1], **how).content
