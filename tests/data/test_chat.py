"""Chat templates: what they are called with, what is known of them, and what is left of a call that was stopped."""

from __future__ import annotations

import signal
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import data
from fppo.data import chat
from fppo.data.chat import ChatOptions, encode_chat, end_of_turn, ending, opening_of, render_chat
from fppo.quickstart import bpe_tokenizer
from tests.data.rows import CHAT, tokenizer

OWN = (
    "{% for t in tools or ['x'] %}{{ t.name or t }} {% endfor %}{{ mood or 'Q' }} {% for m in messages %}{{ m.role }} "
    ": {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)


def words_of(template, *added):
    words = tokenizer(chat=True)
    words.add_tokens([*added])
    words.chat_template = template
    return words


talks = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.integers(0, 9)), min_size=1, max_size=3)


@settings(max_examples=30)
@given(talks, st.lists(st.sampled_from("789"), max_size=2), st.sampled_from([None, "A", "5"]), st.booleans())
def test_a_template_gets_its_messages_tools_and_arguments(talk, tools, mood, generation):
    options = ChatOptions(arguments={} if mood is None else {"mood": mood}, tools=[{"name": name} for name in tools])
    messages = [{"role": role, "content": str(number)} for role, number in talk]
    body = " ".join(f"{role} : {number}" for role, number in talk)
    start = f"{' '.join(tools) or 'x'} {mood or 'Q'} {body} "
    words = words_of(OWN)
    found = render_chat(words, messages, generation=generation, options=options)
    assert found == start + ("assistant :" if generation else "")
    assert encode_chat(words, messages, options=options) == tokenizer().encode(f"{start}assistant :")
    assert [message["content"] for message in messages] == [str(number) for _, number in talk]


def test_arguments_and_tools_that_a_template_does_not_read_are_named():
    for options, unread in (
        (ChatOptions(arguments={"mood": "A", "moods": "B"}), "moods"),
        (ChatOptions(tools=[{"name": "7"}]), "tools"),
        (ChatOptions(row_tools=True), "tools"),
    ):
        with pytest.raises(ValueError, match=rf"does not read \['{unread}'\]; leave them out"):
            data.check_chat_template(words_of(CHAT + "{{ mood }}"), options=options)
    data.check_chat_template(words_of(OWN), options=ChatOptions(arguments={"mood": "A"}, row_tools=True))
    named = words_of({"default": CHAT, "tool_use": OWN})
    data.check_chat_template(named, options=ChatOptions(tools=[{"name": "7"}]))
    with pytest.raises(ValueError, match="is not text: "):
        data.check_chat_template(words_of({"default": CHAT, "tool_use": 3}))


def test_the_opening_and_the_end_of_a_turn_are_special_or_added_tokens():
    """The longest token that fits is taken; an option of the template may change it."""
    template = "{{ mood or '<s>' }}go {% for m in messages %}{{ m.content }} <end>\n{% endfor %}"
    words = words_of(template, "<s>", "<s>go", "<end>", "<x>")
    assert opening_of(words) == "<s>go"
    assert opening_of(words, options=ChatOptions(arguments={"mood": "<x>"})) == "<x>"
    assert opening_of(words, options=ChatOptions(arguments={"mood": "Q"})) == ""
    assert end_of_turn(words) == words.convert_tokens_to_ids("<end>")
    turned = "{% for m in messages %}{{ m.content }} {{ mood or '<pad>' }}{% endfor %}"
    assert end_of_turn(words_of(turned)) == 0
    assert end_of_turn(words_of(turned, "<e>"), options=ChatOptions(arguments={"mood": "<e>"})) == 20
    assert end_of_turn(words_of(turned), options=ChatOptions(arguments={"mood": "Q"})) is None
    for refuses in ("{{ raise_exception('no') }}", "{{ messages[5].content }}"):
        assert (opening_of(words_of(refuses)), end_of_turn(words_of(refuses))) == ("", None)


ENDLESS = "{% for x in range(100000) %}{% for y in range(100000) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_is_stopped_and_leaves_no_timer(monkeypatch):
    render_chat(words_of(OWN), [{"role": "user", "content": "1"}], generation=True)  # imports what compiles templates
    monkeypatch.setattr(chat, "LONGEST", 0.2)
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(chat.EndlessTemplate, match=r"has not finished in 0\.2 CPU seconds"):
        render_chat(words_of(ENDLESS), [{"role": "user", "content": "1"}], generation=True)
    with pytest.raises(chat.EndlessTemplate):
        end_of_turn(words_of(ENDLESS))
    with pytest.raises(KeyError), ending():
        raise KeyError
    with ending():
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_in_other_threads_templates_are_not_stopped():
    found = []

    def run():
        with ending():
            found.append(signal.getitimer(signal.ITIMER_VIRTUAL))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(0.0, 0.0)]


def test_the_end_of_a_turn_is_found_behind_white_space():
    words = bpe_tokenizer(["a b \n"], size=270)
    words.add_tokens(["<end>"])
    words.chat_template = "{% for m in messages %}{{ m.content }} \n<end> {% endfor %}"
    assert end_of_turn(words) == words.convert_tokens_to_ids("<end>")
