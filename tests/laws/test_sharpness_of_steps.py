"""Laws of steps in expectation, curricula, schedules, screening and fixed points see what is off by little."""

import math
from functools import partial

import attrs
import pytest
import torch

from fppo import advantages, data, laws, losses
from fppo.laws import KL, expectation, fixed_points, screening, transforms, update_gradient
from fppo.laws.expectation import StepMath, compared
from fppo.laws.worlds import OUTSIDE, all_batches
from fppo.runtime.schedule import Action, Schedule
from fppo_kernels.glu.eager import eager as glu
from fppo_kernels.operation import operation_of
from tests.laws.test_sharpness import LITTLE, reason

WORLD = laws.world(vocabulary=2, horizon=2, gap=True, prompts=2, lag=0.4, critic_error=0.3, seed=3)
BATCHES = all_batches(WORLD, 2)


def annotated(**how):
    math_ = StepMath(estimator=advantages.rloo, **how)
    return expectation._annotated(math_, WORLD, BATCHES, torch.arange(len(BATCHES.numbers)))


@pytest.mark.parametrize("source", ["pass", "engine"])
@pytest.mark.parametrize("kl", [None, KL("k1", 0.7), KL("k2", 0.7, where="loss")])
def test_rows_of_a_world_have_its_columns_and_nothing_outside_the_mask(source, kl):
    """Values are those less the KL estimate where that is in the rewards."""
    rows, p, s = annotated(old_log_probs=source, kl=kl), BATCHES.prompts, BATCHES.responses
    mask = WORLD.mask[s]
    policy, ref, sampled = (
        WORLD.log_probs(x)[p, s].where(mask, OUTSIDE) for x in (WORLD.logits, WORLD.ref_logits, WORLD.sampler_logits)
    )
    coef = 0.7 if kl is not None and kl.where == "reward" else 0.0
    expected = {
        "response_mask": mask,
        "rollout_log_probs": sampled,
        "sampling_log_probs": sampled,
        "old_log_probs": policy if source == "pass" else sampled,
        "ref_log_probs": ref,
        "teacher_log_probs": ref,
        "values": WORLD.values(coef)[p, s].where(mask, OUTSIDE),
        "sum_squared_probs": WORLD.squares()[p, s].where(mask, OUTSIDE),
        "baselines": WORLD.baselines()[p],
        "scores": WORLD.scores[p, s],
    }
    for name, wanted in expected.items():
        assert torch.equal(getattr(rows, name), wanted), name
    assert torch.equal(rows.named_scores["score"], rows.scores)
    assert not torch.equal(WORLD.values(0.7), WORLD.values())
    pairs = set(zip(BATCHES.numbers.tolist(), p.tolist(), rows.groups.tolist(), strict=True))
    assert len(pairs) == len({*rows.groups.tolist()}) == BATCHES.count * 2
    assert torch.equal(rows.tokens[:, 1:], WORLD.tokens[s])
    last = [max(t for t, kept in enumerate(row) if kept) + 1 for row in mask.tolist()]
    assert rows.attention_mask.sum(1).tolist() == [n + 1 for n in last]
    assert not (rows.attention_mask[:, 1:] & ~rows.attention_mask[:, :-1]).any()
    assert (rows.attention_mask[:, 1:] | ~mask).all()
    assert rows.row_ids.tolist() == list(range(len(mask)))


def scaled(factor, when=lambda scores: True):
    def estimator(scores, mask, groups):
        result = advantages.rloo(scores, mask, groups)
        return result._replace(advantages=factor * result.advantages)

    return estimator


@pytest.mark.parametrize(
    ("factor", "exact", "up_to_scale"),
    [(1.0, True, True), (1 + 1e-6, False, True), (0.5, False, True), (-1.0, False, False), (0.0, False, False)],
)
def test_a_mean_gradient_is_the_objective_s_or_a_positive_multiple(factor, exact, up_to_scale):
    worlds = [laws.world(vocabulary=2, horizon=2)]
    for up_to, holds in (("nothing", exact), ("scale", up_to_scale)):
        check = partial(laws.check_gradient, scaled(factor), up_to=up_to, worlds=worlds)
        if holds:
            check()
        else:
            with pytest.raises(laws.LawViolation) as caught:
                check()
            assert ('give up_to="scale"' in str(caught.value)) == (up_to == "nothing")


