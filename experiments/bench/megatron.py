"""The axes that cut models and rows, in real gloo processes: tensor and pipeline beside torch's own, what context and
expert axes send and take, and the memory of each beside `fppo plan`.

    python experiments/bench/megatron.py                     # 2 processes; --ranks 4, 8 or 16 for as many
    python experiments/bench/megatron.py --ranks 4 --cores 0 2 4 6 --only pipeline --repeats 21

Each process is pinned to a core of its own, if there are as many: the first that this program may run on, or `--cores`,
which on a processor with two threads a core should name one of each. The tables are Markdown.

One Llama, float32, one thread a process: all sides run in the same processes, in turn, and the lines show medians: of
the slowest rank's seconds, and of the ranks' mean seconds on the processor, which other programs on the machine disturb
less. What these are short of the slowest rank's seconds is the share in which a rank is "idle", beside that of the
schedule, (p - 1) / (v m + p - 1); it is true only on an idle machine with a core for each rank. "tensor" is a model
that `models.place` has cut, beside the same transformers model under DTensor's plan with sequence parallelism (norms
and residuals on slices of the tokens); both give the gradient of the sum of squares of the last hidden states. "1F1B"
and "interleaved" are `pipeline_value_and_grad` with our schedules, beside the same schedules of
torch.distributed.pipelining on modules of transformers' layers. The gradients are compared before they are timed.
"context" is the gradient of a row that is dealt to the ranks, by the work that they get; "expert" that of a mixture
whose routers choose all experts equally often, beside the same where each rank has all of them. "memory" is counted
from the tensors that live in an update of the actor.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from bench_tools import header, row
from megatron_memory import show_memory  # beside this file
from megatron_rows import show_context, show_experts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaModel

from fppo import models
from fppo.key import Key
from fppo.models.model import Params
from fppo.models.spans import layer_spans
from fppo.runtime.mesh import Mesh, gradient_sum
from fppo.runtime.pipeline import Wire, pipeline_value_and_grad
from fppo.runtime.schedule import clocked, one_f_one_b
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.collectives import Axis, all_gather
from fppo_kernels.padding import make_lengths

WIDTH, INNER, LEAST, VOCABULARY = 256, 704, 8, 512  # LEAST: layers and heads, if no more ranks need them
TOKENS = 512  # of the row that tensor ranks share
MICRO = 256  # tokens of a micro-batch of a pipeline
SHOWN = ("tensor", "pipeline", "context", "expert", "memory")
Step = Callable[[], dict[str, Tensor]]  # one gradient: what this rank has of it, by whole names
Whole = Callable[[dict[str, Tensor]], dict[str, Tensor]]  # whole gradients of what a rank has


def llama(ranks: int) -> LlamaConfig:
    """With a head for each rank, and layers for two stages on each."""
    heads = max(LEAST, ranks)
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=max(LEAST, 2 * ranks),
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )


def plain(params: Params, ranks: int) -> LlamaModel:
    """transformers' own model with these parameters."""
    base = LlamaModel._from_config(llama(ranks), attn_implementation="sdpa", dtype=torch.float32)
    base.load_state_dict({name.removeprefix("model."): x for name, x in params.items() if name.startswith("model.")})
    return base


