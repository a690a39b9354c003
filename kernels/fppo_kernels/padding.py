"""Removal and insertion of padding: rows of different lengths as one packed row, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels.operation import Arguments, Drawn, Exact, Kernel, Operation, OperationCost, Shape, normal
from fppo_kernels.shapes import Bool, Int, Shaped

IGNORE = -100  # the label of a token that no token follows


class Lengths(NamedTuple):
    """The boundaries of the sequences in a packed row."""

    cu_seqlens: Int[Tensor, " r"]  # int32 [R + 1]: sequence r is cu_seqlens[r] : cu_seqlens[r + 1]
    lengths: tuple[int, ...]  # the lengths on the host, each > 0
    max_length: int  # 0 without sequences


class Places(NamedTuple):
    """The indices of the M real tokens of rows [B, S], known on the host."""

    index: Int[Tensor, " m"]  # pyright: ignore[reportIncompatibleMethodOverride]  # in [B * S], on the rows' device
    sizes: tuple[int, ...]  # the number of tokens of each row
    lengths: Lengths | None = None  # the packed row's boundaries, if known; its rows then fill it


class Packed(NamedTuple):
    """The M real tokens of a padded batch, row by row, and N - M padding tokens, which fill up to a multiple."""

    tokens: Int[Tensor, " n"]  # 0 at padding
    positions: Int[Tensor, " n"]  # int64, from 0 in each row and in the padding
    labels: Int[Tensor, " n"]  # the next token of the same row; IGNORE at the last token of each row and at padding
    lengths: Lengths  # without empty rows; padding is one more sequence, the last
    index: Int[Tensor, " m"]  # pyright: ignore[reportIncompatibleMethodOverride]  # each real token's place in [B * S]
    columns: dict[str, Shaped[Tensor, "n ..."]]  # by name; 0 at padding


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the host to a device asynchronously."""
    device = torch.device(device)
    if device.type == "cuda":  # copies from pageable memory may block
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def make_lengths(lengths: Sequence[int], device: torch.device | str = "cpu") -> Lengths:
    """Boundaries of sequences with these lengths, in order; empty sequences are left out."""
    sizes = tuple(int(n) for n in lengths if n)
    ends = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0).to(torch.int32)
    return Lengths(sent(ends, device), sizes, max(sizes, default=0))


def find_places(attention_mask: Bool[Tensor, "b s"]) -> Places:
    """The indices at which `attention_mask` (bool [B, S]) is True. Waits for the device, if the mask is on one."""
    mask = attention_mask.bool()
    sizes: list[int] = mask.sum(1).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return Places(mask.flatten().nonzero().flatten(), tuple(sizes))


def unpad(
    tokens: Int[Tensor, "b s"],
    attention_mask: Bool[Tensor, "b s"],
    *,
    columns: Mapping[str, Shaped[Tensor, "b s ..."]] | None = None,
    multiple: int = 1,
    places: Places | None = None,
) -> Packed:
    """Pack the tokens [B, S] at which `attention_mask` (bool [B, S]) is True, row by row, wherever the padding is.

    Labels are the tokens shifted by one within each row. `columns`, each [B, S, ...], are packed like the tokens,
    differentiably. The length is padded to the next multiple of `multiple`, for sequence parallelism and compiled
    shapes. `places` are those of the mask; without them the function waits for the device, to learn the lengths.

    Raises ValueError for shapes that do not match, and for a multiple below 1.
    """
    columns = {} if columns is None else columns
    for name, x in {"tokens": tokens, **columns}.items():
        if x.shape[:2] != attention_mask.shape:
            raise ValueError(f"attention_mask {tuple(attention_mask.shape)} does not fit {name} {tuple(x.shape)}")
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [B, S], got {list(tokens.shape)}; pass other tensors as columns")
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    mask = attention_mask.bool()
    index, sizes, known = find_places(mask) if places is None else places
    fill = -len(index) % multiple
    lengths = make_lengths([*sizes, fill], tokens.device) if known is None else known
    packed = _fill(tokens.flatten()[index], fill)
    labels = packed.roll(-1)
    labels.index_fill_(0, lengths.cu_seqlens[1:].long() - 1, IGNORE)
    labels[len(index) :] = IGNORE
    positions = (mask.long().cumsum(1) - 1).flatten()[index]
    return Packed(
        tokens=packed,
        positions=torch.cat([positions, torch.arange(fill, device=tokens.device)]),
        labels=labels,
        lengths=lengths,
        index=index,
        columns={name: _fill(x.flatten(0, 1)[index], fill) for name, x in columns.items()},
    )


def _fill(x: Tensor, count: int) -> Tensor:
    return torch.cat([x, x.new_zeros((count, *x.shape[1:]))]) if count else x


