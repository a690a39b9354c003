"""The data of a request as rows of passes: tokens, targets and the loss's inputs, padded alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from fppo._errors import nearest, printable
from fppo.batch import Column, RowInputs
from fppo.serve.tinker.losses import INPUTS, Columns, Loss, first_problem
from fppo.shapes import Mask
from fppo.tree import state
from fppo_kernels.padding import sent


@attrs.frozen(eq=False)
class Datum:
    """A sequence with targets: after token t of `tokens` [T] int64 comes any of `targets` [T] or [T, K] int64.

    `inputs` are the loss's, by their names in the protocol: each [T] or [T, K] floating, like the targets, or [] or [T]
    or [T, K] as a custom loss declares them. `images` belong to the placeholder tokens among `tokens`.
    """

    tokens: Tensor
    targets: Tensor
    inputs: Mapping[str, Tensor] = attrs.field(factory=dict)
    images: RowInputs | None = None


@state
class TargetedRows:
    """Rows of data for `steps.targets.forward_targets`: B rows of S tokens, the first P of which are prompts."""

    tokens: Tensor  # [B, S] int64: prompts padded on the left, the rest on the right
    attention_mask: Tensor  # [B, S] bool
    response_mask: Tensor  # [B, S - P] bool: the tokens after a prompt, which ends before the first target that counts
    row_ids: Tensor  # [B] int64: the places of the data in the request
    targets: Tensor  # [B, S, K] int64
    graded: Tensor  # [B, S] bool: where a target's log-prob has a gradient
    real: Tensor  # [B, S, K] bool: the targets that the data have
    inputs: Column | None = None  # RowInputs of data that have images, else None


class DataRows(NamedTuple):
    """Rows, and the loss's inputs as columns [B, S * K] by name."""

    rows: TargetedRows
    columns: Columns

    def of(self, flat: Tensor, like: Sequence[Datum]) -> list[Tensor]:
        """Split values [B, S, K] of the rows by the data `like`: a tensor for each datum, of the shape of its
        targets."""
        each = flat[self.rows.attention_mask.to(flat.device)].split([len(datum.tokens) for datum in like])
        return [
            x[:, 0] if d.targets.dim() == 1 else x[:, : d.targets.shape[1]] for x, d in zip(each, like, strict=True)
        ]


