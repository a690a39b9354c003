"""Updates of mixtures of experts: replayed choices, loads, the routers' losses and biases, however a batch is split."""

from functools import cache, partial

import attrs
import pytest
import torch
from transformers import Qwen3MoeConfig

from fppo import batch as batches
from fppo import losses, models, tree
from fppo.grad import value_and_grad
from fppo.metrics import mean, report
from fppo.models.routing import Routes
from fppo.runtime.mesh import LOCAL, Sharding, gradient_sum
from fppo.runtime.simulate import simulate
from fppo.steps import experts
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.forward import Forward, compute_outputs, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import CONFIGS, EXPERTS, make

BATCH = tiny.experience(3, 6)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
CUT, WHOLE = MicroBatching(size=2), MicroBatching(size=6)
TERMS = PolicyTerms(temperature=0.9, entropy_coef=0.01, kl_coef=0.1, balance_coef=0.2, router_z_coef=0.05)
OPTIMIZER = adamw(lambda step: 0.1, betas=(0.0, 0.9), eps=1.0, max_grad_norm=1.0)


def packed():
    """The tokens of BATCH in one row, their positions, and where they stand."""
    lengths = BATCH.attention_mask.sum(1).tolist()
    return BATCH.tokens[BATCH.attention_mask], torch.cat([torch.arange(n) for n in lengths]), lengths


def routed(model, params):
    """The logits and choices of all routers on BATCH, packed, in a pass of its own."""
    tokens, positions, lengths = packed()
    attend, routes = models.packed_attention(Kernels.named().attention, make_lengths(lengths)), Routes()
    models.hidden_states(model, params, tokens, positions, attend=attend, routes=routes)
    return [routes.routed[i] for i in range(len(model.routers))]


def replayed(model, params, mesh=LOCAL, micro_batching=CUT, **settings):
    """BATCH with the experts that a pass chooses."""
    forward = Forward(model, mesh=mesh, **settings)
    own = BATCH if mesh["shard"].size == 1 else batches.rows(BATCH, range(mesh["shard"].rank, 6, mesh["shard"].size))
    out = compute_outputs(params, own, forward=forward, micro_batching=micro_batching, outputs=("routed",))
    return tree.replace(own, routed=out.routed)


@cache
def made(name):
    """A model, its parameters, and BATCH with the experts that it chooses, which ranks share."""
    model, params = make(name)
    return model, params, replayed(model, params)


def outcome(mesh, name, stage=None, micro_batching=WHOLE, replay=True, **settings):
    model, params, batch = made(name)
    model = models.place(model, mesh)
    mesh = attrs.evolve(mesh, sharding=None if stage is None else Sharding(stage=stage))
    biased = any(router.bias for router in model.routers)
    loop = Loop(mini_batch_size=4, micro_batching=micro_batching, balance_rate=0.01 if biased else 0.0)
    state, metrics = UpdateActor(
        forward=Forward(model, mesh=mesh, replay=replay, **settings),
        loss_fn=losses.ppo_clip,
        loop=loop,
        optimizer=OPTIMIZER,
        terms=TERMS,
    )(init_state(models.own_params(model, params, mesh), OPTIMIZER), batch)
    grads, params = (models.whole_params(model, x, mesh) for x in (state.opt.mu, state.params))
    return grads, params, metrics


def test_the_column_is_what_the_routers_chose():
    model, params = make("qwen3_moe")
    expected = torch.stack([x.chosen for x in routed(model, params)], 1)
    for settings in ({}, {"remove_padding": False}):
        column = replayed(model, params, **settings).routed
        assert column.dtype == torch.uint8
        assert torch.equal(column[BATCH.attention_mask].long(), expected)
    parts = simulate({"sequence": 2}, partial(replayed, model, params))
    assert all(torch.equal(x.routed[BATCH.attention_mask].long(), expected) for x in parts)


