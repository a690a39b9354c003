"""The update of an adapter beside that of all weights, and both beside PEFT and plain torch: seconds and memory.

    python experiments/bench/adapters.py --size 16M                     # or tiny; --rank 1 8 32
    python experiments/bench/adapters.py --size 110M --rows 16 --micro 8 --threads 1
    python experiments/bench/adapters.py --size 1.5B --device cuda      # in bfloat16, weights and moments in float32
    python experiments/bench/adapters.py --rank 8 --base float nf4 int8 # on quantised bases, too (fppo[quantised])

Each side alone in turn, in one process, on equal weights and rows; medians, as a Markdown table. The peer's passes are
padded, in micro-batches of as many rows, with torch.optim.AdamW(fused=True) and clip_grad_norm_; on a GPU in bfloat16
by autocast, on a base in bfloat16; its quantised layers are bitsandbytes' own (Linear4bit; Linear8bitLt, which
quantises what goes in as well). The state is weights, factors and moments; the peak is that and what an update takes
beyond it. On a CPU that other programs use, compare the processor's seconds, by one thread.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
import torch
from bench_tools import Timing, median, once
from gpu_model import build, experience, parameters
from gpu_tools import FULL, TINY, Plan, Record, Shape, attempt, measure
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fppo import losses, models, tree
from fppo.batch import Experience
from fppo.key import Key
from fppo.models import Lora
from fppo.steps import Forward, Loop, MicroBatching, UpdateActor, adamw, init_state, schedule
from fppo_kernels import table as kernels
from fppo_kernels.table import Kernels

SIZES = {
    "tiny": TINY.model,
    "16M": Shape(384, 6, 6, 6, 1536, 8192),
    "110M": Shape(768, 12, 12, 12, 3072, 32768),
    "1.5B": FULL.model,
}
RATE = 1e-5


class Side(NamedTuple):
    """An update, and the bytes of what it keeps between updates, once it has run."""

    update: Callable[[], Any]
    state: Callable[[], int]


def plan_of(shape: Shape, device: torch.device) -> Plan:
    """64 rows of 64 and 128 tokens at most on a CPU, few of the tiny one; on a GPU 32 of 128 and 896."""
    if device.type == "cpu":
        return TINY if shape == TINY.model else TINY._replace(model=shape, rows=(64, 64, 128))
    return FULL._replace(model=shape, rows=(32, 128, 896), device=device)


def fastest(plan: Plan) -> Kernels:
    """The kernels for a GPU, where this is one that has them."""
    if plan.device.type == "cpu":
        return Kernels.named()
    wanted = {"attention": "varlen", "log_probs": "triton"}
    chosen = {op: kernels.get(op, name) for op, name in wanted.items() if name in kernels.available(op)}
    return attrs.evolve(Kernels.named(), **chosen)


def ours(plan: Plan, batch: Experience, micro: int, rank: int | None, kind: str = "float") -> Side:
    """An update of all weights, or of an adapter."""
    model = build(plan.model, plan)
    params, optimizer = parameters(model, plan.device), adamw(schedule("constant", RATE))
    if rank is not None:
        base = {name: x.to(plan.dtype) for name, x in params.items()}
        if kind == "int8" or kind == "nf4":
            model, base = models.quantise(model, base, kind)
        model, params = models.adapt(model, base, Lora(rank, 2.0 * rank), key=Key(1))
    frozen = {} if model.frozen is None else model.frozen.params
    held, forward = [init_state(params, optimizer)], Forward(model, kernels=fastest(plan))
    loop = Loop(mini_batch_size=len(batch.tokens), micro_batching=MicroBatching(size=micro))

    def update() -> None:
        state, held[:] = held[0], []
        held[:] = UpdateActor(forward=forward, loss_fn=losses.ppo_clip, loop=loop, optimizer=optimizer)(
            state, batch, donate=True
        )[:1]

    def state() -> int:
        leaves = [x for _, x in tree.leaves_with_paths(held[0])]
        return size_of(x for x in [*leaves, *frozen.values()] if isinstance(x, Tensor))

    return Side(update, state)


def peer(plan: Plan, batch: Experience, micro: int, rank: int | None, kind: str = "float") -> Side:
    """The same by torch, with PEFT's adapter or without one."""
    model = build(plan.model, plan)
    with plan.device:
        module: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.config), attn_implementation="sdpa", dtype=torch.float32
        )
    module.load_state_dict(parameters(model, plan.device), strict=False)
    if rank is not None:
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        module = module.to(plan.dtype)
        if kind != "float":
            quantise_layers(module, kind, plan)
        module = get_peft_model(module, config)  # type: ignore[arg-type]
    trained = [x for x in module.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, fused=True)
    attention = batch.attention_mask.long()
    positions, count = (attention.cumsum(1) - 1).clamp(min=0), batch.response_mask.sum()
    length = batch.response_mask.shape[1]

    def loss(s: slice) -> Tensor:
        out = module(input_ids=batch.tokens[s], attention_mask=attention[s], position_ids=positions[s])
        logs = F.log_softmax(out.logits[:, -length - 1 : -1].float(), -1)
        new = logs.gather(-1, batch.tokens[s, -length:, None])[..., 0]
        ratio, advantages = (new - batch.old_log_probs[s]).exp(), batch.advantages[s]
        worst = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
        return worst.where(batch.response_mask[s], 0.0).sum() / count

    def update() -> None:
        optimizer.zero_grad()
        for first in range(0, len(batch.tokens), micro):
            with torch.autocast(plan.device.type, plan.dtype, enabled=plan.dtype != torch.float32):
                part = loss(slice(first, first + micro))
            part.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def state() -> int:
        moments = (x for each in optimizer.state.values() for x in each.values() if isinstance(x, Tensor))
        return size_of([*module.parameters(), *moments])

    return Side(update, state)


