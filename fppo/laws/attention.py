"""Laws of packed causal attention: later tokens and other sequences change nothing, values and gradients are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fppo.laws._kernels import TOLERANCES, apart, carry, checked, exact, grads, place, settings, words
from fppo.laws._search import Law, LawExample, check, differ, normal, unchanged
from fppo_kernels.attention.eager import eager
from fppo_kernels.context import takes_key_lengths
from fppo_kernels.padding import make_lengths

FEATURES = ("gqa", "window", "softcap", "sinks", "key_lengths")
SIZES = ((0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (3, 3), (4, 7), (2, 130))  # sequences, length


def _attention(kernel: Callable, example: LawExample) -> Tensor:
    keywords, query = settings(example), example.inputs["query"]
    sizes = {name: x.tolist() for name, x in keywords.items() if name in ("lengths", "key_lengths")}
    keywords |= {name: make_lengths(x, query.device) for name, x in sizes.items()}
    return kernel(*example.inputs.values(), **keywords)


def _places(example: LawExample) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The number of its sequence, and its position there, of each query [N] and of each key [M]."""
    device, sizes = example.inputs["query"].device, example.extras["lengths"].cpu()
    keys = example.extras.get("key_lengths", sizes).cpu()
    places: list[tuple[Tensor, Tensor]] = []
    for own in (sizes, keys):
        sequence = torch.arange(len(own)).repeat_interleave(own)
        place = torch.arange(int(own.sum())) + (keys - own.cumsum(0))[sequence]
        places.append((sequence.to(device), place.to(device)))
    return places[0], places[1]