def test_a_gradient_of_0_has_a_mean_of_0_whatever_the_scale():
    world = laws.world(vocabulary=2, horizon=1)
    still = attrs.evolve(world, scores=torch.ones_like(world.scores))
    laws.check_gradient(advantages.rloo, worlds=[still], up_to="scale")
    noisy = lambda rewards, mask: rewards + torch.linspace(0, 1, len(rewards))[:, None] * mask  # noqa: E731
    with pytest.raises(laws.LawViolation):
        laws.check_gradient(noisy, worlds=[still], up_to="scale")


@pytest.mark.parametrize("how", [{}, {"old_log_probs": "engine"}, {"correct": losses.rollout_correction}])
def test_the_worlds_of_a_law_lag_where_the_sampling_policy_counts(how, monkeypatch):
    seen = []
    monkeypatch.setattr(expectation, "_breach", lambda math, world, up_to: seen.append(world) and None)
    laws.check_gradient(advantages.rloo, **how)
    assert len(seen) == 5
    for world in seen:
        assert torch.equal(world.sampler_logits, world.logits) == (not how)
        assert not world.value_errors.any()
    assert seen[-1].made.endswith("lag=0.5, gap=True)" if how else "gap=True)")


def test_a_bias_is_given_what_it_was_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(expectation, "step_bias", lambda math, world: seen.append((math, world)))
    how = {
        "loss_fn": losses.gspo,
        "mode": "token-mean",
        "n": 3,
        "kl": KL("k2"),
        "correct": losses.rollout_correction,
        "old_log_probs": "engine",
        "whiten": True,
    }
    laws.bias(advantages.grpo, world=WORLD, **how)
    assert seen == [(StepMath(estimator=advantages.grpo, **how), WORLD)]


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_of_a_batch_are_whitened_where_asked(whiten):
    world = laws.world(vocabulary=2, horizon=2, seed=1)
    batches = all_batches(world, 2)
    made = expectation._experience(StepMath(estimator=advantages.rloo, whiten=whiten), world, batches)
    plain = expectation._experience(StepMath(estimator=advantages.rloo), world, batches)
    for number in range(batches.count):
        own = batches.numbers == number
        x, mask = plain.advantages[own], plain.response_mask[own]
        expected = advantages.whiten(x, mask) if whiten else x
        torch.testing.assert_close(made.advantages[own].where(mask, 0.0), expected.where(mask, 0.0))


@pytest.mark.parametrize("part", ["advantages", "response_mask", "correction_weights"])
def test_an_estimate_that_depends_on_other_batches_is_made_batch_by_batch(part, monkeypatch):
    sizes, own = [], expectation._estimated

    def estimated(math, world, batches, index):
        sizes.append(len(index))
        rows = own(math, world, batches, index)
        if len(index) < len(batches.numbers):
            return rows
        x = getattr(rows, part)
        wrong = {"advantages": lambda: x + LITTLE, "response_mask": lambda: ~x, "correction_weights": lambda: None}[
            part
        ]()
        return attrs.evolve(rows, **{part: wrong})

    monkeypatch.setattr(expectation, "_estimated", estimated)
    world = laws.world(vocabulary=2, horizon=2, lag=0.3)
    batches = all_batches(world, 2)
    step = StepMath(estimator=advantages.rloo, correct=partial(losses.rollout_correction, level="token", threshold=2.0))
    made = expectation._experience(step, world, batches)
    assert sizes.count(2) > batches.count
    monkeypatch.undo()
    direct = expectation._experience(step, world, batches)
    for name in ("advantages", "response_mask", "correction_weights"):
        torch.testing.assert_close(getattr(made, name), getattr(direct, name))


def test_parts_along_and_across_a_gradient_have_their_signs():
    g = torch.tensor([0.0, 2.0]).double()
    found = compared(torch.tensor([1.0, -1.0]).double(), g, 0.5)
    assert (found.scale, found.turned) == (pytest.approx(-0.5), pytest.approx(1.0))
    assert found.cosine == pytest.approx(-math.sqrt(0.5))
    assert found.error == pytest.approx(math.sqrt(10) / 2)
    assert found.noise == pytest.approx(0.5 / math.sqrt(2))


PLAIN = data.learnability()


def with_update(update):
    return PLAIN._replace(update=update)


def turned(known, indices, scores):
    """Counts that depend a little on the order of responses."""
    from fppo.tree import replace

    made = PLAIN.update(known, indices, scores)
    ahead = float(scores.nan_to_num()[:1].sum()) if len(scores) else 0.0
    return replace(made, successes=made.successes * (1 + LITTLE * ahead))