def pad(x: Shaped[Tensor, " n *k"], index: Int[Tensor, " m"], shape: Sequence[int]) -> Shaped[Tensor, "b s *k"]:
    """Unpack `x` [N, ...] to [B, S, ...]: row n at flat index index[n], zeros elsewhere; `shape` is (B, S).

    Rows of `x` beyond the M entries of `index` are padding of `unpad`, and are dropped. Raises ValueError if N < M.
    """
    batch, width = shape
    if len(x) < len(index):
        raise ValueError(f"{len(x)} rows do not fill the {len(index)} places of index; gather the packed row first")
    flat = x.new_zeros((batch * width, *x.shape[1:])).index_copy(0, index, x[: len(index)])
    return flat.view(batch, width, *x.shape[1:])


def ragged(rows: int, width: int) -> Bool[Tensor, "b s"]:
    """A mask [B, S] in which row i has its first S (i + 1) / B tokens."""
    lengths = torch.arange(1, rows + 1)[:, None] * width // max(rows, 1)
    return torch.arange(width) < lengths


def _call_unpad(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    packed = kernel(x["tokens"], x["attention_mask"], columns={"column": x["column"]})
    return {"tokens": packed.tokens, "labels": packed.labels, "column": packed.columns["column"]}


def _sized_unpad(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    generator, mask = torch.Generator().manual_seed(0), ragged(shape["B"], shape["S"])
    inputs = {
        "tokens": torch.randint(1, 1000, mask.shape, generator=generator).to(device),
        "attention_mask": mask.to(device),
        "column": normal(generator, *mask.shape).to(device, dtype),
    }
    return Drawn(inputs, {}, normal(generator, int(mask.sum())).to(device))


def _exact_unpad(drawn: Drawn) -> Exact:
    tokens, mask, column = drawn.inputs.values()
    following = torch.full_like(tokens, IGNORE)
    following[:, :-1] = tokens[:, 1:].where(mask[:, 1:], IGNORE)
    gradient = torch.zeros_like(column, dtype=torch.float64)
    gradient[mask] = drawn.weights.to(column.dtype).double()
    values = {"tokens": tokens[mask], "labels": following[mask], "column": column[mask].double()}
    return Exact(values, {("column", "column"): gradient})


def _cost_unpad(shape: Shape, itemsize: int) -> OperationCost:
    padded, real = shape["B"] * shape["S"], int(ragged(shape["B"], shape["S"]).sum())
    forward = padded * 9 + real * (4 * 8 + 2 * itemsize)
    words = "bytes: tokens, mask and the column read; tokens, positions, labels, index and the column written"
    return OperationCost(bytes_forward=forward, bytes_total=forward + (padded + real) * itemsize, words=words)


UNPAD = Operation(
    name="unpad",
    call=_call_unpad,
    reference=unpad,
    outputs=("tokens", "labels", "column"),
    leaves=("column",),
    sloped=("column",),
    shape={"B": 64, "S": 1024},
    sized=_sized_unpad,
    cost=_cost_unpad,
    timed=("column",),
    exact=_exact_unpad,
)


def _call_pad(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {"padded": kernel(*x.values(), keywords["shape"])}


def _sized_pad(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    generator, mask = torch.Generator().manual_seed(0), ragged(shape["B"], shape["S"])
    numbers = normal(generator, int(mask.sum()), shape["D"]).to(device, dtype)
    inputs = {"x": numbers, "index": mask.flatten().nonzero().flatten().to(device)}
    return Drawn(inputs, {"shape": tuple(mask.shape)}, normal(generator, *mask.shape, shape["D"]).to(device))


def _exact_pad(drawn: Drawn) -> Exact:
    (x, index), (rows, width) = drawn.inputs.values(), drawn.extras["shape"]
    padded = torch.zeros(rows * width, x.shape[1], dtype=torch.float64, device=x.device)
    padded[index] = x.double()
    gradient = drawn.weights.flatten(0, 1)[index].to(x.dtype).double()
    return Exact({"padded": padded.view(rows, width, -1)}, {("padded", "x"): gradient})


def _cost_pad(shape: Shape, itemsize: int) -> OperationCost:
    padded, real = shape["B"] * shape["S"], int(ragged(shape["B"], shape["S"]).sum())
    forward = (padded + real) * shape["D"] * itemsize + 8 * real
    words = "bytes: x and index read, the padded tensor written, with backward the real rows read and written"
    total = forward + real * (2 * shape["D"] * itemsize + 8)
    return OperationCost(bytes_forward=forward, bytes_total=total, words=words)


PAD = Operation(
    name="pad",
    call=_call_pad,
    reference=pad,
    outputs=("padded",),
    leaves=("x",),
    sloped=("padded",),
    shape={"B": 64, "S": 1024, "D": 64},
    sized=_sized_pad,
    cost=_cost_pad,
    exact=_exact_pad,
)
