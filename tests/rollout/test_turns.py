"""Responses of several turns are those of a loop over single rows, and their messages are never trained on."""

import random
from itertools import pairwise

import attrs
import pytest
import torch

from fppo import advantages, losses, metrics, tree
from fppo import batch as batches
from fppo.batch import Column, Experience, extend
from fppo.data import stop_texts
from fppo.key import Key
from fppo.pipeline import turn_metrics
from fppo.quickstart import character_tokenizer
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.records import Response, rollout_of
from fppo.rollout.spread import SpreadEngine
from fppo.rollout.turns import tools
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.observations import PlainText
from fppo.rollout.turns.runner import ToolRunner
from fppo.runtime.simulate import simulate
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.forward import Forward, compute_log_probs, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests.models.families import make
from tests.rollout.test_embedded import KERNELS, PAD, make_prompts

TOKENIZER = character_tokenizer("0123456789+-*/=<>()ab.cdefgh")
STOPS = (1, *(TOKENIZER.convert_tokens_to_ids(list("=5bc+(-<a"))))
SAMPLING = Sampling(temperature=1.2, n=2, max_tokens=19, stop_token_ids=STOPS)
CUT = Sampling(temperature=0.7, top_k=12, top_p=0.9, n=3, max_tokens=30, stop_token_ids=STOPS)


def talkative(conversation):
    """How long the turn was and how it began; or nothing; or much; or the end."""
    last = conversation[-1]
    match last["end"]:
        case "=" | "+" | "(":
            return [{"role": "tool", "content": f"({len(last['content']) % 10}{last['content'][:1]})"}]
        case "5" | "-" | "<" | "a":
            return []
        case "b":
            return [{"role": "tool", "content": "h" * 7}, {"role": "user", "content": "d"}]
    return None


def silent(conversation):
    assert conversation
    return None


def embedded(model, **changes):
    return EmbeddedEngine(model=model, kernels=KERNELS, pad_token_id=PAD, **changes)


def engine_of(inner, respond=talkative, **changes):
    fixed = {"max_turns": 5, "pad_token_id": PAD, "encode": PlainText(TOKENIZER), "tokenizer": TOKENIZER}
    return TurnsEngine(engine=inner, **{"tools": ToolRunner(respond, inline=True), **fixed, **changes})


def generated(sampling=SAMPLING, *, dtype=torch.float64, key=3, lengths=None, respond=talkative, **changes):
    model, params = make("qwen2", dtype=dtype)
    prompts = make_prompts(*([] if lengths is None else [lengths]))
    return engine_of(embedded(model), respond, **changes).generate(params, Ask(prompts, sampling, Key(key), version=4))


def response(rollout, row):
    """Tokens, and whether the policy chose them."""
    width = rollout.response_mask.shape[1]
    seen = rollout.attention_mask[row, -width:]
    return rollout.tokens[row, -width:][seen].tolist(), rollout.response_mask[row][seen].tolist()


def unnumbered(rollout):
    return attrs.evolve(rollout, turn_ids=None)


@pytest.mark.parametrize("changes", [{"respond": silent}, {"max_turns": 1}])
@pytest.mark.parametrize("sampling", [SAMPLING, CUT, attrs.evolve(SAMPLING, greedy=True, n=1)])
def test_one_turn_is_the_inner_engines_rollout(sampling, changes):
    model, params = make("qwen2", dtype=torch.float32)
    limits = torch.tensor([3, 9, 4, 19, 7, 12])
    for most in (None, limits):
        expected = embedded(model).generate(
            params, Ask(make_prompts(extra=2), sampling, Key(3), version=7, limits=most)
        )
        engine = engine_of(embedded(model), **changes)
        sampled = engine.generate(params, Ask(make_prompts(extra=2), sampling, Key(3), version=7, limits=most))
        assert torch.equal(sampled.turn_ids, torch.zeros_like(sampled.turn_ids).where(sampled.response_mask, -1))
        assert tree.digest(unnumbered(sampled)) == tree.digest(expected)
        assert sampled.finish == expected.finish
        assert sampled.extras == expected.extras
    shorter = engine_of(embedded(model), **changes, turn_tokens=5)
    bounded = attrs.evolve(sampling, max_tokens=5)
    expected = embedded(model).generate(params, Ask(make_prompts(), bounded, Key(3)))
    sampled = shorter.generate(params, Ask(make_prompts(), sampling, Key(3)))
    assert tree.digest(unnumbered(sampled)) == tree.digest(expected)


