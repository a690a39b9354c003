"""Options that stages hand on to what they call: to the functions of several ranks, to passes, updates and samplers."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import settings as draws
from hypothesis import strategies as st

from fppo import advantages, metrics
from fppo import batch as batches
from fppo._errors import RunFailed
from fppo.batch import Prompts, Rollout, Scored, extend
from fppo.data import Course, DataCursor
from fppo.key import Key
from fppo.models import flops
from fppo.pipeline import checks, measure, passes, stages
from fppo.pipeline.measure import Measured, gauges
from fppo.pipeline.program import SampleBatch, in_turn
from fppo.pipeline.replay import record_line, replay
from fppo.pipeline.step import ppo_step
from fppo.pipeline.supervised import Imitation, imitate_steps
from fppo.pipeline.train import Evaluation, StepRecord, Watching, iterate, repeated, train
from fppo.pipeline.truth import KEPT, Known, Truth, _rewards, critic_truth
from fppo.rollout.engine import Sampling
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.simulate import simulate
from fppo.steps import compute_log_probs, compute_values
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.outputs import Forward, TokenOutputs
from fppo.steps.packed import masks_of, sorted_rows
from fppo.steps.supervised import demonstrations
from fppo.steps.train_state import TrainState
from fppo_kernels.collectives import Axis
from tests import tiny
from tests.pipeline import test_annotate as noted
from tests.pipeline.test_step import Stages, run_of

CPU = torch.device("cpu")
TWO = Mesh({"replicate": Axis(2)})  # of one rank alone: nothing here has the other send anything
TRAIN: Any = sys.modules["fppo.pipeline.train"]
REPLAY: Any = sys.modules["fppo.pipeline.replay"]
SUPERVISED: Any = sys.modules["fppo.pipeline.supervised"]


def clocked(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """A clock of modules by which every reading is two seconds after the last."""
    ticks = itertools.count(0.0, 2.0)
    for module in modules:
        monkeypatch.setattr(module, "now", lambda: next(ticks))


# how work of several roles runs


def test_updates_run_as_the_program_has_them_together():
    ran = []

    def backwards(work):
        ran.append(list(work))
        return {name: work[name]() for name in reversed(work)}

    after, _, report = ppo_step(run_of(), program=Stages().program(together=backwards), draw=None)
    plain, _, other = ppo_step(run_of(), program=Stages().program(), draw=None)
    assert ran == [["critic", "actor"]]
    for role in ("critic", "actor"):
        assert getattr(after, role).params == getattr(plain, role).params
    assert report.keys() == other.keys()


def test_passes_run_as_the_stage_has_them_together():
    ran = []

    def backwards(work):
        ran.append(list(work))
        return in_turn(dict(reversed(work.items())))

    of = noted.passes_of([], values=lambda params, rows: noted.numbers(9))
    run = noted.run_of(ref={"ref": torch.ones(1)}, critic=True)
    stage = stages.Annotate(passes=of, together=backwards)
    found, report = stage(noted.ROWS, run)
    assert ran == [["old_log_prob", "ref", "values"]]
    plain, other = attrs.evolve(stage, together=in_turn)(noted.ROWS, run)
    tiny.assert_same_columns(found, plain)
    assert report.keys() == other.keys()


@pytest.mark.parametrize(
    ("role", "before", "scale", "ends"),
    [("critic", 0, None, True), ("actor", 0, None, True), ("critic", 3, None, False), ("critic", 3, 1e-30, True)],
)
def test_a_model_whose_first_updates_are_all_skipped_ends_the_step(role, before, scale, ends):
    """Which is said of the model, with its first parameter that is not finite."""
    own = Stages()
    skipped = {f"{role}/skipped": metrics.mean(2.0, 2.0)}
    skipped |= {} if scale is None else {f"{role}/loss_scale": metrics.mean(scale, 1.0)}
    program = own.program(**{f"update_{role}": lambda state, batch, *, key, donate: (state, skipped)})
    broken = {"fine": torch.ones(2), "w": torch.full((1,), torch.nan)}
    run = run_of(**{role: TrainState(params=broken, opt=None, step=before)})
    if not ends:
        ppo_step(run, program=program, draw=None)
        return
    with pytest.raises(RunFailed, match=rf"the {role} cannot learn: .*1 parameters are not finite.* w of the {role}"):
        ppo_step(run, program=program, draw=None)


# steps on several ranks


def test_rates_of_steps_are_those_of_one_rank_of_several(monkeypatch):
    clocked(monkeypatch, TRAIN)
    tokens = {"perf/total_num_tokens": metrics.mean(60.0)}
    program = Stages().program(annotate=lambda scored, run: (scored, tokens))
    asked = []
    monkeypatch.setattr(TRAIN, "check_devices", lambda *args: asked.append(args))
    for mesh, ranks in ((LOCAL, 1), (TWO, 2)):
        steps = iterate(run_of(), program=program, draw=None, mesh=mesh)
        numbers = metrics.report(next(steps)[2])
        assert numbers["perf/throughput"] == 60.0 / numbers["timing_s/step"] / ranks
        assert asked.pop() == (0, ranks, CPU)
    with pytest.raises(ValueError, match=r"rollout\.interrupt on 2 ranks"):
        next(iterate(run_of(), program=attrs.evolve(program, interrupts=True), draw=None, mesh=TWO, ahead=1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_stops_where_any_does_and_counts_its_own_tokens(ranks):
    def step(run):
        return attrs.evolve(run, step=run.step + 1), "batch", {"perf/total_num_tokens": metrics.mean(60.0)}

    def run(mesh):
        records, last = [], mesh["replicate"].rank == ranks - 1
        watching = Watching(steps=9, observers=[records.append], stop=lambda: last and len(records) == 2)
        return [run.step for run, *_ in repeated(step, run_of(0), mesh=mesh, watching=watching)], records

    for steps, records in simulate({"replicate": ranks}, run):
        assert steps == [1, 2]
        for record in records:
            seconds = record.metrics["timing_s/step"]
            assert record.metrics["perf/throughput"] == pytest.approx(60.0 / seconds / ranks)


def test_a_script_stops_evaluates_and_samples_ahead_as_it_says():
    evaluated: list[int] = []

    def evaluate(run):
        assert not torch.is_grad_enabled()
        evaluated.append(run.step)
        return {}

    stops, seen = iter([False, False, True]), []
    program = Stages().program(annotate=lambda scored, run: (scored, {"perf/total_num_tokens": metrics.mean(6.0)}))
    evaluation = Evaluation(evaluate, every=2, before=False)
    how = {"evaluation": evaluation, "stop": lambda: next(stops), "steps": 9, "observers": [seen.append]}
    last = train(run_of(0), program=program, draw=None, **how)
    assert (last.step, evaluated, [record.run.step for record in seen]) == (2, [2], [1, 2])
    with pytest.raises(ValueError, match=r"rollout\.interrupt on 2 ranks"):
        train(run_of(0), program=attrs.evolve(program, interrupts=True), draw=None, ahead=1, mesh=TWO, steps=9)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("mesh", "ranks"), [(LOCAL, 1), (TWO, 2)], ids=["one", "two"])
def test_supervised_steps_give_their_states_up_where_they_are_told(donate, mesh, ranks):
    batch, given_up, cursors = demonstrations([[5]], [[1, 2, 3]], pad_token_id=0), [], []

    def draw(cursor):
        cursors.append(cursor.position)
        return batch, attrs.evolve(cursor, position=cursor.position + 1)

    def update(state, batch, *, key, donate):
        given_up.append(donate)
        return attrs.evolve(state, step=state.step + 1), {}

    imitation = Imitation(draw=draw, update=update, steps=9)
    steps = imitate_steps(run_of(), imitation=imitation, mesh=mesh, donate=donate)
    each = [next(steps) for _ in range(3)]
    assert given_up == [donate] * 3
    assert cursors == [0, 1, 2]
    assert [run.step for run, _, _ in each] == [4, 5, 6]
    for _, rows, report in each:
        numbers = metrics.report(report)
        assert rows is batch
        assert numbers["perf/throughput"] == pytest.approx(4.0 / numbers["timing_s/step"] / ranks)


def test_the_work_of_an_update_is_divided_among_ranks(monkeypatch):
    model, _ = tiny.model_and_params()
    batch, asked = tiny.experience(0, 3), []
    monkeypatch.setattr(flops, "mfu", lambda *args: asked.append(args) or 0.5)
    found = {}
    for mesh, ranks in ((LOCAL, 1), (TWO, 2)):
        clocked(monkeypatch, measure)
        stage = Measured(
            stage=lambda state, batch, *, key, donate: (state, {"seen": (key, donate)}),
            role="critic",
            forward=attrs.evolve(Forward(model), mesh=mesh),
            epochs=1,
        )
        _, report = stage("state", batch, key=Key(7), donate=True)
        assert report.pop("seen") == (Key(7), True)
        found[ranks] = metrics.report(report)["perf/tflops/critic"]
        assert asked.pop() == (pytest.approx(found[ranks] * 2.0 * 1e12), 2.0, CPU)
    assert found[1] == pytest.approx(2 * found[2])


def test_gauges_are_the_largest_of_all_ranks_with_each_ones_memory(monkeypatch):
    monkeypatch.setattr(measure, "memory_metrics", lambda: {"perf/memory": 3.0})
    gathered: list[Any] = []

    def gather(own, mesh, axes, device):
        gathered.append((own, mesh, axes, device))
        return [own, {name: x + (2.0 if "memory" in name else -1.0) for name, x in own.items()}][: len(mesh.axes) + 1]

    monkeypatch.setattr(measure, "gather_objects", gather)

    def traffic():
        return {"shard": SimpleNamespace(seconds=5.0, bytes=2**31), "replicate": SimpleNamespace(seconds=7.0, bytes=0)}

    own = {"perf/memory": 3.0, "perf/comm_s/shard": 5.0, "perf/comm_s/replicate": 7.0}
    own |= {"perf/comm_gb/shard": 2.0, "perf/comm_gb/replicate": 0.0}
    assert gauges(mesh=Mesh({}), device=CPU, traffic=traffic) == own
    found = gauges(mesh=TWO, device=CPU, traffic=traffic)
    assert found == own | {"perf/memory": 5.0, "perf/memory/rank_0": 3.0, "perf/memory/rank_1": 5.0}
    assert gathered[-1] == (own, TWO, measure.AXES, CPU)


@pytest.mark.slow
@given(st.permutations(range(6)), st.integers(0, 9), st.sampled_from([False, True]))
@draws(max_examples=30)
def test_how_unequal_ranks_are_does_not_depend_on_the_order_of_rows(order, seed, share):
    """It is the most work of a rank over the mean of all, of the shares that passes take."""
    model, _ = tiny.model_and_params()
    forward = Forward(model, mesh=TWO, share_prompts=share)
    rows = tiny.experience(seed, 6)
    if share:  # pairs of rows of one prompt
        rows = batches.rows(tiny.experience(seed, 3), [0, 0, 1, 1, 2, 2])
    mixed = batches.rows(rows, order)
    found, other = (metrics.report(passes.balance_of(sorted_rows(x), forward)) for x in (rows, mixed))
    assert found == pytest.approx(other)
    if not share:
        places = passes.share_of(rows, forward).places
        lengths = masks_of(rows, forward).lengths
        work = [flops.forward_flops(model, [lengths[i] for i in own]) for own in places]
        assert found == {"perf/imbalance": pytest.approx(2 * max(work) / sum(work))}
    assert passes.balance_of(sorted_rows(rows), Forward(model)) == {}


# passes


def test_passes_read_the_parameters_the_temperature_and_the_view_that_they_are_bound_to():
    rows, seen, micro = tiny.experience(0, 3), tiny.experience(1, 3), MicroBatching(size=2)
    (model, params), (critic, of_critic) = tiny.model_and_params(), tiny.model_and_params("value")
    policy, value = ({"forward": Forward(of), "micro_batching": micro} for of in (model, critic))
    made = passes.PolicyPass(**policy, temperature=0.5, fetch=lambda own: params)({}, rows, outputs=("entropy",))
    assert torch.equal(made.log_probs, compute_log_probs(params, rows, **policy, temperature=0.5))
    assert (made.entropy is None, made.hidden is None) == (False, True)
    found = passes.ValuePass(**value, fetch=lambda own: of_critic, view=lambda own: seen)({}, rows)
    assert torch.equal(found, compute_values(of_critic, seen, **value))


def test_a_program_is_looked_at_in_the_dtype_of_its_passes_and_the_size_of_its_groups(monkeypatch):
    model, _ = tiny.model_and_params()
    asked: list[Any] = []
    monkeypatch.setattr(checks, "screened", lambda **named: asked.append(named) or {})
    monkeypatch.setattr(checks, "_check_models", lambda *parts: asked.append(parts))
    engine, other = object(), Forward(attrs.evolve(model, compute_dtype=torch.float16))
    for dtype, used in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        policy = Forward(attrs.evolve(model, compute_dtype=dtype))
        checks.check_stages(
            rollout=SimpleNamespace(engine=engine, sampling=Sampling(n=7, temperature=0.5)),
            annotate=SimpleNamespace(
                passes=SimpleNamespace(policy=SimpleNamespace(forward=policy), values=SimpleNamespace(forward=other))
            ),
            estimate=SimpleNamespace(advantage_fn=advantages.grpo),
            update_actor=SimpleNamespace(stage=SimpleNamespace(loss_fn="loss")),
        )
        (seen, named) = asked
        assert seen == (policy, other, engine)
        usage = named["usage"]
        assert (usage.group, usage.temperature, usage.dtype, usage.device) == (7, 0.5, used, torch.device("cpu"))
        assert usage.models() == [policy.model, other.model]
        assert (named["loss_fn"], named["advantage_fn"]) == ("loss", advantages.grpo)
        assert named["kernels"] == {op: getattr(policy.kernels, op) for op in checks.SCREENED}
        asked.clear()
    checks.check_stages(rollout=print, annotate=print, estimate=print, update_actor=print)
    usage = asked[1]["usage"]
    assert (usage.group, usage.temperature, usage.dtype, usage.models()) == (4, 1.0, torch.float32, [])
    assert asked[1]["kernels"] == {}


# samples and scores


class Answers:
    """An engine whose answers are made beforehand, one for each call."""

    def __init__(self, *rollouts: Rollout) -> None:
        self.left, self.asked = list(rollouts), list[Any]()

    def generate(self, params: Any, ask: Any) -> Rollout:
        self.asked.append((params, ask))
        return self.left.pop(0)


def test_a_plain_batch_is_drawn_at_its_step_and_learned_from():
    """By the step's own key, from a cursor that knows the step, for a curriculum."""
    seen: dict[str, Any] = {}
    rollout = batches.narrow(Rollout, tiny.experience(0, 4))
    scored = extend(Scored, rollout, scores=torch.ones(4), named_scores={})

    def draw(cursor):
        seen["drawn"] = cursor.course.step
        return "prompts", attrs.evolve(cursor, position=5)

    def roll_out(prompts, params, *, key, version):
        seen["rolled out"] = prompts, params, key, version
        return rollout, {"own/rollout": metrics.mean(1.0)}

    def score(rows, *, params, prompts):
        seen["scored"] = rows is rollout, params, prompts
        return scored, {"own/score": metrics.mean(2.0)}

    def learn(cursor, rows):
        seen["learned"] = cursor.position, rows is scored
        return attrs.evolve(cursor, epoch=3), {"own/learned": metrics.mean(3.0)}

    run = run_of(step=6, cursor=DataCursor(course=Course(known=0)))
    found, cursor, report = SampleBatch(learn)(run, draw=draw, rollout=roll_out, score=score)
    params = run.actor.params
    key = run.key.fold("step", 6).fold("rollout")
    assert seen == {
        "drawn": 6,
        "rolled out": ("prompts", params, key, run.actor.step),
        "scored": (True, params, "prompts"),
        "learned": (5, True),
    }
    assert found is scored
    assert (cursor.epoch, cursor.position) == (3, 5)
    names = {"own/rollout", "own/score", "own/learned", "timing_s/gen", "timing_s/reward"}
    assert report.keys() == names


