"""Turns as rows: prompts are the template's own, responses the sampled ids, and joined they are one long response."""

from __future__ import annotations

import attrs
import pytest
import torch

from fppo import advantages, losses, tree
from fppo.advantages.experience import estimate
from fppo.batch import Annotated, Column, Prompts, Scored, extend
from fppo.data.examples import MESSAGES
from fppo.environments import Begin, EnvironmentRunner, Step
from fppo.episodes import joined, layout_of, num_episodes
from fppo.key import Key
from fppo.losses import KLState
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.spread import SpreadEngine
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.observations import PlainText
from fppo.rollout.turns.runner import ToolRunner
from fppo.runtime.simulate import simulate
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.experts import rerouted
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests.models.families import make
from tests.rollout import environments, test_environments, test_routed, test_turns
from tests.rollout.templates import KINDS, shipped
from tests.rollout.test_embedded import PAD
from tests.rollout.test_embedded import engine_of as embedded_of
from tests.rollout.test_environments import runner
from tests.rollout.test_templates import QUESTION, spoken, template_of, whole
from tests.rollout.test_turns import TOKENIZER, embedded, response
from tests.serve.parrot import Parrot

SAID = ["<think>\nhm\n</think>\n\nThe answer is 12.", "<think>\nno\n</think>\n\nOslo", "x"]


def scripted(words, template, said, *, tools=None, player=None, **changes):
    """One row whose turns are these texts, over a template."""
    ids = [[*words.encode(text, add_special_tokens=False), words.eos_token_id] for text in said]
    parrot = Parrot(lambda request, before: ids[int(request.name.partition(".")[2]) - 1])
    prompt = whole(words, template, [QUESTION])
    prompts = Prompts(
        tokens=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.bool),
        row_ids=torch.tensor([5]),
        ids=Column(["a"]),
        ground_truth=Column([None]),
        source=Column([""]),
        extras=Column([{MESSAGES: [QUESTION]}]),
    )
    fixed = {"encode": template, "tokenizer": words, "max_turns": len(said), "pad_token_id": 0}
    tools = player or ToolRunner(tools or (lambda _: [{"role": "user", "content": "and then?"}]), inline=True)
    engine = TurnsEngine(engine=parrot, tools=tools, prompt=template.prompt, **{**fixed, **changes})
    sampling = Sampling(max_tokens=400, stop_token_ids=(words.eos_token_id,))
    return engine.generate({}, Ask(prompts, sampling, Key(2)))


def texts(words, rollout):
    """Prompt and response of each row, as text."""
    width = rollout.response_mask.shape[1]
    halves = (rollout.tokens[:, :-width], rollout.tokens[:, -width:])
    seen = (rollout.attention_mask[:, :-width], rollout.attention_mask[:, -width:])
    return [tuple(words.decode(x[row][s[row]]) for x, s in zip(halves, seen)) for row in range(len(rollout.tokens))]


def unpadded(rows, like):
    """The rows with as wide prompts, which others had more padding before."""
    more = rows.tokens.shape[1] - like.tokens.shape[1]
    assert not rows.attention_mask[:, :more].any()
    return tree.replace(rows, tokens=rows.tokens[:, more:], attention_mask=rows.attention_mask[:, more:])


def test_earlier_thoughts_are_in_no_prompt_and_every_turn_is_as_it_was_said():
    """By hand, over a template of Qwen3's kind."""
    words, template = template_of(KINDS["forgets thinking"], "user")
    rollout = scripted(words, template, SAID, thinking="drop")
    start, end = "<|im_start|>user\n", "<|im_end|>\n"
    asked = f"{start}What is 3 x 4?{end}<|im_start|>assistant\n"
    second = f"{asked}The answer is 12.{end}{start}and then?{end}<|im_start|>assistant\n"
    third = f"{second}Oslo{end}{start}and then?{end}<|im_start|>assistant\n"
    assert texts(words, rollout) == [
        (prompt, f"{said}<|im_end|>") for prompt, said in zip((asked, second, third), SAID, strict=True)
    ]
    assert rollout.episodes.tolist() == [5, 5, 5]
    assert rollout.turn_ids.amax(1).tolist() == [0, 1, 2]
    kept = scripted(words, template, SAID)
    again = unpadded(joined(rollout), kept)
    assert torch.equal(again.tokens, kept.tokens)
    assert torch.equal(again.turn_ids, kept.turn_ids)


def test_turns_are_told_in_the_parts_that_the_template_reads():
    """Thoughts and calls by the tokenizer's own response template: the template shows a tool's message behind a call
    alone."""
    words, template = template_of(KINDS["another end, and calls"], "tool")
    words.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|return\|>\s*", "content": "text"},
        },
    }
    said = ['<think>hm</think><tool_call>{"name": "tool", "arguments": {"x": 1}}</tool_call>', "so"]
    rollout = scripted(
        words, template, said, tools=lambda _: [{"role": "tool", "name": "tool", "content": "12"}], thinking="drop"
    )
    (_, first), (prompt, second) = texts(words, rollout)
    assert first == f"{said[0]}<|return|>"
    assert second == "so<|return|>"
    assert "hm" not in prompt
    call = '<|start|>assistant to=tool<|message|>{"x": 1}<|call|>'
    assert prompt.endswith(f'{call}<|start|>functions.tool<|message|>"12"<|end|><|start|>assistant')


