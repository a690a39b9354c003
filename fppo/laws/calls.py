"""Check kernels on the calls that a model makes: with its windows, caps, scales, sinks, heads, biases and dtypes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import attrs
import torch
from torch import Tensor

from fppo import models
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.laws._kernels import SLACK, apart, grads, named
from fppo.laws._search import LawViolation, fn_name, raised, shape_of
from fppo.models.model import Model
from fppo.models.probe import Probe, make_probe, probe_rows
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.steps import Forward
from fppo.steps.forward import forward_micro_batch
from fppo.steps.supervised import Demonstrations, demonstrations
from fppo_kernels.operation import Kernel, Operation, operation_of
from fppo_kernels.padding import Lengths, make_lengths
from fppo_kernels.table import INSIDE, Kernels, takes_key_lengths

LAW = "calls of the model"
_TOKENS, _EACH = 4, 2  # decoded tokens, and responses to each prompt, which share it
_SEEN, _NEAR = 1e-5, 20  # a keyword's least effect; a kernel that ignores it is off by less than a 20th of that
_MOST = 24  # calls of an operation that are tried
_HEADS = (None, 2, 4, None)  # the numbers of heads to try in the small model; None: the model's own


class KernelCall(NamedTuple):
    """A call of an operation: its arguments by name, of which the first `positional` are given by position."""

    arguments: Mapping[str, Any]
    positional: int

    @property
    def kind(self) -> tuple[Any, ...]:
        """The shapes, dtypes and numbers of the arguments."""
        return tuple((name, _text(x)) for name, x in self.arguments.items())

    def of(self, fn: Kernel, arguments: Mapping[str, Any]) -> Any:
        """The result of a function on these arguments, given by position or by name as in the call."""
        values = [*arguments.values()][: self.positional]
        return fn(*values, **{name: x for i, (name, x) in enumerate(arguments.items()) if i >= self.positional})


def screen_calls(
    op: str,
    kernel: Kernel,
    model: Model,
    *,
    temperature: float = 1.0,
    longest: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Check a kernel on the calls that a small random instance of a model makes of its operation, in passes over packed
    rows and while it decodes: values and gradients must be about within the laws' tolerances of the float64 reference.

    The instance computes in `dtype`, and the kernel runs on the `device`. `longest` is the length of the longest row of
    the run: if no window is shorter, none hides anything here either. Raises LawViolation for the first call with wrong
    numbers; if the reference gives the same numbers without some keyword, it names that keyword.
    """
    operation = operation_of(op)
    for call in calls_of(operation, kernel, model, temperature=temperature, longest=longest, dtype=dtype):
        if (reason := _breach(operation, kernel, call, device)) is None:
            continue
        shown = (f"{name} = {_text(x)}" for name, x in call.arguments.items())
        kind = f"on what a model of type {model.config.model_type!r} asks of it"
        lines = [
            f'{fn_name(kernel)} breaks the law "{LAW}": {kind}, values and gradients are about those of the float64 '
            "reference.",
            f"  {reason}",
            f"  The call, by a small instance of the model: {', '.join(shown)}",
        ]
        tensors = {name: x for name, x in call.arguments.items() if isinstance(x, Tensor)}
        raise LawViolation("\n".join(lines), LAW, tensors)


def calls_of(
    op: Operation, kernel: Kernel, model: Model, *, temperature: float, longest: int | None, dtype: torch.dtype
) -> list[KernelCall]:
    """The calls of an operation by a small instance of a model, one of each kind; none if the model's code has no place
    for the operation. If `kernel` is an attention that supports shared prompts, there are calls with such prompts.
    If every window of the model holds `longest` tokens, the length of the longest row, calls have no window that hides
    any."""
    if op.name in INSIDE and not models.has_place(model.text_of(model.skeleton), op.name):
        return []
    probe, calls = make_probe(model, heads=_HEADS), list[KernelCall]()
    kernels = attrs.evolve(Kernels.named(), **{op.name: _recorder(op, kernel, calls)})
    small = attrs.evolve(probe.model, compute_dtype=dtype)
    forward, rows = Forward(small, kernels, share_prompts=False), _rows(probe)
    shared = [attrs.evolve(forward, share_prompts=True)] if forward.sharing_hindrance() is None else []
    for passes in (forward, *shared):
        asked = {"outputs": ("log_probs", "entropy"), "temperature": temperature}
        with torch.no_grad():
            forward_micro_batch(probe.params, rows, forward=passes, **asked)
    engine = EmbeddedEngine(model=small, kernels=kernels, pad_token_id=0, merges=False)
    sampling = Sampling(max_tokens=_TOKENS, temperature=temperature)
    with contextlib.suppress(ValueError, RuntimeError):  # of a model that vLLM alone decodes
        engine.generate(probe.params, Ask(_prompts(probe), sampling, Key(0)))
    free = longest is not None and all(window >= longest for window in _windows(model))
    calls = [_without_edge(call) if free else call for call in calls]
    first: dict[tuple[Any, ...], KernelCall] = {}
    for call in calls:
        first.setdefault(call.kind, call)
    return [*first.values()][:_MOST]