def test_rows_that_finish_are_told_to_the_function_for_their_prompts():
    rollout, made = batches.narrow(Rollout, tiny.experience(0, 2)), []
    engine: Any = Answers(rollout)

    def make(prompts, n):
        made.append((prompts, n))
        return "on finished"

    stage = stages.RollOut(engine=engine, sampling=Sampling(n=3), make_on_finished=make)
    stage("prompts", "params", key=Key(0), version=0)
    assert made == [("prompts", 3)]
    ((params, ask),) = engine.asked
    assert (params, ask.on_finished) == ("params", "on finished")


def test_a_greedy_response_of_several_rows_is_scored_as_one():
    """Its episode: the second prompt's has two rows."""
    greedy = batches.narrow(Rollout, tiny.experience(1, 3))
    greedy = attrs.evolve(greedy, episodes=torch.tensor([0, 1, 1]), observed=batches.Column([[], [], []]))
    rollout, seen = batches.narrow(Rollout, tiny.experience(0, 4)), []

    def score(rows):
        seen.append(len(rows.row_ids))
        return extend(Scored, rows, scores=torch.arange(len(rows.row_ids)).float(), named_scores={}), {}

    engine: Any = Answers(greedy)
    stage = stages.ScoreWithGreedy(score=score, engine=engine, sampling=Sampling(n=1, greedy=True))
    prompts: Any = SimpleNamespace(tokens=torch.zeros(2, 1))
    scored, _ = stage(rollout, params="params", prompts=prompts)
    assert seen == [4, 2]
    assert scored.baselines.tolist() == [0.0, 0.0, 1.0, 1.0]
    ((params, ask),) = engine.asked
    assert (params, ask.prompts is prompts, ask.sampling.greedy) == ("params", True, True)


