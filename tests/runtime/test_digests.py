"""Sums of a state are those of the whole on every layout, come to the host as sums alone, and see what changed."""

import math

import attrs
import pytest
import torch

from fppo import tree
from fppo.runtime import digests, fsdp
from fppo.runtime.digests import BLOCK, digest, spacing
from fppo.runtime.layout import Cut, Extent
from fppo.runtime.mesh import LOCAL, Sharding
from fppo.runtime.simulate import simulate

CPU = torch.device("cpu")


def leaves():
    """Rows of several blocks, of words that no four bytes are, and fewer than ranks; by name."""
    g = torch.Generator().manual_seed(0)
    return {
        "long": torch.randn(2 * BLOCK + 77, generator=g),
        "odd": torch.randn(9, 3, generator=g).bfloat16(),
        "wide": torch.randn(7, 2, 3, generator=g, dtype=torch.float64),
        "one": torch.randn(1, 5, generator=g),
    }


@pytest.mark.parametrize(
    "axes", [{"shard": 1}, {"shard": 3}, {"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "sequence": 2}]
)
def test_every_layout_has_the_digest_of_the_whole(axes):
    params = leaves()
    shapes = {f".params[{name!r}]": x.shape for name, x in params.items()}
    rest = {"count": torch.tensor(3), "text": "abc"}

    def state(params):
        return {"rest": rest} | {f".params[{name!r}]": x for name, x in params.items()}

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        own = {f"[{path!r}]": shape for path, shape in shapes.items()}
        return digest(state(fsdp.shard(params, mesh)), "sums", device=CPU, mesh=mesh, shapes=own)

    whole = digest(state(params), "sums", device=CPU)
    assert len(set(whole.values())) == len(whole)
    assert all(found == whole for found in simulate(axes, on_rank))


@pytest.mark.parametrize(
    "axes",
    [
        {"tensor": 2},
        {"tensor": 3},
        {"shard": 2, "tensor": 2},
        {"replicate": 2, "tensor": 2},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 3, "shard": 2, "tensor": 2},
        {"expert": 3, "tensor": 2},
        {"shard": 2, "expert": 2, "tensor": 2},
    ],
)
def test_axes_that_cut_any_dimension_or_part_leaves_change_no_digest(axes):
    """Two runs of rows, columns, and fewer parts than ranks; on the first stage, the last, or both."""
    g, ranks = torch.Generator().manual_seed(2), axes["tensor"]
    whole = {
        "rows": (torch.randn(12, 5, generator=g), Cut(0, ranks, (6, 6))),
        "columns": (torch.randn(5, 3 * BLOCK, generator=g), Cut(1, ranks, (3 * BLOCK,))),
        "fewer": (torch.randn(7, 8, generator=g).bfloat16(), Cut(1, ranks - 1, (8,))),
        "norm": (torch.randn(9, generator=g), None),
        "experts": (torch.randn(6, 5, generator=g), Cut(0, axes.get("expert", 1), (6,), "expert")),
    }

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding() if {"shard", "expert"} & axes.keys() else None)
        last = mesh["pipeline"].size - 1
        held = {"rows": (0,), "columns": (last,), "fewer": (0, last), "norm": (last,), "experts": (0,)}
        stages = held if last else {}
        own = {axis: (mesh[axis].rank, mesh[axis].size) for axis in ("expert", "tensor")}
        placed = {n: x if cut is None else cut.take(x, cut.part(*own[cut.axis])) for n, (x, cut) in whole.items()}
        placed = {n: x for n, x in placed.items() if not last or mesh["pipeline"].rank in stages[n]}
        shapes = {f"[{n!r}]": Extent(x.shape, cut, stages.get(n, ())) for n, (x, cut) in whole.items()}
        cuts = {name: cut for name, (_, cut) in whole.items() if cut is not None}
        return digest(fsdp.shard(placed, mesh, cuts), "sums", device=CPU, mesh=mesh, shapes=shapes)

    expected = digest({name: x for name, (x, _) in whole.items()}, "sums", device=CPU)
    assert all(found == expected for found in simulate(axes, on_rank))


def test_copies_that_differ_between_ranks_have_the_digest_of_none():
    whole = {"a": torch.arange(5.0), "b": torch.arange(6.0)}

    def on_rank(mesh):
        other = {"a": whole["a"] + (mesh["replicate"].rank == 1), "b": whole["b"]}
        return digest(other, "sums", device=CPU, mesh=mesh), digest(other, "sums", device=CPU)

    first, second = simulate({"replicate": 2}, on_rank)
    assert first[0] == second[0]
    assert first[0]["['b']"] == first[1]["['b']"]
    assert len({first[0]["['a']"], first[1]["['a']"], second[1]["['a']"]}) == 3


def test_only_sums_come_to_the_host(monkeypatch):
    copied = []
    real = torch.Tensor.cpu

    def cpu(x):
        copied.append(x.numel())
        return real(x)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    digest(leaves(), "sums", device=CPU)
    assert copied == [6]  # three blocks of the long leaf, and one of each other, in one copy


