"""One pass over the data of several runs of a base: they share the products with its weights, and each adds its own
adapter's.

A run's loss depends on no adapter but its own. So one backward pass over the sum of the losses gives every run the
gradient that it has alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo.batch import Column
from fppo.grad import value_and_grad
from fppo.models.heads import Head, embedding_name, output_head, vocabulary_head
from fppo.models.lora import frozen_of
from fppo.models.model import Model, Params
from fppo.models.several import trained_beside
from fppo.serve.tinker.data import DataRows, Datum, TargetedRows
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.passes import PassResult, added, joined, loss_of
from fppo.steps.forward import hidden_of
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.outputs import Forward
from fppo.steps.packed import MicroBatch, cut, indexed, keep_tokens_if_shared, masks_and_tokens
from fppo.steps.recorded import ready
from fppo.steps.sharded import opened
from fppo.steps.targets import check_targets, score_targets


class RunPass(NamedTuple):
    """A run's part of a joint pass: its adapted model, the factors, the data as rows, and the gradients before it."""

    model: Model
    params: Params
    data: Sequence[Datum]
    rows: DataRows
    loss: Loss
    grads: Params | None


def hindrance(model: Model) -> str | None:
    """The reason why a run of this model takes part in no joint pass; None if it does."""
    kind = model.config.model_type
    if model.frozen is None:
        return "it trains all weights"
    if model.forms:
        return "its base is quantised"
    if model.stateful or model.routers:
        return f"layers of model type {kind!r} " + ("carry states" if model.stateful else "have routers of experts")
    places = model.frozen.places
    if apart := sorted(name for name in places if name in model.vision_params or len(model.frozen.shapes[name]) != 2):
        return f"its adapter is on weights whose rows are not those of the pass, as {apart[0]}"
    return None


def run_together(
    passes: Sequence[RunPass], *, forward: Forward, params: Params, micro_batching: MicroBatching
) -> list[tuple[PassResult, Params]]:
    """Each run's result and gradients, those before it added, as by `passes.run_data`.

    `forward` and `params` are those of the plain base. Micro-batches are cut over the data of all runs.
    """
    check_targets(forward.model, forward.mesh)
    rows, owner, local = _joined_rows([each.rows.rows for each in passes])
    vocabulary = forward.model.whole_shapes[embedding_name(forward.model)][0]
    masks = masks_and_tokens(rows)
    if masks.tokens is not None:  # rows of two runs share nothing
        masks = masks._replace(tokens=masks.tokens + vocabulary * torch.tensor(owner)[:, None])
    masks = keep_tokens_if_shared(masks, forward)
    factors = [ready(each.params, Forward(each.model, forward.kernels), None) for each in passes]
    parts: list[tuple[list[PassResult], list[int], Params | None]] = [([], [], each.grads) for each in passes]
    for numbers in cut(masks, micro_batching):
        numbers = sorted(numbers)
        own, own_masks = batches.rows((rows, masks), numbers)
        micro, present = indexed(own, own_masks, forward), sorted({owner[n] for n in numbers})
        chosen = {run: [local[n] for n in numbers if owner[n] == run] for run in present}
        mine = [passes[run]._replace(params=factors[run]) for run in present]
        (_, results), new = value_and_grad(_loss_of, has_aux=True)(
            [each.params for each in mine], mine, micro, [*chosen.values()], forward, params
        )
        for run, result, grads in zip(present, results, new, strict=True):
            done, order, total = parts[run]
            kinds = {name: x.dtype for name, x in passes[run].params.items()}
            total = added(total, {name: x.to(kinds[name]) for name, x in grads.items()}, own=bool(done))
            parts[run] = [*done, result], [*order, *chosen[run]], total
    return [(joined(done, order), total or {}) for done, order, total in parts]