def nan_where_nothing(when):
    def update(known, indices, scores):
        from fppo.tree import replace

        made = PLAIN.update(known, indices, scores)
        return replace(made, successes=made.successes * torch.nan) if when(scores) else made

    return update


@pytest.mark.parametrize(
    ("update", "law"),
    [
        (turned, "order"),
        (nan_where_nothing(lambda scores: len(scores) == 0), "indices"),
        (nan_where_nothing(lambda scores: len(scores) > 0 and bool(scores.isnan().all())), "indices"),
    ],
)
def test_curricula_that_do_not_stand_nothing_or_missing_scores_are_seen(update, law):
    with pytest.raises(laws.LawViolation) as caught:
        laws.check_curriculum(with_update(update))
    assert caught.value.law in (law, "order")
    if law == "indices":
        assert caught.value.law == "indices" or "order" in str(caught.value)


def test_a_curriculum_learns_from_batches_of_which_some_scores_are_missing():
    met = set()

    def update(known, indices, scores):
        met.add((bool(scores.isnan().any()), bool((scores == 0).any()), bool((scores == 1).any())))
        return PLAIN.update(known, indices, scores)

    laws.check_curriculum(with_update(update))
    assert met >= {(True, True, True), (True, False, False), (False, False, False)}


def test_a_curriculum_is_called_with_its_size_its_steps_and_keys_of_their_own():
    from fppo.laws import curricula

    calls = []

    def choose(known, key, step, size):
        calls.append((step, size, key))
        return PLAIN.choose(known, key, step, size)

    laws.check_curriculum(PLAIN._replace(choose=choose), size=3)
    assert {size for _, size, _ in calls} == {3}
    assert {step for step, *_ in calls} == set(range(7))
    assert len({key for *_, key in calls}) > 20
    a, b = {"x": torch.tensor([1.0]), "n": 1}, {"x": torch.tensor([1.0 + 1e-6]), "n": 1}
    near = curricula._near
    assert near(a, {"x": torch.tensor([1.0]), "n": 1})
    for other in (
        b,
        a | {"n": 2},
        a | {"m": 1},
        {"n": 1},
        a | {"x": torch.tensor([1.0]).double()},
        a | {"x": torch.ones(1, 1)},
    ):
        assert not near(a, other)
    assert near({"x": torch.tensor([torch.nan, 1.0])}, {"x": torch.tensor([torch.nan, 1.0 + 1e-9])})
    assert not near({"x": torch.tensor([1])}, {"x": torch.tensor([2])})


def forward(stage, micro):
    return Action("forward", stage, micro)


def test_a_schedule_is_checked_action_by_action():
    good = Schedule(((forward(0, 0), forward(0, 1)), (forward(1, 0), forward(1, 1))))
    laws.check_schedule(good)
    for change, law in (
        (((forward(0, 0), forward(0, 1)), (forward(1, 0), forward(1, 1), forward(0, 0))), "stages"),
        (((forward(0, 0), forward(0, -1)), (forward(1, 0), forward(1, 1))), "stages"),
        (((forward(0, 0), forward(0, 1)), (forward(1, 0),)), "once"),
        (((forward(0, 0), forward(0, 1)), (forward(1, 0), forward(1, 1), forward(1, 1))), "once"),
        (((forward(0, 0), forward(0, 1), Action("backward", 0, 0)), (forward(1, 0), forward(1, 1))), "once"),
    ):
        with pytest.raises(laws.LawViolation) as caught:
            laws.check_schedule(Schedule(change))
        assert caught.value.law == law


def test_a_backward_pass_takes_the_time_that_is_given():
    from fppo.runtime.schedule import one_f_one_b

    assert laws.check_schedule(one_f_one_b(2, 3), backward=3.0).time == 4 * (3 + 1)


def estimated(change):
    def estimator(rows, rewards):
        result = advantages.grpo(rows.scores, rows.response_mask, rows.groups)
        return advantages.Advantages(change(result.advantages, rows.response_mask), result.returns)

    return estimator


def test_a_screened_estimator_may_hold_anything_outside_the_mask_and_nothing_but_numbers_inside():
    laws.screen_estimator(estimated(lambda x, m: x.where(m, torch.nan)))
    for bad in (lambda x, m: x.where(~m, torch.inf), lambda x, m: x.long(), lambda x, m: x[:, :1], lambda x, m: None):
        with pytest.raises(laws.LawViolation, match=r"advantages|it returned"):
            laws.screen_estimator(estimated(bad))

    def returns(rows, rewards):
        result = advantages.grpo(rows.scores, rows.response_mask, rows.groups)
        return advantages.Advantages(result.advantages, result.returns * torch.nan)

    with pytest.raises(laws.LawViolation, match="returns are not finite in row 0"):
        laws.screen_estimator(returns)


