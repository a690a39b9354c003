"""The cases of a search, their order, and its counts of what is not planned: without a plan of any model."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo.models.adapted import Lora
from fppo.runtime.mesh import Sharding
from fppo.studies.plan import search
from fppo.studies.plan.case import hardware_of, with_sequences
from fppo.studies.plan.estimate import ORDER, ROOM, Rough
from fppo.studies.plan.passes import Built
from fppo.studies.plan.plan import pipeline_work, plan
from fppo.studies.plan.search import Candidate, Remedy, applied, families, meshes, remedies, seconds_per_token
from fppo.studies.plan.track import ACTIVATIONS, LOGITS
from tests.studies.plan.cases import case, mixture

GPU = hardware_of("h100")


def whole(**changes):
    """A case on a GPU with something to change of every kind."""
    return case(**{"hardware": GPU, "mesh": {"replicate": 4, "shard": 2}, "stage": 1, "tokens": 512, **changes})


def test_every_kind_of_change_is_tried_the_smallest_first():
    found = families(whole(log_probs="reference", compute_dtype=None))
    assert found == [
        [{"model.log-probs": "chunked"}],
        [{"model.compute-dtype": "bfloat16"}],
        [{"mesh.stage": 2}, {"mesh.stage": 3}],
        [{"actor.token-budget": n * 64} for n in (4, 2, 1)],
        [{"mesh.replicate": 2, "mesh.shard": 4}, {"mesh.replicate": 1, "mesh.shard": 8}],
        [{"model.checkpoint-layers": "selective"}, {"model.checkpoint-layers": True}],
        [{"mesh.replicate": 2, "mesh.sequence": 2}, {"mesh.replicate": 1, "mesh.sequence": 4}],
        [
            {"mesh.replicate": 2, "mesh.context": 2},
            {"mesh.replicate": 1, "mesh.context": 4},
        ],
        [{"mesh.replicate": 2, "mesh.tensor": 2}, {"mesh.replicate": 1, "mesh.tensor": 4}],  # of four heads
        [{"model.offload": "moments"}, {"model.offload": "all"}, {"model.offload": "optimizer_step"}],
        [{"mesh.replicate": 2, "mesh.pipeline": 2}],  # of three layers
    ]


@pytest.mark.slow
def test_half_of_an_odd_number_of_sequences_is_rounded_up():
    budgets = {rows: families(whole(tokens=rows * 64))[2] for rows in (2, 5, 7)}
    assert {rows: [each["actor.token-budget"] // 64 for each in budgets[rows]] for rows in budgets} == {
        2: [1],
        5: [3, 2, 1],
        7: [4, 2, 1],
    }


def test_what_is_changed_already_is_not_tried():
    done = whole(
        compute_dtype=torch.bfloat16,
        mesh={},
        stage=3,
        tokens=64,
        checkpoint_layers=True,
        offload="optimizer_step",
    )
    assert families(done) == []
    selective = attrs.evolve(done, checkpoint_layers="selective", offload="moments")
    assert families(selective) == [
        [{"model.checkpoint-layers": True}],
        [{"model.offload": "all"}, {"model.offload": "optimizer_step"}],
    ]
    adapted = attrs.evolve(done, lora=Lora(4, 1.0), offload="none")  # whose base stays
    assert families(adapted) == [[{"model.offload": "moments"}]]
    assert families(attrs.evolve(adapted, offload="moments")) == []
    assert families(attrs.evolve(done, hardware=hardware_of("cpu"), offload="none", compute_dtype=None)) == []


def test_a_change_is_one_of_its_own_field_alone():
    what = whole(micro_batches=3)
    assert applied(what, {"model.log-probs": "reference"}) == attrs.evolve(what, log_probs="reference")
    assert applied(what, {"model.checkpoint-layers": True}) == attrs.evolve(what, checkpoint_layers=True)
    assert applied(what, {"model.offload": "moments"}) == attrs.evolve(what, offload="moments")
    assert applied(what, {"model.compute-dtype": "bfloat16"}) == attrs.evolve(what, compute_dtype=torch.bfloat16)
    assert applied(what, {"mesh.stage": 2}) == attrs.evolve(what, sharding=Sharding(stage=2))
    smaller = applied(what, {"actor.token-budget": 128})
    assert (smaller.rows, smaller.micro_batches, smaller.budget) == (2, 12, 128)
    assert smaller.mini_batch == what.mini_batch


@pytest.mark.parametrize("axis", ["pipeline", "context", "tensor"])
def test_an_axis_of_the_same_rows_leaves_the_mini_batch_as_it_is(axis):
    what = whole(micro_batches=3)
    cut = applied(what, {"mesh.replicate": 2, f"mesh.{axis}": 2})
    assert (cut.data_ranks, cut.micro_batches, cut.mini_batch) == (4, 6, what.mini_batch)


def test_every_mesh_of_so_many_gpus_is_tried_once():
    found = list(meshes(8))
    keys = [(*(mesh[axis] for axis in ORDER), virtual) for mesh, virtual in found]
    assert len(set(keys)) == len(keys)
    assert all(math.prod(mesh.values()) == 8 and mesh["expert"] == 1 for mesh, _ in found)
    assert all(1 in (mesh["sequence"], mesh["context"]) for mesh, _ in found)
    assert {virtual for mesh, virtual in found if mesh["pipeline"] == 1} == {1}
    assert {virtual for mesh, virtual in found if mesh["pipeline"] > 1} == {1, 2, 4}
    # 2^3 in order over pipeline, replicate, shard, tensor and either of two axes that cut rows
    ways = sum(
        (3 if a else 1) * (2 if c else 1)
        for a in range(4)
        for b in range(4 - a)
        for c in range(4 - a - b)
        for _ in range(4 - a - b - c)
    )
    assert len(found) == ways
    with_experts = [mesh for mesh, _ in meshes(4, experts=True)]
    assert {mesh["expert"] for mesh in with_experts} == {1, 2, 4}
    assert all(math.prod(mesh.values()) == 4 for mesh in with_experts)


def planned(what, seconds, fits=True):
    """The part of a plan that a search reads."""
    return SimpleNamespace(case=what, seconds=seconds, tokens=what.mini_batch * what.length, fits=fits)


def test_a_change_costs_the_time_of_all_gpus_for_each_token():
    what = whole(micro_batches=3)  # 8 rows on each of 8 ranks, three times
    assert seconds_per_token(planned(what, 12.0)) == 12.0 * 8 / (8 * 8 * 3 * 64)


def test_of_changes_that_help_the_cheapest_comes_first(monkeypatch):
    """Each is planned at its smallest with which it fits."""
    what = whole(compute_dtype=torch.bfloat16, mesh={"shard": 2}, tokens=256)
    times = {"mesh.stage": 3.0, "actor.token-budget": 1.0, "model.checkpoint-layers": 2.0}
    fit = [{"mesh.stage": 3}, {"actor.token-budget": 64}, {"model.checkpoint-layers": "selective"}]
    changed = {}

    def found(at, *, only_if_fits, built):
        flags = next(flags for flags, other in changed.items() if other == at)
        return planned(at, times.get(flags[0][0], 9.0), dict(flags) in fit)

    for family in families(what):
        changed |= {tuple(flags.items()): applied(what, flags) for flags in family}
    monkeypatch.setattr(search, "plan", found)
    memory = {ACTIVATIONS: 1.0, LOGITS: 1.0}
    base = SimpleNamespace(case=what, peak=SimpleNamespace(memory=memory))
    assert [dict(x.flags) for x in remedies(base)] == [fit[1], fit[2], fit[0]]


def test_more_gpus_together_with_other_changes_are_named_with_all_of_these(monkeypatch):
    kept = [[{"model.checkpoint-layers": True}]]
    monkeypatch.setattr(search, "families", lambda case: [] if case.checkpoint_layers else kept)

    def found(at, *, only_if_fits, built):
        return planned(at, 1.0, at.size("shard") >= 4 and at.checkpoint_layers is True)

    monkeypatch.setattr(search, "plan", found)
    what = whole(mesh={"shard": 2})
    base = SimpleNamespace(case=what, peak=SimpleNamespace(memory={ACTIVATIONS: 1.0, LOGITS: 1.0}))
    (remedy,) = remedies(base)
    assert remedy.flags == {"gpus": 4, "mesh.shard": 4, "model.checkpoint-layers": True}
    assert remedy.plan.case == applied(what, remedy.flags)


def test_a_search_sorts_meshes_by_time_and_those_too_large_by_memory(monkeypatch):
    what = case(hardware=GPU, compute_dtype=torch.bfloat16)
    sizes = {"replicate": 1.0, "shard": 0.5, "tensor": 2.0}

    def rough(at, facts):
        wide = next((axis for axis, size in at.mesh.items() if size > 1), "replicate")
        limit = ROOM * GPU.memory
        return Rough(
            10.0 * sizes.get(wide, 3.0), limit * (1.0 if wide in ("replicate", "shard") else sizes.get(wide, 1.5))
        )

    tried = []
    monkeypatch.setattr(search, "rough", rough)
    monkeypatch.setattr(search, "plan", lambda at, **_: tried.append(at) or planned(at, 1.0))
    found = search.search(what, 2, 8)
    assert [max(at.mesh, key=at.mesh.get) for at in tried] == ["shard", "replicate"]
    assert all(at == with_sequences(attrs.evolve(what, mesh=at.mesh), 8) for at in tried)
    assert [each.rough.memory for each in found.too_large] == sorted(each.rough.memory for each in found.too_large)
    assert found.count == len(list(meshes(2)))
    assert Counter(found.refused)["tensor times sequence is more than the 8 GPUs of a node"] == 0


def test_the_words_of_a_mesh_name_what_is_more_than_one():
    what = case(mesh=dict.fromkeys(ORDER, 1) | {"shard": 2, "tensor": 4}, virtual_stages=2)
    assert Candidate(what, Rough(0.0, 0.0)).words == "--mesh.shard 2 --mesh.tensor 4 --mesh.virtual-stages 2"
    assert Candidate(case(mesh={}), Rough(0.0, 0.0)).words == "one rank"
    assert Remedy({"mesh.stage": 2}, planned(what, 1.0)).words == "--mesh.stage 2"


@pytest.mark.parametrize("virtual", [1, 2])
def test_the_work_of_pipeline_ranks_is_that_of_their_layers_and_the_last_has_the_head(virtual):
    """Multiply-adds per token: matrices, attention over half the row, the head over responses alone."""
    what = case(layers=4, mesh={"pipeline": 2}, virtual_stages=virtual, response=0.25)
    work = pipeline_work(what, "actor", Built())
    layer = 128 * (128 + 64 + 64) + 128 * 128 + 3 * 128 * 512 + 2 * 128 * (64 + 1) / 2
    head = 2048 * 128 * 16 / 64
    assert sum(work) == pytest.approx(4 * layer + head)
    own = [len(cut) for cut in Built().cuts(what, "actor")]
    assert work[0] == pytest.approx(sum(own[::2]) * layer)
    early = plan(attrs.evolve(what, hardware=attrs.evolve(what.hardware, memory=1.0)), only_if_fits=True)
    assert early.stages == ()
    assert early.imbalance == pytest.approx(max(work) / (sum(work) / 2))


def refused(ranks, sequences=8, **changes):
    """The reasons against meshes of so many GPUs, of which none is planned, since none has room for a model."""
    found = search.search(case(hardware=attrs.evolve(GPU, memory=1.0), **changes), ranks, sequences)
    assert found.best == found.failed == found.slower == ()
    assert found.count == len(list(meshes(ranks, experts="config" in changes)))
    return found.refused


def test_a_mesh_without_work_for_its_ranks_is_refused_with_the_reason():
    """Of three layers, on nodes of 8 GPUs; pipelines have one, two or four stages on a rank."""
    few = "more stages than the actor has layers"
    assert refused(2) == {few: 2}
    assert refused(3)[few] == 2
    found = refused(16)
    assert found["more data ranks than the 8 sequences of an update"] == 5  # replicate times shard
    assert found["tensor times sequence is more than the 8 GPUs of a node"] == 5


def test_a_mixture_is_cut_over_experts_by_divisors_alone():
    assert not any("experts" in reason for reason in refused(2, config=mixture(chosen=2)))
    assert any("8 experts, which it does not divide" in reason for reason in refused(3, config=mixture(chosen=2)))
