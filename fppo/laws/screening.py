"""The laws that take no time, for a function that a run is about to begin with: one small batch each, in its dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fppo.batch import Annotated, Column
from fppo.laws import adamw, layers, losses
from fppo.laws._kernels import apart, carry, exact, grads, place
from fppo.laws._search import Law, LawExample, check, normal, short
from fppo_kernels.attention.eager import eager
from fppo_kernels.context import takes_key_lengths
from fppo_kernels.decode_attention.eager import eager as decode_eager
from fppo_kernels.gae.loop import loop
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.padding import make_lengths

SIZES = ((1, 2), (2, 2), (4, 5))  # a small one where that shows what is wrong
SLACK = 10.0  # of the tolerances, for kernels that multiply in TF32 or the like
_LOSS = ("per token", "gradient", "empty mask", "masked garbage")


def screen_policy_loss(loss_fn: Callable[..., Any], *, selective: bool = False) -> None:
    """Some laws of `check_policy_loss` on a few batches in float32: LawViolation for the first that fails.

    The loss is [B, T] and has a gradient, metrics add up, what is masked changes nothing, and an empty mask gives 0. A
    `selective` loss takes the tokens `selected`, bool [B, T], too.
    """
    extras = (lambda *columns: {"selected": columns[3] & (columns[2] > 0.5)}) if selective else None
    laws = [law for law in losses.COMMON if law.name in _LOSS]
    example = partial(losses.make_example, losses.POLICY, extras, torch.float32)
    check(
        loss_fn, laws, example, sizes=SIZES, seeds=3, see=losses.see(losses.POLICY, ["selected"] if selective else [])
    )


def _rows(example: LawExample, names: Sequence[str]) -> Annotated:
    """The example as annotated rows. Of scores by name there are `names`; without names, all that are asked for."""
    x, rows = example.inputs, len(example.mask)
    named: dict[str, Tensor] = {name: x["scores"] for name in names} if names else defaultdict(lambda: x["scores"])
    prompt = torch.ones(rows, 1, dtype=torch.int64)
    seen = torch.ones_like(example.mask)
    return Annotated(
        tokens=torch.cat([prompt, prompt.expand(example.mask.shape)], 1),
        attention_mask=torch.cat([prompt.bool(), seen], 1),
        row_ids=torch.arange(rows),
        ids=Column([str(row) for row in range(rows)]),
        ground_truth=Column(["1"] * rows),
        source=Column(["rows that are made up"] * rows),
        extras=Column([{} for _ in range(rows)]),
        response_mask=example.mask,
        rollout_log_probs=x["log_probs"],
        sampling_log_probs=x["log_probs"],
        groups=x["groups"],
        versions=torch.zeros(rows, dtype=torch.int64),
        finish=Column(["stop"] * rows),
        scores=x["scores"],
        named_scores=named,
        baselines=x["scores"].mean().expand(rows),
        old_log_probs=x["log_probs"],
        ref_log_probs=x["log_probs"],
        values=x["log_probs"],
        sum_squared_probs=x["log_probs"].exp(),
    )


def _estimates(names: Sequence[str], fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    try:
        result = fn(_rows(example, names), example.inputs["rewards"])
    except LookupError:  # a column of the user's data, which rows that are made up have not
        return None
    for name in ("advantages", "returns"):
        x = getattr(result, name, None)
        if not isinstance(x, Tensor):
            return f"it returned a {type(result).__name__}, expected an Advantages with {name} [B, T]"
        if x.shape != example.mask.shape or not x.is_floating_point():
            return f"{name} are {x.dtype} {list(x.shape)}, expected floating [B, T] = {list(example.mask.shape)}"
        if not x[example.mask].isfinite().all():
            row = int((~x.where(example.mask, 0.0).isfinite()).any(1).nonzero()[0])
            return f"{name} are not finite in row {row}: {x[row].tolist()}"
    return None


def _estimator_example(group: int, rows: int, width: int, seed: int) -> LawExample:
    """Three groups: of equal scores, of scores that differ, of one that does; zeros outside the mask, as in a run."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(1, width + 1, (3 * group, 1), generator=generator)
    steps = torch.arange(group, dtype=torch.float32)
    scores = torch.cat([torch.ones(group), steps, (steps == 0).float()])
    last = torch.arange(width) == mask.sum(1, keepdim=True) - 1
    inputs = {
        "scores": scores,
        "rewards": scores[:, None].where(last, 0.0),
        "groups": torch.arange(3 * group) // group,
        "log_probs": -short(torch.rand(mask.shape, generator=generator) + 0.1).where(mask, 0.0),
        "mask": mask,
    }
    return LawExample(inputs, {}, mask.float())


