"""The laws of the updates: gradient, state and metrics do not depend on how the batch is cut, ordered or padded."""

from functools import partial

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.key import Key
from fppo.steps.actor import PolicyTerms, SelectiveLoss, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from fppo_kernels.table import Kernels, needs_cpp
from tests import tiny

POLICY_LOSSES = {
    "ppo_clip": losses.ppo_clip,
    "gspo": partial(losses.gspo, clip_low=0.1, clip_high=0.2),
    "sapo": losses.sapo,
    "gpg": losses.gpg,
    "cispo": losses.cispo,
    "gmpo": losses.gmpo,
    "clip_cov": SelectiveLoss(losses.clip_cov, partial(losses.select_clip_cov, ratio=0.2, low=0.0, high=50.0)),
    "kl_cov": SelectiveLoss(losses.kl_cov, partial(losses.select_kl_cov, ratio=0.2)),
    "m2po": SelectiveLoss(losses.m2po, losses.select_m2po),
    "dppo_tv": losses.dppo_tv,
    "dppo_kl": losses.dppo_kl,
    "dro": losses.dro,
    "vespo": losses.vespo,
    "dcpo": losses.dcpo,
    "ce_gppo": losses.ce_gppo,
    "aspo": losses.aspo,
    "drpo": losses.drpo,
    "opsm": partial(losses.opsm, max_kl=1e-3),
    "topr": losses.topr,
}
CUTS = (
    MicroBatching(size=1),
    MicroBatching(size=3),
    MicroBatching(token_budget=1),
    MicroBatching(token_budget=17),
)
WHOLE = MicroBatching(size=1000)
OPTIMIZER = adamw(schedule("constant", 1e-3), max_grad_norm=None)
ACTOR, ACTOR_PARAMS = tiny.model_and_params("lm", layers=1)
CRITIC, CRITIC_PARAMS = tiny.model_and_params("value", seed=1, layers=1)
TERMS = PolicyTerms(entropy_coef=0.01, entropy_quantiles=True, kl_coef=0.1)
LOOP = {"mini_batch_size", "micro_batching", "epochs"}  # keywords of `_actor` and `_critic` that are the loop's


def _arguments(model, rows, mode, changes):
    horizon = 9 if mode == "seq-mean-token-sum-norm" else None
    sizes = {"mini_batch_size": rows, "micro_batching": WHOLE} | {k: x for k, x in changes.items() if k in LOOP}
    rest = {k: x for k, x in changes.items() if k not in {*LOOP, "remove_padding"}}
    return {
        "forward": Forward(model, remove_padding=changes.get("remove_padding", True)),
        "loop": Loop(**sizes, weight_mode=mode, horizon=horizon),
        "optimizer": OPTIMIZER,
        **rest,
    }


def _actor(batch, name, mode, key=None, policy=(ACTOR, ACTOR_PARAMS), **changes):
    arguments = {
        "loss_fn": POLICY_LOSSES[name],
        "terms": TERMS,
        **_arguments(policy[0], batches.num_rows(batch), mode, changes),
    }
    return UpdateActor(**arguments)(init_state(policy[1], OPTIMIZER), batch, key=key)


def _critic(batch, mode, **changes):
    arguments = _arguments(CRITIC, batches.num_rows(batch), mode, changes)
    return UpdateCritic(**arguments)(init_state(CRITIC_PARAMS, OPTIMIZER), batch)


def _assert_same(got, expected):
    """Equal gradients (a tenth of them is the first moment after one step) and equal metrics, to 1e-10."""
    (state, report), (state_, report_) = got, expected
    for (path, a), (_, b) in zip(
        tree.leaves_with_paths(state.opt.mu), tree.leaves_with_paths(state_.opt.mu), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9, msg=lambda m, path=path: f"gradient of {path}: {m}")
    numbers, numbers_ = metrics.report(report), metrics.report(report_)
    assert numbers.keys() == numbers_.keys()
    for name, number in numbers.items():
        assert number == pytest.approx(numbers_[name], abs=1e-10, rel=1e-8, nan_ok=True), name


