"""Meshes: sums over real processes, and updates that two processes share."""

import itertools
import math
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.metrics import Max, Mean, Min, Sum, Term
from fppo.runtime import mesh as meshes
from fppo.runtime.mesh import Axis, Mesh, Sharding, all_reduce, data_metrics, data_sum, gather_over, place_on
from fppo.runtime.simulate import simulate
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny
from tests.distributed import processes

CPU = torch.device("cpu")
OPTIMIZER = adamw(schedule("constant", 1e-2), eps=1e-2, max_grad_norm=0.5)


def _updates(batch, mesh):
    """{name: (state, numbers)} of the updates to compare, two epochs each, on `batch`."""
    actor, actor_params = tiny.model_and_params("lm")
    critic, critic_params = tiny.model_and_params("value", seed=1)
    found = {}
    for mode in losses.MODES:
        loop = Loop(
            mini_batch_size=len(batch.tokens),
            micro_batching=MicroBatching(size=2),
            weight_mode=mode,
            horizon=9 if mode == "seq-mean-token-sum-norm" else None,
            epochs=2,
        )
        shared = {"loop": loop, "optimizer": OPTIMIZER}
        policy = {"loss_fn": losses.ppo_clip, "terms": PolicyTerms(entropy_coef=0.01, kl_coef=0.1)}
        first, second = (init_state(params, OPTIMIZER) for params in (actor_params, critic_params))
        found[f"actor {mode}"] = UpdateActor(forward=Forward(actor, mesh=mesh), **policy, **shared)(first, batch)
        found[f"critic {mode}"] = UpdateCritic(forward=Forward(critic, mesh=mesh), **shared)(second, batch)
    return {name: (state, metrics.report(report)) for name, (state, report) in found.items()}


def _batches():
    """7 rows; and 7 of which 2 have no token to train on."""
    batch = tiny.experience(14, 7)
    assert batch.response_mask.any(1).all()
    masked = batch.response_mask.clone()
    masked[5:] = False
    empty = batches.extend(type(batch), batch, response_mask=masked)
    return {"ragged": batch, "empty": empty}


def _numbers(mesh, rank):
    x = torch.tensor([1.0, 2.0]) * (rank + 1)
    kept = x.clone()
    kinds = {"mean": Mean(x[0], x[1]), "sum": Sum(x[1]), "max": Max(x[1]), "min": Min(x[1]), "term": Term(x[0])}
    report = data_metrics(kinds, mesh)
    return {"sum": data_sum({"x": x}, mesh)["x"], "unchanged": torch.equal(x, kept), "report": metrics.report(report)}


def _found(mesh):
    results = {name: _updates(batch, mesh) for name, batch in _batches().items()}
    plain = {
        name: {key: (dict(tree.leaves_with_paths(state)), numbers) for key, (state, numbers) in updates.items()}
        for name, updates in results.items()
    }
    return {"updates": plain, "numbers": _numbers(mesh, mesh["replicate"].rank)}