def test_the_record():
    sampled, prompts = generated(), make_prompts()
    width = sampled.response_mask.shape[1]
    seen = sampled.attention_mask[:, -width:]
    assert torch.equal(sampled.tokens[::2, :-width], prompts.tokens)
    assert sampled.row_ids.tolist() == list(range(20, 32))
    assert sampled.groups.tolist() == [10 + i // 2 for i in range(12)]
    assert sampled.versions.tolist() == [4] * 12
    assert sampled.extras[5] == {"name": "row 2"}
    assert (sampled.tokens[:, -width:][~seen] == PAD).all()
    assert seen.any(0).all()
    for x in (sampled.rollout_log_probs, sampled.sampling_log_probs):
        assert (x[~sampled.response_mask] == 0).all()
        assert (x[sampled.response_mask] < 0).all()
    report = metrics.report(turn_metrics(sampled))
    turns = [1 + sum(a and not b for b, a in pairwise(response(sampled, row)[1])) for row in range(12)]
    assert report["rollout/turns/mean"] == pytest.approx(sum(turns) / 12)
    assert report["rollout/turns/max"] == max(turns) > 1
    reported = sum(chosen.count(False) for _, chosen in (response(sampled, row) for row in range(12)))
    assert report["rollout/observation_tokens/mean"] == pytest.approx(reported / 12)
    assert report["rollout/tool_failures"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "at"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_chosen_tokens_have_the_log_probs_of_the_whole_context(dtype, at):
    model, params = make("qwen2", dtype=dtype)
    sampled = generated(CUT, dtype=dtype)
    log_probs = compute_log_probs(
        params,
        sampled,
        forward=Forward(model),
        micro_batching=MicroBatching(token_budget=60),
        temperature=CUT.temperature,
    )
    holes = sampled.attention_mask[:, -log_probs.shape[1] :] & ~sampled.response_mask
    assert holes.any()
    torch.testing.assert_close(sampled.rollout_log_probs, log_probs, rtol=0, atol=at)


@pytest.mark.slow
def test_draws_depend_on_key_row_and_turn_alone():
    model, params = make("qwen2")
    engine, prompts = engine_of(embedded(model)), make_prompts()
    whole = engine.generate(params, Ask(prompts, SAMPLING, Key(3)))
    assert tree.digest(whole) == tree.digest(engine.generate(params, Ask(prompts, SAMPLING, Key(3))))
    assert tree.digest(whole) != tree.digest(engine.generate(params, Ask(prompts, SAMPLING, Key(4))))
    for chosen in ([1], [5, 3, 0], [2, 5, 4, 3, 1, 0]):
        part = engine.generate(params, Ask(batches.rows(prompts, chosen), SAMPLING, Key(3)))
        rows = [2 * i + j for i in chosen for j in range(2)]
        for row, other in enumerate(rows):
            assert response(part, row) == response(whole, other)
        assert part.finish == Column(whole.finish[i] for i in rows)


def erratic(conversation):
    if random.random() < 0.3:
        raise RuntimeError("bad luck")
    return [{"role": "tool", "content": str(random.randrange(10**6))}]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2, "shard": 2}, {"sequence": 3}])
