"""Laws of attention over a row dealt to ranks: values and gradients equal those of attention over the whole row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fppo.laws._search import LawExample, check
from fppo.laws.ulysses import _CASES, RANKS, Leaves, _example, _gradients, _keywords, _leaves, laws_of_ranks
from fppo.runtime.simulate import simulate
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.collectives import Axis
from fppo_kernels.context import Deal, deal, gathered_attention
from fppo_kernels.ulysses import gather_sequence

BLOCKS = (1, 2, 4)
TOLERANCE = 1e-12  # float64, relative to the larger of 1 and the number


def _on_ranks(attend: Callable, attention: Callable, example: LawExample) -> list[tuple[Tensor, Leaves]]:
    """Run a dealt row by `attend(deal, axis)` on every rank of a simulated mesh; `attention` is not used. Returns, for
    every rank, the whole row's result, gathered, and the rank's share of the gradients."""
    lengths, keywords = _keywords(example)
    ranks, blocks = (int(example.extras[name]) for name in ("ranks", "blocks"))
    dealt = deal(lengths.lengths, ranks, blocks=blocks, window=keywords.get("window"))

    def run(mesh) -> tuple[Tensor, Leaves]:
        axis: Axis = mesh["context"]
        leaves = _leaves(example)
        own = [x[dealt.places[axis.rank]] for x in list(leaves.values())[:3]]
        out = attend(dealt, axis)(*own, lengths=lengths, **{**keywords, "sinks": leaves.get("sinks")})
        whole = gather_sequence(out, axis)[dealt.back]
        return whole.detach(), _gradients(whole, example, leaves)

    return simulate({"context": ranks}, run)


def _dealt(ranks: int, rows: int, width: int, seed: int) -> LawExample:
    """An example whose heads may be fewer than ranks, and whose row is divisible into the largest number of blocks."""
    example = _example(ranks, ranks * BLOCKS[-1], 2, rows, width, seed)
    return example._replace(extras=example.extras | {"blocks": torch.tensor(BLOCKS[(seed + rows) % len(BLOCKS)])})


def check_context(
    attend: Callable[[Deal, Axis], Callable[..., Tensor]] | None = None,
    *,
    attention: Callable[..., Tensor] = sdpa,
    ranks: Sequence[int] = RANKS,
) -> None:
    """Check attention over a dealt row on simulated meshes: `laws.check_context(ring_attention)`.

    `attend(deal, axis)` is an attention kernel for the tokens of a rank (see `fppo_kernels.context`); without one it is
    `gathered_attention` of `attention`. Examples, in float64, have ragged sequences that cross the blocks' borders,
    grouped heads, fewer heads than ranks, windows, soft caps and sinks. The laws: every rank's result is its part of
    the result of `attention` over the whole row, and the ranks' gradients sum to the gradient, to 1e-12. Raises
    LawViolation for the first broken law.
    """
    attend = attend or partial(gathered_attention, attention)
    sizes = ((1, 3), (3, 6))
    for n in ranks:
        name = f"{getattr(attend, '__name__', 'attention')} over {n} ranks"
        laws = laws_of_ranks(attention, _on_ranks, TOLERANCE)
        check(attend, laws, partial(_dealt, n), sizes=sizes, seeds=len(_CASES), name=name)
