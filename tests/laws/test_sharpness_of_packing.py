"""The laws of padding and of collectives see each number that is off by little, in each call and on each rank."""

import pytest
import torch

from fppo.laws import collectives, padding
from fppo.laws._search import LawExample
from fppo_kernels import padding as paddings
from fppo_kernels.collectives import Axis
from tests.laws.test_sharpness import reason
from tests.laws.test_sharpness_of_kernels import slope

PADDING = {law.name: law for law in padding._laws(paddings.pad)}
ROWS = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]).bool()


def of_padding():
    tokens = torch.arange(1, 13).view(3, 4)
    return LawExample({"tokens": tokens, "mask": ROWS}, {}, torch.arange(1.0, 25.0).double().view(3, 4, 2))


def bumped(packed, part):
    """The packed rows with one number changed, the last of `part`."""
    if part in packed.columns:
        x = packed.columns[part].clone()
        x.view(-1)[-1] = ~x.view(-1)[-1] if x.dtype == torch.bool else x.view(-1)[-1] + 1
        return packed._replace(columns={**packed.columns, part: x})
    if part == "cu_seqlens":
        ends = packed.lengths.cu_seqlens.clone()
        ends[-1] += 1
        return packed._replace(lengths=packed.lengths._replace(cu_seqlens=ends))
    if part == "lengths":
        return packed._replace(
            lengths=packed.lengths._replace(lengths=(*packed.lengths.lengths[:-1], packed.lengths.lengths[-1] + 1))
        )
    if part == "max_length":
        return packed._replace(lengths=packed.lengths._replace(max_length=packed.lengths.max_length + 1))
    if part == "int64":
        return packed._replace(lengths=packed.lengths._replace(cu_seqlens=packed.lengths.cu_seqlens.long()))
    x = getattr(packed, part).clone()
    x[-1] += 1
    return packed._replace(**{part: x})


LENGTHS = ("cu_seqlens", "lengths", "max_length", "int64")
UNPADDED = {
    "packed order": (("tokens", "positions", "index", *LENGTHS), {"plain": lambda **how: not how}),
    "labels": (("labels",), {"plain": lambda **how: not how}),
    "multiple": (
        ("tokens", "positions", "labels", "weights", *LENGTHS),
        {str(n): lambda n=n, **how: how.get("multiple") == n and "columns" in how for n in (1, 2, 3, 8)},
    ),
    "columns": (("wide", "flat", "mask"), {"columns": lambda **how: "wide" in (how.get("columns") or {})}),
    "places": (
        ("tokens", "positions", "labels", "index", "cu_seqlens", "lengths", "max_length"),
        {str(n): lambda n=n, **how: how.get("places") is not None and how.get("multiple") == n for n in (1, 4)},
    ),
}


@pytest.mark.parametrize(
    ("name", "part", "when"),
    [(n, part, when) for n, (parts, calls) in UNPADDED.items() for part in parts for when in calls],
)
def test_every_number_of_packed_rows_is_held(name, part, when):
    call = UNPADDED[name][1][when]

    def unpad(tokens, mask, **how):
        packed = paddings.unpad(tokens, mask, **how)
        return bumped(packed, part) if call(**how) else packed

    assert reason(PADDING[name], paddings.unpad, of_padding()) is None
    found = reason(PADDING[name], unpad, of_padding())
    assert found is not None
    assert {"weights": "the column", **dict.fromkeys(LENGTHS, "lengths")}.get(part, part) in found


def test_columns_of_packed_rows_have_their_names():
    less = lambda t, m, **how: (p := paddings.unpad(t, m, **how))._replace(  # noqa: E731
        columns={k: x for k, x in p.columns.items() if k != "flat"}
    )
    assert (
        reason(PADDING["columns"], less, of_padding()) == "columns are ['mask', 'wide'], expected flat, mask and wide"
    )


PADS = {
    "round trip": lambda x: x.dim() == 1,
    "multiple": lambda x: x.dim() == 1 and len(x) > 5,
    "columns": lambda x: x.dim() == 2,
}


