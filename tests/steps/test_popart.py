"""PopArt: the paper's algorithm in its own coordinates, in float64, and what it leaves as it was."""

from functools import partial

import pytest
import torch

from fppo import losses, metrics, tree
from fppo.key import Key
from fppo.steps import (
    Forward,
    Loop,
    MicroBatching,
    Scale,
    UpdateCritic,
    UpdatePopart,
    compute_values,
    forward_micro_batch,
    init_state,
    schedule,
    sgd,
)
from fppo.steps.popart import moved, statistics
from tests import tiny

CRITIC, PARAMS = tiny.model_and_params("value", seed=1)
FORWARD, ROWS, RATE, LR, KEY = Forward(CRITIC), 6, 0.3, 0.05, Key(0)
HEAD = ("score.weight", "score.bias")
VALUES = partial(compute_values, forward=FORWARD, micro_batching=MicroBatching(2))


def batch_of(seed, params):
    """Rows whose returns are far from 0, with the values of these parameters."""
    batch = tiny.experience(seed, ROWS)
    returns = (5.0 + 3.0 * seed + 4.0 * batch.returns).where(batch.response_mask, 0.0)
    return tree.replace(batch, returns=returns, values=VALUES(params, batch))


def papers(batches):
    """The parameters after a step of gradient descent on each batch: W and b give normalised values, sigma and mu make
    values of them, and whenever those change W and b are changed so that the values stay."""
    params, mean, std = {name: x.clone() for name, x in PARAMS.items()}, 0.0, 1.0
    seen: list[list[float]] = []
    for batch in batches:
        mask = batch.response_mask
        seen.append(batch.returns[mask].tolist())
        shares = [(1 - RATE) ** (len(seen) - 1 - i) for i in range(len(seen))]
        first, second = (
            sum(share * sum(x**power for x in own) / len(own) for share, own in zip(shares, seen, strict=True))
            / sum(shares)
            for power in (1, 2)
        )
        new_mean, new_std = first, (second - first**2) ** 0.5
        weight, bias = (params[name] for name in HEAD)
        params |= {HEAD[0]: std / new_std * weight, HEAD[1]: (std * bias + mean - new_mean) / new_std}
        mean, std = new_mean, new_std
        params = {name: x.detach().requires_grad_() for name, x in params.items()}
        found = forward_micro_batch(params, batch, forward=FORWARD, outputs=("values",)).values
        loss = 0.5 * (found - (batch.returns - mean) / std).square()[mask].mean()
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        params = {
            name: (x if grad is None else x - LR * grad).detach()
            for (name, x), grad in zip(params.items(), grads, strict=True)
        }
    params |= {HEAD[0]: std * params[HEAD[0]], HEAD[1]: std * params[HEAD[1]] + mean}
    return params, mean, std


def update(state, batch, *, key, donate):
    loop = Loop(mini_batch_size=ROWS, micro_batching=MicroBatching(4))
    optimizer = sgd(schedule("constant", LR), max_grad_norm=None)
    bound = {"forward": FORWARD, "loop": loop, "optimizer": optimizer}
    return UpdateCritic(loss_fn=partial(losses.value_loss, clip=None), **bound)(state, batch, key=key, donate=donate)


def test_three_steps_are_those_of_the_paper():
    state = tree.replace(init_state(PARAMS, sgd(schedule("constant", LR), max_grad_norm=None)), scale=Scale())
    batches = []
    for seed in range(3):
        batch = batch_of(seed, state.params)
        batches.append(batch)
        before, given = tree.digest(batch), tree.digest(state)
        old, (state, report) = state, UpdatePopart(stage=update, rate=RATE)(state, batch, key=KEY, donate=seed > 0)
        assert tree.digest(batch) == before
        assert seed or tree.digest(old) == given
        said = metrics.report(report)
        expected, mean, std = papers(batches)
        assert said["critic/popart/mean"] == pytest.approx(mean)
        assert said["critic/popart/std"] == pytest.approx(std)
        assert said["critic/vpred_mean"] == pytest.approx(batch.values[batch.response_mask].mean().item())
        for name, x in expected.items():
            torch.testing.assert_close(state.params[name], x, atol=1e-10, rtol=1e-8, msg=name)
    assert mean > 5
    assert std > 1


def test_a_change_of_the_statistics_changes_no_value():
    state = tree.replace(init_state(PARAMS, sgd(schedule("constant", 0.0))), scale=Scale())
    batch = batch_of(2, PARAMS)
    after, _ = UpdatePopart(stage=update_nothing, rate=1.0)(state, batch, key=KEY)
    torch.testing.assert_close(VALUES(after.params, batch), batch.values, atol=1e-12, rtol=1e-12)
    assert after.scale.weight == 1.0


def update_nothing(state, batch, *, key, donate):
    """What the update sees: values of the parameters it is given, and returns of mean 0 and deviation 1."""
    mask = batch.response_mask
    torch.testing.assert_close(VALUES(state.params, batch), batch.values)
    assert batch.returns[mask].mean().item() == pytest.approx(0.0, abs=1e-9)
    assert batch.returns[mask].std(correction=0).item() == pytest.approx(1.0)
    assert not batch.returns[~mask].any()
    return state, {}


def test_batches_without_tokens_or_spread_leave_finite_statistics():
    nothing = torch.zeros(2, 3)
    same = moved(Scale(), nothing, nothing.bool(), rate=0.5)
    assert [x.item() for x in statistics(same)] == [0.0, 1.0]
    equal = moved(Scale(), nothing + 7.0, ~nothing.bool(), rate=0.5)
    assert [x.item() for x in statistics(equal)] == pytest.approx([7.0, 1e-4])


def test_a_state_without_statistics_is_refused():
    state = init_state(PARAMS, sgd(schedule("constant", LR)))
    with pytest.raises(ValueError, match=r"PopArt needs TrainState\.scale.*scale=None, rate=0\.3, values=there"):
        UpdatePopart(stage=update, rate=RATE)(state, batch_of(0, PARAMS), key=KEY)
