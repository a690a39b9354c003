"""Rollout engines side by side: tokens per second, what fppo adds to vLLM, and what a sync of weights costs.

    python experiments/bench/rollout.py engines 1M     # model.generate, the embedded engine (as it is, with
                                                       # attention in C++, with oneDNN's products besides, and with
                                                       # all kernels of the layers in C++ as runs on AMD's processors
                                                       # have them), vLLM, and the products alone; 1M, 15M or 110M
    python experiments/bench/rollout.py engines 1M 8   # the same with prompts of 8 to 64 tokens instead of 64 each
    taskset -c 0 python experiments/bench/rollout.py engines 1M 8 processor   # by the time of a core that others use
    python experiments/bench/rollout.py overhead 15M   # VllmEngine against vLLM called directly, same model and prompts
    python experiments/bench/rollout.py sync 110M      # against a copy of the bytes and vLLM's own load; peak memory
    python experiments/bench/rollout.py process 110M   # the same with vLLM in a process of its own

Run it where vLLM is installed, without OMP_NUM_THREADS set.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2Config

from fppo import models
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.models.model import Model
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.vllm.engine import VllmEngine, VllmOptions
from fppo_kernels.linear.onednn import onednn, packed
from fppo_kernels.table import Kernels

SIZES = {  # vocabulary, hidden, intermediate, layers, heads, key-value heads
    "1M": (2048, 128, 384, 4, 4, 2),
    "15M": (8192, 384, 1024, 8, 6, 2),
    "110M": (36000, 768, 2048, 13, 12, 4),
}
ROWS, PROMPT, NEW = 64, 64, 64
MIB = 1 << 20
LOAD = "vLLM's own load"


def make(size: str) -> tuple[Model, dict[str, Tensor]]:
    """A Qwen2 of about that many parameters, at random."""
    vocab, hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = models.build(config)
    return model, models.init_params(model, Key(0))


def prompts_of(size: str, shortest: int = PROMPT) -> Prompts:
    """Random prompts, their lengths evenly from `shortest` to PROMPT tokens."""
    tokens = torch.randint(3, SIZES[size][0], (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    blank = Column([None] * ROWS)
    lengths = torch.linspace(shortest, PROMPT, ROWS).round().long()
    mask = torch.arange(PROMPT) >= PROMPT - lengths[:, None]
    rows = torch.arange(ROWS)
    return Prompts(
        tokens=tokens * mask,
        attention_mask=mask,
        row_ids=rows,
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
    )


def seconds(
    fns: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Times of each function by the clock, taken in turn after one untimed round."""
    results: dict[str, list[float]] = {name: [] for name in fns}
    for turn in range(repeats + 1):
        for name, fn in fns.items():
            start = clock()
            fn()
            if turn:
                results[name].append(clock() - start)
    return results


def engines(size: str, shortest: int = PROMPT, clock: Callable[[], float] = time.perf_counter) -> None:
    """Tokens per second of each engine, by the clock."""
    model, params = make(size)
    prompts, sampling = prompts_of(size, shortest), Sampling(max_tokens=NEW)
    repeats = 2 if size == "110M" else 3
    module = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    module.load_state_dict(params, strict=False)
    asked = {"do_sample": True, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, "top_k": 0}
    embedded = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0)
    in_cpp = attrs.evolve(embedded, kernels=Kernels.named(decode_attention="cpp"))
    by_onednn = attrs.evolve(embedded, kernels=Kernels.named(decode_attention="cpp", linear="onednn"))
    layers = dict.fromkeys(("rms_norm", "add_rms_norm", "rotary", "glu"), "cpp")
    as_in_runs = attrs.evolve(embedded, kernels=Kernels.named(**layers, decode_attention="cpp", linear="onednn"))
    fns: dict[str, Callable[[], Any]] = {
        "model.generate": lambda: module.generate(prompts.tokens, attention_mask=prompts.attention_mask, **asked),
        "embedded": lambda: embedded.generate(params, Ask(prompts, sampling, Key(1))),
        "embedded, cpp": lambda: in_cpp.generate(params, Ask(prompts, sampling, Key(1))),
        "the same, onednn": lambda: by_onednn.generate(params, Ask(prompts, sampling, Key(1))),
        "all layers, too": lambda: as_in_runs.generate(params, Ask(prompts, sampling, Key(1))),
    }
    times = seconds(fns, repeats, clock)
    with VllmEngine(model, pad_token_id=0) as engine:
        times |= seconds({"vllm": lambda: engine.generate(params, Ask(prompts, sampling, Key(1)))}, repeats, clock)
    count = sum(x.numel() for x in params.values())
    asked_of = f"{ROWS} rows, {shortest} to {PROMPT} prompt and {NEW} new tokens"
    print(f"{count / 1e6:.1f} M parameters, {asked_of}; tokens/s (median)")
    for name, values in times.items():
        print(f"{name:16s} {ROWS * NEW / statistics.median(values):8.0f}")
    if shortest == PROMPT and clock is time.perf_counter:
        with torch.no_grad():
            print(f"products alone   {ROWS * NEW / products(model, params):8.0f}")