def test_ranks_share_the_calls_and_hear_the_same(axes):
    model, params = make("qwen2")

    def on_rank(mesh, respond=talkative):
        inner = SpreadEngine(engine=embedded(model, mesh=mesh), mesh=mesh, pad_token_id=PAD)
        reported = {}
        sampled = engine_of(inner, respond, mesh=mesh).generate(
            params,
            Ask(make_prompts(), SAMPLING, Key(3), on_finished=lambda row, *rest: reported.__setitem__(row, rest)),
        )
        return sampled, reported

    (expected, reported), *_ = simulate({"shard": 1}, on_rank)
    for row in range(12):
        assert reported[row] == (response(expected, row)[0], expected.finish[row])
    sampled = simulate(axes, on_rank)
    for other, _ in sampled:
        assert tree.digest(other) == tree.digest(sampled[0][0])
        assert torch.equal(other.tokens, expected.tokens)
        assert torch.equal(other.response_mask, expected.response_mask)
        assert torch.equal(other.attention_mask, expected.attention_mask)
        torch.testing.assert_close(other.rollout_log_probs, expected.rollout_log_probs, rtol=0, atol=1e-10)
        assert other.finish == expected.finish
    assert sorted(row for _, part in sampled for row in part) == list(range(12))
    for place, (_, part) in enumerate(sampled):  # the rank that is asked about them
        assert {row // SAMPLING.n % len(sampled) for row in part} == {place}
    (first, _), *others = simulate(axes, lambda mesh: on_rank(mesh, erratic))
    assert any("tool_failures" in extra for extra in first.extras)
    for other, _ in others:
        assert tree.digest(other) == tree.digest(first)
        assert other.extras == first.extras


def failing(conversation):
    if len(conversation) == 2:
        raise RuntimeError("no")
    return None


@pytest.mark.slow
def test_failures_are_told_to_the_policy_or_end_the_row():
    reported = generated(respond=failing, tools=ToolRunner(failing, inline=True, failure="(h"))
    ended = generated(respond=failing, tools=ToolRunner(failing, inline=True, failure=""))
    alone = generated(max_turns=1)
    assert torch.equal(ended.tokens, alone.tokens)
    assert ended.finish == alone.finish
    for sampled in (reported, ended):
        failed = [extra.get("tool_failures", 0) for extra in sampled.extras]
        assert failed == [int(reason == "stop") for reason in alone.finish]
        assert metrics.report(turn_metrics(sampled))["rollout/tool_failures"] == sum(failed) > 0
    for row, reason in enumerate(alone.finish):
        first = response(alone, row)[0]
        tokens, chosen = response(reported, row)
        assert tokens[: len(first)] == first
        if reason == "stop" and len(first) + 2 < SAMPLING.max_tokens:
            assert TOKENIZER.decode(tokens[len(first) : len(first) + 2]) == "(h"
            assert not any(chosen[len(first) : len(first) + 2])


def experience(rollout):
    """The rollout with advantages, and old log-probs a little off."""
    mask, g = rollout.response_mask, torch.Generator().manual_seed(0)
    values, scores = torch.randn(mask.shape, generator=g).double(), torch.rand(len(mask), generator=g)
    rewards = advantages.token_rewards(scores.double(), mask)
    result = advantages.gae(rewards, values.where(mask, 0.0), mask, lam=0.9)
    return extend(
        Experience,
        rollout,
        scores=scores,
        named_scores={},
        old_log_probs=rollout.rollout_log_probs + 0.1 * values.where(mask, 0.0),
        token_rewards=rewards,
        values=values.where(mask, 0.0),
        advantages=advantages.whiten(result.advantages, mask),
        returns=result.returns,
    )


def updated(batch, model, params):
    optimizer = adamw(schedule("constant", 1e-3))
    return UpdateActor(
        forward=Forward(model),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=len(batch.tokens), micro_batching=MicroBatching(size=3)),
        optimizer=optimizer,
        terms=PolicyTerms(entropy_coef=0.01, temperature=SAMPLING.temperature),
    )(init_state(params, optimizer), batch)


@pytest.mark.slow
def test_observations_are_not_trained_on():
    """Not their log-probs, not what the batch holds at their places; they are context, though."""
    model, params = make("qwen2")
    rollout = generated()
    holes = rollout.attention_mask[:, -rollout.response_mask.shape[1] :] & ~rollout.response_mask
    batch = experience(rollout)
    state, report = updated(batch, model, params)
    assert all(torch.tensor(list(metrics.report(report).values())).isfinite())
    for value in (float("nan"), 1e6):
        columns = ("old_log_probs", "advantages", "returns", "values", "token_rewards", "rollout_log_probs")
        spoilt = {name: getattr(batch, name).masked_fill(holes, value) for name in columns}
        assert tree.digest(updated(tree.replace(batch, **spoilt), model, params)[0]) == tree.digest(state)
    trained = {name: x.clone().requires_grad_() for name, x in params.items()}
    out = forward_micro_batch(trained, rollout, forward=Forward(model))
    assert (out.log_probs[holes] == 0).all()
    grads = torch.autograd.grad(out.log_probs[holes].sum(), list(trained.values()), allow_unused=True)
    assert all(g is None or (g == 0).all() for g in grads)
    other = rollout.tokens.clone()
    other[:, -holes.shape[1] :][holes] = 3
    assert tree.digest(updated(tree.replace(batch, tokens=other), model, params)[0]) != tree.digest(state)


