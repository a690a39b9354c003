"""A log-prob pass and an update of rows whose prompts are computed once, beside the same rows apart.

    python experiments/bench/shared_prompts.py 1M 13M --kernels sdpa cpp

Processor time of one thread, the least of a few rounds in turn, in one process. Prompts have 3/4 to all of their
tokens, responses half to all of theirs; micro-batches of 4,096 tokens, one mini-batch, float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from transformers import Qwen2Config

from fppo import losses, models
from fppo.batch import Column, Experience
from fppo.key import Key
from fppo.steps import Forward, Loop, MicroBatching, UpdateActor, adamw
from fppo.steps.forward import compute_log_probs
from fppo.steps.packed import masks_of
from fppo.steps.train_state import init_state
from fppo_kernels.table import Kernels

# width, inner width, layers, tokens of the vocabulary
SIZES = {"1M": (128, 384, 5, 512), "13M": (384, 1024, 8, 1024)}
# tokens of a prompt and of a response, at most; responses to a prompt; prompts
SHAPES = ((6, 4, 8, 32), (6, 64, 8, 8), (64, 64, 8, 8), (256, 64, 8, 4), (512, 128, 16, 2))
CUT = MicroBatching(token_budget=4096)
OPTIMIZER = adamw(lambda step: 1e-4)


def rows_of(prompt: int, response: int, n: int, prompts: int, vocabulary: int) -> Experience:
    """Random prompts, each with `n` random responses."""
    g, rows = torch.Generator().manual_seed(0), n * prompts
    before = torch.randint(prompt - prompt // 4, prompt + 1, (prompts,), generator=g).repeat_interleave(n)
    after = torch.randint(response // 2, response + 1, (rows,), generator=g)
    tokens = torch.randint(2, vocabulary, (rows, prompt + response), generator=g)
    tokens[:, :prompt] = tokens[torch.arange(rows) // n * n, :prompt]
    column = torch.arange(prompt + response)
    mask = (column >= prompt - before[:, None]) & (column < prompt + after[:, None])
    own = mask[:, prompt:]

    def noise(mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(own.shape, generator=g) * 0.1 + mean).where(own, 0.0)

    blank = Column([None] * rows)
    return Experience(
        tokens=tokens.where(mask, 0),
        attention_mask=mask,
        response_mask=own,
        rollout_log_probs=noise(-6.0),
        sampling_log_probs=noise(-6.0),
        row_ids=torch.arange(rows),
        groups=torch.arange(rows) // n,
        versions=torch.zeros(rows, dtype=torch.int64),
        finish=blank,
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
        scores=torch.zeros(rows),
        named_scores={},
        old_log_probs=noise(-6.0),
        token_rewards=noise(),
        advantages=noise(),
        returns=noise(),
    )


def spent(work: Callable[[], object]) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    work()
    return time.process_time() - start


def model_of(size: str) -> models.Model:
    """A model of this size, of Qwen2's type."""
    width, inner, layers, vocabulary = SIZES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return models.build(config)


def compare(size: str, kernel: str, shape: tuple[int, int, int, int], rounds: int) -> str:
    """The times of rows apart, and those of shared prompts over them."""
    model = model_of(size)
    params, batch = models.init_params(model, Key(0)), rows_of(*shape, SIZES[size][3])
    forwards = [Forward(model, Kernels.named(attention=kernel), share_prompts=share) for share in (False, True)]
    loop = Loop(mini_batch_size=len(batch.tokens), micro_batching=CUT)
    works = [
        (
            lambda forward=forward: compute_log_probs(params, batch, forward=forward, micro_batching=CUT),
            lambda forward=forward: UpdateActor(
                loss_fn=losses.ppo_clip, forward=forward, loop=loop, optimizer=OPTIMIZER
            )(init_state(params, OPTIMIZER), batch),
        )
        for forward in forwards
    ]
    times = [[[spent(work) for work in each] for each in works] for _ in range(rounds)]
    apart, shared = ([min(each[way][kind] for each in times) for kind in (0, 1)] for way in (0, 1))
    rows = masks_of(batch, forwards[1]).sorted()
    tokens = 1.0 if rows is None else 1.0 - rows.saved
    ratios = [f"{mine / theirs:.2f} of {theirs:.2f} s" for mine, theirs in zip(shared, apart, strict=True)]
    prompt, response, n, _ = shape
    return f"{size} {kernel} {prompt}, {response}, {n}: tokens {tokens:.2f}, pass {ratios[0]}, update {ratios[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=["1M"], choices=[*SIZES])
    parser.add_argument("--kernels", nargs="+", default=["sdpa"], help="for attention")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.sizes:
        for kernel in options.kernels:
            for shape in SHAPES:
                print(compare(size, kernel, shape, options.rounds), flush=True)


if __name__ == "__main__":
    main()
