"""Our losses keep the laws, and every law catches the mistake it is there for."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fppo import laws, losses
from fppo.laws import _search
from fppo.laws.losses import COMMON
from fppo.metrics import masked_max, masked_mean, total


def selected(log_probs, old_log_probs, advantages, mask):
    return {"selected": (advantages > 0.3) & mask}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in losses.POLICY_LOSSES if name != "gmpo"])
def test_policy_losses_keep_the_laws(name):
    laws.check_policy_loss(getattr(losses, name))


@pytest.mark.slow
def test_losses_with_opt_outs_keep_the_other_laws():
    laws.check_policy_loss(losses.gmpo, reinforce="row")
    laws.check_policy_loss(losses.kl_cov, extras=selected)
    laws.check_policy_loss(losses.m2po, extras=selected, reinforce=None)
    laws.check_policy_loss(losses.clip_cov, extras=selected, reinforce=None)
    laws.check_value_loss(losses.value_loss)
    laws.check_value_loss(partial(losses.value_loss, clip=None))


@pytest.fixture
def few(monkeypatch):
    """Half of the examples in which a mistake is looked for: each kind of mask once in each size."""
    monkeypatch.setattr(_search, "check", partial(_search.check, seeds=3))


def reinforce(log_probs, old_log_probs, advantages, mask):
    """The smallest loss that keeps every law; the mistakes below are changes of it."""
    log_probs, advantages = (x.where(mask, 0.0) for x in (log_probs, advantages.detach()))
    return (-advantages * log_probs).where(mask, 0.0), {"loss": masked_mean(log_probs, mask)}


def mean_of_micro_batch(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs, old, advantages, mask)
    return loss / mask.sum().clamp(min=1), metrics


def scalar_loss(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs, old, advantages, mask)
    return loss.sum() / mask.sum().clamp(min=1), metrics


def no_metrics(log_probs, old, advantages, mask):
    return reinforce(log_probs, old, advantages, mask)[0]


def float_metrics(log_probs, old, advantages, mask):
    return reinforce(log_probs, old, advantages, mask)[0], {"loss": 0.0}


def attached_metrics(log_probs, old, advantages, mask):
    return reinforce(log_probs, old, advantages, mask)[0], {
        "loss": masked_max(log_probs, mask)._replace(value=log_probs.sum())
    }


def multiplied_mask(log_probs, old, advantages, mask):
    return -advantages.detach() * log_probs * mask, {}


def where_after_exp(log_probs, old, advantages, mask):
    ratio = (log_probs - old.detach()).exp().where(mask, 0.0)
    return (-advantages.detach().where(mask, 0.0) * ratio), {}


def forgotten_mask(log_probs, old, advantages, mask):
    log_probs, advantages = log_probs.nan_to_num(0, 0, 0), advantages.detach().nan_to_num(0, 0, 0)
    return -advantages * log_probs, {}


def attached_old(log_probs, old, advantages, mask):
    log_probs, old, advantages = (x.where(mask, 0.0) for x in (log_probs, old, advantages.detach()))
    return (-advantages * (log_probs - old).exp()).where(mask, 0.0), {}


def attached_advantages(log_probs, old, advantages, mask):
    log_probs, advantages = (x.where(mask, 0.0) for x in (log_probs, advantages))
    return (-advantages * log_probs).where(mask, 0.0), {}


def whitened_inside(log_probs, old, advantages, mask):
    advantages = advantages.detach().where(mask, 0.0)
    mean = advantages.sum() / mask.sum().clamp(min=1)
    return reinforce(log_probs, old, advantages - mean, mask)


def padded_width(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs, old, advantages, mask)
    return loss / mask.shape[1], metrics


def weights_by_place(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs, old, advantages, mask)
    return loss * torch.arange(1, len(loss) + 1)[:, None], metrics


def width_in_metrics(log_probs, old, advantages, mask):
    loss, _ = reinforce(log_probs, old, advantages, mask)
    return loss, {"loss": masked_mean(loss, torch.ones_like(mask))}


def mean_of_means(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs, old, advantages, mask)
    whole = metrics["loss"]
    return loss, {
        "loss": whole._replace(total=whole.total / whole.count.clamp(min=1), count=torch.ones_like(whole.count))
    }


def in_place(log_probs, old, advantages, mask):
    advantages.detach().masked_fill_(~mask, 0.0).clamp_(-1.0, 1.0)
    return reinforce(log_probs, old, advantages, mask)


def global_noise(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs, old, advantages, mask)
    return loss * (torch.rand(loss.shape) < 0.9), metrics


def fills_padding(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs, old, advantages, mask)
    return loss.where(mask, mask.any().double()), metrics


def first_row_metric(log_probs, old, advantages, mask):
    loss, _ = reinforce(log_probs, old, advantages, mask)
    return loss, {"loss": masked_mean(loss[:1], mask[:1])}


def nan_when_empty(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs, old, advantages, mask)
    return loss / mask.any(), metrics


def wrong_sign(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs, old, advantages, mask)
    return -loss, metrics


def detached(log_probs, old, advantages, mask):
    return reinforce(log_probs.detach(), old, advantages, mask)


def single_precision(log_probs, old, advantages, mask):
    loss, metrics = reinforce(log_probs.float(), old.float(), advantages.float(), mask)
    return loss.double(), metrics


def half_way(log_probs, old, advantages, mask):
    return reinforce(log_probs.float(), old.float(), advantages.float(), mask)


def crashes(log_probs, old, advantages, mask):
    raise RuntimeError("no kernel image")


MISTAKES = [
    (mean_of_micro_batch, "micro-batches", 2, r"in micro-batches of 1, sum\(weights \* loss\) is"),
    (scalar_loss, "per token", 1, r"the loss has shape \[\]"),
    (no_metrics, "per token", 1, "returned a Tensor, expected the tuple"),
    (float_metrics, "per token", 1, "metric loss is a float, expected a Mean"),
    (attached_metrics, "per token", 1, "carries a gradient"),
    (multiplied_mask, "masked garbage", 1, r"with NaN where the mask is False, the loss\[0, \d\] is nan"),
    (where_after_exp, "masked garbage", 1, "the gradient.* is nan, expected"),
    (forgotten_mask, "empty mask", 1, "the loss of an empty mask"),
    (fills_padding, "zero outside the mask", 1, "outside the mask the loss"),
    (first_row_metric, "row order", 2, "with the rows in the order"),
    (attached_old, "constants", 1, "a gradient reaches old_log_probs"),
    (attached_advantages, "constants", 1, "a gradient reaches advantages"),
    (whitened_inside, "micro-batches", 2, "in micro-batches of 1"),
    (padded_width, "padding width", 1, "with 1 more columns"),
    (weights_by_place, "micro-batches", 2, '"row order"'),
    (width_in_metrics, "padding width", 1, "metric loss, count is 2, expected 1"),
    (mean_of_means, "metrics add", 2, "merged over single rows, metric loss"),
    (in_place, "purity", 1, "it changed its argument advantages"),
    (global_noise, "purity", 1, "global generator"),
    (nan_when_empty, "empty mask", 1, "is nan, expected 0"),
    (wrong_sign, "REINFORCE", 1, "the gradient at old == new"),
    (detached, "gradient", 3, "no gradient reaches log_probs"),
    (single_precision, "precision", 3, "it computes in float32"),
    (half_way, "precision", 1, "float64 arguments gave a loss in float32"),
    (crashes, "per token", 1, "it raised RuntimeError: no kernel image"),
]


def test_every_law_is_broken_by_a_mistake():
    names = {law.name for law in COMMON} | {"REINFORCE"}
    assert names == {law for _, law, _, _ in MISTAKES}


def test_the_smallest_loss_keeps_the_laws():
    laws.check_policy_loss(reinforce)


def check_lines(error, mistake, law):
    """The lines of a message run, and hold the batch as it was used."""
    text = str(error).partition("as it was used:\n")[2].partition("\n  It also")[0]
    assert max(len(number) for number in re.findall(r"\d+\.\d+", text)) <= 5  # 4 digits and a point
    lines = [line.strip() for line in text.splitlines()]
    scope = {mistake.__name__: mistake}
    exec("\n".join(lines[:-3]), scope)  # what follows calls the loss, which may be right there
    for name, value in error.example.items():
        assert torch.equal(scope[name].nan_to_num(7.0), value.nan_to_num(7.0)), name
    assert scope["weights"].shape == scope["mask"].shape
    assert (
        lines[-3]
        == f"loss, metrics = partial({mistake.__name__})(log_probs.requires_grad_(), old_log_probs, advantages, mask)"
    )
    if law in ("masked garbage", "REINFORCE"):
        exec("\n".join(lines[-3:]), scope)
    if law == "masked garbage":
        assert scope["log_probs"].isnan().any()
        assert scope["log_probs"].grad.isnan().any() or scope["loss"].isnan().any()
    if law == "REINFORCE":
        assert torch.equal(scope["log_probs"], scope["old_log_probs"])


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "law", "rows", "words"), MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_breaks_its_law(mistake, law, rows, words):
    with pytest.raises(laws.LawViolation, match=words) as caught:
        laws.check_policy_loss(partial(mistake))
    error = caught.value
    assert error.law == law
    assert f'partial({mistake.__name__}) breaks the law "{law}"' in str(error)
    assert error.example["mask"].shape[0] == rows
    for name, value in error.example.items():
        assert f"{name}" in str(error)
        assert str(value.tolist()) in str(error)
    if mistake is not crashes:  # its lines crash
        check_lines(error, mistake, law)


@pytest.mark.slow
def test_a_value_loss_without_the_half_breaks_the_last_law(few):
    def doubled(values, old_values, returns, mask):
        loss, metrics = losses.value_loss(values, old_values, returns, mask)
        return 2.0 * loss, metrics

    with pytest.raises(laws.LawViolation, match="gradient at old == new") as caught:
        laws.check_value_loss(doubled)
    assert caught.value.law == "squared error"
    laws.check_value_loss(doubled, squared=False)


def clipped(log_probs, old, advantages, mask, *, low=0.2, high=0.2):
    """ppo_clip without the dual clip, as a formula: the reference of the mistakes below."""
    log_probs, old, adv = (x.where(mask, 0.0) for x in (log_probs, old.detach(), advantages.detach()))
    ratio = (log_probs - old).exp()
    return torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high)).where(mask, 0.0), {}


def min_for_max(log_probs, old, advantages, mask):
    log_probs, old, adv = (x.where(mask, 0.0) for x in (log_probs, old.detach(), advantages.detach()))
    ratio = (log_probs - old).exp()
    return torch.minimum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).where(mask, 0.0), {}


def not_pessimistic(log_probs, old, advantages, mask):
    log_probs, old, adv = (x.where(mask, 0.0) for x in (log_probs, old.detach(), advantages.detach()))
    return (-adv * (log_probs - old).exp().clamp(0.8, 1.2)).where(mask, 0.0), {}


def around_returns(values, old_values, returns, mask):
    loss, metrics = losses.value_loss(values, returns, returns, mask)
    return loss, metrics


@pytest.mark.slow
def test_what_agrees_with_a_reference_away_from_old_passes():
    laws.check_policy_loss(partial(losses.ppo_clip, dual_clip=None), reference=clipped)
    laws.check_policy_loss(losses.kl_cov, extras=selected, reference=losses.kl_cov)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [min_for_max, not_pessimistic, partial(clipped, high=0.3), losses.gpg])
def test_what_a_loss_does_away_from_old_is_held_against_a_reference(mistake, few):
    laws.check_policy_loss(mistake)
    with pytest.raises(laws.LawViolation, match=r"the (loss|gradient)\[.*, as of clipped") as caught:
        laws.check_policy_loss(mistake, reference=clipped)
    assert caught.value.law == "reference"


@pytest.mark.slow
def test_a_value_loss_is_held_against_a_reference():
    laws.check_value_loss(around_returns)
    with pytest.raises(laws.LawViolation, match="as of value_loss") as caught:
        laws.check_value_loss(around_returns, reference=losses.value_loss)
    assert caught.value.law == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [single_precision, half_way])
def test_a_loss_in_single_precision_is_checked_in_that(mistake):
    with pytest.raises(laws.LawViolation, match="give dtype=torch"):
        laws.check_policy_loss(mistake)
    if mistake is half_way:
        laws.check_policy_loss(mistake, dtype=torch.float32, reference=reinforce)
    with pytest.raises(ValueError, match="dtypes must be some of"):
        laws.check_policy_loss(mistake, dtype=torch.float16)


@pytest.mark.slow
def test_our_losses_keep_the_laws_in_single_precision():
    laws.check_policy_loss(losses.ppo_clip, dtype=torch.float32)
    laws.check_value_loss(losses.value_loss, dtype=torch.float32)


@pytest.mark.slow
def test_a_message_names_the_way_out_and_shows_what_is_bound():
    with pytest.raises(laws.LawViolation, match='give reinforce=None, or reinforce="row"') as caught:
        laws.check_policy_loss(partial(losses.gmpo, clip_low=torch.tensor(0.25)))
    assert "partial(gmpo, clip_low=tensor(0.2500)) breaks" in str(caught.value)
    with pytest.raises(laws.LawViolation, match=r"partial\(gmpo, extra=namespace\(long='x+\.\.\. breaks"):
        laws.check_policy_loss(partial(losses.gmpo, extra=SimpleNamespace(long="x" * 100)))
    with pytest.raises(laws.LawViolation, match="give squared=False"):
        laws.check_value_loss(wrong_sign)


@pytest.mark.slow
def test_a_metric_may_be_a_sum():
    def counted(log_probs, old, advantages, mask):
        return reinforce(log_probs, old, advantages, mask)[0], {"tokens": total(mask.sum())}

    laws.check_policy_loss(counted)


@pytest.mark.slow
def test_gmpo_keeps_reinforce_along_rows_alone():
    with pytest.raises(laws.LawViolation, match="REINFORCE"):
        laws.check_policy_loss(losses.gmpo)
    with pytest.raises(ValueError, match="'token', 'row' or None"):
        laws.check_policy_loss(losses.gmpo, reinforce="rows")


@pytest.mark.slow
def test_a_breach_is_the_same_in_every_run():
    texts = set()
    for _ in range(2):
        with pytest.raises(laws.LawViolation) as caught:
            laws.check_policy_loss(mean_of_micro_batch)
        texts.add(str(caught.value))
    assert len(texts) == 1