def tokens_of(seed: int, count: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def our_tensor(params: Params, axis: Axis) -> tuple[Step, Whole]:
    mesh = Mesh({"tensor": axis})
    model = models.place(models.build(llama(axis.size)), mesh)
    own = models.own_params(model, params, mesh)
    mesh = Mesh({"tensor": axis}, layout=model.layout)
    tokens, positions = tokens_of(0, TOKENS), torch.arange(TOKENS)
    attend = models.packed_attention(sdpa, make_lengths([TOKENS]))

    def step() -> dict[str, Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in own.items()}
        hidden = models.hidden_states(model, leaves, tokens, positions, attend=attend)
        inner = {name: x for name, x in leaves.items() if name.startswith("model.")}
        grads = torch.autograd.grad(hidden.square().sum(), list(inner.values()))
        return gradient_sum(dict(zip(inner, grads, strict=True)), mesh)

    return step, lambda grads: models.whole_params(model, grads, mesh)


def torch_tensor(params: Params, axis: Axis) -> Step:
    base, mesh = plain(params, axis.size), init_device_mesh("cpu", (axis.size,))
    plan: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    for number in range(len(base.layers)):
        at = f"layers.{number}"
        plan |= {
            f"{at}.input_layernorm": SequenceParallel(),
            f"{at}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
                use_local_output=True,
            ),
            f"{at}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{at}.post_attention_layernorm": SequenceParallel(),
            f"{at}.mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            ),
            f"{at}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        plan |= {f"{at}.self_attn.{x}_proj": ColwiseParallel() for x in "qkv"}
        plan |= {f"{at}.mlp.{x}_proj": ColwiseParallel() for x in ("gate", "up")}
    parallelize_module(base, mesh, plan)
    tokens, positions = tokens_of(0, TOKENS)[None], torch.arange(TOKENS)[None]

    def step() -> dict[str, Tensor]:
        base.zero_grad()
        hidden = base(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        hidden.square().sum().backward()
        return {f"model.{name}": x.grad for name, x in base.named_parameters() if x.grad is not None}

    return step


def our_pipeline(params: Params, axis: Axis, micros: int, virtual: int) -> Step:
    mesh = Mesh({"pipeline": axis}, virtual_stages=virtual)
    model = models.place(models.build(llama(axis.size)), mesh)
    own = models.own_params(model, params, mesh)
    own = {name: x for name, x in own.items() if name.startswith("model.")}
    stages = [models.stage_of(model, number) for number in range(virtual)]
    schedule = one_f_one_b(axis.size, micros, virtual)
    positions = torch.arange(MICRO)
    attend = models.packed_attention(sdpa, make_lengths([MICRO]))
    tokens = [tokens_of(number, MICRO) for number in range(micros)]

    def fn(leaves: Params, stage: int, received: Tensor | None, micro: int) -> Any:
        placed = stages[stage // axis.size]
        hidden = models.hidden_states(placed, leaves, tokens[micro], positions, attend=attend, received=received)
        return hidden if stage < schedule.stages - 1 else (hidden.square().sum(), None)

    wire = Wire((MICRO, WIDTH), torch.float32, torch.device("cpu"))

    def step() -> dict[str, Tensor]:
        return pipeline_value_and_grad(fn, own, schedule, axis=axis, wires=lambda micro: wire)[1]

    return step


class Part(nn.Module):
    """Some layers of transformers' model, with the embeddings before the first and the norm behind the last."""

    def __init__(self, base: LlamaModel, layers: range) -> None:
        super().__init__()
        self.embed_tokens = base.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(number): base.layers[number] for number in layers})
        self.norm = base.norm if layers.stop == len(base.layers) else None
        self.rotary_emb = base.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embed_tokens is None else self.embed_tokens(x)
        positions = torch.arange(MICRO)[None]
        angles = self.rotary_emb(hidden, positions)
        for layer in self.layers.values():
            hidden = layer(hidden, position_embeddings=angles, position_ids=positions)
        return hidden if self.norm is None else self.norm(hidden)


def torch_pipeline(params: Params, axis: Axis, micros: int, virtual: int) -> Step:
    base, count = plain(params, axis.size), axis.size * virtual
    cuts = layer_spans(models.build(llama(axis.size)), count)
    parts = {number: Part(base, cuts[number]) for number in range(axis.rank, count, axis.size)}
    stages = [PipelineStage(part, number, count, torch.device("cpu")) for number, part in parts.items()]
    options: dict[str, Any] = {"loss_fn": lambda out, _: out.square().sum(), "scale_grads": False}
    schedule: Any = (
        Schedule1F1B(stages[0], micros, **options)
        if virtual == 1
        else ScheduleInterleaved1F1B([*stages], micros, **options)
    )
    every = torch.stack([tokens_of(number, MICRO) for number in range(micros)])

    def step() -> dict[str, Tensor]:
        for part in parts.values():
            part.zero_grad()
        inputs = (every,) if axis.rank == 0 else ()
        schedule.step(*inputs, target=every if axis.rank == axis.size - 1 else None)
        return {
            f"model.{n}": x.grad for part in parts.values() for n, x in part.named_parameters() if x.grad is not None
        }

    return step


def compare(
    name: str, ours: Step, peer: Step, axis: Axis, repeats: int, *, whole: Whole = dict, bubble: float | None = None
) -> None:
    """One line, on rank 0; of a pipeline whose ranks wait for `bubble` of their time by its schedule, with the share in
    which they did."""
    own, other = ours(), peer()
    if lost := sorted(set(own) - set(other)):
        raise ValueError(f"the peer has no gradient of {lost[:3]}")
    difference = torch.tensor(0.0)
    for key, x in whole(own).items():
        y = other[key]
        y = y.full_tensor() if isinstance(y, DTensor) else y
        difference = torch.maximum(difference, (x - y).abs().max() / y.abs().max())
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    runs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number in range(repeats + 1):
        for step, kept in zip((ours, peer), runs, strict=True):
            kept += [_seconds(step, axis)] if number else []  # the first one warms up
    if axis.rank:
        return
    mine, theirs = (torch.stack(kept) for kept in runs)  # [repeats, 2]
    cells: list[str] = []
    for column in (0, 1):  # by the clock, on the processor
        both = (1e3 * x[:, column].median().item() for x in (mine, theirs))
        ratio = (mine[:, column] / theirs[:, column]).median().item()
        cells += [*(f"{x:.0f} ms" for x in both), f"{ratio:.2f}"]
    if bubble is not None:
        idle = ((1 - x[:, 1] / x[:, 0]).median().item() for x in (mine, theirs))
        cells += [f"{x:.1%}" for x in (*idle, bubble)]
    print(row(name, *cells, f"{difference:.0e}"), flush=True)


def _seconds(step: Step, axis: Axis) -> Tensor:
    """Of the slowest rank by the clock, and of the ranks' mean on the processor, in the thread that computes."""
    dist.barrier()
    start, busy = time.perf_counter(), time.thread_time()
    step()
    found = torch.tensor([time.perf_counter() - start, time.thread_time() - busy], dtype=torch.float64)
    clock, busy = all_gather(found[None], axis).unbind(1)
    return torch.stack([clock.max(), busy.mean()])


def show_torch(axis: Axis, repeats: int, which: str) -> None:
    """The lines of one axis beside torch's own, on rank 0."""
    params = models.init_params(models.build(llama(axis.size)), Key(0), torch.float32)
    if axis.rank == 0:
        timed = [f"{side}, {clock}" for clock in ("clock", "processor") for side in ("ours", "torch", "ratio")]
        idle = ["ours, idle", "torch, idle", "schedule, idle"] if which == "pipeline" else []
        print(header(which, *timed, *idle, "gradients differ by"))
    if which == "tensor":
        tensor, whole = our_tensor(params, axis)
        compare("gradient", tensor, torch_tensor(params, axis), axis, repeats, whole=whole)
        return
    for micros, virtual in ((2 * axis.size, 1), (4 * axis.size, 1), (2 * axis.size, 2)):
        name = f"{'1F1B' if virtual == 1 else 'interleaved'}, {micros} micro-batches"
        ours, peer = (make(params, axis, micros, virtual) for make in (our_pipeline, torch_pipeline))
        bubble = clocked(one_f_one_b(axis.size, micros, virtual)).bubble
        compare(name, ours, peer, axis, repeats, bubble=bubble)


def on_rank(rank: int, cores: Sequence[int], repeats: int, only: Sequence[str], place: str, ranks: int) -> None:
    if cores:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=ranks)
    axis = Axis(ranks, rank, dist.group.WORLD)
    for which in only:
        match which:
            case "context":
                show_context(axis, repeats)
            case "expert":
                show_experts(axis, repeats)
            case "memory":
                show_memory(axis)
            case _:
                show_torch(axis, repeats, which)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8, 16))
    parser.add_argument("--cores", type=int, nargs="+", help="one for each rank; the first there are, if left out")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=SHOWN, choices=SHOWN)
    options = parser.parse_args()
    ranks, there = options.ranks, sorted(os.sched_getaffinity(0))
    cores = options.cores or (there[:ranks] if len(there) >= ranks else [])
    if options.cores and (len(set(cores)) != ranks or not set(cores) <= set(there)):
        parser.error(f"--cores: give {ranks} different ones of {there}, one for each of --ranks {ranks}")
    os.environ["OMP_NUM_THREADS"] = "1"
    pinned = f"on cores {', '.join(map(str, cores))}" if cores else f"on {len(there)} cores between them"
    print(f"{ranks} ranks {pinned}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    place = str(Path(mkdtemp()))
    run = partial(on_rank, cores=cores, repeats=options.repeats, only=options.only, place=place, ranks=ranks)
    mp.start_processes(run, nprocs=ranks, start_method="spawn")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