def test_screened_rows_have_groups_of_equal_different_and_single_scores():
    example = screening._estimator_example(4, 1, 3, 0)
    x = example.inputs
    assert x["scores"].tolist() == [1.0] * 4 + [0.0, 1.0, 2.0, 3.0] + [1.0, 0.0, 0.0, 0.0]
    assert x["groups"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert torch.equal(x["rewards"].sum(1), x["scores"])
    last = x["mask"].sum(1) - 1
    assert torch.equal(x["rewards"][torch.arange(12), last], x["scores"])
    assert (x["log_probs"][x["mask"]] < 0).all()
    assert not x["log_probs"][~x["mask"]].any()
    assert {*x["mask"].sum(1).tolist()} == {1, 2, 3}
    rows = screening._rows(example, ("a", "b"))
    assert [*rows.named_scores] == ["a", "b"]
    assert torch.equal(screening._rows(example, ()).named_scores["any"], x["scores"])


@pytest.mark.parametrize(("factor", "seen"), [(0.3, False), (5.0, False), (30.0, True)])
@pytest.mark.parametrize("part", ["result", "gate", "up"])
def test_a_screened_kernel_is_within_ten_tolerances(part, factor, seen):
    op = operation_of("glu")
    law = partial(screening._near, op)
    from fppo.laws._kernels import example_of

    example = example_of(op, (0,), (torch.float32,), "cpu", None, 4, 3, 0)
    example = example._replace(weights=torch.full((4, 3), 1 / 12))
    from fppo.laws import kernels

    values, grads = kernels.results(op, glu_of, example), kernels.gradients(op, glu_of, example)
    largest = max(1.0, float((values | grads)[part].abs().max()))

    def kernel(gate, up, *, activation):
        out = glu(gate, up, activation=activation)
        if part == "result":
            return out + factor * 1e-4 * largest
        x = {"gate": gate, "up": up}[part]
        return out + factor * 1e-4 * largest * (x - x.detach()).sum()

    assert (law(kernel, example, torch.Generator()) is not None) == seen
    assert reason(screening.Law("", "", law), glu_of, example) is None


def glu_of(gate, up, *, activation):
    return glu(gate, up, activation=activation)


def test_what_a_loss_is_screened_by_and_on(monkeypatch):
    seen = []
    monkeypatch.setattr(screening, "check", lambda fn, found, example, **how: seen.append((found, example, how)))
    laws.screen_policy_loss(losses.ppo_clip)
    laws.screen_policy_loss(losses.kl_cov, selective=True)
    for (found, example, how), selective in zip(seen, (False, True), strict=True):
        assert [law.name for law in found] == ["per token", "gradient", "empty mask", "masked garbage"]
        assert how["sizes"] == ((1, 2), (2, 2), (4, 5))
        assert how["seeds"] == 3
        drawn = example(4, 5, 0)
        assert drawn.weights.dtype == torch.float32
        assert [*drawn.extras] == (["selected"] if selective else [])
        if selective:
            assert torch.equal(drawn.extras["selected"], drawn.mask & (drawn.inputs["advantages"] > 0.5))


def test_kernels_are_screened_in_each_size_of_their_record_that_they_support():
    seen = []
    op = attrs.evolve(operation_of("glu"), screened=((4, 8, 0), (3, 8, 1)))

    def kernel(gate, up, *, activation):
        seen.append((tuple(gate.shape), activation, gate.dtype))
        return glu(gate, up, activation=activation)

    laws.screen_kernel(op, kernel, dtype=torch.bfloat16)
    assert len({shape for shape, *_ in seen}) == 2
    assert {dtype for *_, dtype in seen} == {torch.bfloat16}


GLU = operation_of("glu")


def drawn_glu():
    from fppo.laws._kernels import example_of

    return example_of(GLU, (0,), (torch.float64,), "cpu", None, 2, 2, 0)


class _Off(torch.autograd.Function):
    """The identity, whose tangent, gradient or gradient's gradient is off by little."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, of):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.of = inputs[1]

    @staticmethod
    def backward(ctx, *grads):
        return (grads[0] * (1 + LITTLE) if ctx.of == "gradient" else grads[0]), None

    @staticmethod
    def jvp(ctx, *tangents):
        return tangents[0] * (1 + 1e-4 * (ctx.of == "tangent"))


@pytest.mark.parametrize(("name", "of"), [("jvp", "tangent"), ("hessian", "tangent")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_tangent_of_each_argument_is_seen(name, of, place):
    def kernel(*inputs, activation):
        inputs = [_Off.apply(x, of) if i == place else x for i, x in enumerate(inputs)]
        return glu(*inputs, activation=activation)

    law = transforms._LAWS[name]
    assert law.breach(GLU, glu_of, drawn_glu(), torch.Generator().manual_seed(0)) is None
    assert law.breach(GLU, kernel, drawn_glu(), torch.Generator().manual_seed(0)) is not None


class _Mapped(torch.autograd.Function):
    """The identity, whose values or gradients are off in a map."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x, of):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.of = inputs[1]

    @staticmethod
    def backward(ctx, *grads):
        return _Mapped.apply(grads[0], "gradient") if ctx.of == "gradient" else grads[0], None

    @staticmethod
    def vmap(info, in_dims, x, of):
        return x * (1 + LITTLE), in_dims[0]


@pytest.mark.parametrize("place", [0, 1])
def test_a_map_over_each_argument_is_seen(place):
    def kernel(*inputs, activation):
        inputs = [_Mapped.apply(x, "value") if i == place else x for i, x in enumerate(inputs)]
        return glu(*inputs, activation=activation)

    law = transforms._LAWS["vmap"]
    assert law.breach(GLU, glu_of, drawn_glu(), torch.Generator().manual_seed(0)) is None
    assert law.breach(GLU, kernel, drawn_glu(), torch.Generator().manual_seed(0)) is not None


def test_differences_are_of_every_tangent_where_numbers_are_small():
    x = torch.tensor([0.3, -1.2]).double()
    cube, along = lambda y: y**3, torch.tensor([1.0, -2.0]).double()
    tangent = 3 * x**2 * along
    differ = partial(transforms._difference, "it")
    assert differ(cube, (x,), (along,), (tangent,)) is None
    assert differ(cube, (x,), (along,), (tangent * (1 + 1e-4),)) is not None
    assert differ(cube, (x,), (along,), (-tangent,)) is not None
    two = lambda y: (y**3, y)  # noqa: E731
    assert differ(two, (x,), (along,), (tangent, along)) is None
    assert differ(two, (x,), (along,), (tangent, 2 * along)) is not None
    assert differ(cube, (x.float(),), (along.float(),), (-tangent.float(),)) is None
    assert differ(cube, (100 * x,), (along,), (-tangent,)) is None


def test_transforms_that_an_operation_has_are_tried_and_others_are_not(monkeypatch):
    seen = []
    monkeypatch.setattr(
        transforms, "check", lambda kernel, found, example, **how: seen.append(([x.name for x in found], how))
    )
    assert laws.check_func("glu", glu_of, transforms=("grad", "jvp"))
    assert laws.check_func("glu", glu_of, lacks=["gelu"], dtypes=(torch.float64, torch.float32))
    only = attrs.evolve(GLU, transforms=("vmap",))
    assert laws.check_func(only, glu_of)
    assert not laws.check_func(only, glu_of, transforms=("grad",))
    assert not laws.check_func(attrs.evolve(GLU, needed=frozenset({"x"})), glu_of, lacks=["x"])
    assert [names for names, _ in seen] == [["grad", "jvp"], ["grad", "vmap", "jvp", "hessian"], ["vmap"]]
    assert seen[1][1] == {"sizes": GLU.sizes[:5:2], "seeds": (len(GLU.features) - 1) * 2}


def test_a_fixed_point_is_found_for_a_loss_that_moves_slowly():
    """One that is clipped near the old value takes many rounds."""
    head = losses.mse_head(clip=0.5)
    assert laws.fixed_point(head, (4.0, 9.0), (0.25, 0.75)) == pytest.approx(7.75, abs=1e-5)
    with pytest.raises(ValueError, match="1 in all"):
        laws.fixed_point(head, (0.0, 1.0), (1.5, -0.5))
    with pytest.raises(ValueError, match="give one for each of the 3 returns"):
        laws.fixed_point(head, (0.0, 1.0, 2.0), (0.5, 0.5))


@pytest.mark.parametrize(("off", "seen"), [(0.0, False), (9e-4, False), (2e-3, True), (-2e-3, True), (math.nan, True)])
@pytest.mark.parametrize("at", range(3))
def test_a_fixed_point_is_the_mean_of_each_sample_to_its_tolerance(off, seen, at, monkeypatch):
    def found(head, returns, chances):
        mean = sum(x * p for x, p in zip(returns, chances, strict=True))
        return mean + (off if (returns, chances) == fixed_points.SAMPLES[at] else 0.0)

    monkeypatch.setattr(fixed_points, "fixed_point", found)
    if not seen:
        laws.check_fixed_point(losses.mse_head())
        return
    with pytest.raises(laws.LawViolation, match="not ") as caught:
        laws.check_fixed_point(losses.mse_head())
    assert caught.value.example["returns"].tolist() == pytest.approx(list(fixed_points.SAMPLES[at][0]))
    laws.check_fixed_point(losses.mse_head(), tolerance=0.1) if not math.isnan(off) else None


def test_samples_of_fixed_points_are_skewed_distributions():
    for returns, chances in fixed_points.SAMPLES:
        assert sum(chances) == pytest.approx(1.0)
        assert 0 <= min(returns) < max(returns) <= 1
        assert sum(x * p for x, p in zip(returns, chances, strict=True)) not in returns


def test_responses_of_the_gradient_law_are_all_that_end_or_are_long_enough():
    assert [*update_gradient.RESPONSES] == [(1,), *((a, b) for a in (0, 2, 3) for b in range(4))]
    scores = update_gradient._scores()
    assert scores.shape == (2, 13)
    assert len({*scores.flatten().tolist()}) == 26
    assert {cut for cut, _ in update_gradient.CUTS} == {True, False}
    assert {size for _, size in update_gradient.CUTS} == {3, 26}


def test_the_worst_number_of_a_gradient_is_shown_beyond_a_millionth():
    wanted = torch.tensor([[0.5, 2.0], [0.0, -3.0]]).double()
    assert update_gradient._worst(wanted + 1e-6, wanted) is None
    for more in (1e-5, -1e-5, math.nan, math.inf):
        found = wanted.clone()
        found[1, 0] += more
        found[0, 0] += 1e-6
        place = update_gradient._worst(found, wanted)
        assert place is not None
        assert place[0] == [1, 0]
        assert place[2] == 0.0


def test_the_objective_is_the_expected_score_less_the_divergence_where_the_policy_goes():
    generator = torch.Generator().manual_seed(0)
    every = update_gradient.RESPONSES
    shape = (2, len(every), 2, 4)
    prefixes = {(): 0, (0,): 1, (2,): 2, (3,): 3}
    tables = torch.randn(2, 2, 4, 4, generator=generator).double().log_softmax(-1)

    def placed(table):
        out = torch.zeros(shape).double()
        for p in range(2):
            for s, y in enumerate(every):
                for t in range(len(y)):
                    out[p, s, t] = table[p, prefixes[y[:t]]]
        return out

    own, ref = placed(tables[0]), placed(tables[1])
    objective, chances = update_gradient._objective(own, ref, 0.3)
    scores, total = update_gradient._scores(), 0.0
    for p in range(2):
        for s, y in enumerate(every):
            chance = math.exp(sum(float(own[p, s, t, y[t]]) for t in range(len(y))))
            assert float(chances[p, s]) == pytest.approx(chance)
            total += chance * float(scores[p, s])
            for t in range(len(y)):
                total -= 0.3 * chance * float((own[p, s, t].exp() * (own[p, s, t] - ref[p, s, t])).sum())
    assert float(objective) == pytest.approx(total)
    batch = update_gradient._batch(own, ref, chances)
    for row in range(26):
        prompt, y = update_gradient.PROMPTS[row // 13], every[row % 13]
        seen = batch.tokens[row][batch.attention_mask[row]].tolist()
        assert seen == [*prompt, *y]
        assert batch.response_mask[row].sum() == len(y)
        p, s = row // 13, row % 13
        assert batch.old_log_probs[row, : len(y)].tolist() == pytest.approx(
            [float(own[p, s, t, y[t]]) for t in range(len(y))]
        )
        assert batch.ref_log_probs[row, : len(y)].tolist() == pytest.approx(
            [float(ref[p, s, t, y[t]]) for t in range(len(y))]
        )
        inside = batch.response_mask[row]
        assert {*batch.advantages[row][inside].tolist()} == {float(scores[p, s])}
        assert {*batch.correction_weights[row][inside].tolist()} == {float(chances[p, s])}
        assert not batch.advantages[row][~inside].any()
    assert torch.equal(batch.scores, scores.flatten())
