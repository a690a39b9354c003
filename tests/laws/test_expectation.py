"""Steps in expectation: what estimators, losses, weight modes and KL kinds claim of their mean gradient, exactly."""

from functools import partial

import attrs
import pytest
import torch

from fppo import advantages, laws, losses
from fppo.laws import KL, LawViolation

WIDE = (1e-6, 1e6)  # weights that nothing cuts
BINARY = [x for x in laws.worlds(binary=True) if len(x.logits) == 1]  # of one prompt
sequence = partial(losses.rollout_correction, level="sequence", threshold=WIDE)
token = partial(losses.rollout_correction, level="token", threshold=WIDE)


def reinforce(rewards, mask):
    """The reward to go, without a baseline."""
    return advantages.discounted_returns(rewards, mask)


def loss_kl(kind, of="token"):
    return KL(kind, 0.7, where="loss", of=of)


ON_POLICY = tuple(losses.POLICY_LOSSES)
CLAIMS = {
    "reinforce": (reinforce, {}),
    "rloo": (advantages.rloo, {"n": 3}),
    "grpo without std": (partial(advantages.grpo, scale="none"), {"n": 3, "up_to": "scale"}),
    "grpo of binary scores": (
        advantages.grpo,
        {"n": 3, "up_to": "scale", "worlds": BINARY},
    ),
    "passk of binary scores in pairs": (
        advantages.grpo_passk,
        {"up_to": "scale", "worlds": BINARY},
    ),
    "opo, left out": (partial(advantages.opo, leave_one_out=True), {"n": 3}),
    "optimal token baseline, left out": (partial(advantages.optimal_token_baseline, leave_one_out=True), {"n": 3}),
    "remax": (advantages.remax, {}),
    "gae, lam 1": (partial(advantages.gae, lam=1.0), {"worlds": laws.worlds(critic_error=0.7)}),
    "gae, lam 0": (partial(advantages.gae, lam=0.0), {}),
    "gae, lam 0.6": (partial(advantages.gae, lam=0.6), {}),
    "td": (partial(advantages.td, steps=2), {}),
    "turn_gae": (partial(advantages.turn_gae, lam=0.5), {}),
    "vtrace": (partial(advantages.vtrace, lam=0.5), {}),
    "token-sum": (advantages.rloo, {"mode": "token-sum", "up_to": "scale"}),
    "a constant length": (advantages.rloo, {"mode": "seq-mean-token-sum-norm", "up_to": "scale"}),
    "k1 in the reward, to go": (reinforce, {"kl": KL("k1", 0.7)}),
    "k1+ in the reward, rloo": (advantages.rloo, {"kl": KL("k1+", 0.7), "n": 3}),
    "k1 in the reward, gae": (partial(advantages.gae, lam=0.6), {"kl": KL("k1", 0.7)}),
    "k3 in the loss": (advantages.rloo, {"kl": loss_kl("k3", "reverse")}),
    "abs in the loss": (advantages.rloo, {"kl": loss_kl("abs", "variation")}),
    **{f"{kind} in the loss": (advantages.rloo, {"kl": loss_kl(kind)}) for kind in ("k2", "k1+", "abs+", "k2+", "k3+")},
    "lag, sequence weights": (advantages.rloo, {"correct": sequence}),
    "lag, sequence weights, k1 in the reward": (reinforce, {"correct": sequence, "kl": KL("k1", 0.7)}),
    "lag, ratios of one token": (
        advantages.rloo,
        {"old_log_probs": "engine", "loss_fn": partial(losses.ppo_clip, clip_low=1.0, clip_high=1e9, dual_clip=None)}
        | {"worlds": [laws.world(vocabulary=4, horizon=1, lag=0.5)]},
    ),
    **{f"{name} at ratio 1": (advantages.rloo, {"loss_fn": getattr(losses, name)}) for name in ON_POLICY},
}


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_holds_in_expectation(claim):
    estimator, how = CLAIMS[claim]
    laws.check_gradient(estimator, **how)


def against(scores, mask, groups):
    """Advantages that point away from the objective, in the whole size of its gradient."""
    found = advantages.rloo(scores, mask, groups)
    return found._replace(advantages=-found.advantages)


BIASED = {
    "the objective's opposite": (against, {"up_to": "scale"}),
    "opo with the own score in its mean": (advantages.opo, {"up_to": "scale"}),
    "optimal token baseline with the own return": (advantages.optimal_token_baseline, {"up_to": "scale"}),
    "grpo of scores that are not binary": (advantages.grpo, {"n": 3, "up_to": "scale"}),
    "a critic that errs, lam 0": (
        partial(advantages.gae, lam=0.0),
        {"up_to": "scale", "worlds": laws.worlds(critic_error=0.7)},
    ),
    "a decay by the length, which later tokens decide": (partial(advantages.gae, lam_alpha=0.6), {"up_to": "scale"}),
    "token-mean": (advantages.rloo, {"mode": "token-mean", "up_to": "scale"}),
    "a mean over the tokens of each row": (advantages.rloo, {"mode": "seq-mean-token-mean", "up_to": "scale"}),
    "k2 in the reward": (advantages.rloo, {"kl": KL("k2", 0.7), "up_to": "scale"}),
    "k1 in the loss": (advantages.rloo, {"kl": loss_kl("k1"), "up_to": "scale"}),
    "lag, token weights": (reinforce, {"correct": token, "up_to": "scale"}),
    "whole batches": (advantages.reinforce_plus_plus, {"up_to": "scale"}),
}


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_is_found(name):
    estimator, how = BIASED[name]
    with pytest.raises(LawViolation) as caught:
        laws.check_gradient(estimator, **how)
    assert caught.value.law == "expectation"
    assert "it raised" not in str(caught.value)