def screen_estimator(
    estimator: Callable[..., Any], *, group: int = 4, names: Sequence[str] = (), name: str | None = None
) -> None:
    """Whether an estimator (annotated rows, token rewards [B, T]) -> Advantages gives finite [B, T].

    The rows are made up, in groups of `group`: one of equal scores, one of scores that differ, one with a single other
    score. `names` are those of the scores by name; without them there is any. An estimator that looks for what is not
    in these rows, as a field of one's data, is not judged. LawViolation for what else is wrong; `name` is what its
    message calls the estimator, if not by its own name.
    """
    text = "it takes (rows, rewards [B, T]) and gives Advantages, both finite [B, T]"
    law = Law("estimates", text, partial(_estimates, tuple(names)))
    check(estimator, [law], partial(_estimator_example, group), sizes=((1, 3),), seeds=1, name=name)


def _log_probs(kernel: Callable, example: LawExample) -> dict[str, Tensor]:
    numbers = {"temperature": 0.7, "softcap": None, "scale": 1.0}
    out = kernel(*example.inputs.values(), bias=None, **numbers, entropy=True, sum_squared=False)
    return {"log_probs": out.log_probs, "entropy": out.entropy}


def _attention(kernel: Callable, example: LawExample) -> dict[str, Tensor]:
    lengths = make_lengths(example.extras["lengths"].tolist(), example.weights.device)
    keywords = {"scale": 0.125, "window": None, "softcap": None, "sinks": None}
    return {"the result": kernel(*example.inputs.values(), lengths=lengths, **keywords)}


