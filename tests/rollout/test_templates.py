"""Token in, token out over chat templates: whatever one does to earlier turns, the policy reads what it sampled."""

import attrs
import pytest
import torch

from fppo import models, quickstart
from fppo.batch import Column, Prompts
from fppo.data.chat import encode_chat
from fppo.data.examples import MESSAGES
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.observations import ChatTemplate, chat_template, forgets_thinking
from fppo.rollout.turns.runner import ToolRunner
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.micro_batching import MicroBatching
from tests.rollout.templates import KINDS, shipped, tokenizer_of
from tests.rollout.test_embedded import engine_of
from tests.rollout.test_turns import response

QUESTION = {"role": "user", "content": "What is 3 x 4?"}
REPLIES = {
    "plain": "The answer is 12.",
    "space": " The answer is 12. \n",
    "thought": "<think>\nhm\n</think>\n\nThe answer is 12.",
}
CALL = {"type": "function", "function": {"name": "tool", "arguments": {"x": "Oslo"}}}
# messages of a tool are not shown by these, or refused
WITHOUT_TOOLS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}


def template_of(text, role):
    """The template for messages of a role; None if it takes none of them."""
    words = tokenizer_of(text)
    try:
        return words, chat_template(words, roles=(role,))
    except ValueError:
        if role != "tool":
            raise
        return words, None


def whole(words, template: ChatTemplate, messages):
    """The template's own tokens of a conversation; None if it refuses it."""
    try:
        return encode_chat(words, messages)
    except Exception:
        return None


def check_suffix(words, template, role):
    """An observation is the end of the conversation as the template has it, whatever goes before and was said."""
    after = [{"role": role, "content": "and then?"}]
    seen = template(after, words.eos_token_id)
    conversations = [[QUESTION, {"role": "assistant", "content": reply}] for reply in REPLIES.values()]
    conversations += [[*first, *second] for first in conversations[:1] for second in conversations]
    if role == "tool":
        calls = [[QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]]
        conversations = calls if template.behind_calls else [*conversations, *calls]
    compared = 0
    for conversation in conversations:
        expected = whole(words, template, [*conversation, *after])
        if expected is not None:
            compared += 1
            assert expected[-len(seen) :] == seen, words.decode(expected)
    assert compared
    assert "and then?" in words.decode(seen)
    return seen


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_observation_is_the_templates_own_suffix(kind, role):
    words, template = template_of(KINDS[kind], role)
    assert template is not None
    check_suffix(words, template, role)


def shown(kind, role, end=None):
    words, template = template_of(KINDS[kind], role)
    return words.decode(
        template([{"role": role, "content": "so"}], words.convert_tokens_to_ids(end or words.eos_token))
    )


def test_the_end_of_a_turn_stands_once():
    """The sampled one, whether the template writes it too, or another in its place, or none."""
    assert shown("no end of a turn", "user") == "so<|assistant|>\n"
    assert shown("no end of a turn", "tool") == "<|observation|>so<|assistant|>\n"
    assert shown("no end of a turn", "tool", "<|observation|>") == "so<|assistant|>\n"
    for end in ("<|return|>", "<|end|>"):
        assert shown("another end, and calls", "user", end) == "<|start|>user<|message|>so<|end|><|start|>assistant"
    tool = '<|start|>functions.tool<|message|>"so"<|end|><|start|>assistant'
    for end in ("<|call|>", "<|return|>"):
        assert shown("another end, and calls", "tool", end) == tool
    assert shown("another end, and calls", "tool", "x") == f"<|call|>{tool}"
    assert shown("ends at the end", "user") == "\n<|user|>\nso<|end|>\n<|assistant|>\n"
    assert shown("ends at the end", "user", "x") == "<|end|>\n<|user|>\nso<|end|>\n<|assistant|>\n"
    inside = "so<tool_response|>"
    assert shown("answers within a turn", "tool", "<|tool_response>") == inside
    assert shown("answers within a turn", "tool", "<tool_call|>") == f"<|tool_response>{inside}"


