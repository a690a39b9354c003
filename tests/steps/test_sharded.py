"""Passes on sharded parameters: the numbers of whole ones, and whole layers only for as long as they are needed."""

import gc
import weakref
from functools import cache, partial

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import losses, metrics, models, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo.steps import forward as forwards
from fppo.steps import loop as loops
from fppo.steps import ranks
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, compute_log_probs, compute_values, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.scores import compute_reward_scores
from fppo.steps.sharded import rooted
from fppo.steps.train_state import init_state, optimizer_step
from tests import tiny

LAYERS = 4
CASES = [(1, False), (1, True), (2, False), (2, "selective"), (3, False), (3, True), (3, "selective")]


def sharded(mesh, **changes):
    return attrs.evolve(mesh, sharding=Sharding(**changes))


@cache
def deep_model(**changes):
    model = models.build(tiny.config(num_hidden_layers=LAYERS), **changes)
    return model, models.init_params(model, Key(0))


def loss_and_grads(model, params, batch, mesh):
    def loss(params):
        out = forward_micro_batch(params, batch, forward=Forward(model, mesh=mesh))
        return out.log_probs.square().sum()

    return value_and_grad(loss)(params)


@pytest.mark.parametrize(("stage", "again"), CASES)
def test_bfloat16_passes_have_the_bits_of_whole_parameters(stage, again):
    """Two ranks with the same rows: twice the gradient, from the same casts."""
    model, params = deep_model(compute_dtype=torch.bfloat16, checkpoint_layers=again)
    batch = tiny.experience(1, 3, dtype=torch.float32)
    loss, grads = loss_and_grads(model, params, batch, Mesh.local())

    def run(mesh):
        mesh = sharded(mesh, stage=stage)
        loss, grads = loss_and_grads(model, fsdp.shard(params, mesh), batch, mesh)
        return loss, fsdp.gather(grads, model.shapes, mesh)

    for loss_, found in simulate({"shard": 2}, run):
        assert torch.equal(loss_, loss)
        for name, grad in grads.items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], 2 * grad, rtol=2e-2, atol=1e-3 * float(grad.abs().max()))


def watch(monkeypatch):
    """Weak references to all whole tensors of layers gathered so far, the order of events, and at each use the number
    of whole tensors alive before it."""
    gc.collect()
    gc.freeze()  # what other tests have left takes half a second to look through, at each use
    alive, events, before = [], [], []
    begin, scatter = fsdp.begin_gather, fsdp.begin_reduce_scatter

    def begin_gather(shards, shapes, dtypes, axes):
        finish, axis = begin(shards, shapes, dtypes, axes), axes[0]
        if axis.rank == 0:
            events.append("begin")

        def finished():
            found = finish()
            if axis.rank == 0:
                gc.collect()
                events.append("use")
                before.append(sum(x() is not None for x in alive))
                alive.extend(weakref.ref(x.untyped_storage()) for x in found if len(shapes) > 3)
            return found

        return finished

    def begin_reduce_scatter(grads, dtypes, axes, sharding):
        if axes[0].rank == 0:
            events.append("reduce")
        return scatter(grads, dtypes, axes, sharding)

    monkeypatch.setattr(fsdp, "begin_gather", begin_gather)
    monkeypatch.setattr(fsdp, "begin_reduce_scatter", begin_reduce_scatter)
    return alive, events, before


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True, "selective"])
def test_stage_3_keeps_no_layer_between_forward_and_backward(again, monkeypatch):
    model, params = deep_model(checkpoint_layers=again)
    batch = tiny.experience(1, 3, dtype=torch.float32)
    alive, events, before = watch(monkeypatch)
    kept = {}

    def run(stage, mesh):
        mesh = sharded(mesh, stage=stage)
        shards = {name: x.requires_grad_() for name, x in fsdp.shard(params, mesh).items()}
        out = forward_micro_batch(shards, batch, forward=Forward(model, mesh=mesh))
        if mesh["shard"].rank == 0:
            gc.collect()
            kept[stage] = sum(x() is not None for x in alive)
        torch.autograd.grad(out.log_probs.sum(), list(shards.values()))

    for stage in (3, 2):
        for log in (alive, events, before):
            log.clear()
        simulate({"shard": 2}, partial(run, stage))
        # embeddings and head, then each layer; again backward under stage 3; and gradients of each
        assert events.count("begin") == events.count("use") == 1 + LAYERS * (2 if stage == 3 else 1)
        assert events.count("reduce") == 1 + LAYERS
        if stage == 3:
            assert not any(before)
    per_layer = sum(name.startswith("model.layers.0.") for name in model.shapes)
    assert kept[3] == 0
    assert kept[2] >= LAYERS * (per_layer - 3)  # all but biases


