"""The formula that a search begins with, against its terms written out by hand."""

from __future__ import annotations

import attrs
import pytest
import torch

from fppo.runtime.schedule import clocked, one_f_one_b
from fppo.settings.learning import OptimizerSettings
from fppo.steps.optimizers import adamw, from_function, zeros_like
from fppo.studies.plan import estimate, passes
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
from fppo.studies.plan.passes import model_of, models_of
from fppo.studies.plan.plan import plan
from fppo.studies.plan.track import Cost, Phase
from tests.studies.plan.cases import at_rest, bare, case, mixture

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
        sliced=0.0,
        last=2.0 * 3 * 512 * 128 * 64,
        attention=3 * 4.0 * 128 * pairs,
        head=2.0 * EMBEDDING * 32,
        hidden=128,
        inner=512.0,
        chosen=0,
        keys=2 * 2 / 4,
        moments=8.0,
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


@pytest.mark.slow
def test_mlps_in_slices_are_computed_again_once():
    """As counted, and not twice where layers are computed again."""
    for again in (False, True, "selective"):
        what = case(layers=1, tokens=256, length=256, micro_batches=1, checkpoint_layers=again, mlp_slice_tokens=32)
        counted = sum(phase.cost.flops["matmul float32"] for phase in passes.run_stage(what, "update actor"))
        products = flops_of(what, "update actor", facts_of(what, model_of(what, "actor")))[1]
        assert counted == pytest.approx(products, rel=0.01), again


WHOLE = 3 * LAYER + 2 * EMBEDDING
MESHES = [
    ({}, WHOLE),
    ({"shard": 4}, WHOLE / 4),
    ({"tensor": 2}, WHOLE / 2),
    ({"pipeline": 3}, LAYER + EMBEDDING),
    ({"pipeline": 3, "tensor": 2, "shard": 2}, (LAYER + EMBEDDING) / 4),
]
ALONE = {"critic": False, "reference": False}  # the policy, whose stages are its log-probs and its update


def needed(what, rest, moving):
    """Bytes of a rank, of which so many are there between stages and so many in its largest stage."""
    return pytest.approx(rest + moving + overhead(GPU, what.groups, moving))


@pytest.mark.parametrize(("mesh", "own"), MESHES, ids=str)
def test_parameters_and_moments_are_divided_by_the_axes_that_cut_them(mesh, own):
    what, facts = of(mesh=mesh, **ALONE)
    kinds = [{}, {"offload": "moments"}, {"offload": "all"}, {"reference": True}]
    kinds += [{"reference": True, "roles": {"reference": Role(dtype=torch.bfloat16)}}]
    plain, moments, everything, reference, narrow = (rough(attrs.evolve(what, **x), facts).memory for x in kinds)
    assert [plain - moments, plain - everything] == pytest.approx([8 * own, 12 * own])
    assert [reference - plain, narrow - plain] == pytest.approx([4 * own, 2 * own])


@pytest.mark.parametrize(
    ("name", "keywords", "least", "most"),
    [
        ("adamw", {}, 8, 8),
        ("adamw_8bit", {}, 2 + 8 / 64, 2.2),
        ("adamw_8bit", {"block_size": 32}, 2 + 8 / 32, 2.3),
        ("adamw_8bit", {"block_size": 1024}, 8, 8),
        ("sgd", {}, 0, 0),
        ("sgd", {"momentum": 0.9}, 4, 4),
        ("lion", {}, 4, 4),
        ("muon", {}, 4.1, 7.9),
        (f"{__name__}:averaged", {}, 12, 12),
    ],
    ids=str,
)
def test_moments_are_those_of_the_optimizers_own_state(name, keywords, least, most):
    optimizer = OptimizerSettings(name=name, keywords=keywords)
    what, facts = of(mesh={"shard": 2}, **ALONE, optimizer=optimizer)
    assert least <= facts["actor"].moments <= most
    away = attrs.evolve(what, offload="moments")
    own = 4 * sum(x.numel() for x in model_of(what, "actor").shapes.values()) / 2
    assert sum(at_rest(what).values()) - sum(at_rest(away).values()) == pytest.approx(facts["actor"].moments * own / 4)
    assert rough(what, facts).memory - rough(away, facts).memory >= 0.99 * facts["actor"].moments * own / 4


