"""Replay passes of few tokens as CUDA graphs, so that the host launches a pass at once instead of operation by
operation.

The host takes as long to launch a layer's operations as a GPU takes to run them on some thousand tokens. A recorded
pass runs on tensors of fixed addresses and sizes. So rows, masks and parameters are copied to buffers; rows are padded
to one of few widths; and rows that count nowhere pad the packed row to one of few lengths. Neither changes a result
(`laws.check_update`, `ranks.blank`), except for the order of sums.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn
from typing import cast as typed

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo.batch import Column
from fppo.models.lengths import longest_row
from fppo.models.model import Model, Params
from fppo.runtime.graphs import Record, Run, as_graphs
from fppo.runtime.mesh import AXES, LOCAL, Mesh
from fppo.steps.outputs import Forward
from fppo.steps.packed import Indices, Masks, MicroBatch, Own, find_indices
from fppo.steps.sharded import cast, wire_dtypes
from fppo_kernels.padding import Lengths, Places, sent

LAYER_TOKENS = 2.1e11  # tokens times parameters, per layer, that an H100 runs while the host launches the layer
KEPT = 32  # the most recorded passes
_ROWS, _WIDTH, _STEP, _PARTS = 8, 64, 64, 4  # multiple of rows, least width, least step of lengths


class Sizes(NamedTuple):
    """The sizes of the tensors that a recorded pass runs on."""

    rows: int
    prompt: int
    response: int
    tokens: int  # tokens of the packed row
    responses: int  # tokens before the head


class _Untold:
    """Stand-in for numbers that a recorded pass must not read on the host, since replays have others."""

    def _refuse(self) -> NoReturn:
        raise ValueError(
            "a pass that is recorded as a CUDA graph has the lengths of its rows on the device alone, and this kernel "
            "reads them on the host: give attention/varlen or attention/flash, or record no passes"
        )

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()


class _KeptPass(NamedTuple):
    """A pass that may be replayed: its function `run`, the buffers of its inputs (`columns`, `numbers`), and the
    `signature` of the passes that it fits."""

    signature: tuple[Any, ...]
    columns: list[Any]
    rows: Any  # the record among `columns`
    numbers: Tensor  # the buffer of the tokens' indices
    run: Run


@attrs.frozen(eq=False)
class Recorder:
    """Runs passes of at most `most_tokens` tokens on fixed buffers, as functions that `make` records.

    It keeps buffers, not values: results depend on arguments alone. After `KEPT` recordings of different sizes it drops
    all of them. Not recorded are: models cut over ranks, models with recurrent states, routers or images, recomputed or
    compiled layers, padded rows, and passes in threads other than the main one.
    """

    make: Callable[[], Record]
    most_tokens: int
    _records: list[Record] = attrs.field(factory=list, init=False)
    _passes: list[_KeptPass] = attrs.field(factory=list, init=False)
    _params_of: dict[Any, Params] = attrs.field(factory=dict, init=False)
    _results_of: dict[Any, list[Tensor]] = attrs.field(factory=dict, init=False)

    def placed(self, params: Params, kinds: Mapping[str, torch.dtype]) -> Params:
        """Copy parameters, in the dtypes of `kinds`, to buffers that the next ones of the same shapes overwrite."""
        wanted = {name: kinds.get(name, x.dtype) for name, x in params.items()}
        key = tuple((name, x.shape, x.device, wanted[name]) for name, x in params.items())
        if key not in self._params_of:
            self._params_of[key] = {name: torch.empty_like(x, dtype=wanted[name]) for name, x in params.items()}
        kept = self._params_of[key]
        _copy(list(kept.values()), list(params.values()))
        return kept

    def takes(self, params: Any, columns: Any, masks: Masks | None, forward: Forward) -> bool:
        """Whether a pass may be recorded. Among the conditions: its parameters come from `placed`, and it has at most
        `most_tokens` tokens."""
        if masks is None:
            return False
        (_, width), length = masks.attention.shape, masks.response.shape[1]
        return (
            forward.remove_padding
            and masks.tokens is None
            and 0 < length < width
            and int(masks.attention.sum()) <= self.most_tokens
            and any(params is x for x in self._params_of.values())
            and len({x.device for x in pytree.tree_leaves((params, columns)) if isinstance(x, Tensor)}) == 1
        )

    def __call__(
        self, fn: Callable[..., Any], identity: Any, params: Params, columns: Any, masks: Masks, forward: Forward
    ) -> Any:
        """Run `fn(params, columns, indices)`; the tensors of the resulting tree are overwritten by the next call.

        `columns` is a tree: a record of rows with these masks, and further columns of the rows. `fn` gets them with
        more rows and a larger width. `identity` stands for everything else that `fn` depends on.
        """
        sizes = sizes_of(masks)
        leaves, spec = pytree.tree_flatten(columns)
        kinds = [(x.dtype, _shape(x, masks, sizes)) if isinstance(x, Tensor) else _value(x) for x in leaves]
        code = forward.model, forward.kernels, forward.read, torch.is_grad_enabled()
        signature = (identity, *code, id(params), spec, kinds, sizes)
        kept = next((x for x in self._passes if x.signature == signature), None)
        if kept is None:
            kept = self._new(signature, partial(fn, params), columns, masks, forward.mesh)
        _fill(kept, leaves, masks, sizes)
        kept.numbers.copy_(sent(numbers_of(masks, sizes, forward.model), kept.numbers.device))
        return kept.run()

    def _new(
        self, signature: tuple[Any, ...], fn: Callable[..., Any], columns: Any, masks: Masks, mesh: Mesh
    ) -> _KeptPass:
        sizes = sizes_of(masks)

        def place(x: Any) -> Any:
            return x.new_zeros(_shape(x, masks, sizes)) if isinstance(x, Tensor) else _value(x)

        places = pytree.tree_map(place, columns)
        rows, length = places[0], sizes.tokens + 2 * sizes.responses + sizes.rows + 1
        numbers = torch.zeros(length, dtype=torch.int64, device=rows.tokens.device)

        def run() -> Any:
            return self._results(fn(places, indices_at(numbers, rows, sizes, mesh)))

        if len(self._passes) == KEPT or not self._records:
            self._passes.clear()
            self._results_of.clear()
            self._records[:] = [self.make()]
        kept = _KeptPass(signature, pytree.tree_leaves(places), rows, numbers, _recorded(run, self._records[0]))
        self._passes.append(kept)
        return kept

    def _results(self, tree: Any) -> Any:
        """The tree in memory that is shared by all passes whose results have these shapes."""
        leaves, spec = pytree.tree_flatten(tree)
        new = [x for x in leaves if isinstance(x, Tensor)]
        key = tuple((x.shape, x.dtype, x.device) for x in new)
        if key not in self._results_of:
            self._results_of[key] = [torch.empty_like(x) for x in new]
        _copy(self._results_of[key], new)
        kept = iter(self._results_of[key])
        return pytree.tree_unflatten([next(kept) if isinstance(x, Tensor) else x for x in leaves], spec)


def graphs(model: Model, device: torch.device) -> Recorder:
    """Make a recorder of CUDA graphs for a model, for passes that the host, not the GPU, limits."""
    return Recorder(partial(as_graphs, device, tidy=True), most_tokens(model))


def most_tokens(model: Model) -> int:
    """The most tokens of a pass that `graphs` records."""
    size = sum(shape.numel() for shape in model.whole_shapes.values())
    return int(LAYER_TOKENS * len(model.layers) / size)


def records(model: Model, mesh: Mesh) -> bool:
    """Whether passes of a model over packed rows can be recorded at all."""
    whole = model.layout is None and not model.spans and all(mesh[name].size == 1 for name in AXES)
    plain = not (model.stateful or model.routers) and model.vision is None and longest_row(model.config) is None
    once = not model.checkpoint_layers and model.mlp_slice_tokens is None
    return whole and plain and once and not model.compile_layers


def sizes_of(masks: Masks) -> Sizes:
    """Round up the sizes of rows with these masks to one of few, with at least one row and one token to spare."""
    (count, width), length = masks.attention.shape, masks.response.shape[1]
    real, responses = int(masks.attention.sum()), int(masks.response.sum())
    prompt, response = (max(_WIDTH, 1 << (x - 1).bit_length()) for x in (width - length, length))
    step = max(_STEP, 1 << max(real.bit_length() - 4, 0))
    tokens = (real // step + 1) * step
    spare = -(-(tokens - real) // (prompt + response))
    part = tokens // _PARTS
    return Sizes(
        rows=-(-(count + spare) // _ROWS) * _ROWS,
        prompt=prompt,
        response=response,
        tokens=tokens,
        responses=max(-(-responses // part), 1) * part,
    )


class _Wide(NamedTuple):
    """Masks with more rows and a larger width."""

    attention_mask: Tensor
    response_mask: Tensor


def numbers_of(masks: Masks, sizes: Sizes, model: Model) -> Tensor:
    """The indices of the tokens of rows padded to `sizes`, whose further rows fill the packed row: one tensor on the
    host, which `indices_at` splits."""
    (count, width), length, left = masks.attention.shape, masks.response.shape[1], _left_padding(masks, sizes)
    real = masks.attention.new_zeros(sizes.rows, sizes.prompt + sizes.response)
    real[:count, left : left + width] = masks.attention
    real[count:].view(-1)[: sizes.tokens - int(masks.attention.sum())] = True
    counted = masks.response.new_zeros(sizes.rows, sizes.response)
    counted[:count, :length] = masks.response
    found = find_indices(_Wide(real, counted), Masks(real, counted), model, LOCAL, packed=True)
    more = sizes.responses - len(found.responses)
    # padding for the head: entries of the last row, which count nowhere, from the last token, which is padding
    fill = (sizes.rows - 1) * sizes.response + torch.arange(more) % sizes.response
    before = torch.full((more,), sizes.tokens - 1)
    ends = list(accumulate((size for size in found.real.sizes if size), initial=0))
    ends += [sizes.tokens] * (sizes.rows + 1 - len(ends))
    return torch.cat([found.real.index, found.responses, fill, found.before, before, torch.tensor(ends)])


def indices_at(numbers: Tensor, rows: Any, sizes: Sizes, mesh: Mesh) -> Indices:
    """The indices of a pass over `rows`, as views of the result of `numbers_of` on their device."""
    parts = [sizes.tokens, sizes.responses, sizes.responses, sizes.rows + 1]
    index, responses, before, ends = numbers.split(parts)
    untold = typed("tuple[int, ...]", _Untold())
    lengths = Lengths(ends.int(), untold, sizes.prompt + sizes.response)
    return Indices(
        attention_mask=rows.attention_mask,
        response_mask=rows.response_mask,
        mesh=mesh,
        packed=True,
        real=Places(index, untold, lengths),
        responses=responses,
        before=before,
        own=Own(slice(None), before),
        length=sizes.tokens,
        dealt=None,
    )


def _left_padding(masks: Masks, sizes: Sizes) -> int:
    """The number of padding columns to insert before the rows, so that prompts have the width `sizes.prompt`."""
    return sizes.prompt - (masks.attention.shape[1] - masks.response.shape[1])


def _shape(x: Tensor, masks: Masks, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a column with more rows and a larger width."""
    if x.dim() == 0:
        return ()
    widths = {masks.attention.shape[1]: sizes.prompt + sizes.response, masks.response.shape[1]: sizes.response}
    return (sizes.rows, *(widths.get(n, n) for n in x.shape[1:2]), *x.shape[2:])


