"""The search for smallest counter-examples: ascending sizes, a few seeds each, equal in every run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (3, 2), (3, 3), (4, 5), (6, 7))
SEEDS = 6
PRINTED = 1000  # the most numbers of a tensor in lines that can be run
SHOWN = 24  # the most in other lines, which show the shape of a larger tensor
RAISED = 3  # the most lines of an error
WRITTEN = 100  # the most characters of a callable without a name
_OBJECT = re.compile(r"<[\w.<>]*?(\w+) object at 0x\w+>")  # <module.Class object at 0x7f>
_FUNCTION = re.compile(
    r"<(?:built-in |bound )?(?:function|method) (?:[\w.]*<locals>\.)*([\w.]+)(?: of [\w. ]+)?(?: at 0x\w+)?>"
)
Outcome = Literal["holds", "note", "fault"]
GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e300)


class LawViolation(AssertionError):
    """Error for a function that breaks a law: `law` is its name, `example` the smallest inputs that show it."""

    def __init__(self, message: str, law: str, example: dict[str, Tensor]) -> None:
        super().__init__(message)
        self.law = law
        self.example = example


class Law(NamedTuple):
    """A law, in words its `statement`: `breach(fn, example, generator)` describes what is wrong on an example, or
    returns None.

    `way_out` is an argument that turns the law off where it is not meant to hold. `mild` is a weaker form of `breach`:
    if it holds and the law does not, `verdicts` gives a note, which ends with the text `note`, instead of a fault.
    """

    name: str
    statement: str
    breach: Callable[[Callable, Any, torch.Generator], str | Breach | None]
    way_out: str = ""
    mild: Callable[[Callable, Any, torch.Generator], str | Breach | None] | None = None
    note: str = ""


class Breach(NamedTuple):
    """The reason why an example breaks a law, with the example if the law has changed it."""

    reason: str
    example: LawExample


class LawExample(NamedTuple):
    """Inputs of a function: `inputs` in the order of its arguments, `extras` by keyword, and `weights` [B, T].

    `mode` is the weight mode of an update.
    """

    inputs: dict[str, Tensor]
    extras: dict[str, Tensor]
    weights: Tensor
    mode: str | None = None

    @property
    def mask(self) -> Tensor:
        return self.inputs["mask"]

    @property
    def size(self) -> str:
        """The size of the example in words: the shape of the mask, or else of the first input."""
        return " x ".join(map(str, self.inputs.get("mask", next(iter(self.inputs.values()))).shape))

    def map(self, fn: Callable[[Tensor], Tensor]) -> LawExample:
        """The example with `fn` applied to every tensor."""
        inputs, extras = ({k: fn(v) for k, v in tensors.items()} for tensors in (self.inputs, self.extras))
        return LawExample(inputs, extras, fn(self.weights), self.mode)

    def put(self, **changes: Tensor) -> LawExample:
        """The example with some of its inputs or extras changed."""
        inputs = {k: changes.get(k, v) for k, v in self.inputs.items()}
        return self._replace(inputs=inputs, extras={k: changes.get(k, v) for k, v in self.extras.items()})


class Suite(NamedTuple):
    """The laws of a kind of function, and their examples: `example(rows, width, seed)` for each (rows, width) of
    `sizes`.

    `see` are lines of Python that show an example; {} in them is the function.
    """

    laws: tuple[Law, ...]
    example: Callable[[int, int, int], LawExample]
    see: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = SIZES

    def examples(self) -> list[tuple[int, LawExample]]:
        """All examples with their seeds, the smallest first."""
        return [(seed, self.example(rows, width, seed)) for rows, width in self.sizes for seed in range(SEEDS)]


def nothing(fn: Callable, example: Any, generator: torch.Generator) -> None:
    """Find nothing wrong: a law's `mild` form, if callers can satisfy the law themselves whatever the function does."""


def draw_mask(rows: int, width: int, seed: int, generator: torch.Generator) -> Tensor:
    """Draw a mask [rows, width] of a kind chosen by the seed: full, ragged on the right, or with holes and empty
    rows."""
    kind = seed % 3
    if kind == 0:
        return torch.ones(rows, width, dtype=torch.bool)
    if kind == 1:
        lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
        return torch.arange(width) < lengths
    return torch.rand(rows, width, generator=generator) < 0.6


def short(x: Tensor) -> Tensor:
    """Round to 3 decimals, so that messages show the numbers exactly."""
    return x.mul(1000).round().div(1000)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw standard normal numbers in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def spoil(x: Tensor, where: Tensor, generator: torch.Generator, kind: str = "mixed") -> Tensor:
    """Replace `x` by NaN (kind "nan"), or also by infinities and huge numbers, where `where` is True.

    Some bools are flipped there; integers are unchanged.
    """
    if x.dtype == torch.bool:
        return x ^ (where & (torch.rand(x.shape, generator=generator) < 0.5))
    if not x.is_floating_point():
        return x
    if kind == "nan":
        return x.where(~where, torch.nan)
    picks = torch.randint(len(GARBAGE), x.shape, generator=generator)
    return torch.tensor(GARBAGE, dtype=x.dtype)[picks].where(where, x)


