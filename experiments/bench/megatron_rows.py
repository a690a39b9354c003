"""What `megatron.py` shows of the axes whose ranks share out tokens: context and expert."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import attrs
import torch
import torch.distributed as dist
from bench_tools import header, row  # beside this file
from torch import Tensor
from transformers import LlamaConfig, Qwen3MoeConfig

from fppo import models
from fppo.key import Key
from fppo.models.routing import Routes
from fppo.runtime.mesh import Mesh, gradient_sum
from fppo.runtime.watch import watched
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.collectives import Axis, all_gather
from fppo_kernels.context import BLOCKS, deal, gathered_attention
from fppo_kernels.padding import make_lengths

LENGTHS = (3500, 300, 296)  # 4,096 tokens, most of them of one sequence
TOKENS, HIDDEN, EXPERTS, CHOSEN, LAYERS = 512, 256, 8, 2, 4  # on an expert axis: tokens of a rank, experts at least


def seconds_of(step: Callable[[], object]) -> float:
    """On the processor, of this thread: what waits for another rank, or for its turn on the machine, is not counted."""
    start = time.thread_time()
    step()
    return time.thread_time() - start


def medians(steps: list[Callable[[], object]], repeats: int, axis: Axis) -> list[list[float]]:
    """Of each step, run in turn, the seconds of every rank."""
    runs: list[list[float]] = [[] for _ in steps]
    for number in range(repeats + 1):
        for step, kept in zip(steps, runs, strict=True):
            dist.barrier()
            taken = seconds_of(step)
            kept += [taken] if number else []  # the first one warms up
    own = torch.tensor([statistics.median(kept) for kept in runs])
    return all_gather(own[None], axis).T.tolist()


def context_step(axis: Axis, blocks: int, length: int) -> Callable[[], object]:
    """The gradient of a Llama on a row that is dealt in as many blocks for each rank."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(LENGTHS),
    )
    model = models.build(config)
    leaves = {n: x.requires_grad_() for n, x in models.init_params(model, Key(0), torch.float32).items()}
    inner = [x for name, x in leaves.items() if name.startswith(model.prefix)]
    dealt = deal(LENGTHS, axis.size, blocks=blocks)
    attend = models.packed_attention(gathered_attention(sdpa, dealt, axis), make_lengths(LENGTHS))
    own = dealt.places[axis.rank]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[own]
    tokens = torch.randint(2, 512, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))[own]

    def step() -> object:
        hidden = models.hidden_states(model, leaves, tokens, positions, attend=attend)
        return torch.autograd.grad(hidden.square().sum(), inner)

    return step


def show_context(axis: Axis, repeats: int) -> None:
    """One line for each number of blocks, on rank 0."""
    found = medians([context_step(axis, blocks, sum(LENGTHS)) for blocks in BLOCKS], repeats, axis)
    if axis.rank:
        return
    print(header("context", "work, max/mean", "seconds, max/mean", "fullest rank"))
    for blocks, taken in zip(BLOCKS, found, strict=True):
        work = deal(LENGTHS, axis.size, blocks=blocks).uneven
        uneven, most = max(taken) / statistics.mean(taken), 1e3 * max(taken)
        print(row(f"blocks of a rank: {blocks}", f"{work:.2f}", f"{uneven:.2f}", f"{most:.0f} ms"), flush=True)


def experts_pass(mesh: Mesh) -> tuple[Callable[[], dict[str, Tensor]], Mesh]:
    """This rank's share of the gradient of a Qwen3-MoE, on a row of its own whose routers choose all experts equally
    often; and the mesh on which shares add up."""
    experts = max(EXPERTS, dist.get_world_size())
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        moe_intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=experts,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=TOKENS,
    )
    whole = models.build(config)
    model = models.place(whole, mesh)
    params = models.own_params(model, models.init_params(whole, Key(0), torch.float32), mesh)
    leaves = {n: x.requires_grad_() for n, x in params.items() if n.startswith(model.prefix)}
    attend = models.packed_attention(sdpa, make_lengths([TOKENS]))
    positions, chosen = torch.arange(TOKENS), torch.arange(TOKENS * CHOSEN) % experts
    tokens = torch.randint(2, 512, (TOKENS,), generator=torch.Generator().manual_seed(dist.get_rank()))
    again = chosen.view(TOKENS, 1, CHOSEN).repeat(1, LAYERS, 1)

    def shares() -> dict[str, Tensor]:
        hidden = models.hidden_states(model, leaves, tokens, positions, attend=attend, routes=Routes(again))
        return dict(zip(leaves, torch.autograd.grad(hidden.square().sum(), list(leaves.values())), strict=True))

    return shares, attrs.evolve(mesh, layout=model.layout)


def show_experts(axis: Axis, repeats: int) -> None:
    """Bytes beside the formula, and the time beside that of ranks each of which has every expert, on rank 0."""
    mesh, watch = watched(Mesh({"expert": axis}))
    shares, on_experts = experts_pass(mesh)
    plain, on_data = experts_pass(Mesh({"replicate": axis}))
    before = watch.traffic()["expert"]
    shares()
    sent = watch.traffic()["expert"].since(before).bytes / LAYERS
    steps: list[Callable[[], object]] = [
        lambda: gradient_sum(shares(), on_experts),
        lambda: gradient_sum(plain(), on_data),
    ]
    cut, every = (max(taken) for taken in medians(steps, repeats, axis))
    if axis.rank:
        return
    part = (axis.size - 1) / axis.size
    rows, counts = (
        2 * (2 * CHOSEN * TOKENS * HIDDEN * part * 4),
        8 * max(EXPERTS, axis.size) * part,
    )  # forward and backward; once
    print(
        header("expert", "bytes of a layer, without counts", "2 (2 k N H (e - 1) / e)", "cut", "all on each", "ratio")
    )
    seconds = (f"{1e3 * cut:.0f} ms", f"{1e3 * every:.0f} ms", f"{cut / every:.2f}")
    print(row("gradient, fullest rank", f"{sent - counts:,.0f}", f"{rows:,.0f}", *seconds), flush=True)
