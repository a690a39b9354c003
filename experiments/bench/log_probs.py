"""Log-probs and entropy from hidden states and a head, forward and backward: ours beside the peers that are installed.

    python experiments/bench/log_probs.py
    PYTHONPATH=kernels python experiments/bench/log_probs.py   # where only torch, attrs and the peers are installed

All variants run in one process, in turn; seconds are medians. "matmuls" is the least work: one product (the logits)
forward, four in both directions (the logits twice and the two gradients), by torch.mm into buffers that exist;
"matmuls in slabs" is the same by oneDNN, a part of the vocabulary at a time. The columns "x 1" and "x 4" are the
times relative to "matmuls". Memory is the high-water mark less what the process held before the call and less the
outputs and gradients. Errors are the largest, relative to max(1, the largest number), to float64 (of the
gradients: at some rows). Every variant is checked before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_tools import Timing, median, once
from log_probs_peers import LOADERS, Fn
from torch import Tensor

from fppo_kernels import table

SHAPES = ("2048x512x32000", "1024x896x151936")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
BASE, SLABS = "matmuls", "matmuls in slabs"
SLAB_BYTES = 8 << 20


class Case(NamedTuple):
    """The inputs, and the gradients by the outputs."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    d_log_probs: Tensor
    d_entropy: Tensor


class Truth(NamedTuple):
    """What float64 says: everything forward, some rows of the gradients, with and without the entropy's gradient."""

    log_probs: Tensor
    entropy: Tensor
    tokens: Tensor
    words: Tensor
    both: tuple[Tensor, Tensor]
    label_only: tuple[Tensor, Tensor]


class Variant(NamedTuple):
    """Two functions without arguments, and what is known of their results."""

    name: str
    forward: Callable[[], Any]
    backward: Callable[[], Any]  # forward and backward
    result_mib: tuple[float, float]  # outputs; outputs and gradients
    outputs: str
    errors: tuple[float, float]  # of the outputs, of the gradients


def make_case(shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    """Logits of standard deviation 2."""
    n, h, v = shape
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=g) * (2 / math.sqrt(h))).to(dtype).requires_grad_()
    labels = torch.randint(v, (n,), generator=g)
    return Case(hidden, weight, labels, torch.randn(n, generator=g), torch.randn(n, generator=g))


@torch.no_grad()
def find_truth(case: Case) -> Truth:
    """By the formulas, some tokens at a time."""
    hidden, weight = case.hidden.double(), case.weight.double()
    n, v = len(hidden), len(weight)
    g = torch.Generator().manual_seed(1)
    tokens = torch.randperm(n, generator=g)[:64].sort().values
    words = torch.cat([case.labels[:256], torch.randint(v, (256,), generator=g)]).unique()
    log_probs, entropy = hidden.new_empty(n), hidden.new_empty(n)
    d_hidden = [hidden.new_zeros(n, hidden.shape[1]) for _ in range(2)]
    d_weight = [hidden.new_zeros(len(words), hidden.shape[1]) for _ in range(2)]
    for rows in torch.arange(n).split(128):
        logs = torch.log_softmax(hidden[rows] @ weight.T, -1)
        probs = logs.exp()
        log_probs[rows] = logs.gather(1, case.labels[rows, None])[:, 0]
        entropy[rows] = -(probs * logs).sum(-1)
        label = -probs * case.d_log_probs[rows, None]
        label[torch.arange(len(rows)), case.labels[rows]] += case.d_log_probs[rows]
        both = label - case.d_entropy[rows, None] * probs * (logs + entropy[rows, None])
        some = torch.isin(rows, tokens)
        for i, d in enumerate((both, label)):
            d_hidden[i][rows[some]] = d[some] @ weight
            d_weight[i] += d[:, words].T @ hidden[rows]
    grads = [(h[tokens], w) for h, w in zip(d_hidden, d_weight, strict=True)]
    return Truth(log_probs, entropy, tokens, words, *grads)