def stain(example: LawExample, generator: torch.Generator) -> LawExample:
    """Replace an example's numbers outside the mask by finite numbers of sizes up to some tens, as real padding may
    hold; weights and mask are unchanged."""

    def dirty(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        mask = example.mask if x.dim() >= 2 else example.mask.any(1)
        drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64).mul(30).to(x.dtype)
        return x.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), short(drawn))

    return example.map(dirty)._replace(weights=example.weights).put(mask=example.mask)


def widen(x: Tensor, columns: int, fill: float = torch.nan) -> Tensor:
    """Append `columns` of padding to a tensor [B, T, ...]: False in a mask, `fill` in numbers; [B] is unchanged."""
    if x.dim() < 2:
        return x
    value = fill if x.is_floating_point() else 0
    return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, columns), value=value)


def differ(
    what: str, expected: Tensor, actual: Tensor, tolerance: float = 1e-9, relative: float | None = None
) -> str | None:
    """Describe where two tensors, called `what`, differ most; None if they agree (NaN agrees with NaN).

    They may differ by `tolerance` plus `relative` (by default the same number) times the expected number.
    """
    if expected.shape != actual.shape:
        return f"{what} has the shape {list(actual.shape)}, expected {list(expected.shape)}"
    expected, actual = expected.detach().double(), actual.detach().double()
    rtol = tolerance if relative is None else relative
    same = torch.isclose(actual, expected, rtol=rtol, atol=tolerance, equal_nan=True)
    if same.all():
        return None
    gap = (actual - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).where(~same, -1.0)
    place = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)] if gap.dim() else []
    number, wanted = _apart(*(x[tuple(place)].item() for x in (actual, expected)))
    return f"{what}{place or ''} is {number}, expected {wanted}"


