"""The axes that cut models and rows, in real gloo processes: tensor and pipeline beside torch's own, what context and
expert axes send and take, and the memory of each beside `fppo plan`.

    python experiments/bench/megatron.py              # 2 processes; --ranks 4 for four
    python experiments/bench/megatron.py --only pipeline --repeats 21

One Llama, float32, one thread a process: all sides run in the same processes, in turn, and the lines show medians: of
the slowest rank's seconds, and of the ranks' mean seconds on the processor, which other programs on the machine disturb
less. "tensor" is a model that `models.place` has cut, beside the same transformers model under DTensor's plan with
sequence parallelism (norms and residuals on slices of the tokens); both give the gradient of the sum of squares of the
last hidden states. "1F1B" and "interleaved" are `pipeline_value_and_grad` with our schedules, beside the same schedules
of torch.distributed.pipelining on modules of transformers' layers. The gradients are compared before they are timed.
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
from fppo.runtime.schedule import one_f_one_b
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.collectives import Axis, all_gather
from fppo_kernels.padding import make_lengths

WIDTH, INNER, LAYERS, HEADS, VOCABULARY = 256, 704, 8, 8, 512
TOKENS = 512  # of the row that tensor ranks share
MICRO = 256  # tokens of a micro-batch of a pipeline
SHOWN = ("tensor", "pipeline", "context", "expert", "memory")
Step = Callable[[], dict[str, Tensor]]  # one gradient: what this rank has of it, by whole names
Whole = Callable[[dict[str, Tensor]], dict[str, Tensor]]  # whole gradients of what a rank has


def llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )


def plain(params: Params) -> LlamaModel:
    """transformers' own model with these parameters."""
    base = LlamaModel._from_config(llama(), attn_implementation="sdpa", dtype=torch.float32)
    base.load_state_dict({name.removeprefix("model."): x for name, x in params.items() if name.startswith("model.")})
    return base


def tokens_of(seed: int, count: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def our_tensor(params: Params, axis: Axis) -> tuple[Step, Whole]:
    mesh = Mesh({"tensor": axis})
    model = models.place(models.build(llama()), mesh)
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
    base, mesh = plain(params), init_device_mesh("cpu", (axis.size,))
    plan: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    for number in range(LAYERS):
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
    model = models.place(models.build(llama()), mesh)
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
        self.norm = base.norm if layers.stop == LAYERS else None
        self.rotary_emb = base.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embed_tokens is None else self.embed_tokens(x)
        positions = torch.arange(MICRO)[None]
        angles = self.rotary_emb(hidden, positions)
        for layer in self.layers.values():
            hidden = layer(hidden, position_embeddings=angles, position_ids=positions)
        return hidden if self.norm is None else self.norm(hidden)


def torch_pipeline(params: Params, axis: Axis, micros: int, virtual: int) -> Step:
    base, count = plain(params), axis.size * virtual
    cuts = layer_spans(models.build(llama()), count)
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


def compare(name: str, ours: Step, peer: Step, axis: Axis, repeats: int, whole: Whole = dict) -> None:
    """One line, on rank 0."""
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
    if axis.rank == 0:
        (mine, own), (theirs, others) = (torch.stack(kept).median(0).values.tolist() for kept in runs)
        ratios = (torch.stack(runs[0]) / torch.stack(runs[1])).median(0).values.tolist()
        print(
            f"{name:28s}{1e3 * mine:10.0f} ms{1e3 * theirs:10.0f} ms{ratios[0]:8.2f}"
            f"{1e3 * own:10.0f} ms{1e3 * others:10.0f} ms{ratios[1]:8.2f}{difference:12.1e}",
            flush=True,
        )


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
    params = models.init_params(models.build(llama()), Key(0), torch.float32)
    if axis.rank == 0:
        print(f"\n{'':28s}{'by the clock':>34}{'on the processor':>34}")
        print(f"{which:28s}" + f"{'ours':>13}{'torch':>13}{'ratio':>8}" * 2 + f"{'gradients':>12}")
    if which == "tensor":
        tensor, whole = our_tensor(params, axis)
        compare("gradient", tensor, torch_tensor(params, axis), axis, repeats, whole)
        return
    for micros, virtual in ((2 * axis.size, 1), (4 * axis.size, 1), (2 * axis.size, 2)):
        name = f"{'1F1B' if virtual == 1 else 'interleaved'}, {micros} micro-batches"
        ours, peer = (make(params, axis, micros, virtual) for make in (our_pipeline, torch_pipeline))
        compare(name, ours, peer, axis, repeats)


def on_rank(rank: int, ranks: int, repeats: int, only: Sequence[str], place: str) -> None:
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
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=SHOWN, choices=SHOWN)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    run = partial(on_rank, ranks=options.ranks, repeats=options.repeats, only=options.only, place=str(Path(mkdtemp())))
    mp.start_processes(run, nprocs=options.ranks, start_method="spawn")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
