"""Laws of collectives: each equals its definition over the list of all ranks' tensors, its gradient the transpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fppo.laws._kernels import settings, words
from fppo.laws._search import Law, LawExample, check, differ
from fppo.runtime.simulate import simulate
from fppo_kernels import collectives
from fppo_kernels.collectives import Axis

RANKS = (1, 2, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
BUILTIN: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "all_gather": collectives.all_gather,
        "reduce_scatter": collectives.reduce_scatter,
        "all_reduce": collectives.all_reduce,
        "all_to_all": collectives.all_to_all,
        "exchange": collectives.exchange,
        "broadcast": collectives.broadcast,
        "permute": collectives.permute,
    }
)


def _all_gather(xs: Sequence[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat(list(xs), dim)] * len(xs)


def _reduce_scatter(xs: Sequence[Tensor], dim: int) -> list[Tensor]:
    return list(torch.stack(list(xs)).sum(0).tensor_split(len(xs), dim))


def _all_reduce(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(xs)).sum(0)] * len(xs)


def _all_to_all(xs: Sequence[Tensor], split_dim: int, concat_dim: int) -> list[Tensor]:
    slices = [x.tensor_split(len(xs), split_dim) for x in xs]
    return [torch.cat([x[rank] for x in slices], concat_dim) for rank in range(len(xs))]


def _exchange(xs: Sequence[Tensor], table: Tensor) -> list[Tensor]:
    runs = [x.split(sizes) for x, sizes in zip(xs, table.tolist(), strict=True)]
    return [torch.cat([run[rank] for run in runs]) for rank in range(len(xs))]


def _by_table(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt an exchange, which takes lists, to a table [ranks, ranks] of the number of rows that each rank (row of the
    table) sends to each rank (column)."""

    def exchange(x: Tensor, axis: Axis, *, table: Tensor) -> Tensor:
        return kernel(x, axis, sent=table[axis.rank].tolist(), received=table[:, axis.rank].tolist())

    return exchange


