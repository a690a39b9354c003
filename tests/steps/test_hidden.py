"""A critic of the policy's hidden states reads what its head reads, and is a step down its loss."""

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import metrics
from fppo.batch import Column
from fppo.key import Key
from fppo.steps.hidden import UpdateHidden, hidden_values, init_hidden
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw, sgd
from fppo.steps.perceptron import member_of
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny

WIDTH, SIZE = 3, 5


def task():
    batch = tiny.experience(0, 6)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn((*batch.response_mask.shape, SIZE), generator=generator, dtype=torch.float64)
    hidden = hidden.where(batch.response_mask[..., None], torch.nan)
    params = {name: x.double() for name, x in init_hidden(Key(0), SIZE, width=WIDTH).items()}
    params["out_weight"] += 0.3
    params["out_bias"] -= 0.1
    return params, attrs.evolve(batch, hidden=hidden, values=hidden_values(params, hidden, batch.response_mask))


def by_hand(params, hidden):
    """The value of one token, number by number."""
    total = params["out_bias"][0]
    for k in range(WIDTH):
        x = params["in_bias"][k] + sum(params["in_weight"][k, i] * hidden[i] for i in range(SIZE))
        total = total + params["out_weight"][0, k] * x * 0.5 * (1 + torch.erf(x / 2**0.5))
    return total


def test_a_step_is_one_down_the_squared_error_of_a_loop():
    params, batch = task()
    rate, decay, mask = 0.01, 0.1, batch.response_mask
    optimizer = adamw(schedule("constant", rate, total_steps=9), weight_decay=decay, max_grad_norm=None)
    loop = Loop(mini_batch_size=6, micro_batching=MicroBatching(size=6))
    after, report = UpdateHidden(loop=loop, optimizer=optimizer)(init_state(params, optimizer), batch)
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    theirs = torch.optim.AdamW(leaves.values(), lr=rate, weight_decay=decay)
    values = torch.stack([by_hand(leaves, batch.hidden[b, t]) for b, t in mask.nonzero().tolist()])
    torch.testing.assert_close(batch.values[mask], values.detach(), rtol=1e-12, atol=1e-12)
    assert not batch.values[~mask].any()
    loss = 0.5 * (values - batch.returns[mask]).square().mean()
    loss.backward()
    theirs.step()
    for name, x in leaves.items():
        torch.testing.assert_close(after.params[name], x.detach(), rtol=1e-9, atol=1e-12)
    assert metrics.report(report)["critic/vf_loss"] == pytest.approx(loss.item())
    assert (params["out_weight"] != after.params["out_weight"]).all()


def test_what_was_not_annotated_is_refused():
    params, batch = task()
    optimizer = adamw(schedule("constant", 0.01, total_steps=9))
    loop = Loop(mini_batch_size=6, micro_batching=MicroBatching(size=6))
    update, state = UpdateHidden(loop=loop, optimizer=optimizer), init_state(params, optimizer)
    with pytest.raises(ValueError, match="needs hidden states"):
        update(state, attrs.evolve(batch, hidden=None))
    with pytest.raises(ValueError, match="needs values in the batch"):
        update(state, attrs.evolve(batch, values=None))
    mean = attrs.evolve(update, loss_fn=lambda values, old, returns, mask: ((values - returns).square().mean(), {}))
    with pytest.raises(ValueError, match=r"the value loss is \[\], expected \[B, T\]"):
        mean(state, batch)


def test_members_of_an_ensemble_learn_from_their_own_prompts_alone():
    _, batch = task()
    mask, members = batch.response_mask, 4
    batch = attrs.evolve(batch, ids=Column([f"train.jsonl:{i // 2}" for i in range(6)]))
    params = {name: x.double() for name, x in init_hidden(Key(0), SIZE, width=WIDTH, members=members).items()}
    params["out_weight"] += torch.arange(1.0, members + 1)[:, None, None]
    values = hidden_values(params, batch.hidden, mask)
    alone = [{name: x[n] for name, x in params.items()} for n in range(members)]
    each = torch.stack([hidden_values(own, batch.hidden, mask) for own in alone])
    torch.testing.assert_close(values, each, rtol=1e-12, atol=1e-12)
    member = member_of(list(batch.ids), members).tolist()
    assert member[::2] == member[1::2]
    assert len(set(member)) > 1
    batch = attrs.evolve(batch, values=values.mean(0))
    optimizer = sgd(schedule("constant", 1.0, total_steps=9), max_grad_norm=None)
    loop = Loop(mini_batch_size=6, micro_batching=MicroBatching(size=6), weight_mode="token-sum")
    after, _ = UpdateHidden(loop=loop, optimizer=optimizer)(init_state(params, optimizer), batch)
    for n, own in enumerate(alone):
        rows = [row for row in range(6) if member[row] == n]
        if not rows:
            assert all(torch.equal(after.params[name][n], x) for name, x in own.items())
            continue
        state = init_state(own, optimizer)
        part, small = batches.rows(batch, rows), attrs.evolve(loop, mini_batch_size=len(rows))
        expected, _ = UpdateHidden(loop=small, optimizer=optimizer)(state, part)
        for name, x in expected.params.items():
            torch.testing.assert_close(after.params[name][n], x, rtol=1e-9, atol=1e-12)
