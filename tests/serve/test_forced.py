"""Calls that a client forces: an answer begins as the chat template begins a call, and the policy draws the rest."""

from __future__ import annotations

import asyncio
import copy
import json
from functools import cache

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.data.chat import render_chat
from fppo.serve.protocol import ForcedCall
from fppo.serve.rows import rollout_of_rows
from fppo.serve.texts import texts_of
from tests.serve.test_answers import CHAT
from tests.serve.world import END, MODEL, chat, parrot_world, texts, tokenizer

NAMES = ("read", "list")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
READ = {"type": "function", "function": {"name": "read"}}
WHOLE = '<tool_call>\n{"name": "read", "arguments": {"file": "lamp"}}\n</tool_call>'


def template(call, prompt="", said=""):
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + said
        + "{{ m.content }}{% for call in m.tool_calls or [] %}{% set f = call.function %}"
        + call
        + "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        + prompt
        + "{% endif %}"
    )


JSON = '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
TAGS = (
    "<function={{ f.name }}>{% for key, value in f.arguments.items() %}"
    "<parameter={{ key }}>{{ value }}</parameter>{% endfor %}</function>"
)
THOUGHT = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
KINDS = {
    "json": template(JSON),
    "thinks where it likes": template(JSON, said="{% if m.role == 'assistant' %}" + THOUGHT + "{% endif %}"),
    "thinks": template(JSON, "<think>\n", "{% if m.role == 'assistant' %}" + THOUGHT + "{% endif %}"),
    "thinks, and forgets": template(JSON, "<think>\n", "{% if m.reasoning_content %}" + THOUGHT + "{% endif %}"),
    "tags": template(TAGS),
    "bare json": template('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'),
    "a role": template(" to={{ f.name }}<|sep|>{{ f.arguments | tojson }}"),
}
OPEN = {"tags": r"<function=(?P<name>\w+)>", "a role": r" to=(?P<name>[\w.-]+)<\|sep\|>"}  # of response templates


@cache
def texts_with(kind):
    made = copy.deepcopy(tokenizer())
    made.chat_template = KINDS[kind]
    if kind in OPEN:
        function = {"type": "function", "function": {"name": "{name}", "arguments": {"said": "{content}"}}}
        call = {"open_pattern": OPEN[kind], "repeats": True, "content": "text", "transform": function}
        made.response_template = {
            "defaults": {"role": "assistant"},
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {
                "tool_calls": call | {"close_pattern": r"</function>|<\|im_end\|>"},
                "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
            },
        }
    return texts_of(made, vocabulary=len(made))


def opening(functions=("read",), named=True, of=None):
    return (of or texts()).opening(ForcedCall(functions, named))


def rest(functions=("read",)):
    """The rest of a call, behind the opening."""
    begun = texts().decoded(opening(functions))
    assert WHOLE.startswith(begun)
    return WHOLE[len(begun) :]


def drawn_of(rollout):
    """The ids that a loss counts."""
    return rollout.tokens[:, -rollout.response_mask.shape[1] :][rollout.response_mask].tolist()