def _table(ranks: int, case: int, rows: int) -> Tensor:
    """Draw how many rows each rank sends to each; some numbers are 0, in later cases those to the last ranks."""
    generator = torch.Generator().manual_seed(case)
    to = torch.randint(max(1, ranks - case // 3), (ranks, rows), generator=generator)
    return torch.stack([torch.bincount(x, minlength=ranks) for x in to])


def _broadcast(xs: Sequence[Tensor], source: int) -> list[Tensor]:
    return [xs[source]] * len(xs)


def _permute(xs: Sequence[Tensor], shift: int) -> list[Tensor]:
    return [xs[(rank - shift) % len(xs)] for rank in range(len(xs))]


# the result of each collective on every rank, from the list of all ranks' tensors
DEFINITIONS: Mapping[str, Callable[..., list[Tensor]]] = MappingProxyType(
    {
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_reduce": _all_reduce,
        "all_to_all": _all_to_all,
        "exchange": _exchange,
        "broadcast": _broadcast,
        "permute": _permute,
    }
)
DIVIDED = MappingProxyType({"reduce_scatter": "dim", "all_to_all": "split_dim"})
# keywords that invert a call with the example's keywords
INVERSE: Mapping[str, Callable[[dict], dict]] = MappingProxyType(
    {
        "all_to_all": lambda k: {"split_dim": k["concat_dim"], "concat_dim": k["split_dim"]},
        "exchange": lambda k: {"table": k["table"].t()},
        "permute": lambda k: {"shift": -k["shift"]},
    }
)
_KEYWORDS: Mapping[str, Callable[[int, int, int], dict[str, Any]]] = MappingProxyType(
    {
        "all_gather": lambda ranks, case, rows: {"dim": case % 3 - case // 3 % 2},
        "reduce_scatter": lambda ranks, case, rows: {"dim": case % 3 - case // 3 % 2},
        "all_reduce": lambda ranks, case, rows: {},
        "all_to_all": lambda ranks, case, rows: {"split_dim": case % 3 - 3 * (case % 2), "concat_dim": case // 3},
        "exchange": lambda ranks, case, rows: {"table": _table(ranks, case, rows)},
        "broadcast": lambda ranks, case, rows: {"source": case % ranks},
        "permute": lambda ranks, case, rows: {"shift": case % 5 - 2},
    }
)
CASES = 9  # variants of each collective's keywords, in every dtype


def _on_ranks(fn: Callable[..., Any], *per_rank: Sequence[Any]) -> list[Any]:
    return simulate({"shard": len(per_rank[0])}, lambda mesh, *x: fn(mesh["shard"], *x), *per_rank)


def _inputs(example: LawExample) -> list[Tensor]:
    return [x.detach().clone() for x in example.inputs["x"].unbind(0)]


def _cotangents(like: Sequence[Tensor]) -> list[Tensor]:
    """Cotangents of the shapes of `like`: numbers from -3 to 3 that differ between elements and ranks."""
    return [(torch.arange(x.numel()).view(x.shape) * (3 + i) % 7 - 3).to(x.dtype) for i, x in enumerate(like)]


def _first(what: str, expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str | None:
    """Describe the first rank whose `actual` tensor, named `what`, is not bit-equal to the expected one; None if all
    are. (Examples hold small integers, so nothing is rounded.)"""
    for rank, (a, b) in enumerate(zip(expected, actual, strict=True)):
        if a.dtype != b.dtype:
            return f"{what} on rank {rank} has the dtype {words(b.dtype)}, expected {words(a.dtype)}"
        if reason := differ(f"{what} on rank {rank} of {len(actual)}", a, b, 0.0):
            return reason
    return None


def _values(name: str, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    keywords = settings(example)
    results = _on_ranks(lambda axis, x: kernel(x, axis, **keywords), _inputs(example))
    return _first("the result", DEFINITIONS[name](_inputs(example), **keywords), results)


def _transpose(name: str, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    keywords, xs = settings(example), _inputs(example)
    if not xs[0].is_floating_point():
        return None
    leaves = [x.clone().requires_grad_() for x in xs]
    expected = DEFINITIONS[name](leaves, **keywords)
    ys = _cotangents(expected)
    zs = [z + 1 for z in _cotangents(leaves)]
    total = torch.stack([(a * y).sum() for a, y in zip(expected, ys, strict=True)]).sum()
    wanted = [
        torch.zeros_like(x) if g is None else g
        for x, g in zip(xs, torch.autograd.grad(total, leaves, allow_unused=True), strict=True)
    ]

    def run(axis: Axis, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x.requires_grad_(), y.detach().requires_grad_()
        (grad,) = torch.autograd.grad((kernel(x, axis, **keywords) * y).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad((grad * z).sum(), y)
        return grad.detach(), again

    results = _on_ranks(run, xs, ys, zs)
    return _first("the gradient", wanted, [grad for grad, _ in results]) or _first(
        "the gradient of its gradient", DEFINITIONS[name](zs, **keywords), [again for _, again in results]
    )


def _purity(name: str, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    keywords, xs = settings(example), _inputs(example)

    def run(axis: Axis, x: Tensor) -> tuple[Tensor, Tensor]:
        first = kernel(x, axis, **keywords)
        result = first.clone()
        if axis.size > 1 and first.numel():
            first.add_(1)  # reaches x if the result is not a new tensor
        return result, kernel(x, axis, **keywords)

    results = _on_ranks(run, xs)
    return _first("its argument afterwards", _inputs(example), xs) or _first(
        "the result of a second call", [first for first, _ in results], [again for _, again in results]
    )


def _one_rank(name: str, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    x, keywords = _inputs(example)[0], settings(example)
    return None if kernel(x, Axis(), **keywords) is x else "on an axis of one rank it returned another tensor than `x`"


def _inverse(name: str, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    keywords = settings(example)
    back = INVERSE[name](keywords)
    results = _on_ranks(lambda axis, x: kernel(kernel(x, axis, **keywords), axis, **back), _inputs(example))
    return _first(f"what comes back with {back}", _inputs(example), results)


def _uneven(name: str, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    keywords, xs = settings(example), _inputs(example)
    if len(xs) == 1:
        return None
    dim = keywords[DIVIDED[name]]
    uneven = [torch.cat([x, x.narrow(dim, 0, 1)], dim) if x.numel() else x for x in xs]
    if not uneven[0].numel():
        return None

    def run(axis: Axis, x: Tensor) -> str | None:
        try:
            kernel(x, axis, **keywords)
        except ValueError as error:
            size = x.shape[dim]
            return None if str(size) in str(error) else f"its ValueError does not name the size {size}: {error}"
        return f"it accepted {list(x.shape)} over {axis.size} ranks"

    return next((reason for reason in _on_ranks(run, uneven) if reason), None)


def _laws(name: str) -> list[Law]:
    laws = [
        ("values", "every rank gets what the definition gives it, to the bit", _values),
        ("transpose", "the gradient is the transpose, and the transpose's gradient the collective", _transpose),
        (
            "purity",
            "the result is a new tensor, arguments stay as they are, and equal arguments give equal bits",
            _purity,
        ),
        ("one rank", "on an axis of one rank it returns its argument", _one_rank),
    ]
    if name in INVERSE:
        laws.append(("inverse", "the opposite call brings every rank its tensor back", _inverse))
    if name in DIVIDED:
        laws.append(("uneven sizes", "a size that the ranks do not divide is a ValueError that names it", _uneven))
    return [Law(title, statement, partial(breach, name)) for title, statement, breach in laws]


def _example(name: str, ranks: int, width: int, seed: int) -> LawExample:
    """Draw an input for collective `name`: small integers, exactly summed in every dtype, in dimensions that grow with
    `width` and that the ranks divide. `seed` also numbers the case: dtype, strides and keywords."""
    generator = torch.Generator().manual_seed(1000 * ranks + 100 * width + seed)
    case, dtype = divmod(seed, len(DTYPES))
    shape = (ranks, ranks * width, ranks * (1 + case % 2), ranks)
    x = torch.randint(-8, 9, shape, generator=generator).to(DTYPES[dtype])
    if (case + dtype) % 2:
        x = x.transpose(1, 3).contiguous().transpose(1, 3)
    keywords = _KEYWORDS[name](ranks, case, ranks * width)
    extras = {key: torch.as_tensor(value) for key, value in keywords.items()}
    return LawExample({"x": x}, extras, torch.ones(1))


def check_collective(kernel: Callable[..., Tensor], name: str, *, ranks: Sequence[int] = RANKS) -> None:
    """Check a collective on simulated meshes: `laws.check_collective(my_all_gather, "all_gather")`.

    `name` is one of "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange", "broadcast" and "permute",
    and `kernel` has the signature of the function of that name in `fppo_kernels.collectives`. The laws, in float64,
    float32, bfloat16 and int64: each rank's result equals the definition bit for bit; the gradient is the transpose,
    and the gradient's gradient the collective again; the result is a new tensor, except on one rank, where it is `x`
    itself. Raises LawViolation for the first broken law; its example holds one `x` per rank.
    """
    if name not in DEFINITIONS:
        raise ValueError(f"no collective {name!r}; there are {sorted(DEFINITIONS)}")
    kernel = _by_table(kernel) if name == "exchange" else kernel
    sizes = [(n, width) for n in ranks for width in ((1, 0, 2) if n > 1 else (1,))]
    check(kernel, _laws(name), partial(_example, name), sizes=sizes, seeds=CASES * len(DTYPES))


def check_all_to_all(kernel: Callable[..., Tensor], *, ranks: Sequence[int] = RANKS) -> None:
    """Check an all-to-all `kernel(x, axis, *, split_dim, concat_dim)` by `check_collective`."""
    check_collective(kernel, "all_to_all", ranks=ranks)


def check_collectives(kernels: Mapping[str, Callable[..., Tensor]] = BUILTIN, *, ranks: Sequence[int] = RANKS) -> None:
    """Check each function under its name by `check_collective`."""
    for name, kernel in kernels.items():
        check_collective(kernel, name, ranks=ranks)