class Asks:
    """Asks on, for a reward of 1 a turn."""

    def reset(self, row, seed):
        return Begin(0)

    def step(self, state, reply):
        return Step(state + 1, [{"role": "tool", "content": "12"}], 1.0)


def test_a_turn_that_the_template_refuses_in_a_conversation_ends_its_episode():
    words, template = template_of(KINDS["another end, and calls"], "tool")

    def rewards(failure):
        player = EnvironmentRunner(Asks, name="asks", asynchronous=False, inline=True)
        rollout = scripted(words, template, ["a", "b"], player=player, thinking="drop", failure=failure)
        assert len(rollout.tokens) == 1
        assert rollout.extras[0]["tool_failures"] == 1
        return rollout.turn_rewards.sum(1)

    assert rewards("drop").isnan().all()
    assert rewards("score").tolist() == [0.0]


def check_rows(words, template, role):
    """Each row by hand: the template's prompt of the conversation so far, the sampled ids, and a pass's log-probs."""
    rollout, given, gap = spoken(words, template, role, prompt=template.prompt, thinking="drop")
    assert gap < 2e-5
    told = [{"role": role, "content": "and then?"}]
    conversations, turns, most = {}, {}, 0
    width = rollout.response_mask.shape[1]
    for row, number in enumerate(rollout.episodes.tolist()):
        messages = conversations.setdefault(number, [QUESTION])
        turn = turns[number] = turns.get(number, -1) + 1
        seen = rollout.attention_mask[row]
        assert rollout.tokens[row, :-width][seen[:-width]].tolist() == whole(words, template, messages)
        ids = response(rollout, row)[0]
        assert ids == given[number][turn]
        assert all(response(rollout, row)[1])
        text = words.decode(ids[:-1] if ids[-1] in words.all_special_ids else ids)
        conversations[number] = [*messages, {"role": "assistant", "content": text}, *told]
        most = max(most, turn)
    assert {number: len(own) for number, own in given.items()} == {number: turn + 1 for number, turn in turns.items()}
    assert most > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_templates_prompt_and_what_was_sampled(kind):
    words, template = template_of(KINDS[kind], "user")
    check_rows(words, template, "user")


@pytest.mark.slow
@pytest.mark.skipif(not shipped(), reason="TRL, whose templates are read, is not installed")
def test_the_law_holds_over_the_templates_of_trl():
    checked = 0
    for text in shipped().values():
        for role in ("user", "tool"):
            words, template = template_of(text, role)
            if template is not None and not (role == "tool" and template.behind_calls):
                check_rows(words, template, role)
                checked += 1
    assert checked > 100


# a template that drops nothing: whether turns are rows makes no difference to any token

STOPS = tuple(token for token in test_turns.STOPS if token != TOKENIZER.eos_token_id)
SAMPLING = attrs.evolve(test_turns.SAMPLING, stop_token_ids=STOPS, max_tokens=40)


def prompt(messages):
    return TOKENIZER.encode("".join(message["content"] for message in messages))


def both(inner, player, **changes):
    """The same episodes, as rows and as turns in rows."""
    _, params = changes.pop("made", None) or make("qwen2")
    ask = Ask(test_environments.make_prompts(), SAMPLING, Key(3))
    how = {"tools": player, "max_turns": 4, "pad_token_id": PAD, "encode": PlainText(TOKENIZER), "tokenizer": TOKENIZER}
    return [
        TurnsEngine(engine=inner, prompt=prompt, thinking=thinking, **{**how, **changes}).generate(params, ask)
        for thinking in ("keep", "drop")
    ]


