"""Attention over a row that is dealt to ranks is attention over the whole row, and the deal is even."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.laws import LawViolation, check_context
from fppo.runtime.simulate import simulate
from fppo_kernels import context, ring, table
from fppo_kernels.collectives import Axis
from fppo_kernels.context import BLOCKS, EVEN, deal, gathered_attention
from fppo_kernels.padding import make_lengths
from fppo_kernels.ring import ring_attention

KERNELS = {name: table.get("attention", name) for name in ("sdpa", "eager")}
MIXED = (8192, 512, 512, 700, 1300, 900, 60, 220)


@pytest.mark.parametrize(("blocks", "figure"), [(1, 1.65), (2, 1.30), (4, 1.08), (8, 1.01)])
def test_more_blocks_make_the_work_more_even(blocks, figure):
    dealt = deal([*MIXED, -sum(MIXED) % (4 * blocks)], 4, blocks=blocks)
    assert dealt.uneven == pytest.approx(figure, abs=0.005)


def test_it_takes_no_more_blocks_than_it_needs():
    for lengths, blocks in (((4096,), 2), ((1024,) * 8, 1), ((*MIXED, 20), 8)):
        dealt = deal(lengths, 4)
        assert dealt.work == deal(lengths, 4, blocks=blocks).work
        assert dealt.uneven <= EVEN
        assert all(deal(lengths, 4, blocks=n).uneven > EVEN for n in BLOCKS if n < blocks)


@given(
    sizes=st.lists(st.integers(1, 40), max_size=6),
    ranks=st.sampled_from([1, 2, 4]),
    blocks=st.sampled_from([1, 2, 4, None]),
    window=st.none() | st.integers(1, 9),
)
def test_every_token_is_dealt_once_and_its_work_counted(sizes, ranks, blocks, window):
    sizes = [*sizes, -sum(sizes) % (ranks * BLOCKS[-1])]
    dealt, total = deal(sizes, ranks, blocks=blocks, window=window), sum(sizes)
    everyone = torch.cat(dealt.places)
    assert torch.equal(everyone[dealt.back], torch.arange(total))
    assert {len(own) for own in dealt.places} == {total // ranks}
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    seen = torch.tensor([min(i + 1, window or i + 1) for n in sizes for i in range(n)], dtype=torch.int64)
    for own, runs, work in zip(dealt.places, dealt.runs, dealt.work, strict=True):
        pieces = [piece for run in runs for piece in run]
        assert own.tolist() == [piece.begin + i for piece in pieces for i in range(piece.start, piece.stop)]
        assert all(piece.begin in begins for piece in pieces)
        assert work == int(seen[own].sum())


def test_one_sequence_in_two_blocks_is_the_zig_zag():
    dealt = deal([16], 4, blocks=2)
    assert [x.tolist() for x in dealt.places] == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert len(dealt.runs[3]) == 1
    with pytest.raises(
        ValueError, match="a row of 15 tokens does not divide into 2 blocks for each of 4 ranks: pad it"
    ):
        deal([15], 4, blocks=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_gathered_keys_keep_the_laws(name):
    check_context(attention=KERNELS[name])


@pytest.mark.slow
def test_the_ring_keeps_the_laws():
    check_context(partial(ring_attention, tile=3))


def test_the_ring_keeps_no_scores():
    """Its graph has its arguments, its result and one number for each query and head."""
    n, kept = 64, []
    inputs = [torch.randn(n, 2, 4, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        out = ring_attention(deal([n], 1), Axis())(*inputs, lengths=make_lengths([n]), scale=1.0)
    assert sum(kept) == 4 * n * 2 * 4 + 2 * n
    assert out.shape == (n, 2, 4)


def test_what_does_not_fit_is_named():
    def mine(query, key, value, *, lengths, scale, **settings): ...

    with pytest.raises(ValueError, match="the attention kernel mine has no keyword key_lengths, which a context axis"):
        gathered_attention(mine, deal([16], 2), Axis(2, 0))
    no_sinks = partial(KERNELS["sdpa"])
    no_sinks.lacks = ("sinks",)
    assert callable(gathered_attention(no_sinks, deal([16], 2), Axis(2, 0)))
    assert table.own("attention", mine).lacks == {"key_lengths"}
    assert table.own("attention", KERNELS["sdpa"]).lacks == table.own("glu", mine).lacks == frozenset()
    x = torch.zeros(8, 1, 2)
    for attend in (
        gathered_attention(KERNELS["sdpa"], deal([16], 2), Axis(2, 0)),
        ring_attention(deal([16], 2), Axis(2)),
    ):
        with pytest.raises(ValueError, match=r"the row that was dealt has 16 tokens, but lengths have 15 tokens"):
            attend(x, x, x, lengths=make_lengths([15]), scale=1.0)
        with pytest.raises(ValueError, match=r"dealt has 16 tokens, but .* 16 tokens, and 2 ranks hold 7 each"):
            attend(x[1:], x[1:], x[1:], lengths=make_lengths([16]), scale=1.0)


def of_first_tokens(query, key, value, *, lengths, key_lengths=None, **settings):
    """The mask of a block as if its queries were the first tokens of their sequences."""
    if key_lengths is not None:
        parts = [x.split(key_lengths.lengths) for x in (key, value)]
        key, value = (torch.cat([p[:n] for p, n in zip(x, lengths.lengths, strict=True)]) for x in parts)
    return KERNELS["eager"](query, key, value, lengths=lengths, **settings)


def other_row(run, window, device, seen=context._seen):
    """The keys of another place of the row."""
    right = seen(run, window, device)
    return right._replace(first=right.first - 1, last=right.last - 1) if right.first else right


def own_gradient(x, axis, all_gather=context.all_gather):
    """Keys of other ranks get no gradient."""
    whole = list(all_gather(x.detach(), axis).chunk(axis.size))
    whole[axis.rank] = x
    return torch.cat(whole)


def all_seen(rank_deal, rank, source, window, size, tiles=ring._tiles):
    return [tile._replace(whole=True) for tile in tiles(rank_deal, rank, source, window, size)]


MISTAKES = [
    (context, "_seen", other_row, "values"),
    (context, "all_gather", own_gradient, "shares"),
    (ring, "_tiles", all_seen, "values"),
    (ring._How, "sources", lambda how: [how.axis.rank] * how.axis.size, "values"),
]


@pytest.mark.parametrize(("home", "name", "wrong", "law"), MISTAKES, ids=["row", "gradient", "mask", "order"])
def test_the_laws_see_mistakes(home, name, wrong, law, monkeypatch):
    monkeypatch.setattr(home, name, wrong)
    with pytest.raises(LawViolation) as caught:
        check_context(None if home is context else ring_attention)
    assert caught.value.law == law


def two_runs(dealt, axis):
    """Attention of the tokens in the first two runs of a rank, where a rank has more."""
    attend, kept = gathered_attention(KERNELS["sdpa"], dealt, axis), dealt.runs[axis.rank][:2]
    known = sum(piece.size for run in kept for piece in run)

    def attend_to_two(*args, **settings):
        out = attend(*args, **settings)
        return torch.cat([out[:known], out[known:].detach() * 0.0])

    return attend_to_two


def test_the_laws_see_a_mistake_in_late_blocks():
    with pytest.raises(LawViolation) as caught:
        check_context(two_runs, ranks=(2,))
    assert caught.value.law == "values"


def test_the_laws_see_a_wrong_mask_of_a_block():
    with pytest.raises(LawViolation) as caught:
        check_context(partial(gathered_attention, of_first_tokens))
    assert caught.value.law == "values"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_are_about_the_reference(dtype):
    lengths, generator = make_lengths([19, 8, 5]), torch.Generator().manual_seed(0)
    dealt = deal(lengths.lengths, 2, blocks=2)
    query, key, value = (torch.randn(32, n, 8, generator=generator).to(dtype) for n in (4, 2, 2))
    expected = KERNELS["eager"](*(x.double() for x in (query, key, value)), lengths=lengths, scale=0.3)

    def run(mesh):
        axis = mesh["context"]
        own = [x[dealt.places[axis.rank]] for x in (query, key, value)]
        attends = gathered_attention(KERNELS["sdpa"], dealt, axis), ring_attention(dealt, axis, tile=4)
        return [attend(*own, lengths=lengths, scale=0.3) for attend in attends]

    for outputs in zip(*simulate({"context": 2}, run), strict=True):
        out = torch.cat(outputs)[dealt.back]
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