def rows_of(data: Sequence[Datum], loss: Loss, *, vocabulary: int, limit: int | None, device: torch.device) -> DataRows:
    """Check data, and pad them to rows on a device. Inputs of a custom loss are no columns: it reads each datum's own.

    Raises ValueError, naming the datum, for wrong shapes and dtypes, more than `limit` tokens, tokens outside the
    vocabulary, missing or unknown inputs, and numbers that the loss cannot take.
    """
    check_data(data, loss, vocabulary=vocabulary, limit=limit)
    most = max(_width(datum.targets) for datum in data)
    lengths = [len(datum.tokens) for datum in data]
    flat = _flat_inputs(data, loss, most)
    real = torch.cat([_wide(torch.ones(d.targets.shape, dtype=torch.bool), most) for d in data])  # [R, K]
    columns = {name: x.flatten()[None] for name, x in flat.items()}
    problem = first_problem(loss, columns, real.flatten()[None])
    if problem is not None:
        number, place = _place(problem[0] // most, lengths)
        raise ValueError(f"datum {number} has {problem[1]}, after its token {place}")
    counts = loss.counts(columns)
    graded = (real if counts is None else real & counts.view(real.shape)).any(1)  # [R]
    prompts = [int(x.nonzero()[0]) + 1 if x.any() else len(x) for x in graded.split(lengths)]
    attention = _mask(lengths, prompts)
    put = lambda x: _padded(x, attention, device)  # noqa: E731
    rows = TargetedRows(
        tokens=put(torch.cat([datum.tokens for datum in data])),
        attention_mask=sent(attention, device),
        response_mask=sent(attention[:, max(prompts) :].contiguous(), device),
        row_ids=sent(torch.arange(len(data)), device),
        targets=put(torch.cat([_wide(datum.targets, most) for datum in data])),
        graded=put(graded),
        real=put(real),
        inputs=None if all(d.images is None for d in data) else Column([d.images for d in data]),
    )
    return DataRows(rows, {name: put(x).flatten(1) for name, x in flat.items()})


def check_data(data: Sequence[Datum], loss: Loss, *, vocabulary: int, limit: int | None) -> None:
    """Raise ValueError for data that no pass can take, naming the datum."""
    if not data:
        raise ValueError("a request without data: give one or more")
    for number, datum in enumerate(data):
        where, count = f"datum {number}", len(datum.tokens)
        if datum.tokens.dim() != 1 or not count:
            raise ValueError(f"{where}: its tokens are {list(datum.tokens.shape)}: give one or more")
        if limit is not None and count > limit:
            raise ValueError(f"{where} has {count} tokens; the model takes at most {limit}")
        shape = datum.targets.shape
        if datum.targets.dim() not in (1, 2) or shape[0] != count or not shape.numel():
            raise ValueError(f"{where}: target_tokens are {list(shape)}: give [{count}] or [{count}, K], K 1 or more")
        if loss.flat and datum.targets.dim() != 1:
            raise ValueError(
                f"{where}: {loss.name} takes one target for each token, and target_tokens are {list(shape)}"
            )
        _check_inputs(where, datum, loss)
    for name in ("tokens", "targets"):
        ids = torch.cat([getattr(datum, name).flatten() for datum in data])
        if ids.is_floating_point() or bool((wrong := (ids < 0) | (ids >= vocabulary)).any()):
            what = ids.dtype if ids.is_floating_point() else int(ids[wrong][0])
            raise ValueError(f"{name} hold {what}: give int64, 0 to {vocabulary - 1}, the model's vocabulary")


def _check_inputs(label: str, datum: Datum, loss: Loss) -> None:
    if missing := [name for name in loss.needs if name not in datum.inputs]:
        more = ": attach provenance (Datum.with_provenance)" if missing[0] == "sampled" else ""
        raise ValueError(f"{label} has no {missing[0]}, which loss {loss.name!r} needs{more}")
    for name, x in datum.inputs.items():
        if name not in INPUTS and loss.graph is None:
            near = nearest(name, INPUTS)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"{label}: unknown input {printable(name, 64)!r}{hint}")
        if name in loss.takes and loss.graph is None and x.shape != datum.targets.shape:
            raise ValueError(f"{label}: {name} is {list(x.shape)}, and target_tokens are {list(datum.targets.shape)}")


def _flat_inputs(data: Sequence[Datum], loss: Loss, width: int) -> dict[str, Tensor]:
    """The loss's inputs by name, floating [R, K] each, for the R tokens of all data; {} for a custom loss."""
    names = () if loss.graph is not None else tuple(x for x in loss.takes if any(x in d.inputs for d in data))
    if partial := [name for name in names if not all(name in datum.inputs for datum in data)]:
        raise ValueError(f"some data have {partial[0]}, and others do not: give it in all or in none")
    wide = {name: torch.cat([_wide(d.inputs[name], width) for d in data]) for name in names}
    return {name: x if x.is_floating_point() else x.float() for name, x in wide.items()}


def _width(targets: Tensor) -> int:
    return targets.shape[1] if targets.dim() == 2 else 1


def _wide(x: Tensor, width: int) -> Tensor:
    """A datum's [T] or [T, K] as [T, width], filled with zeros."""
    x = x[:, None] if x.dim() == 1 else x
    return x if x.shape[1] == width else torch.cat([x, x.new_zeros(len(x), width - x.shape[1])], 1)


def _place(index: int, lengths: Sequence[int]) -> tuple[int, int]:
    """The number of a datum and the place of a token in it, for a flat index over the tokens of all data."""
    for number, length in enumerate(lengths):
        if index < length:
            return number, index
        index -= length
    raise AssertionError("an index beyond all data")


def _mask(lengths: Sequence[int], prompts: Sequence[int]) -> Mask:
    """The attention mask [B, S] of rows with these lengths, so that all prompts end at one column."""
    left, right = max(prompts), max(n - p for n, p in zip(lengths, prompts, strict=True))
    column, start = torch.arange(left + max(right, 1)), left - torch.tensor(prompts)
    return (column >= start[:, None]) & (column < (start + torch.tensor(lengths))[:, None])


def _padded(flat: Tensor, attention: Mask, device: torch.device) -> Tensor:
    """Values of all tokens [R, ...] as rows [B, S, ...], zeros at padding."""
    rows = flat.new_zeros(*attention.shape, *flat.shape[1:])
    rows[attention] = flat
    return sent(rows, device)
