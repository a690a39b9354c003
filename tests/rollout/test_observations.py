"""What tools say, as tokens behind a turn: those that the whole conversation would have."""

import pytest

from fppo.data import ChatOptions
from fppo.data.chat import render_chat
from fppo.rollout.turns.observations import PlainText, chat_template
from tests.data import rows as chats
from tests.rollout import templates

CHATML = (
    "{% for m in messages %}{{ '<s> ' + m.role + ' : ' + m.content + ' <eos> . ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant : ' }}{% endif %}"
)


def chat_tokenizer(template):
    prepared = chats.tokenizer()
    prepared.add_special_tokens({"additional_special_tokens": ["<s>"]})
    prepared.add_tokens(["tool", "."])
    prepared.chat_template = template
    return prepared


@pytest.mark.parametrize("token", ["<eos>", "5", "."])
def test_a_chat_goes_on_as_its_template_has_it(token):
    """What was sampled, and then what the template says, as if it had written all of it; "." stands there too, but
    behind the end."""
    words = chat_tokenizer(CHATML)
    end = words.convert_tokens_to_ids(token)
    encode = chat_template(words, roles=("tool",))
    start = [{"role": "user", "content": "1 2"}]
    tool_message = [{"role": "tool", "content": "7 8"}, {"role": "user", "content": "9"}]
    chat = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}
    prompt = words.apply_chat_template(start, **chat)
    sampled = [13, 14, end]
    content = "3 4" if token == "<eos>" else f"3 4 {token}"
    whole = words.apply_chat_template([*start, {"role": "assistant", "content": content}, *tool_message], **chat)
    assert [*prompt, *sampled, *encode(tool_message, end)] == whole
    assert encode([], end) == []


@pytest.mark.parametrize("gap", ["", " ", "\n", "\n\n  ", "\t."])
def test_what_stands_between_turns_is_read_as_the_template_writes_it(gap):
    """Behind words that no token of the template ends, white space and all."""
    opened = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    turns = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ '" + repr(gap)[1:-1] + "' }}{% endfor %}"
    words = templates.tokenizer_of(turns + opened)
    messages = [{"role": "tool", "content": " The answer is 12 "}, {"role": "user", "content": "What?"}]
    start = [{"role": "user", "content": "What is 3 x 4?"}, {"role": "assistant", "content": "Let me call"}]
    (end,) = words.encode("=", add_special_tokens=False)
    whole = render_chat(words, [*start, *messages], generation=True)
    found = chat_template(words, roles=("tool",))(messages, end)
    assert words.decode(found) == whole.partition("Let me call")[2]
    assert words.decode(found).startswith(f"{gap}<|tool|>\n The answer is 12 {gap}<|user|>")


def test_prompts_are_written_with_the_arguments_that_were_given():
    turns = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}"
    words = templates.tokenizer_of(turns + "{% if add_generation_prompt %}<|assistant|>{{ begins }}{% endif %}")
    shown = chat_template(words, options=ChatOptions(arguments={"begins": "Let me"})).prompt(
        [{"role": "user", "content": "x"}]
    )
    assert words.decode(shown) == "<|user|>x<|eot|><|assistant|>Let me"


def test_chat_templates_that_cannot_go_on_are_refused():
    with pytest.raises(ValueError, match="does not show the content of message 0, of the role 'user'"):
        chat_template(chat_tokenizer(CHATML.replace("m.content", "(m.content if loop.last else '')")))
    with pytest.raises(ValueError, match=r"refuses messages of the roles \['user', 'assistant', .*: no role assistant"):
        chat_template(chat_tokenizer(chats.CHAT))
    only = CHATML.replace("{{ '<s> '", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ '<s> '")
    encode = chat_template(chat_tokenizer(only))
    with pytest.raises(ValueError, match="no tools"):
        encode([{"role": "tool", "content": "1"}], 1)
    with pytest.raises(ValueError, match="no tools"):
        chat_template(chat_tokenizer(only), roles=("tool",))
    with pytest.raises(ValueError, match="does not show the content of message 1, of the role 'assistant'"):
        chat_template(chat_tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}"))


def test_plain_text_is_encoded_as_it_is():
    words = chats.tokenizer()
    assert PlainText(words)([{"role": "tool", "content": "1 2"}, {"role": "user", "content": " 3"}], 1) == [11, 12, 13]
    assert PlainText(words)([], 1) == []


def test_observations_go_through_the_template_with_its_arguments():
    template = CHATML.replace("assistant : ' }}", "assistant : ' }}{% if quick %}{{ '. ' }}{% endif %}")
    words = chat_tokenizer(template)
    message = [{"role": "tool", "content": "3"}]
    end = words.convert_tokens_to_ids("<eos>")
    plain = chat_template(words, roles=("tool",))(message, end)
    quick = chat_template(words, roles=("tool",), options=ChatOptions(arguments={"quick": True}))(message, end)
    assert quick == [*plain, words.convert_tokens_to_ids(".")]
