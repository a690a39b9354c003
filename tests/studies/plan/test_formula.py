"""The formula that a search begins with, against its terms written out by hand."""

from __future__ import annotations

import attrs
import pytest
import torch

from fppo.runtime.schedule import clocked, one_f_one_b
from fppo.studies.plan import estimate
from fppo.studies.plan.case import Role, hardware_of, overhead
from fppo.studies.plan.estimate import (
    ATTENTION_BACKWARD,
    ATTENTION_SHARE,
    LINK_SHARE,
    MATMUL_SHARE,
    facts_of,
    flops_of,
    rough,
    seconds_of,
)
from fppo.studies.plan.passes import model_of, models_of, stages_of
from fppo.studies.plan.track import Cost, Phase
from tests.studies.plan.cases import case, mixture

GPU = hardware_of("h100")
# of a layer: queries, keys and values with their biases, the output; three matrices of the MLP; two norms
LAYER = 128 * (128 + 64 + 64) + 256 + 128 * 128 + 3 * 128 * 512 + 2 * 128
EMBEDDING = 2048 * 128


def of(**changes):
    """A case on a GPU, and the facts of its models."""
    what = case(hardware=GPU, **changes)
    return what, {name: facts_of(what, model_of(what, name)) for name in models_of(what)}


def test_the_facts_of_a_dense_model():
    _, facts = of()
    linear = LAYER - 256 - 2 * 128
    pairs = 64 * 65 // 2
    expected = estimate.Facts(
        layers=3,
        dense=3.0 * LAYER,
        experts=0.0,
        outside=float(EMBEDDING),
        products=2.0 * 3 * linear * 64,
        last=2.0 * 3 * 512 * 128 * 64,
        attention=3 * 4.0 * 128 * pairs,
        head=2.0 * EMBEDDING * 32,
        hidden=128,
        inner=512.0,
        chosen=0,
        keys=2 * 2 / 4,
    )
    assert attrs.asdict(facts["actor"]) == pytest.approx(attrs.asdict(expected))


def test_the_facts_of_a_mixture():
    what = case(config=mixture(chosen=2))
    facts = facts_of(what, model_of(what, "actor"))
    assert (facts.inner, facts.chosen, facts.last) == (2 * 64.0, 2, 0.0)
    assert facts.experts == 2 * 8 * 3 * 128 * 64


@pytest.mark.parametrize(
    ("again", "of_attention", "of_products"), [(False, 3.5, 3), (True, 4.5, 4), ("selective", 3.5, 4)]
)
def test_an_update_computes_layers_three_times_and_what_it_keeps_not_again(again, of_attention, of_products):
    what, facts = of(checkpoint_layers=again)
    each, rows = facts["actor"], what.rows
    attention, others = flops_of(what, "update actor", each)
    assert attention == pytest.approx(rows * of_attention * each.attention)
    assert 1 + ATTENTION_BACKWARD == 3.5
    less = each.last if again else 0.0
    assert others == pytest.approx(rows * (of_products * each.products - less + 4 * each.head))
    kept = attrs.evolve(what, log_probs="reference")
    assert flops_of(kept, "update actor", each)[1] == pytest.approx(others - rows * each.head)
    assert flops_of(what, "log-probs", each) == (rows * each.attention, rows * (each.products + each.head))


MESHES = [
    ({}, 3 * LAYER + 2 * EMBEDDING),
    ({"shard": 4}, (3 * LAYER + 2 * EMBEDDING) / 4),
    ({"tensor": 2}, (3 * LAYER + 2 * EMBEDDING) / 2),
    ({"pipeline": 3}, LAYER + EMBEDDING),
    ({"pipeline": 3, "tensor": 2, "shard": 2}, (LAYER + EMBEDDING) / 4),
]


@pytest.mark.parametrize(("mesh", "own"), MESHES, ids=str)
def test_parameters_and_moments_are_divided_by_the_axes_that_cut_them(mesh, own):
    what, facts = of(mesh=mesh)
    each = facts["actor"]
    assert estimate._own(what, each) == pytest.approx(own)
    assert estimate._own(what, each, shards=False) == pytest.approx(own * mesh.get("shard", 1))
    for offload, size in (("none", 12), ("moments", 4), ("all", 0)):
        assert estimate._rest(attrs.evolve(what, offload=offload), "actor", each) == pytest.approx(size * own)
    roles = {"reward model": Role(dtype=torch.bfloat16)}
    assert estimate._rest(attrs.evolve(what, roles=roles), "reward model", each) == pytest.approx(2 * own)