def _variants(run, batch, seed):
    """The same update with rows in another order and more padding, cut as the seed says and packed, and not packed."""
    order = torch.randperm(batches.num_rows(batch), generator=torch.Generator().manual_seed(seed))
    changed = tiny.widened(batches.rows(batch, order), 2, 3)
    yield run(changed, micro_batching=CUTS[seed % len(CUTS)])
    yield run(changed, remove_padding=False)


MODES = st.sampled_from(losses.MODES)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=8)
@given(mode=MODES, rows=st.integers(1, 7), seed=st.integers(0, 10_000))
def test_the_actors_update_is_one_function_of_the_batch(name, mode, rows, seed):
    batch = tiny.experience(seed, rows)
    run = partial(_actor, name=name, mode=mode)
    expected = run(batch)
    for got in _variants(run, batch, seed):
        _assert_same(got, expected)


@pytest.mark.slow
@settings(max_examples=12)
@given(mode=MODES, rows=st.integers(1, 7), seed=st.integers(0, 10_000))
def test_the_critics_update_is_one_function_of_the_batch(mode, rows, seed):
    batch = tiny.experience(seed, rows)
    run = partial(_critic, mode=mode)
    expected = run(batch)
    for got in _variants(run, batch, seed):
        _assert_same(got, expected)


@pytest.mark.slow
@settings(max_examples=5)
@given(rows=st.integers(4, 9), seed=st.integers(0, 10_000))
def test_mini_batches_drawn_by_a_key_do_not_depend_on_the_order_of_rows(rows, seed):
    batch = tiny.experience(seed, rows)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    run = partial(_actor, name="ppo_clip", mode="token-mean", mini_batch_size=3, epochs=2, key=Key(seed))
    state, _ = run(batch)
    state_, _ = run(batches.rows(batch, order), micro_batching=CUTS[0])
    for (path, a), (_, b) in zip(
        tree.leaves_with_paths(state.opt.mu), tree.leaves_with_paths(state_.opt.mu), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-6, msg=lambda m, path=path: f"{path}: {m}")


def test_correction_weights_multiply_the_policy_term():
    batch = tiny.experience(3, 6)
    doubled = batches.extend(type(batch), batch, correction_weights=torch.full_like(batch.advantages, 2.0))
    one, _ = _actor(batch, "ppo_clip", "token-mean", terms=PolicyTerms())
    two, _ = _actor(doubled, "ppo_clip", "token-mean", terms=PolicyTerms())
    for a, b in zip(one.opt.mu.values(), two.opt.mu.values(), strict=True):
        torch.testing.assert_close(2 * a, b, atol=1e-12, rtol=1e-9)


def _corrected(batch, **given):
    """The batch as the pipeline leaves it to the update: what is rejected is out of the mask."""
    made = losses.rollout_correction(batch.old_log_probs, batch.rollout_log_probs, batch.response_mask, **given)
    return batches.extend(type(batch), batch, response_mask=made.mask, correction_weights=made.weights)


CORRECTIONS = (
    {"level": "token", "threshold": 1.1},
    {"level": "token", "threshold": (0.9, 1.1), "batch_normalize": True},
    {"level": "sequence", "threshold": 1.2, "reject": "seq_mean_k3", "reject_threshold": 0.01},
    {"level": None, "reject": "token_k1", "reject_threshold": 1.1},
)


@pytest.mark.slow
@settings(max_examples=8)
@given(mode=MODES, correction=st.sampled_from(CORRECTIONS), rows=st.integers(2, 7), seed=st.integers(0, 10_000))
def test_a_corrected_batch_obeys_the_same_laws(mode, correction, rows, seed):
    batch = _corrected(tiny.experience(seed, rows), **correction)
    run = partial(_actor, name="ppo_clip", mode=mode, old_log_probs="engine")
    expected = run(batch)
    for got in _variants(run, batch, seed):
        _assert_same(got, expected)


