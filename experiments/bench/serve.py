"""Tokens per second of concurrent clients over HTTP, beside those of the library's own loop on the same prompts.

python experiments/bench/serve.py --clients 64 --tokens 64 --width 384 --layers 6
python experiments/bench/serve.py --tokens 32 --width 256 --layers 4 --client aiohttp

Each client is a client object of its own of the named package; all are coroutines of one other process. Rounds of the
own loop, of the server, and of an application that has its answers ready alternate: the last shows what the clients
alone cost. Medians of their seconds and of processor seconds. Both sides sample the same ids, which is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

import torch
import tyro

from fppo import models, quickstart
from fppo.batch import Column, Prompts, Rollout
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
from fppo.serve.app import Receive, Scope, Send, read_body
from fppo.steps import Forward

Package = Literal["openai", "httpx", "aiohttp"]
Complete = Callable[[str, list[int]], Awaitable[None]]  # of a prompt, in an episode of this name
SESSION = "x-session-id"
THREADS = ("fppo-engine", "fppo-server")


class Round(NamedTuple):
    """A round of all clients, or of the own loop: seconds, and processor seconds."""

    seconds: float
    engine: float  # of the thread that decodes
    server: float = 0.0  # of the threads that answer
    clients: float = 0.0  # of the clients' process


def spent(name: str) -> float:
    """Processor seconds of the threads of this name so far."""
    clocks = [time.pthread_getcpuclockid(x.ident) for x in threading.enumerate() if x.name == name and x.ident]
    return sum(map(time.clock_gettime, clocks))


async def complete_by(package: Package, url: str, key: str, tokens: int) -> Complete:
    """A client of its own: a completion of so many tokens by it."""
    if package == "openai":
        import openai  # pyright: ignore[reportMissingImports]

        create = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600).completions.create

        async def by_openai(episode: str, prompt: list[int]) -> None:
            await create(model="policy", prompt=prompt, max_tokens=tokens, extra_headers={SESSION: episode})

        return by_openai
    headers, path = {"authorization": f"Bearer {key}"}, f"{url}/v1/completions"
    if package == "httpx":
        import httpx  # pyright: ignore[reportMissingImports]

        post = httpx.AsyncClient(headers=headers, timeout=600).post

        async def by_httpx(episode: str, prompt: list[int]) -> None:
            body = {"model": "policy", "prompt": prompt, "max_tokens": tokens}
            (await post(path, json=body, headers={SESSION: episode})).raise_for_status().json()

        return by_httpx
    import aiohttp  # pyright: ignore[reportMissingImports]

    session = aiohttp.ClientSession(headers=headers)

    async def by_aiohttp(episode: str, prompt: list[int]) -> None:
        body = {"model": "policy", "prompt": prompt, "max_tokens": tokens}
        async with session.post(path, json=body, headers={SESSION: episode}) as response:
            response.raise_for_status()
            await response.json()

    return by_aiohttp


def play(package: Package, urls: list[str], key: str, prompts: list[list[int]], tokens: int, told: Connection) -> None:
    """Plays a round at one of the URLs whenever a number comes, and sends its seconds and processor seconds."""

    async def main() -> None:
        every = [[await complete_by(package, url, key, tokens) for _ in prompts] for url in urls]
        turn = 0
        while (url := told.recv()) is not None:
            start, begin = time.perf_counter(), time.process_time()
            asked = zip(every[url], prompts, strict=True)
            await asyncio.gather(*(one(f"{turn}-{number}", prompt) for number, (one, prompt) in enumerate(asked)))
            told.send((time.perf_counter() - start, time.process_time() - begin))
            turn += 1

    asyncio.run(main())


async def ready(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers each completion with the same words, in the server's form."""
    await read_body(scope, receive, 1 << 20)
    choice = {"index": 0, "finish_reason": "length", "logprobs": None, "text": " words" * 16}
    usage = {"prompt_tokens": 16, "completion_tokens": 32, "total_tokens": 48}
    head = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "policy"}
    body = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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


