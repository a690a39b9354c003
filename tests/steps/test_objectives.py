"""The objectives' definitions: the gradients of whole updates against objectives written by hand, token by token.

The model is transformers' own, one row at a time, without padding, in float64.
"""

from functools import partial

import attrs
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fppo import batch as batches
from fppo import losses, metrics
from fppo.models.precision import KeepDouble
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_values
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw, sgd
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny

ACTOR, ACTOR_PARAMS = tiny.model_and_params("lm")
CRITIC, CRITIC_PARAMS = tiny.model_and_params("value", seed=1)
ROWS, HORIZON, CLIP, DUAL_CLIP, VALUE_CLIP = 6, 9, 0.2, 1.1, 0.5
GRADIENT = adamw(schedule("constant", 1e-3), betas=(0.0, 0.9), max_grad_norm=None)  # its first moment is the gradient
TERMS = PolicyTerms(temperature=1.3, entropy_coef=0.3, kl_coef=0.7)


def _loop(mode):
    horizon = HORIZON if mode == "seq-mean-token-sum-norm" else None
    cut = MicroBatching(size=2)
    return Loop(mini_batch_size=ROWS, micro_batching=cut, weight_mode=mode, horizon=horizon)


def _plain(params):
    module = AutoModelForCausalLM.from_config(tiny.config(), dtype=torch.float64, attn_implementation="eager").eval()
    module.load_state_dict({name: x for name, x in params.items() if "score" not in name}, strict=False)
    module.tie_weights()
    return module


def _weight(mask, row, mode):
    """Of a token of the row, by the mode's definition."""
    rows = sum(1 for other in mask if other.any())
    return {
        "token-mean": 1 / int(mask.sum()),
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / rows,
        "seq-mean-token-mean": 1 / (rows * int(mask[row].sum())),
        "seq-mean-token-sum-norm": 1 / (rows * HORIZON),
    }[mode]


def _places(batch):
    """Of each token in the mask: its row and column, its number among the row's real tokens, and those."""
    prompt = batch.tokens.shape[1] - batch.response_mask.shape[1]
    for row, column in batch.response_mask.nonzero().tolist():
        attended = batch.attention_mask[row]
        yield row, column, int(attended[: prompt + column].sum()), batch.tokens[row][attended]


KL = {"abs": lambda d: d.abs(), "k2": lambda d: d**2 / 2, "k3": lambda d: (-d).exp() - 1 + d}


def _policy_gradient(batch, mode, terms, *, on_policy=False):
    """The objective's parts, and the gradient of their sum."""
    module = _plain(ACTOR_PARAMS)
    parts = {"pg": 0.0, "entropy": 0.0, "kl": 0.0} | ({"nll": torch.zeros(())} if terms.nll_coef else {})
    positive = [int(mask.sum()) * (score > 0) for mask, score in zip(batch.response_mask, batch.scores, strict=True)]
    for row, column, place, tokens in _places(batch):
        with KeepDouble():
            logits = module(tokens[None]).logits[0, place - 1]
        every = torch.log_softmax(logits / terms.temperature, -1)
        new = every[tokens[place]]
        old = new.detach() if on_policy else batch.old_log_probs[row, column]
        advantage, ratio = batch.advantages[row, column], (new - old).exp()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        if advantage < 0:
            policy = torch.minimum(policy, -DUAL_CLIP * advantage)
        correction = 1.0 if batch.correction_weights is None else batch.correction_weights[row, column]
        policy = policy * correction
        weight = _weight(batch.response_mask, row, mode)
        parts["pg"] += weight * policy
        if batch.entropy_mask is None or batch.entropy_mask[row, column]:
            parts["entropy"] -= weight * terms.entropy_coef * -(every.exp() * every).sum()
        from_sampled = ratio.detach() * correction  # how much likelier the policy says the token than what sampled it
        divergence = KL[terms.kl_kind](new - batch.ref_log_probs[row, column])
        parts["kl"] += weight * terms.kl_coef * from_sampled * divergence
        if terms.nll_coef and positive[row]:
            parts["nll"] = parts["nll"] - terms.nll_coef * new / sum(positive)
    names, leaves = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(sum(parts.values()), leaves)
    return {name: float(x.detach()) for name, x in parts.items()}, dict(zip(names, grads, strict=True))