@pytest.mark.slow
@settings(max_examples=12)
@given(mode=MODES, rows=st.integers(2, 7), seed=st.integers(0, 10_000))
def test_rejected_rows_are_as_if_they_had_never_been(mode, rows, seed):
    batch = tiny.experience(seed, rows)
    gone = torch.arange(rows) % 2 == 1
    shift = torch.where(gone, 3.0, 0.0)[:, None]
    batch = batches.extend(type(batch), batch, rollout_log_probs=batch.old_log_probs + shift)
    rejected = _corrected(batch, level="token", reject="seq_mean_k3", reject_threshold=0.5)
    assert not rejected.response_mask[gone].any()
    _assert_same(_actor(rejected, "ppo_clip", mode), _actor(batches.rows(rejected, ~gone), "ppo_clip", mode))


def test_on_policy_is_the_reinforce_gradient():
    batch = tiny.experience(4, 6)
    got, report = _actor(batch, "ppo_clip", "token-mean", terms=PolicyTerms(), old_log_probs="update")
    expected, _ = _actor(batch, "gpg", "token-mean", terms=PolicyTerms())
    for a, b in zip(got.opt.mu.values(), expected.opt.mu.values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)
    assert metrics.report(report)["actor/pg_clipfrac"] == 0.0


def test_a_batch_with_every_token_masked_gives_zero_gradients_and_finite_metrics():
    batch = tiny.experience(5, 4)
    empty = batches.extend(type(batch), batch, response_mask=torch.zeros_like(batch.response_mask))
    for state, report in (_actor(empty, "ppo_clip", "token-mean"), _critic(empty, "seq-mean-token-mean")):
        assert all(bool((g == 0).all()) for g in state.opt.mu.values())
        numbers = metrics.report(report)
        assert numbers[next(n for n in numbers if n.endswith("grad_norm"))] == 0.0


def test_no_argument_is_changed_and_donation_changes_no_bit():
    batch = tiny.experience(6, 7)
    state = init_state(tree.copy(ACTOR_PARAMS), OPTIMIZER)
    before = tree.digest((state, batch))
    changes = {"loss_fn": losses.ppo_clip, "micro_batching": CUTS[1], "mini_batch_size": 3, "epochs": 2}
    arguments = _arguments(ACTOR, 7, "token-mean", changes)
    kept, _ = UpdateActor(**arguments)(state, batch)
    assert tree.digest((state, batch)) == before
    again, _ = UpdateActor(**arguments)(state, batch)
    donated, _ = UpdateActor(**arguments)(state, batch, donate=True)
    assert tree.digest(kept) == tree.digest(again) == tree.digest(donated)
    assert all(p.numel() == 0 for p in state.params.values())


def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was_and_is_counted():
    batch = tiny.experience(7, 4)
    broken = batches.extend(type(batch), batch, advantages=batch.advantages * float("inf"))
    state = init_state(ACTOR_PARAMS, OPTIMIZER)
    after, report = _actor(broken, "ppo_clip", "token-mean")
    assert tree.digest((after.params, after.opt)) == tree.digest((state.params, state.opt))
    assert after.step == 1
    assert metrics.report(report)["actor/skipped"] == 1.0


def test_a_losss_own_metric_keeps_its_count_whatever_its_name():
    def with_metric(log_probs, old_log_probs, advantages, mask):
        per_token, _ = losses.ppo_clip(log_probs, old_log_probs, advantages, mask)
        return per_token, {"actor/extra_loss": metrics.masked_mean(torch.full_like(log_probs, 3.0), mask)}

    _, report = _actor(tiny.experience(8, 6), "ppo_clip", "token-mean", loss_fn=with_metric)
    assert metrics.report(report)["actor/extra_loss"] == pytest.approx(3.0)


@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("again", [False, True, "selective"])
def test_kernels_in_cpp_give_the_same_update(again):
    named = dict.fromkeys(("attention", "log_probs", "rms_norm", "add_rms_norm", "rotary", "glu"), "cpp")
    deep, params = tiny.model_and_params("lm")
    forward = Forward(attrs.evolve(deep, checkpoint_layers=again), kernels=Kernels.named(**named))
    batch = tiny.experience(3, rows=7)
    plain = partial(_actor, batch, "ppo_clip", "token-mean", policy=(deep, params))
    expected = plain()
    for padded in (False, True):
        changes = {"micro_batching": CUTS[1], "forward": attrs.evolve(forward, remove_padding=not padded)}
        _assert_same(plain(**changes), expected)
