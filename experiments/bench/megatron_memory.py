"""What `megatron.py` shows of memory: that of an update on each rank of an axis, beside `fppo plan`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from bench_tools import header, row  # beside this file
from transformers import PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from fppo.runtime.mesh import Mesh
from fppo.studies.plan import passes
from fppo.studies.plan.case import Case, hardware_of, problems
from fppo.studies.plan.measured import loads_of, measured
from fppo.studies.plan.track import Phase, peak_of
from fppo_kernels.collectives import Axis, all_gather

WIDTH, LEAST, VOCABULARY = 192, 4, 8192  # LEAST: layers, heads and experts, if no more ranks need them
KINDS = ("state", "gradients")  # parameters and both moments; all else is what a pass holds
UPDATE = "update actor"


def config(axis: str, ranks: int) -> PreTrainedConfig:
    """A Qwen2 of 4 M parameters; for the expert axis a mixture."""
    count = max(LEAST, ranks)
    shape: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=count,
        num_attention_heads=count,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    if axis != "expert":
        return Qwen2Config(**shape)
    return Qwen3MoeConfig(**shape, num_experts=count, num_experts_per_tok=2, moe_intermediate_size=WIDTH)


def case_of(name: str, ranks: int, planned: int) -> Case:
    """An update on an axis of that name, as its rank `planned` of a pipeline runs it: others are planned as one."""
    return Case(
        name=name,
        config=config(name, ranks),
        hardware=hardware_of("cpu"),
        mesh={name: ranks},
        pipeline_rank=planned if name == "pipeline" else 0,
        tokens=1024,
        length=256,
        compute_dtype=None,
        full=True,
    )


def parts(phases: Sequence[Phase]) -> list[float]:
    """MiB where most is held: all, and those of KINDS."""
    peak = peak_of(phases)[1]
    return [x / 2**20 for x in (peak.total, *(peak.peak.get(kind, 0) for kind in KINDS))]


def show_memory(axis: Axis) -> None:
    """A line for each rank of each axis, on rank 0: MiB of the tensors that live where most do, planned and counted;
    planned for experts of the load that is counted beside, over the mean of the ranks."""
    if axis.rank == 0:
        print(header("memory, MiB", "rank", "load", "planned", "counted", "difference", "state", "gradients", "others"))
    for name, rank in itertools.product(("tensor", "pipeline", "context", "expert"), range(axis.size)):
        case, mesh = case_of(name, axis.size, rank), Mesh({name: axis})
        if name == "expert":
            case = attrs.evolve(case, load=loads_of(case, UPDATE, mesh)[rank])
        counted = parts(measured(case, UPDATE, mesh))  # all ranks run the same passes, as many as tell of the planned
        plan = parts(passes.run_stage(case, UPDATE))[0] if not problems(case) and axis.rank == 0 else 0.0
        every = all_gather(torch.tensor([counted], dtype=torch.float64), axis).tolist()
        if axis.rank == 0:
            total, state, gradients = every[rank]
            beside = (f"{plan:.1f}", f"{total:.1f}", f"{plan / total - 1:+.1%}") if plan else ("-", f"{total:.1f}", "-")
            rest = (f"{x:.1f}" for x in (state, gradients, total - state - gradients))
            load = f"{case.load:.3f}" if name == "expert" else ""
            print(row(name, str(rank), load, *beside, *rest), flush=True)