@pytest.mark.parametrize("offload", ["none", "moments", "optimizer_step"])
def test_an_optimizer_whose_step_looks_at_numbers_is_planned(offload):
    optimizer = OptimizerSettings(name=f"{__name__}:averaged")
    less, more = (plan(bare(offload=offload, optimizer=x)) for x in (OptimizerSettings(), optimizer))
    own = sum(x.numel() for x in model_of(more.case, "actor").shapes.values())
    totals = [sum(x.peak.memory.values()) + sum(x.host.rest.values()) for x in (less, more)]
    assert 3.99 * own <= totals[1] - totals[0] <= (12 if offload == "moments" else 4.4) * own  # on the way: all of it


def averaged(schedule):
    """AdamW beside an average of the parameters, whose step looks at its numbers."""

    def init(params):
        return {"adamw": adamw(schedule).init(params), "average": zeros_like(params)}

    def step(params, grads, state, number):
        assert all(x.isfinite().all() for x in grads.values())
        return params, state

    return from_function(init, step)


def test_experts_are_divided_by_their_own_axis_or_by_the_tensor_axis():
    what = case(hardware=GPU, config=mixture(chosen=2), mesh={"expert": 2, "shard": 2}, **ALONE)
    facts = facts_of(what, model_of(case(config=mixture(chosen=2)), "actor"))
    dense = facts.dense + 2 * facts.outside
    for mesh, own in (
        (what.mesh, dense / 4 + facts.experts / 2 / 2),
        ({"tensor": 2}, dense / 2 + facts.experts / 2),
    ):
        both = [rough(attrs.evolve(what, mesh=mesh, offload=kind), {"actor": facts}) for kind in ("none", "all")]
        assert both[0].memory - both[1].memory == pytest.approx(12 * own)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("again", [False, True, "selective"])
def test_temporary_bytes_are_gathered_weights_gradients_and_activations(stage, again):
    """On two shards, in 16 bits: weights of the whole model, or of three layers; float32 gradients."""
    sizes = {"mesh": {"shard": 2}, "stage": stage, "checkpoint_layers": again, "compute_dtype": torch.bfloat16}
    what, facts = of(**sizes, **ALONE)
    grads = 4 * (WHOLE if stage == 1 else WHOLE / 2) + 8 * WHOLE / 3
    layer = 2 * 128 + 10 * 128 + 4 * 512
    kept = 3 * {False: layer, True: 128, "selective": 256}[again]
    inside = layer if again else 0
    assert rough(what, facts).memory == needed(what, 6 * WHOLE, 2 * WHOLE + grads + 2 * 256 * (kept + inside))
    away = attrs.evolve(what, offload_activations=True)
    least = min(2 * 256 * kept, estimate.WINDOW)
    assert rough(away, facts).memory == needed(what, 6 * WHOLE, 2 * WHOLE + grads + least + 2 * 256 * inside)


@pytest.mark.parametrize("chosen", [1, 2, 8])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_mixture_keeps_the_rows_of_every_chosen_expert(chosen, tensor):
    """Four of a token's width for each expert beyond what it computes inside; the tensor axis cuts them."""
    sizes = {"config": mixture(chosen=chosen), "mesh": {"tensor": tensor}, "compute_dtype": torch.bfloat16}
    what = case(hardware=GPU, **sizes, **ALONE)
    facts = facts_of(what, model_of(case(config=mixture(chosen=chosen)), "actor"))
    own = (facts.dense + 2 * facts.outside + facts.experts) / tensor
    inside = 10 * 128 + 4 * chosen * 64 + 4 * chosen * 128
    kept = 2 * (2 * 128 + inside / tensor)  # of two layers
    assert rough(what, {"actor": facts}).memory == needed(what, 12 * own, (2 + 4) * own + 2 * 256 * kept)


