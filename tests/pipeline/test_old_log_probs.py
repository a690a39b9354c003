"""Where old log-probs come from, where what was sampled from is not the policy's whole distribution."""

import warnings
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.assembly import announce
from fppo.assembly.checks import TRAIN
from fppo.assembly.inputs import Inputs
from fppo.assembly.run import assemble
from fppo.batch import Experience, Scored, extend
from fppo.key import Key
from fppo.pipeline import gap, local_passes, stages
from fppo.pipeline.checks import field, innermost
from fppo.pipeline.program import RunState, SampleBatch
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.settings.resolve import old_log_probs_source, said_of_old_log_probs
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.train_state import init_state
from tests import tiny, tiny_run
from tests.rollout.test_embedded import make_prompts

CUT = {"rollout__top_p": 0.6, "rollout__top_k": 5, "rollout__min_p": 0.5, "rollout__temperature": 1.3}
ONCE = {"actor__epochs": 1, "actor__mini_batch_size": 8, "algorithm__kl__coef": 0.0}
FIXED = {"algorithm__kl__controller": "fixed", "algorithm__kl__horizon": 10000}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["engine", "pass", "update"])
def test_they_are_of_the_distribution_before_tokens_are_cut(tmp_path, source):
    """The ratio's old policy is the one whose log-probs are trained, at the sampling temperature: what the engine cut
    off to sample has no part in it."""
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, **CUT, **ONCE, **FIXED, algorithm__old_log_probs=source)
    with assemble(settings) as assembly:
        run, program = assembly.run, assembly.program
        scored, _, _ = SampleBatch()(run, draw=assembly.draw, rollout=program.rollout, score=program.score)
        annotated, _ = program.annotate(scored, run)
        mask = annotated.response_mask
        forward = field(program.update_actor, "forward")
        expected = compute_log_probs(
            run.actor.params, scored, forward=forward, micro_batching=MicroBatching(size=8), temperature=1.3
        )
        assert ((scored.sampling_log_probs - expected)[mask] > 0.1).any()  # the cut made a difference
        torch.testing.assert_close(annotated.old_log_probs[mask], expected[mask], rtol=0, atol=1e-5)
        experience, _, _ = program.estimate(annotated, run.kl)
        off = tree.replace(experience, sampling_log_probs=torch.full_like(expected, float("nan")))
        seen = []

        def loss(log_probs, old_log_probs, advantages, mask):
            seen.append((old_log_probs, mask))
            return losses.ppo_clip(log_probs, old_log_probs, advantages, mask)

        update = innermost(program.update_actor)
        attrs.evolve(update, loss_fn=loss)(run.actor, off)
    assert sum(int(mask.sum()) for _, mask in seen) == int(mask.sum())
    trained = torch.cat([old[mask] for old, mask in seen]).sort().values
    torch.testing.assert_close(trained, expected[mask].sort().values, rtol=0, atol=1e-5)


SGD = sgd(lambda step: 1.0, momentum=0.0, weight_decay=0.0, max_grad_norm=None)
TEMPERATURE = 0.7


