"""Our whole losses keep the laws, and every law catches the mistake it is there for."""

from functools import cache, partial

import pytest
import torch

from fppo import laws, losses
from fppo.laws.verdicts import KINDS
from fppo.laws.whole import LAWS, POLICY_LAW

token_mean = laws.whole_loss(losses.ppo_clip, "token-mean")


@pytest.mark.slow
@pytest.mark.parametrize("mode", losses.MODES)
def test_every_mode_keeps_the_laws(mode):
    laws.check_whole_loss(laws.whole_loss(losses.ppo_clip, mode, horizon=9 if mode.endswith("norm") else None))


def reinforce(log_probs, old, advantages, mask, *, pieces, whole):
    """The smallest whole loss that keeps every law; the mistakes below are changes of it."""
    per_token = -advantages.detach().where(mask, 0.0) * log_probs.where(mask, 0.0)
    return per_token.sum() / whole.sum().clamp(min=1)


def mean_of_means(log_probs, old, advantages, mask, *, pieces, whole):
    return token_mean(log_probs, old, advantages, mask, pieces=1, whole=mask) / pieces


def padded_width(log_probs, old, advantages, mask, *, pieces, whole):
    return reinforce(log_probs, old, advantages, mask, pieces=pieces, whole=whole) / mask.shape[1]


def counts_all_rows(log_probs, old, advantages, mask, *, pieces, whole):
    return reinforce(log_probs, old, advantages, mask, pieces=pieces, whole=whole) * whole.sum() / len(whole)


def plus_for_minus(*tensors, pieces, whole):
    return -reinforce(*tensors, pieces=pieces, whole=whole)


def attached(log_probs, old, advantages, mask, *, pieces, whole):
    return (-advantages.where(mask, 0.0) * log_probs.where(mask, 0.0)).sum() / whole.sum().clamp(min=1)


def multiplied_mask(log_probs, old, advantages, mask, *, pieces, whole):
    return (-advantages.detach() * log_probs * mask).sum() / whole.sum().clamp(min=1)


def first_rows_more(log_probs, old, advantages, mask, *, pieces, whole):
    weights = 1.0 + torch.arange(len(mask), dtype=log_probs.dtype) / 10
    return reinforce(log_probs, old, advantages * weights[:, None], mask, pieces=pieces, whole=whole)


def per_token(log_probs, old, advantages, mask, *, pieces, whole):
    return -advantages.detach().where(mask, 0.0) * log_probs.where(mask, 0.0)


def draws(log_probs, old, advantages, mask, *, pieces, whole):
    return reinforce(log_probs, old, advantages, mask, pieces=pieces, whole=whole) + 0.0 * torch.rand(())


def raises_on_empty(log_probs, old, advantages, mask, *, pieces, whole):
    if not mask.any():
        raise ValueError("no tokens")
    return reinforce(log_probs, old, advantages, mask, pieces=pieces, whole=whole)


def all_tokens_of_none(log_probs, old, advantages, mask, *, pieces, whole):
    return reinforce(log_probs, old, advantages, mask if mask.any() else ~mask, pieces=pieces, whole=whole)


MISTAKES = {
    "number": (per_token, "fault"),
    "purity": (draws, "fault"),
    "empty micro-batch": (raises_on_empty, "fault"),
    "masked garbage": (multiplied_mask, "note"),
    "constants": (attached, "note"),
    "micro-batches": (mean_of_means, "fault"),
    "width of micro-batches": (padded_width, "fault"),
    "uneven micro-batches": (mean_of_means, "note"),
    "row order": (first_rows_more, "fault"),
    "padding width": (padded_width, "fault"),
    "rows without tokens": (counts_all_rows, "note"),
    "REINFORCE": (plus_for_minus, "fault"),
}


@cache
def found_in(mistake):
    return {verdict.law: verdict for verdict in laws.verdicts(mistake, kind="whole_loss")}


@pytest.mark.slow
@pytest.mark.parametrize("law", MISTAKES)
def test_every_law_notices_its_mistake(law):
    mistake, outcome = MISTAKES[law]
    found = found_in(mistake)
    assert found[law].outcome == outcome
    assert found[law].example.keys() == {"log_probs", "old_log_probs", "advantages", "mask"}


@pytest.mark.slow
def test_an_empty_micro_batch_holds_numbers_that_a_loss_could_fall_back_to():
    """So padding may: a loss of all tokens, where none is in the mask, is no 0."""
    found = found_in(all_tokens_of_none)
    assert {law for law, verdict in found.items() if verdict.outcome == "fault"} == {"empty micro-batch"}


@pytest.mark.slow
def test_the_first_fault_is_raised():
    with pytest.raises(laws.LawViolation, match="micro-batches of 1 and 1"):
        laws.check_whole_loss(mean_of_means)