def _recorder(op: Operation, kernel: Kernel, calls: list[KernelCall]) -> Kernel:
    """Wrap an operation's reference so that it appends its calls to `calls`, and takes the kernel's keywords."""
    signature = inspect.signature(op.reference)

    def record(*args: Any, **keywords: Any) -> Any:
        kept = signature.bind(*args, **keywords).arguments
        with torch.inference_mode(False):
            copies = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in kept.items()}
        calls.append(KernelCall(copies, len(args)))
        return op.reference(*args, **keywords)

    whole = op.name != "attention" or takes_key_lengths(kernel)
    return functools.wraps(op.reference if whole else kernel)(record)


def _rows(probe: Probe) -> Demonstrations:
    """Rows of a pass: two responses to each of a short and a long prompt, with an image if the model takes any."""
    rows = [row for row in probe_rows(probe) for _ in range(_EACH)]
    responses = [[*row[-_TOKENS:].tolist()][: _TOKENS - i % _EACH] for i, row in enumerate(rows)]
    prompts, inputs = [row[:-_TOKENS].tolist() for row in rows], [probe.inputs_of(row) for row in rows]
    inputs = None if probe.model.vision is None else inputs
    return demonstrations(prompts, responses, pad_token_id=0, inputs=inputs)


def _prompts(probe: Probe) -> Prompts:
    """Prompts of a short and a long row, with an image if the model takes any."""
    rows = [row[: len(row) - _TOKENS] for row in probe_rows(probe)]
    width = max(len(row) for row in rows)
    mask = torch.arange(width) >= torch.tensor([[width - len(row)] for row in rows])
    names = Column([""] * len(rows))
    return Prompts(
        tokens=torch.zeros(mask.shape, dtype=torch.int64).masked_scatter(mask, torch.cat(rows)),
        attention_mask=mask,
        row_ids=torch.arange(len(rows)),
        ids=names,
        ground_truth=names,
        source=names,
        extras=names,
        inputs=None if probe.model.vision is None else Column(probe.inputs_of(row) for row in rows),
    )


def _windows(model: Model) -> list[int]:
    """The windows of a model's layers, in tokens."""
    return [x for name, x in vars(model.config).items() if name.endswith("sliding_window") and type(x) is int]


def _without_edge(call: KernelCall) -> KernelCall:
    """Replace a call's window, if it has one, by one that hides nothing."""
    if not isinstance(call.arguments.get("window"), int):
        return call
    lengths = [x.max_length for x in call.arguments.values() if isinstance(x, Lengths)]
    return call._replace(arguments={**call.arguments, "window": max(lengths, default=1)})


def _breach(op: Operation, kernel: Kernel, call: KernelCall, device: torch.device | str) -> str | None:
    """Describe how a kernel's numbers differ from the reference's on a call; None if they do not. The call is tried as
    it is, then in float32, which shows smaller differences, with logits as large as their cap. A kernel that raises an
    error in float32 passes if the call itself is in 16 bits."""
    dtype = next(x.dtype for x in call.arguments.values() if isinstance(x, Tensor) and x.is_floating_point())
    for number, arguments in enumerate((call.arguments, _steep(call.arguments))):
        at = torch.float32 if number else dtype
        expected = _numbers(op, op.reference, call, arguments, torch.device("cpu"), torch.float64)
        try:
            found = _numbers(op, kernel, call, arguments, torch.device(device), at)
        except Exception as error:  # of the user's function
            if number and dtype.itemsize < 4:
                return None
            return raised(error)
        ignored = _ignored(op, call, arguments, expected, found)
        if (reason := _apart(expected, found, at)) is not None or ignored:
            return "\n  ".join(x for x in (reason, ignored) if x)
    return None


