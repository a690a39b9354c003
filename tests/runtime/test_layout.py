"""Layouts: what ranks hold of a parameter is the whole, each number of it counted once."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.runtime.layout import Box, Cut, Extent, Layout, block_of, boxes, divided
from fppo.runtime.mesh import gradient_sum
from fppo.runtime.parts import Part
from fppo.runtime.simulate import simulate


@st.composite
def layouts(draw):
    """The layouts of all ranks, for one parameter "x": uncut, cut in segments, in fewer parts than ranks, unevenly."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    parts = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n <= ranks]))
    dim = draw(st.integers(0, 2))
    segments = tuple(draw(st.lists(st.integers(parts, 3 * parts), min_size=1, max_size=3)))
    shape = [draw(st.integers(1, 4)) for _ in range(3)]
    shape[dim] = sum(segments)
    cuts = {"x": Cut(dim, parts, segments)} if draw(st.integers(0, 4)) else {}
    return [Layout({"x": torch.Size(shape)}, cuts, frozenset(), rank, ranks) for rank in range(ranks)]


def numbers(shape):
    return torch.arange(shape.numel(), dtype=torch.float64).view(shape)


@given(layouts())
def test_what_all_ranks_hold_is_the_whole(every):
    whole = numbers(every[0].whole["x"])
    pieces = [layout.take("x", whole) for layout in every]
    assert [piece.shape for piece in pieces] == [layout.shapes["x"] for layout in every]
    for layout in every:
        assert torch.equal(layout.join("x", pieces), whole)


@given(layouts())
def test_owners_hold_every_number_once(every):
    whole = numbers(every[0].whole["x"])
    owned = [layout.take("x", whole) for layout in every if layout.owns("x")]
    counted = torch.cat([piece.flatten() for piece in owned])
    assert torch.equal(counted.sort().values, whole.flatten())


@given(layouts(), st.integers(1, 5))
def test_boxes_say_where_numbers_come_from(every, shards):
    whole = numbers(every[0].whole["x"])
    cut, filled = every[0].cuts.get("x"), torch.full_like(whole, -1.0)
    for layout in every:
        piece = layout.take("x", whole)
        for shard in range(shards):
            part = Part(tuple(whole.shape), cut, (layout.rank, layout.ranks), (shard, shards))
            rows = piece[slice(*part.rows)]
            assert part.own_shape == tuple(rows.shape)
            for box in part.boxes:
                ((mine, others),) = [box.shared(each) for each in boxes(tuple(whole.shape))]
                assert torch.equal(rows[mine], whole[others])
                assert not part.is_first or cut is None or bool((filled[others] < 0).all())
                filled[others] = rows[mine]
    assert torch.equal(filled, whole)


def test_a_number_is_one_box():
    assert boxes(()) == [Box((), (), ())]


@given(layouts())
def test_gathered_pieces_are_the_whole(every):
    whole = numbers(every[0].whole["x"])

    def run(mesh):
        layout = every[mesh["tensor"].rank]
        return layout.gather("x", layout.take("x", whole), mesh.__getitem__)

    for got in simulate({"tensor": len(every)}, run):
        assert torch.equal(got, whole)