def test_experts_are_divided_by_their_own_axis_or_by_the_tensor_axis():
    what = case(hardware=GPU, config=mixture(chosen=2), mesh={"expert": 2, "shard": 2})
    facts = facts_of(what, model_of(case(config=mixture(chosen=2)), "actor"))
    dense = facts.dense + 2 * facts.outside
    assert estimate._own(what, facts) == pytest.approx(dense / 4 + facts.experts / 2 / 2)
    other = attrs.evolve(what, mesh={"tensor": 2})
    assert estimate._own(other, facts) == pytest.approx(dense / 2 + facts.experts / 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("again", [False, True, "selective"])
def test_temporary_bytes_are_gathered_weights_gradients_and_activations(stage, again):
    """On two shards, in 16 bits: weights of the whole model, or of three layers; float32 gradients."""
    what, facts = of(mesh={"shard": 2}, stage=stage, checkpoint_layers=again, compute_dtype=torch.bfloat16)
    each, whole = facts["actor"], 3 * LAYER + 2 * EMBEDDING
    gathered = 2 * whole * (1.0 if stage < 3 else min(1.0, 3 / 3))
    assert estimate._moving(what, "log-probs", each) == pytest.approx(gathered + 4 * 2 * 256 * 128)
    grads = 4 * (whole if stage == 1 else whole / 2) + 8 * whole / 3
    layer = 2 * 128 + 10 * 128 + 4 * 512
    kept = 3 * {False: layer, True: 128, "selective": 256}[again]
    inside = layer if again else 0
    assert estimate._moving(what, "update actor", each) == pytest.approx(gathered + grads + 2 * 256 * (kept + inside))
    away = attrs.evolve(what, offload_activations=True)
    least = min(2 * 256 * kept, estimate.WINDOW)
    assert estimate._moving(away, "update actor", each) == pytest.approx(gathered + grads + least + 2 * 256 * inside)


@pytest.mark.parametrize("chosen", [1, 2, 8])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_mixture_keeps_the_rows_of_every_chosen_expert(chosen, tensor):
    """Four of a token's width for each expert beyond what it computes inside; the tensor axis cuts them."""
    what = case(hardware=GPU, config=mixture(chosen=chosen), mesh={"tensor": tensor}, compute_dtype=torch.bfloat16)
    facts = facts_of(what, model_of(case(config=mixture(chosen=chosen)), "actor"))
    own = estimate._own(what, facts)
    inside = 10 * 128 + 4 * chosen * 64 + 4 * chosen * 128
    kept = 2 * (2 * 128 + inside / tensor)  # of two layers
    assert estimate._moving(what, "update actor", facts) == pytest.approx((2 + 4) * own + 2 * 256 * kept)


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("mesh", [{}, {"shard": 2}, {"shard": 2, "replicate": 2, "tensor": 2}])
def test_a_rank_needs_the_state_of_its_models_and_the_largest_stage(mesh, reference):
    roles = {"reference": Role(dtype=torch.bfloat16)} if reference else {}
    what, facts = of(mesh=mesh, compute_dtype=torch.bfloat16, roles=roles, reference=reference)
    rest = sum(12 * estimate._own(what, each) for each in facts.values())
    rest += 2 * estimate._own(what, facts["actor"]) if reference else 0
    moving = max(
        estimate._moving(what, name, facts["critic" if name in ("values", "update critic") else "actor"])
        for name in stages_of(what)
    )
    found = rough(what, facts)
    assert found.memory == pytest.approx(rest + moving + overhead(GPU, len(mesh), moving))
    each = {name: facts["critic" if name in ("values", "update critic") else "actor"] for name in stages_of(what)}
    assert found.seconds == pytest.approx(sum(estimate._seconds(what.at(x), x, own) for x, own in each.items()))


def test_a_stage_takes_its_arithmetic_its_exchanges_and_once_the_sum_of_gradients():
    """Large enough that launches take less than arithmetic, on one rank of each kind of axis."""
    big = case(hardware=GPU, compute_dtype=torch.bfloat16, tokens=1 << 22, length=4096, micro_batches=3)
    facts = facts_of(big, model_of(big, "actor"))
    attention, others = flops_of(big, "update actor", facts)
    alone = (attention / ATTENTION_SHARE + others / MATMUL_SHARE) / GPU.flops
    assert estimate._seconds(big, "update actor", facts) == pytest.approx(3 * alone)
    single = attrs.evolve(big, compute_dtype=None)
    assert estimate._seconds(single, "update actor", facts) == pytest.approx(3 * alone * GPU.flops / GPU.flops_float32)
    rate = LINK_SHARE * GPU.node_bandwidth
    own = 3 * LAYER + 2 * EMBEDDING
    copies = attrs.evolve(big, mesh={"replicate": 4})
    summed = 2 * (4 * own) * 3 / 4 / rate
    assert estimate._seconds(copies, "update actor", facts) == pytest.approx(3 * alone + summed)
    cut = attrs.evolve(big, mesh={"tensor": 2})
    exchanged = 4 * (3 * 2) * (1 << 22) * 128 * 2 / 2 / rate
    assert estimate._seconds(cut, "update actor", facts) == pytest.approx(3 * (alone / 2 + exchanged))
    sliced = attrs.evolve(big, mesh={"sequence": 2})
    turned = 4 * (3 * 2) * (1 << 21) * 128 * 2 / 2 / rate
    assert estimate._seconds(sliced, "update actor", facts) == pytest.approx(3 * (alone / 2 + turned))
    dealt = attrs.evolve(big, mesh={"context": 2})
    keys = (3 * 2) * 1.0 * (1 << 21) * 128 * 2 * 2 / 2 / rate
    assert estimate._seconds(dealt, "update actor", facts) == pytest.approx(3 * (alone / 2 + keys))


def test_what_a_ring_sends_is_the_others_part():
    what = case(hardware=GPU, mesh={"shard": 4})
    assert estimate._over(what, "shard", 8e9) == pytest.approx(8e9 * 3 / 4 / (LINK_SHARE * GPU.node_bandwidth))
    assert estimate._over(what, "tensor", 8e9) == 0.0


@pytest.mark.parametrize(
    "op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "receive", "broadcast"]
)
def test_between_nodes_rings_leave_by_all_links_of_a_node_and_single_messages_by_one(op):
    """Two of four stages are in each node; a third of what goes to three others stays inside."""
    what, cost = case(hardware=GPU, mesh={"pipeline": 4, "tensor": 4}, layers=4), Cost()
    cost.sent["pipeline", op, True], cost.calls["pipeline", op, True] = 8e9, 1
    ring = op.startswith(("all_g", "reduce", "all_r"))
    rate = GPU.network_bandwidth * (2 if ring else 3 / 2)
    found = estimate.wires([Phase("setup", (), cost)], what)["pipeline"].seconds
    assert found == pytest.approx(estimate.LATENCY[True] + 8e9 / (rate * LINK_SHARE))


@pytest.mark.parametrize(("ranks", "load", "more"), [(2, 1.0, 1.0), (4, 1.0, 1.0), (4, 2.0, 1.5), (8, 4.0, 1.75)])
def test_a_crowded_rank_receives_more_than_it_sends(ranks, load, more):
    """load (r - 1) / r received, 1 - load / r sent, of which the larger takes the time of both ways."""
    comes, goes = load * (ranks - 1) / ranks, 1 - load / ranks
    assert max(comes, goes) / ((comes + goes) / 2) == pytest.approx(more)
    assert estimate._crowding(case(mesh={"expert": ranks}, load=load)) == pytest.approx(more)


def phase(name, *, busy=0.0, sent=0.0, waits=False, host=0.0, launches=0):
    """A phase of so many seconds of products, of a collective over shards, and of copies to the host."""
    cost = Cost()
    cost.flops["matmul bfloat16"] = busy * GPU.flops * MATMUL_SHARE
    cost.other["host"] = host * GPU.host_bandwidth * LINK_SHARE
    cost.other["launches"] = launches
    if sent:
        latency = estimate.LATENCY[False]
        cost.sent["shard", "all_gather", waits] = (sent - latency) * LINK_SHARE * GPU.node_bandwidth
        cost.calls["shard", "all_gather", waits] = 1
    return Phase(name, (), cost)


def test_a_stage_takes_the_sum_of_its_passes_and_what_cannot_hide():
    """The first of two passes stands for all but the last; in passes copies and exchanges hide behind arithmetic."""
    phases = [
        phase("setup", busy=0.5, host=0.25),
        phase("forward 1", busy=1.0, sent=3.0),
        phase("backward 1", busy=2.0, host=1.0),
        phase("after 1", busy=0.125, sent=0.5),
        phase("forward 2", busy=1.0, sent=3.0),
        phase("backward 2", busy=2.0, host=4.0),
        phase("after 2", sent=0.75, waits=True),
    ]
    found = seconds_of(phases, case(hardware=GPU, mesh={"shard": 8}, micro_batches=5))
    assert found.compute == pytest.approx(0.5 + 4 * (1 + 2 + 0.125) + 1 + 2)
    assert found.communication == pytest.approx(0.25 + 4 * (3 + 1 + 0.5) + 3 + 4 + 0.75)
    assert found.exposed == pytest.approx(0.25 + 4 * (2 + 0.375) + 2 + 2 + 0.75)
    assert (found.idle, found.launching) == (0.0, 0.0)
    assert found.total == found.compute + found.exposed
    traffic = estimate.wires(phases, case(hardware=GPU, mesh={"shard": 8}, micro_batches=5))
    assert list(traffic) == ["shard"]
    assert traffic["shard"].calls == 4 * 2 + 2
    assert traffic["shard"].seconds == pytest.approx(4 * 3.5 + 3 + 0.75)
    sent = 4 * 3.5 + 3 + 0.75 - 10 * estimate.LATENCY[False]
    assert traffic["shard"].sent == pytest.approx(sent * LINK_SHARE * GPU.node_bandwidth)


def test_on_a_pipeline_a_rank_waits_for_the_slowest_and_for_the_first_and_last_passes():
    phases = [
        phase("setup", busy=0.5),
        phase("forward", busy=1.0),
        phase("forward", busy=1.0, sent=3.0),
        phase("backward", busy=2.0),
        phase("backward", busy=2.0),
        phase("after", busy=0.25),
    ]
    what = case(hardware=GPU, mesh={"pipeline": 3, "shard": 2}, micro_batches=6)
    found = seconds_of(phases, what, slowest=1.5)
    passes = 6 / 2 * (1 + 3 + 2 + 2)
    assert found.compute == pytest.approx(0.75 + 6 / 2 * 6)
    assert found.exposed == pytest.approx(6 / 2 * 2)
    assert found.idle == pytest.approx(passes * (1.5 * (1 + 2 / 6) - 1))
    assert found.total == pytest.approx(0.75 + 1.5 * passes * (1 + 2 / 6))
    halves = seconds_of(phases, attrs.evolve(what, virtual_stages=2, micro_batches=3))
    assert halves.compute == pytest.approx(0.75 + 3 * 6)  # two passes of a rank are one of each of its stages
    assert halves.idle == pytest.approx(3 * 8 * (2 / (2 * 3)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_what_a_pipeline_holds_and_waits_is_what_the_clock_of_its_schedule_says(ranks, groups, virtual):
    micros = groups * ranks
    what = case(mesh={"pipeline": ranks}, virtual_stages=virtual, micro_batches=micros)
    clock = clocked(one_f_one_b(ranks, micros, virtual))
    assert [attrs.evolve(what, pipeline_rank=rank).in_flight for rank in range(ranks)] == [*clock.kept]
    assert what.bubble == pytest.approx(clock.bubble / (1 - clock.bubble))


def test_operations_wait_for_their_launches_where_these_take_longer():
    phases = [phase("forward 1", busy=0.001, launches=100), phase("after", busy=0.001, launches=1000)]
    found = seconds_of(phases, case(hardware=GPU, micro_batches=1))
    inside, outside = 100 * estimate.PASS_LAUNCH, 1000 * estimate.LAUNCH
    assert found.compute == pytest.approx(inside + outside)
    assert found.launching == pytest.approx(inside + outside - 0.002)
    recorded = seconds_of(phases, case(hardware=GPU, micro_batches=1), recorded=True)
    assert recorded.compute == pytest.approx(0.001 + outside)


def test_operations_without_products_take_the_memorys_time():
    cost = Cost()
    cost.flops["attention bfloat16"] = GPU.flops * ATTENTION_SHARE
    cost.flops["matmul float32"] = 2 * GPU.flops_float32 * MATMUL_SHARE
    cost.other["traffic"] = round(4 * GPU.bandwidth * estimate.COPY_SHARE)
    assert estimate.busy_seconds(cost, GPU) == pytest.approx(1 + 2 + 4)


NO_WORK = {"products": 0.0, "attention": 0.0, "head": 0.0, "last": 0.0}
SIZES = {"compute_dtype": torch.bfloat16, "tokens": 1024, "length": 64, "micro_batches": 4}


@pytest.fixture
def no_launches(monkeypatch):
    """Where operations take no time, the rest of a stage is what it sends."""
    monkeypatch.setattr(estimate, "PASS_LAUNCH", 0.0)


@pytest.mark.parametrize(
    ("stage", "of_update", "before"),
    [(1, (2 + 4) / 4, 2 / 4), (2, 2 + 4, 2), (3, 2 * 2 + 4, 2)],  # bytes for each parameter and pass
)
def test_shards_gather_weights_in_each_pass_and_scatter_gradients(no_launches, stage, of_update, before):
    """In 16 bits, and in float32; at stage 1 once for all four passes, at stage 3 twice in each."""
    what, facts = of(mesh={"shard": 4}, stage=stage, **SIZES)
    each, whole = attrs.evolve(facts["actor"], **NO_WORK), 3 * LAYER + 2 * EMBEDDING
    rate = LINK_SHARE * GPU.node_bandwidth
    for name, size in (("update actor", of_update), ("log-probs", before)):
        expected = 4 * whole * size * 3 / 4 / rate
        assert estimate._seconds(what, name, each) == pytest.approx(expected)
    single = attrs.evolve(what, compute_dtype=None)
    assert estimate._seconds(single, "log-probs", each) == pytest.approx(2 * 4 * whole * before * 3 / 4 / rate)
    again = attrs.evolve(what, mesh={"shard": 4, "tensor": 2, "replicate": 2})
    sums = estimate._sums(again, each) + 4 * estimate._exchanges(again, each, 3, 2)
    gathered = 4 * whole / 2 * of_update * 3 / 4 / rate
    ring = estimate.link(again, estimate.DENSE)[1] * LINK_SHARE
    assert estimate._seconds(again, "update actor", each) == pytest.approx(gathered * rate / ring + sums)


@pytest.mark.parametrize(("again", "ways"), [(False, 2), (True, 3)])
def test_experts_are_sent_their_tokens_in_every_run_of_a_layer(no_launches, again, ways):
    mix = {"config": mixture(chosen=2), "mesh": {"expert": 2, "shard": 2}, "load": 1.5, **SIZES}
    what = case(hardware=GPU, checkpoint_layers=again, **mix)
    facts = attrs.evolve(facts_of(what, model_of(case(config=mixture(chosen=2)), "actor")), **NO_WORK)
    sent = 2 * 2 * (1024 * 128 * 2) * (1 / 2) * 1.5  # to the experts and back, of tokens that go elsewhere
    rate = LINK_SHARE * GPU.node_bandwidth
    dense = facts.dense + 2 * facts.outside
    update = dense * 8 * 3 / 4 + facts.experts / 2 * 8 * 1 / 2
    before = dense * 2 * 3 / 4 + facts.experts / 2 * 2 * 1 / 2
    assert estimate._seconds(what, "update actor", facts) == pytest.approx(4 * (update + 2 * ways * sent) / rate)
    assert estimate._seconds(what, "log-probs", facts) == pytest.approx(4 * (before + 2 * 1 * sent) / rate)


@pytest.mark.parametrize("virtual", [1, 3])
def test_ranks_of_a_pipeline_send_what_comes_out_of_their_stages(no_launches, virtual):
    what, facts = of(mesh={"pipeline": 3, "tensor": 2}, virtual_stages=virtual, layers=9, **SIZES)
    each = attrs.evolve(facts["actor"], **NO_WORK)
    rate, hidden = LINK_SHARE * GPU.node_bandwidth, 1024 * 128 * 2
    wait = 1 + 2 / (virtual * 4)
    for name, ways in (("update actor", 2), ("log-probs", 1)):
        sent = ways * virtual * hidden / 2 + 4 * 3 * ways * hidden / 2  # a rank's three layers over two ranks
        assert estimate._seconds(what, name, each) == pytest.approx(4 * sent / rate * wait)