def sampled(dtype, *, step=gap.WHOLE_STEPS, rows=24):
    """A policy, the run at a step, rows that it sampled from a part of its distribution, and the stage `Annotate`."""
    model, params = tiny.model_and_params(dtype=dtype)
    forward = Forward(model)
    engine = EmbeddedEngine(model=model, kernels=forward.kernels, pad_token_id=0)
    sampling = Sampling(n=2, max_tokens=5, temperature=TEMPERATURE, top_p=0.8, stop_token_ids=(3,))
    prompts = make_prompts(tuple(1 + i % 6 for i in range(rows // 2)))
    prompts = tree.replace(prompts, tokens=prompts.tokens % tiny.VOCAB)
    rollout = engine.generate(params, Ask(prompts, sampling, Key(1)))
    scored = extend(Scored, rollout, scores=Key(2).uniform(rollout.row_ids, 1)[:, 0].float(), named_scores={})
    run = RunState(actor=init_state(params, SGD), key=Key(0), step=step)
    cut = MicroBatching(size=5)
    return (
        run,
        scored,
        stages.Annotate(passes=local_passes(forward, micro_batching=cut, temperature=TEMPERATURE)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_an_update_by_the_engines_is_the_one_by_those_of_a_pass(dtype, rounding):
    """Two mini-batches, so that the ratio of the second is not 1."""
    run, scored, annotate = sampled(dtype)
    moved = {}
    for source in ("pass", "auto"):
        annotated, report = attrs.evolve(annotate, old_log_probs=source)(scored, run)
        assert torch.equal(annotated.old_log_probs, scored.rollout_log_probs) == (source == "auto")
        assert f"training/old_log_probs/{'engine' if source == 'auto' else source}" in report
        mask = annotated.response_mask
        advantages = (scored.scores[:, None] - 0.5).expand(mask.shape).to(dtype)
        kept = {"token_rewards": advantages, "advantages": advantages, "returns": advantages}
        after, _ = UpdateActor(
            forward=annotate.passes.policy.forward,
            loss_fn=partial(losses.ppo_clip, clip_low=0.9, clip_high=9.0, dual_clip=None),
            loop=Loop(mini_batch_size=12, micro_batching=MicroBatching(size=6)),
            optimizer=SGD,
            terms=PolicyTerms(temperature=TEMPERATURE),
            old_log_probs=source,
        )(run.actor, extend(Experience, annotated, **kept))
        moved[source] = torch.cat([(after.params[k] - x).flatten() for k, x in run.actor.params.items()])
    scale = moved["pass"].abs().max()
    assert scale > 0.01
    torch.testing.assert_close(moved["auto"], moved["pass"], rtol=0, atol=rounding * scale.item())


@pytest.mark.slow
def test_an_engine_that_differs_or_is_not_yet_known_leaves_it_to_a_pass():
    run, scored, annotate = sampled(torch.float32)
    auto = attrs.evolve(annotate, old_log_probs="auto")
    by_pass, _ = annotate(scored, run)

    def look(rows, at):
        annotated, report = auto(rows, at)
        numbers = metrics.report(report)
        return annotated, numbers, [n.rpartition("/")[2] for n in numbers if n.startswith("training/old_log_probs/")]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(gap.WHOLE_STEPS):
            annotated, numbers, names = look(scored, tree.replace(run, step=step))
            assert sorted(names) == ["gap", "pass"]
            assert 0 < numbers["training/old_log_probs/gap"] < 1e-5
            assert torch.equal(annotated.old_log_probs, by_pass.old_log_probs)
        every = torch.ones_like(scored.versions)
        for lag in (every, every - (every.cumsum(0) > 1).long()):  # all rows are older, or the first alone
            older = tree.replace(scored, versions=scored.versions - lag)
            annotated, _, names = look(older, run)
            assert names == ["pass"]
            assert torch.equal(annotated.old_log_probs, by_pass.old_log_probs)
    for wrong in (1e-3, float("nan")):
        shifted = tree.replace(scored, rollout_log_probs=scored.rollout_log_probs + wrong)
        with pytest.warns(RuntimeWarning, match=r"engine's log-probs differ from the policy's own .*gap > 0\.0001"):
            annotated, _, names = look(shifted, run)
        assert sorted(names) == ["gap", "pass"]
        assert torch.equal(annotated.old_log_probs, by_pass.old_log_probs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "source", "words"),
    [
        ({}, "auto", "algorithm.old_log_probs engine, held in every"),
        (ONCE | FIXED, "update", "old_log_probs update: a batch has one"),
        ({"model__compute_dtype": "bfloat16"}, "pass", "old_log_probs pass: model.compute_dtype = bfloat16"),
        ({"rollout__ahead": 1}, "pass", "rollout.ahead trains on"),
        ({"algorithm__correction": "rollout"}, "pass", "algorithm.correction compares the two"),
        ({"rollout__engine": "vllm"}, "pass", "rollout.engine = vllm"),
        ({"critic__reads": "confidence"}, "pass", "critic.reads = confidence needs"),
    ],
)
def test_settings_say_when_the_engines_cannot_be_the_old_ones(tmp_path, changes, source, words):
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, algorithm__old_log_probs="auto", **changes)
    assert old_log_probs_source(settings) == source
    (said,) = said_of_old_log_probs(settings)
    assert words in said
    assert said_of_old_log_probs(tiny_run.settings(tmp_path)) == []
    inputs = Inputs(settings=tiny_run.settings(tmp_path)).need(*TRAIN)
    lines = announce.input_lines(inputs, differing={}, old_log_probs=[said])
    assert f"auto {said}" in " ".join(" ".join(lines).split())
    assert old_log_probs_source(tiny_run.settings(tmp_path, **changes)) in ("pass", "update")


def test_the_rows_that_are_compared_lie_all_over_the_batch():
    """An engine that is wrong for later rows alone, as one whose cache was moved, is found too."""
    rows, run = (
        tiny.experience(0, 3 * gap.COMPARED),
        SimpleNamespace(step=gap.WHOLE_STEPS, actor=SimpleNamespace(step=0)),
    )
    mask = torch.ones_like(rows.response_mask)
    rows = attrs.evolve(rows, response_mask=mask)

    def trainers(some, wrong_from):
        return some.rollout_log_probs + (some.row_ids >= wrong_from).double()[:, None]

    source, old, _ = gap.of_engine(rows, run, partial(trainers, wrong_from=len(mask)))
    assert source == "engine"
    assert torch.equal(old, rows.rollout_log_probs)
    with pytest.warns(RuntimeWarning, match="differ from the policy's own"):
        source, old, _ = gap.of_engine(rows, run, partial(trainers, wrong_from=2 * gap.COMPARED))
    assert source == "pass"
    assert torch.equal(old, trainers(rows, 2 * gap.COMPARED))
    alone, asked = batches.rows(rows, [0]), []

    def told(some):
        asked.append(len(some.row_ids))
        return trainers(some, wrong_from=len(mask))

    source, old, _ = gap.of_engine(alone, SimpleNamespace(step=9, actor=run.actor), told)  # a pass over it is over all
    assert (source, asked) == ("pass", [1])
    assert torch.equal(old, alone.rollout_log_probs)