@pytest.mark.parametrize("parts", [None, 1, 2, 4])
def test_gradients_are_summed_over_the_ranks_that_hold_a_part(parts):
    cuts = {} if parts is None else {"x": Cut(0, parts, (8,))}
    shares = [torch.full((8 // (parts or 1),), 2.0**rank) for rank in range(4)]

    def run(mesh):
        rank = mesh["tensor"].rank
        layout = Layout({"x": torch.Size([8])}, cuts, frozenset(), rank, 4)
        return gradient_sum({"x": shares[rank]}, attrs.evolve(mesh, layout=layout))["x"][0].item()

    expected = {None: [15.0] * 4, 1: [15.0] * 4, 2: [3.0, 3.0, 12.0, 12.0], 4: [1.0, 2.0, 4.0, 8.0]}
    assert simulate({"tensor": 4}, run) == expected[parts]


def test_gradients_are_summed_over_the_axes_that_do_not_cut_a_parameter():
    cuts = {"dense": Cut(0, 2, (4,)), "experts": Cut(0, 2, (6,), "expert")}
    shapes = {"dense": torch.Size([4]), "experts": torch.Size([6]), "norm": torch.Size([3])}

    def run(mesh):
        tensor, expert = mesh["tensor"].rank, mesh["expert"].rank
        layout = Layout(shapes, cuts, frozenset(), tensor, 2, expert=(expert, 2))
        grads = {name: torch.full(shape, 4.0**expert * 2.0**tensor) for name, shape in layout.shapes.items()}
        summed = gradient_sum(grads, attrs.evolve(mesh, layout=layout))
        assert {name: x.shape for name, x in summed.items()} == layout.shapes
        return [summed[name][0].item() for name in shapes], [layout.owns(name) for name in shapes]

    both = [True, True, True], [True, False, False], [False, True, False], [False, False, False]
    sums = [5.0, 3.0, 15.0], [10.0, 3.0, 15.0], [5.0, 12.0, 15.0], [10.0, 12.0, 15.0]
    assert simulate({"expert": 2, "tensor": 2}, run) == list(zip(sums, both, strict=True))


@st.composite
def staged(draw):
    """The layouts of all ranks of a pipeline, an expert and a tensor axis, for parameters on one stage, or on several,
    of which none, the tensor axis or the expert axis cuts each."""
    stages, ranks, experts = draw(st.integers(2, 4)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    holders = st.sets(st.integers(0, stages - 1), min_size=1).map(lambda x: tuple(sorted(x)))
    names = {name: draw(holders) for name in "abcdef"[: draw(st.integers(1, 6))]}
    shapes = {name: torch.Size([6 * draw(st.integers(1, 2)), 3]) for name in names}
    over = {name: draw(st.sampled_from([None, "tensor", "expert"])) for name in names}
    wide = {"tensor": ranks, "expert": experts}
    cuts = {name: Cut(0, wide[axis], (shapes[name][0],), axis) for name, axis in over.items() if axis is not None}
    return [
        Layout(shapes, cuts, frozenset(), rank, ranks, names, stage, stages, (expert, experts))
        for stage in range(stages)
        for expert in range(experts)
        for rank in range(ranks)
    ]


@given(staged())
def test_every_number_has_one_owner_among_all_ranks(every):
    whole = {name: numbers(shape) + 100 * i for i, (name, shape) in enumerate(every[0].whole.items())}
    counted = []
    for layout in every:
        pieces = {name: layout.take(name, whole[name]) for name in layout.held}
        assert {name: x.shape for name, x in pieces.items()} == layout.shapes
        assert set(layout.held) == {name for name, stages in layout.stages.items() if layout.stage_rank in stages}
        assert all(layout.holds(name) for name in whole if layout.owns(name))
        counted += [x.flatten() for name, x in pieces.items() if layout.owns(name)]
    assert torch.equal(torch.cat(counted).sort().values, torch.cat([x.flatten() for x in whole.values()]))


def test_a_parameter_without_a_stage_is_refused():
    with pytest.raises(ValueError, match=r"no rank of the pipeline axis holds \['b'\]"):
        Layout({"a": torch.Size([1]), "b": torch.Size([1])}, {}, frozenset(), 0, 1, {"a": (0,)}, 0, 2)


def test_gradients_of_what_several_stages_hold_are_summed_in_their_order():
    stages = {"first": (0,), "middle": (1,), "tied": (0, 2), "thrice": (0, 1, 2)}
    shapes = {name: torch.Size([2]) for name in stages}
    shares = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([-1e8, 4.0])]  # 1e8 + 1 is 1e8

    def run(mesh):
        stage = mesh["pipeline"].rank
        layout = Layout(shapes, {}, frozenset(), 0, 1, stages, stage, 3)
        grads = {name: shares[stage].clone() for name in layout.held}
        summed = gradient_sum(grads, attrs.evolve(mesh, layout=layout))
        assert all(torch.equal(x, shares[stage]) for x in grads.values())
        return {name: x.tolist() for name, x in summed.items()}

    both, all_three = [0.0, 5.0], [0.0, 7.0]
    assert simulate({"pipeline": 3}, run) == [
        {"first": [1e8, 1.0], "tied": both, "thrice": all_three},
        {"middle": [1.0, 2.0], "thrice": all_three},
        {"tied": both, "thrice": all_three},
    ]


@pytest.mark.parametrize("sharded", [False, True])
def test_each_part_of_a_parameter_is_counted_by_one_rank_or_once_on_each_expert_rank_with_rows_of_its_own(sharded):
    shapes = {"dense": torch.Size([4]), "norm": torch.Size([4]), "experts": torch.Size([4])}
    cuts = {"dense": Cut(0, 2, (4,)), "experts": Cut(0, 2, (4,), "expert")}
    owners = {name: [] for name in shapes}
    for expert in range(2):
        for tensor in range(2):
            layout = Layout(shapes, cuts, frozenset(), tensor, 2, expert=(expert, 2))
            for name in shapes:
                owners[name] += [(expert, tensor)] if layout.owns(name, sharded=sharded) else []
    assert owners["experts"] == [(0, 0), (1, 0)]
    assert owners["norm"] == [(0, 0), (1, 0)][: 1 + sharded]
    assert owners["dense"] == [(0, 0), (0, 1), (1, 0), (1, 1)][: 2 + 2 * sharded]


def test_a_layout_of_some_parameters_keeps_their_cuts_and_stages():
    shapes = {name: torch.Size([4, 2]) for name in "abc"}
    stages = {"a": (1, 2), "b": (0,), "c": (2,)}
    layout = Layout(shapes, {"a": Cut(1, 2, (2,)), "b": Cut(0, 2, (4,))}, frozenset({"c"}), 1, 2, stages, 2, 3)
    some = layout.only(lambda name: name != "b")
    assert (list(some.whole), some.stages, some.held) == (["a", "c"], {"a": (1, 2), "c": (2,)}, ("a", "c"))
    assert (some.rank, some.stage_rank, some.once, some.shapes["a"]) == (1, 2, frozenset({"c"}), torch.Size([4, 1]))
    assert [layout.source(name) for name in "abc"] == [1, 0, 2]
    assert layout.extent("a") == Extent(shapes["a"], layout.cuts["a"], (1, 2))
    assert layout.extent("c") == Extent(shapes["c"], None, (2,))
    plain = Layout(shapes, {"b": Cut(0, 2, (4,))}, frozenset(), 0, 2)
    assert (plain.extent("a"), plain.extent("b")) == (shapes["a"], Extent(shapes["b"], plain.cuts["b"]))
    assert plain.source("a") == 0


@given(st.integers(1, 9), st.integers(1, 9))
def test_the_first_rank_with_a_part_is_the_first_of_those_that_hold_it(ranks, parts):
    """Whether or not the parts divide the ranks."""
    cut = Cut(0, min(parts, ranks), (9,))
    held = [cut.part(rank, ranks) for rank in range(ranks)]
    assert [cut.first(part, ranks) for part in range(cut.parts)] == [held.index(part) for part in range(cut.parts)]


def test_a_leaf_of_blocks_is_cut_as_its_parameter_where_every_run_ends_with_a_block():
    """Two runs of 6 numbers make a part of 12: blocks of 4 divide the part, and not its runs."""
    whole = Extent(torch.Size((2, 24)), Cut(1, 2, (12, 12)))
    assert divided("w", whole, 1, 3) == Extent(torch.Size((2, 8)), Cut(1, 2, (4, 4)))
    with pytest.raises(ValueError, match=r"w of shape \(2, 24\): blocks of 4 do not fit axis 1"):
        divided("w", whole, 1, 4)
    assert divided("w", torch.Size((2, 24)), 1, 4) == torch.Size((2, 6))
    assert block_of((2, 24), (2, 6)) == (1, 4)
    assert block_of((2, 24), (2, 5)) is block_of((2, 24), (1, 6)) is block_of((2, 24), (24,)) is None
