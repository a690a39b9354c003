"""The update of an adapter beside that of all weights, and beside PEFT with plain torch: seconds and peak memory.

    python experiments/bench/adapters.py 16M        # or 110M; --rank 1 8 32

All sides run the same weights on the same rows, in turn, in one process; medians. PEFT's side is that of ppo_step.py:
padded passes, torch.optim.AdamW(fused=True) with clip_grad_norm_. Memory is what an update takes beyond the state.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from bench_tools import Timing, measure, table
from peft import LoraConfig, get_peft_model
from ppo_step import ROWS, experience_of, plain, prompts_of, qwen
from transformers import AutoModelForCausalLM, Qwen2ForTokenClassification

from fppo import losses, models
from fppo.key import Key
from fppo.models import Lora
from fppo.models.model import Model, Params
from fppo.steps import Forward, Loop, MicroBatching, adamw, init_state, schedule, update_actor

SIZES = {"1M": (128, 4, 77), "16M": (384, 6, 8192), "110M": (768, 12, 32768)}  # width, layers, vocabulary


def main() -> None:
    """Prints a table: each rank beside PEFT, and beside an update of all weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--rank", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--padding", type=float, default=0.5, help="the share of padding in the batch")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each; the median counts")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    width, layers, vocabulary = SIZES[options.size]
    config = qwen(width, layers, vocabulary)
    model, batch = models.build(config), experience_of(prompts_of(vocabulary), vocabulary, options.padding)
    params, optimizer = models.init_params(model, Key(0)), adamw(schedule("constant", 1e-5))
    loop = Loop(mini_batch_size=ROWS, micro_batching=MicroBatching(token_budget=2048))
    with torch.device("cpu"):
        head = Qwen2ForTokenClassification(copy.deepcopy(config)).eval()  # the critic, of which nothing is timed

    def ours(policy: Model, weights: Params) -> Callable[[], Any]:
        state, forward = init_state(weights, optimizer), Forward(policy)
        settings = {"forward": forward, "loss_fn": losses.ppo_clip, "loop": loop, "optimizer": optimizer}
        return lambda: update_actor(state, batch, **settings)

    rows: list[tuple[str, Timing, Timing]] = []
    for rank in options.rank:
        adapted = ours(*models.adapt(model, params, Lora(rank, 2.0 * rank), key=Key(1)))
        module = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
        module.load_state_dict(params, strict=False)
        peer = get_peft_model(module, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
        rows.append(
            (f"rank {rank}, PEFT", *measure(adapted, plain(peer, head, batch)["update actor"], repeats=options.repeats))
        )
        rows.append((f"rank {rank}, whole", *measure(adapted, ours(model, params), repeats=options.repeats)))
    print(f"{options.size} parameters, {ROWS} rows: an adapter's update beside PEFT's, and beside that of all weights")
    print(table(rows))


if __name__ == "__main__":
    main()