@pytest.fixture(scope="module")
def ranks():
    """What each of two processes found."""
    return processes.run({"replicate": 2}, _found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ragged", "empty"])
def test_two_processes_that_share_a_batch_do_the_update_of_one(ranks, kind):
    expected = _updates(_batches()[kind], Mesh.local())
    for found in (rank["updates"][kind] for rank in ranks):
        assert found.keys() == expected.keys()
        for name, (state, numbers) in expected.items():
            leaves, found_numbers = found[name]
            for path, leaf in tree.leaves_with_paths(state):
                torch.testing.assert_close(
                    leaves[path], leaf, atol=1e-10, rtol=1e-10, msg=lambda m, at=(name, path): f"{at}: {m}"
                )
            assert found_numbers == pytest.approx(numbers, abs=1e-10, rel=1e-10, nan_ok=True), name


@pytest.mark.slow
def test_both_processes_hold_the_same_bits(ranks):
    first, second = (rank["updates"] for rank in ranks)
    for kind, name in ((kind, name) for kind, updates in first.items() for name in updates):
        assert tree.digest(first[kind][name][0]) == tree.digest(second[kind][name][0])


def test_sums_and_metrics_go_over_all_processes_and_change_no_argument(ranks):
    for rank in ranks:
        assert rank["numbers"]["sum"].tolist() == [3.0, 6.0]
        assert rank["numbers"]["unchanged"]
        assert rank["numbers"]["report"] == {"mean": 0.5, "sum": 6.0, "max": 4.0, "min": 2.0, "term": 3.0}


def test_on_one_process_collectives_are_the_identity():
    x = torch.ones(3)
    assert all_reduce(x, Axis()) is x
    assert data_sum({"x": x}, Mesh.local())["x"] is x
    report = {"a": metrics.mean(1.0)}
    assert data_metrics(report, Mesh.local()) is report


def test_unknown_axes_are_an_error():
    with pytest.raises(ValueError, match=r"\['model'\]; choose from"):
        Mesh(axes={"model": Axis()})


def test_sums_go_in_buckets_of_one_dtype(monkeypatch):
    monkeypatch.setattr(meshes, "BUCKET_BYTES", 64)
    sizes = [(3, 4), (), (5,), (0, 2), (40,), (2, 2), (7,)]
    kinds = [torch.float32, torch.float64, torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16]
    calls, original = [], torch.distributed.all_reduce
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda x, **kw: (calls.append((x.dtype, x.numel())), original(x, **kw))[1]
    )

    def values(rank):
        drawn = [torch.arange(torch.Size(s).numel()).reshape(s).to(k) + rank for s, k in zip(sizes, kinds, strict=True)]
        return {"tensors": drawn, "name": "plain", "number": 3}

    def run(mesh):
        own = values(2 * mesh["replicate"].rank + mesh["shard"].rank)
        kept = tree.copy(own)
        found = data_sum(own, mesh)
        assert tree.digest(own) == tree.digest(kept)
        return found

    expected = tree.map(lambda *x: torch.stack(x).sum(0), *(values(rank) for rank in range(4)))
    for found in simulate({"replicate": 2, "shard": 2}, run):
        assert tree.digest(found) == tree.digest(expected)
    # 12 + 5 numbers are more than a bucket holds; the empty tensor goes with others
    assert sorted(calls, key=str)[::8] == sorted(set(calls), key=str)
    assert {size for _, size in calls} == {12, 5, 40, 7}


def test_what_one_rank_is_asked_all_hear_of():
    """As a signal, which may reach one process alone."""
    for flags in ([False, True, False], [False, False, False], [True, True, True]):
        heard = simulate({"shard": 3}, lambda mesh, flag: meshes.any_rank(flag, mesh, torch.device("cpu")), flags)
        assert heard == [any(flags)] * 3


def test_what_ranks_of_several_axes_gather_lies_by_their_places():
    axes = ("replicate", "shard")

    def on_rank(mesh):
        return gather_over(torch.tensor([place_on(mesh, axes), mesh["shard"].rank]), mesh, axes).tolist()

    assert simulate({"replicate": 2, "shard": 3}, on_rank) == [[[place, place % 3] for place in range(6)]] * 6


def lines_by_hand(sizes, axes):
    """The lines of ranks that differ on these axes alone, from the ranks' places."""
    places = list(itertools.product(*map(range, sizes.values())))
    own, rest = ([list(sizes).index(name) for name in names] for names in (axes, [x for x in sizes if x not in axes]))
    lines = {}
    for rank, place in enumerate(places):
        lines.setdefault(tuple(place[i] for i in rest), []).append((tuple(place[i] for i in own), rank))
    return [[rank for _, rank in sorted(line)] for _, line in sorted(lines.items())]


@given(
    st.permutations(["replicate", "shard", "tensor"]), st.lists(st.integers(1, 3), min_size=3, max_size=3), st.data()
)
def test_lines_are_of_ranks_that_differ_on_no_other_axis(names, numbers, data):
    sizes = dict(zip(names, numbers, strict=True))
    axes = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    ranks = torch.arange(math.prod(numbers)).reshape(numbers)
    found = meshes.lines_of(ranks, names, [*axes, "expert"])
    assert found == lines_by_hand(sizes, axes)