def test_a_chat_hands_its_own_messages_to_the_tool():
    calls = []

    def silent_tool(conversation):
        calls.append(conversation)

    model, params = make("qwen2")
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompts = attrs.evolve(make_prompts((3,)), extras=Column([{"prompt_messages": asked}]))
    engine_of(embedded(model), silent_tool).generate(
        params, Ask(prompts, Sampling(max_tokens=1, stop_token_ids=range(31)), Key(0))
    )
    (conversation,) = calls
    assert conversation[:2] == asked
    assert set(conversation[2]) == {"role", "content", "end"}


def test_the_calculator_in_a_rollout():
    """A forced policy writes <<2*3= and finds 6>> behind it, and goes on by itself where = is no call."""
    written = "<<2*3=a=c"
    sampling = Sampling(n=2, max_tokens=30, stop_token_ids=TOKENIZER.convert_tokens_to_ids(["=", "c"]))
    engine = engine_of(_Script(written), tools.calculator, max_turns=9)
    rollout = engine.generate({}, Ask(make_prompts((2, 1)), sampling, Key(0)))
    for row in range(4):
        tokens, chosen = response(rollout, row)
        assert TOKENIZER.decode(tokens) == "<<2*3=6>>a=c"
        assert chosen == [True] * 6 + [False] * 3 + [True] * 3
    assert set(rollout.finish) == {"stop"}


@pytest.mark.parametrize(("most", "tokens", "finish"), [(8, 6, "length"), (9, 6, "length"), (10, 10, "stop")])
def test_an_observation_that_leaves_no_room_for_an_answer_is_left_out(most, tokens, finish):
    sampling = Sampling(max_tokens=most, stop_token_ids=TOKENIZER.convert_tokens_to_ids(["=", "c"]))
    rollout = engine_of(_Script("<<2*3=c"), tools.calculator).generate({}, Ask(make_prompts((2,)), sampling, Key(0)))
    assert len(response(rollout, 0)[0]) == tokens
    assert rollout.finish[0] == finish


def test_a_text_of_several_tokens_ends_a_turn_and_is_its_end():
    """Also behind a turn that went on with nothing in between, whose earlier texts do not count again."""
    heard = []

    def tool(conversation):
        heard.append((conversation[-1]["content"], conversation[-1]["end"]))
        return {"ab)": [], "2*3": [{"role": "tool", "content": "d"}]}.get(conversation[-1]["end"])

    texts = stop_texts(TOKENIZER, ["ab)", "2*3"])
    sampling = Sampling(max_tokens=30, stop_texts=texts, stop_token_ids=TOKENIZER.convert_tokens_to_ids(["c"]))
    script = _Script("1ab)22*34c", ends=lambda tokens: sampling.stopped(tokens))
    rollout = engine_of(script, tool, max_turns=9).generate({}, Ask(make_prompts((2,)), sampling, Key(0)))
    assert heard == [("1ab)", "ab)"), ("1ab)22*3", "2*3"), ("4c", "c")]
    assert TOKENIZER.decode(response(rollout, 0)[0]) == "1ab)22*3d4c"


class _Script:
    """An engine that writes a text, up to its next stop token, whatever the prompts; observations are passed over."""

    def __init__(self, text, ends=None):
        self.left, self.ends = TOKENIZER.encode(text), ends

    def generate(self, params, ask):
        ends = self.ends or (lambda tokens: tokens[-1] in ask.sampling.stop_token_ids)
        stop = next(i for i in range(1, 1 + len(self.left)) if ends(self.left[:i]))
        tokens, self.left = self.left[:stop], self.left[stop:]
        zeros = torch.zeros(stop)
        rows = [Response.of(torch.tensor(tokens), zeros, zeros, ask.sampling)] * (
            len(ask.prompts.tokens) * ask.sampling.n
        )
        return rollout_of(ask, rows, pad_token_id=PAD, device=torch.device("cpu"))
