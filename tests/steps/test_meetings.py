"""Settings of passes and updates that meet: one recorder under several forwards, scales, dtypes and meshes."""

from __future__ import annotations

import heapq
from functools import partial
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import losses, models, tree
from fppo.key import Key
from fppo.models.codes import is_coded
from fppo.runtime import fsdp
from fppo.runtime.mesh import Axis, Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo.runtime.watch import watched
from fppo.steps import ranks, recorded
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, compute_outputs, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.loss_scale import loss_scaled
from fppo.steps.micro_batching import MicroBatching, balance, fit, partition
from fppo.steps.optimizers import adamw, sgd
from fppo.steps.packed import Masks, indexed, masks_of
from fppo.steps.recorded import Recorder, records
from fppo.steps.sharded import accumulable, cast, wire_dtypes
from fppo.steps.train_state import init_state
from tests import tiny
from tests.models import hybrids
from tests.models.families import make
from tests.models.vision import make as make_vision
from tests.steps.test_invariance import POLICY_LOSSES
from tests.steps.test_recorded import assert_same, assert_same_update, by_ends, forwards

MICRO = MicroBatching(size=2)


def by_ends_halved(query, key, value, *, lengths, scale, **more):
    """Attention of half the scale: another kernel."""
    return by_ends(query, key, value, lengths=lengths, scale=scale / 2, **more)


@pytest.mark.slow
def test_one_recorder_serves_forwards_that_differ_in_anything():
    """Each in turn, and again: what is recorded for one is never run for another."""
    forward, record, params, log = forwards()
    other = {name: x.clone() for name, x in params.items()}
    rope = tiny.config(rope_parameters={"rope_type": "default", "rope_theta": 3.0})
    variants = [
        (forward, params, {}),
        (attrs.evolve(forward, kernels=attrs.evolve(forward.kernels, attention=by_ends_halved)), params, {}),
        (attrs.evolve(forward, model=models.build(rope)), params, {}),
        (forward, other, {"temperature": 0.25}),
        (forward, params, {"outputs": ("entropy", "log_probs")}),
        (forward, params, {"outputs": ("sum_squared_probs", "log_probs")}),
    ]
    seen = []
    for seed in (0, 1, 2):
        rows = tiny.experience(seed, 4)
        for own, weights, how in variants:
            got, expected = (
                compute_outputs(weights, rows, forward=own, micro_batching=MICRO, record=x, **how)
                for x in (record, None)
            )
            there = how.get("outputs", ("log_probs",))
            assert_same(*({name: getattr(x, name) for name in there} for x in (got, expected)))
            seen.append(expected.log_probs)
    assert not any(torch.allclose(seen[i], seen[j]) for i in range(4) for j in range(i))
    assert log.recorded == len(variants)


def thrice(outputs):
    return 3.0 * outputs[..., 0]