def products(model: Model, params: Mapping[str, Tensor], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the products of the linear layers of `engines`: all prompts in one pass, then a token of each row at a
    time; each by the fastest of torch, oneDNN and oneDNN with packed weights, with weights as far from the cores as in
    a model."""
    weights = [x for name, x in params.items() if x.dim() == 2 and model.layer_of(name) is not None]
    head = params["model.embed_tokens.weight"]
    prefill = _product(ROWS * PROMPT, weights, clock) + _product(ROWS, [head], clock)
    return prefill + (NEW - 1) * _product(ROWS, [*weights, head], clock)


def _product(rows: int, weights: Sequence[Tensor], clock: Callable[[], float]) -> float:
    """Seconds of multiplying so many rows by each of the weights in turn, by the fastest way."""
    xs = {width: torch.randn(rows, width) for width in {x.shape[1] for x in weights}}
    ways = {"torch": (F.linear, weights), "onednn": (onednn, weights), "packed": (onednn, [*map(packed, weights)])}

    def every(linear: Callable[[Tensor, Tensor], Tensor], by: Sequence[Tensor]) -> None:
        for weight in by:
            linear(xs[weight.shape[1]], weight)

    times = seconds({name: partial(every, *way) for name, way in ways.items()}, 3, clock)
    return min(statistics.median(each) for each in times.values())


def overhead(size: str) -> None:
    """VllmEngine against `LLM.generate` of the same vLLM, taken in turn."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    model, params = make(size)
    prompts, sampling = prompts_of(size), Sampling(max_tokens=NEW)
    asked = [{"prompt_token_ids": row} for row in prompts.tokens.tolist()]
    with VllmEngine(model, pad_token_id=0) as engine:
        llm = engine._host._llm  # type: ignore[union-attr]

        def direct(**changes: Any) -> None:
            wanted = {"max_tokens": NEW, "ignore_eos": True, "detokenize": False, **changes}
            llm.reset_prefix_cache()
            llm.generate(asked, [SamplingParams(seed=i, **wanted) for i in range(ROWS)], use_tqdm=False)

        fns: dict[str, Callable[[], Any]] = {
            "fppo": lambda: engine.generate(params, Ask(prompts, sampling, Key(1))),
            "vLLM, with log-probs": lambda: direct(logprobs=0),
            "vLLM, none": lambda: direct(),
        }
        times = seconds(fns, 3 if size == "110M" else 12)
    base = times["vLLM, with log-probs"]
    print(f"{size}: tokens/s (best run); time over that of vLLM with log-probs: best runs, median of pairs")
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, base, strict=True))
        print(f"{name:22s} {ROWS * NEW / min(values):8.0f} {min(values) / min(base):7.3f} {ratio:7.3f}")


def peak_extra(fn: Callable[[], Any]) -> float:
    """MiB that this process' memory rose above its start while `fn` ran."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    fn()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    return next(int(row.split()[1]) for row in Path("/proc/self/status").read_text().splitlines() if name in row)


def sync(size: str, *, process: bool = False) -> None:
    """A sync of all weights, and what it consists of."""
    model, params = make(size)
    other = {name: torch.empty_like(x) for name, x in params.items()}
    bucket = 64 * MIB
    options = VllmOptions(host="process" if process else "local")
    with VllmEngine(model, pad_token_id=0, options=options, bucket_bytes=bucket, probe="never") as engine:
        fns: dict[str, Callable[[], Any]] = {
            "copy of the bytes": lambda: [other[name].copy_(x) for name, x in params.items()],
            "fppo sync": lambda: engine.sync(params, version=1),
        }
        if not process:
            llm = engine._host._llm  # type: ignore[union-attr]
            fns[LOAD] = lambda: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(params.items())})
        times = {name: statistics.median(values) for name, values in seconds(fns, 15).items()}
        peaks = {} if process else {name: peak_extra(fns[name]) for name in ("fppo sync", LOAD)}
    num_bytes = sum(x.nbytes for x in params.values())
    print(f"{size}: {num_bytes / MIB:.0f} MiB of weights, buckets of {bucket / MIB:.0f} MiB; seconds, medians")
    for name, value in times.items():
        print(f"{name:20s} {value:7.3f}")
    if not process:
        print(f"sync / (copy + load) {times['fppo sync'] / (times['copy of the bytes'] + times[LOAD]):7.2f}")
    for name, value in peaks.items():
        print(f"peak extra memory of {name}: {value:.0f} MiB")


if __name__ == "__main__":
    what, chosen, *asked = sys.argv[1:]
    if what == "process":
        sync(chosen, process=True)
    elif what == "engines":
        own_clock = time.process_time if "processor" in asked else time.perf_counter
        engines(chosen, *(int(x) for x in asked if x.isdecimal()), clock=own_clock)
    else:
        {"overhead": overhead, "sync": sync}[what](chosen)
