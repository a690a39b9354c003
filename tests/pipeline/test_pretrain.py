"""A critic is fitted to a policy that stays as it is until that helps no more; then it may be left as it is."""

import math
import types

import attrs
import pytest
import torch

from fppo import advantages, metrics, tree
from fppo.assembly.run import assemble
from fppo.pipeline.pretrain import Pretrain, Pretraining, pretrain
from fppo.pipeline.train import iterate
from fppo.runtime import checkpoint
from fppo.settings import files
from tests import tiny, tiny_run


def _seen(share):
    """A batch of whose returns the values explain about that share of the variance."""
    batch = tiny.experience(5, 30)
    returns = advantages.discounted_returns(batch.token_rewards, batch.response_mask)
    noise = torch.randn(returns.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = (1 - share) ** 0.5 * returns[batch.response_mask].std() / noise[batch.response_mask].std()
    return attrs.evolve(batch, values=returns + scale * noise)


@pytest.mark.parametrize(
    ("shares", "rule", "alone"),
    [
        ((0.1, 0.4, 0.8, 0.803, 0.7, 0.9), Pretrain(limit=10, patience=2), 4),  # 0.803 is no rise
        ((0.1, 0.4, 0.8, 0.803, 0.7, 0.9), Pretrain(limit=10, patience=2, rise=0.0), 6),
        ((0.1, 0.4, 0.8, 0.9, 0.95), Pretrain(limit=3, patience=2), 3),
        ((0.9, 0.1, 0.2, 0.3), Pretrain(limit=9, patience=1), 1),
        ((0.8, 0.2, 0.5, 0.7), Pretrain(limit=9, patience=2), 2),  # of the best so far
        ((0.1, 0.25, 0.4, 0.41, 0.42), Pretrain(limit=9, patience=2, rise=0.2), 4),  # 0.4 rises by enough over two
    ],
)
def test_it_ends_when_the_explained_variance_rises_no_more(shares, rule, alone):
    progress, over = Pretraining(), []
    for share in shares:
        batch = _seen(share)
        progress, after, report = pretrain(progress, batch, rule=rule)
        over.append(progress.over)
        learned = advantages.discounted_returns(batch.token_rewards, batch.response_mask)
        assert torch.equal(after.returns, batch.returns if progress.over else learned)
        if over[-2:] == [1, 1]:
            assert report == {}
            continue
        numbers = metrics.report(report)
        assert numbers["critic/pretrain/over"] == progress.over
        assert numbers["critic/pretrain/explained_var"] == pytest.approx(share, abs=0.2)
    assert over == [0] * alone + [1] * (len(shares) - alone)
    assert progress.steps == alone


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    return directory


def _states(settings, steps):
    """The run after each of so many steps."""
    with assemble(settings) as assembly:
        following = iterate(assembly.run, program=assembly.program, draw=assembly.draw)
        return [assembly.run, *(run for run, _, _ in (next(following) for _ in range(steps)))]


@pytest.mark.slow
@pytest.mark.parametrize("reads", [pytest.param("tokens", marks=pytest.mark.slow), "confidence"])
def test_the_policy_waits_and_a_frozen_critic_stays(task, reads):
    changes = {"critic__pretrain": 2, "critic__freeze": True, "critic__reads": reads}
    runs = _states(tiny_run.settings(task, **changes), 4)
    assert [run.critic.step for run in runs] == [0, 2, 4, 4, 4]
    assert [run.actor.step for run in runs] == [0, 0, 0, 4, 8]  # 2 epochs of 2 mini-batches
    assert [run.pretraining.over for run in runs] == [0, 0, 0, 1, 1]


TOOLBOXES = (
    {"critic__popart": 0.3, "critic__loss": "huber", "critic__privileged": 2, "algorithm__advantage__lam_alpha": 0.4},
    {
        "critic__reads": "hidden",
        "critic__ensemble": 2,
        "critic__leave_agreed": 0.2,
        "critic__loss": "two_hot",
        "critic__loss__bins": 5,
        "algorithm__advantage": "vtrace",
        "algorithm__correction": "rollout",
        "actor__optimizer__warmup_steps": 1,
    },
    {
        "critic__reads": "confidence",
        "critic__loss": "quantile",
        "critic__loss__bins": 5,
        "algorithm__advantage": "td",
        "algorithm__advantage__steps": 2,
        "actor__positive_nll_coef": 0.1,
        "critic__optimizer__warmup_steps": 1,
    },
)


@pytest.mark.slow
@pytest.mark.parametrize("changes", TOOLBOXES, ids=["tokens", "hidden", "confidence"])
def test_a_run_that_stops_in_its_pretraining_goes_on_bit_for_bit(task, tmp_path, changes):
    settings = tiny_run.settings(task, critic__pretrain=2, data__eval_path=(), **changes)
    runs = _states(settings, 3)
    checkpoint.begin_save(runs[1], tmp_path, 1).wait()
    with assemble(settings) as assembly:
        again = checkpoint.load(assembly.run, tmp_path, 1)
        following = iterate(again, program=assembly.program, draw=assembly.draw)
        after = [next(following)[0] for _ in range(2)]
    assert runs[1].pretraining.steps == 1
    assert [tree.digest(run) for run in after] == [tree.digest(run) for run in runs[2:]]


def test_a_discount_of_turns_is_one_of_the_returns_too(task):
    settings = tiny_run.settings(
        task, algorithm__advantage="turn_gae", algorithm__advantage__gamma=0.5, critic__pretrain=2
    )
    with assemble(settings) as assembly:
        rule = assembly.program.pretrain
    mask, rewards = torch.tensor([[True, True, False, True]]), torch.tensor([[0.0, 1.0, 0.0, 8.0]])
    rows = types.SimpleNamespace(episodes=None, token_rewards=rewards, response_mask=mask, turn_ids=None)
    assert rule is not None
    assert rule.returns_of(rows).tolist() == [[5.0, 5.0, 0.0, 8.0]]
    rows.turn_ids = torch.tensor([[0, 1, -1, 1]])  # an answer without tokens parts the first two
    assert rule.returns_of(rows).tolist() == [[4.5, 9.0, 0.0, 8.0]]


def test_state_and_rule_belong_together(task):
    with assemble(tiny_run.settings(task)) as assembly:
        program = attrs.evolve(assembly.program, pretrain=Pretrain(limit=2))
        with pytest.raises(ValueError, match=r"RunState.pretraining and Program.pretrain belong together"):
            next(iterate(assembly.run, program=program, draw=assembly.draw))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pretrain": 4}, "critic.pretrain = 4: the policy might never be updated in 4 steps"),
        ({"pretrain": 1, "warmup_steps": 1}, "critic.warmup_steps = 1: critic.pretrain = 1 is given too"),
        ({"pretrain_rise": 0.1}, "critic.pretrain_rise = 0.1: nothing reads it here: it is for critic.pretrain > 0"),
        ({"freeze": True}, "critic.freeze = True: it would stay as it is drawn; give model.critic_path"),
    ],
)
def test_settings_that_do_not_go_together_are_named(task, changes, text):
    with pytest.raises(files.SettingsError) as caught:
        tiny_run.settings(task, **{f"critic__{name}": value for name, value in changes.items()})
    assert text in str(caught.value)


def _rates(settings, steps):
    """The actor's mean rate in each of so many steps, nan in those without an update, and the run's end."""
    with assemble(settings) as assembly:
        following = iterate(assembly.run, program=assembly.program, draw=assembly.draw)
        each = [next(following) for _ in range(steps)]
        numbers = [metrics.report(report).get("actor/lr", math.nan) for _, _, report in each]
        return numbers, each[-1][0]


@pytest.mark.slow
def test_the_policys_schedule_counts_the_steps_that_it_is_updated_in(task):
    """Pretraining of at most 7 steps ends after fewer: the rate falls over all that are left, to the last one."""
    changes = {"steps": 9, "critic__pretrain": 7, "critic__pretrain_patience": 1, "critic__pretrain_rise": 10.0}
    settings = tiny_run.settings(task, **changes, actor__epochs=1, actor__mini_batch_size=8)
    rates, run = _rates(settings, 9)
    assert run.pretraining is not None
    alone = run.pretraining.steps
    assert 0 < alone < 7
    left = 9 - alone
    assert all(math.isnan(x) for x in rates[:alone])
    assert rates[alone:] == pytest.approx([1e-3 * (1 - n / left) for n in range(left)])