def _value_gradient(batch, mode):
    module = _plain(CRITIC_PARAMS)
    head = {name: CRITIC_PARAMS[name].clone().requires_grad_() for name in ("score.weight", "score.bias")}
    total = 0.0
    for row, column, place, tokens in _places(batch):
        with KeepDouble():
            hidden = module.model(tokens[None]).last_hidden_state[0, place - 1]
        value = F.linear(hidden, head["score.weight"], head["score.bias"])[0]
        old, target = batch.values[row, column], batch.returns[row, column]
        clipped = torch.clamp(value, old - VALUE_CLIP, old + VALUE_CLIP)
        worse = torch.maximum((value - target) ** 2, (clipped - target) ** 2)
        total = total + _weight(batch.response_mask, row, mode) * worse / 2
    leaves = {name: x for name, x in module.named_parameters() if name in CRITIC_PARAMS} | head
    grads = torch.autograd.grad(total, list(leaves.values()))
    return float(total.detach()), dict(zip(leaves, grads, strict=True))


def _assert_gradient(state, expected):
    assert state.opt.mu.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(state.opt.mu[name], grad, atol=1e-12, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def _batch(seed, *, corrected=False):
    """Rows far enough off the policy that both clips are at work."""
    batch = tiny.experience(seed, ROWS)
    if not corrected:
        return batch
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(batch.advantages.shape, generator=generator, dtype=torch.float64)
    explored = torch.rand(weights.shape, generator=generator) < 0.6
    return batches.extend(type(batch), batch, correction_weights=weights, entropy_mask=explored)


def _updated(batch, mode, terms, source="pass"):
    return UpdateActor(
        forward=Forward(ACTOR),
        loss_fn=partial(losses.ppo_clip, clip_low=CLIP, clip_high=CLIP, dual_clip=DUAL_CLIP),
        loop=_loop(mode),
        optimizer=GRADIENT,
        terms=terms,
        old_log_probs=source,
    )(init_state(ACTOR_PARAMS, GRADIENT), batch)


@pytest.mark.slow
@pytest.mark.parametrize("mode", losses.MODES)
@pytest.mark.parametrize("kind", KL)
def test_the_actors_gradient_is_that_of_its_definition(mode, kind):
    """Policy loss, entropy bonus and KL to the reference (not to the old policy), each with its factor and sign."""
    batch = _batch(losses.MODES.index(mode), corrected=mode != "token-mean")
    terms = PolicyTerms(temperature=1.3, entropy_coef=0.3, kl_coef=0.7, kl_kind=kind)
    state, report = _updated(batch, mode, terms)
    parts, expected = _policy_gradient(batch, mode, terms)
    _assert_gradient(state, expected)
    numbers = metrics.report(report)
    for name, part in parts.items():
        assert numbers[f"actor/{name}_loss"] == pytest.approx(part, rel=1e-9), name
    assert 0 < numbers["actor/pg_clipfrac"] < 1
    assert numbers["actor/pg_clipfrac_lower"] > 0


def test_a_kl_term_without_a_gradient_is_refused():
    with pytest.raises(ValueError, match=r"kl kind 'k1' as a loss has an expected gradient of 0.*actor\.kl_kind"):
        _updated(_batch(0), "token-mean", attrs.evolve(TERMS, kl_kind="k1"))


def test_positive_responses_pull_by_the_mean_of_their_own_tokens():
    """Whatever the weights of the policy loss: VAPO's mean is over the tokens of right responses alone."""
    terms = PolicyTerms(temperature=1.3, entropy_coef=0.3, kl_coef=0.7, nll_coef=0.6)
    batch = _batch(3)
    for scores in (torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5, 0.1]), -torch.ones(ROWS)):
        batch = attrs.evolve(batch, scores=scores)
        state, report = _updated(batch, "seq-mean-token-sum", terms)
        parts, expected = _policy_gradient(batch, "seq-mean-token-sum", terms)
        _assert_gradient(state, expected)
        assert metrics.report(report)["actor/nll_loss"] == pytest.approx(parts["nll"], rel=1e-9)