def test_what_changed_is_seen():
    x = torch.randn(BLOCK // 4, 8, generator=torch.Generator().manual_seed(1))
    flipped, exchanged, moved = x.clone(), x.clone(), x.clone()
    flipped[:2] = -flipped[:2]  # sixteen signs of one block
    exchanged[[3, 4]] = x[[4, 3]]
    moved[: BLOCK // 8], moved[BLOCK // 8 :] = x[BLOCK // 8 :], x[: BLOCK // 8]  # whole blocks
    zero, minus = torch.zeros(4), -torch.zeros(4)
    every = [x, flipped, exchanged, moved, x.view(-1, 4), x.view(torch.int32), -x, zero, minus]
    assert len({digest(each, "sums", device=CPU)[""] for each in every}) == len(every)
    two = digest({"a": x, "b": moved}, "sums", device=CPU)
    assert digest({"a": moved, "b": x}, "sums", device=CPU) == dict(zip(two, reversed(two.values()), strict=True))


def test_bytes_are_digested_in_one_process_on_a_cpu_alone():
    assert digests.kind_of(CPU) == "blake2b"
    assert digests.kind_of(torch.device("cuda")) == "sums"
    assert digest({"a": torch.ones(2)}, "blake2b", device=CPU) == tree.digest({"a": torch.ones(2)})

    def on_rank(mesh):
        with pytest.raises(ValueError, match="of one process"):
            digest({}, "blake2b", device=CPU, mesh=mesh)
        return digests.kind_of(CPU, mesh)

    assert simulate({"shard": 2}, on_rank) == ["sums", "sums"]


def test_how_often_a_state_is_digested_is_counted():
    def state(numbers):
        return {name: torch.empty(numbers, device="meta") for name in ("params", "mu", "nu")}

    def every(numbers, tokens, device="cpu", **mesh):
        return spacing(state(numbers), tokens=tokens, numbers=numbers, device=torch.device(device), **mesh)

    assert every(300_000, 4_000) == 1
    assert every(13_000_000, 4_096) == 3
    assert every(100_000_000, 4_096) > every(100_000_000, 40_960) == 1
    assert every(100_000_000, 4_096) == every(200_000_000, 4_096)  # the work grows as the state does

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        whole = {name: torch.empty(7, 100_000_000, device="meta") for name in ("params", "mu")}
        shapes = {f"[{name!r}]": x.shape for name, x in whole.items()}
        part = {name: x[slice(*fsdp.bounds(7, mesh["shard"]))] for name, x in whole.items()}
        return spacing(part, tokens=4_096, numbers=100_000_000, device=CPU, mesh=mesh, shapes=shapes)

    assert len(set(simulate({"shard": 2}, on_rank))) == 1
    assert spacing({"x": torch.ones(3)}, tokens=1, numbers=1, device=CPU, mesh=LOCAL) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_spacing_is_the_share_of_a_step_that_the_digests_of_a_ranks_parts_take(device):
    """Each leaf counts by the ranks that share it, and a step's work by all ranks."""
    sizes = {"rows": (600, 50_000), "cut": (400, 90_000), "experts": (800, 40_000), "whole": (1000, 70_000)}
    cuts = {"cut": Cut(1, 2, (90_000,)), "experts": Cut(0, 2, (800,), "expert")}
    axes = {"shard": 2, "expert": 2, "tensor": 2}
    shared_by = {"rows": 4, "cut": 2 * 4, "experts": 2 * 2, "whole": 1}
    kinds = {"rows": torch.float32, "cut": torch.bfloat16, "experts": torch.float64, "whole": torch.float32}

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        whole = {name: torch.empty(size, dtype=kinds[name], device="meta") for name, size in sizes.items()}
        shapes = {f"[{n!r}]": Extent(x.shape, cuts[n]) if n in cuts else x.shape for n, x in whole.items()}
        del shapes["['whole']"]
        given = {"tokens": 3_000_000, "numbers": 10**8, "device": torch.device(device), "mesh": mesh, "shapes": shapes}
        return (
            spacing(whole | {"n": 3}, **given),
            spacing(whole, **given | {"tokens": 3000}),
            spacing(whole, **given | {"numbers": 10}),
        )

    rate = digests._RATES.get(("meta", device), digests._RATES["cpu", "cpu"])
    seconds = sum(math.prod(sizes[n]) * kinds[n].itemsize / shared_by[n] for n in sizes) / rate
    expected = [
        max(1, math.ceil(seconds / (0.01 * (1.0 + 8 * numbers * tokens / 8 / digests._FLOPS[device]))))
        for tokens, numbers in ((3_000_000, 10**8), (3000, 10**8), (3_000_000, 10))
    ]
    assert len(set(expected)) > 1
    assert set(simulate(axes, on_rank)) == {tuple(expected)}