def _fill(recorded: _KeptPass, leaves: list[Any], masks: Masks, sizes: Sizes) -> None:
    """Copy columns, the leaves of a tree, into a pass's input buffers of larger `sizes`."""
    count, width = masks.attention.shape
    for place, x in zip(recorded.columns, leaves, strict=True):
        if not isinstance(x, Tensor):
            continue
        if x.dim() == 0:
            place.copy_(x)
            continue
        place.zero_()
        start = _left_padding(masks, sizes) if x.dim() > 1 and x.shape[1] == width else 0
        part = place[:count] if x.dim() == 1 else place[:count, start : start + x.shape[1]]
        part.copy_(x)
    recorded.rows.attention_mask[count:, 0] = True  # padding of the packed row is at position 0


def _value(x: Any) -> Any:
    """The value of a leaf that is no tensor. It is part of the recording: another value needs a recording of its own.

    Replays cannot depend on rows' objects, so object columns are empty.
    """
    return Column() if isinstance(x, Column) else x


def _copy(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each of `values` into its buffer, in one operation per pair of dtypes."""
    together: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for place, x in zip(places, values, strict=True):
        both = together.setdefault((place.dtype, x.dtype), ([], []))
        both[0].append(place)
        both[1].append(x)
    for own, new in together.values():
        torch._foreach_copy_(own, new)  # pyright: ignore[reportPrivateImportUsage]


def _recorded(run: Run, record: Record) -> Run:
    """Record `run` by `record`; if that fails, run it as it is from then on."""
    replay, failed = record(run), list[RuntimeError]()

    def recorded() -> Any:
        if not failed:
            try:
                return replay()
            except RuntimeError as error:
                failed.append(error)
                warnings.warn(f"a pass is run operation by operation, as recording it failed: {error}", stacklevel=2)
        return run()

    return recorded


def ready(params: Params, forward: Forward, record: Recorder | None) -> Params:
    """Cast parameters that are not cut to their compute dtypes, in buffers if passes are recorded."""
    alone = threading.current_thread() is threading.main_thread()  # only it may write to the buffers
    if record is None or not alone or not records(forward.model, forward.mesh):
        return cast(params, forward.model)
    return record.placed(params, wire_dtypes(forward.model, params))


def run_one(
    fn: Callable[..., Tensor],
    identity: Any,
    params: Any,
    micro_batch: MicroBatch,
    *,
    forward: Forward,
    record: Recorder,
) -> Tensor:
    """Run `fn(params, micro_batch, forward=forward, received=None)` [K, B, T], recorded if possible. `identity` stands
    for everything else that `fn` depends on."""
    if not record.takes(params, micro_batch.rows, micro_batch.masks, forward):
        return fn(params, micro_batch, forward=forward, received=None)

    def run(params: Params, columns: Any, indices: Indices) -> Tensor:
        return fn(params, MicroBatch(columns[0], indices, None), forward=forward, received=None)

    assert micro_batch.masks is not None
    (count, length) = micro_batch.masks.response.shape
    return record(run, identity, params, (micro_batch.rows,), micro_batch.masks, forward)[:, :count, :length].clone()
