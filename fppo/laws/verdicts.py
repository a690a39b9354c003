"""Verdicts of all laws on a function: a broken law does not hide others, and conventions differ from faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from fppo._errors import did_you_mean
from fppo.laws._search import Law, Outcome, Suite, describe, fn_name, judged
from fppo.laws.estimators import advantages_suite, whiten_suite
from fppo.laws.losses import policy_suite, value_suite
from fppo.laws.temporal import gae_suite, temporal_suite
from fppo.laws.whole import whole_suite

_MAKERS: Mapping[str, Callable[..., Suite]] = MappingProxyType(
    {
        "policy_loss": policy_suite,
        "value_loss": value_suite,
        "whole_loss": whole_suite,
        "whole_value_loss": partial(whole_suite, values=True),
        "advantages": advantages_suite,
        "gae": gae_suite,
        "temporal": temporal_suite,
        "whiten": whiten_suite,
    }
)
KINDS = tuple(_MAKERS)
_PLAIN = ("gae", "whiten")  # their laws include their definition: no reference


def _frozen(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return MappingProxyType(dict(tensors))


@attrs.frozen
class Verdict:
    """The verdict of one law on a function.

    `outcome` is "holds", "note" (the law is broken, but its weaker form holds: a convention that a caller can keep) or
    "fault". `reason` says what is wrong, or None; `size` is that of the smallest counter-example, `example` its tensors
    and `shown` the same as lines of Python.
    """

    law: str
    statement: str
    outcome: Outcome
    reason: str | None = None
    size: str | None = None
    example: Mapping[str, Tensor] = attrs.field(factory=dict, converter=_frozen, eq=False, repr=False)
    shown: tuple[str, ...] = attrs.field(default=(), repr=False)


def verdicts(
    fn: Callable,
    *,
    kind: str,
    reference: Callable | None = None,
    group_rows: int = 1,
    tokens: int = 0,
    dtype: torch.dtype = torch.float64,
    name: str | None = None,
    only: Sequence[str] | None = None,
) -> tuple[Verdict, ...]:
    """Check `fn` by all laws of a kind, and return a verdict for each.

    `laws.verdicts(my_loss, kind="whole_loss")` returns a `Verdict` for each law, in the order of the laws.

    The kinds, and the checks whose laws they have:

    - "policy_loss" (`check_policy_loss`), "value_loss" (`check_value_loss`), "whole_loss" and "whole_value_loss"
      (`check_whole_loss`)
    - "advantages" (`check_advantages`), "gae" (`check_gae`), "temporal" (`check_temporal`), "whiten" (`check_whiten`)

    Every law searches the same batches in the same order, so that equal functions get equal verdicts. What a function
    does with garbage where the mask is False is tried with NaN and infinities first, then with finite numbers: if only
    the former reach the result, the verdict is a note. A `reference` of the same signature adds the law that both
    agree; "gae" and "whiten" take neither this nor a `dtype`. `group_rows` (for "advantages") is the least number of
    rows of a group, `tokens` the least number of tokens in the mask of a batch, and `name` the function's name in the
    lines of a counter-example. `only` names the laws to try, in place of all.

    Raises ValueError for an unknown kind or law, and for arguments that the kind does not take.
    """
    suite = _suite(kind, reference, group_rows, dtype)
    examples = [(seed, example) for seed, example in suite.examples() if example.mask.sum() >= tokens]
    names = [law.name for law in suite.laws]
    if unknown := next((law for law in only or () if law not in names), None):
        raise ValueError(f"the kind {kind!r} has no law {unknown!r}; {did_you_mean(unknown, names)}")
    chosen = [law for law in suite.laws if only is None or law.name in only]
    return tuple(_verdict(fn, law, suite, examples, name or fn_name(fn)) for law in chosen)


def _suite(kind: str, reference: Callable | None, group_rows: int, dtype: torch.dtype) -> Suite:
    if kind not in _MAKERS:
        raise ValueError(f"kind {kind!r}: {did_you_mean(kind, KINDS)}")
    if group_rows != 1 and kind != "advantages":
        raise ValueError(f"group_rows={group_rows}: only the kind 'advantages' has groups, not {kind!r}")
    if kind in _PLAIN:
        if reference is not None or dtype != torch.float64:
            raise ValueError(f"the kind {kind!r} takes neither a reference nor a dtype: its definition is a law")
        return _MAKERS[kind]()
    more = {"group_rows": group_rows} if kind == "advantages" else {}
    return _MAKERS[kind](reference=reference, dtype=dtype, **more)


def _verdict(fn: Callable, law: Law, suite: Suite, examples: list, name: str) -> Verdict:
    outcome, found = judged(fn, law, examples)
    if found is None:
        return Verdict(law.name, law.statement, "holds")
    size, (reason, example) = found
    note = f"; {law.note}" if outcome == "note" else ""
    tensors = {**example.inputs, **example.extras}
    shown = tuple(describe(example, name, suite.see))
    return Verdict(law.name, law.statement, outcome, f"{reason}{note}", size, tensors, shown)
