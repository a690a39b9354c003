"""Laws of padding: `pad` inverts `unpad`, labels stay in their row, and columns and padding follow the tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo.laws._kernels import grads, words
from fppo.laws._search import Law, LawExample, check, differ, fn_name, normal, unchanged
from fppo_kernels.padding import IGNORE, find_places

SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (3, 3), (5, 6), (0, 3))
SEEDS = 7
MULTIPLES = (1, 2, 3, 8)
FIELDS = ("tokens", "positions", "labels")


def _rows(example: LawExample) -> list[Tensor]:
    """The real tokens of each row."""
    tokens, mask = example.inputs["tokens"], example.inputs["mask"]
    return [row[keep] for row, keep in zip(tokens, mask, strict=True)]


def _joined(tokens: Tensor, rows: list[Tensor]) -> Tensor:
    return torch.cat([x.to(tokens) for x in rows]) if rows else tokens.new_zeros(0)


def _lengths_differ(lengths: Any, sizes: list[int]) -> str | None:
    sizes = [n for n in sizes if n]
    ends = torch.tensor([0, *sizes]).cumsum(0).to(lengths.cu_seqlens.device)
    if reason := differ("lengths.cu_seqlens", ends, lengths.cu_seqlens, 0.0):
        return reason
    if lengths.cu_seqlens.dtype != torch.int32:
        return f"lengths.cu_seqlens is {words(lengths.cu_seqlens.dtype)}, expected int32"
    if tuple(lengths.lengths) != tuple(sizes) or lengths.max_length != max(sizes, default=0):
        return f"lengths are {lengths.lengths}, the longest {lengths.max_length}, expected {sizes} of rows with tokens"
    return None


def _order(unpad: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    tokens, mask = example.inputs["tokens"], example.inputs["mask"]
    packed, rows = unpad(tokens, mask), _rows(example)
    wanted = {
        "tokens": _joined(tokens, rows),
        "positions": _joined(tokens, [torch.arange(len(row)) for row in rows]),
        "index": torch.arange(mask.numel(), device=tokens.device)[mask.flatten()],
    }
    for name, expected in wanted.items():
        if reason := differ(name, expected, getattr(packed, name), 0.0):
            return reason
    return _lengths_differ(packed.lengths, [len(row) for row in rows])


def _labels(unpad: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    tokens, mask = example.inputs["tokens"], example.inputs["mask"]
    rows = [torch.cat([row[1:], row.new_full((min(len(row), 1),), IGNORE)]) for row in _rows(example)]
    return differ("labels", _joined(tokens, rows), unpad(tokens, mask).labels, 0.0)


def _multiple(unpad: Callable, example: LawExample, generator: torch.Generator, *, pad: Callable) -> str | None:
    tokens, mask = example.inputs["tokens"], example.inputs["mask"]
    plain = unpad(tokens, mask)
    sizes, count = [len(row) for row in _rows(example)], int(mask.sum())
    for multiple in MULTIPLES:
        packed = unpad(tokens, mask, columns={"weights": example.weights}, multiple=multiple)
        fill = -count % multiple
        column = packed.columns["weights"]
        rest = {"tokens": [0] * fill, "positions": list(range(fill)), "labels": [IGNORE] * fill}
        reasons = [
            differ(name, torch.cat([getattr(plain, name), tokens.new_tensor(rest[name])]), getattr(packed, name), 0.0)
            for name in FIELDS
        ]
        reasons.append(
            differ("the column", _joined(column, [example.weights[mask], column.new_zeros(fill, 2)]), column)
        )
        reasons.append(differ("index", plain.index, packed.index, 0.0))
        reasons.append(_lengths_differ(packed.lengths, [*sizes, fill]))
        reasons.append(differ("pad(tokens)", tokens.where(mask, 0), pad(packed.tokens, packed.index, mask.shape), 0.0))
        for reason in reasons:
            if reason:
                return f"with multiple={multiple}, {reason}"
    return None


def _round_trip(unpad: Callable, example: LawExample, generator: torch.Generator, *, pad: Callable) -> str | None:
    tokens, mask = example.inputs["tokens"], example.inputs["mask"]
    packed = unpad(tokens, mask)
    back = pad(packed.tokens, packed.index, mask.shape)
    if reason := differ("pad(unpad(tokens))", tokens.where(mask, 0), back, 0.0):
        return reason
    again = unpad(back, mask)
    return differ("unpad(pad(unpad(tokens)))", packed.tokens, again.tokens, 0.0)


def _columns(unpad: Callable, example: LawExample, generator: torch.Generator, *, pad: Callable) -> str | None:
    """Describe how `unpad` misplaces columns [B, S, 2] and [B, S] of the tokens, `pad` rows [N, 2], or either of them a
    gradient; None if nothing is misplaced."""
    tokens, mask, weights = example.inputs["tokens"], example.inputs["mask"], example.weights
    wide = weights.clone().requires_grad_()
    packed = unpad(tokens, mask, columns={"wide": wide, "flat": weights[..., 0], "mask": mask})
    if set(packed.columns) != {"wide", "flat", "mask"}:
        return f"columns are {sorted(packed.columns)}, expected flat, mask and wide"
    for name, expected in (("wide", weights[mask]), ("flat", weights[mask][:, 0]), ("mask", mask[mask])):
        if reason := differ(f"column {name!r}", expected, packed.columns[name], 0.0):
            return reason
    x = normal(generator, int(mask.sum()), 2).to(weights).requires_grad_()
    (grad,) = grads((x.detach() * packed.columns["wide"]).sum(), [wide])
    if reason := differ(
        "the gradient by a column", torch.zeros_like(weights).masked_scatter(_wide(mask), x), grad, 0.0
    ):
        return reason
    padded = pad(x, packed.index, mask.shape)
    expected = torch.zeros_like(weights)
    expected[mask] = x.detach()
    if reason := differ("pad(x [N, 2])", expected, padded, 0.0):
        return reason
    return differ("the gradient by x", weights[mask], grads((weights * padded).sum(), [x])[0], 0.0)


def _wide(mask: Tensor) -> Tensor:
    return mask[..., None].expand(*mask.shape, 2)


def _places(unpad: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    tokens, mask = example.inputs["tokens"], example.inputs["mask"]
    found = find_places(mask)
    for multiple in (1, 4):
        plain, told = (unpad(tokens, mask, multiple=multiple, places=x) for x in (None, found))
        for name in ("tokens", "positions", "labels", "index"):
            if reason := differ(name, getattr(plain, name), getattr(told, name), 0.0):
                return f"with places, {reason}"
        if reason := _lengths_differ(told.lengths, list(plain.lengths.lengths)):
            return f"with places, {reason}"
    return None


def _purity(unpad: Callable, example: LawExample, generator: torch.Generator, *, pad: Callable) -> str | None:
    copy, weights = example.map(torch.clone), example.weights.clone()
    packed = unpad(*example.inputs.values(), columns={"weights": example.weights})
    before = packed.tokens.clone(), packed.index.clone()
    pad(packed.tokens, packed.index, example.mask.shape)
    if not (torch.equal(before[0], packed.tokens) and torch.equal(before[1], packed.index)):
        return "pad changed its argument"
    return unchanged(example, copy) or differ("its argument columns", weights, example.weights, 0.0)


def _example(device: torch.device | str, rows: int, width: int, seed: int) -> LawExample:
    """Draw a mask by the seed: no padding, on the right, left, both sides, both with empty rows, holes, only
    padding."""
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    sizes = torch.randint(1, width + 1, (rows, 1), generator=generator)
    free = width - sizes
    first = (torch.rand(rows, 1, generator=generator) * (free + 1)).long()
    empty = torch.rand(rows, 1, generator=generator) < 0.5
    holes = torch.rand(rows, width, generator=generator) < 0.5
    place = torch.arange(width)
    both = (place >= first) & (place < first + sizes)
    masks = (both | True, place < sizes, place >= free, both, both & ~empty, both & ~holes, both & False)
    tokens = torch.randint(1, 100, (rows, width), generator=generator)
    example = LawExample({"tokens": tokens, "mask": masks[seed]}, {}, normal(generator, rows, width, 2))
    return example.map(lambda x: x.to(device))


def _laws(pad: Callable) -> tuple[Law, ...]:
    return (
        Law("purity", "arguments stay as they are", partial(_purity, pad=pad)),
        Law("packed order", "unpad lists the tokens of the mask row by row, with positions and lengths", _order),
        Law("labels", "a label is the next token of the same row, and none follows the last", _labels),
        Law("round trip", "pad undoes unpad on the mask and gives 0 elsewhere", partial(_round_trip, pad=pad)),
        Law("columns", "numbers go to and from their places, and gradients select", partial(_columns, pad=pad)),
        Law("multiple", "a fill is one more sequence of 0 at the end, which pad drops", partial(_multiple, pad=pad)),
        Law("places", "with the places of the real tokens, unpad gives what it does without", _places),
    )


def check_padding(unpad: Callable[..., Any], pad: Callable[..., Tensor], *, device: torch.device | str = "cpu") -> None:
    """Check a pair of functions by the laws of padding: `laws.check_padding(my_unpad, my_pad)`.

    `unpad(tokens [B, S], mask [B, S], *, columns, multiple, places)` returns a record with tokens, positions, labels,
    lengths, index and columns (see `fppo_kernels.padding`); `pad(x [N, ...], index, (B, S))` returns a tensor [B, S,
    ...] with zeros elsewhere. With `places`, of `find_places`, the host need not wait for the mask.

    The laws: tokens are packed row by row, with their positions and lengths; a label is the next token of the same row;
    columns are packed like tokens; padding up to a multiple is one sequence at the end, which `pad` drops; the round
    trip is the identity on the mask, both ways, bit for bit; gradients go the opposite way; arguments stay. Masks
    have padding on the left, on the right, on both sides, within rows or nowhere, rows without tokens, or no token at
    all. Raises LawViolation for the first broken law.
    """
    name = f"{fn_name(unpad)} with {fn_name(pad)}"
    check(unpad, _laws(pad), partial(_example, device), sizes=SIZES, seeds=SEEDS, name=name)