@pytest.mark.parametrize("name", PADS)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_every_place_of_padded_rows_is_held(name, where):
    def pad(x, index, shape):
        out = paddings.pad(x, index, shape)
        if PADS[name](x):
            out = out.clone()
            out[(0, 1) if where == "inside" else (1, 2)] += 1
        return out

    law = {law.name: law for law in padding._laws(pad)}[name]
    assert reason(law, paddings.unpad, of_padding()) is not None


@pytest.mark.parametrize("of", ["wide", "x"])
def test_gradients_of_padding_select(of):
    def unpad(tokens, mask, *, columns=None, **how):
        packed = paddings.unpad(tokens, mask, columns=columns, **how)
        if columns and of == "wide" and "wide" in columns:
            more = slope(columns["wide"], 1e-12)
            return packed._replace(columns={**packed.columns, "wide": packed.columns["wide"] + more})
        return packed

    def pad(x, index, shape):
        return paddings.pad(x, index, shape) + (slope(x, 1e-12) if of == "x" and x.requires_grad else 0)

    law = {law.name: law for law in padding._laws(pad)}["columns"]
    assert ("the gradient by a column" if of == "wide" else "the gradient by x") in (
        reason(law, unpad, of_padding()) or ""
    )


@pytest.mark.parametrize("what", ["tokens", "mask", "columns", "packed tokens", "packed index"])
def test_padding_changes_no_argument(what):
    def unpad(tokens, mask, *, columns=None, **how):
        packed = paddings.unpad(tokens, mask, columns=columns, **how)
        if what == "tokens":
            tokens[0, 0] += 1
        if what == "mask":
            mask[1, 1] = True
        if what == "columns" and columns:
            columns["weights"][0, 0] += 1
        return packed

    def pad(x, index, shape):
        out = paddings.pad(x, index, shape)
        if what == "packed tokens":
            x[0] += 1
        if what == "packed index":
            index[0] += 1
        return out

    law = {law.name: law for law in padding._laws(pad)}["purity"]
    found = law.breach(unpad, of_padding(), torch.Generator()) or ""
    assert ("pad changed its argument" if "packed" in what else "argument") in found
    assert ("columns" in found) == (what == "columns")


def test_masks_of_padding_are_of_every_kind():
    masks = [padding._example("cpu", 5, 6, seed).mask for seed in range(padding.SEEDS)]
    right, left = (lambda m: (m[:, 1:] & ~m[:, :-1]).any()), (lambda m: (m[:, :-1] & ~m[:, 1:]).any())
    assert masks[0].all()
    assert left(masks[1])
    assert not right(masks[1])
    assert right(masks[2])
    assert not left(masks[2])
    assert left(masks[3])
    assert right(masks[3])
    assert masks[3].any(1).all()
    assert not masks[4].any(1).all()
    assert masks[4].any()
    holes = masks[5].long().diff(dim=1)
    assert ((holes == 1).sum(1) > 1).any()
    assert not masks[6].any()
    assert {*padding.MULTIPLES} == {1, 2, 3, 8}


def of_ranks(name, ranks=3, seed=0):
    return collectives._example(name, ranks, 1, seed)


REDUCES = {law.name: law for law in collectives._laws("all_gather")}
SCATTERS = {law.name: law for law in collectives._laws("reduce_scatter")}
ONES = collectives.BUILTIN["all_gather"]


def off_on(rank, change):
    def kernel(x, axis, *, dim):
        out = ONES(x, axis, dim=dim)
        return change(out, x) if axis.size > 1 and axis.rank == rank else out

    return kernel


@pytest.mark.parametrize("rank", range(3))
def test_every_rank_s_result_and_its_two_gradients_are_held_to_the_bit(rank):
    example = of_ranks("all_gather")
    assert all(reason(law, ONES, example) is None for law in REDUCES.values())
    near = off_on(rank, lambda out, x: out + 1e-14)
    assert f"the result on rank {rank} of 3" in (reason(REDUCES["values"], near, example) or "")
    single = off_on(rank, lambda out, x: out.float())
    found = reason(REDUCES["values"], single, example)
    assert found == f"the result on rank {rank} has the dtype float32, expected float64"
    sloped = off_on(rank, lambda out, x: out + slope(x, 1e-12))
    assert "the gradient on rank" in (reason(REDUCES["transpose"], sloped, example) or "")