def test_a_tools_message_goes_by_its_name():
    words, template = template_of(KINDS["another end, and calls"], "tool")
    message = {"role": "tool", "name": "weather", "content": "rain"}
    assert "functions.weather" in words.decode(template([message], words.eos_token_id))


def test_templates_that_leave_out_thoughts_are_known():
    found = {kind: forgets_thinking(tokenizer_of(text), roles=("tool",)) for kind, text in KINDS.items()}
    forgetful = {"forgets thinking": ["user", "tool"], "another end, and calls": ["user"]}
    assert found == {**{kind: [] for kind in KINDS}, **forgetful}


@attrs.define
class Noted:
    """An engine that notes the ids that it gave, turn by turn."""

    engine: object
    given: dict = attrs.field(factory=dict)

    def generate(self, params, ask):
        rollout = self.engine.generate(params, ask)
        for row, row_id in enumerate(rollout.row_ids.tolist()):
            self.given.setdefault(row_id, []).append(response(rollout, row)[0])
        return rollout


def spoken(words, template, role, **changes):
    """A rollout of up to three turns over the template, with what was sampled in each, and the largest difference of
    its log-probs from those of a pass over whole rows."""
    model = quickstart.small_model(512, width=32, layers=1, positions=256)
    params = models.init_params(model, Key(1))
    special = set(words.all_special_ids) | set(range(len(words), 512))
    stops = (words.eos_token_id, *(i for i in range(2, len(words)) if i % 7 == 0 and i not in special))
    prompt = whole(words, template, [QUESTION])
    prompts = Prompts(
        tokens=torch.tensor([prompt, prompt]),
        attention_mask=torch.ones(2, len(prompt), dtype=torch.bool),
        row_ids=torch.arange(2),
        ids=Column(["a", "b"]),
        ground_truth=Column([None] * 2),
        source=Column([""] * 2),
        extras=Column([{MESSAGES: [QUESTION]}] * 2),
    )
    noted = Noted(engine_of(model))
    tools = ToolRunner(lambda said: [{"role": role, "content": "and then?"}], inline=True)
    fixed = {"encode": template, "tokenizer": words, "max_turns": 3, "pad_token_id": 0, "turn_tokens": 12}
    engine = TurnsEngine(engine=noted, tools=tools, **fixed, **changes)
    rollout = engine.generate(params, Ask(prompts, Sampling(n=4, max_tokens=160, stop_token_ids=stops), Key(2)))
    log_probs = compute_log_probs(params, rollout, forward=Forward(model), micro_batching=MicroBatching(size=8))
    return rollout, noted.given, float((log_probs - rollout.rollout_log_probs).abs().max())


def check_tokens(words, template, role):
    """The response holds the very ids that were sampled, observations between them, and their log-probs."""
    rollout, given, gap = spoken(words, template, role)
    assert gap < 2e-5
    seen, turns = set(), 0
    for row, row_id in enumerate(rollout.row_ids.tolist()):
        left, chosen = response(rollout, row)
        assert [t for t, own in zip(left, chosen) if own] == [t for turn in given[row_id] for t in turn]
        turns = max(turns, len(given[row_id]))
        for turn in given[row_id][:-1]:
            after = template([{"role": role, "content": "and then?"}], turn[-1])
            assert left[: len(turn) + len(after)] == [*turn, *after]
            left = left[len(turn) + len(after) :]
            seen.add(words.decode(turn))
    assert turns > 1
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_ids_and_their_log_probs_are_those_of_the_row(kind):
    words, template = template_of(KINDS[kind], "user")
    check_tokens(words, template, "user")


@pytest.mark.slow
@pytest.mark.skipif(not shipped(), reason="TRL, whose templates are read, is not installed")
def test_the_laws_hold_over_the_templates_of_trl():
    """Over all of them: no template refuses users, and tools are refused by those alone that do not show them."""
    refused = set()
    for name, text in shipped().items():
        for role in ("user", "tool"):
            words, template = template_of(text, role)
            if template is None:
                refused.add(name.removesuffix("_training"))
                continue
            check_suffix(words, template, role)
            check_tokens(words, template, role)
    assert refused <= WITHOUT_TOOLS
    assert len(shipped()) >= 72