@pytest.mark.parametrize("left_out", ["entropy_coef", "kl_coef"])
def test_a_term_with_the_factor_0_is_not_there(left_out):
    batch = _batch(7)
    terms = PolicyTerms(**{"temperature": 1.3, "entropy_coef": 0.3, "kl_coef": 0.7, left_out: 0.0})
    state, report = _updated(batch, "token-mean", terms)
    _assert_gradient(state, _policy_gradient(batch, "token-mean", terms)[1])
    assert f"actor/{left_out.removesuffix('_coef')}_loss" not in report


@pytest.mark.parametrize("source", ["engine", "update"])
def test_the_old_log_probs_are_the_batchs_or_the_passs_own(source):
    batch = _batch(8)
    state, _ = _updated(batch, "token-mean", TERMS, source)
    _assert_gradient(state, _policy_gradient(batch, "token-mean", TERMS, on_policy=source == "update")[1])


@pytest.mark.parametrize("mode", losses.MODES)
def test_the_critics_gradient_is_that_of_its_definition(mode):
    batch = _batch(losses.MODES.index(mode))
    state, report = UpdateCritic(
        forward=Forward(CRITIC),
        loop=_loop(mode),
        optimizer=GRADIENT,
        loss_fn=partial(losses.value_loss, clip=VALUE_CLIP),
    )(init_state(CRITIC_PARAMS, GRADIENT), batch)
    total, expected = _value_gradient(batch, mode)
    _assert_gradient(state, expected)
    numbers = metrics.report(report)
    assert numbers["critic/vf_loss"] == pytest.approx(total, rel=1e-9)
    values = compute_values(CRITIC_PARAMS, batch, forward=Forward(CRITIC), micro_batching=MicroBatching(size=ROWS))
    assert numbers["critic/vpred_mean"] == pytest.approx(values[batch.response_mask].mean().item(), rel=1e-6)
    assert 0 < numbers["critic/vf_clipfrac"] < 1


def test_the_gap_to_the_engine_is_that_of_the_first_mini_batch_alone():
    batch = tiny.experience(3, ROWS)
    loop = Loop(mini_batch_size=2, micro_batching=MicroBatching(size=2), epochs=2)
    update = UpdateActor(
        forward=Forward(ACTOR), loss_fn=losses.ppo_clip, loop=loop, optimizer=GRADIENT, old_log_probs="engine"
    )
    _, report = update(init_state(ACTOR_PARAMS, GRADIENT), batch)
    assert report["training/rollout_equal"].count == batch.response_mask[:2].sum()


@pytest.mark.parametrize("source", ["pass", "engine", "update"])
def test_a_loss_of_ones_own_sees_old_log_probs_as_constants(source):
    seen = []

    def ratio(log_probs, old_log_probs, advantages, mask):
        seen.append((log_probs.requires_grad, old_log_probs.requires_grad))
        return -(log_probs - old_log_probs).exp() * advantages, {}

    model, params = tiny.model_and_params()
    loop = Loop(mini_batch_size=4, micro_batching=MicroBatching(size=4))
    optimizer = sgd(lambda step: 0.1)
    stage = UpdateActor(forward=Forward(model), loss_fn=ratio, loop=loop, optimizer=optimizer, old_log_probs=source)
    state, _ = stage(init_state(params, optimizer), tiny.experience(1, 4))
    assert seen == [(True, False)]
    assert any(not torch.equal(x, params[name]) for name, x in state.params.items())
