"""Attention and updates on a context axis: processor seconds of the ranks beside the work that they were dealt.

    python experiments/bench/context.py                     # 4 simulated ranks; --ranks 2 for two
    python experiments/bench/context.py --lengths 4096      # one sequence

The ranks are threads of this process, and the seconds those in which the thread of a rank was on the processor, which
other programs on the machine disturb little. The ranks wait for the one with most work, so a step takes as long as that
one: "max/mean" is what it has over the mean, of the work that the deal counts (pairs of a query and a key) and of the
seconds. Attention is that of one layer, forward and backward; an update has matrix products beside it, of which all
ranks have as many. Medians of runs in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
from transformers import LlamaConfig

from fppo import losses, models
from fppo.key import Key
from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from fppo.studies.plan.case import Case, hardware_of
from fppo.studies.plan.passes import rows_of
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.context import BLOCKS, Deal, deal, gathered_attention
from fppo_kernels.padding import make_lengths
from fppo_kernels.ring import ring_attention

LENGTHS = (2730, 171, 171, 233, 433, 300, 20, 73)
HEADS, KEY_HEADS, WIDTH = 4, 2, 64


def seconds(fn: Callable[[], object]) -> float:
    """On the processor, of this thread."""
    start = time.thread_time()
    fn()
    return time.thread_time() - start


def attention_seconds(lengths: Sequence[int], dealt: Deal, ring: bool, mesh: Mesh) -> float:
    """A rank's for one layer's attention, forward and backward."""
    axis, row = mesh["context"], make_lengths(lengths)
    attend = ring_attention(dealt, axis) if ring else gathered_attention(sdpa, dealt, axis)
    count = len(dealt.places[axis.rank])
    leaves = [torch.randn(count, n, WIDTH, requires_grad=True) for n in (HEADS, KEY_HEADS, KEY_HEADS)]

    def both() -> None:
        out = attend(*leaves, lengths=row, scale=WIDTH**-0.5)
        torch.autograd.grad(out.sum(), leaves)

    return seconds(both)


def update_seconds(length: int, ring: bool, mesh: Mesh) -> float:
    """A rank's for an update of the actor on one full row."""
    mesh = attrs.evolve(mesh, ring=ring)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HEADS * WIDTH,
        intermediate_size=2 * HEADS * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=length,
        pad_token_id=0,
    )
    model = models.build(config)
    rows = rows_of(Case(name="row", config=config, hardware=hardware_of("cpu"), length=length, tokens=length), 1)
    optimizer = adamw(lambda step: 1e-4)
    state = init_state(models.init_params(model, Key(0)), optimizer)
    loop = Loop(mini_batch_size=1, micro_batching=MicroBatching(size=1))
    forward = Forward(model, mesh=mesh)
    update = UpdateActor(forward=forward, loss_fn=losses.gpg, loop=loop, optimizer=optimizer)
    return seconds(lambda: update(state, rows))


def medians(runs: Sequence[Sequence[float]]) -> list[float]:
    """By rank."""
    return [statistics.median(column) for column in zip(*runs, strict=True)]


def line(name: str, work: float, by_rank: Sequence[float]) -> str:
    mean = statistics.mean(by_rank)
    return f"{name:<28}{work:>10.2f}{max(by_rank) / mean:>10.2f}{max(by_rank):>12.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks, axes = options.ranks, {"context": options.ranks}
    lengths = [*options.lengths, -sum(options.lengths) % (ranks * BLOCKS[-1])]
    print(f"{ranks} ranks, sequences of {', '.join(map(str, options.lengths))} tokens")
    print(f"{'':<28}{'work':>10}{'seconds':>10}{'fullest':>14}\n{'':<28}{'max/mean':>10}{'max/mean':>10}")
    cases: list[tuple[str, float, Callable[[Mesh], float]]] = []
    for ring in (False, True):
        for blocks in BLOCKS:
            dealt = deal(lengths, ranks, blocks=blocks)
            name = f"{'ring' if ring else 'gathered'}, {blocks} block{'s' * (blocks > 1)}"
            cases.append((name, dealt.uneven, partial(attention_seconds, lengths, dealt, ring)))
        total = sum(lengths)
        name = f"update by {'ring' if ring else 'gathering'}"
        cases.append((name, deal([total], ranks).uneven, partial(update_seconds, total, ring)))
    runs: dict[str, list[list[float]]] = {name: [] for name, *_ in cases}
    for _ in range(options.repeats):
        for name, _, fn in cases:
            runs[name].append(simulate(axes, fn))
    for name, work, _ in cases:
        print(line(name, work, medians(runs[name])))


if __name__ == "__main__":
    main()
