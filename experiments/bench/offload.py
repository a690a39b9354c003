"""What the device holds at most, by kind, and what a step takes, with and without state and activations on the host.

    python experiments/bench/offload.py

The device is the CPU here, and so is the host: a lane marks which memory is whose, and every tensor that an operation
makes is counted for as long as it lives. The seconds are those of plain copies in one memory; over PCIe, beside the
work, they are others.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from ppo_step import experience_of, prompts_of, qwen
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fppo import batch as batches
from fppo import losses, models, tree
from fppo.key import Key
from fppo.runtime import offload
from fppo.runtime.mapped import to_files
from fppo.runtime.offload import Lane
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.host_step import HostStep, on_host
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from fppo_kernels.adamw import adamw_

CPU = torch.device("cpu")
PARAMETERS, MOMENTS, SAVED, REST, HOST = "parameters", "moments", "saved", "the rest", "host"
KINDS = (PARAMETERS, MOMENTS, SAVED, REST)
FILES = ("moments", "files")


class Memory(TorchDispatchMode):
    """The bytes alive by kind, and what they were when those of the device were most: in passes, and in AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self._kind, self._known = REST, {}
        self.live: Counter[str] = Counter()
        self.phase = 0
        self.peaks: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(out, self._kind)
        return out

    def hold(self, values: Any, kind: str) -> None:
        """The tensors of a tree are of this kind, unless they are known already."""
        for x in pytree.tree_leaves(values):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._known:
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self._known[key] = weakref.ref(storage, partial(self._freed, key, kind, size))
                self.live[kind] += size
        peak = self.peaks[self.phase]
        if total(self.live) > total(peak):
            peak.clear()
            peak.update(self.live)

    def stepping(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """The AdamW kernel, in which peaks are counted apart."""

        def run(*args: Any, **keywords: Any) -> None:
            self.phase = 1
            kernel(*args, **keywords)
            self.phase = 0

        return run

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """What is made inside is of this kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def _freed(self, key: int, kind: str, size: int, _: Any) -> None:
        del self._known[key]
        self.live[kind] -= size


def total(live: Counter[str]) -> int:
    """Those of the device."""
    return sum(live[kind] for kind in KINDS)


class Counted(Lane):
    """A lane that tells what it fetches, and for what."""

    def __init__(self, memory: Memory, kind: str) -> None:
        super().__init__(CPU)
        self._memory, self._kind = memory, kind

    def host_like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        with self._memory.making(HOST):
            return super().host_like(x, dtype)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        with self._memory.making(self._kind):
            return super().fetch(tensors)


def main() -> None:
    """Prints one line for each way to run the same update, and one for each way to run the reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=16, help="moments in a bucket")
    parser.add_argument("--window-mib", type=int, default=32, help="saved activations on their way")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = models.build(qwen(options.width, options.layers, options.vocabulary))
    params = models.init_params(model, Key(0))
    batch = experience_of(prompts_of(options.vocabulary), options.vocabulary, 0.5)
    batch = batches.rows(batch, range(options.rows))
    count, tokens = sum(x.numel() for x in params.values()), int(batch.attention_mask.sum())
    print(
        f"{count / 1e6:.1f} M float32 parameters, {tokens} tokens, torch {torch.__version__}, "
        f"{options.threads} thread(s)"
    )
    print(
        f"buckets of {options.bucket_mib} MiB, a window of {options.window_mib} MiB; MiB on the device at the peaks of"
    )
    print(f"{'':<44}{'passes':>8}" + "".join(f"{kind:>12}" for kind in KINDS) + f"{'AdamW':>9}{MOMENTS:>9}{'s':>8}")
    sizes = {"bucket": options.bucket_mib << 20, "window": options.window_mib << 20}
    for again in (False, True):
        which = attrs.evolve(model, checkpoint_layers=again)
        for kinds in ((), ("moments",), ("moments", "params"), ("moments", "params", "activations"), ("step",)):
            name = ", ".join(kinds) or "nothing"
            step = partial(update_once, which, params, batch, kinds, **sizes)
            report(f"update{', again' if again else ''}: {name}", step, options.repeats)
    narrow = attrs.evolve(model, compute_dtype=torch.bfloat16)
    for kinds in ((), ("moments",), ("step",)):
        step = partial(update_once, narrow, params, batch, kinds, **sizes)
        report(f"update in bfloat16: {', '.join(kinds) or 'nothing'}", step, options.repeats)
    turns = [
        [update_once(model, params, batch, kinds, None, **sizes) for kinds in (("moments",), ("step",), FILES)]
        for _ in range(options.repeats)
    ]
    for place, name in enumerate(("step", "moments in files"), start=1):
        ratios = [turn[place] / turn[0] for turn in turns]
        print(f"{name} over moments, in turn: {statistics.median(ratios):.2f}")
    for how in ("nothing", "params", "params by layer"):
        report(f"log-probs: {how}", partial(reference_once, model, params, batch, how), options.repeats)