@pytest.mark.parametrize("n", [2, 4])
def test_grpo_without_std_is_shorter_by_the_own_score_in_its_mean(n):
    found = laws.bias(partial(advantages.grpo, scale="none"), world=laws.world(vocabulary=2), n=n)
    assert found.scale == pytest.approx((n - 1) / n)
    assert found.turned < 1e-12
    assert found.cosine == pytest.approx(1)
    assert found.error == pytest.approx(1 / n)


def test_noise_is_that_of_drawn_batches():
    """Of the policy gradient of one row, whose mean and variance are written out here."""
    world = laws.world(seed=3)
    found = laws.bias(reinforce, world=world, n=1)
    leaf = world.logits.clone().requires_grad_()
    log_p = world.log_probs(leaf)[0].sum(-1)
    each = torch.stack(
        [torch.autograd.grad(-s * x, leaf, retain_graph=True)[0] for s, x in zip(world.scores[0], log_p)]
    )
    chance = log_p.detach().exp()
    mean = torch.einsum("s,sabc->abc", chance, each)
    spread = torch.einsum("s,sabc->", chance, (each - mean).square()).sqrt()
    torch.testing.assert_close(found.mean, mean.flatten())
    assert found.noise == pytest.approx(float(spread / mean.norm()))
    assert laws.bias(reinforce, world=world, n=4).noise == pytest.approx(found.noise / 2)


def test_a_whole_batch_estimator_is_called_batch_by_batch():
    """One that divides by a number of its whole batch: what stands in other batches must not reach it."""

    def by_longest(scores, mask, groups):
        rows = advantages.rloo(scores, mask, groups).advantages
        return rows / mask.sum(1).amax()

    world = laws.world(vocabulary=2, horizon=2)
    found = laws.bias(by_longest, world=world)
    rows, p = world.log_probs(world.logits)[0].sum(-1).exp(), world.slopes()[0].sum(1)
    length, scores = world.mask.sum(1), world.scores[0]
    mean = torch.zeros(p.shape[1]).double()
    for a in range(len(rows)):
        for b in range(len(rows)):
            difference = (scores[a] - scores[b]) / max(length[a], length[b])
            mean -= rows[a] * rows[b] * difference * (p[a] - p[b]) / 2
    torch.testing.assert_close(found.mean, mean)


def test_a_violation_can_be_run_again():
    with pytest.raises(LawViolation) as caught:
        laws.check_gradient(advantages.grpo, kl=KL("k1", 0.25), n=3)
    text = str(caught.value)
    assert text.startswith('grpo breaks the law "expectation"')
    assert 'give up_to="scale"' in text
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    program = [line for line in lines if not line.startswith(("prompt", "print"))]
    shown = next(line for line in lines if line.startswith("print(")).removeprefix("print(").removesuffix(")")
    scope = {"grpo": advantages.grpo}
    exec("\n".join([*program, f"found = {shown}"]), scope)
    assert f"{scope['found'].scale:.6g} of its size" in text
    rows = [line for line in lines if line.startswith("prompt 0, tokens")]
    assert len(rows) == 3
    assert all("score" in row and "advantages" in row for row in rows)


def test_a_function_that_raises_breaks_the_law():
    def broken(scores, mask, groups):
        raise RuntimeError("out of scores")

    with pytest.raises(LawViolation, match="it raised RuntimeError: out of scores"):
        laws.check_gradient(broken)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="up_to must be"):
        laws.check_gradient(advantages.rloo, up_to="sign")
    with pytest.raises(ValueError, match="give 1, 2 and 1 or more"):
        laws.world(vocabulary=1)
    with pytest.raises(ValueError, match="'kind' must be in"):
        KL("k4")
    from fppo.steps.actor import SelectiveLoss

    with pytest.raises(ValueError, match="kl_cov selects tokens by noise"):
        laws.bias(advantages.rloo, world=laws.world(), loss_fn=SelectiveLoss(losses.kl_cov, losses.select_kl_cov))


@pytest.mark.parametrize("gap", [False, True])
def test_a_world_is_what_its_logits_say(gap):
    """Chances add up to 1; the first value is the expected score; slopes are those of autograd."""
    world = laws.world(prompts=2, gap=gap, seed=5)
    leaf = world.logits.clone().requires_grad_()
    log_probs = world.log_probs(leaf)
    chance = log_probs.sum(-1).exp().detach()
    torch.testing.assert_close(chance.sum(1), torch.ones(2).double())
    expected = (chance * world.scores).sum(1)
    torch.testing.assert_close(world.values()[:, :, 0], expected[:, None].expand_as(world.scores))
    torch.testing.assert_close(world.objective(world.logits), expected.mean())
    ones = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slope = torch.autograd.grad((ones * log_probs).sum(), leaf)[0].flatten()
    torch.testing.assert_close(torch.einsum("pst,pstk->k", ones, world.slopes()), slope)
    inside = world.mask.expand(2, -1, -1)
    off = attrs.evolve(world, value_errors=world.value_errors + 1.5).values()
    torch.testing.assert_close(off[inside], world.values()[inside] + 1.5)