def _loss_of(
    factors: Sequence[Params],
    passes: Sequence[RunPass],
    micro: MicroBatch,
    chosen: Sequence[Sequence[int]],
    forward: Forward,
    params: Params,
) -> tuple[Tensor, list[PassResult]]:
    """The summed loss, 0-d, of the `chosen` rows of each run, which are those of the micro-batch in their order, and
    each run's result."""
    rows: TargetedRows = micro.rows
    device = rows.tokens.device
    of_row = torch.repeat_interleave(
        torch.arange(len(passes), device=device), torch.tensor([len(x) for x in chosen], device=device)
    )
    of_token = of_row[micro.indices.real.index // rows.tokens.shape[1]]
    owned = [
        (each.model, own, _as_slice((of_token == run).nonzero().flatten()))
        for run, (each, own) in enumerate(zip(passes, factors, strict=True))
    ]
    woven = trained_beside(forward.model, params, owned)
    hidden = hidden_of(opened(woven, forward.model, forward.mesh), rows, micro.indices, forward)
    heads, head_of = _heads(passes, factors, forward.model, params)
    log_probs = score_targets(hidden, rows, heads, forward, micro.indices, torch.tensor(head_of, device=device)[of_row])
    results = list[PassResult]()
    total = log_probs.new_zeros(())
    for each, numbers, part in zip(passes, chosen, log_probs.split([len(x) for x in chosen]), strict=True):
        own, columns = batches.rows((each.rows.rows, dict(each.rows.columns)), numbers)
        loss, result = loss_of(_as_alone(part, rows, own), own, columns, [each.data[n] for n in numbers], each.loss)
        total = total + loss
        results.append(result)
    return total, results


def _heads(
    passes: Sequence[RunPass], factors: Sequence[Params], base: Model, params: Params
) -> tuple[list[Head], list[int]]:
    """The vocabulary heads of a pass, and the index of each run's among them: adapted ones, and one for all others."""
    name, heads, head_of = vocabulary_head(base)[0], list[Head](), list[int]()
    plain: int | None = None
    for each, own in zip(passes, factors, strict=True):
        if name in frozen_of(each.model).places:
            head_of.append(len(heads))
            heads.append(output_head(each.model, own))
            continue
        if plain is None:
            plain = len(heads)
            heads.append(output_head(base, params))
        head_of.append(plain)
    return heads, head_of


def _as_slice(places: Tensor) -> slice | Tensor:
    """Consecutive indices as a slice; others as they are. Waits for the device."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first + 1 == len(places) else places


def _joined_rows(parts: Sequence[TargetedRows]) -> tuple[TargetedRows, list[int], list[int]]:
    """The rows of all runs, padded alike, and of each row the number of its run and its number in the run."""
    right = max(x.response_mask.shape[1] for x in parts)
    left = max(x.tokens.shape[1] - x.response_mask.shape[1] for x in parts)
    width = max(x.targets.shape[2] for x in parts)

    def padded(x: Tensor, part: TargetedRows) -> Tensor:
        before = left - (part.tokens.shape[1] - part.response_mask.shape[1])
        after = right - part.response_mask.shape[1]
        ends = (before, after) if x.dim() == 2 else (0, width - x.shape[2], before, after)
        return F.pad(x, ends)

    seeing = any(x.inputs is not None for x in parts)
    images = [one for x in parts for one in (x.inputs if x.inputs is not None else [None] * len(x.tokens))]
    columns = {
        name: torch.cat([padded(getattr(x, name), x) for x in parts])
        for name in ("tokens", "attention_mask", "targets", "graded", "real")
    }
    rows = TargetedRows(
        **columns,
        response_mask=torch.cat([F.pad(x.response_mask, (0, right - x.response_mask.shape[1])) for x in parts]),
        row_ids=torch.arange(len(columns["tokens"]), device=columns["tokens"].device),
        inputs=Column(images) if seeing else None,
    )
    owner = [run for run, x in enumerate(parts) for _ in range(len(x.tokens))]
    return rows, owner, [n for x in parts for n in range(len(x.tokens))]


def _as_alone(log_probs: Tensor, rows: TargetedRows, own: TargetedRows) -> Tensor:
    """Log-probs [b, S, K] of joined rows as those of a run's own rows, [b, S', K']."""
    before = (rows.tokens.shape[1] - rows.response_mask.shape[1]) - (own.tokens.shape[1] - own.response_mask.shape[1])
    return log_probs[:, before : before + own.tokens.shape[1], : own.targets.shape[2]]