# digests


def test_digests_of_steps_have_the_ranks_the_shapes_and_the_kind_of_their_lines(monkeypatch):
    asked: list[Any] = []

    def digests_of(run, experience, mesh, **named):
        asked.append((run.step, experience, mesh, named))
        return {"batch": {}, "result": {".x": "1"}}

    monkeypatch.setattr(REPLAY, "digests_of", digests_of)
    of_state = lambda run, kind: {}  # noqa: E731
    how: dict[str, Any] = {"shapes": {".w": "shape"}, "device": CPU, "of_state": of_state}
    record = StepRecord(run=run_of(4), experience="batch", metrics={})
    record_line(record, TWO, kind="sums", **how)
    assert asked.pop() == (4, "batch", TWO, {**how, "kind": "sums"})

    def begin(run):
        for step in (5, 6):
            yield run_of(step), f"batch {step}", {}

    lines = {step: {"batch": {}, "result": {".x": "1"}} | more for step, more in ((5, {"kind": "sums"}), (6, {}))}
    found = list(replay(run_of(4), begin=begin, recorded=lines, until=6, mesh=TWO, **how))
    assert [difference for _, difference in found] == [None, None]
    assert asked == [(5, "batch 5", TWO, {**how, "kind": "sums"}), (6, "batch 6", TWO, {**how, "kind": "blake2b"})]