@pytest.mark.slow
def test_the_next_gather_begins_before_a_layer_runs_in_both_directions(monkeypatch):
    batch = tiny.experience(1, 3, dtype=torch.float32)
    for again in (False, True, "selective"):
        model, params = deep_model(checkpoint_layers=again)
        for prefetch, forward in ((True, ["begin", "begin", "use", "begin", "use"]), (False, ["begin", "use"] * 2)):
            with monkeypatch.context() as patch:
                _, events, _ = watch(patch)

                def run(mesh, model=model, params=params, prefetch=prefetch):
                    mesh = sharded(mesh, prefetch=prefetch)
                    return loss_and_grads(model, fsdp.shard(params, mesh), batch, mesh)

                simulate({"shard": 2}, run)
            backward = events[1 + 2 * LAYERS + 1 :]
            assert events[: len(forward)] == forward
            expected = ["begin", "begin", "use", "reduce"] if prefetch else ["begin", "use", "reduce"]
            assert backward[: len(expected)] == expected
            assert backward[-2:] == ["reduce", "reduce"]


@pytest.mark.parametrize(("stage", "again"), [(2, False), (3, False), (3, "selective")])
def test_gradients_are_reduced_while_the_backward_pass_goes_on(stage, again, monkeypatch):
    """Also for two passes in one loss, whose gradients autograd adds up: not before they have arrived."""
    model, params = deep_model(checkpoint_layers=again)
    batch = tiny.experience(1, 4, dtype=torch.float32)
    events, original = [], fsdp._reduce_scatter_single

    class Late:
        """The sum is made when it is waited for, and is NaN before."""

        def __init__(self, out, whole, group, async_op):
            self.args, self.group = (out.fill_(torch.nan), whole), group
            assert async_op
            events.append("begin") if group.rank() == 0 else None

        def wait(self):
            events.append("wait") if self.group.rank() == 0 else None
            original(*self.args, group=self.group)

    def loss(shards, mesh):
        halves = [batches.rows(batch, part) for part in ([0, 1], [2, 3])]
        outs = [forward_micro_batch(shards, half, forward=Forward(model, mesh=mesh)) for half in halves]
        return torch.stack([out.log_probs.square().sum() for out in outs]).sum()

    def run(mesh):
        mesh = sharded(mesh, stage=stage)
        return value_and_grad(loss)(fsdp.shard(params, mesh), mesh)[1]

    expected = simulate({"shard": 2}, run)
    monkeypatch.setattr(fsdp, "_reduce_scatter_single", lambda out, whole, **kw: Late(out, whole, **kw))
    found = simulate({"shard": 2}, run)
    for ours, theirs in zip(found, expected, strict=True):
        assert tree.digest(ours) == tree.digest(theirs)
    groups = 1 + LAYERS
    assert events == ["begin", *["wait", "begin"] * (groups - 1), "wait"] * 2


@pytest.mark.slow
def test_stage_1_communicates_once_for_all_micro_batches(monkeypatch):
    model, params = deep_model()
    batch, optimizer = tiny.experience(1, 11, dtype=torch.float32), adamw(lambda step: 0.1)
    _, events, _ = watch(monkeypatch)

    def run(stage, mesh):
        mesh = sharded(mesh, stage=stage)
        UpdateActor(
            forward=Forward(model, mesh=mesh),
            loss_fn=losses.gpg,
            loop=Loop(mini_batch_size=11, micro_batching=MicroBatching(size=2)),
            optimizer=optimizer,
        )(init_state(fsdp.shard(params, mesh), optimizer), batch)

    simulate({"shard": 2}, partial(run, 1))
    assert (events.count("begin"), events.count("reduce")) == (1, 1)
    events.clear()
    simulate({"shard": 2}, partial(run, 2))  # what is outside the layers once, too
    assert (events.count("begin"), events.count("reduce")) == (1 + 3 * LAYERS, 3 * (1 + LAYERS))