def test_every_law_has_a_mistake():
    assert MISTAKES.keys() == {law.name for law in (*LAWS, POLICY_LAW)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_raises_is_a_fault_under_every_law(kind):
    """Also under those whose weaker form asks nothing."""

    def broken(*tensors, **keywords):
        raise RuntimeError("no loss today")

    found = [verdict for verdict in laws.verdicts(broken, kind=kind) if verdict.law != "groups of one"]  # may raise
    assert {verdict.outcome for verdict in found} == {"fault"}
    assert all("it raised RuntimeError: no loss today" in (verdict.reason or "") for verdict in found)


@pytest.mark.slow
def test_the_smallest_whole_loss_keeps_every_law():
    assert {verdict.outcome for verdict in laws.verdicts(reinforce, kind="whole_loss")} == {"holds"}


def test_a_mean_of_means_breaks_no_law_but_those_of_cuts():
    broken = {law for law, verdict in found_in(mean_of_means).items() if verdict.outcome != "holds"}
    assert broken == {"micro-batches", "width of micro-batches", "uneven micro-batches"}


@pytest.mark.slow
def test_a_reference_of_another_mode_is_noticed():
    other = laws.whole_loss(losses.ppo_clip, "seq-mean-token-mean")
    *_, last = laws.verdicts(token_mean, kind="whole_loss", reference=other)
    assert (last.law, last.outcome) == ("reference", "fault")
    assert "as of ppo_clip, seq-mean-token-mean" in (last.reason or "")


@pytest.mark.slow
def test_a_value_loss_with_a_wrong_sign_is_a_fault():
    def wrong(*tensors, pieces, whole):
        return -laws.whole_loss(losses.value_loss, "token-mean")(*tensors, pieces=pieces, whole=whole)

    *_, last = laws.verdicts(wrong, kind="whole_value_loss")
    assert (last.law, last.outcome) == ("squared error", "fault")


def test_what_a_counter_example_shows_runs():
    names = {"plus_for_minus": plus_for_minus, "print": lambda *values: None}
    exec("\n".join(found_in(plus_for_minus)["REINFORCE"].shown), names)


def summed_mask(scores, mask, groups):
    """Advantages as a group's deviations over its standard deviation plus 1e-6, the mean not exactly representable."""
    result = torch.zeros_like(scores)
    for group in groups.unique():
        rows = (groups == group) & mask.any(1)
        if rows.any():
            x = scores[rows]
            result[rows] = (x - x.mean()) / ((x.std() if len(x) > 1 else 1.0) + 1e-6)
    return result[:, None].where(mask, 0.0)


def test_a_rounding_that_grows_in_float32_is_a_fault():
    found = {verdict.law: verdict for verdict in laws.verdicts(summed_mask, kind="advantages")}
    verdict = found["equal rewards"]
    assert verdict.outcome == "fault"
    assert "in float32" in (verdict.reason or "")


def skips_none(rewards, values, mask, *, gamma, lam):
    """GAE that takes masked steps for states of value 0."""
    carried, values = torch.zeros(len(mask), dtype=values.dtype), values.where(mask, 0.0)
    rewards, columns, following = rewards.where(mask, 0.0), [], torch.zeros(len(mask), dtype=values.dtype)
    for t in reversed(range(mask.shape[1])):
        carried = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * carried
        following = values[:, t]
        columns.append(carried)
    advantages = torch.stack(columns[::-1], 1) if columns else rewards
    return advantages, advantages + values


@pytest.mark.slow
def test_masked_steps_of_gae_are_a_fault_and_the_rest_outside_the_mask_a_note():
    found = {verdict.law: verdict.outcome for verdict in laws.verdicts(skips_none, kind="gae")}
    assert found["masked steps"] == found["definition"] == "fault"
    assert found["zero outside the mask"] == "note"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kind": "whole_los"}, "whole_loss"),
        ({"kind": "gae", "reference": reinforce}, "neither a reference nor a dtype"),
        ({"kind": "whole_loss", "group_rows": 2}, "only the kind 'advantages' has groups"),
    ],
)
def test_arguments_that_a_kind_does_not_take_are_refused(more, words):
    with pytest.raises(ValueError, match=words):
        laws.verdicts(reinforce, **more)


@pytest.mark.slow
def test_verdicts_of_our_own_functions_hold():
    from fppo import advantages

    owns = {
        "policy_loss": losses.ppo_clip,
        "value_loss": losses.value_loss,
        "advantages": advantages.grpo,
        "gae": advantages.gae,
        "temporal": partial(advantages.gae, gamma=0.9, lam=0.7),
        "whiten": advantages.whiten,
        "whole_loss": token_mean,
        "whole_value_loss": laws.whole_loss(losses.value_loss, "token-mean"),
    }
    assert tuple(sorted(owns)) == tuple(sorted(KINDS))
    for kind, fn in owns.items():
        assert {verdict.outcome for verdict in laws.verdicts(fn, kind=kind)} == {"holds"}, kind