def test_a_recorded_critic_is_read_as_its_forward_says():
    model, params = tiny.model_and_params("value")
    forward, record, _, log = forwards("value")
    rows, values = tiny.experience(3, 4), []
    for _ in range(3):
        for own in (forward, attrs.evolve(forward, read=thrice)):
            run = partial(compute_outputs, params, rows, forward=own, micro_batching=MICRO, outputs=("values",))
            values = [run(record=x).values for x in (record, None)]
            torch.testing.assert_close(values[0], values[1])
    assert model.outputs == 1
    assert log.recorded == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_recorded_updates_meet_scales_dtypes_epochs_and_selections(dtype):
    """Three micro-batches a mini-batch and two epochs: gradients that are summed are not those that are overwritten."""
    forward, record, params, log = forwards()
    params = params if dtype is None else {name: x.float() for name, x in params.items()}
    forward = attrs.evolve(forward, model=attrs.evolve(forward.model, compute_dtype=dtype))
    optimizer = loss_scaled(adamw(lambda step: 0.1, eps=1e-3), first=2.0**10, interval=2)
    loop = Loop(mini_batch_size=6, micro_batching=MICRO, epochs=2, weight_mode="seq-mean-token-mean")
    terms = PolicyTerms(temperature=0.7, entropy_coef=0.1, kl_coef=0.2, kl_kind="k2", nll_coef=0.1)
    loss_fn = POLICY_LOSSES["ppo_clip" if dtype else "kl_cov"]  # a selection may turn on a rounding
    how = {"loss_fn": loss_fn, "terms": terms, "loop": loop, "optimizer": optimizer}
    batch = tiny.experience(5, 12, prompt=9, response=4, dtype=torch.float32 if dtype else torch.float64)
    states = [
        UpdateActor(forward=forward, record=x, **how)(init_state(params, optimizer), batch)[0] for x in (record, None)
    ]
    tolerance = 0.1 if dtype else 1e-9
    for name, x in states[1].params.items():
        torch.testing.assert_close(states[0].params[name], x, rtol=tolerance, atol=tolerance, msg=name)
    assert states[0].opt.scale == states[1].opt.scale != 2.0**10
    assert log.again > 5


def test_a_recorded_critic_with_several_outputs_is_the_plain_one():
    head = losses.two_hot_head(bins=5)
    model = models.build(tiny.config(num_hidden_layers=1), head="value", outputs=5)
    params = {name: x.double() for name, x in models.init_params(model, Key(0)).items()}
    _, record, _, log = forwards("value")
    forward = Forward(model, kernels=forwards("value")[0].kernels, read=head.read)
    make = partial(
        UpdateCritic,
        loss_fn=head.loss_fn,
        loop=Loop(mini_batch_size=5, micro_batching=MICRO),
        optimizer=sgd(lambda step: 0.1),
    )
    assert_same_update(make, [tiny.experience(seed, 10) for seed in (0, 1)], forward, record, params)
    assert log.again > 2


@pytest.mark.parametrize(
    ("name", "records_"),
    [
        *((name, True) for name in ("qwen2", "gemma2", "gpt2")),
        *((name, False) for name in ("qwen3_moe",)),
    ],
)
def test_models_whose_passes_are_as_long_as_any_are_recorded(name, records_):
    """But not those whose routers are read, and no model that is cut, recomputed (its MLPs alone, too) or compiled."""
    model, _ = make(name)
    assert records(model, recorded.LOCAL) is records_
    if records_:
        assert not records(attrs.evolve(model, checkpoint_layers=True), recorded.LOCAL)
        assert not records(attrs.evolve(model, compile_layers=True), recorded.LOCAL)
        assert not records(attrs.evolve(model, mlp_slice_tokens=64), recorded.LOCAL)
        for axis in ("replicate", "shard", "sequence", "context", "tensor", "expert", "pipeline"):
            mesh = Mesh({axis: Axis(2, 0)})
            assert not records(model, mesh), axis
        if name == "qwen2":
            assert not records(models.place(model, Mesh({"tensor": Axis(2, 0)})), recorded.LOCAL)


def test_models_with_states_images_or_a_longest_row_are_not_recorded():
    assert not any(records(models.build(hybrids.HYBRIDS[name]), recorded.LOCAL) for name in ("lfm2", "qwen3_next"))
    assert not records(make_vision("qwen2_vl")[1], recorded.LOCAL)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert not records(models.build(tiny.config(rope_parameters=rope)), recorded.LOCAL)  # it knows no longer row


def test_a_recorder_takes_rows_with_a_prompt_and_a_response_whose_tokens_are_their_own():
    """Rows that share prompts are other tokens than a recording has places for."""
    forward, record, params, _ = forwards()
    rows = tiny.experience(0, 4)
    placed, masks = record.placed(params, {}), masks_of(rows)
    assert record.takes(placed, (rows,), masks, forward)
    assert not record.takes(params, (rows,), masks, forward)
    assert not record.takes(placed, (rows,), None, forward)
    assert not record.takes(placed, (rows,), masks, attrs.evolve(forward, remove_padding=False))
    assert not record.takes(placed, (rows,), masks._replace(tokens=rows.tokens), forward)
    assert not record.takes(placed, (rows,), masks._replace(response=masks.response[:, :0]), forward)
    assert not record.takes(placed, (rows,), masks._replace(response=masks.attention), forward)