def _error(value: Tensor, truth: Tensor) -> float:
    return ((value.detach().double() - truth).abs().max() / truth.abs().max().clamp(min=1)).item()


def _mib(tensors: Sequence[Tensor | None]) -> float:
    return sum(x.nbytes for x in tensors if x is not None) / 2**20


def make_variant(name: str, fn: Fn, case: Case, truth: Truth) -> Variant:
    """Run both directions once, which compiles what has to be, and compare with the truth."""

    @torch.no_grad()
    def forward() -> tuple[Tensor, ...]:
        return tuple(x for x in fn(case.hidden, case.weight, case.labels) if x is not None)

    def backward() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        out = tuple(x for x in fn(case.hidden, case.weight, case.labels) if x is not None)
        grads = [d.to(x.dtype) for d, x in zip((case.d_log_probs, case.d_entropy), out)]
        return out, torch.autograd.grad(out, (case.hidden, case.weight), grads)

    plain, (out, grads) = forward(), backward()
    expected = truth.both if len(out) == 2 else truth.label_only
    wanted = (truth.log_probs, truth.entropy)
    errors = [_error(x, y) for xs in (plain, out) for x, y in zip(xs, wanted)]
    d_errors = [_error(grads[0][truth.tokens], expected[0]), _error(grads[1][truth.words], expected[1])]
    outputs = "both" if len(out) == 2 else "log-prob only"
    sizes = _mib(out), _mib([*out, *grads])
    return Variant(name, forward, backward, sizes, outputs, (max(errors), max(d_errors)))


@torch.no_grad()
def make_matmuls(case: Case) -> Variant:
    """The four products into buffers."""
    hidden, weight = case.hidden.detach(), case.weight.detach()
    logits, d_hidden, d_weight = hidden @ weight.T, torch.zeros_like(hidden), torch.zeros_like(weight)

    def forward() -> None:
        torch.mm(hidden, weight.T, out=logits)

    def backward() -> None:
        for _ in range(2):
            torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=d_hidden)
        torch.mm(logits.T, hidden, out=d_weight)

    backward()
    return Variant(BASE, forward, backward, (0.0, 0.0), "none", (math.nan, math.nan))


