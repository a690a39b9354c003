"""forward_backward beside UpdateActor on the same rows: 64 rows, of one prompt each or of 8 to a prompt.

    python experiments/bench/tinker_speed.py 1M 13M --parts forward_backward --threads 1

The least processor time of a few rounds in turn, in one process; PPO, float32, all weights or adapters of rank 8.
UpdateActor also makes the step: `forward_backward` is timed with `optim_step`. Both return to the same parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from shared_prompts import SIZES, model_of, rows_of, spent

from fppo import losses, models
from fppo.batch import Experience
from fppo.key import Key
from fppo.serve.tinker.data import Datum
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.runs import Adapters, BaseModel, StepParams, create_run, forward_backward, forward_of, optim_step
from fppo.steps import Loop, UpdateActor, adamw
from fppo_kernels.table import Kernels

# tokens of a prompt and of a response, at most; responses to a prompt; prompts
SHAPES = ((64, 64, 1, 64), (64, 64, 8, 8), (256, 64, 8, 8))
OPTIMIZER = adamw(lambda step: 1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, max_grad_norm=None)


def base_of(size: str, kernel: str) -> BaseModel:
    """A model of this size with fresh weights."""
    model = model_of(size)
    params = models.init_params(model, Key(0))
    return BaseModel(size, model, params, size, kernels=Kernels.named(attention=kernel))


def data_of(rows: Experience) -> list[Datum]:
    """Rows as a client sends them: every token but the last, with its next one; prompts have no advantages."""
    made: list[Datum] = []
    for row, mask in enumerate(rows.attention_mask):
        tokens, width = rows.tokens[row, mask], rows.response_mask.shape[1]
        count = int(mask[-width:].sum())
        before = torch.zeros(len(tokens) - 1 - count)
        named = {"logprobs": rows.old_log_probs, "advantages": rows.advantages}
        made.append(Datum(tokens[:-1], tokens[1:], {k: torch.cat([before, x[row, :count]]) for k, x in named.items()}))
    return made


def compare(size: str, kernel: str, rank: int, shape: tuple[int, int, int, int], rounds: int) -> str:
    """The time of both verbs over that of the update."""
    base = base_of(size, kernel)
    run = create_run(base, Adapters(rank))
    rows = rows_of(*shape, SIZES[size][3])
    data, count = data_of(rows), len(rows.row_ids)
    loop = Loop(mini_batch_size=count, micro_batching=base.micro_batching, weight_mode="token-sum")
    loss_fn = partial(losses.ppo_clip, dual_clip=None)
    update = UpdateActor(forward=forward_of(run), loss_fn=loss_fn, loop=loop, optimizer=OPTIMIZER)
    works: tuple[Callable[[], object], ...] = (
        lambda: optim_step(forward_backward(run, data, Loss("ppo"))[0], StepParams()),
        lambda: update(run.state, rows),
    )
    times = [[spent(work) for work in works] for _ in range(rounds)]
    ours, theirs = (min(each) for each in zip(*times, strict=True))
    prompt, response, n, prompts = shape
    kind = f"rank {rank}" if rank else "all weights"
    rows_text = f"{prompts} x {n} rows of {prompt} + {response}"
    return f"{size} {kernel} {kind}, {rows_text}: {ours / theirs:.2f} of {theirs:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=["1M"], choices=[*SIZES])
    parser.add_argument("--parts", nargs="+", default=["forward_backward"], choices=["forward_backward"])
    parser.add_argument("--kernels", nargs="+", default=["sdpa"], help="for attention")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for size in options.sizes:
        for kernel in options.kernels:
            for rank in (0, 8):
                for shape in SHAPES:
                    print(compare(size, kernel, rank, shape, options.rounds), flush=True)


if __name__ == "__main__":
    main()