def report(name: str, run: Callable[[Memory | None], float], repeats: int) -> None:
    """Counts one run and times others."""
    memory = Memory()
    run(memory)
    seconds = statistics.median(run(None) for _ in range(repeats))
    passes, step = memory.peaks
    numbers = [total(passes), *(passes[kind] for kind in KINDS), total(step), step[MOMENTS]]
    widths = (8, 12, 12, 12, 12, 9, 9)
    shown = "".join(f"{number / 2**20:>{width}.0f}" for number, width in zip(numbers, widths, strict=True))
    print(f"{name:<44}{shown}{seconds:>8.2f}", flush=True)


def lane_of(memory: Memory | None, kind: str) -> Lane:
    """A lane that counts, or a plain one."""
    return Lane(CPU) if memory is None else Counted(memory, kind)


def timed(run: Callable[[], Any], memory: Memory | None) -> float:
    """Seconds."""
    start = time.perf_counter()
    with memory or contextlib.nullcontext():
        run()
    return time.perf_counter() - start


def update_once(
    model: Any, params: Any, batch: Any, kinds: Sequence[str], memory: Memory | None, *, bucket: int, window: int
) -> float:
    """One donated update in one micro-batch, of a fresh state."""
    kernel = adamw_
    if "moments" in kinds:
        kernel = offload.offloaded_adamw(kernel, lane_of(memory, MOMENTS), bucket_bytes=bucket)
    if memory is not None:
        kernel = memory.stepping(kernel)
    lane = lane_of(memory, PARAMETERS)
    optimizer = adamw(lambda step: 1e-5, kernel=kernel)
    if "step" in kinds:
        kinds = ("moments", "params", "step")
        optimizer = on_host(lambda wrap: adamw(lambda step: 1e-5, kernel=wrap(kernel)), lane, bucket_bytes=bucket)
    state = init_state(tree.copy(params), optimizer)
    if memory is not None:
        memory.hold(state.params, HOST if "params" in kinds else PARAMETERS)
        memory.hold(state.opt, HOST if "moments" in kinds else MOMENTS)
        memory.hold(batch, HOST)
    rows = len(batch.tokens)
    step = UpdateActor(
        forward=Forward(model),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=rows, micro_batching=MicroBatching(size=rows)),
        optimizer=optimizer,
    )
    if "files" in kinds:
        state = tree.replace(state, opt=to_files(state.opt, Path(tempfile.gettempdir()), setting="TMPDIR"))
    if "activations" in kinds:
        step = offload.HostActivations(step, lane_of(memory, SAVED), minimum_bytes=1 << 16, window_bytes=window)
    if "step" in kinds:
        step = HostStep(step, lane, Forward(model))
    elif "params" in kinds:
        step = offload.Offloaded(step, lane)
    return timed(lambda: step(state, batch, donate=True), memory)


def reference_once(model: Any, params: Any, batch: Any, how: str, memory: Memory | None) -> float:
    """Log-probs in one micro-batch."""
    if memory is not None:
        memory.hold(params, PARAMETERS if how == "nothing" else HOST)
        memory.hold(batch, HOST)
    lane, forward = lane_of(memory, PARAMETERS), Forward(model)
    compute = offload.by_layer(compute_log_probs, lane) if how == "params by layer" else compute_log_probs
    micro = MicroBatching(size=len(batch.tokens))

    def run() -> Any:
        own = offload.to_device(params, lane) if how == "params" else params
        return compute(own, batch, forward=forward, micro_batching=micro)

    return timed(run, memory)


if __name__ == "__main__":
    main()
