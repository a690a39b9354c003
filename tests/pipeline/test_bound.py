"""The short ways into a script by what they bind to each pass and stage, and stages that do not go together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import settings as draws
from hypothesis import strategies as st

from fppo import advantages, data, losses, models, quickstart, rewards, tree
from fppo.key import Key
from fppo.pipeline import local_passes, pieces, with_teacher
from fppo.pipeline.checks import disagreements, field, innermost, is_own
from fppo.pipeline.passes import Passes, as_they_are, read_values
from fppo.pipeline.stages import Annotate, Estimate, RollOut, Score, ScoreWithGreedy
from fppo.pipeline.wiring import wire
from fppo.rollout import Sampling
from fppo.steps import Forward, Loop, MicroBatching, adamw, schedule
from fppo.steps.outputs import TokenOutputs
from tests import tiny

MICRO = MicroBatching(size=3)


@pytest.mark.parametrize("replay", ["none", "rollout", "old_log_probs", "all"])
@pytest.mark.parametrize("of_critic", [None, "values", "confidence"])
def test_local_passes_are_those_of_their_roles(monkeypatch, replay, of_critic):
    monkeypatch.setattr("fppo.steps.experts.check_routers", lambda *_: None)
    policy, critic = (Forward(tiny.model_and_params(head)[0]) for head in ("lm", "value"))
    fetched: list[Any] = []
    reads = {"values": {"critic": critic}, "confidence": {"confidence": "reads"}}.get(of_critic, {})
    how = {"micro_batching": MICRO, "temperature": 0.5, "replay": replay, **reads}
    made = local_passes(policy, fetch=lambda role, params: fetched.append(role) or params, **how)
    for part, role, replays in ((made.policy, "actor", "rollout"), (made.reference, "ref", "all")):
        own: Any = part
        assert own.forward == attrs.evolve(policy, replay=replay == replays)
        assert (own.micro_batching, own.temperature, own.record) == (MICRO, 0.5, None)
        assert own.fetch("params") == "params"
        assert fetched.pop() == role
    assert made.confidence == ("reads" if of_critic == "confidence" else None)
    assert made.read == (("entropy",) if of_critic == "confidence" else ())
    assert (made.hidden, made.truth_signs) == (None, None)
    assert made.balance.keywords == {"forward": policy}
    values: Any = made.values
    if of_critic != "values":
        assert values is None
        return
    assert (values.forward, values.micro_batching, values.record) == (critic, MICRO, None)
    assert values.fetch("params") == "params"
    assert fetched.pop() == "critic"
    plain: Any = local_passes(policy, critic, micro_batching=MICRO)
    assert (plain.policy.temperature, plain.policy.forward.replay) == (1.0, False)
    assert plain.policy.fetch("x") == as_they_are("x") == "x"


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("reads", ["confidence", "hidden"])
@pytest.mark.parametrize("privileged", [False, True])
def test_a_critic_without_a_model_reads_what_the_policy_says(members, reads, privileged):
    rows = tiny.experience(0, 4)
    shape, seen = rows.response_mask.shape, []
    each = torch.rand(members, *shape, generator=torch.Generator().manual_seed(0))

    def critic(*args):
        seen.append(args)
        return each if members > 1 else each[0]

    signs = {"truth_signs": lambda rows: "signs"} if privileged else {}
    passes = Passes(policy="p", reference="r", **{reads: critic}, **signs)
    out = TokenOutputs(entropy="entropy", hidden="hidden")
    found = read_values(passes, "params", "log-probs", out, rows)
    (args,) = seen
    between = ("log-probs", "entropy") if reads == "confidence" else ("hidden",)
    assert args[: 1 + len(between)] == ("params", *between)
    assert args[-2] is rows.response_mask
    assert args[-1] == found.truth_signs == ("signs" if privileged else None)
    torch.testing.assert_close(found.values, each.mean(0))
    assert (found.disagreement is None) == (members == 1)
    if members > 1:
        torch.testing.assert_close(found.disagreement, each.std(0, correction=0))


def stage(wrapped: int, **fields: Any) -> Any:
    made = SimpleNamespace(**fields)
    for _ in range(wrapped):
        made = SimpleNamespace(stage=made)
    return made


SOURCES = st.sampled_from([None, "pass", "engine", "update", "auto"])
TEMPERATURES = st.sampled_from([None, 0.5, 1.0])


@draws(max_examples=150)
@given(
    st.lists(TEMPERATURES, min_size=3, max_size=3), SOURCES, SOURCES, st.booleans(), st.booleans(), st.integers(0, 2)
)
def test_stages_disagree_where_what_they_share_differs(temperatures, source, updated, corrects, rewarded, wrapped):
    sampled, annotated, learned = temperatures
    rollout = {} if sampled is None else {"sampling": Sampling(temperature=sampled)}
    passes = stage(0) if annotated is None else stage(0, policy=stage(wrapped, temperature=annotated))
    annotate = {"passes": passes} | ({} if source is None else {"old_log_probs": source})
    update = {} if learned is None else {"terms": SimpleNamespace(temperature=learned)}
    update |= {} if updated is None else {"old_log_probs": updated}
    found = disagreements(
        rollout=stage(wrapped, **rollout),
        annotate=stage(wrapped, **annotate),
        estimate=stage(wrapped, correct="weighs" if corrects else None, kl_in_reward=rewarded),
        update_actor=stage(wrapped, **update),
    )
    counted = {annotated, learned, None if corrects else sampled} - {None}
    expected = ["temperature = "] if len(counted) > 1 else []
    if source and updated and (source == "update") != (updated == "update"):
        expected.append(f"old_log_probs = {source!r} in annotate, {updated!r} in UpdateActor")
    if source in ("engine", "update", "auto"):
        expected += [f"old_log_probs = {source!r} in annotate: correct in estimate"] if corrects else []
        if source == "update" and rewarded:
            expected.append("old_log_probs = 'update' in annotate: kl_in_reward in estimate")
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))


def test_the_field_of_a_stage_is_the_outermost_that_there_is():
    inner = stage(0, a=1, b=2)
    outer = SimpleNamespace(stage=SimpleNamespace(stage=inner, b=3))
    assert [field(outer, name) for name in ("a", "b", "c")] == [1, 3, None]
    assert field(None, "a") is None
    assert innermost(outer) is inner
    assert innermost(inner) is inner


def test_what_is_the_librarys_own_is_known_by_its_module():
    from functools import partial, wraps

    @wraps(losses.ppo_clip)
    def wrapped(*args: Any) -> Any:
        return losses.ppo_clip(*args)

    def mine(*args: Any) -> Any:
        return losses.ppo_clip(*args)

    for fn in (losses.ppo_clip, partial(partial(losses.ppo_clip), clip_low=0.1), wrapped):
        assert not is_own(fn)
    for fn in (mine, partial(mine), torch.relu):
        assert is_own(fn)


OPTIMIZER = adamw(schedule("constant", 1e-3))
LOOP = Loop(mini_batch_size=4, micro_batching=MICRO)
WORDS = quickstart.character_tokenizer()


@rewards.inline_reward
def length(sample: Any) -> float:
    return float(len(sample.response))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [advantages.gae, advantages.grpo])
@pytest.mark.parametrize("stops", [(), (3, 4)])
def test_the_pieces_of_a_run_are_bound_to_each_other(estimator, stops):
    model = quickstart.small_model(len(WORDS), width=16, layers=1)
    params = models.init_params(model, Key(0))
    prompts = quickstart.prompt_sets(WORDS)[0]
    sampling = Sampling(n=2, max_tokens=3, temperature=0.5, stop_token_ids=stops)
    own = pieces(
        (model, params),
        WORDS,
        prompts,
        reward=length,
        sampling=sampling,
        batch_size=8,
        loop=LOOP,
        optimizer=OPTIMIZER,
        advantage=estimator,
        key=Key(5),
    )
    drawn = attrs.evolve(sampling, stop_token_ids=stops or (WORDS.eos_token_id,))
    critic, program = estimator is advantages.gae, own.program
    rollout: Any = program.rollout
    assert (rollout.sampling, rollout.engine, own.sampling) == (drawn, own.engine, drawn)
    assert (own.engine.model, own.engine.pad_token_id) == (model, prompts.pad_token_id)
    assert isinstance(program.score, Score)
    assert program.score.score is own.score
    estimate: Any = program.estimate
    assert (estimate.advantage_fn, estimate.max_tokens, estimate.whiten) == (estimator, 3, critic)
    passes: Any = field(program.annotate, "passes")
    assert (passes.policy.temperature, passes.policy.micro_batching, passes.policy.forward) == (0.5, MICRO, own.policy)
    update: Any = program.update_actor
    assert (update.loss_fn, update.loop, update.optimizer, update.forward) == (
        *(losses.ppo_clip, LOOP),
        *(OPTIMIZER, own.policy),
    )
    assert (update.terms.temperature, update.terms.kl_coef) == (0.5, 0.0)
    assert (program.update_critic is None, own.critic is None, own.run.critic is None) == (not critic,) * 3
    if critic:
        of_critic: Any = program.update_critic
        assert (of_critic.forward, of_critic.loop, of_critic.optimizer) == (own.critic, LOOP, OPTIMIZER)
        assert passes.values.forward == own.critic
        body = {name: x for name, x in own.run.critic.params.items() if name in params}
        assert all(torch.equal(x, params[name]) for name, x in body.items())
    assert (own.run.key, own.run.ref, own.run.step) == (Key(5), None, 0)
    assert tree.digest(own.run.actor.params) == tree.digest(params)
    first, cursor = own.draw(own.run.cursor)
    expected, after = data.next_batch(prompts, own.run.cursor, size=4, key=Key(5).fold("data"))
    assert torch.equal(first.tokens, expected.tokens)
    assert (cursor.epoch, cursor.position, cursor.course) == (after.epoch, after.position, None)
    taught = with_teacher(own, (model, params), micro_batching=MicroBatching(size=7))
    score: Any = taught.score
    assert (score.score, score.temperature, score.alone) == (own.score, 0.5, False)
    assert (score.teacher.params, score.teacher.policy.micro_batching) == (params, MicroBatching(size=7))
    assert score.teacher.policy.forward.model is model
    assert taught.program == attrs.evolve(program, score=Score(score=score))
    own.runner.close()


@pytest.mark.parametrize("source", ["pass", "engine"])
@pytest.mark.parametrize("replay", ["none", "all"])
@pytest.mark.parametrize("name", ["gae", "remax", "optimal_token_baseline"])
def test_a_program_has_what_its_estimator_reads(source, replay, name):
    estimator = getattr(advantages, name)
    rollout: Any = RollOut(engine="engine", sampling=Sampling(n=4, max_tokens=3, temperature=0.5, top_k=5))
    estimate = Estimate(advantage_fn=estimator, max_tokens=3)
    parts: Any = {"score": "score", "passes": "passes", "update_actor": "actor", "update_critic": "critic"}
    how = {"old_log_probs": source, "replay": replay, "together": dict, "check": False}
    found = wire(rollout=rollout, estimate=estimate, **parts, **how)
    passes: Any = "passes"
    assert found.annotate == Annotate(
        passes=passes,
        old_log_probs=source,
        sum_squared=name == "optimal_token_baseline",
        replay=replay,
        together=dict,
    )
    assert (found.rollout, found.estimate, found.update_actor, found.update_critic, found.together) == (
        *(rollout, estimate),
        *("actor", "critic", dict),
    )
    score: Any = found.score
    if name == "remax":
        greedy = attrs.evolve(rollout.sampling, greedy=True, n=1)
        assert score == ScoreWithGreedy(score=score.score, engine=rollout.engine, sampling=greedy)
    else:
        assert score == Score(score=score.score)
    assert score.score == "score"
