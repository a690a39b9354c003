"""Conversations and texts that the server puts before its policy: nothing of them is left out, and tokens are those of
the whole text."""

from __future__ import annotations

import copy

import pytest

from fppo.serve.texts import texts_of
from tests.data import pieces
from tests.serve import world
from tests.serve.parrot import Parrot
from tests.serve.world import MODEL, World, parrot_world

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KNOWN = "{% if m.role in ('system', 'user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}"
CALL = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": '{"q": "lamp"}'}}


def texts_with(message):
    made = copy.deepcopy(world.tokenizer())
    opened = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    made.chat_template = "{% for m in messages %}" + message + "<|im_end|>\n{% endfor %}" + opened
    return texts_of(made, vocabulary=len(made))


def asked(texts, messages, **more):
    """The status of a request, and the prompt of its answer or the message of its error."""
    with parrot_world("yes", texts=texts) as served:
        answer = served.post(CHAT, {"messages": messages, "return_token_ids": True, **more})
    found = answer.json()
    if answer.status_code != 200:
        return answer.status_code, found["error"]["message"]
    return 200, texts.decoded(found["choices"][0]["prompt_token_ids"])


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content", "function_call", "name", "weight"])
def test_a_field_reaches_the_template_or_is_refused(name):
    value = {"name": "why", "arguments": "{}"} if name == "function_call" else "why"
    said = {"role": "assistant", "content": "a", name: value}
    messages = [{"role": "user", "content": "x"}, said, {"role": "user", "content": "y"}]
    status, text = asked(texts_with(KNOWN), messages)
    assert status == 400
    assert "message 1, of the role 'assistant'" in text
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    reads = KNOWN + "{{ m.reasoning_content }}{{ m.name }}{{ m.weight }}" + calls
    status, text = asked(texts_with(reads), messages)
    assert status == 200
    assert text.count("why") == 1


def test_tools_for_a_template_that_shows_none_or_whose_calls_cannot_be_read_are_refused_by_the_reason():
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    for template, reason in (
        (KNOWN, "the chat template of the policy does not read ['tools']"),
        ("{{ tools | tojson }}" + KNOWN, "calls cannot be read as the chat template writes them"),
    ):
        for choice in ("auto", "required"):
            messages = [{"role": "user", "content": "x"}]
            status, text = asked(texts_with(template), messages, tools=[tool], tool_choice=choice)
            assert status == 400
            assert reason in text


def test_calls_beside_another_role_and_messages_that_vanish_are_refused():
    tool = {"role": "tool", "content": "lamp", "tool_call_id": "call00000"}
    for message in ({"role": "user", "content": "x", "tool_calls": [CALL]}, tool):
        status, text = asked(texts_with(KNOWN), [message, {"role": "user", "content": "y"}])
        assert status == 400
        assert f"message 0, of the role '{message['role']}'" in text
    status, text = asked(
        texts_with(KNOWN), [{"role": "developer", "content": "lamp"}, {"role": "user", "content": "y"}]
    )
    assert (status, "<|im_start|>system\nlamp" in text) == (200, True)


def test_a_template_that_wants_arguments_as_text_gets_them_so():
    calls = "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ']' + c.function.arguments }}{% endfor %}"
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "call00000"},
    ]
    texts = texts_with("<|im_start|>{{ m.role }}\n{{ m.content }}" + calls)
    status, text = asked(texts, messages)
    assert status == 200
    assert '<|im_start|>assistant\n[find]{"q": "lamp"}<|im_end|>' in text


def spoken(kind, *answers):
    """A server whose policy has a tokenizer of pieces and says these texts, each with its own end."""
    words = pieces.tokenizer(kind)
    texts = texts_of(words, vocabulary=len(words))
    said = [[*words.encode(text, add_special_tokens=False), words.eos_token_id] for text in answers]
    given: dict[str, list[int]] = {}
    engine = Parrot(lambda request, before: given.setdefault(request.name, said[min(len(given), len(said) - 1)]))
    sampling = world.sampling(stop_token_ids=(words.eos_token_id,))
    return words, World(engine, texts=texts, sampling=sampling, model=MODEL)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["prepend", "first", "always"])
def test_a_completion_goes_on_with_its_prompt_space_and_all(kind, stream):
    """As text and, once its client adds to that, as ids: those of the whole text."""
    words, served = spoken(kind, "five please", "yes")
    with served:
        first = served.post(COMPLETIONS, {"prompt": "two and three is", "return_token_ids": True})
        (choice,) = first.json()["choices"]
        assert choice["text"] == " five please"
        if stream:
            body = {"prompt": "two and three is", "stream": True}
            lines = served.post(COMPLETIONS, body).text
            assert '"text": " yes"' in lines
            return
        body = {"prompt": f"two and three is{choice['text']}</s> add more", "return_token_ids": True}
        (again,) = served.post(COMPLETIONS, body).json()["choices"]
    before = [*choice["prompt_token_ids"], *choice["token_ids"]]
    behind = again["prompt_token_ids"][len(before) :]
    assert again["prompt_token_ids"][: len(before)] == before
    whole = words.encode("two and three is five please</s> add more", add_special_tokens=False)
    assert behind == whole[whole.index(words.eos_token_id) + 1 :]
