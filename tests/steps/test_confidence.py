"""A critic of the policy's confidence reads what came before, and learns what it foretells."""

import math

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import metrics, tree
from fppo.key import Key
from fppo.steps.confidence import SIGNS, UpdateConfidence, confidence_values, init_confidence, signs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.ranks import mini_batches
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny


def one_by_one(log_probs, entropy, mask):
    """The signs of a row, token by token."""
    for t in range(len(mask)):
        said = [log_probs[i] for i in range(t) if mask[i]]
        total, least, last = sum(said), min(said, default=0.0), said[-1] if said else 0.0
        own = entropy[t] if mask[t] else 0.0
        logs = [max(total / 5, -2.0), max(least / 5, -2.0)]
        shown = 1 - 1 / (1 + len(said))
        yield [math.exp(total), math.exp(least), math.exp(last), *logs, own, math.exp(-own), shown]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**16))
def test_signs_are_of_what_came_before(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    log_probs = -15 * torch.rand(rows, width, generator=generator, dtype=torch.float64)  # beyond the bound of -10
    entropy = 2 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    garbage = torch.tensor(float("nan"), dtype=torch.float64)
    found = signs(log_probs.where(mask, garbage), entropy.where(mask, garbage), mask)
    assert found.shape == (rows, width, SIGNS)
    for row in range(rows):
        expected = list(one_by_one(log_probs[row].tolist(), entropy[row].tolist(), mask[row].tolist()))
        torch.testing.assert_close(found[row], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def task(rows=6):
    batch = tiny.experience(0, rows)
    generator = torch.Generator().manual_seed(1)
    entropy = torch.rand(batch.response_mask.shape, generator=generator, dtype=torch.float64)
    params = {name: x.double() for name, x in init_confidence(Key(0), width=5).items()}
    params["out_weight"] += 0.3
    old = confidence_values(params, batch.old_log_probs, entropy, batch.response_mask)
    return params, attrs.evolve(batch, entropy=entropy, values=old)


def test_an_update_is_a_step_down_the_squared_error():
    params, batch = task()
    rate, decay = 0.01, 0.1
    optimizer = adamw(schedule("constant", rate, total_steps=9), weight_decay=decay, max_grad_norm=None)
    loop = Loop(mini_batch_size=6, micro_batching=MicroBatching(size=6))
    after, report = UpdateConfidence(loop=loop, optimizer=optimizer)(init_state(params, optimizer), batch)
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    theirs = torch.optim.AdamW(leaves.values(), lr=rate, weight_decay=decay)
    mask = batch.response_mask
    read = signs(batch.old_log_probs, batch.entropy, mask)
    hidden = torch.nn.functional.gelu(read @ leaves["in_weight"].T + leaves["in_bias"])
    values = (hidden @ leaves["out_weight"].T + leaves["out_bias"])[..., 0]
    loss = 0.5 * (values - batch.returns)[mask].square().mean()
    loss.backward()
    theirs.step()
    for name, x in leaves.items():
        torch.testing.assert_close(after.params[name], x.detach(), rtol=1e-9, atol=1e-12)
    assert metrics.report(report)["critic/vf_loss"] == pytest.approx(loss.item())
    assert after.step == 1


def test_mini_batches_are_updates_one_after_the_other():
    params, batch = task()
    optimizer = adamw(schedule("constant", 0.01, total_steps=9))
    loop, key = Loop(mini_batch_size=2, micro_batching=MicroBatching(size=2), epochs=2), Key(3)
    one = attrs.evolve(loop, epochs=1)
    whole, _ = UpdateConfidence(loop=loop, optimizer=optimizer)(init_state(params, optimizer), batch, key=key)
    state = init_state(params, optimizer)
    drawn = [mini_batches(batch.row_ids, 2, key=key.fold("epoch", epoch)) for epoch in range(2)]
    assert [x.tolist() for x in drawn[0]] != [x.tolist() for x in drawn[1]]
    for numbers in drawn[0] + drawn[1]:
        state, _ = UpdateConfidence(loop=one, optimizer=optimizer)(state, batches.rows(batch, numbers))
    assert tree.digest(whole) == tree.digest(state)
    assert whole.step == 6


def test_it_learns_what_confidence_foretells_and_changes_no_argument():
    params, batch = task(64)
    mask = batch.response_mask
    returns = signs(batch.old_log_probs, batch.entropy, mask)[..., 1].where(mask, 0.0)
    batch = attrs.evolve(batch, returns=returns)
    optimizer = adamw(schedule("constant", 0.01, total_steps=9), weight_decay=0.0)
    loop = Loop(mini_batch_size=16, micro_batching=MicroBatching(size=16), epochs=30)
    state = init_state(params, optimizer)
    copy = tree.copy((state, batch))
    after, _ = UpdateConfidence(loop=loop, optimizer=optimizer)(state, batch, key=Key(3))
    assert tree.digest((state, batch)) == tree.digest(copy)
    values = confidence_values(after.params, batch.old_log_probs, batch.entropy, mask)
    assert (values - returns)[mask].square().mean() < 0.1 * returns[mask].var()
    assert not values[~mask].any()


def test_what_was_not_annotated_is_refused():
    params, batch = task()
    optimizer = adamw(schedule("constant", 0.01, total_steps=9))
    loop = Loop(mini_batch_size=6, micro_batching=MicroBatching(size=6))
    with pytest.raises(ValueError, match="needs entropies"):
        UpdateConfidence(loop=loop, optimizer=optimizer)(
            init_state(params, optimizer), attrs.evolve(batch, entropy=None)
        )


def test_members_of_an_ensemble_begin_with_weights_of_their_own():
    weights = init_confidence(Key(0), members=3)["in_weight"]
    assert all(not torch.equal(weights[i], weights[j]) for i in range(3) for j in range(i))
