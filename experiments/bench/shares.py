"""Where the processor time of an iteration, or of decoding, goes beyond its matrix products: one thread, by part.

    python experiments/bench/shares.py grpo 1M pass+cpp         # or ppo; 13M; engine, as in iteration.py
    python experiments/bench/shares.py decode 15M +torch        # 64 rows of 64 + 64 tokens, as in rollout.py

Torch's operations are observed as they begin and end (observer.cpp, compiled at first use), and a node of the backward
pass counts for the operation that made it. So the parts are the whole. "Products" are inside the iteration; "alone"
is the time of the same products on tensors of their shapes, in turn with the iterations. The first iteration is not
counted; the others are medians.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import iteration
import rollout
import torch
from torch._inductor.codecache import CppCodeCache

from fppo.key import Key
from fppo.rollout import Ask, EmbeddedEngine, Sampling
from fppo_kernels.table import INSIDE, Kernels

KINDS = (
    "Python",
    "torch's other operations",
    "products",
    "autograd's engine",
    "attention",
    "log-probs, entropy",
    "norms",
    "rotary positions",
    "gated activations",
    "optimizer, norm of gradients",
    "sampling",
    "copies, indices",
)
OF_OPERATION = {
    **dict.fromkeys(("attention", "decode_attention"), 4),
    "log_probs": 5,
    **dict.fromkeys(("rms_norm", "add_rms_norm"), 6),
    "rotary": 7,
    "glu": 8,
}
NAMED = {
    2: "aten::linear aten::mm aten::addmm aten::bmm mkldnn::_linear_pointwise",
    4: "aten::scaled_dot_product_attention",
    6: "aten::rms_norm",
    8: "aten::silu",
    9: "aten::_fused_adamw_ aten::linalg_vector_norm aten::_foreach_norm",
    10: "aten::amax aten::cumsum aten::searchsorted aten::argmax aten::exp_ aten::gather aten::logsumexp",
    11: "aten::copy_ aten::clone aten::cat aten::stack aten::contiguous aten::to aten::index aten::index_put_ "
    "aten::index_select aten::_index_put_impl_ aten::expand aten::reshape aten::view aten::transpose aten::select",
}
STAGES = ("rest", "gen", "reward", "old_log_prob", "values", "ref", "adv", "update_critic", "update_actor", "annotate")


def observer() -> ctypes.CDLL:
    """The compiled observer."""
    lib = CppCodeCache.load((Path(__file__).parent / "observer.cpp").read_text())
    lib.take.restype = ctypes.c_double
    for kind, names in NAMED.items():
        for name in names.split():
            lib.name_kind(name.encode(), kind)
    for number, name in enumerate(STAGES):
        lib.name_kind(name.encode(), number)
    return lib


def labelled(kernels: Kernels, lib: ctypes.CDLL) -> Kernels:
    """Kernels whose time counts for their operation; those of the model's own code stay."""

    def with_label(fn: Callable[..., Any], kind: int) -> Callable[..., Any]:
        @functools.wraps(fn)
        def counted(*args: Any, **kwargs: Any) -> Any:
            lib.push(lib.top() // len(KINDS) * len(KINDS) + kind)
            try:
                return fn(*args, **kwargs)
            finally:
                lib.pop()

        return counted

    own = Kernels.named()
    chosen = {op: getattr(kernels, op) for op in OF_OPERATION}
    chosen = {op: fn for op, fn in chosen.items() if op not in INSIDE or fn is not getattr(own, op)}
    return attrs.evolve(kernels, **{op: with_label(fn, OF_OPERATION[op]) for op, fn in chosen.items()})


def observed(lib: ctypes.CDLL, fn: Callable[[], Any]) -> dict[tuple[str, str], float]:
    """Seconds of one run by stage and kind."""
    lib.observe(len(KINDS))
    fn()
    lib.stop()
    labels = ((stage, kind) for stage in STAGES for kind in KINDS)
    return {label: lib.take(number) for number, label in enumerate(labels)}


def seconds(fn: Callable[[], Any]) -> float:
    start = time.thread_time()
    fn()
    return time.thread_time() - start


def iterations(
    options: argparse.Namespace, directory: str, lib: ctypes.CDLL
) -> tuple[Callable[[], Any], Callable[[], float]]:
    """An iteration, and the seconds of its products alone."""
    given = dict(epochs=1, beta=0.0, device="cpu", tokens=iteration.ROWS, prompt=iteration.SUM, n=8)
    task = iteration.make(argparse.Namespace(kind=options.kind, size=options.size, **given), directory)
    run = iteration.our_iteration(task, options.variant, lambda kernels: labelled(kernels, lib))
    return run, lambda: iteration.products(task, options.variant.partition("+")[0], time.thread_time)


def decoding(options: argparse.Namespace, lib: ctypes.CDLL) -> tuple[Callable[[], Any], Callable[[], float]]:
    """Decoding as in runs with kernels in C++, and the seconds of its products alone."""
    model, params = rollout.make(options.size)
    prompts, sampling = rollout.prompts_of(options.size), Sampling(max_tokens=rollout.NEW)
    kernels = Kernels.named(**dict.fromkeys(iteration.IN_CPP, "cpp"), linear=options.variant.partition("+")[2])
    engine = EmbeddedEngine(model=model, kernels=labelled(kernels, lib), pad_token_id=0)

    def run() -> None:
        lib.push(len(KINDS))
        engine.generate(params, Ask(prompts, sampling, Key(1)))
        lib.pop()

    return run, lambda: rollout.products(model, params, time.thread_time)


def show(whole: list[float], alone: list[float], parts: list[dict[tuple[str, str], float]]) -> None:
    """Print medians: seconds, and multiples of the products alone."""
    unit, total = statistics.median(alone), statistics.median(whole)
    print(
        f"whole {total:.3f} s, products alone {unit:.3f} s ({min(alone):.3f} to {max(alone):.3f}): {total / unit:.2f}"
    )
    middle = {label: statistics.median(part[label] for part in parts) for label in parts[0]}
    print(f"observed {statistics.median(sum(part.values()) for part in parts):.3f} s")
    stages = [stage for stage in STAGES if sum(middle[stage, kind] for kind in KINDS) > 0.002 * total]
    print(f"{'of the products alone':32s}{'all':>8}" + "".join(f"{stage:>14}" for stage in stages))
    for kind in (*KINDS, None):
        cells = [sum(middle[stage, each] for each in KINDS if kind in (each, None)) / unit for stage in stages]
        if sum(cells) > 0.001:
            print(f"{kind or 'all':32s}{sum(cells):8.3f}" + "".join(f"{cell:14.3f}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("grpo", "ppo", "decode"))
    parser.add_argument("size")
    parser.add_argument("variant", nargs="?", default="pass+cpp", help="as in iteration.py; decode: +torch, +onednn")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    lib = observer()
    with tempfile.TemporaryDirectory() as directory:
        pair = decoding(options, lib) if options.kind == "decode" else iterations(options, directory, lib)
        run, products = pair
        run()
        whole, alone, parts = list[float](), list[float](), list[dict[tuple[str, str], float]]()
        for _ in range(options.rounds):
            whole.append(seconds(run))
            with torch.no_grad():
                alone.append(products())
            parts.append(observed(lib, run))
    show(whole, alone, parts)


if __name__ == "__main__":
    main()
