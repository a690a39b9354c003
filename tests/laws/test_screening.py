"""What is looked at before a run: a good function passes, and each mistake that would train on is named."""

from functools import partial

import pytest
import torch

from fppo import advantages, laws, losses
from fppo.advantages import Advantages
from fppo.pipeline import OfRows
from fppo_kernels import table
from fppo_kernels.adamw import adamw_
from fppo_kernels.attention.eager import eager
from fppo_kernels.gae.loop import loop
from fppo_kernels.log_probs.reference import reference
from tests.kernels import test_decode_attention as decoding
from tests.laws import test_layers as inner
from tests.laws import test_losses as bad
from tests.parts import EVERY_ESTIMATOR, GROUPED


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl", "dro", "gmpo"])
def test_good_losses_pass(name):
    laws.screen_policy_loss(getattr(losses, name))


def test_selective_losses_are_handed_a_selection():
    laws.screen_policy_loss(losses.kl_cov, selective=True)
    laws.screen_policy_loss(partial(losses.clip_cov, clip_low=0.1), selective=True)


def three_arguments(log_probs, old, advantages):
    return log_probs, {}


@pytest.mark.parametrize(
    ("mistake", "law", "words"),
    [
        (bad.scalar_loss, "per token", r"the loss has shape \[\]"),
        (bad.no_metrics, "per token", "expected the tuple"),
        (bad.float_metrics, "per token", "metric loss is a float"),
        (three_arguments, "per token", "it raised TypeError: three_arguments"),
        (bad.detached, "gradient", "nothing would be learned"),
        (bad.nan_when_empty, "empty mask", "is nan, expected 0"),
        (bad.where_after_exp, "masked garbage", "the gradient.* is nan, expected"),
    ],
)
def test_losses_that_would_train_on_are_named(mistake, law, words):
    with pytest.raises(laws.LawViolation, match=words) as caught:
        laws.screen_policy_loss(mistake)
    assert caught.value.law == law


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("name", EVERY_ESTIMATOR)
def test_good_estimators_pass(name, group):
    if group > 1 or name not in GROUPED:
        laws.screen_estimator(OfRows(EVERY_ESTIMATOR[name]), group=group, names=("a", "b"))


def by_group(rows, rewards):
    return advantages.grpo(rewards.sum(1).view(-1, 4).flatten(), rows.response_mask, rows.groups)


def of_ones_data(rows, rewards):
    return Advantages(rewards * rows.extras[0]["difficulty"], rewards)


def of_scores_by_name(rows, rewards):
    return advantages.grpo(rows.named_scores["format"], rows.response_mask, rows.groups)


def by_surprise(rows, rewards, mask):
    """Rewards over the tokens' log-probs, which are 0 where the policy chose no token."""
    rate = (rewards / rows.sampling_log_probs).where(mask, 0.0).sum(1, keepdim=True)
    return Advantages(rate.expand(rewards.shape), rewards)


def of_chosen_tokens(rows, rewards):
    return by_surprise(rows, rewards, rows.response_mask)


@pytest.mark.parametrize("fn", [by_group, of_ones_data, of_scores_by_name, of_chosen_tokens])
def test_estimators_that_read_what_is_theirs_pass(fn):
    laws.screen_estimator(fn, group=4)


def no_deviation(rows, rewards):
    s = rewards.sum(1).view(-1, 4)
    per_row = ((s - s.mean(1, keepdim=True)) / s.std(1, keepdim=True)).flatten()
    return advantages.Advantages(per_row[:, None].expand(rewards.shape), rewards)


def one_column(rows, rewards):
    return Advantages(rewards.sum(1, keepdim=True), rewards)


def alone(rows, rewards):
    return rewards


def of_seen_tokens(rows, rewards):
    """Among them are those of tools, which the policy did not choose."""
    return by_surprise(rows, rewards, rows.attention_mask[:, -rewards.shape[1] :])


def rows_alone(rows):
    return Advantages(rows.scores, rows.scores)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (no_deviation, r"advantages are not finite in row \d: \[nan"),
        (one_column, r"advantages are torch.float32 \[12, 1\], expected floating \[B, T\] = \[12, 3\]"),
        (alone, r"it returned a Tensor, expected an Advantages"),
        (of_seen_tokens, r"advantages are not finite in row \d: \[nan"),
        (rows_alone, "it raised TypeError: rows_alone"),
    ],
)
def test_estimators_that_would_train_on_are_named(mistake, words):
    with pytest.raises(laws.LawViolation, match=words):
        laws.screen_estimator(mistake, group=4)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["advantages", "returns"])