def test_metrics_go_over_the_ranks_with_other_rows_alone():
    """Each kind is merged as reports are; ranks of a sequence axis have the same rows."""
    axes = {"replicate": 2, "shard": 2, "expert": 2, "sequence": 2}

    def report_of(number):
        x = torch.tensor([1.0 + number, (5.0 - number) ** 2]).double()
        kinds = {"mean": Mean(x[0], x[1]), "sum": Sum(x[1]), "max": Max(-x[0]), "min": Min(x[1]), "term": Term(x[0])}
        return {name: type(kind)(*(part.clone() for part in kind)) for name, kind in kinds.items()}

    def run(mesh):
        own = report_of(place_on(mesh, meshes.DATA_AXES))
        found = data_metrics(own, mesh)
        assert [type(kind) for kind in found.values()] == [Mean, Sum, Max, Min, Term]
        summed = data_sum({"x": own["sum"].value, "n": 3}, mesh)
        return metrics.report(found), summed["x"].item(), summed["n"]

    merged = metrics.report(metrics.merge(*map(report_of, range(8))))
    for report, x, n in simulate(axes, run):
        assert report == pytest.approx(merged)
        assert (x, n) == (merged["sum"], 3)


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_are_summed_over_each_axis_with_shares_of_them_once(sharded):
    """Gradients of shards are sums over the shard axis already."""
    axes = {"replicate": 2, "shard": 2, "context": 2}

    def run(mesh):
        number = place_on(mesh, ("replicate", "shard", "context"))
        mesh = attrs.evolve(mesh, sharding=Sharding() if sharded else None)
        return number, meshes.gradient_sum({"x": torch.tensor([2.0**number])}, mesh)["x"].item()

    for number, found in simulate(axes, run):
        others = [n for n in range(8) if not sharded or n // 2 % 2 == number // 2 % 2]
        assert found == sum(2.0**n for n in others)


def test_values_of_all_ranks_or_of_a_line_come_as_text_in_order():
    def run(mesh):
        value = {"rank": place_on(mesh, meshes.AXES), "text": "é" * mesh["shard"].rank, "none": None}
        every = meshes.gather_objects(value, mesh, meshes.AXES, CPU)
        return every, [x["rank"] for x in meshes.gather_objects(value, mesh, ["shard"], CPU)]

    for rank, (every, line) in enumerate(simulate({"replicate": 2, "shard": 3}, run)):
        assert every == [{"rank": n, "text": "é" * (n % 3), "none": None} for n in range(6)]
        assert line == [rank // 3 * 3 + n for n in range(3)]
    assert meshes.gather_objects(value := object(), Mesh(), meshes.AXES, CPU) == [value]


def test_a_mesh_tells_which_axes_cut_what():
    two = Axis(2, 1)
    for name in meshes.AXES:
        mesh = Mesh({name: two})
        assert mesh.cuts == (name in ("pipeline", "expert", "tensor"))
        assert not mesh.sharded
        assert attrs.evolve(mesh, sharding=Sharding()).sharded == (name in ("shard", "expert"))
        assert attrs.evolve(mesh, sharding=Sharding()).cuts == (mesh.cuts or name == "shard")
        assert mesh.token_axis == (two if name in ("sequence", "context") else Axis())
        assert (place_on(mesh, meshes.AXES), meshes.ranks_on(mesh, meshes.AXES)) == (1, 2)
        assert not meshes.is_first(mesh)
    assert meshes.is_first(Mesh({"replicate": Axis(2, 0)}))


@pytest.mark.parametrize("names", [None, ("shard",)])
def test_dimensions_of_a_device_mesh_have_names(names):
    device_mesh = SimpleNamespace(mesh_dim_names=names, ndim=2)
    with pytest.raises(ValueError, match=r"have no names: give mesh_dim_names, some of \['pipeline', "):
        Mesh.of(device_mesh)  # pyright: ignore[reportArgumentType]
