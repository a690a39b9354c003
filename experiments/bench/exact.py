"""A GRPO step whose rollouts are exact, beside the usual ones: exact.py [1M|13M] [ROUNDS]

64 prompts' worth of rows (8 prompts, 8 responses of 64 tokens), two updates of 32 rows each, float32, one thread. The
variants take their turns, each from the state that it left, in seconds of the processor, since others may run beside.
`pass` is what a run on a CPU does by default; `fast` has the kernels of exact runs, and a pass for old log-probs.
"""

import statistics
import sys
import time
from typing import Any

import attrs
import torch
from transformers import Qwen2Config

from fppo import advantages, data, metrics, models, quickstart, rewards
from fppo.key import Key
from fppo.pipeline import pieces, ppo_step
from fppo.pipeline.checks import field
from fppo.rollout import Sampling
from fppo.steps import Loop, MicroBatching, adamw
from fppo_kernels.table import EXACT, Kernels

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "13M": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6},
}
SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ROWS, PART, TOKENS = 64, 32, 64


def made(size: str, kernels: Kernels, source: str, exact: bool):
    tokenizer = quickstart.character_tokenizer()
    model = models.build(Qwen2Config(**SHAPE, **SIZES[size]))
    prompts = data.prompt_set([x.prompt for x in quickstart.sums()[0]], tokenizer)
    kept = pieces(
        (model, models.init_params(model, Key(0))),
        tokenizer,
        prompts,
        reward=rewards.inline_reward(lambda sample: float(len(sample.response) % 7)),
        sampling=Sampling(n=8, max_tokens=TOKENS),
        batch_size=ROWS,
        loop=Loop(mini_batch_size=PART, micro_batching=MicroBatching(size=PART)),
        optimizer=adamw(lambda step: 1e-4, weight_decay=0.0),
        advantage=advantages.grpo,
    )
    policy = attrs.evolve(kept.policy, kernels=kernels)
    program, passes = kept.program, field(kept.program.annotate, "passes")
    passes = attrs.evolve(passes, policy=attrs.evolve(passes.policy, forward=policy))
    engine = attrs.evolve(kept.engine, kernels=kernels, exact=exact)
    sampling = attrs.evolve(kept.sampling, stop_token_ids=())
    return kept, attrs.evolve(
        program,
        rollout=attrs.evolve(program.rollout, engine=engine, sampling=sampling),
        annotate=attrs.evolve(program.annotate, old_log_probs=source, passes=passes),
        update_actor=attrs.evolve(program.update_actor, old_log_probs=source, forward=policy),
    )


def main(size: str = "1M", rounds: str = "7") -> None:
    torch.set_num_threads(1)
    names: dict[str, Any] = dict(EXACT["cpu"])
    fast = Kernels.named(**names)
    variants = {
        "pass": (Kernels.named(), "pass", False),
        "fast": (fast, "pass", False),
        "exact": (fast, "engine", True),
    }
    each = {name: made(size, *how) for name, how in variants.items()}
    runs, spent = {name: kept.run for name, (kept, _) in each.items()}, {name: [] for name in each}
    for number in range(int(rounds) + 1):
        for name, (kept, program) in each.items():
            start = time.process_time()
            runs[name], _, report = ppo_step(runs[name], program=program, draw=kept.draw)
            spent[name] += [time.process_time() - start] if number else []
            if name == "exact":
                assert metrics.report(report)["training/rollout_equal"] == 1.0
    base = statistics.median(spent["pass"])
    for name, times in spent.items():
        print(f"{size} {name:6} {statistics.median(times):.3f} s, {statistics.median(times) / base:.2f} of pass")


if __name__ == "__main__":
    main(*sys.argv[1:])
