"""The estimators with a critic, as settings name them, beside the functions that they stand for."""

from functools import partial

import attrs
import pytest
import torch

from fppo import advantages, losses
from fppo.advantages.columns import of_values
from fppo.assembly.functions import advantage_of
from fppo.batch import Annotated, narrow
from fppo.pipeline import OfRows
from fppo.settings import files
from fppo_kernels.table import Kernels
from tests import tiny, tiny_run
from tests.parts import EVERY_ESTIMATOR

TOKEN = {"algorithm__correction__name": "rollout", "algorithm__correction__threshold": 1.5}


def _weights(rows):
    arguments = (rows.old_log_probs, rows.rollout_log_probs, rows.response_mask)
    return losses.rollout_correction(*arguments, level="token", threshold=1.5).weights


CASES = {
    "gae": ({"lam": 0.9, "critic_lam": 1.0}, lambda rows: partial(advantages.gae, lam=0.9, critic_lam=1.0)),
    "gae of VAPO": (
        {"lam_alpha": 0.4},
        lambda rows: partial(advantages.gae, lam=advantages.length_lam(rows.response_mask, alpha=0.4)),
    ),
    "turn_gae": ({"lam": 0.5}, lambda rows: partial(advantages.turn_gae, lam=0.5)),
    "td": ({"steps": 2}, lambda rows: partial(advantages.td, steps=2)),
    "vtrace": (
        {"lam": 0.8, "cut": 0.5},
        lambda rows: lambda r, v, m, gamma: advantages.vtrace(r, v, _weights(rows), m, gamma=gamma, lam=0.8, cut=0.5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_estimator_of_the_settings_is_its_function(name, tmp_path):
    changes, function = CASES[name]
    changes = {f"algorithm__advantage__{key}": value for key, value in {**changes, "gamma": 0.9}.items()}
    advantage = name.partition(" ")[0]
    changes |= {"algorithm__advantage__name": advantage} | (TOKEN if name == "vtrace" else {})
    settings = tiny_run.settings(tmp_path, **changes)
    rows = narrow(Annotated, tiny.experience(3, 4))
    noise = torch.randn(rows.old_log_probs.shape, generator=torch.Generator().manual_seed(0))
    rows = attrs.evolve(rows, values=noise, rollout_log_probs=rows.old_log_probs + noise / 3)
    rewards = advantages.token_rewards(rows.scores + 1, rows.response_mask)
    found = advantage_of(settings.algorithm, Kernels.named())({})(rows, rewards)
    expected = function(rows)(rewards, noise, rows.response_mask, gamma=0.9)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=0, atol=0)
    with pytest.raises(ValueError, match=f"'{advantage}' needs values in the batch"):
        OfRows(EVERY_ESTIMATOR[advantage])(attrs.evolve(rows, values=None), rewards)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"advantage": "td"}, "algorithm.advantage.steps = None: td needs it: give a whole number"),
        ({"advantage": "vtrace"}, "algorithm.correction.name = 'none': vtrace traces the weights of single tokens"),
        ({"advantage": "rloo", "advantage__critic_lam": 1.0}, "advantage.critic_lam = 1.0: rloo has no such keyword"),
        ({"advantage__lam_alpha": 0.1, "gae": "loop"}, "algorithm.gae = 'loop': nothing reads it here: it is for algo"),
        (
            {"advantage__cut": 0.5},
            "algorithm.advantage.cut = 0.5: gae has no such keyword; there are gamma, lam, critic",
        ),
        ({"trace_cut": 0.5}, "algorithm.trace_cut = 0.5: it is called algorithm.advantage.cut now"),
    ],
)
def test_settings_that_do_not_go_together_are_named(changes, text, tmp_path):
    with pytest.raises(files.SettingsError) as caught:
        tiny_run.settings(tmp_path, **{f"algorithm__{name}": value for name, value in changes.items()})
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["opo", "optimal_token_baseline"])
def test_baselines_of_the_other_rows_alone_are_a_setting(name, tmp_path):
    rows = narrow(Annotated, tiny.experience(3, 4))
    rows = attrs.evolve(rows, groups=torch.zeros(4, dtype=torch.int64))
    rows = attrs.evolve(rows, sum_squared_probs=torch.rand(rows.old_log_probs.shape).double())
    rewards = advantages.token_rewards(rows.scores, rows.response_mask)
    bound = {"algorithm__advantage__name": name, "rollout__n": 2}
    found = [
        advantage_of(
            tiny_run.settings(tmp_path, **bound, algorithm__advantage__leave_one_out=out).algorithm, Kernels.named()
        )({})
        for out in (False, True)
    ]
    plain, others = (fn(rows, rewards).advantages for fn in found)
    assert not torch.allclose(plain, others)
    torch.testing.assert_close(
        others, OfRows(partial(EVERY_ESTIMATOR[name], leave_one_out=True))(rows, rewards).advantages
    )