def updated(model, params, batch, mesh, optimizer):
    return UpdateActor(
        forward=Forward(model, mesh=mesh),
        loss_fn=losses.gpg,
        loop=Loop(mini_batch_size=4, micro_batching=MicroBatching(size=1)),
        optimizer=optimizer,
    )(init_state(fsdp.shard(params, mesh), optimizer), batch)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "lm"), [(2, True), (3, True), (3, False)])
def test_what_is_outside_the_layers_is_gathered_once_for_a_mini_batch_and_changes_no_bit(stage, lm, monkeypatch):
    """Two mini-batches, each of two passes on each rank; then four passes without gradients."""
    model, params = deep_model(compute_dtype=torch.bfloat16 if lm else None)
    batch, cut = tiny.experience(1, 8, dtype=torch.float32), MicroBatching(size=2)
    roots, begin, outside = [], fsdp.begin_gather, len(model.shapes) - 12 * LAYERS

    def begin_gather(shards, shapes, dtypes, axes):
        if axes[0].rank == 0:
            roots.append("root" if len(shapes) == outside else "layer")
        return begin(shards, shapes, dtypes, axes)

    def run(mesh):
        mesh = sharded(mesh, stage=stage)
        after = updated(model, params, batch, mesh, adamw(lambda step: 0.1))
        trained = len(roots)
        mine = compute_log_probs(after.params, batch, forward=Forward(model, mesh=mesh), micro_batching=cut)
        return after, mine, trained

    monkeypatch.setattr(fsdp, "begin_gather", begin_gather)
    found = simulate({"shard": 2}, run)
    layers = LAYERS * (2 if stage == 3 else 1)
    assert roots[:3] == ["root", "layer", "layer"]
    assert (roots[: found[0][2]].count("root"), roots[: found[0][2]].count("layer")) == (2, 4 * layers)
    assert (roots[found[0][2] :].count("root"), roots[found[0][2] :].count("layer")) == (1, 4 * LAYERS)
    for module in (forwards, loops):
        monkeypatch.setattr(module, "rooted", lambda params, model, mesh: params)
    roots.clear()
    for ours, theirs in zip(found, simulate({"shard": 2}, run), strict=True):
        assert tree.digest(ours[:2]) == tree.digest(theirs[:2])
    assert roots.count("root") == 4 + 4


def test_passes_in_one_loss_may_share_what_is_outside_the_layers():
    model, params = deep_model()
    batch = tiny.experience(1, 4, dtype=torch.float32)
    halves = [batches.rows(batch, part) for part in ([0, 1], [2, 3])]

    def loss(given, mesh):
        outs = [forward_micro_batch(given, half, forward=Forward(model, mesh=mesh)) for half in halves]
        return torch.stack([out.log_probs.square().sum() for out in outs]).sum()

    def run(mesh):
        mesh = sharded(mesh, stage=3)
        shards = fsdp.shard(params, mesh)
        grads = value_and_grad(loss)(rooted(shards, model, mesh), mesh)[1]
        return grads.params, value_and_grad(loss)(shards, mesh)[1]

    for shared, apart in simulate({"shard": 2}, run):
        assert tree.digest(shared) == tree.digest(apart)