def test_parameters_of_other_dtypes_have_buffers_and_recordings_of_their_own():
    forward, record, params, log = forwards()
    small = {name: x.float() / 2 for name, x in params.items()}
    assert {x.dtype for x in record.placed(params, {}).values()} == {torch.float64}
    assert {x.dtype for x in record.placed(params, dict.fromkeys(params, torch.float32)).values()} == {torch.float32}
    for seed in (0, 1, 2):
        rows = tiny.experience(seed, 4)
        for weights in (params, small):
            run = partial(compute_log_probs, weights, rows, forward=forward, micro_batching=MicroBatching(size=4))
            torch.testing.assert_close(run(record=record), run(record=None))
    assert log.recorded == 2


def test_a_pass_with_gradients_is_recorded_apart_from_one_without():
    forward, record, params, _ = forwards()
    rows = tiny.experience(0, 4)
    placed, masks, seen = record.placed(params, {}), masks_of(rows), list[bool]()

    def run(params, columns, indices):
        seen.append(torch.is_grad_enabled())
        return columns[0].response_mask.sum()

    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            record(run, "count", placed, (rows,), masks, forward)
    assert seen == [True, False]
    record(run, "count", placed, (rows,), masks, forward)
    record(run, "count", placed, (rows,), masks, forward)
    assert seen == [True, False, True]  # recorded by its second call, and replayed by its third


def test_as_many_tokens_are_recorded_as_the_host_takes_to_launch():
    model, _ = make("qwen2")
    size = sum(shape.numel() for shape in model.whole_shapes.values())
    assert recorded.most_tokens(model) == int(recorded.LAYER_TOKENS * 2 / size)
    made = recorded.graphs(model, torch.device("cpu"))
    assert made.most_tokens == recorded.most_tokens(model)


@pytest.mark.parametrize("tokens", [27, 28])
def test_a_pass_of_exactly_so_many_tokens_is_recorded(tokens):
    forward, record, params, log = forwards()
    rows = tiny.experience(0, 5)
    own = int(rows.attention_mask.sum())
    record = Recorder(log, own if tokens == 28 else own - 1)
    compute_log_probs(params, rows, forward=forward, micro_batching=MicroBatching(size=5), record=record)
    assert log.made == (tokens == 28)


