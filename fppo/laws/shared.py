"""Laws of attention over a row whose sequences share pieces: values and gradients equal those of separate sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fppo.laws._kernels import apart, carry, checked, exact, grads, place, settings
from fppo.laws._search import Law, LawExample, check, differ, normal
from fppo_kernels.attention import CASES, FEATURES, AttentionCase
from fppo_kernels.attention.eager import eager
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.padding import make_lengths
from fppo_kernels.shared import Branch, SharedKeys, share, shared_attention

SIZES = ((0, 0), (1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (3, 3), (5, 4), (8, 6))  # pieces, most tokens of each
LEAVES = ("query", "key", "value", "sinks")
_SHARED_CASES = tuple(case for case in CASES if not case.before and case.scale < 1.0)


def _pieces(example: LawExample) -> list[Branch]:
    return [Branch(*piece) for piece in example.extras["pieces"].tolist()]


def _keywords(example: LawExample) -> dict:
    return {name: x for name, x in settings(example).items() if name != "pieces"}


def _of_pieces(attend: Callable, example: LawExample) -> Tensor:
    query = example.inputs["query"]
    shared = share(_pieces(example), query.device)
    return attend(shared)(*example.inputs.values(), lengths=shared.lengths, **_keywords(example))


def _of_sequences(attention: Callable, example: LawExample) -> Tensor:
    """The result [N, Hq, Dv] for the tokens of all pieces. `attention` runs over each piece's whole sequence, written
    out from its first ancestor to the piece's end."""
    pieces, begin, paths = _pieces(example), 0, list[list[int]]()
    for size, parent in pieces:
        paths.append([*(paths[parent] if parent >= 0 else []), *range(begin, begin + size)])
        begin += size
    device = example.inputs["query"].device
    row = torch.tensor([token for path in paths for token in path], dtype=torch.int64, device=device)
    lengths = make_lengths([len(path) for path in paths], device)
    out = attention(*(x[row] for x in example.inputs.values()), lengths=lengths, **_keywords(example))
    whole = out.split(list(lengths.lengths))
    own = [x[len(x) - size :] for x, (size, _) in zip(whole, pieces, strict=True)]
    return torch.cat([out[:0], *own])


def _far(what: str, expected: Tensor, actual: Tensor, dtype: torch.dtype) -> str | None:
    return apart(what, expected, actual, dtype, 0.1 if dtype == torch.float64 else 1.0)


def _gradient_tree(run: Callable[[LawExample], Tensor], example: LawExample) -> dict[str, Tensor]:
    example, leaves = carry(example, LEAVES)
    return dict(zip(leaves, grads((example.weights * run(example)).sum(), list(leaves.values())), strict=True))


def _values(attend: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    expected, actual = _of_sequences(eager, exact(example)), _of_pieces(attend, example)
    return _far("the result", expected, actual, example.inputs["query"].dtype)


def _gradients(attend: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    expected = _gradient_tree(partial(_of_sequences, eager), exact(example))
    actual = _gradient_tree(partial(_of_pieces, attend), example)
    dtype = example.inputs["query"].dtype
    reasons = (_far(f"the gradient by {name}", x, actual[name], dtype) for name, x in expected.items())
    return next((reason for reason in reasons if reason), None)


def _one_order(attend: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    first, second = (_gradient_tree(partial(_of_pieces, attend), example) for _ in range(2))
    reasons = (differ(f"the gradient by {name}", x, second[name], 0.0) for name, x in first.items())
    return next((f"a second call gave another result: {reason}" for reason in reasons if reason), None)


_LAWS = (
    Law("values", "each piece has the values of its sequence written out", _values),
    Law("gradients", "gradients are those of all sequences written out, summed", _gradients),
    Law("one order", "gradients are summed in one order: equal arguments give equal bits", _one_order),
)


def _example(
    dtype: torch.dtype,
    device: torch.device | str,
    head_dim: int,
    cases: Sequence[AttentionCase],
    rows: int,
    width: int,
    seed: int,
) -> LawExample:
    """Draw a forest of pieces: one prompt with its responses in half of the cases, of any shape in the other."""
    case, generator = cases[seed], torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    sizes = [int(torch.randint(1, width + 1, (), generator=generator)) for _ in range(rows)]
    parents = [
        int(torch.randint(-1, max(i, 1), (), generator=generator)) if seed % 2 else min(i, 1) - 1 for i in range(rows)
    ]
    parents[:1] = [-1] * len(parents[:1])
    total, heads = sum(sizes), case.kv_heads * case.groups
    shapes = {"query": heads, "key": case.kv_heads, "value": case.kv_heads}
    inputs = {name: normal(generator, total, count, head_dim) for name, count in shapes.items()}
    pieces = torch.tensor(list(zip(sizes, parents, strict=True)), dtype=torch.int64).view(-1, 2)
    extras = {"pieces": pieces, "scale": torch.tensor(case.scale * (2 / head_dim) ** 0.5, dtype=torch.float64)}
    if case.window is not None:
        extras["window"] = torch.tensor(case.window)
    if case.softcap is not None:
        extras["softcap"] = torch.tensor(case.softcap, dtype=torch.float64)
    if case.sinks:
        extras["sinks"] = normal(generator, heads)
    return place(LawExample(inputs, extras, normal(generator, total, heads, head_dim)), dtype, device)


def check_shared(
    attend: Callable[[SharedKeys], Callable[..., Tensor]] | None = None,
    *,
    attention: Callable[..., Tensor] = sdpa,
    features: Sequence[str] = FEATURES,
    dtypes: Sequence[torch.dtype] = (torch.float64,),
    device: torch.device | str = "cpu",
    head_dim: int = 4,
) -> None:
    """Check attention over a row of shared pieces: `laws.check_shared(attention=mine)`.

    `attend(shared)` is an attention kernel for the tokens of the row (see `fppo_kernels.shared`); without one it is
    `shared_attention` of `attention`. For forests of pieces, a prompt and its responses and deeper ones, with grouped
    heads, windows, soft caps and sinks: the values and every gradient are those of the sequences written out, by
    `attention.eager` in float64, to 1e-10 in float64, 1e-4 in float32 and 2e-2 in bfloat16, relative to the larger of 1
    and the tensor's largest number; equal arguments give equal bits. Raises LawViolation for the first broken law.

    `features` are those that the kernel has, of `fppo_kernels.attention.FEATURES`. Raises ValueError for other dtypes.
    """
    attend = attend or partial(shared_attention, attention)
    cases = [case for case in _SHARED_CASES if case.features <= set(features)]
    name = getattr(attend, "__name__", f"shared_attention of {getattr(attention, '__name__', 'attention')}")
    for dtype in checked(dtypes):
        examples = partial(_example, dtype, device, head_dim, cases)
        check(attend, _LAWS, examples, sizes=SIZES, seeds=len(cases), name=name)