class Policy(NamedTuple):
    """The policy of both sides, and how it is sampled."""

    engine: EmbeddedEngine
    params: dict[str, torch.Tensor]
    sampling: Sampling
    key: Key = Key(5)

    def own(self, ids: list[list[int]]) -> tuple[Round, Rollout]:
        """A round of the own loop."""
        start, begin = time.perf_counter(), time.thread_time()
        rollout = self.engine.generate(self.params, Ask(prompts_of(ids), self.sampling, self.key))
        return Round(time.perf_counter() - start, time.thread_time() - begin), rollout


@contextlib.contextmanager
def served(policy: Policy, key: str, episodes: Episodes) -> Iterator[list[str]]:
    """The URLs of the server, and of the application that has its answers ready."""
    tokenizer = quickstart.bpe_tokenizer(["a few words of text to learn tokens from"] * 3, size=300)
    sources = Sources(
        texts=texts_of(tokenizer, vocabulary=2048, chat=False),
        sampling=policy.sampling,
        key=policy.key,
        bounds=Bounds(),
        model="policy",
        row_of=lambda name: int(name.partition("-")[2]),
    )
    service = Service(sources, episodes)
    app, loop = app_of([router_of(service)], key=key, bounds=Bounds()), EngineLoop(policy.engine, policy.params).start()
    service.attach(loop)
    with serving(app, bound_socket("127.0.0.1", 0)) as url, serving(ready, bound_socket("127.0.0.1", 0)) as other:
        yield [url, other]
    loop.stop()


def main(
    clients: int = 64,
    tokens: int = 64,
    rounds: int = 6,
    width: int = 384,
    layers: int = 6,
    client: Package = "openai",
) -> float:
    """Print speeds and costs, and return the ratio of the medians."""
    torch.set_num_threads(1)
    model = quickstart.small_model(2048, width=width, layers=layers, positions=512)
    engine = EmbeddedEngine(model=model, kernels=Forward(model).kernels, pad_token_id=0)
    policy = Policy(engine, models.init_params(model, Key(0)), Sampling(max_tokens=tokens))
    ids = (2 + torch.arange(clients * 16).view(clients, 16) % 290).tolist()
    episodes, key, context = Episodes(1 << 24), new_key(), multiprocessing.get_context("spawn")
    told, heard = context.Pipe()
    found: list[tuple[Round, Round, Round]] = []
    with served(policy, key, episodes) as urls:
        process = context.Process(target=play, args=(client, urls, key, ids, tokens, heard))
        process.start()

        def played(url: int) -> Round:
            engine, server = map(spent, THREADS)
            told.send(url)
            seconds, clients_own = told.recv()
            return Round(seconds, spent(THREADS[0]) - engine, spent(THREADS[1]) - server, clients_own)

        for turn in range(rounds):
            own, rollout = policy.own(ids)
            found.append((own, played(0), played(1)))
            for number in range(clients):
                (row,) = episodes.take(f"{2 * turn}-{number}")
                assert list(row.ids) == rollout.tokens[number].tolist(), f"row {number} differs"
        told.send(None)
        process.join()
    size = sum(x.numel() for x in policy.params.values())
    print(f"{size / 1e6:.1f} M parameters, {clients} clients of {client}, {tokens} tokens each, {rounds - 1} rounds")
    return report(found[1:], clients, tokens)


def report(found: list[tuple[Round, Round, Round]], clients: int, tokens: int) -> float:
    """Print the medians, and return the ratio of both speeds."""
    own, http, bare = (
        Round(*(statistics.median(x) for x in zip(*each, strict=True))) for each in zip(*found, strict=True)
    )
    ms, total = 1000 / clients, clients * tokens
    print(f"own loop   {total / own.seconds:7,.0f} tokens/s, {own.seconds:.3f} s, processor {own.engine:.3f} s")
    print(f"over HTTP  {total / http.seconds:7,.0f} tokens/s, {http.seconds:.3f} s, processor {http.engine:.3f} s")
    print(f"a request costs the server {http.server * ms:.2f} ms beside, and its client {http.clients * ms:.2f} ms")
    after = own.seconds / (own.seconds + bare.seconds)
    print(f"clients alone, answers ready: {bare.seconds:.3f} s; own loop and then these: ratio {after:.2f}")
    print(f"ratio {own.seconds / http.seconds:.2f}")
    return own.seconds / http.seconds


if __name__ == "__main__":
    tyro.cli(main)