names = st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('abé {}"\\<', max_size=6),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text('ab"}', max_size=3), each, max_size=2),
    max_leaves=4,
)


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(names, min_size=1, max_size=4, unique=True),
    st.dictionaries(st.text('abé"}<', min_size=1, max_size=4), values, max_size=3),
    st.integers(0, 3),
)
def test_an_opening_is_what_the_template_writes_of_every_such_call(kind, functions, arguments, place):
    """Whatever function is called with whatever arguments, its ids go on from those of the opening, and the opening
    goes on from the prompt."""
    of = texts_with(kind)
    ids = opening(tuple(functions), of=of)
    asked = [{"role": "user", "content": "x"}]
    call = {"type": "function", "function": {"name": functions[place % len(functions)], "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    said |= {"reasoning_content": "hm"} if kind.startswith("thinks") else {}
    before = render_chat(of.tokenizer, asked, generation=True)
    whole = render_chat(of.tokenizer, [*asked, said], generation=False)
    thought = "<think>\nhm"
    written = whole[len(before) :].removeprefix("hm") if before.endswith("<think>\n") else whole[len(before) :]
    if kind == "thinks where it likes":
        written = written.replace(thought, "<think>\n")
    assert ids
    assert tuple(of.tokenizer.encode(written, add_special_tokens=False)[: len(ids)]) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_an_opening_ends_where_the_choice_begins(kind):
    of = texts_with(kind)
    one, several = (of.decoded(opening(x, of=of)) for x in (("read",), NAMES))
    assert "read" in one
    assert "read" not in several
    assert one.startswith(several.rstrip())
    assert several.count("<think>") == (kind == "thinks where it likes")
    assert several.count("</think>") == kind.startswith("thinks")


def message_of(world, *, stream, **more):
    """An answer as the openai client has it: the message, or what its chunks add up to."""
    how = {"model": MODEL, "messages": chat("find")["messages"], "tools": TOOLS, **more}

    async def ask():
        async with world.client() as http:
            client = openai.AsyncOpenAI(base_url="http://test/e/1/v1", api_key="secret", http_client=http)
            if not stream:
                (choice,) = (await client.chat.completions.create(**how)).choices
                calls = [x.function for x in choice.message.tool_calls or ()]
                return choice.message.content, [(x.name, x.arguments) for x in calls], choice.finish_reason
            content, calls, finish = "", [], None
            async for chunk in await client.chat.completions.create(stream=True, **how):
                (choice,) = chunk.choices
                content += choice.delta.content or ""
                calls += [(x.function.name, x.function.arguments) for x in choice.delta.tool_calls or ()]
                finish = choice.finish_reason or finish
            return content or None, calls, finish

    return asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "functions", "finish"), [("required", NAMES, "tool_calls"), (READ, ("read",), "stop")]
)
def test_an_answer_begins_with_the_call_that_is_forced(choice, functions, finish, stream):
    ids = opening(functions)
    with parrot_world(rest(functions)) as world:
        answer = message_of(world, stream=stream, tool_choice=choice)
        ((turn,),) = [row.turns for row in world.episodes.rows("1")]
        (request,) = world.engine.requests
        rollout = rollout_of_rows(world.episodes.rows("1"), pad_token_id=0)
    assert answer == (None, [("read", '{"file": "lamp"}')], finish)
    assert turn.opened == len(ids)
    assert turn.before == request.ids == (*texts().prompt(chat("find")["messages"], TOOLS), *ids)
    assert turn.text == WHOLE
    drawn = turn.answer.tokens.tolist()
    assert texts().decoded(drawn[:-1]) == rest(functions)
    assert drawn_of(rollout) == drawn  # the opening is context


def test_a_conversation_goes_on_behind_a_forced_call():
    """In its row, where the opening of a later call is context, too."""
    with parrot_world(rest(), rest()) as world:
        first = world.post(f"/e/1{CHAT}", chat("find", tools=TOOLS, tool_choice=READ)).json()["choices"][0]["message"]
        again = chat("find", tools=TOOLS, tool_choice=READ)
        again["messages"] += [first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "which"}]
        assert world.post(f"/e/1{CHAT}", again).json()["choices"][0]["finish_reason"] == "stop"
        (row,) = world.episodes.rows("1")
        rollout = rollout_of_rows([row], pad_token_id=0)
    ids = opening()
    assert [turn.before[-turn.opened :] for turn in row.turns] == [ids, ids]
    between = "<|im_start|>tool\nwhich<|im_end|>\n<|im_start|>assistant\n" + texts().decoded(ids)
    assert texts().decoded(row.turns[1].before).endswith(between)
    assert drawn_of(rollout) == [x for turn in row.turns for x in turn.answer.tokens.tolist()]
    assert rollout.rollout_log_probs[~rollout.response_mask].abs().max() == 0


@pytest.mark.parametrize("kind", sorted(OPEN))
def test_the_tokenizers_own_parser_reads_a_forced_call(kind):
    of = texts_with(kind)
    begun = of.decoded(opening(of=of)).replace("<|sep|>", ">").rpartition("read>")[2]
    with parrot_world("lamp", texts=of) as world:
        _, ((name, arguments),), finish = message_of(world, stream=False, tool_choice=READ)
    assert (name, json.loads(arguments), finish) == ("read", {"said": f"{begun}lamp"}, "stop")


@pytest.mark.parametrize("kind", ["thinks where it likes", "thinks", "thinks, and forgets"])
def test_a_forced_call_skips_what_the_template_lets_the_policy_think(kind):
    of = texts_with(kind)
    with parrot_world('"a": 1}}\n</tool_call>', texts=of) as world:
        assert message_of(world, stream=False, tool_choice=READ) == (None, [("read", '{"a": 1}')], "stop")