def test_what_was_gathered_for_a_mini_batch_is_gone_when_its_step_is_made(monkeypatch):
    model, params = deep_model()
    alive, counted, begin, outside = {0: [], 1: []}, [], fsdp.begin_gather, len(model.shapes) - 12 * LAYERS

    def begin_gather(shards, shapes, dtypes, axes):
        finish = begin(shards, shapes, dtypes, axes)

        def finished():
            found = finish()
            alive[axes[0].rank].extend(weakref.ref(x.untyped_storage()) for x in found if len(shapes) == outside)
            return found

        return finished

    def counting(*args, mesh, **keywords):
        counted.append(sum(x() is not None for x in alive[mesh["shard"].rank]))
        return plain.update(*args, mesh=mesh, **keywords)

    plain = adamw(lambda step: 0.1)
    monkeypatch.setattr(fsdp, "begin_gather", begin_gather)
    mesh = partial(sharded, stage=3)
    batch = tiny.experience(1, 8, dtype=torch.float32)
    simulate({"shard": 2}, lambda local: updated(model, params, batch, mesh(local), plain._replace(update=counting)))
    assert len(alive[0]) == 2 * outside
    assert counted == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_passes_without_gradients_are_those_of_one_process(stage):
    lm, value = (tiny.model_and_params(head) for head in ("lm", "value"))
    batch = tiny.experience(11, 7)
    shares = [[], [4, 0], [1, 2, 3, 5, 6]]

    def run(mesh, share):
        mesh, rows = sharded(mesh, stage=stage), batches.rows(batch, share)
        cut, critic = MicroBatching(size=2), fsdp.shard(value[1], mesh)
        policy, judge = Forward(lm[0], mesh=mesh), Forward(value[0], mesh=mesh)
        return (
            compute_log_probs(fsdp.shard(lm[1], mesh), rows, forward=policy, micro_batching=cut),
            compute_values(critic, rows, forward=judge, micro_batching=cut),
            compute_reward_scores(critic, rows, forward=judge, micro_batching=cut),
        )

    (expected,) = simulate({}, run, [list(range(7))])
    for share, found in zip(shares, simulate({"shard": 3}, run, shares), strict=True):
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(
                x, y[share], rtol=1e-6 if y.ndim == 1 else 1e-12, atol=1e-7 if y.ndim == 1 else 1e-12
            )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(bad):
    params = {"w": torch.ones(5, 2), "b": torch.ones(1)}
    optimizer = adamw(lambda step: 0.1)

    def run(mesh, spoiled):
        mesh = sharded(mesh)
        state = init_state(fsdp.shard(params, mesh), optimizer)
        grads = fsdp.shard({"w": torch.ones(5, 2), "b": torch.ones(1)}, mesh)
        if spoiled and mesh["shard"].rank == 1:
            grads["w"][0, 0] = bad
        new, report = optimizer_step(state, grads, optimizer=optimizer, mesh=mesh)
        same = tree.digest(new.params) == tree.digest(state.params)
        return same, metrics.report(report)

    for same, report in simulate({"shard": 2}, run, [True, True]):
        assert same
        assert report["skipped"] == 1.0
    for rank, (same, report) in enumerate(simulate({"shard": 4}, run, [False] * 4)):
        assert same == (rank == 3)  # which holds no row of either
        assert report["skipped"] == 0.0
        assert report["grad_norm"] == pytest.approx(11**0.5)


@pytest.mark.parametrize("key", [None, Key(3)])
def test_every_row_is_in_one_mini_batch_and_a_key_orders_them_by_their_ids(key):
    ids = torch.arange(100, 111)
    numbers = ranks.mini_batches(ids, 4, key=key)
    assert [len(part) for part in numbers] == [4, 4, 3]
    drawn = torch.cat(numbers)
    assert sorted(drawn.tolist()) == list(range(11))
    shuffled = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    again = torch.cat(ranks.mini_batches(ids[shuffled], 4, key=key))
    if key is None:
        assert drawn.tolist() == again.tolist() == list(range(11))
    else:
        assert ids[drawn].tolist() == ids[shuffled][again].tolist() != ids.tolist()
    with pytest.raises(ValueError, match="mini_batch_size=0"):
        ranks.mini_batches(ids, 0)


def test_a_missing_parameter_is_named():
    model, params = tiny.model_and_params()

    def run(mesh):
        mesh = sharded(mesh)
        shards = {name: x for name, x in fsdp.shard(params, mesh).items() if name != "model.norm.weight"}
        return loss_and_grads(model, shards, tiny.experience(1, 2), mesh)

    with pytest.raises(ValueError, match=r"parameters \['model.norm.weight'\] are missing"):
        simulate({"shard": 2}, run)
