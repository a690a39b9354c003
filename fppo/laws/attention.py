"""Laws of attention: later tokens, other sequences, and columns that a row does not see have no effect."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.laws._kernels import KernelLaw, gradients, results
from fppo.laws._search import LawExample, differ, normal, spoil
from fppo_kernels.operation import Kernel, Operation


def _places(example: LawExample) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """For each query [N] and each key [M], the index of its sequence, and its position there."""
    device, sizes = example.inputs["query"].device, example.extras["lengths"].cpu()
    keys = example.extras.get("key_lengths", sizes).cpu()
    places: list[tuple[Tensor, Tensor]] = []
    for own in (sizes, keys):
        sequence = torch.arange(len(own)).repeat_interleave(own)
        place = torch.arange(int(own.sum())) + (keys - own.cumsum(0))[sequence]
        places.append((sequence.to(device), place.to(device)))
    return places[0], places[1]


def _unseen(
    op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator, readers: Tensor, unseen: Tensor
) -> str | None:
    """Describe how the queries `readers` [N] depend on the other queries and on the keys `unseen` [M], in value or
    gradient; None if they do not."""
    fresh = {name: normal(generator, *x.shape).to(x) for name, x in example.inputs.items()}
    others = {"query": ~readers, "key": unseen, "value": unseen}
    changed = example.put(**{k: fresh[k].where(others[k][:, None, None], x) for k, x in example.inputs.items()})
    before, after = (results(op, kernel, x)["result"][readers] for x in (example, changed))
    if reason := differ("the result there", before, after, 0.0):
        return f"{reason}, as before they changed"
    of_readers = example._replace(weights=example.weights.where(readers[:, None, None], 0.0))
    for name, grad in gradients(op, kernel, of_readers, list(others)).items():
        if reason := differ("it", torch.zeros_like(grad[others[name]]), grad[others[name]], 0.0):
            return f"the gradient reaches their {name}: {reason}"
    return None


def _sequences_apart(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    (sequence, _), (of_key, _) = _places(example)
    for number in range(len(example.extras["lengths"])):
        own = sequence == number
        if not own.all() and (reason := _unseen(op, kernel, example, generator, own, of_key != number)):
            return f"sequence {number} sees the others: {reason}"
    return None


def _causal(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    (_, positions), (_, of_keys) = _places(example)
    longest = int(positions.max()) if len(positions) else 0
    for cut in sorted({1, (longest + 1) // 2, longest} - {0}) if longest else ():
        if reason := _unseen(op, kernel, example, generator, positions < cut, of_keys >= cut):
            return f"tokens before place {cut} of their sequence see those from there on: {reason}"
    return None


LAWS = (
    KernelLaw("sequences apart", "other sequences change nothing, and no gradient reaches them", _sequences_apart),
    KernelLaw("causal", "later tokens change nothing, and no gradient reaches them", _causal),
)


def _unseen_columns(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    """Describe how the result depends on columns of the cache that a row does not see; None if it does not. Columns
    that the bias hides get other numbers, and columns before `start` or from `end` on get NaN."""
    start, end = (int(example.extras[name].item()) for name in ("start", "end"))
    before = results(op, kernel, example)["result"]
    places = torch.arange(example.inputs["keys"].shape[2], device=before.device)
    outside, bias = (places < start) | (places >= end), example.extras.get("bias")
    for name in ("keys", "values"):
        x = example.inputs[name]
        if bias is not None:
            x = normal(generator, *x.shape).to(x).where(bias.isinf()[:, None, :, None], x)
        example = example.put(**{name: spoil(x, outside[:, None].expand(x.shape), generator, "nan")})
    return differ("the result", before, results(op, kernel, example)["result"], 0.0)


def _rows_apart(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    changes = {name: torch.cat([x[:1], normal(generator, *x[1:].shape).to(x)]) for name, x in example.inputs.items()}
    before, after = (results(op, kernel, x)["result"][:1] for x in (example, example.put(**changes)))
    return differ("row 0", before, after, 0.0)


DECODING_LAWS = (
    KernelLaw("unseen columns", "columns that a row does not see change nothing", _unseen_columns),
    KernelLaw("rows apart", "other rows change nothing", _rows_apart),
)