SPLITS = [
    ({}, {"micro_batching": MicroBatching(size=1)}),
    ({}, {"micro_batching": MicroBatching(token_budget=9)}),
    ({}, {"remove_padding": False, "micro_batching": MicroBatching(size=2)}),
    ({"replicate": 2, "shard": 2}, {"stage": 3, "micro_batching": MicroBatching(size=1)}),
    ({"shard": 4}, {"stage": 1}),
    ({"sequence": 2}, {"micro_batching": MicroBatching(size=3)}),
    ({"context": 2}, {"micro_batching": MicroBatching(size=3)}),
    ({"tensor": 2}, {"micro_batching": MicroBatching(size=3)}),
    ({"sequence": 2, "tensor": 2}, {}),
    ({"pipeline": 2}, {"micro_batching": MicroBatching(size=1)}),
    ({"pipeline": 2, "shard": 2}, {"stage": 1, "micro_batching": MicroBatching(size=1)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "splits"), [("qwen3_moe", SPLITS[::2]), ("glm4_moe", SPLITS[1::2])])
def test_losses_loads_and_biases_do_not_depend_on_the_split(name, splits):
    expected = outcome(LOCAL, name)
    assert {"actor/balance_loss", "actor/router_z_loss", "actor/expert_load/1", "actor/expert_load/max"} <= set(
        expected[2]
    )
    for axes, settings in splits:
        found = simulate(axes, partial(outcome, name=name, **settings)) if axes else [outcome(LOCAL, name, **settings)]
        for one in found:
            torch.testing.assert_close(one[:2], expected[:2], rtol=1e-10, atol=1e-10)
            assert report(one[2]) == pytest.approx(report(expected[2]), rel=1e-10, abs=1e-10), (axes, settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "virtual"),
    [
        ({"pipeline": 2}, 1),
        ({"pipeline": 2}, 2),
        ({"pipeline": 2, "expert": 2, "tensor": 2}, 1),
        pytest.param({"context": 2, "expert": 2}, 1, marks=pytest.mark.slow),
    ],
)
def test_stages_replay_what_the_experts_of_all_of_them_were(axes, virtual, monkeypatch):
    monkeypatch.setitem(EXPERTS, "mixture", Qwen3MoeConfig(**CONFIGS["qwen3_moe"].to_dict() | {"num_hidden_layers": 4}))
    model, params = make("mixture" if virtual > 1 else "qwen3_moe")
    expected = replayed(model, params).routed
    moved = {name: x + (0.7 if name.endswith("gate.weight") else 0.0) * x.flip(0) for name, x in params.items()}
    rows = tree.replace(BATCH, routed=expected)

    def run(mesh):
        mesh = attrs.evolve(mesh, virtual_stages=virtual)
        placed = models.place(model, mesh)
        own = [models.own_params(placed, x, mesh) for x in (params, moved)]
        again = [
            compute_outputs(
                own[1],
                rows,
                forward=Forward(placed, mesh=mesh, replay=replay),
                micro_batching=CUT,
                outputs=("log_probs", "routed"),
            )
            for replay in (True, False)
        ]
        return replayed(placed, own[0], mesh).routed, *again

    _, *alone = run(LOCAL)
    assert (alone[0].log_probs - alone[1].log_probs).abs().max() > 1e-3
    assert not torch.equal(alone[0].routed, expected)
    for routed, *again in simulate(axes, run):
        assert torch.equal(routed, expected)
        for got, one in zip(again, alone, strict=True):
            torch.testing.assert_close(got.log_probs, one.log_probs, rtol=1e-10, atol=1e-10)
            assert torch.equal(got.routed, one.routed)


