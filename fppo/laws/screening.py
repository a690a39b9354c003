"""The laws that take no time, for functions that a run is about to use: one small batch each, in the run's dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo.batch import Annotated, Column
from fppo.laws import adamw, losses
from fppo.laws._kernels import SLACK, apart, carry, exact, example_of, grads, named, settings
from fppo.laws._search import Law, LawExample, check, short
from fppo_kernels.operation import Kernel, Operation, operation_of
from fppo_kernels.table import DEFAULTS, own

SIZES = ((1, 2), (2, 2), (4, 5))  # few rows first: they may be enough to show the error
_LOSS = ("per token", "gradient", "empty mask", "masked garbage")


def screen_policy_loss(loss_fn: Callable[..., Any], *, selective: bool = False) -> None:
    """Check a policy loss by some laws of `check_policy_loss` on a few batches in float32; raises LawViolation for the
    first broken one.

    The loss is [B, T] and has a gradient, metrics add up, values outside the mask change nothing, and an empty mask
    gives 0. A `selective` loss has the further argument `selected`, bool [B, T].
    """
    extras = (lambda *columns: {"selected": columns[3] & (columns[2] > 0.5)}) if selective else None
    laws = [law for law in losses.COMMON if law.name in _LOSS]
    example = partial(losses.make_example, losses.POLICY, extras, torch.float32)
    check(
        loss_fn, laws, example, sizes=SIZES, seeds=3, see=losses.see(losses.POLICY, ["selected"] if selective else [])
    )


def _rows(example: LawExample, names: Sequence[str]) -> Annotated:
    """Convert the example to annotated rows with named scores: those of `names`, or, if `names` is empty, any name that
    is asked for."""
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
        teacher_log_probs=x["log_probs"] - 0.5,
        old_log_probs=x["log_probs"],
        ref_log_probs=x["log_probs"],
        values=x["log_probs"],
        sum_squared_probs=x["log_probs"].exp(),
    )


def _estimates(names: Sequence[str], fn: Callable, example: LawExample, generator: torch.Generator) -> str | None:
    try:
        result = fn(_rows(example, names), example.inputs["rewards"])
    except LookupError:  # a column of the user's data, which synthetic rows lack
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
    """Make three groups of `group` rows: with equal scores, with different scores, with one different score; zeros
    outside a random mask. `rows` is not used; rows have `width` tokens."""
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
    """Check that an estimator (annotated rows, token rewards [B, T]) -> Advantages gives finite results [B, T].

    Rows are synthetic, in groups of `group`: one with equal scores, one with different scores, one with a single
    different score. `names` are the names of scores that the rows have; if empty, the rows have any name that is asked
    for. An estimator that needs anything that these rows lack, such as a field of the user's data, is not judged.
    Raises LawViolation for other errors; `name` is the estimator's name in the message, by default its own.
    """
    text = "it takes (rows, rewards [B, T]) and gives Advantages, both finite [B, T]"
    law = Law("estimates", text, partial(_estimates, tuple(names)))
    check(estimator, [law], partial(_estimator_example, group), sizes=((1, 3),), seeds=1, name=name)


def _near(op: Operation, kernel: Kernel, example: LawExample, generator: torch.Generator) -> str | None:
    found: list[dict[str, Tensor]] = []
    for fn, at in ((op.reference, exact(example)), (kernel, example)):
        at, leaves = carry(at, [name for name in op.leaves if name in at.inputs])
        out, weights = op.call(fn, at.inputs, {**op.usual, **settings(at)}, op.timed), op.cotangents(at.weights)
        sums = [(weights[name] * out[name]).sum() for name in op.sloped if name in out]
        total = torch.stack(sums).sum() if sums else at.weights.new_zeros(())
        by = dict(zip(leaves, grads(total, list(leaves.values())), strict=True))
        slopes = {f"the gradient by {name}": x for name, x in by.items()}
        found.append({named(name): x for name, x in out.items()} | slopes)
    for name, expected in found[0].items():
        if reason := apart(name, expected, found[1][name], example.weights.dtype, SLACK):
            return reason
    return None


def _screen_adamw(kernel: Kernel, device: torch.device | str) -> None:
    case = adamw.AdamWScalars(weight_decay=0.3, grad_scale=4.0, found_inf=0.0)
    laws = [
        Law("textbook", "parameters, moments and counts are the textbook's", partial(adamw.is_textbook, case=case)),
        Law("skipped step", "where found_inf is 1, nothing changes a bit", partial(adamw.keeps_skipped, case=case)),
    ]
    check(kernel, laws, partial(adamw.example, (torch.float32,), device), sizes=((4, 5),), seeds=1)


def screen_kernel(
    op: str | Operation, kernel: Kernel, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> None:
    """Check a kernel on one batch on a device, called as a run calls it: its values and gradients must be about within
    the laws' tolerances of the float64 reference.

    Kernels of "gae" and "adamw" run in float32, others in `dtype`. Heads have 64 numbers, since some kernels support no
    smaller ones. Raises LawViolation if they differ, and ValueError for an unknown operation.
    """
    op = operation_of(op) if isinstance(op, str) else op
    if op.name == "adamw":
        _screen_adamw(kernel, device)
        return
    if op.draw is None:
        names = ["adamw", *(name for name in DEFAULTS if operation_of(name).draw is not None)]
        raise ValueError(f"op must be one of {names}, got {op.name!r}")
    lacks, dtype = own(op.name, kernel).lacks, torch.float32 if op.name == "gae" else dtype
    law = Law("near", "values and gradients are about those of the float64 reference", partial(_near, op))
    for rows, width, number in op.screened:
        if not op.features[number] & lacks:
            example = partial(example_of, op, (number,), (dtype,), device, 64)
            check(kernel, [law], example, sizes=((rows, width),), seeds=1)