def _apart(a: float, b: float) -> tuple[str, str]:
    """Format two numbers with the fewest digits that distinguish them: 4, 9 or 17."""
    texts = [(f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in (4, 9, 17)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def unchanged(example: LawExample, copy: LawExample) -> str | None:
    """Describe the first argument in the example that differs from `copy`; None if none does."""
    before = {**copy.inputs, **copy.extras}
    for name, x in {**example.inputs, **example.extras}.items():
        if not torch.equal(x, before[name]):
            return f"it changed its argument {name}"
    return None


def impure(example: LawExample, call: Callable[[], Any], differ: Callable[[Any, Any], str | None]) -> str | None:
    """Describe how a function is impure; None if it is not.

    `call` runs the function on the arguments in `example`, and is run twice. Impure is a function that draws from
    torch's global generator, changes `example`, or gives two results that differ. `differ(first, second)` returns a
    text on the difference, or None if the results are equal.
    """
    copy, state = example.map(torch.clone), torch.get_rng_state()
    first = call()
    if not torch.equal(state, torch.get_rng_state()):
        return "it drew from torch's global generator"
    if reason := unchanged(example, copy):
        return reason
    reason = differ(first, call())
    return reason and f"a second call gave another result: {reason}"


def changed(reason: str | None, words: str, example: LawExample) -> Breach | None:
    """Make a breach of a law that called the function with a changed `example`: the reason, preceded by `words`. None
    if the `reason` is None."""
    return None if reason is None else Breach(f"{words}{reason}", example)


def fn_name(fn: Callable) -> str:
    """The name of a function; for other callables their repr without addresses: partial(f, radius=0.1)."""
    if (name := getattr(fn, "__name__", None)) is not None:
        return name
    text = _FUNCTION.sub(r"\1", _OBJECT.sub(r"\1", repr(fn))).removeprefix("functools.")
    return text if len(text) <= WRITTEN else f"{text[:WRITTEN]}..."


def _digits(x: Tensor) -> tuple[str, bool]:
    """Format a tensor's numbers with 4 digits as nested lists; return the text, and whether it is exact."""
    if not x.is_floating_point():
        return str(x.tolist()), True

    def rounded(value: Any) -> Any:
        return [rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.4g}")

    numbers = rounded(x.tolist())
    whole = torch.tensor(numbers, dtype=x.dtype).view(x.shape)
    return str(numbers), torch.isclose(whole, x.detach().cpu(), rtol=0.0, atol=0.0, equal_nan=True).all().item() is True


def shape_of(x: Tensor) -> str:
    """The dtype and the shape of a tensor as text."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def describe(example: LawExample, name: str, see: Sequence[str]) -> list[str]:
    """Format the example as lines of Python that assign its tensors, with 4 digits. If the digits are exact, the lines
    can be run, and end with the lines `see`; else large tensors are shown by their shapes. `name` replaces {} in
    `see`."""
    tensors = {**example.inputs, **example.extras}
    if any("weights" in line for line in see):
        tensors["weights"] = example.weights
    texts = {key: _digits(x) if x.numel() <= PRINTED else (str(list(x.shape)), False) for key, x in tensors.items()}
    width = max((len(key) for key in tensors), default=0)
    if not see or not all(whole for _, whole in texts.values()):
        mode = [] if example.mode is None else [f"weight_mode = {example.mode!r}"]
        shown = {key: texts[key][0] if x.numel() <= SHOWN else shape_of(x) for key, x in tensors.items()}
        return [
            *mode,
            *(f"{key:<{width}} = {text}" for key, text in shown.items()),
            "(all of it is in the error's .example)",
        ]
    lines = ["from functools import partial"] if name.startswith("partial(") else []
    lines.append("from torch import float32, float64, inf, nan, tensor")
    for key, (text, _) in texts.items():
        kind = f", dtype={str(tensors[key].dtype).removeprefix('torch.')}" if tensors[key].is_floating_point() else ""
        lines.append(f"{key:<{width}} = tensor({text}{kind})")
    return [*lines, *(line.format(name) for line in see)]


def raised(error: Exception) -> str:
    """The error that a function raised, by its first lines."""
    lines = str(error).splitlines()
    more = [f"... and {len(lines) - RAISED} more lines"] if len(lines) > RAISED else []
    return f"it raised {type(error).__name__}: " + "\n  ".join([*lines[:RAISED], *more])


def first_breach(fn: Callable, law: Law, examples: Sequence[tuple[int, LawExample]]) -> tuple[str, Breach] | None:
    """Find the first example that breaks the law; return its size in words and the breach, or None if none breaks
    it."""
    for seed, example in examples:
        try:
            breach = law.breach(fn, example.map(torch.clone), torch.Generator().manual_seed(seed))
        except Exception as error:
            breach = raised(error)
        if breach is not None:
            return example.size, Breach(breach, example) if isinstance(breach, str) else breach
    return None


def judged(
    fn: Callable, law: Law, examples: Sequence[tuple[int, LawExample]]
) -> tuple[Outcome, tuple[str, Breach] | None]:
    """Judge `fn` by a law: the outcome, and the first example that shows it, as `first_breach` returns it."""
    if (found := first_breach(fn, law, examples)) is None or law.mild is None:
        return ("holds" if found is None else "fault"), found
    worse = first_breach(fn, law._replace(breach=law.mild), examples)
    if worse is None and not (law.mild is nothing and found[1].reason.startswith("it raised ")):
        return "note", found
    return "fault", worse or found


def check(
    fn: Callable,
    laws: Sequence[Law],
    make_example: Callable[[int, int, int], LawExample],
    *,
    sizes: Sequence[tuple[int, int]] = SIZES,
    seeds: int = SEEDS,
    name: str | None = None,
    see: Sequence[str] = (),
) -> None:
    """Check `fn` by every law on `make_example(rows, width, seed)`; raise LawViolation for the first broken law.

    The message has the function's name (or `name`), the law's note if only its weaker form holds, the smallest
    counter-example as the function was called with it, and the names of other broken laws. `see` are lines of Python
    that show what went wrong; {} in them is the function.
    """
    examples = [(seed, make_example(rows, width, seed)) for rows, width in sizes for seed in range(seeds)]
    found = [(law, *judged(fn, law, examples)) for law in laws]
    broken = [(law, outcome, breach) for law, outcome, breach in found if breach is not None]
    if not broken:
        return
    law, outcome, (size, (reason, example)) = broken[0]
    name = name or fn_name(fn)
    lines = [
        f'{name} breaks the law "{law.name}": {law.statement}.',
        f"  {reason}",
        *([f"  A note, no fault: {law.note}."] if outcome == "note" else []),
        *([f"  If that is meant: {law.way_out}."] if law.way_out else []),
        f"  The smallest counter-example, {size}, as it was used:",
        *(f"    {line}" for line in describe(example, name, see)),
    ]
    if broken[1:]:
        lines.append("  It also breaks: " + ", ".join(f'"{other.name}"' for other, *_ in broken[1:]))
    raise LawViolation("\n".join(lines), law.name, {**example.inputs, **example.extras})


def check_suite(fn: Callable, suite: Suite) -> None:
    """Check `fn` by every law of a suite; raises LawViolation as `check` does."""
    check(fn, suite.laws, suite.example, sizes=suite.sizes, see=suite.see)