def test_the_losses_are_their_definitions():
    model, params = make("qwen3_moe")
    mini = tree.replace(BATCH, routed=replayed(model, params).routed)
    totals = experts.router_totals(mini, model)
    forward = Forward(model, replay=True)
    sums = forward_micro_batch(params, mini, forward=forward, outputs=("log_probs", "router_sums", "loads"))
    got = experts.RouterLosses(totals, balance_coef=0.5, z_coef=0.25).of(sums.router_sums)
    counts = experts.counted(BATCH.attention_mask, BATCH.response_mask)[BATCH.attention_mask]
    balance = z = 0.0
    for number, (logits, chosen, _) in enumerate(routed(model, params)):
        rows = [i for i, counted in enumerate(counts.tolist()) if counted]
        loads = [0] * 4
        for i in rows:
            for expert in chosen[i].tolist():
                loads[expert] += 1
        assert sums.loads[number].tolist() == loads
        probs = logits.softmax(-1)
        balance += 4 * sum(
            load / (2 * len(rows)) * sum(probs[i, e].item() for i in rows) / len(rows) for e, load in enumerate(loads)
        )
        z += sum(logits[i].exp().sum().log().item() ** 2 for i in rows) / len(rows)
    assert got["balance_loss"].item() == pytest.approx(0.5 * balance, rel=1e-12)
    assert got["router_z_loss"].item() == pytest.approx(0.25 * z, rel=1e-12)

    def by_hand(own):
        every = torch.stack([x.logits for x in routed(model, own)])[:, counts]
        return every.softmax(-1).sum((0, 1))[1] + every.logsumexp(-1).square().sum()

    def by_sums(own):
        out = forward_micro_batch(own, mini, forward=forward, outputs=("log_probs", "router_sums")).router_sums
        return out.probs[:, 1].sum() + out.squares

    (_, expected), (_, found) = (value_and_grad(fn)(params) for fn in (by_hand, by_sums))
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-11)


def test_rows_without_a_response_count_for_no_router():
    """Counted by hand, choice by choice: loads, what the losses are made of, and the mini-batch's totals."""
    model, params = make("qwen3_moe")
    mask = BATCH.response_mask.clone()
    mask[1], mask[4] = False, False
    mini = tree.replace(BATCH, routed=replayed(model, params).routed, response_mask=mask)
    answered = [row for row in range(6) if mask[row].any()]
    assert 0 < len(answered) < 6
    real = [(row, place) for row in answered for place in BATCH.attention_mask[row].nonzero().flatten().tolist()]
    out = forward_micro_batch(
        params, mini, forward=Forward(model, replay=True), outputs=("log_probs", "router_sums", "loads")
    )
    totals = experts.router_totals(mini, model)
    assert totals.tokens == len(real)
    for number in range(len(model.routers)):
        loads = [0.0] * 4
        for row, place in real:
            for expert in mini.routed[row, place, number].tolist():
                loads[expert] += 1
        assert out.loads[number].tolist() == loads
        assert totals.fractions[number].tolist() == pytest.approx([load / sum(loads) for load in loads])
    assert out.router_sums.probs.sum(1).tolist() == pytest.approx([len(real)] * len(model.routers))


def test_a_bias_moves_by_the_sign_of_what_its_expert_lacks():
    model, params = make("glm4_moe")
    (router,) = routed(model, params)
    batch = tree.replace(BATCH, response_mask=BATCH.attention_mask[:, 5:])
    loads = torch.bincount(router.chosen.flatten(), minlength=4).double()

    def bias(**loop):
        state, metrics = UpdateActor(
            forward=Forward(model),
            loss_fn=losses.ppo_clip,
            loop=Loop(mini_batch_size=6, micro_batching=MicroBatching(size=4), **loop),
            optimizer=OPTIMIZER,
        )(init_state(params, OPTIMIZER), batch)
        return state.params[BIAS] - params[BIAS], report(metrics)

    left = {"skipped": mean(1.0)}
    still = experts.balanced(params, loads[None], model, LOCAL, rate=0.125, unless=left)
    assert torch.equal(still[BIAS], params[BIAS])
    moved, numbers = bias(balance_rate=0.125)
    torch.testing.assert_close(moved, 0.125 * (loads.mean() - loads).sign(), rtol=0, atol=1e-12)
    assert moved.unique().numel() > 1
    assert numbers["actor/expert_load/1"] == pytest.approx((loads.max() / loads.mean()).item())
    ranks = {name: x for name, x in numbers.items() if name.endswith("_ranks")}
    halves = loads.view(2, 2).sum(1)
    expected = {"of_2_ranks": halves.max() / halves.mean(), "of_4_ranks": loads.max() / loads.mean()}
    assert ranks == pytest.approx({f"actor/expert_load/{name}": x.item() for name, x in expected.items()})
    assert bias()[0].abs().max() == 0
    dense, own = tiny.model_and_params()
    with pytest.raises(ValueError, match="'qwen2' has no routers of experts that fppo knows: leave out balance_rate=1"):
        UpdateActor(
            forward=Forward(dense),
            loss_fn=losses.ppo_clip,
            loop=Loop(mini_batch_size=6, micro_batching=MicroBatching(size=4), balance_rate=1.0),
            optimizer=OPTIMIZER,
        )(init_state(own, OPTIMIZER), BATCH)
    with pytest.raises(ValueError, match="'qwen3_moe' has no router with a bias to balance by"):
        experts.check_biases(make("qwen3_moe")[0], "leave it out")