def quantise_layers(module: nn.Module, kind: str, plan: Plan) -> None:
    """Puts bitsandbytes' layers in the places of all linear ones but the vocabulary head, as transformers does."""
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

    layers: Any = bnb.nn  # its stubs leave out what it exports

    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is not nn.Linear or name == "lm_head":
                continue
            sizes, bias = (child.in_features, child.out_features), child.bias is not None
            if kind == "nf4":
                layer: Any = layers.Linear4bit(
                    *sizes, bias=bias, compute_dtype=plan.dtype, compress_statistics=False, quant_type="nf4"
                )
                layer.weight = layers.Params4bit(
                    child.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4"
                )
            else:
                layer = layers.Linear8bitLt(*sizes, bias=bias, has_fp16_weights=False)
                layer.weight = layers.Int8Params(child.weight.data, requires_grad=False, has_fp16_weights=False)
            layer.bias = child.bias
            setattr(parent, name, layer.to(plan.device))


def size_of(tensors: Any) -> int:
    """Their bytes."""
    return sum(x.numel() * x.element_size() for x in tensors)


def time_side(make: Callable[[], Side], device: torch.device, repeats: int) -> Record:
    """Median seconds of an update, the bytes of the state, and the peak beyond it."""
    side = make()
    if device.type == "cpu":
        once(side.update, per=False)
        timing = median([once(side.update, per=False) for _ in range(repeats)])
    else:
        record = measure(side.update, device, repeats=repeats + 1, seconds=60.0)
        timing = Timing(record["seconds"], record["peak_mib"])
    state = side.state() / 2**20
    return {"seconds": timing.seconds, "processor": timing.processor, "state": state, "peak": state + timing.peak_mib}


def table(records: Sequence[Record]) -> str:
    """In Markdown; ratios to the first."""
    columns = ["", "seconds", "of all weights'", "of processors", "state, MiB", "peak, MiB", "of all weights'"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for r in records:
        if "absent" in r:
            lines.append(f"| {r['name']} | {r['absent']} | | | | | |")
            continue
        shares = [f"{r[key] / records[0][key]:.2f}" if key in records[0] else "" for key in ("seconds", "peak")]
        processor = f"{r['processor']:.3f}" if r["processor"] else ""  # of a GPU nobody counts it
        cells = [
            r["name"],
            f"{r['seconds']:.3f}",
            shares[0],
            processor,
            f"{r['state']:.0f}",
            f"{r['peak']:.0f}",
            shares[1],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints a table: all weights, then each rank, ours and torch's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="16M")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rank", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--base", choices=("float", "int8", "nf4"), nargs="+", default=["float"], help="of adapters")
    parser.add_argument("--rows", type=int, help="of the batch; 64, on a GPU 32")
    parser.add_argument("--micro", type=int, help="rows of a micro-batch; 16, on a GPU 4")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each; the median counts")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    plan = plan_of(SIZES[options.size], device)
    plan = plan._replace(rows=(options.rows or plan.rows[0], *plan.rows[1:]))
    batch, micro = experience(plan, 0, plan.model.vocabulary), options.micro or (16 if device.type == "cpu" else 4)
    adapters = [
        (f"rank {rank}{'' if kind == 'float' else f' on {kind}'}", rank, kind)
        for kind in options.base
        for rank in options.rank
    ]
    sides: list[tuple[str, Callable[..., Side], int | None, str]] = [("all weights", ours, None, "float")]
    sides += [(name, ours, rank, kind) for name, rank, kind in adapters]
    sides += [("all weights, torch", peer, None, "float")]
    sides += [(f"{name}, PEFT and torch", peer, rank, kind) for name, rank, kind in adapters]
    records: list[Record] = []
    for name, make, rank, kind in sides:
        timed = partial(time_side, partial(make, plan, batch, micro, rank, kind), device, options.repeats)
        records.append({"name": name, **attempt(timed)})
    numbers = sum(shape.numel() for shape in build(plan.model, plan).shapes.values())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{options.threads} threads of a CPU"
    rows, tokens = len(batch.tokens), int(batch.attention_mask.sum())
    print(f"{numbers / 1e6:.3g} M parameters, {rows} rows, {tokens} tokens, {micro} rows at a time, {where}\n")
    print(table(records))


if __name__ == "__main__":
    main()
