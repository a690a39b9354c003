"""Turns with a real byte-pair tokenizer, of which most sampled responses are not the encoding of their own text."""

import attrs
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.observations import PlainText, chat_template
from fppo.rollout.turns.runner import ToolRunner
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.micro_batching import MicroBatching
from tests.models.families import make
from tests.rollout.test_embedded import PAD, engine_of, make_prompts
from tests.rollout.test_turns import response

CORPUS = ["a bad cab had a bad dad"] * 9 + ["dad had a cab", "a dab", "bad cab cab"] * 5
CHATML = (
    "{% for m in messages %}{{ '<s>' + m.role + ' ' + m.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
)


def byte_pairs(size, *, alphabet=()):
    """A tokenizer of byte pairs with merges, trained on the corpus; 0 pads and 1 ends."""
    tokenizer = Tokenizer(BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "<eos>", "<s>"], initial_alphabet=list(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


WORDS = byte_pairs(31)  # as many as the models of the tests know
STOPS = (1, *(i for i in range(3, 31) if "d" in WORDS.decode([i])))
SAMPLING = Sampling(temperature=1.5, n=3, max_tokens=24, stop_token_ids=STOPS)


def answers(conversation):
    """What was said, turned around: its first letters are often merged with the last of the turn before."""
    return [{"role": "tool", "content": conversation[-1]["content"][::-1][:4] or "bad"}]


@attrs.define
class Watched:
    """An engine that keeps what it was asked and what it gave."""

    engine: object
    calls: list = attrs.field(factory=list)

    def generate(self, params, ask):
        rollout = self.engine.generate(params, ask)
        self.calls.append((ask, rollout))
        return rollout


def in_turns(inner, encode, **changes):
    tools = ToolRunner(answers, inline=True)
    fixed = {"max_turns": 4, "pad_token_id": PAD, "tools": tools, "encode": encode, "tokenizer": WORDS}
    return TurnsEngine(engine=inner, **{**fixed, **changes})


def sampled(encode):
    model, params = make("qwen2", dtype=torch.float64)
    inner = Watched(engine_of(model))
    rollout = in_turns(inner, encode).generate(params, Ask(make_prompts(extra=1), SAMPLING, Key(5)))
    return model, params, inner.calls, rollout


def again(ids):
    """The tokens of the text of tokens."""
    text = WORDS.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return WORDS.encode(text, add_special_tokens=False)


def test_tokens_that_were_sampled_stay_as_they_are():
    """Each turn goes on from the ids of the turns before it, and the response holds those ids."""
    encode = PlainText(WORDS)
    model, params, calls, rollout = sampled(encode)
    assert len(calls) > 2
    so_far, last, changed = {}, {}, 0  # by row id: the prompt and all since, and the last turn
    for ask, part in calls:
        columns = ask.prompts.row_ids.tolist(), ask.prompts.tokens, ask.prompts.attention_mask
        asked = {row_id: tokens[mask].tolist() for row_id, tokens, mask in zip(*columns, strict=True)}
        for row, row_id in enumerate(part.row_ids.tolist()):
            if row_id in so_far:
                text = WORDS.decode([token for token in last[row_id] if token != 1])
                observed = encode(answers([{"content": text}]), last[row_id][-1])
                assert asked[row_id] == so_far[row_id] + observed
            width = part.tokens.shape[1] - part.response_mask.shape[1]
            context = part.tokens[row, :width][part.attention_mask[row, :width]].tolist()
            last[row_id] = response(part, row)[0]
            so_far[row_id] = context + last[row_id]
            changed += again(so_far[row_id]) != so_far[row_id]
    assert changed > len(so_far) / 2  # decoded and encoded again, most would be others
    width = rollout.tokens.shape[1] - rollout.response_mask.shape[1]
    for row, row_id in enumerate(rollout.row_ids.tolist()):
        prompt = rollout.tokens[row, :width][rollout.attention_mask[row, :width]].tolist()
        assert prompt + response(rollout, row)[0] == so_far[row_id]
    log_probs = compute_log_probs(
        params, rollout, forward=Forward(model), micro_batching=MicroBatching(size=4), temperature=SAMPLING.temperature
    )
    torch.testing.assert_close(rollout.rollout_log_probs, log_probs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("end", ["<eos>", "d"])
def test_a_chat_goes_on_in_the_text_of_its_template(end):
    """Whatever tokens the policy chose to write its turn in, the text is that of the whole conversation."""
    words = byte_pairs(300, alphabet=pre_tokenizers.ByteLevel.alphabet())
    words.chat_template = CHATML
    start, said = [{"role": "user", "content": "a bad cab"}], "a dad had"
    after = [{"role": "tool", "content": "a dab"}, {"role": "user", "content": " cab"}]
    turn = [words.convert_tokens_to_ids(x) for x in said.replace(" ", "\u0120")]  # a letter at a time
    assert turn != words.encode(said, add_special_tokens=False)
    turn += words.encode(end, add_special_tokens=False)
    prompt = words.apply_chat_template(start, tokenize=True, return_dict=False, add_generation_prompt=True)
    ids = [*prompt, *turn, *chat_template(words, roles=("tool",))(after, turn[-1])]
    content = said if end == "<eos>" else said + end
    whole = [*start, {"role": "assistant", "content": content}, *after]
    expected = words.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert words.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == expected