def test_a_skipped_update_leaves_the_biases():
    model, params = make("glm4_moe")

    def infinite(*given):
        loss, metrics = losses.ppo_clip(*given)
        return loss * torch.inf, metrics

    loop = Loop(mini_batch_size=6, micro_batching=WHOLE, balance_rate=0.125)
    state, metrics = UpdateActor(forward=Forward(model), loss_fn=infinite, loop=loop, optimizer=OPTIMIZER)(
        init_state(params, OPTIMIZER), BATCH
    )
    assert report(metrics)["actor/skipped"] == 1.0
    assert torch.equal(state.params[BIAS], params[BIAS])


def test_compiled_layers_report_no_loads():
    model, _ = make("qwen3_moe")
    assert experts.reports_loads(model)
    assert not experts.reports_loads(attrs.evolve(model, compile_layers=True))
    assert not experts.reports_loads(tiny.model_and_params()[0])


def test_what_replay_lacks_is_named():
    model, params = make("qwen3_moe")
    with pytest.raises(ValueError, match="replay=True, and the rows have no `routed`"):
        compute_outputs(params, BATCH, forward=Forward(model, replay=True), micro_batching=MicroBatching(size=6))
    with pytest.raises(ValueError, match="'qwen2' has no routers of experts that fppo knows: leave out replay"):
        Forward(tiny.model_and_params()[0], replay=True)
    with pytest.raises(ValueError, match=r"balance_coef=0\.2 needs the experts of a whole mini-batch before"):
        outcome(LOCAL, "qwen3_moe", replay=False)


def test_losses_are_reported_of_all_tokens_where_ranks_cut_rows():
    alone, *ranks = (report(x[2]) for x in (outcome(LOCAL, "qwen3_moe"), *simulate({"sequence": 2}, sequenced)))
    for name in ("balance_loss", "router_z_loss"):
        for found in ranks:
            assert found[f"actor/{name}"] == pytest.approx(alone[f"actor/{name}"], rel=1e-9)


def sequenced(mesh):
    return outcome(mesh, "qwen3_moe")


@pytest.mark.parametrize("axes", [{"expert": 2}, {"shard": 2, "expert": 2}])
def test_passes_have_the_numbers_of_whole_parameters_also_sharded_over_the_expert_axis(axes):
    """Ranks with the same rows: as many times the gradient. Nothing has gathered parameters before these passes."""
    model, params = make("qwen3_moe")

    def loss(own, placed, mesh):
        return forward_micro_batch(own, BATCH, forward=Forward(placed, mesh=mesh)).log_probs.square().sum()

    def run(mesh, stage):
        placed = models.place(model, mesh)
        mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage), layout=placed.layout)
        value, grads = value_and_grad(loss)(models.own_params(placed, params, mesh), placed, mesh)
        return value, models.whole_params(placed, gradient_sum(grads, mesh), mesh)

    value, expected = value_and_grad(loss)(params, model, LOCAL)
    for stage in (2, 3):
        ranks = simulate(axes, partial(run, stage=stage))
        for one, grads in ranks:
            torch.testing.assert_close(one, value, rtol=1e-12, atol=1e-12)
            for name, grad in expected.items():
                torch.testing.assert_close(grads[name], len(ranks) * grad, rtol=1e-9, atol=1e-11)
