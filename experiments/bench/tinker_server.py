"""Tinker's client against the server: samples per second beside the engine's own, and the seconds of a whole RL step.

    python experiments/bench/tinker_server.py samples --size 13M       # 64 requests of 64 tokens at once
    python experiments/bench/tinker_server.py step --size 1M           # 64 prompts of 6 tokens x 8 of 4, one update
    python experiments/bench/tinker_server.py step --single            # one request for each sample, as the cookbook's

The client is the unmodified SDK, in a process of its own. Medians of a few rounds; torch has one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tinker_speed import base_of

from fppo import quickstart
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.models import lora
from fppo.models.adapted import Lora
from fppo.rollout import Ask, EmbeddedEngine, Sampling
from fppo.serve import EngineLoop, bound_socket, serving, texts_of
from fppo.serve.tinker.routes import tinker_app
from fppo.serve.tinker.samples import SampleRules
from fppo.serve.tinker.service import ServedBase, TinkerService

KEY = "tml-benchmark"


def prompts_of(count: int, length: int) -> list[list[int]]:
    return (2 + torch.arange(count * length).view(count, length) % 290).tolist()


@contextlib.contextmanager
def server(size: str, threads: int) -> Iterator[tuple[str, ServedBase]]:
    """A server of a model of this size; its address."""
    torch.set_num_threads(threads)
    base = base_of(size, "sdpa")
    engine = EmbeddedEngine(model=base.model, kernels=base.kernels, pad_token_id=0)
    tokenizer = quickstart.bpe_tokenizer(["a few words of text to learn tokens from"] * 3, size=300)
    texts = texts_of(tokenizer, vocabulary=base.model.config.vocab_size, chat=False)
    rules = SampleRules(texts=texts, stop_token_ids=(1,), limit=1024)
    served = ServedBase(base=base, engine=engine, rules=rules, write_tokenizer=tokenizer.save_pretrained)
    with tempfile.TemporaryDirectory() as store, contextlib.ExitStack() as opened:
        service = TinkerService(Path(store), {size: served})
        opened.callback(service.stop)
        loop = EngineLoop(engine, base.params).start()
        opened.callback(loop.stop)
        service.start({size: loop})
        app = tinker_app(service, keys=[KEY])
        yield opened.enter_context(serving(app, bound_socket("127.0.0.1", 0))), served


def in_process(work: str, *given: object) -> list[float]:
    """The seconds that a client in a process of its own reports."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=client, args=(work, sender, *given))
    process.start()
    found = receiver.recv()
    process.join()
    return found


def client(work: str, out: Connection, *given: object) -> None:
    out.send({"samples": samples, "step": steps}[work](*given))


def samples(url: str, size: str, count: int, tokens: int, rounds: int, adapted: bool) -> list[float]:
    """The seconds of each round of so many requests at once."""
    import tinker
    from tinker import types

    service, seconds = tinker.ServiceClient(base_url=url, api_key=KEY), list[float]()
    if adapted:
        trainer = service.create_lora_training_client(size, rank=8, seed=0).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
    else:
        sampler = service.create_sampling_client(base_model=size).result()
    params = types.SamplingParams(max_tokens=tokens, stop=[])
    for _ in range(rounds):
        start = time.perf_counter()
        pending = [sampler.sample(types.ModelInput.from_ints(p), 1, params) for p in prompts_of(count, 16)]
        assert all(len(each.result().sequences[0].tokens) == tokens for each in pending)
        seconds.append(time.perf_counter() - start)
    return seconds


def steps(url: str, size: str, tokens: int, rounds: int, single: bool) -> list[float]:
    """The seconds of each step of 64 prompts x 8: samples, a pass over them, an update."""
    import tinker
    from tinker import types

    service, seconds = tinker.ServiceClient(base_url=url, api_key=KEY), list[float]()
    trainer = service.create_lora_training_client(size, rank=8, seed=0).result()
    params = types.SamplingParams(max_tokens=tokens, stop=[])
    for _ in range(rounds):
        start = time.perf_counter()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        asked = [(p, types.ModelInput.from_ints(p)) for p in prompts_of(64, 6) for _ in range(8 if single else 1)]
        pending = [(p, sampler.sample(prompt, 1 if single else 8, params)) for p, prompt in asked]
        data: list[types.Datum] = []
        for prompt, each in pending:
            for sequence in each.result().sequences:
                before = [0.0] * (len(prompt) - 1)
                advantage = 1.0 if sequence.tokens[0] % 2 else -1.0
                inputs = {
                    "target_tokens": [*prompt[1:], *sequence.tokens],
                    "logprobs": [*before, *(sequence.logprobs or [])],
                    "advantages": [*before, *[advantage] * len(sequence.tokens)],
                }
                ids = types.ModelInput.from_ints([*prompt, *sequence.tokens[:-1]])
                data.append(types.Datum(model_input=ids, loss_fn_inputs=inputs))  # pyright: ignore[reportArgumentType]
        passed, stepped = trainer.forward_backward(data, "ppo"), trainer.optim_step(types.AdamParams())
        passed.result()
        stepped.result()
        seconds.append(time.perf_counter() - start)
    return seconds


def own(served: ServedBase, count: int, tokens: int, rounds: int, adapted: bool) -> list[float]:
    """The seconds of the library's own engine on the same prompts."""
    ids = torch.tensor(prompts_of(count, 16))
    nothing = Column([None] * count)
    given = Prompts(
        tokens=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        row_ids=torch.arange(count),
        ids=nothing,
        ground_truth=nothing,
        source=nothing,
        extras=Column([{}] * count),
    )
    model, params = served.base.model, served.base.params
    if adapted:
        model, params = lora.adapt(model, params, Lora(8, 32.0, ("all-linear",)), key=Key(0))
    engine, seconds = EmbeddedEngine(model=model, kernels=served.base.kernels, pad_token_id=0), list[float]()
    for _ in range(rounds):
        start = time.perf_counter()
        engine.generate(params, Ask(given, Sampling(max_tokens=tokens), Key(5)))
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", choices=["samples", "step"])
    parser.add_argument("--size", default="1M")
    parser.add_argument("--count", type=int, default=64, help="requests at once")
    parser.add_argument("--tokens", type=int, default=0, help="of a sample; by default 64, and 4 of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--single", action="store_true", help="one request for each sample of a step")
    options = parser.parse_args()
    size, rounds = options.size, options.rounds
    with server(size, options.threads) as (url, served):
        if options.work == "step":
            found = in_process("step", url, size, options.tokens or 4, rounds, options.single)
            print(f"{size}: a step of 64 x 8 in {statistics.median(found[1:]):.2f} s")
            return
        tokens = options.tokens or 64
        for adapted in (False, True):
            both = (
                own(served, options.count, tokens, rounds, adapted),
                in_process("samples", url, size, options.count, tokens, rounds, adapted),
            )
            speeds = [options.count * tokens / statistics.median(each[1:]) for each in both]
            what = "an adapter" if adapted else "the base"
            print(
                f"{size}, {what}: own {speeds[0]:,.0f} tokens/s, served {speeds[1]:,.0f}: {speeds[1] / speeds[0]:.2f}"
            )


if __name__ == "__main__":
    main()