def players():
    return {
        "environment": runner(environments.Count),
        "goes on": runner(environments.Plain),
        "tool": ToolRunner(test_turns.talkative, inline=True),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", players())
def test_a_template_that_drops_nothing_gives_the_same_tokens_and_log_probs(name):
    model, params = make("qwen2")
    kept, rows = both(embedded(model), players()[name])
    again = unpadded(joined(rows), kept)
    assert (len(rows.tokens) > len(kept.tokens)) == (name != "goes on")
    seen = kept.attention_mask
    assert torch.equal(again.attention_mask, seen)
    for column in ("tokens", "response_mask", "turn_ids", "turn_rewards", "row_ids", "groups", "versions"):
        x, y = getattr(again, column), getattr(kept, column)
        assert (x is None and y is None) or torch.equal(x, y), column
    for column in ("rollout_log_probs", "sampling_log_probs"):
        torch.testing.assert_close(getattr(again, column), getattr(kept, column), rtol=0, atol=1e-10)
    assert again.finish == kept.finish
    assert again.extras == kept.extras
    log_probs = compute_log_probs(
        params, rows, forward=Forward(model), micro_batching=MicroBatching(token_budget=60), temperature=1.2
    )
    torch.testing.assert_close(log_probs, rows.rollout_log_probs, rtol=0, atol=1e-10)


def annotated(rollout, at=None):
    """The rows with scores by episode, and numbers in place of a critic's values."""
    whole = joined(rollout)
    scores = whole.turn_rewards.sum(1)
    of_row = torch.arange(len(scores)) if rollout.episodes is None else layout_of(rollout).episode_of
    scored = extend(Scored, rollout, scores=scores[of_row], named_scores={})
    return extend(Annotated, scored, old_log_probs=rollout.rollout_log_probs, values=rollout.rollout_log_probs.sin())


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [advantages.grpo, advantages.gae, advantages.turn_gae])
def test_and_the_same_update(estimator):
    """One step of training from rows of turns is the one from whole responses, in several mini-batches."""
    model, params = make("qwen2")
    kept, rows = both(embedded(model), runner(environments.Count))
    optimizer = adamw(schedule("constant", 1e-3))
    update = UpdateActor(
        forward=Forward(model),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=5, micro_batching=MicroBatching(size=3), epochs=2),
        optimizer=optimizer,
        terms=PolicyTerms(temperature=SAMPLING.temperature),
    )
    results = []
    for rollout in (kept, rows):
        experience, _, _ = estimate(annotated(rollout), KLState(coef=0.0), advantage_fn=estimator)
        state, _ = update(init_state(params, optimizer), experience, key=Key(1))
        results.append((experience, state.params))
    (one, expected), (other, got) = results
    back = layout_of(other).of_episodes(other.advantages)
    torch.testing.assert_close(back, one.advantages, rtol=0, atol=1e-9)
    assert one.advantages.any()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-8)


@pytest.mark.slow
def test_ranks_play_the_same_rows():
    model, _ = make("qwen2")
    _, expected = both(embedded(model), runner(environments.Count))

    def on_rank(mesh):
        inner = SpreadEngine(engine=embedded(model, mesh=mesh), mesh=mesh, pad_token_id=PAD)
        return both(inner, runner(environments.Count), mesh=mesh)[1]

    for other in simulate({"shard": 2}, on_rank):
        for column in ("tokens", "attention_mask", "turn_ids", "episodes", "row_ids", "turn_rewards"):
            assert torch.equal(getattr(other, column), getattr(expected, column)), column
        assert other.observed == expected.observed


@pytest.mark.slow
def test_rows_have_the_experts_of_their_own_prompts():
    model, params = make("qwen3_moe")
    _, rows = both(embedded_of(model, routed=True), ToolRunner(test_turns.talkative, inline=True), made=(model, params))
    free = test_routed.passed(params, rows, forward=Forward(model))
    ran = test_routed.ran(rows)
    assert len(rows.tokens) > num_episodes(rows)
    assert torch.equal(rows.routed[ran], free.routed[ran])
    assert not rerouted(rows.routed, free.routed, rows.attention_mask)["training/rerouted/tokens"].total


def test_rows_are_no_longer_than_a_prompt_with_a_whole_response():
    """Though a prompt may grow by more than what was said and observed."""

    def wordy(messages):
        return prompt(messages) + TOKENIZER.encode("h" * 7 * (len(messages) > 1))

    model, params = make("qwen2")
    ask = Ask(test_environments.make_prompts(), attrs.evolve(SAMPLING, max_tokens=14), Key(3))
    how = {"max_turns": 5, "pad_token_id": PAD, "encode": PlainText(TOKENIZER), "tokenizer": TOKENIZER}
    tools = ToolRunner(test_turns.talkative, inline=True)
    engine = TurnsEngine(engine=embedded(model), tools=tools, prompt=wordy, thinking="drop", **how)
    rows = engine.generate(params, ask)
    first = {int(number): row for row, number in reversed([*enumerate(rows.episodes)])}
    width = rows.response_mask.shape[1]
    for row, number in enumerate(rows.episodes.tolist()):
        own = rows.attention_mask[first[number], :-width].sum()
        assert rows.attention_mask[row].sum() <= own + 14
    assert len(rows.tokens) > num_episodes(rows)


def test_what_turns_as_rows_need_is_named():
    model, params = make("qwen2")
    with pytest.raises(ValueError, match="give prompt"):
        test_turns.engine_of(embedded(model), thinking="drop")
    ask = Ask(test_environments.make_prompts(), SAMPLING, Key(3))
    prompts = tree.replace(ask.prompts, inputs=Column([object()] * 6))
    engine = test_turns.engine_of(embedded(model), thinking="drop", prompt=prompt)
    with pytest.raises(ValueError, match="cannot have images"):
        engine.generate(params, attrs.evolve(ask, prompts=prompts))