def _steep(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scale up the first argument until logits, the scaled products of the first two, are as large as their cap;
    without a cap the arguments stay."""
    cap, (name, x), (_, y) = arguments.get("softcap"), *[*arguments.items()][:2]
    if cap is None:
        return arguments
    x, y = x.float(), y.float()
    size = x.square().mean().sqrt() * y.square().mean().sqrt() * x.shape[-1] ** 0.5 * arguments.get("scale", 1.0)
    return {**arguments, name: x * max(1.0, cap / size.item())}


def _ignored(
    op: Operation,
    call: KernelCall,
    arguments: Mapping[str, Any],
    expected: Mapping[str, Tensor],
    found: Mapping[str, Any],
) -> str | None:
    """Name a keyword without which the reference is much nearer to a kernel's numbers; None if there is none."""
    for name, parameter in inspect.signature(op.reference).parameters.items():
        given = arguments.get(name)
        if given is None or isinstance(given, Lengths | bool) or given is parameter.default:
            continue
        if parameter.default is inspect.Parameter.empty:
            continue
        others = {**arguments, name: parameter.default}
        without = _numbers(op, op.reference, call, others, torch.device("cpu"), torch.float64)
        for result, x in expected.items():
            y, z = found.get(result), without.get(result)
            if isinstance(y, Tensor) and z is not None and y.shape == x.shape == z.shape and x.numel():
                effect, gap, other = (_most(a, b) for a, b in ((x, z), (x, y), (z, y)))
                if effect > _SEEN and gap > effect / 2 and other < effect / _NEAR:
                    return f"It gives what the reference gives without {name} = {_text(given)}: it ignores {name}."
    return None


def _most(x: Tensor, y: Tensor) -> float:
    """The largest difference of two tensors."""
    return (x - y.cpu().double()).abs().max().item()


def _apart(expected: Mapping[str, Tensor], found: Mapping[str, Any], dtype: torch.dtype) -> str | None:
    for name, x in expected.items():
        if not isinstance(y := found.get(name), Tensor):
            return f"{name} is {type(y).__name__}, expected a Tensor {list(x.shape)}"
        if reason := apart(name, x, y.cpu(), dtype, SLACK):
            return reason
    return None


def _numbers(
    op: Operation,
    fn: Kernel,
    call: KernelCall,
    arguments: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Call a function with the arguments of `call`, moved to a device and a dtype. Returns its results by name, and the
    gradients of a random sum of them by each leaf."""
    given = {name: _placed(x, device, dtype) for name, x in arguments.items()}
    leaves = {name: x.requires_grad_() for name in op.leaves if isinstance(x := given.get(name), Tensor)}
    results = _by_name(call.of(fn, given))
    generator = torch.Generator().manual_seed(0)
    parts: list[Tensor] = []
    for x in results.values() if op.sloped else ():
        if isinstance(x, Tensor) and x.requires_grad:
            weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            parts.append((weights.to(x) * x).sum())
    total = torch.stack(parts).sum() if parts else torch.zeros(())
    slopes = dict(zip(leaves, grads(total, list(leaves.values())), strict=True)) if op.sloped else {}
    return results | {f"the gradient by {name}": x for name, x in slopes.items()}


def _by_name(result: Any) -> dict[str, Any]:
    """The tensors that a kernel returned, by their names in messages."""
    if hasattr(result, "_asdict"):
        return {name: x for name, x in result._asdict().items() if x is not None}
    if isinstance(result, tuple):
        return {f"result {number}": x for number, x in enumerate(cast(tuple[Any, ...], result))}
    return {named("result"): result}


def _placed(x: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(x, Lengths):
        return make_lengths(list(x.lengths), device)
    if not isinstance(x, Tensor):
        return x
    x = x.detach().clone().to(device)
    return x.to(dtype) if x.is_floating_point() else x


def _text(x: Any) -> str:
    """Format an argument of a call for a message: a tensor by its dtype and shape, anything else by its repr."""
    if isinstance(x, Lengths):
        return f"of {list(x.lengths)}"
    return shape_of(x) if isinstance(x, Tensor) else f"{x!r}"