class SlopeTwice(torch.autograd.Function):
    """The identity whose gradient is right and whose gradient's gradient is lost."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        return LostSlope.apply(grad)


class LostSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return 2 * grads[0]


def test_the_gradient_of_a_collective_s_gradient_is_the_collective():
    twice = lambda x, axis, *, dim: SlopeTwice.apply(ONES(x, axis, dim=dim)) if axis.size > 1 else x  # noqa: E731
    assert "the gradient of its gradient on rank" in (reason(REDUCES["transpose"], twice, of_ranks("all_gather")) or "")


def test_collectives_give_new_tensors_and_equal_ones_again():
    example = of_ranks("all_gather")
    keeps = lambda x, axis, *, dim: torch.cat([x] * 3, dim).copy_(ONES(x, axis, dim=dim)) if axis.size > 1 else x  # noqa: E731
    assert reason(REDUCES["purity"], keeps, example) is None
    shared = {}

    def cached(x, axis, *, dim):
        if axis.size == 1:
            return x
        return shared.setdefault(axis.rank, ONES(x, axis, dim=dim))

    assert "the result of a second call" in (reason(REDUCES["purity"], cached, example) or "")

    def changes(x, axis, *, dim):
        out = ONES(x, axis, dim=dim)
        if axis.size > 1 and axis.rank == 2:
            x.add_(1)
        return out

    assert "its argument afterwards on rank 2" in (reason(REDUCES["purity"], changes, example) or "")
    one = of_ranks("all_gather", 1)
    assert reason(REDUCES["one rank"], lambda x, axis, *, dim: x.clone(), one) is not None
    assert reason(REDUCES["one rank"], lambda x, axis, *, dim: x, one) is None


def test_sizes_that_ranks_do_not_divide_are_refused_by_name():
    law, own, example = SCATTERS["uneven sizes"], collectives.BUILTIN["reduce_scatter"], of_ranks("reduce_scatter")
    assert reason(law, own, example) is None

    def says(text):
        def kernel(x, axis, *, dim):
            if axis.size > 1 and x.shape[dim] % axis.size:
                raise ValueError(text)
            return own(x, axis, dim=dim)

        return kernel

    assert "does not name the size 4" in (reason(law, says("uneven"), example) or "")
    assert reason(law, says("4 rows"), example) is None
    assert "it accepted [4, 3, 3] over 3 ranks" in (reason(law, lambda x, axis, *, dim: x, example) or "")


def test_examples_of_collectives_have_every_dtype_dimension_source_shift_and_layout():
    seen = {name: [collectives._example(name, 3, 2, seed) for seed in range(36)] for name in collectives.BUILTIN}
    assert {x.inputs["x"].dtype for x in seen["all_gather"]} == {*collectives.DTYPES}
    assert {*collectives.DTYPES} == {torch.float64, torch.float32, torch.bfloat16, torch.int64}
    for name in ("all_gather", "reduce_scatter"):
        assert {int(x.extras["dim"]) % 3 for x in seen[name]} == {0, 1, 2}
        assert any(x.extras["dim"] < 0 for x in seen[name])
    pairs = {(int(x.extras["split_dim"]) % 3, int(x.extras["concat_dim"])) for x in seen["all_to_all"]}
    assert len(pairs) == 9
    assert any(x.extras["split_dim"] < 0 for x in seen["all_to_all"])
    assert {int(x.extras["source"]) for x in seen["broadcast"]} == {0, 1, 2}
    assert {int(x.extras["shift"]) for x in seen["permute"]} == {-2, -1, 0, 1, 2}
    tables = [x.extras["table"] for x in seen["exchange"]]
    assert all(table.sum(1).tolist() == [6] * 3 for table in tables)
    assert any((table == 0).any() for table in tables)
    assert any(len({*row}) > 1 for table in tables for row in table.tolist())
    for examples in seen.values():
        assert {x.inputs["x"].is_contiguous() for x in examples} == {True, False}
        assert all(float(x.inputs["x"].abs().max()) <= 8 for x in examples)
    assert collectives.RANKS == (1, 2, 4)
    assert not torch.equal(*collectives._cotangents([torch.ones(5, 2)] * 2))
    assert Axis().size == 1