# the critic beside the truth


def test_the_truth_of_several_batches_is_that_of_all_their_tokens():
    """Each batch sampled by a key of its own, of another width; the first is shown."""
    counts, widths, shown = (9, 3, 2), (6, 4, 5), []
    rollouts = [
        batches.narrow(Rollout, tiny.experience(i, count, response=width))
        for i, (count, width) in enumerate(zip(counts, widths, strict=True))
    ]
    engine: Any = Answers(*rollouts)
    prompts = [batches.narrow(Prompts, x) for x in rollouts]
    run = run_of(critic=TrainState(params={"critic": torch.ones(1)}, opt=None, step=0))

    def numbers(rows, seed):
        g = torch.Generator().manual_seed(10 * len(rows.row_ids) + seed)
        return torch.randn(rows.response_mask.shape, generator=g, dtype=torch.float64)

    def exact(asked, rollout, of_policy):
        assert any(asked is x for x in prompts)
        assert of_policy(rollout).log_probs.shape == rollout.response_mask.shape
        yield Truth(rollout, None, numbers(rollout, 1))  # of rows of others: no advantages
        yield Truth(rollout, None, numbers(rollout, 2), numbers(rollout, 3), numbers(rollout, 4))

    def estimate(rewards, values, mask):
        return advantages.Advantages(rewards - 2 * values, rewards)

    def policy(params, rows, *, outputs):
        assert (params, outputs) == (run.actor.params, ("log_probs",))
        return TokenOutputs(log_probs=numbers(rows, 5))

    def values(params, rows):
        assert params is run.critic.params
        return numbers(rows, 6)

    of: Any = passes.Passes(policy=policy, reference=policy, values=values)
    sampling = Sampling(n=1)
    known = Known(exact=exact, estimate=estimate)
    report = critic_truth(
        run, prompts=prompts, known=known, engine=engine, sampling=sampling, passes=of, keep=shown.append
    )
    assert [ask.key for _, ask in engine.asked] == [run.key.fold("truth", i) for i in range(3)]
    assert all(ask.sampling is sampling and ask.version == run.actor.step for _, ask in engine.asked)
    flat = {
        seed: torch.cat([numbers(x, seed)[x.response_mask] for x in rollouts]) for seed in (1, 2, 3, 4, 6)
    }  # the exact values of both, rewards, advantages, and the critic's values
    true, guess = torch.cat([flat[1], flat[2]]), torch.cat([flat[6], flat[6]])
    error, variance = (true - guess).square().mean().item(), true.var(unbiased=False).item()
    found, real = flat[3] - 2 * flat[6], flat[4]
    clear = real.abs() >= 1e-3
    assert metrics.report(report) == pytest.approx(
        {
            "critic/true/mse": error,
            "critic/true/variance": variance,
            "critic/true/r2": 1 - error / variance,
            "critic/true/cosine": torch.cosine_similarity(real, found, dim=0).item(),
            "critic/true/sign": ((real * found) > 0)[clear].double().mean().item(),
        }
    )
    (beside,) = shown
    first = rollouts[0]
    expected = (first.tokens, *(numbers(first, i) for i in (6, 2)), numbers(first, 3) - 2 * numbers(first, 6))
    for found, whole in zip(
        (beside.rollout.tokens, *beside[1:4], beside[4]), (*expected, numbers(first, 4)), strict=True
    ):
        assert torch.equal(found, whole[:KEPT])


TOKENS = st.lists(st.integers(0, 1), max_size=3)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5), st.integers(0, 2), st.integers(0, 2))
@draws(max_examples=80)
def test_a_response_is_rewarded_at_its_last_token_where_it_is_the_answer(pairs, more, most):
    """Whatever stands in columns that are no row's tokens, and however wide both are."""

    def padded(rows, extra):
        width = max(map(len, rows)) + extra
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64)
        return tokens.view(len(rows), width), torch.arange(width) < torch.tensor([len(x) for x in rows])[:, None]

    answers, said = zip(*pairs, strict=True)
    found = _rewards(*padded(answers, more), *padded(said, most))
    for row, (answer, own) in enumerate(pairs):
        expected = [0.0] * found.shape[1]
        if own and own == answer:
            expected[len(own) - 1] = 1.0
        assert found[row].tolist() == expected