@torch.no_grad()
def make_slabs(case: Case) -> Variant:
    """The four products by oneDNN's linear layer, in slabs of the vocabulary that fit a cache."""
    hidden, weight = case.hidden.detach(), case.weight.detach()
    d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    width = max(1, SLAB_BYTES // (len(hidden) * hidden.element_size()))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")

    def forward() -> None:
        for rows in weight.split(width):
            product(hidden, rows.T)

    def backward() -> None:
        forward()
        for rows, out in zip(weight.split(width), d_weight.split(width), strict=True):
            slab = product(hidden, rows.T)
            d_hidden.add_(product(slab, rows))
            out.copy_(product(slab.T, hidden))

    backward()
    return Variant(SLABS, forward, backward, (0.0, 0.0), "none", (math.nan, math.nan))


def ours() -> dict[str, Callable[[], Fn]]:
    """Loaders of every implementation in the table."""

    def loader(name: str) -> Callable[[], Fn]:
        def load() -> Fn:
            if reason := table.available("log_probs")[name]:
                raise ImportError(reason)
            fn = table.get("log_probs", name)
            entropy = "entropy" not in table.BUILTIN["log_probs"][name].lacks

            def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
                out = fn(hidden, weight, labels, entropy=entropy)
                return out.log_probs, out.entropy

            return run

        return load

    return {f"fppo {name}": loader(name) for name in table.available("log_probs")}


def make_variants(names: Sequence[str], case: Case) -> tuple[list[Variant], dict[str, str]]:
    """Those that run here, checked, and for the others why not."""
    loaders = {**ours(), **LOADERS}
    variants, absent = [make_matmuls(case)], {}
    if SLABS in names and torch.backends.mkldnn.is_available():
        variants.append(make_slabs(case))
    truth = find_truth(case)
    for name in names:
        if name in (BASE, SLABS):
            continue
        try:
            fn = loaders[name]()
        except ImportError as error:
            absent[name] = str(error)
            continue
        if name == "fppo reference" and (lack := _lacking(case)):
            absent[name] = lack
            continue
        gc.collect()
        variants.append(make_variant(name, fn, case, truth))
    return variants, absent


def _lacking(case: Case) -> str | None:
    """Why the logits of this case do not fit eight times in float32, or None."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    needed = 8 * 4 * len(case.hidden) * len(case.weight)
    return f"needs {needed >> 20} MiB, {free >> 20} are free" if needed > free else None


def run(variants: Sequence[Variant], repeats: int) -> dict[str, tuple[Timing, Timing]]:
    """Medians of forward and of forward and backward, all in turn; the memory is beyond the results."""
    runs: dict[str, tuple[list[Timing], list[Timing]]] = {v.name: ([], []) for v in variants}
    for _ in range(repeats):
        for v in variants:
            for kept, fn, size in zip(runs[v.name], (v.forward, v.backward), v.result_mib, strict=True):
                timing = once(fn, per=False)
                kept.append(timing._replace(peak_mib=timing.peak_mib - size))
    return {name: (median(a), median(b)) for name, (a, b) in runs.items()}


def to_records(
    shape: str, dtype: str, variants: Sequence[Variant], timings: dict[str, tuple[Timing, Timing]]
) -> list[dict[str, Any]]:
    """One per variant, with ratios."""
    base = timings[BASE]
    records = []
    for v in variants:
        forward, backward = timings[v.name]
        records.append(
            {
                "shape": shape,
                "dtype": dtype,
                "variant": v.name,
                "outputs": v.outputs,
                "forward_s": forward.seconds,
                "forward_ratio": forward.seconds / base[0].seconds,
                "forward_mib": forward.peak_mib,
                "backward_s": backward.seconds,
                "backward_ratio": backward.seconds / base[1].seconds,
                "backward_mib": backward.peak_mib,
                "error": v.errors[0] if v.outputs != "none" else None,
                "gradient_error": v.errors[1] if v.outputs != "none" else None,
                "agrees": max(v.errors) <= TOLERANCES[dtype] if v.outputs != "none" else None,
            }
        )
    return records


def to_table(records: Sequence[dict[str, Any]]) -> str:
    """One line per variant."""
    lines = [
        f"{'variant':<22}{'outputs':<15}{'forward':>9}{'x 1':>6}{'MiB':>7}{'both':>11}{'x 4':>6}{'MiB':>7}"
        f"{'error':>10}{'gradient':>10}"
    ]
    for r in records:
        errors = f"{r['error']:>10.1e}{r['gradient_error']:>10.1e}" if r["error"] is not None else ""
        mark = "  DISAGREES" if r["agrees"] is False else ""
        lines.append(
            f"{r['variant']:<22}{r['outputs']:<15}{r['forward_s']:>7.3f} s{r['forward_ratio']:>6.2f}"
            f"{r['forward_mib']:>7.0f}{r['backward_s']:>9.3f} s{r['backward_ratio']:>6.2f}{r['backward_mib']:>7.0f}"
            f"{errors}{mark}"
        )
    return "\n".join(lines)


def _shape(text: str) -> tuple[int, int, int]:
    n, h, v = (int(part) for part in text.split("x"))
    return n, h, v


def main() -> None:
    """Prints one table per shape and dtype."""
    names = [SLABS, *ours(), *LOADERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxHxV")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--variants", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each variant; the median counts")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records: list[dict[str, Any]] = []
    for shape in options.shapes:
        for dtype in options.dtypes:
            torch.compiler.reset()
            variants, absent = make_variants(options.variants, make_case(_shape(shape), DTYPES[dtype]))
            new = to_records(shape, dtype, variants, run(variants, options.repeats))
            records += new
            print(f"\nN x H x V = {shape}, {dtype}, {options.threads} threads, torch {torch.__version__}")
            print(to_table(new))
            for name, reason in absent.items():
                print(f"{name}: absent ({reason})")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
