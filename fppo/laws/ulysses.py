"""Laws of attention over a sequence-sharded row: values and gradients equal those of attention over the whole row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fppo.laws._kernels import settings
from fppo.laws._search import Law, LawExample, check, differ, normal
from fppo.runtime.simulate import simulate
from fppo_kernels import ulysses as kernels
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.collectives import Axis
from fppo_kernels.padding import Lengths, make_lengths
from fppo_kernels.ulysses import gather_sequence, slice_sequence

RANKS = (2, 4)
TOLERANCE = 1e-10  # float64, relative to the larger of 1 and the number


class _UlyssesCase(NamedTuple):
    heads: int = 1  # query heads per rank
    kv_heads: int = 0  # 0: as many as query heads
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


# with 4 ranks: one key head for all, two ranks to a key head, three key heads that no rank holds whole, and more
_CASES = (
    _UlyssesCase(),
    _UlyssesCase(1, 1),
    _UlyssesCase(3, 2, window=2),
    _UlyssesCase(3, 3),
    _UlyssesCase(2, 0, 3, 2.0, True),
    _UlyssesCase(2, 2, sinks=True),
)

Leaves = dict[str, Tensor]


def _keywords(example: LawExample) -> tuple[Lengths, dict]:
    keywords = settings(example)
    for name in ("ranks", "blocks"):
        keywords.pop(name, None)
    return make_lengths(keywords.pop("lengths").tolist()), keywords


def _leaves(example: LawExample) -> Leaves:
    tensors = {**example.inputs, **({"sinks": example.extras["sinks"]} if "sinks" in example.extras else {})}
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def _whole(attention: Callable, example: LawExample) -> tuple[Tensor, Leaves]:
    """The result of `attention` over the whole row, and its gradients."""
    lengths, keywords = _keywords(example)
    leaves = _leaves(example)
    out = attention(*list(leaves.values())[:3], lengths=lengths, **{**keywords, "sinks": leaves.get("sinks")})
    return out.detach(), _gradients(out, example, leaves)


def _gradients(out: Tensor, example: LawExample, leaves: Leaves) -> Leaves:
    return dict(zip(leaves, torch.autograd.grad((out * example.weights).sum(), list(leaves.values())), strict=True))


def _on_ranks(wrap: Callable, attention: Callable, example: LawExample) -> list[tuple[Tensor, Leaves]]:
    """Run a sharded row by `wrap(attention, axis)` on every rank of a simulated mesh. Returns, for every rank, the
    whole row's result, gathered, and the rank's share of the gradients."""
    lengths, keywords = _keywords(example)

    def run(mesh) -> tuple[Tensor, Leaves]:
        axis: Axis = mesh["sequence"]
        leaves = _leaves(example)
        own = [slice_sequence(x, axis) for x in list(leaves.values())[:3]]
        sinks = leaves.get("sinks")
        out = wrap(attention, axis)(*own, lengths=lengths, **{**keywords, "sinks": sinks})
        whole = gather_sequence(out, axis)
        return whole.detach(), _gradients(whole, example, leaves)

    return simulate({"sequence": int(example.extras["ranks"])}, run)


# (function under test, attention kernel, example) -> on every rank the whole result and its share of the gradients
OnRanks = Callable[[Callable, Callable, LawExample], list[tuple[Tensor, Leaves]]]


def laws_of_ranks(attention: Callable, on_ranks: OnRanks, tolerance: float) -> list[Law]:
    """The laws of functions on ranks with parts of a row: result and gradients are `attention`'s over the whole row."""

    def values(subject: Callable, example: LawExample, generator: torch.Generator) -> str | None:
        expected, _ = _whole(attention, example)
        results = on_ranks(subject, attention, example)
        reasons = (differ(f"the result on rank {rank}", expected, x, tolerance) for rank, (x, _) in enumerate(results))
        return next((reason for reason in reasons if reason), None)

    def shares(subject: Callable, example: LawExample, generator: torch.Generator) -> str | None:
        _, expected = _whole(attention, example)
        by_rank = [shares for _, shares in on_ranks(subject, attention, example)]
        for name, grad in expected.items():
            total = torch.stack([shares[name] for shares in by_rank]).sum(0)
            if reason := differ(f"the gradient by {name}, summed over ranks,", grad, total, tolerance):
                return reason
        return None

    return [
        Law("values", "every rank's part is that of attention over the whole row", values),
        Law("shares", "the ranks' gradients sum to those over the whole row", shares),
    ]


def _one_rank(attention: Callable, wrap: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    return None if wrap(attention, Axis()) is attention else "on an axis of one rank it is not the attention it wraps"


def _laws(attention: Callable) -> list[Law]:
    return [
        *laws_of_ranks(attention, _on_ranks, TOLERANCE),
        Law("one rank", "on an axis of one rank it is the attention it wraps", partial(_one_rank, attention)),
    ]


def _example(ranks: int, multiple: int, times: int, rows: int, width: int, seed: int) -> LawExample:
    """Draw sequences of 1 to `width` tokens, and one more that fills the row up to a `multiple`; `times` is a factor of
    the case's number of query heads."""
    case = _CASES[seed]
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    rest = -int(lengths.sum()) % multiple
    lengths = torch.cat([lengths, torch.tensor([rest])]) if rest else lengths
    total, heads = int(lengths.sum()), case.heads * times
    kv_heads = case.kv_heads if case.kv_heads and heads % case.kv_heads == 0 else heads
    inputs = {
        name: normal(generator, total, count, size)
        for name, count, size in (("query", heads, 4), ("key", kv_heads, 4), ("value", kv_heads, 3))
    }
    extras = {"lengths": lengths, "scale": torch.tensor(0.7, dtype=torch.float64), "ranks": torch.tensor(ranks)}
    if case.window is not None:
        extras["window"] = torch.tensor(case.window)
    if case.softcap is not None:
        extras["softcap"] = torch.tensor(case.softcap, dtype=torch.float64)
    if case.sinks:
        extras["sinks"] = normal(generator, heads)
    return LawExample(inputs, extras, normal(generator, total, heads, 3))


def check_ulysses(
    wrap: Callable[..., Callable[..., Tensor]] = kernels.ulysses,
    *,
    attention: Callable[..., Tensor] = sdpa,
    ranks: Sequence[int] = RANKS,
) -> None:
    """Check a sequence-sharded attention on simulated meshes: `laws.check_ulysses(attention=mine)`.

    `wrap(attention, axis)` is an attention kernel over slices of the packed row (see `fppo_kernels.ulysses`). Examples,
    in float64, have ragged sequences that cross the ranks' borders, grouped heads, fewer key heads than ranks, windows,
    soft caps and sinks. The laws: every rank's result is its slice of the result over the whole row, and the ranks'
    gradients sum to the gradient, to 1e-10. Raises LawViolation for the first broken law.
    """
    sizes = ((1, 1), (1, 5), (3, 2), (4, 7))
    for n in ranks:
        name = f"{getattr(attention, '__name__', 'attention')} over {n} ranks"
        check(wrap, _laws(attention), partial(_example, n, n, n), sizes=sizes, seeds=len(_CASES), name=name)
