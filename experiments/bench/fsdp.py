"""A training step on shards beside torch's own fully_shard (FSDP2): seconds, bytes on the wire, and memory, as ratios.

    python experiments/bench/fsdp.py                              # 2 processes; --ranks 4 for four
    python experiments/bench/fsdp.py --sizes 50M --dtype bfloat16
    python experiments/bench/fsdp.py --ranks 1                    # beside the plain model: what the functions cost

Both sides train one Llama on the same rows (no padding) in gloo processes of one thread each: micro-batches, forward
and backward passes, gradients reduced in float32, clipping by the global norm, AdamW (torch's fused kernel). Their
steps run in turn in the same processes; medians of the slowest rank's seconds, and of the ranks' mean seconds on the
processor, which other programs on the machine disturb less. fully_shard wraps every layer and the root, and
reshards after the forward pass. "same kernel" has both take our naive log-probs, "as they are" each its own: ours the
chunked kernel; UpdateActor logs the entropy too, in either case. The peaks are of processes of their own that run one
side.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from fppo import batch as batches
from fppo import losses, models
from fppo.batch import Column, Experience
from fppo.key import Key
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.watch import Traffic, watched, wire_bytes
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.table import Kernels

SIZES = {
    "tiny": (128, 1, 512),
    "16M": (384, 6, 8192),
    "50M": (512, 8, 32000),
    "110M": (768, 12, 32000),
}  # width, layers, vocabulary
ROWS, LENGTH, MICRO = 4, 128, 2  # rows of a rank, tokens of a row, rows of a micro-batch
LR, CLIP = 1e-4, 1.0
# a word of the operator's name: the collective, and which argument is the whole
COLLECTIVES = {"gather": ("all_gather", 0), "scatter": ("reduce_scatter", 1), "allreduce": ("all_reduce", 0)}
Step = Callable[[], Any]


def llama(size: str) -> LlamaConfig:
    """A Llama with tied embeddings."""
    width, layers, vocabulary = SIZES[size]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2048 if width > 384 else 1024,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
    )


def rows_of(ranks: int, vocabulary: int, count: int = ROWS) -> Experience:
    """The rows of all ranks, so many each, whole: a prompt of one token, and a response."""
    draws = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    tokens = torch.cat([torch.randint(1, vocabulary, (count, LENGTH), generator=draw) for draw in draws])
    rows = len(tokens)
    blank, ones = Column([None] * rows), torch.ones(rows, LENGTH - 1)
    return Experience(
        tokens=tokens,
        attention_mask=torch.ones_like(tokens, dtype=torch.bool),
        response_mask=ones.bool(),
        rollout_log_probs=-ones,
        sampling_log_probs=-ones,
        row_ids=torch.arange(rows),
        groups=torch.arange(rows),
        versions=torch.zeros(rows, dtype=torch.int64),
        finish=blank,
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
        scores=torch.ones(rows),
        named_scores={},
        old_log_probs=-ones,
        token_rewards=ones,
        advantages=ones,
        returns=ones,
    )


def ours(mesh: Mesh, config: LlamaConfig, dtype: torch.dtype | None, kernel: str, rows: Experience) -> Step:
    """`UpdateActor` with the policy gradient of advantages 1: the sum of log-probs over all tokens of all ranks."""
    model = models.build(config, compute_dtype=dtype)
    optimizer = adamw(lambda step: LR, max_grad_norm=CLIP)
    states = [init_state(fsdp.shard(models.init_params(model, Key(0)), mesh), optimizer)]
    update = UpdateActor(
        forward=Forward(model, kernels=Kernels.named(log_probs=kernel), mesh=mesh),
        loss_fn=losses.gpg,
        loop=Loop(mini_batch_size=len(rows.tokens), micro_batching=MicroBatching(size=MICRO)),
        optimizer=optimizer,
        old_log_probs="update",
    )

    def step() -> float:
        state, report = update(states.pop(), rows, donate=True)
        states.append(state)
        return float(report["actor/grad_norm"].total)  # type: ignore[union-attr]

    return step


class Policy(nn.Module):
    """Log-probs of each token after the first; `fully_shard` gathers the head with the root."""

    def __init__(self, net: LlamaForCausalLM, naive: bool) -> None:
        super().__init__()
        self.net, self.naive = net, naive

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.net.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        if self.naive:  # with the entropy that UpdateActor logs
            return reference(hidden.flatten(0, 1), self.net.lm_head.weight, tokens[:, 1:].flatten(), entropy=True)[
                0
            ].clone()
        logits = self.net.lm_head(hidden).float()
        return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1).clone()  # it wants no views


def peer(ranks: int, config: LlamaConfig, dtype: torch.dtype | None, naive: bool, rows: Experience) -> Step:
    """The same with fully_shard, autograd and torch.optim.AdamW."""
    torch.manual_seed(0)
    model = models.build(config)
    net = LlamaForCausalLM(config)
    net.load_state_dict(models.init_params(model, Key(0)), strict=False)
    net.tie_weights()
    net.config._attn_implementation = "sdpa"
    policy, grid = Policy(net, naive), init_device_mesh("cpu", (ranks,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if ranks > 1:
        for layer in net.model.layers:
            fully_shard(layer, mesh=grid, reshard_after_forward=True, mp_policy=precision)
        fully_shard(policy, mesh=grid, mp_policy=precision)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    total = ranks * ROWS * (LENGTH - 1)

    def step() -> float:
        for part in rows.tokens.split(MICRO):
            (-policy(part).sum() * ranks / total).backward()  # fully_shard averages over ranks
        norm = nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    return step


class Sent(TorchDispatchMode):
    """Counts the bytes that collectives put on the wire."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.bytes = ranks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        for word, (op, place) in COLLECTIVES.items():
            if name.startswith("c10d::") and word in name:
                whole = args[place] if isinstance(args[place], Tensor) else args[place][0]
                self.bytes += wire_bytes(op, whole.numel() * whole.element_size(), self.ranks)
        return func(*args, **(kwargs or {}))


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def _trim() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def timed(step: Step) -> tuple[float, float]:
    """Seconds of the slowest rank, and the mean of the ranks' seconds on the processor, in all threads."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    step()
    seconds, busy = torch.tensor(time.perf_counter() - start), torch.tensor(time.process_time() - used)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(busy)
    return seconds.item(), busy.item() / dist.get_world_size()


def compare(mesh: Mesh, size: str, dtype: torch.dtype | None, repeats: int) -> dict[str, Any]:
    """Seconds and bytes of both sides, in turn, and that they do the same."""
    config, ranks = llama(size), mesh["shard"].size
    rows = rows_of(ranks, config.vocab_size)
    own = batches.rows(rows, range(mesh["shard"].rank * ROWS, (mesh["shard"].rank + 1) * ROWS))
    seen, watch = watched(mesh)
    results: dict[str, Any] = {}
    for variant, kernel in (("same kernel", "reference"), ("as they are", "chunked")):
        sides = {
            "ours": ours(seen, config, dtype, kernel, rows),
            "fully_shard": peer(ranks, config, dtype, kernel == "reference", own),
        }
        before = watch.traffic().get("shard", Traffic()).bytes
        norms = [sides["ours"]()]
        sent = {"ours": watch.traffic().get("shard", Traffic()).bytes - before}
        with Sent(ranks) as counted:
            norms.append(sides["fully_shard"]())
        sent["fully_shard"] = counted.bytes
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, step in sides.items():
                runs[name].append(timed(step))
        seconds, busy = ({name: statistics.median(r[i] for r in each) for name, each in runs.items()} for i in (0, 1))
        results[variant] = {"seconds": seconds, "busy": busy, "runs": runs, "bytes": sent, "grad_norm": norms}
        del sides
        _trim()
    return results


def peak(mesh: Mesh, side: str, size: str, dtype: torch.dtype | None) -> dict[str, float]:
    """MiB of one side at rest after a step, and at the peak of the next, beyond what the process had before."""
    config, rank, ranks = llama(size), mesh["shard"].rank, mesh["shard"].size
    rows = rows_of(ranks, config.vocab_size)
    _trim()
    before = _status("VmRSS")
    if side == "ours":
        step = ours(mesh, config, dtype, "reference", rows)
    else:
        step = peer(ranks, config, dtype, True, batches.rows(rows, range(rank * ROWS, (rank + 1) * ROWS)))
    step()
    _trim()
    rest = _status("VmRSS") - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    step()
    return {"rest": rest, "peak": _status("VmHWM") - before}


def _rank(rank: int, ranks: int, directory: str, work: Callable[[Mesh], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=ranks)
    mesh = Mesh.of(init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",)))
    results = work(attrs.evolve(mesh, sharding=Sharding()))
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, results)
    if rank == 0:
        Path(directory, "results.json").write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int, work: Callable[[Mesh], Any]) -> list[Any]:
    """What `work` finds on every rank."""
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(_rank, (ranks, directory, work), nprocs=ranks, start_method="spawn")  # type: ignore[attr-defined]
        return json.loads(Path(directory, "results.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["50M", "110M"], choices=SIZES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    dtype = None if options.dtype == "float32" else torch.bfloat16
    if options.ranks == 1 and dtype is not None:
        parser.error("one rank is held against the plain model, which computes in float32")
    rows: list[dict[str, Any]] = []
    print(f"{options.ranks} processes, {options.dtype}, torch {torch.__version__}")
    print(f"{'':<22}{'ours':>10}{'fully_shard':>13}{'ratio':>8}")
    for size in options.sizes:
        results = on_ranks(options.ranks, partial(compare, size=size, dtype=dtype, repeats=options.repeats))[0]
        for variant, numbers in results.items():
            _line(f"{size} {variant}", numbers["seconds"], "s")
            _line("    processor", numbers["busy"], "s")
        if options.ranks > 1:
            _line(f"{size} sent per step", {k: v / 2**20 for k, v in results["same kernel"]["bytes"].items()}, "MiB")
        peaks = {
            side: on_ranks(options.ranks, partial(peak, side=side, size=size, dtype=dtype))
            for side in ("ours", "fully_shard")
        }
        for what in ("rest", "peak"):
            _line(f"{size} memory, {what}", {side: max(e[what] for e in every) for side, every in peaks.items()}, "MiB")
        norms = results["same kernel"]["grad_norm"]
        print(f"{size} norm of the first gradient: {norms[0]:.6f} and {norms[1]:.6f}")
        rows.append({"size": size, "ranks": options.ranks, "dtype": options.dtype, **results, "peaks": peaks})
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


def _line(name: str, sides: dict[str, float], unit: str) -> None:
    a, b = sides["ours"], sides["fully_shard"]
    digits = 3 if unit == "s" else 0
    print(f"{name:<22}{a:>8.{digits}f} {unit}{b:>8.{digits}f} {unit}{a / b:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
