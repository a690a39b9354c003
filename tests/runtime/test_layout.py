"""Layouts: what ranks hold of a parameter is the whole, each number of it counted once."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.runtime.layout import Box, Cut, Layout, boxes
from fppo.runtime.mesh import gradient_sum
from fppo.runtime.parts import Part
from fppo.runtime.simulate import simulate


@st.composite
def layouts(draw):
    """The layouts of all ranks, for one parameter "x": uncut, cut in segments, in fewer parts than ranks, unevenly."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    parts = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if ranks % n == 0]))
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
        return layout.gather("x", layout.take("x", whole), mesh["tensor"])

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