@pytest.mark.parametrize(("group_by", "by_turn"), [("prompt", False), ("turn", True)])
def test_groups_are_compared_by_what_the_settings_say(group_by, by_turn):
    changes = {"algorithm.advantage": "rloo", "algorithm.group_by": group_by}
    section = files.replace(files.from_dict({}), changes).algorithm
    assert advantage_of(section, Kernels.named())({}).by_turn is by_turn


def test_an_estimator_of_values_weighs_tokens_of_the_policys_own_by_1():
    draw = partial(torch.randn, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards, values, mask = draw(), draw(), draw() > -0.5
    for wrapped in (advantages.vtrace, OfRows(advantages.vtrace), partial(advantages.vtrace, lam=0.5)):
        plain = getattr(wrapped, "fn", wrapped)
        expected = plain(rewards, values, torch.ones_like(rewards), mask)
        torch.testing.assert_close(tuple(of_values(wrapped)(rewards, values, mask)), tuple(expected), rtol=0, atol=0)
    found = of_values(lambda values, mask: values.where(mask, 0.0))(rewards, values, mask)
    assert torch.equal(found.advantages, values.where(mask, 0.0))
    assert torch.equal(found.returns, values.where(mask, 0.0))
    with pytest.raises(ValueError, match="'rloo' needs scores, groups beside rewards and values"):
        of_values(advantages.rloo)(rewards, values, mask)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_turn_takes_the_place_of_a_response(alone, seed):
    """Also where an estimator gives advantages alone; a row whose group has no other score is compared with nothing."""

    def centred(scores, mask, groups):
        peers = [(groups == group) & mask.any(1) for group in groups]
        means = torch.stack([scores[each].mean() if each.any() else scores.new_zeros(()) for each in peers])
        result = (scores - means)[:, None].where(mask, 0.0)
        return result if alone else advantages.Advantages(result, 2.0 * scores[:, None].where(mask, 0.0))

    g = torch.Generator().manual_seed(seed)
    rows = narrow(Annotated, tiny.experience(seed, 6))
    groups, scores = torch.tensor([4, 4, 4, 9, 9, 2]), torch.tensor([1.0, 2.0, 3.0, 4.0, torch.nan, 5.0])
    mask = (torch.rand(rows.response_mask.shape, generator=g) < 0.8) & ~scores.isnan()[:, None]
    ids = (torch.rand(mask.shape, generator=g) < 0.4).cumsum(1).where(mask, -1)
    rewards = torch.randn(mask.shape, generator=g, dtype=torch.float64)
    rows = attrs.evolve(rows, groups=groups, scores=scores, response_mask=mask, turn_ids=ids)
    found = OfRows(centred, by_turn=True)(rows, rewards)
    compared = mask.any(1) & (torch.arange(6) != 3)  # the only row of its group that has a score
    for row, column in (~mask | ~compared[:, None]).nonzero().tolist():
        assert (found.advantages[row, column], found.returns[row, column]) == (0.0, 0.0)
    for row, column in (mask & compared[:, None]).nonzero().tolist():
        turn = ids[row, column]
        to_go = rewards.where(mask & (ids >= turn), 0.0).sum(1)
        peers = (groups == groups[row]) & (ids == turn).any(1) & compared
        assert found.advantages[row, column].item() == pytest.approx((to_go[row] - to_go[peers].mean()).item())
        assert found.returns[row, column].item() == pytest.approx((1.0 if alone else 2.0) * to_go[row].item())
