"""64 requests of 64 tokens by adapters of one base side by side, beside an engine with one adapter merged, at 13 M.

    python experiments/bench/side_by_side.py --rank 8 --rounds 3

Processor seconds of one thread, medians; each way in turn, in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import tyro
from transformers import Qwen2Config

from fppo import models
from fppo.key import Key
from fppo.models import Adapter, Lora
from fppo.models.model import Params
from fppo.rollout import AdapterRequests, EmbeddedEngine, Request, Requests, Sampling
from fppo_kernels.table import Kernels

ROWS, TOKENS, PROMPT, ADAPTERS = 64, 64, 16, 8


def seconds(requests: Requests, prompts: torch.Tensor, named: Callable[[int], str | None]) -> float:
    """The processor's seconds for all prompts, row i by the adapter named(i)."""
    how, start = {"sampling": Sampling(max_tokens=TOKENS), "key": Key(1)}, time.process_time()
    requests.add([Request(name=f"{i}", ids=x, row=i, adapter=named(i), **how) for i, x in enumerate(prompts.tolist())])
    while requests.counts.open:
        requests.step()
    return time.process_time() - start


def main(rank: int = 8, rounds: int = 3) -> None:
    """Prints a line for each way."""
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
    }
    base = models.build(Qwen2Config(vocab_size=4096, num_key_value_heads=6, tie_word_embeddings=False, **sizes))
    params = models.init_params(base, Key(0))
    adapters = [models.adapt(base, params, Lora(rank, 2.0 * rank), key=Key(i)) for i in range(ADAPTERS)]
    prompts = torch.randint(3, 4096, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    with ExitStack() as stack:

        def opened(model: models.Model, own: Params) -> AdapterRequests:
            engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0)
            return stack.enter_context(engine.open(own))

        merged, beside = opened(*adapters[0]), opened(base, params)
        for i, (model, own) in enumerate(adapters):
            beside.put(f"{i}", Adapter.of(model, own))
        ways: dict[str, Callable[[], float]] = {
            "merged": lambda: seconds(merged, prompts, lambda i: None),
            "the base": lambda: seconds(beside, prompts, lambda i: None),
            "one adapter": lambda: seconds(beside, prompts, lambda i: "0"),
            f"{ADAPTERS} adapters": lambda: seconds(beside, prompts, lambda i: f"{i % ADAPTERS}"),
        }
        taken = [{name: way() for name, way in ways.items()} for _ in range(rounds)]
    medians = {name: statistics.median(x[name] for x in taken) for name in ways}
    for name, x in medians.items():
        print(f"{name:12} {x:6.2f} s  {x / medians['merged']:.2f}")


if __name__ == "__main__":
    tyro.cli(main)
