"""Updates of small critics and of demonstrations, and numbers of routers, each by its definition written as loops."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import losses, metrics
from fppo.batch import Column
from fppo.key import Key
from fppo.metrics import Sum
from fppo.steps.clock import Clock, Timeline, UpdateTurn
from fppo.steps.confidence import init_confidence
from fppo.steps.experts import rank_loads, rerouted, split_loads
from fppo.steps.hidden import UpdateHidden, hidden_values, init_hidden
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.perceptron import init_perceptron, member_of
from fppo.steps.ranks import mini_batches
from fppo.steps.schedules import schedule
from fppo.steps.supervised import demonstrations
from fppo.steps.train_state import init_state
from tests import tiny

MICRO = MicroBatching(size=2)


# routers


@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 3), st.integers(1, 2), st.integers(0, 1000))
def test_other_choices_are_counted_token_by_token(rows, width, layers, count, seed):
    """In any order of the choices, and without the last token of a row, which no engine runs."""
    draw = torch.Generator().manual_seed(seed)
    engine, own = (torch.randint(4, (rows, width, layers, count), generator=draw) for _ in range(2))
    own = torch.where(torch.rand(rows, width, 1, 1, generator=draw) < 0.5, engine.flip(-1), own)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=draw)
    start = (torch.rand(rows, 1, generator=draw) * (width - lengths + 1)).long()
    mask = (torch.arange(width) >= start) & (torch.arange(width) < start + lengths)
    tokens = choices = ran = 0
    for row in range(rows):
        places = mask[row].nonzero().flatten().tolist()
        for place in places[:-1]:
            apart = [
                sorted(engine[row, place, i].tolist()) != sorted(own[row, place, i].tolist()) for i in range(layers)
            ]
            ran, tokens, choices = ran + 1, tokens + any(apart), choices + sum(apart)
    found = rerouted(engine, own, mask)
    assert [x.item() for x in found["training/rerouted/tokens"]] == [tokens, ran]
    assert [x.item() for x in found["training/rerouted/choices"]] == [choices, ran * layers]


def test_loads_are_the_fullest_over_the_mean_of_experts_and_of_ranks():
    loads = torch.tensor([[6.0, 2.0, 0.0, 0.0, 3.0, 1.0], [1.0, 1.0, 4.0, 4.0, 1.0, 1.0]]).double()
    routers = [SimpleNamespace(layer=1), SimpleNamespace(layer=3)]
    report = {"actor/expert_load": Sum(loads), "other": metrics.mean(3.0)}
    rest, sums = split_loads(report, "actor", routers)
    assert sums is loads
    numbers = {name: metrics.report({name: x})[name] for name, x in rest.items()}
    both = [sum(int(x) for x in column) for column in loads.T]
    ranks = {2: [sum(both[:3]), sum(both[3:])], 3: [both[0] + both[1], both[2] + both[3], both[4] + both[5]], 6: both}
    assert numbers == pytest.approx(
        {
            "other": 3.0,
            "actor/expert_load/1": 6 / 2,
            "actor/expert_load/3": 4 / 2,
            "actor/expert_load/max": 3.0,
            **{f"actor/expert_load/of_{n}_ranks": max(x) * n / sum(x) for n, x in ranks.items()},
        }
    )
    assert rank_loads(loads, 2).tolist() == pytest.approx([x * 2 / sum(both) for x in ranks[2]])
    assert split_loads({"other": report["other"]}, "actor", routers) == ({"other": report["other"]}, None)
    empty, _ = split_loads({"a/expert_load": Sum(0 * loads)}, "a", routers)
    assert all(math.isfinite(metrics.report({name: x})[name]) for name, x in empty.items())


# small critics


def test_a_perceptron_begins_as_wide_as_its_inputs_and_gives_0():
    """Inputs of the truth count; members of an ensemble, and critics of other kinds, draw their own."""
    params = init_perceptron(Key(3), 300, width=200, outputs=2, signs=100)
    assert {name: x.shape for name, x in params.items()} == {
        "in_weight": (200, 400),
        "in_bias": (200,),
        "out_weight": (2, 200),
        "out_bias": (2,),
    }
    assert all(x.dtype == torch.float32 for x in params.values())
    assert float(params["in_weight"].std()) == pytest.approx(1 / 20, rel=0.02)
    assert not any(params[name].any() for name in ("in_bias", "out_weight", "out_bias"))
    three = init_perceptron(Key(3), 5, width=4, outputs=1, members=3, signs=2)
    for n in range(3):
        own = init_perceptron(Key(3).fold("member", n), 7, width=4, outputs=1)
        assert all(torch.equal(three[name][n], x) for name, x in own.items())
    hidden, confident = (
        init_hidden(Key(1), 8, width=4, outputs=3, signs=1),
        init_confidence(Key(1), width=4, outputs=3, signs=1),
    )
    assert torch.equal(hidden["in_weight"], init_perceptron(Key(1).fold("hidden"), 9, width=4, outputs=3)["in_weight"])
    assert {name: x.shape for name, x in confident.items()} == {name: x.shape for name, x in hidden.items()}
    assert not torch.equal(confident["in_weight"], hidden["in_weight"])


HEAD = losses.two_hot_head(bins=5, low=-2.0, high=2.0)


def task(*, members, outputs, truth):
    batch, draw = tiny.experience(1, 8), torch.Generator().manual_seed(2)
    mask = batch.response_mask
    hidden = torch.randn((*mask.shape, 3), generator=draw, dtype=torch.float64)
    signs = torch.randn((*mask.shape, 2), generator=draw, dtype=torch.float64) if truth else None
    init = init_hidden(Key(0), 3, width=4, outputs=outputs, members=members, signs=2 * truth)
    params = {
        name: x.double() + 0.2 * torch.randn(x.shape, generator=draw, dtype=torch.float64) for name, x in init.items()
    }
    read = HEAD.read if outputs > 1 else losses.value.first_output
    values = hidden_values(params, hidden, mask, signs, read=read)
    values = values.mean(0) if members > 1 else values
    ids = Column([f"row {i // 2}" for i in range(8)])
    return params, attrs.evolve(batch, hidden=hidden, truth_signs=signs, values=values, ids=ids)


def values_of(params, batch, outputs):
    """Outputs [b, T] or [b, T, K] of each row by its own member, one row after the other."""
    found = []
    stacked = params["in_weight"].dim() == 3
    member = member_of(list(batch.ids), len(params["in_weight"]) if stacked else 1).tolist()
    for row, n in enumerate(member):
        own = {name: x[n] for name, x in params.items()} if stacked else params
        seen = (
            batch.hidden[row]
            if batch.truth_signs is None
            else torch.cat([batch.hidden[row], batch.truth_signs[row]], 1)
        )
        inner = torch.nn.functional.gelu(seen @ own["in_weight"].T + own["in_bias"])
        found.append(inner @ own["out_weight"].T + own["out_bias"])
    return torch.stack(found)[..., 0] if outputs == 1 else torch.stack(found)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("outputs", [1, 5])
@pytest.mark.parametrize("truth", [False, True])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_small_critics_learn_in_epochs_of_mini_batches_at_the_rates_of_their_clock(members, outputs, truth, mode):
    params, batch = task(members=members, outputs=outputs, truth=truth)
    rate = schedule("linear", 0.5, total_steps=12, warmup_steps=3)
    optimizer, key = sgd(rate, max_grad_norm=None), Key(4)
    horizon = 7 if mode == "seq-mean-token-sum-norm" else None
    loss_fn = HEAD.loss_fn if outputs > 1 else partial(losses.value_loss, clip=None)
    how = {"mini_batch_size": 3, "micro_batching": MICRO, "epochs": 2, "weight_mode": mode, "horizon": horizon}
    loop = Loop(**how, timeline=Timeline(3, 12))
    state = attrs.evolve(init_state(params, optimizer), clock=Clock(first=0, step=0, steps=2))
    after, report = UpdateHidden(loop=loop, optimizer=optimizer, loss_fn=loss_fn)(state, batch, key=key)
    own, numbers, number = {name: x.clone() for name, x in params.items()}, [], 0
    for epoch in range(2):
        for index in mini_batches(batch.row_ids, 3, key=key.fold("epoch", epoch)):
            part = batches.rows(batch, index)
            leaves = {name: x.clone().requires_grad_() for name, x in own.items()}
            mask = part.response_mask
            loss, _ = loss_fn(values_of(leaves, part, outputs), part.values, part.returns, mask)
            weights = losses.loss_weights(mask, mode, totals=losses.count_totals(mask), horizon=horizon)
            total = (weights * loss).sum()
            grads = torch.autograd.grad(total, list(leaves.values()))
            own = {name: x - rate(number) * g for (name, x), g in zip(own.items(), grads, strict=True)}
            numbers.append((float(total.detach()), float(torch.cat([g.flatten() for g in grads]).norm()), rate(number)))
            number += 1
    assert after.step == number == 6
    for name, x in own.items():
        torch.testing.assert_close(after.params[name], x, rtol=1e-9, atol=1e-10, msg=name)
    found = metrics.report(report)
    for name, each in zip(("vf_loss", "grad_norm", "lr"), zip(*numbers, strict=True), strict=True):
        assert found[f"critic/{name}"] == pytest.approx(sum(each) / 6), name
    for name, x in params.items():
        assert torch.equal(state.params[name], x)
    donated, _ = UpdateHidden(loop=loop, optimizer=optimizer, loss_fn=loss_fn)(
        attrs.evolve(state, params={name: x.clone() for name, x in params.items()}), batch, key=key, donate=True
    )
    assert all(torch.equal(donated.params[name], x) for name, x in after.params.items())


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 20), st.integers(0, 30))
def test_an_update_knows_its_place_among_those_of_its_step(size, epochs, episodes, number):
    loop = Loop(mini_batch_size=size, micro_batching=MICRO, epochs=epochs)
    assert loop.turn(number, episodes) is None
    line = Timeline(2, 9)
    each = epochs * math.ceil(episodes / size)
    assert attrs.evolve(loop, timeline=line).turn(number, episodes) == UpdateTurn(line, number, each)


# demonstrations


def test_some_tokens_of_a_response_are_imitated():
    inputs = [None, SimpleNamespace()]
    made = demonstrations(
        [[5, 6], [7]],
        [[8, 9], [9, 10, 1]],
        pad_token_id=3,
        imitated=[[False, True], [True, False, True]],
        inputs=inputs,
    )
    assert made.tokens.tolist() == [[5, 6, 8, 9, 3], [3, 7, 9, 10, 1]]
    assert made.attention_mask.int().tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert made.response_mask.int().tolist() == [[0, 1, 0], [1, 0, 1]]
    assert list(made.inputs) == inputs
    assert demonstrations([[5]], [[6]], pad_token_id=0).inputs is None