def _last_tokens(kernel: Callable, example: LawExample) -> dict[str, Tensor]:
    """The result for the last tokens of each sequence, as a context axis asks for it; zeros for the others."""
    sizes, (query, *keys) = example.extras["lengths"], example.inputs.values()
    own = torch.cat([torch.arange(n) >= n // 3 for n in sizes.tolist()]).nonzero().flatten().to(query.device)
    lengths, key_lengths = (make_lengths(x.tolist(), query.device) for x in (sizes - sizes // 3, sizes))
    numbers = {"scale": 0.125, "window": None, "softcap": None, "sinks": None}
    out = kernel(query[own], *keys, lengths=lengths, key_lengths=key_lengths, **numbers)
    return {"the result for last tokens": torch.zeros_like(query).index_copy(0, own, out)}


def _decoded(kernel: Callable, example: LawExample) -> dict[str, Tensor]:
    *tensors, bias = example.inputs.values()
    numbers = {"start": 1, "end": bias.shape[1] - 1, "scale": 0.125, "softcap": None, "sinks": None}
    return {"the result": kernel(*tensors, bias, **numbers)}


def _gae_near(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    columns = exact(example).inputs.values()
    expected = loop(*columns, gamma=0.9, lam=0.7)
    actual = kernel(*example.inputs.values(), gamma=0.9, lam=0.7)
    for name, wanted, x in zip(("the advantages", "the returns"), expected, actual, strict=True):
        if reason := apart(name, wanted, x, torch.float32, SLACK):
            return reason
    return None


def _gae_example(device: torch.device | str, rows: int, width: int, seed: int) -> LawExample:
    """Rows of which the last tokens are no responses, the first of them whole."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.arange(width, width - rows, -1)[:, None]
    inputs = {"rewards": normal(generator, rows, width), "values": normal(generator, rows, width), "mask": mask}
    return place(LawExample(inputs, {}, mask.float()), torch.float32, device)


def _screen_state(op: str, kernel: Callable[..., Any], device: torch.device | str) -> None:
    """The kernels that know no other dtype than float32."""
    if op == "gae":
        law = Law("near", "advantages and returns are about those of the float64 loop", _gae_near)
        check(kernel, [law], partial(_gae_example, device), sizes=((4, 5),), seeds=1)
        return
    case = adamw.AdamWScalars(weight_decay=0.3, grad_scale=4.0, found_inf=0.0)
    laws = [
        Law("textbook", "parameters, moments and counts are the textbook's", partial(adamw.is_textbook, case=case)),
        Law("skipped step", "where found_inf is 1, nothing changes a bit", partial(adamw.keeps_skipped, case=case)),
    ]
    check(kernel, laws, partial(adamw.example, (torch.float32,), device), sizes=((4, 5),), seeds=1)


def _of_rows(op: layers.Operation, kernel: Callable, example: LawExample) -> dict[str, Tensor]:
    return {"the result": op.call(kernel, example)}


_CALLS = MappingProxyType(
    {"log_probs": (_log_probs, reference), "attention": (_attention, eager), "key_lengths": (_last_tokens, eager)}
    | {"decode_attention": (_decoded, decode_eager)}
    | {name: (partial(_of_rows, op), op.reference) for name, op in layers.OPERATIONS.items()}
)
_LEAVES = MappingProxyType({"log_probs": ("hidden", "weight"), "decode_attention": ()})


def _near(op: str, kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    call, plain = _CALLS[op]
    results: list[dict[str, Tensor]] = []
    for fn, at in ((plain, exact(example)), (kernel, example)):
        at, leaves = carry(at, _LEAVES.get(op, tuple(at.inputs)))
        out = call(fn, at)
        total = torch.stack([(at.weights * x).sum() for x in out.values()]).sum()
        by = dict(zip(leaves, grads(total, list(leaves.values())), strict=True))
        results.append(out | {f"the gradient by {name}": x for name, x in by.items()})
    for name, expected in results[0].items():
        if reason := apart(name, expected, results[1][name], example.weights.dtype, SLACK):
            return reason
    return None


def _kernel_example(
    op: str, dtype: torch.dtype, device: torch.device | str, rows: int, width: int, seed: int
) -> LawExample:
    """Tokens and heads of 64 numbers, for kernels that know no narrow ones."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(normal, generator)
    if op == "log_probs":
        labels = torch.randint(width * 19, (rows,), generator=generator)
        inputs = {"hidden": draw(rows, 64), "weight": draw(width * 19, 64) / 4, "labels": labels}
        return place(LawExample(inputs, {}, draw(rows)), dtype, device)
    if op == "decode_attention":
        inputs = {"query": draw(rows, 4, 64), "keys": draw(rows, 2, width, 64), "values": draw(rows, 2, width, 64)}
        padding = torch.arange(width) < torch.arange(rows)[:, None].clamp(max=width - 2)
        inputs["bias"] = torch.zeros(rows, width).masked_fill(padding, -torch.inf)
        return place(LawExample(inputs, {}, draw(rows, 4, 64)), dtype, device)
    if op in layers.OPERATIONS:
        return place(layers.OPERATIONS[op].draw(generator, rows, 64, 0), dtype, device)
    lengths = torch.arange(1, rows + 1) * width
    inputs = {name: draw(int(lengths.sum()), heads, 64) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
    example = place(LawExample(inputs, {}, draw(*inputs["query"].shape)), dtype, device)
    return example._replace(extras={"lengths": lengths})


def screen_kernel(
    op: str, kernel: Callable[..., Any], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> None:
    """Whether a kernel for "log_probs", "attention", "decode_attention", "gae", "adamw" or an operation of layers gives
    the values, and where it has them the gradients, of the float64 reference, about within the tolerance of its laws,
    on one batch on a device, called as a run calls it. Those for "gae" and "adamw" are called in float32, the others in
    `dtype`.

    LawViolation if not; ValueError for another operation.
    """
    if op in ("gae", "adamw"):
        _screen_state(op, kernel, device)
        return
    if op not in _CALLS:
        raise ValueError(f"op must be one of {[*_CALLS, 'gae', 'adamw']}, got {op!r}")
    asked = [op, "key_lengths"] if op == "attention" and takes_key_lengths(kernel) else [op]
    text = "values and gradients are about those of the float64 reference"
    found = [Law("near", text, partial(_near, what)) for what in asked]
    check(kernel, found, partial(_kernel_example, op, dtype, device), sizes=((4, 5),), seeds=1)
