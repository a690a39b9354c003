"""Rows that wait for their environments: the time of a rollout beside what no scheduling can save.

    python experiments/bench/streams.py --rows 64 1000 --rounds 5

An environment sleeps before each answer. The slowest chain is the row that takes longest alone, with its waits. Medians
over rounds, in which the ways to run alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from fppo import batch as batches
from fppo import models, quickstart
from fppo.batch import Column, Prompts, Rollout
from fppo.environments import Begin, EnvironmentRunner, Reply, Step
from fppo.key import Key
from fppo.rollout import Ask, EmbeddedEngine, PlainText, Sampling, TurnsEngine
from fppo.steps import Forward

TURNS, TURN_TOKENS, OBSERVATION = 6, 16, "234"


class Sleepy:
    """An environment that sleeps `delay` seconds before it answers, or, in a share `slow` of turns, a second."""

    def __init__(self, *, delay: float, slow: float) -> None:
        self.delay, self.slow = delay, slow

    async def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        del seed
        return Begin((int(row["number"]), 0, 0.0))

    async def step(self, state: Any, reply: Reply) -> Step:
        row, turn, waited = state
        delay = self.wait(row, turn)
        done = turn == TURNS - 1 or not reply.end
        if not done:
            await asyncio.sleep(delay)
            waited += delay
        messages = [] if done else [{"role": "user", "content": OBSERVATION}]
        return Step((row, turn + 1, waited), messages, done=done, info={"waited": waited})

    def wait(self, row: int, turn: int) -> float:
        return 1.0 if random.Random(1000 * row + turn).random() < self.slow else self.delay


class Times(NamedTuple):
    """Seconds of rollouts: with waits and without, and the most that a row waited."""

    whole: float
    decoding: float
    waits: float
    chain: float  # of the slowest row alone


def prompts_of(count: int, tokenizer: Any) -> Prompts:
    ids = [tokenizer.encode("1" * (1 + i % 5) + "+2=") for i in range(count)]
    width = max(map(len, ids))
    nothing = Column([""] * count)
    return Prompts(
        tokens=torch.tensor([[0] * (width - len(x)) + x for x in ids]),
        attention_mask=torch.tensor([[False] * (width - len(x)) + [True] * len(x) for x in ids]),
        row_ids=torch.arange(count),
        ids=nothing,
        ground_truth=nothing,
        source=nothing,
        extras=Column({"number": number} for number in range(count)),
    )


class Bench:
    """One model and its rollouts of `count` rows."""

    def __init__(self, count: int) -> None:
        self.tokenizer = quickstart.character_tokenizer()
        model = quickstart.small_model(len(self.tokenizer), positions=512)
        self.params = {name: x.float() for name, x in models.init_params(model, Key(0)).items()}
        self.engine = EmbeddedEngine(model=model, kernels=Forward(model).kernels, pad_token_id=0)
        self.prompts = prompts_of(count, self.tokenizer)

    def rollout(self, delay: float, slow: float, rows: list[int] | None = None) -> tuple[Rollout, float]:
        """A rollout of these rows, or all, and its seconds."""
        prompts = self.prompts if rows is None else batches.rows(self.prompts, rows)
        sampling = Sampling(max_tokens=200, stop_token_ids=(3, 4))
        with EnvironmentRunner(
            partial(Sleepy, delay=delay, slow=slow),
            name="sleepy",
            asynchronous=True,
            inline=True,
            concurrency=10_000,
            time_limit=60.0,
        ) as player:
            engine = TurnsEngine(
                engine=self.engine,
                tools=player,
                encode=PlainText(self.tokenizer),
                tokenizer=self.tokenizer,
                max_turns=TURNS,
                turn_tokens=TURN_TOKENS,
                pad_token_id=0,
            )
            began = time.perf_counter()
            rollout = engine.generate(self.params, Ask(prompts, sampling, Key(1)))
            return rollout, time.perf_counter() - began


def measure(bench: Bench, delay: float, slow: float) -> Times:
    """One round. Raises AssertionError if waits change an id."""
    rollout, whole = bench.rollout(delay, slow)
    still, decoding = bench.rollout(0.0, 0.0)
    assert torch.equal(rollout.tokens, still.tokens)
    waited = [extra["environment"].get("waited", 0.0) for extra in rollout.extras]
    lengths = rollout.response_mask.sum(1).tolist()
    slowest = max(range(len(waited)), key=lambda row: (round(waited[row], 3), lengths[row]))
    _, chain = bench.rollout(delay, slow, [slowest])
    return Times(whole, decoding, max(waited), chain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--delay", type=float, default=0.1)
    parser.add_argument("--slow", type=float, nargs="+", default=[0.0, 0.05], help="shares of turns that take 1 s")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("rows  slow  whole s  decoding s  waits s  chain s  whole/chain  whole/(decoding+waits)")
    for count in args.rows:
        bench = Bench(count)
        for slow in args.slow:
            measure(bench, args.delay, slow)  # warm
            times = [measure(bench, args.delay, slow) for _ in range(args.rounds)]
            whole, decoding, waits, chain = (statistics.median(x) for x in zip(*times, strict=True))
            of_chain = statistics.median(x.whole / x.chain for x in times)
            of_sum = statistics.median(x.whole / (x.decoding + x.waits) for x in times)
            print(
                f"{count:4d}  {slow:4.2f}  {whole:7.2f}  {decoding:10.2f}  {waits:7.2f}  {chain:7.2f}  {of_chain:11.2f}"
                f"  {of_sum:22.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