def test_a_stage_takes_its_arithmetic_its_exchanges_and_once_the_sum_of_gradients():
    """Large enough that launches take less than arithmetic, on one rank of each kind of axis; an update runs each layer
    forward and back, and exchanges twice what log-probs do."""
    sizes = {"compute_dtype": torch.bfloat16, "tokens": 1 << 22, "length": 4096, "micro_batches": 3, **ALONE}
    big = case(hardware=GPU, **sizes)
    facts = facts_of(big, model_of(big, "actor"))
    work = [flops_of(big, name, facts) for name in ("log-probs", "update actor")]
    alone = sum(attention / ATTENTION_SHARE + others / MATMUL_SHARE for attention, others in work) / GPU.flops
    rate, tokens = LINK_SHARE * GPU.node_bandwidth, 1 << 22
    turned = 4 * (3 * 3) * tokens / 2 * 128 * 2 / 2 / rate
    keys = (3 * 3) * tokens / 2 * 128 * 2 * 2 / 2 / rate
    for changes, expected in (
        ({}, 3 * alone),
        ({"compute_dtype": None}, 3 * alone * GPU.flops / GPU.flops_float32),
        ({"mesh": {"replicate": 4}}, 3 * alone + 2 * (4 * WHOLE) * 3 / 4 / rate),
        ({"mesh": {"tensor": 2}}, 3 * (alone / 2 + 4 * (3 * 3) * tokens * 128 * 2 / 2 / rate)),
        ({"mesh": {"sequence": 2}}, 3 * (alone / 2 + turned)),
        ({"mesh": {"context": 2}}, 3 * (alone / 2 + keys)),
    ):
        found = rough(attrs.evolve(big, **changes), {"actor": facts})
        assert found.seconds == pytest.approx(expected), changes


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
    what, cost = case(hardware=GPU, mesh={"expert": ranks}, load=load), Cost()
    cost.sent["expert", "all_to_all", True], cost.calls["expert", "all_to_all", True] = 8e9, 1
    found = estimate.wires([Phase("setup", (), cost)], what)["expert"].seconds
    assert found == pytest.approx(estimate.LATENCY[False] + 8e9 * more / (GPU.node_bandwidth * LINK_SHARE))


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
SIZES = {"compute_dtype": torch.bfloat16, "tokens": 1024, "length": 64, "micro_batches": 4, **ALONE}
RATE = LINK_SHARE * GPU.node_bandwidth


def launches(times, layers):
    """Seconds in which the host launches a pass that runs each layer so often, 40 operations each."""
    return times * 40 * layers * estimate.PASS_LAUNCH


@pytest.mark.parametrize(
    ("stage", "of_update", "before"),
    [(1, (2 + 4) / 4, 2 / 4), (2, 2 + 4, 2), (3, 2 * 2 + 4, 2)],  # bytes for each parameter and pass
)
def test_shards_gather_weights_in_each_pass_and_scatter_gradients(stage, of_update, before):
    """In 16 bits, and in float32; at stage 1 once for all four passes, at stage 3 twice in each. The model is so large
    that its work hides behind that."""
    what, facts = of(mesh={"shard": 4}, stage=stage, **SIZES)
    large = {"actor": attrs.evolve(facts["actor"], **NO_WORK, dense=1e12, outside=0.0)}
    found = rough(what, large).seconds
    assert found == pytest.approx(4 * 1e12 * (of_update + before) * 3 / 4 / RATE)
    of_weights = 2 * before + (of_update - 4 / (4 if stage == 1 else 1)) * 2  # twice the bytes, but for gradients
    single = 4 * 1e12 * (of_weights + 4 / (4 if stage == 1 else 1)) * 3 / 4 / RATE
    assert rough(attrs.evolve(what, compute_dtype=None), large).seconds == pytest.approx(single)


@pytest.mark.parametrize(("again", "ways"), [(False, 2), (True, 3)])
def test_experts_are_sent_their_tokens_in_every_run_of_a_layer(again, ways):
    mix = {"config": mixture(chosen=2), "mesh": {"expert": 2, "shard": 2}, "load": 1.5, **SIZES}
    what = case(hardware=GPU, checkpoint_layers=again, **mix)
    facts = attrs.evolve(facts_of(what, model_of(case(config=mixture(chosen=2)), "actor")), **NO_WORK)
    sent = 2 * 2 * (1024 * 128 * 2) * (1 / 2) * 1.5  # to the experts and back, of tokens that go elsewhere
    work = launches(4 if again else 3, 2) + launches(1, 2)  # behind which the weights hide
    expected = 4 * (work + 2 * (ways + 1) * sent / RATE)
    assert rough(what, {"actor": facts}).seconds == pytest.approx(expected)


@pytest.mark.parametrize("virtual", [1, 3])
def test_ranks_of_a_pipeline_send_what_comes_out_of_their_stages(virtual):
    what, facts = of(mesh={"pipeline": 3, "tensor": 2}, virtual_stages=virtual, layers=9, **SIZES)
    each, hidden = {"actor": attrs.evolve(facts["actor"], **NO_WORK)}, 1024 * 128 * 2
    sent = 3 * (virtual * hidden / 2 + 4 * 3 * hidden / 2)  # forward, and both ways; three layers over two ranks
    wait = 1 + 2 / (virtual * 4)
    expected = 4 * (launches(4, 3) + sent / RATE) * wait
    assert rough(what, each).seconds == pytest.approx(expected)