def _shape(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    query, out = example.inputs["query"], _attention(kernel, example)
    shape = [*query.shape[:2], example.inputs["value"].shape[2]]
    if list(out.shape) != shape or out.dtype != query.dtype:
        return f"it returned {words(out.dtype)} {list(out.shape)}, expected {words(query.dtype)} {shape}"
    return None if out.isfinite().all() else "the result is not finite"


def _purity(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    copy, first = example.map(torch.clone), _attention(kernel, example)
    _gradient_tree(kernel, example)
    if reason := unchanged(example, copy):
        return reason
    reason = differ("the result", first, _attention(kernel, example), 0.0)
    return reason and f"a second call gave another result: {reason}, as before"


def _gradient_tree(kernel: Callable, example: LawExample, rows: Tensor | None = None) -> dict[str, Tensor]:
    """The gradients of sum(weights * result), over `rows` [N] alone unless None."""
    example, leaves = carry(example, ("query", "key", "value", "sinks"))
    weights = example.weights if rows is None else example.weights.where(rows[:, None, None], 0.0)
    return dict(zip(leaves, grads((weights * _attention(kernel, example)).sum(), list(leaves.values())), strict=True))


def _unseen(
    kernel: Callable, example: LawExample, generator: torch.Generator, readers: Tensor, unseen: Tensor
) -> str | None:
    """What the queries `readers` [N] get from the other ones and the keys `unseen` [M], in value or in gradient; None
    if nothing."""
    fresh = {name: normal(generator, *x.shape).to(x) for name, x in example.inputs.items()}
    others = {"query": ~readers, "key": unseen, "value": unseen}
    changed = example.put(**{k: fresh[k].where(others[k][:, None, None], x) for k, x in example.inputs.items()})
    before, after = (_attention(kernel, x)[readers] for x in (example, changed))
    if reason := differ("the result there", before, after, 0.0):
        return f"{reason}, as before they changed"
    for name, grad in _gradient_tree(kernel, example, readers).items():
        if name == "sinks":
            continue
        if reason := differ("it", torch.zeros_like(grad[others[name]]), grad[others[name]], 0.0):
            return f"the gradient reaches their {name}: {reason}"
    return None


def _sequences_apart(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    (sequence, _), (of_key, _) = _places(example)
    for number in range(len(example.extras["lengths"])):
        own = sequence == number
        if not own.all() and (reason := _unseen(kernel, example, generator, own, of_key != number)):
            return f"sequence {number} sees the others: {reason}"
    return None


def _causal(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    (_, positions), (_, of_keys) = _places(example)
    longest = int(positions.max()) if len(positions) else 0
    for cut in sorted({1, (longest + 1) // 2, longest} - {0}) if longest else ():
        if reason := _unseen(kernel, example, generator, positions < cut, of_keys >= cut):
            return f"tokens before place {cut} of their sequence see those from there on: {reason}"
    return None


def _values(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    expected, actual = _attention(eager, exact(example)), _attention(kernel, example)
    return apart("the result", expected, actual, example.inputs["query"].dtype)


def _gradients(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    actual, expected = _gradient_tree(kernel, example), _gradient_tree(eager, exact(example))
    dtype, width = example.inputs["query"].dtype, example.inputs["query"].shape[2]
    # what a rounded result is wrong by, in its product with a gradient, grows with the root of the number of terms
    steep = max(1.0, example.extras["scale"].item() * (width / 2) ** 0.5) if dtype == torch.bfloat16 else 1.0
    for name, grad in expected.items():
        if reason := apart(f"the gradient by {name}", grad, actual[name], dtype, steep):
            return reason
    return None


_LAWS = (
    Law("shape", "the result is finite, [N, Hq, Dv], in the dtype of query", _shape),
    Law("purity", "arguments stay as they are, and equal arguments give equal bits", _purity),
    Law("sequences apart", "other sequences change nothing, and no gradient reaches them", _sequences_apart),
    Law("causal", "later tokens change nothing, and no gradient reaches them", _causal),
    Law("values", "values are those of the float64 reference", _values),
    Law("gradients", "gradients by query, key, value and sinks are those of the float64 reference", _gradients),
)


class _AttentionCase(NamedTuple):
    kv_heads: int = 1
    groups: int = 1
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.7
    before: bool = False  # keys of tokens before the first query

    @property
    def features(self) -> set[str]:
        used = (self.groups > 1, self.window is not None, self.softcap is not None, self.sinks, self.before)
        return {name for name, use in zip(FEATURES, used, strict=True) if use}


_CASES = (
    _AttentionCase(),
    _AttentionCase(groups=2),
    _AttentionCase(window=1),
    _AttentionCase(softcap=1.0),
    _AttentionCase(sinks=True),
    _AttentionCase(2, scale=20.0),
    _AttentionCase(2, 2, window=3),
    _AttentionCase(2, 2, softcap=2.0),
    _AttentionCase(2, 2, 2, 2.0, True),
    _AttentionCase(2, 2, before=True),
    _AttentionCase(window=3, before=True),
    _AttentionCase(2, 1, 4, 2.0, True, before=True),
)


def _example(
    dtypes: Sequence[torch.dtype],
    device: torch.device | str,
    head_dim: int,
    cases: Sequence[_AttentionCase],
    rows: int,
    width: int,
    seed: int,
) -> LawExample:
    """Sequences of one length in one half of the cases, of different lengths in the other."""
    number, dtype = seed // len(dtypes), dtypes[seed % len(dtypes)]
    case = cases[number]
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + number)
    lengths = torch.full((rows,), width)
    if rows and (number + rows) % 2:
        lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    keys = lengths + torch.randint(width + 1, (rows,), generator=generator) if case.before else lengths
    total, count, heads = int(lengths.sum()), int(keys.sum()), case.kv_heads * case.groups
    shapes = {"query": (total, heads), "key": (count, case.kv_heads), "value": (count, case.kv_heads)}
    inputs = {name: normal(generator, *shape, head_dim) for name, shape in shapes.items()}
    scale = case.scale * (2 / head_dim) ** 0.5  # scores are as far apart in wide heads as in narrow ones
    extras = {"lengths": lengths, "scale": torch.tensor(scale, dtype=torch.float64)}
    if case.before:
        extras["key_lengths"] = keys
    if case.window is not None:
        extras["window"] = torch.tensor(case.window)
    if case.softcap is not None:
        extras["softcap"] = torch.tensor(case.softcap, dtype=torch.float64)
    if case.sinks:
        extras["sinks"] = normal(generator, heads)
    return place(LawExample(inputs, extras, normal(generator, total, heads, head_dim)), dtype, device)


def check_attention(
    kernel: Callable[..., Tensor],
    *,
    features: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    device: torch.device | str = "cpu",
    head_dim: int = 2,
) -> None:
    """Put packed attention through its laws: `laws.check_attention(my_kernel)`. LawViolation for the first that fails.

    `kernel(query [N, Hq, D], key [M, Hkv, D], value [M, Hkv, D], *, lengths, scale, window, softcap, sinks,
    key_lengths)` returns [N, Hq, D] (see `fppo_kernels.attention.eager`). With grouped heads, windows, soft caps, sinks
    and keys of earlier tokens, no token, one and more: later tokens and other sequences change no bit and get no
    gradient; the values and every gradient are those of the float64 reference, to 1e-9 in float64, 1e-4 in float32 and
    2e-2 in bfloat16, relative to the larger of 1 and the tensor's largest number; arguments stay as they are. In
    bfloat16, gradients may be off by `scale` * sqrt(D / 2) times as much, where that is above 1: it is 20 in the
    examples with the largest scores, and below 1 in all others.

    `features` are those of FEATURES that the kernel has: an example with another is left out. None are all of them, but
    "key_lengths" for a kernel that does not name it, which then runs on no context axis. Kernels that compute in
    float32 alone bind `dtypes=(torch.float32,)`. Raises ValueError for an unknown feature or another dtype.
    """
    dtypes = checked(dtypes)
    if features is None:
        features = [x for x in FEATURES if x != "key_lengths" or takes_key_lengths(kernel)]
    if not set(features) <= set(FEATURES):
        raise ValueError(f"features must be some of {FEATURES}, got {tuple(features)}")
    cases = [case for case in _CASES if case.features <= set(features)]
    examples = partial(_example, dtypes, device, head_dim, cases)
    check(kernel, _LAWS, examples, sizes=SIZES, seeds=len(cases) * len(dtypes))