@pytest.mark.parametrize("kind", ["thinks where it likes", "thinks", "thinks, and forgets"])
def test_a_call_behind_a_thought_is_read(kind):
    thought = "hm\n</think>\n\nit is" if kind != "thinks where it likes" else "<think>\nhm\n</think>\n\nit is"
    with parrot_world(thought + WHOLE, texts=texts_with(kind)) as world:
        assert message_of(world, stream=False) == (thought, [("read", '{"file": "lamp"}')], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "said", "why"),
    [
        (READ, "lamp", "no call that can be read"),
        (READ, '{"file": ', "no call that can be read"),
        ("required", 'raed", "arguments": {}}', "did you mean read?"),
    ],
)
def test_an_answer_without_the_call_is_an_error_and_is_recorded(choice, said, why, stream):
    body = chat("find", tools=TOOLS, tool_choice=choice, stream=stream)
    with parrot_world(said) as world:
        response = world.post(f"/e/1{CHAT}", body)
        again = world.post(f"/e/1{CHAT}", body)
        rows = world.episodes.rows("1")
    if stream:
        assert "[DONE]" not in response.text
        error = json.loads(response.text.rstrip().rpartition("data: ")[2])["error"]
    else:
        assert (response.status_code, again.status_code) == (422, 422)
        error = response.json()["error"]
    assert (error["param"], error["code"]) == ("tool_choice", "tool_use_failed")
    assert why in error["message"]
    assert [row.number for row in rows] == [0, 1]  # another try has draws of its own
    assert rows[0].turns[0].text.endswith(said)


def test_a_call_that_is_cut_says_so():
    with parrot_world('{"file": "lamp"}}') as world:
        content, calls, finish = message_of(world, stream=False, tool_choice=READ, max_tokens=2)
    assert content.startswith('<tool_call>\n{"name": "read"')
    assert (calls, finish) == ([], "length")


def test_several_calls_may_stand_behind_the_forced_one():
    more = rest() + '\n<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>'
    with parrot_world(more) as world:
        _, calls, _ = message_of(world, stream=True, tool_choice=READ)
    assert [name for name, _ in calls] == ["read", "list"]


def named(name):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("tools", "choice", "param", "why"),
    [
        ([], "required", "tool_choice", "give tools"),
        ([], READ, "tool_choice", "give tools"),
        (TOOLS, named("raed"), "tool_choice", "did you mean 'read'?"),
        (TOOLS, named("zebra"), "tool_choice", "there are read, list"),
        (TOOLS, "requird", "tool_choice", "did you mean 'required'?"),
        (TOOLS, {"type": "custom", "custom": {"name": "read"}}, "tool_choice", "is no choice here"),
        (TOOLS, {"type": "function"}, "tool_choice", "is no choice here"),
        (TOOLS, 3, "tool_choice", "is no choice here"),
        ([named("<|im_end|>")], "required", "tools", "letters, digits"),
        ([named('"')], named('"'), "tools", "letters, digits"),
    ],
)
def test_what_cannot_be_forced_is_refused(tools, choice, param, why):
    with parrot_world("lamp") as world:
        response = world.post(CHAT, chat("find", tools=tools, tool_choice=choice))
        assert not world.engine.requests
        assert world.episodes.names() == []
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert why in error["message"]


def test_a_template_that_opens_a_thought_and_never_closes_it_forces_no_call():
    made = copy.deepcopy(texts_with("tags").tokenizer)
    made.chat_template = template(TAGS, "<think>\n")
    of = texts_of(made, vocabulary=len(made))
    with parrot_world("lamp", texts=of) as world:
        assert world.post(CHAT, chat("find", tools=TOOLS)).status_code == 200
        refused = world.post(CHAT, chat("find", tools=TOOLS, tool_choice=READ)).json()["error"]
    assert refused["param"] == "tool_choice"
    assert "not known how the chat template begins a call" in refused["message"]


def test_the_episode_says_how_much_of_an_answer_was_forced():
    with parrot_world(rest()) as world:
        world.post(f"/e/1{CHAT}", chat("find", tools=TOOLS, tool_choice=READ))

        async def get():
            async with world.client() as client:
                return (await client.get("/e/1")).json()

        ((turn,),) = [row["turns"] for row in asyncio.run(get())["rows"]]
    assert tuple(turn["before"][-turn["opened"] :]) == opening()
    assert turn["tokens"][-1] == END