@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(1, 700), st.integers(1, 700), st.integers(0, 1000))
def test_sizes_of_recordings_are_powers_and_parts(count, prompt, response, seed):
    draw = np.random.default_rng(seed)
    attention = torch.zeros(count, prompt + response, dtype=torch.bool)
    for row, (a, b) in enumerate(
        zip(draw.integers(1, prompt + 1, count), draw.integers(1, response + 1, count), strict=True)
    ):
        attention[row, prompt - a : prompt + b] = True
    masks = Masks(attention, attention[:, prompt:])
    real, heads = int(attention.sum()), int(attention[:, prompt:].sum())
    found = recorded.sizes_of(masks)

    def power(n):
        return next(2**i for i in range(6, 20) if 2**i >= n)

    step = max(64, 2 ** max(real.bit_length() - 4, 0))
    tokens = step * (real // step + 1)
    part = tokens // 4
    responses = max(part, part * -(-heads // part))
    spare = -(-(tokens - real) // (power(prompt) + power(response)))
    rows = 8 * -(-(count + spare) // 8)
    assert found == recorded.Sizes(rows, power(prompt), power(response), tokens, responses)


# parameters on the wire

WIRE = {
    "qwen2": lambda name: True,
    "glm4_moe": lambda name: ".gate." not in name,  # a router's weight and its bias
    "llama": lambda name: True,
}


@pytest.mark.parametrize("name", WIRE)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_cast_leaves_the_value_head_and_what_is_no_weight(name, head):
    model, params = make(name, head=head, compute_dtype=torch.bfloat16)
    params = {key: x.float() for key, x in params.items()}
    kinds = wire_dtypes(model, params)
    inside = [key for key in params if key.startswith(model.prefix) and WIRE[name](key)]
    head_weight = [key for key in params if not key.startswith(model.prefix) and head == "lm"]
    expected = dict.fromkeys(params, torch.float32) | dict.fromkeys([*inside, *head_weight], torch.bfloat16)
    assert kinds == expected
    assert {key: x.dtype for key, x in cast(params, model).items()} == expected
    wide = wire_dtypes(attrs.evolve(model, compute_dtype=None), params)
    assert wide == dict.fromkeys(params, torch.float32)
    whole = {f"{model.prefix}layers.0.x": torch.ones(2, dtype=torch.int32)}
    assert set(wire_dtypes(model, whole).values()) == {torch.int32}
    assert not any(map(is_coded, params))


def test_gradients_are_summed_in_the_dtype_of_the_reduction():
    params = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.float64)}
    grads = SimpleNamespace(params={name: x.float() for name, x in params.items()})
    for reduce in (torch.float32, torch.bfloat16):
        mesh = Mesh({"shard": Axis(2, 0)}, sharding=Sharding(reduce_dtype=reduce))
        found = accumulable(grads, params, mesh)
        assert {name: x.dtype for name, x in found.params.items()} == {
            name: fsdp.reduce_dtype(x.dtype, mesh.sharding) for name, x in params.items()
        }


@pytest.mark.parametrize(("stage", "roots", "layers"), [(1, 1, 0), (2, 1, 3), (3, 1, 3)])
def test_passes_without_gradients_gather_what_their_stage_keeps(stage, roots, layers):
    """Everything once, or what is outside of the layers once and each layer in every pass."""
    model, params = tiny.model_and_params()
    batch = tiny.experience(1, 6)

    def run(mesh):
        mesh, watch = watched(attrs.evolve(mesh, sharding=Sharding(stage=stage)))
        shards, before = fsdp.shard(params, mesh), watch.traffic()["shard"]
        forward = Forward(model, mesh=mesh)
        found = compute_log_probs(shards, batch, forward=forward, micro_batching=MICRO)
        return found, watch.traffic()["shard"].since(before)

    expected = compute_log_probs(params, batch, forward=Forward(model), micro_batching=MICRO)
    for found, traffic in simulate({"shard": 2}, run):
        torch.testing.assert_close(found, expected)
        assert traffic.calls == roots + layers * 2 + 1  # the last has the results


# indices and shares


@pytest.mark.parametrize("what", ["mesh", "packed", "attention", "response"])
def test_indices_of_another_mesh_or_mask_are_refused(what):
    model, params = tiny.model_and_params()
    rows, forward = tiny.experience(0, 4), Forward(model)
    indices = indexed(rows, masks_of(rows), forward).indices
    plain = forward_micro_batch(params, rows, forward=forward, indices=indices).log_probs
    torch.testing.assert_close(plain, forward_micro_batch(params, rows, forward=forward).log_probs)
    match what:
        case "mesh":
            forward = attrs.evolve(forward, mesh=Mesh({"replicate": Axis(2, 0)}))
        case "packed":
            forward = attrs.evolve(forward, remove_padding=False)
        case "attention":
            rows = tree.replace(rows, attention_mask=rows.attention_mask.clone())
        case "response":
            rows = tree.replace(rows, response_mask=rows.response_mask.clone())
    with pytest.raises(ValueError, match="indices are of other rows or of another forward"):
        forward_micro_batch(params, rows, forward=forward, indices=indices)


def test_items_are_dealt_to_all_ranks_in_turn():
    mesh = Mesh({"shard": Axis(2, 1), "sequence": Axis(2, 0)})
    assert ranks.deal(6, mesh) == [[0, 4], [1, 5], [2], [3]]
    assert ranks.deal(0, mesh) == [[], [], [], []]


def test_fewer_rows_than_ranks_leave_some_without_any():
    model, _ = tiny.model_and_params()
    mesh = Mesh({"replicate": Axis(3, 0)})
    found = ranks.shares(model, [5, 9], mesh)
    assert sorted(found) == [[], [0], [1]]
    assert ranks.shares(model, [], mesh) == [[], [], []]
    assert ranks.shares(model, [5, 9], recorded.LOCAL) == [[0, 1]]


def test_ranks_make_as_many_passes_as_any_that_shares_parameters_or_experts_with_them():
    counts = [[1, 4, 0], [3, 2, 0]]

    def run(mesh, own, stage):
        mesh = attrs.evolve(mesh, sharding=None if stage is None else Sharding(stage=stage))
        return ranks.rounds(own, mesh, torch.device("cpu"))

    for axes, stage, together in (
        ({"shard": 2}, 3, True),
        ({"shard": 2}, None, False),
        ({"expert": 2}, None, True),
        ({"replicate": 2}, None, False),
    ):
        found = simulate(axes, partial(run, stage=stage), counts)
        expected = [[3, 4, 1]] * 2 if together else [[max(x, 1) for x in own] for own in counts]
        assert found == expected, axes
    assert ranks.rounds([], recorded.LOCAL, torch.device("cpu")) == []


# groups of rows, as they are described


def best_fit(lengths, budget):
    """Each sequence, the longest first, to the fullest group with room; of equally full ones to the first."""
    groups = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rooms = [(budget - sum(lengths[j] for j in group), number) for number, group in enumerate(groups)]
        there = [(left, number) for left, number in rooms if left >= lengths[i] and left > 0]
        if there:
            groups[min(there)[1]].append(i)
        else:
            groups.append([i])
    return [sorted(group) for group in groups]


def even(lengths, count):
    """The longest first to the lightest, then trades of the heaviest with the lightest."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups = [[i] for i in order[:count]]
    heap = [(lengths[i], k) for k, i in enumerate(order[:count])]
    heapq.heapify(heap)
    for i in order[count:]:
        load, k = heapq.heappop(heap)
        groups[k].append(i)
        heapq.heappush(heap, (load + lengths[i], k))
    for _ in range(count):
        loads = [sum(lengths[i] for i in group) for group in groups]
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[heavy] - loads[light]
        trades = [
            (abs(2 * (lengths[i] - lengths[j]) - gap), a, b)
            for a, i in enumerate(groups[heavy])
            for b, j in enumerate(groups[light])
        ]
        apart, a, b = min(trades)
        if gap < 2 or apart >= gap:
            break
        groups[heavy][a], groups[light][b] = groups[light][b], groups[heavy][a]
    return [sorted(group) for group in groups]


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=14)


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 60))
def test_a_budget_is_filled_evenly_where_that_fits_and_else_by_best_fit(lengths, budget):
    count = min(max(-(-sum(lengths) // budget), 1), len(lengths))
    level = even(lengths, count)
    fits = max(lengths) <= budget and all(sum(lengths[i] for i in part) <= budget for part in level)
    assert fit(lengths, budget) == partition(lengths, MicroBatching(token_budget=budget))
    assert fit(lengths, budget) == (level if fits else best_fit(lengths, budget))


@settings(max_examples=60)
@given(LENGTHS, st.data())
def test_even_groups_are_those_of_the_longest_first_and_trades(lengths, data):
    count = data.draw(st.integers(1, len(lengths)))
    assert balance(lengths, count) == even(lengths, count)