def test_one_number_that_is_not_finite_is_named(name, number):
    """In the response; what stands elsewhere is no estimate."""

    def estimator(rows, rewards, *, inside):
        columns = {"advantages": rewards.clone(), "returns": rewards.clone()}
        row, place = (rows.response_mask == inside).nonzero()[0]
        columns[name][row, place] = number
        return Advantages(**columns)

    with pytest.raises(laws.LawViolation, match=f"{name} are not finite in row"):
        laws.screen_estimator(partial(estimator, inside=True), group=4)
    laws.screen_estimator(partial(estimator, inside=False), group=4)


@pytest.mark.parametrize("name", ["advantages", "returns"])
def test_estimates_of_another_shape_or_dtype_are_named(name):
    for change in (lambda x: x[:, :1], lambda x: x.long()):

        def estimator(rows, rewards, change=change):
            return Advantages(**{"advantages": rewards, "returns": rewards, name: change(rewards)})

        with pytest.raises(laws.LawViolation, match=f"{name} are torch.*, expected floating"):
            laws.screen_estimator(estimator, group=4)


def wrong_temperature(*args, temperature=1.0, **keywords):
    return reference(*args, temperature=temperature**2, **keywords)


def detached_entropy(*args, **keywords):
    out = reference(*args, **keywords)
    return out._replace(entropy=out.entropy.detach())


def wrong_scale(query, key, value, *, scale, **keywords):
    return eager(query, key, value, scale=scale**2, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_screened_in_the_dtype_of_the_run(dtype):
    good = {"log_probs": ("reference", "chunked"), "attention": ("sdpa", "eager"), "linear": ("torch", "onednn")}
    good["decode_attention"] = tuple(name for name, reason in table.available("decode_attention").items() if not reason)
    good |= {
        "rms_norm": ("eager", "torch"),
        "glu": ("eager",),
        "layer_norm": ("eager", "torch"),
        "add_rms_norm": ("eager",),
        "rotary": ("eager",),
    }
    for op, names in good.items():
        for name in names:
            laws.screen_kernel(op, table.get(op, name), dtype=dtype)
    bad = [("log_probs", wrong_temperature), ("log_probs", detached_entropy), ("attention", wrong_scale)]
    bad += [("decode_attention", decoding.sees_padding), ("decode_attention", decoding.reads_all_columns)]
    bad += [("linear", inner.centred), ("rms_norm", inner.no_eps), ("glu", inner.detached)]
    for op, mistake in bad:
        with pytest.raises(laws.LawViolation, match=f"{mistake.__name__} breaks"):
            laws.screen_kernel(op, mistake, dtype=dtype)
    with pytest.raises(ValueError, match="op must be one of"):
        laws.screen_kernel("unpad", eager)


def undiscounted(rewards, values, mask, *, gamma, lam):
    return loop(rewards, values, mask, gamma=gamma, lam=1.0)


def leaky(rewards, values, mask, **keywords):
    return loop(rewards, values, torch.ones_like(mask), **keywords)


def coupled_decay(params, grads, *args, weight_decay, **keywords):
    for p, g in zip(params, grads, strict=True):
        g.add_(p, alpha=weight_decay)
    adamw_(params, grads, *args, weight_decay=0.0, **keywords)


def never_skips(*args, found_inf=None, **keywords):
    adamw_(*args, **keywords)


def test_kernels_of_the_state_are_screened_in_float32():
    for op in ("gae", "adamw"):
        for name in (name for name, reason in table.available(op).items() if reason is None):
            laws.screen_kernel(op, table.get(op, name), dtype=torch.bfloat16)
    mistakes = {undiscounted: "gae", leaky: "gae", coupled_decay: "adamw", never_skips: "adamw"}
    for mistake, op in mistakes.items():
        with pytest.raises(laws.LawViolation, match=f"{mistake.__name__} breaks"):
            laws.screen_kernel(op, mistake)
