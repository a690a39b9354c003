"""Tokens per second of concurrent clients over HTTP, beside those of the library's own loop on the same prompts.

python experiments/bench/serve.py --clients 64 --tokens 64 --width 384 --layers 6

The clients are coroutines of the openai package, or of httpx with plain = True, in a process of their own. Both sides
sample the same ids, which is checked.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch
import tyro

from fppo import models, quickstart
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.rollout import Ask, EmbeddedEngine, Sampling
from fppo.serve import (
    Bounds,
    EngineLoop,
    Episodes,
    Service,
    Sources,
    app_of,
    bound_socket,
    new_key,
    router_of,
    serving,
    texts_of,
)
from fppo.steps import Forward


def ask(url: str, key: str, prompts: list[list[int]], tokens: int, rounds: int, plain: bool, out: Connection) -> None:
    """The seconds that each round of all clients took."""

    async def main() -> list[float]:
        seconds: list[float] = []
        if plain:
            import httpx  # pyright: ignore[reportMissingImports]

            limits = httpx.Limits(max_connections=len(prompts))
            client = httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, limits=limits, timeout=600)

            async def one(turn: int, number: int) -> None:
                body = {"prompt": prompts[number], "max_tokens": tokens}
                (await client.post(f"{url}/e/{turn}-{number}/v1/completions", json=body)).raise_for_status()
        else:
            import openai  # pyright: ignore[reportMissingImports]

            shared = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=600)

            async def one(turn: int, number: int) -> None:
                own = shared.with_options(base_url=f"{url}/e/{turn}-{number}/v1")
                await own.completions.create(model="policy", prompt=prompts[number], max_tokens=tokens)

        for turn in range(rounds):
            start = time.perf_counter()
            await asyncio.gather(*(one(turn, number) for number in range(len(prompts))))
            seconds.append(time.perf_counter() - start)
        return seconds

    out.send(asyncio.run(main()))


def prompts_of(ids: list[list[int]]) -> Prompts:
    """The prompts of a rollout."""
    tokens = torch.tensor(ids)
    nothing = Column([None] * len(ids))
    return Prompts(
        tokens=tokens,
        attention_mask=torch.ones_like(tokens, dtype=torch.bool),
        row_ids=torch.arange(len(ids)),
        ids=nothing,
        ground_truth=nothing,
        source=nothing,
        extras=Column([{}] * len(ids)),
    )


def main(
    clients: int = 64, tokens: int = 64, rounds: int = 5, width: int = 384, layers: int = 6, plain: bool = False
) -> float:
    """Print both speeds, and return the ratio of the medians."""
    torch.set_num_threads(1)
    tokenizer = quickstart.bpe_tokenizer(["a few words of text to learn tokens from"] * 3, size=300)
    model = quickstart.small_model(2048, width=width, layers=layers, positions=512)
    params = models.init_params(model, Key(0))
    engine = EmbeddedEngine(model=model, kernels=Forward(model).kernels, pad_token_id=0)
    sampling = Sampling(max_tokens=tokens)
    ids = (2 + torch.arange(clients * 16).view(clients, 16) % 290).tolist()
    own: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        rollout = engine.generate(params, Ask(prompts_of(ids), sampling, Key(5)))
        own.append(time.perf_counter() - start)
    texts = texts_of(tokenizer, vocabulary=2048, chat=False)
    sources = Sources(
        texts=texts,
        sampling=sampling,
        key=Key(5),
        bounds=Bounds(),
        model="policy",
        row_of=lambda name: int(name.partition("-")[2]),
    )
    episodes, key = Episodes(1 << 24), new_key()
    service = Service(sources, episodes)
    loop = EngineLoop(engine, params).start()
    service.attach(loop)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with serving(app_of([router_of(service)], key=key, bounds=Bounds()), bound_socket("127.0.0.1", 0)) as url:
        process = context.Process(target=ask, args=(url, key, ids, tokens, rounds, plain, sender))
        process.start()
        served = receiver.recv()
        process.join()
    loop.stop()
    for number in range(clients):
        (row,) = episodes.rows(f"0-{number}")
        assert list(row.ids) == rollout.tokens[number].tolist(), f"row {number} differs"
    speeds = [clients * tokens / statistics.median(seconds[1:]) for seconds in (own, served)]
    size = sum(x.numel() for x in params.values())
    print(f"{size / 1e6:.1f} M parameters, {clients} clients, {tokens} tokens each, median of {rounds - 1} rounds")
    print(f"own loop {speeds[0]:,.0f} tokens/s, over HTTP {speeds[1]:,.0f} tokens/s: {speeds[1] / speeds[0]:.2f}")
    return speeds[1] / speeds[0]


if __name__ == "__main__":
    tyro.cli(main)
